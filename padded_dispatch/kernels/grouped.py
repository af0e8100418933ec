"""Gradients of a bias per expert, and of the probability that scales it, over packed rows.

No grid follows the rows that there is room for: `sum_rows` has programs for experts and columns,
`launch` is for programs that take blocks of rows in turn. Every element has one writer and is
summed in an order that depends on shapes and offsets alone.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from padded_dispatch.kernels import Segments
from padded_dispatch.kernels.gemm import multiprocessors

# Of four warps, for each multiprocessor, which runs at most 16 at a time: so none idles early.
_PROGRAMS = 32


@functools.cache
def launch(device: torch.device, width: int, num_experts: int) -> tuple[tuple[int], dict[str, int]]:
    """Return grid and constants of a kernel whose programs take blocks of rows in turn.

    A program of four warps has `ROWS` rows and `BLOCK` columns at a time, 2048 elements at most.
    """
    block = min(1024, triton.next_power_of_2(width))
    constants = {
        "EXPERTS": triton.next_power_of_2(num_experts),
        "ROWS": max(1, min(128, 2048 // block)),
        "BLOCK": block,
        "BLOCKS": triton.cdiv(width, block),
    }
    return (multiprocessors(device) * (_PROGRAMS if device.type == "cuda" else 1),), constants


@triton.jit
def expert_of(row, offsets, num_sources, num_experts, EXPERTS: tl.constexpr):
    """Return the expert of each row: the number of experts that end at it or before."""
    expert = tl.arange(0, EXPERTS)
    valid = expert < num_experts
    end = tl.load(offsets + (expert + 1) * num_sources, mask=valid, other=2147483647)
    return tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1)


def sum_rows(rows: Tensor, weights_M: Tensor | None, segments: Segments, *, stored: bool) -> Tensor:
    """Sum each expert's rows, weighted if there are weights.

    Args:
        rows: contiguous, as wide as O.
        weights_M: stored, contiguous.
        segments: where the rows of each expert lie.
        stored: whether `rows` are stored, or loose.

    Returns:
        [L, O], added in fp32 and rounded to the dtype of `rows`; zeros for an expert without rows.

    Example: the loose rows `[[1], [2], [3]]`, `weights = [nan, 1, 1, .5]` and `offsets = [1, 2, 2,
    4]` of three experts give `[[1], [0], [3.5]]`.
    """
    width, num_experts = rows.shape[1], segments.num_experts
    sums_LO = rows.new_empty(num_experts, width)
    block = 64  # Narrow, so that even few experts make many programs.
    _sum_rows_kernel[(num_experts, triton.cdiv(width, block))](
        rows,
        weights_M,
        segments.offsets,
        segments.num_sources,
        sums_LO,
        width,
        STORED=stored,
        ROWS=128,
        BLOCK=block,
    )
    return sums_LO


@triton.jit
def _sum_rows_kernel(
    rows,
    weights,
    offsets,
    num_sources,
    sums,
    width,
    STORED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    start = tl.load(offsets + expert * num_sources)
    end = tl.load(offsets + (expert + 1) * num_sources)
    rows_first = 0 if STORED else tl.load(offsets)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in tl.range(start, end, ROWS):
        n = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        valid = (n < end) & (column < width)
        place = rows + (n - rows_first) * width + column
        value = tl.load(place, mask=valid, other=0).to(tl.float32)
        if weights is not None:
            value *= tl.load(weights + n, mask=n < end, other=0).to(tl.float32)
        total += value
    found = tl.sum(total, 0)[None, :].to(sums.dtype.element_ty)
    tl.store(sums + expert * width + column, found, mask=column < width)


def dot_rows(rows_NO: Tensor, vectors_LO: Tensor, segments: Segments) -> Tensor:
    """Multiply every expert's rows by its vector: `rows @ vectors[l]`.

    Args:
        rows_NO: loose, contiguous.
        vectors_LO: contiguous.
        segments: where the rows of each expert lie.

    Returns:
        Loose [N], fp32; rows outside of the offsets are not written.

    Example: the loose rows `[1, 2]` and `[3, 4]`, `vectors = [[1, 0], [0, 2]]` and `offsets = [5,
    6, 7]` give `[1, 8]`.
    """
    width = rows_NO.shape[1]
    dots_N = rows_NO.new_empty(segments.num_rows, dtype=torch.float32)
    grid, constants = launch(rows_NO.device, width, segments.num_experts)
    _dot_rows_kernel[grid](
        rows_NO,
        vectors_LO,
        segments.offsets,
        segments.num_sources,
        dots_N,
        segments.num_experts,
        width,
        **constants,
    )
    return dots_N


@triton.jit
def _dot_rows_kernel(
    rows,
    vectors,
    offsets,
    num_sources,
    dots,
    num_experts,
    width,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    base, end = tl.load(offsets), tl.load(offsets + num_experts * num_sources)
    for first in tl.range(base + tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        expert = expert_of(row, offsets, num_sources, num_experts, EXPERTS)[:, None]
        dot = tl.zeros((ROWS,), dtype=tl.float32)
        for block in range(BLOCKS):
            column = (block * BLOCK + tl.arange(0, BLOCK))[None, :]
            valid = (row < end)[:, None] & (column < width)
            place = rows + (row - base)[:, None] * width + column
            value = tl.load(place, mask=valid, other=0).to(tl.float32)
            vector = tl.load(vectors + expert * width + column, mask=valid, other=0).to(tl.float32)
            dot += tl.sum(value * vector, 1)
        tl.store(dots + row - base, dot, mask=row < end)
