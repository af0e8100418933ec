"""Run Megatron-Core on a CPU, for tests and small runs. The GPU path does not use this module.

Megatron-Core 0.16.1 to 0.20 asks for the current CUDA device, for CUDA streams and for the CUDA
random state in places where a CPU would do as well. Inside `megatron_on_cpu()` tensors that are
meant for "cuda" are made on the CPU, streams do nothing, the CPU's generator stands in for CUDA's,
and tensors have the names of types that Megatron's optimizer accepts.

Three things still need a GPU: Transformer Engine's layers (use the local spec with
`moe_grouped_gemm=False`); Megatron's distributed checkpoints; tensor parallelism in a whole model,
because MoE layers train under it with sequence parallelism only, which the local layer norm
rejects.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from padded_dispatch.config import require
from padded_dispatch.utils.patches import Patches

_CPU = torch.device("cpu")


class _Stream:
    """A stand-in for CUDA streams and events, whose methods return an event of now.

    They do nothing else: CPU work is finished.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.record()

    def record(self, *args: object) -> None:
        """Take now as the time of this event."""
        self._recorded_s = time.perf_counter()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: _Stream()

    def elapsed_time(self, end: "_Stream") -> float:
        """Return the milliseconds between two recorded events; text generation reports them."""
        return 1e3 * (end._recorded_s - self._recorded_s)


class _CudaMeansCpu(TorchFunctionMode):
    """A mode in which tensors that are meant for "cuda" are made on the CPU."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.to and _is_cuda(*args[1:2]):
            args = args[0], _CPU, *args[2:]
        return func(*args, **kwargs)


def _is_cuda(value: object = None) -> bool:
    """Return whether a value is a CUDA device, its name or its number."""
    return isinstance(value, int | str | torch.device) and torch.device(value).type == "cuda"


def _type_on_gpus(tensor: torch.Tensor, *to: Any, **how: Any) -> Any:
    """Return the name of a tensor's type on a GPU; Megatron's optimizer accepts no others."""
    if to or how:
        return _type(tensor, *to, **how)
    names = {torch.float16: "HalfTensor", torch.bfloat16: "BFloat16Tensor"}
    return f"torch.cuda.{names.get(tensor.dtype, 'FloatTensor')}"


_type = torch.Tensor.type


def check_device() -> None:
    """Raise if Megatron can run on no device here.

    Raises:
        ValueError: names `megatron_on_cpu`.
    """
    require(
        torch.cuda.is_available() or torch.cuda.Stream is _Stream,  # In `megatron_on_cpu()`.
        "PyTorch",
        "none",
        "see a GPU",
        "to run Megatron on a CPU, build the model and train inside `with megatron_on_cpu():` from "
        "padded_dispatch.megatron",
    )


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Run Megatron-Core on this process's CPU inside a `with` block.

    Enter the block before `parallel_state` and the model are built; leave it after their last use.
    """
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_token_prediction, transformer_block
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from padded_dispatch.megatron.compat import found

    replacements = (
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Stream),
        (torch.Tensor, "type", _type_on_gpus),
        (torch.cuda, "stream", lambda stream: nullcontext()),
        (torch.cuda, "current_stream", _Stream),
        (torch.cuda, "default_stream", _Stream),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state()),
        (torch.cuda, "set_rng_state", lambda state, device=None: torch.set_rng_state(state)),
        (random, "_get_cuda_rng_state", lambda **kwargs: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, **kwargs: torch.set_rng_state(state)),
        # Transformer Engine's GEMM takes CUDA tensors only. Without Transformer Engine the name is
        # missing, and 0.16.1's router_gating_linear raises a NameError.
        (moe_utils, "te_general_gemm", None),
        # The norm after the last layer. Layer specs do not name it; Megatron takes Transformer
        # Engine's if that is installed.
        (transformer_block, "LayerNormImpl", WrappedTorchNorm),
        (found("models.hybrid.hybrid_block"), "TENorm", WrappedTorchNorm),
        # It warns whenever a draw from the "CUDA" generator changes the CPU's.
        (logging.getLogger(random.__name__), "disabled", True),
        # 0.20 tests for classes that are no classes without Transformer Engine.
        (multi_token_prediction, "is_inference_column_parallel_linear", lambda module: False),
    )
    # Megatron compiles some functions of a few lines; a laptop may have no C++ compiler.
    with Patches() as patches, _CudaMeansCpu(), torch.compiler.set_stance("force_eager"):
        for owner, name, value in replacements:
            if owner is not None:  # 0.16 and 0.17 have no hybrid stack.
                patches.set(owner, name, value)
        yield
