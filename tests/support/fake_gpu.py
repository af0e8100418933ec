"""Answer what the loops of Megatron-LM and Megatron-Bridge ask of a GPU, on a machine without one.

Our package and torch get true answers. Enter `megatron_on_cpu()` inside.
"""

import sys
import typing
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions


def pretend() -> None:
    """Pretend for the rest of the process that it has eight GPUs."""
    cuda: Any = torch.cuda

    def is_available() -> bool:
        name = sys._getframe(1).f_globals["__name__"]
        return not name.startswith(("padded_dispatch", "torch."))

    cuda.is_available, cuda.device_count = is_available, lambda: 8
    cuda.get_device_capability = lambda *device: (9, 0)
    cuda.is_current_stream_capturing = lambda: False
    gpu = SimpleNamespace(total_memory=2**36, major=9, minor=0, name="H", multi_processor_count=132)
    cuda.get_device_properties = lambda *device: gpu
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "set_device"):
        setattr(cuda, name, lambda *device: 0)
    cuda.max_memory_reserved = cuda.memory_allocated
    for kind in ("Float", "Int", "Long"):
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    torch.Tensor.pin_memory = lambda tensor, *device: tensor  # type: ignore[method-assign]
    init = dist.init_process_group
    dist.init_process_group = lambda **given: init(**(given | {"device_id": None}))
    typing.override = typing_extensions.override  # Python 3.12 has it.
