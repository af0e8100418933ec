"""Tensors on the device that kernels run on: a GPU, or else the CPU in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from padded_dispatch.kernels import Segments, gemm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = pytest.mark.skipif(DEVICE == "cuda", reason="kernels run in tests/gpu")

few = settings(max_examples=15)  # The interpreter takes up to a tenth of a second for one.


@contextmanager
def small_tiles() -> Iterator[None]:
    """Let products have small tiles: the interpreter computes whole ones, however few the rows."""
    small = gemm.Tiles(rows=64, columns=32, inner=16, stages=2, warps=4)
    with patch.multiple(gemm, _TILES=small, gradient_tiles=lambda *given: small):
        yield


def here(array) -> Tensor:
    return torch.as_tensor(array).to(DEVICE)


def here_if_tensor(value: Any) -> Any:
    return here(value) if isinstance(value, Tensor) else value


def ints(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def addresses(*buffers: Tensor) -> Tensor:
    return torch.tensor([buffer.data_ptr() for buffer in buffers], device=DEVICE)


def equal(*pairs: tuple[Tensor, Tensor]) -> None:
    """Assert equal dtype, shape and bits of each pair, wherever it lies."""
    for got, expected in pairs:
        assert got.dtype == expected.dtype and got.shape == expected.shape
        assert torch.equal(got.cpu(), expected.cpu())


def segments_of(counts: list[int], *, base: int = 0, num_sources: int = 1) -> Segments:
    """Return where `counts` rows lie from `base` on, drawn to come from these sources.

    There is room for 5 more rows.
    """
    generator = torch.Generator().manual_seed(sum(counts) + num_sources)
    count_LS = torch.zeros(len(counts), num_sources, dtype=torch.int32)
    for count_S, count in zip(count_LS, counts, strict=True):
        count_S += torch.randint(num_sources, (count,), generator=generator).bincount(
            minlength=num_sources
        )
    offsets = torch.cat([torch.tensor([base]), base + count_LS.flatten().cumsum(0)])
    return Segments(
        offsets=here(offsets.int()),
        num_experts=len(counts),
        num_sources=num_sources,
        num_rows=sum(counts) + 5,
        num_expected=sum(counts),
    )


def in_store(rows: Tensor, base: int, spare: int = 3) -> Tensor:
    """Return a store whose rows from `base` on are these, and NaN before and behind."""
    store = rows.new_full((base + len(rows) + spare, *rows.shape[1:]), torch.nan)
    store[base : base + len(rows)] = rows
    return store


def operand(rows: Tensor, segments: Segments, stored: bool) -> Tensor:
    """Return rows as a stored or a loose operand on the device, NaN where no row is."""
    base = int(segments.offsets[0]) if stored else 0
    return here(in_store(rows, base, spare=segments.num_rows - len(rows) + (3 if stored else 0)))


def real(rows: Tensor, segments: Segments, stored: bool) -> Tensor:
    base, end = int(segments.offsets[0]), int(segments.offsets[-1])
    return rows[base:end] if stored else rows[: end - base]
