"""NVTX ranges: the names under which profilers show the stages of a layer.

The stages are select, plan, exchange and experts, and for cells dispatch and combine. Their ranges
are called `padded_dispatch.select` and so on; those of a backward pass, `padded_dispatch.experts
backward` and so on. `experts` holds the exchange of its pass. They appear in eager steps and while
a CUDA graph is captured. A replay runs no Python, so it has none. Without a profiler, NVTX's calls
return at once; a PyTorch without CUDA has no NVTX.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.cuda import nvtx

_Fn = TypeVar("_Fn", bound=Callable[..., object])


def nvtx_range(name: str) -> Callable[[_Fn], _Fn]:
    """Decorate a function so that profilers show its calls as ranges `padded_dispatch.NAME`."""
    has_nvtx = torch.backends.cuda.is_built()
    return nvtx.range(f"padded_dispatch.{name}") if has_nvtx else lambda fn: fn
