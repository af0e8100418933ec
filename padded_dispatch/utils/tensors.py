"""Dense tensors, the only ones that kernels can read, and what an error shows of other values."""

from typing import Any

import torch
from torch import Tensor


def kind_of(value: Any) -> object:
    """Return shape, dtype and kind of device of a dense tensor, or the type of another value.

    Ranks compare it: what only one of them was given wrong must raise on all, so nothing else is
    read of it before.
    """
    if is_dense(value):
        return tuple(value.shape), value.dtype, value.device.type
    if isinstance(value, Tensor):
        return f"{'nested' if value.is_nested else value.layout} tensor"
    return type(value).__name__


def is_dense(value: Any) -> bool:
    """Return whether a value is a tensor, and neither sparse nor nested."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested
