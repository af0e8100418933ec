"""What Megatron-Core needs to run without a GPU. The GPU path never comes here.

Megatron-Core 0.16.1 to 0.19.0 asks for "the current CUDA device", its streams and its random
state in places where a CPU would do as well. Inside `megatron_on_cpu()` the CPU answers: tensors
meant for "cuda" are made on the CPU, streams do nothing, since all work is done when a call
returns, and the CUDA generator is the CPU's, so that Megatron's own random state tracker and
recomputation keep their meaning. Leaving the block puts everything back.

What still needs a GPU: Transformer Engine's layers (use the local spec, `moe_grouped_gemm=False`),
Megatron's optimizer and its distributed checkpoints, and in a whole model tensor parallelism, which
MoE layers only train with sequence parallelism, and the local layer norm refuses that.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer import transformer_block
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_MISSING = object()


class _Stream:
    """Stands in for a CUDA stream or event: on a CPU there is nothing to wait for."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: object) -> None:
        """Nothing to wait for."""

    def record_event(self) -> "_Stream":
        """An event that has happened."""
        return _Stream()

    def synchronize(self) -> None:
        """Nothing to wait for."""


@contextmanager
def _stream(stream: object) -> Iterator[None]:
    yield


class _CudaMeansCpu(TorchFunctionMode):
    """Makes on the CPU what code asks to be made on "cuda"."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **kwargs)


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Let Megatron-Core run on this process's CPU inside a `with` block.

    Enter it before `parallel_state` and the model are built, and leave it after their last use.
    """
    replacements = [
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "stream", _stream),
        (torch.cuda, "current_stream", _Stream),
        (torch.cuda, "default_stream", _Stream),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state()),
        (torch.cuda, "set_rng_state", lambda state, device=None: torch.set_rng_state(state)),
        (random, "_get_cuda_rng_state", lambda **kwargs: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, **kwargs: torch.set_rng_state(state)),
        # Transformer Engine's GEMM takes CUDA tensors only; where it is not installed, 0.16.1's
        # router_gating_linear stumbles over the missing name.
        (moe_utils, "te_general_gemm", None),
        # The norm behind the last layer, which specs of layers do not name: Transformer Engine's
        # where it is installed.
        (transformer_block, "LayerNormImpl", WrappedTorchNorm),
        # It warns whenever drawing from the "CUDA" generator changes the CPU's.
        (logging.getLogger(random.__name__), "disabled", True),
    ]
    with ExitStack() as stack:
        for owner, name, value in replacements:
            stack.enter_context(_replaced(owner, name, value))
        stack.enter_context(_CudaMeansCpu())
        # Megatron compiles some functions of a few lines; a laptop may have no C++ compiler.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
