"""Names for the stages of a layer, as profilers show them: NVTX ranges.

select, plan, gather, exchange, regroup, experts and combine, each under `padded_dispatch.`, and
what a backward pass does for one of them as `gather backward` and so on. They are there in eager
steps and while a CUDA graph is captured; a replay runs no Python, and has none of its own. Without
a profiler, NVTX's calls return at once; a PyTorch without CUDA has no NVTX.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.cuda import nvtx

_P = ParamSpec("_P")
_R = TypeVar("_R")

_HAS_NVTX = torch.backends.cuda.is_built()


def nvtx_range(name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Show every call of the decorated function as a range `padded_dispatch.NAME`."""
    label = f"padded_dispatch.{name}"

    def decorate(fn: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(fn)
        def shown(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if not _HAS_NVTX or torch.compiler.is_compiling():
                return fn(*args, **kwargs)
            nvtx.range_push(label)
            try:
                return fn(*args, **kwargs)
            finally:
                nvtx.range_pop()

        return shown

    return decorate
