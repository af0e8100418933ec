"""Rows of experts in a store, for tests of kernels."""

import torch
from torch import Tensor

from padded_dispatch.kernels import Segments
from tests.support.device import here


def segments_of(
    counts: list[int], *, base: int = 0, num_sources: int = 1, spare: int = 5
) -> Segments:
    """Return where `counts` rows lie from `base` on, drawn to come from these sources.

    There is room for `spare` more rows.
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
        num_rows=sum(counts) + spare,
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
    """Return the real rows of a stored or loose tensor."""
    base, end = int(segments.offsets[0]), int(segments.offsets[-1])
    return rows[base:end] if stored else rows[: end - base]
