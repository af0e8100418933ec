"""NVTX ranges: the names under which profilers show the stages of a layer.

They appear in eager steps and while a CUDA graph is captured; a replay runs no Python, so it has
none. Without a profiler, NVTX's calls return at once; a PyTorch without CUDA has no NVTX.
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
