"""Tensors on the device that kernels run on: a GPU, or else the CPU in Triton's interpreter."""

from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

few = settings(max_examples=15)  # The interpreter takes up to a tenth of a second for one.


def here(array) -> Tensor:
    """Copy an array or tensor to the device."""
    return torch.as_tensor(array).to(DEVICE)


def here_if_tensor(value: Any) -> Any:
    """Copy a tensor to the device; return anything else as it is."""
    return here(value) if isinstance(value, Tensor) else value


def ints(*values: object) -> Tensor:
    """Make an int32 tensor on the device."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def equal(*pairs: tuple[Tensor, Tensor]) -> None:
    """Assert equal dtype, shape and bits of each pair, wherever it lies."""
    for got, expected in pairs:
        assert got.dtype == expected.dtype and got.shape == expected.shape
        assert torch.equal(got.cpu(), expected.cpu())
