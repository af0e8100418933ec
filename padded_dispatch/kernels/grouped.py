"""A bias per expert over packed rows: add it, sum rows by expert, multiply rows by a vector.

Rows of expert l begin where those of the expert before end, which is read from the device. Every
element has one writer and is summed in an order that depends on shapes and offsets alone.

O: width of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def tile(width: int) -> tuple[int, int]:
    """Return the rows and columns of a program of four warps."""
    block = min(1024, triton.next_power_of_2(width))
    return max(1, min(128, 2048 // block)), block


def wide(rows: Tensor) -> tl.dtype:
    """Return the dtype that rows are computed in."""
    return tl.float64 if rows.dtype == torch.float64 else tl.float32


@triton.jit
def expert_of(row, offsets, num_experts, EXPERTS: tl.constexpr):
    """Return the expert of each row: the number of experts that end at it or before."""
    expert = tl.arange(0, EXPERTS)
    end = tl.load(offsets + expert, mask=expert < num_experts, other=2147483647)
    return tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1)


def add_bias(rows_NO: Tensor, bias_LO: Tensor, probs_N: Tensor, offsets_L: Tensor) -> None:
    """Add `prob * bias[l]` to every expert's rows, in place. All tensors must be contiguous.

    Example: `rows = [[1], [2], [3]]`, `bias = [[10], [20]]`, `probs = [1, 1, .5]` and
    `offsets = [1, 3]` leave `[[11], [22], [13]]`.
    """
    num_rows, width = rows_NO.shape
    rows, block = tile(width)
    _add_bias_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(width, block))](
        rows_NO,
        bias_LO,
        probs_N,
        offsets_L,
        offsets_L.shape[0],
        width,
        EXPERTS=triton.next_power_of_2(offsets_L.shape[0]),
        ROWS=rows,
        BLOCK=block,
        WIDE=wide(rows_NO),
    )


@triton.jit
def _add_bias_kernel(
    rows,
    bias,
    probs,
    offsets,
    num_experts,
    width,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    num_rows = tl.load(offsets + num_experts - 1)
    if tl.program_id(0) * ROWS < num_rows:
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        expert = expert_of(row, offsets, num_experts, EXPERTS)[:, None]
        n = row[:, None]
        column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
        valid = (n < num_rows) & (column < width)
        value = tl.load(rows + n * width + column, mask=valid, other=0).to(WIDE)
        added = tl.load(bias + expert * width + column, mask=valid, other=0).to(WIDE)
        prob = tl.load(probs + n, mask=n < num_rows, other=0).to(WIDE)
        value += prob * added
        tl.store(rows + n * width + column, value.to(rows.dtype.element_ty), mask=valid)


def sum_rows(rows_NO: Tensor, weights_N: Tensor | None, offsets_L: Tensor) -> Tensor:
    """Sum each expert's rows, weighted if there are weights. All tensors must be contiguous.

    Returns:
        [L, O] in the dtype of `rows_NO`; exact zeros for an expert without rows.

    Example: `rows = [[1], [2], [3]]`, `weights = [1, 1, .5]` and `offsets = [1, 1, 3]` give
    `[[1], [0], [3.5]]`.
    """
    width, num_experts = rows_NO.shape[1], offsets_L.shape[0]
    sums_LO = rows_NO.new_empty(num_experts, width)
    block = 64  # Narrow, so that even few experts make many programs.
    _sum_rows_kernel[(num_experts, triton.cdiv(width, block))](
        rows_NO, weights_N, offsets_L, sums_LO, width, ROWS=128, BLOCK=block, WIDE=wide(rows_NO)
    )
    return sums_LO


@triton.jit
def _sum_rows_kernel(
    rows, weights, offsets, sums, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    expert = tl.program_id(0)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    total = tl.zeros((ROWS, BLOCK), dtype=WIDE)
    first = start
    while first < end:  # Triton's interpreter (3.6) has no `for` to a limit from the device.
        n = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        valid = (n < end) & (column < width)
        value = tl.load(rows + n * width + column, mask=valid, other=0).to(WIDE)
        if weights is not None:
            value *= tl.load(weights + n, mask=n < end, other=0).to(WIDE)
        total += value
        first += ROWS
    found = tl.sum(total, 0)[None, :].to(sums.dtype.element_ty)
    tl.store(sums + expert * width + column, found, mask=column < width)


def dot_rows(rows_NO: Tensor, vectors_LO: Tensor, offsets_L: Tensor) -> Tensor:
    """Multiply every expert's rows by its vector: `rows @ vectors[l]`. All tensors are contiguous.

    Returns:
        [N], at least fp32; from `offsets_L[-1]` on not written.

    Example: `rows = [[1, 2], [3, 4]]`, `vectors = [[1, 0], [0, 2]]` and `offsets = [1, 2]` give
    `[1, 8]`.
    """
    num_rows, width = rows_NO.shape
    dtype = torch.promote_types(rows_NO.dtype, torch.float32)
    dots_N = torch.empty(num_rows, dtype=dtype, device=rows_NO.device)
    rows, block = tile(width)
    _dot_rows_kernel[(triton.cdiv(num_rows, rows),)](
        rows_NO,
        vectors_LO,
        offsets_L,
        dots_N,
        offsets_L.shape[0],
        width,
        EXPERTS=triton.next_power_of_2(offsets_L.shape[0]),
        ROWS=rows,
        BLOCK=block,
        BLOCKS=triton.cdiv(width, block),
        WIDE=wide(rows_NO),
    )
    return dots_N


@triton.jit
def _dot_rows_kernel(
    rows,
    vectors,
    offsets,
    dots,
    num_experts,
    width,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDE: tl.constexpr,
):
    num_rows = tl.load(offsets + num_experts - 1)
    if tl.program_id(0) * ROWS < num_rows:
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        expert = expert_of(row, offsets, num_experts, EXPERTS)[:, None]
        n = row[:, None]
        dot = tl.zeros((ROWS,), dtype=WIDE)
        for block in range(BLOCKS):
            column = (block * BLOCK + tl.arange(0, BLOCK))[None, :]
            valid = (n < num_rows) & (column < width)
            value = tl.load(rows + n * width + column, mask=valid, other=0).to(WIDE)
            vector = tl.load(vectors + expert * width + column, mask=valid, other=0).to(WIDE)
            dot += tl.sum(value * vector, 1)
        tl.store(dots + row, dot, mask=row < num_rows)
