"""NVTX ranges: the names under which profilers show the stages of a layer.

The stages are select, plan, exchange and experts, and for cells dispatch and combine. Their ranges
are called `padded_dispatch.select` and so on; those of a backward pass, `padded_dispatch.experts
backward` and so on. `experts` holds the exchange of its pass. They appear in eager steps and while
a CUDA graph is captured. A replay runs no Python, so it has none. Without a profiler, NVTX's calls
return at once; a PyTorch without CUDA has no NVTX.
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
    """Decorate a function so that profilers show its calls as ranges `padded_dispatch.NAME`."""
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
