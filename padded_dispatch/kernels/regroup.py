"""Slots to packed rows and back, each other's transpose.

The received buffer is ordered (source, expert, slot) and has gaps; packed rows are ordered (expert,
source, slot) and have none. `ends_LS`, the running count of real rows in that order, places every
row of both: source s's rows of expert l begin where the ones before end. A program owns a few slots
of one (source, expert), reads or writes real rows only, and every element has one writer.

Rows are moved in blocks of whole rows, so that probabilities, rows of width one, take the same
kernel.
"""

import triton
import triton.language as tl
from torch import Tensor

from padded_dispatch.kernels.rows import columns


def pack_rows(slots_MCD: Tensor, ends_LS: Tensor) -> Tensor:
    """The real rows without the gaps; what lies behind them is not written.

    Args:
        slots_MCD: [S * L, C, D], the last dimension contiguous.
        ends_LS: contiguous int32.

    Returns:
        [S * L * C, D].

    Example: L = 2, S = 2, C = 2 and `ends = [[1, 3], [3, 4]]` (expert 0 has one row from source 0
    and two from source 1; expert 1 none and one) pack the slots `[[a, -], [-, -], [b, c], [d, -]]`
    to `[a, b, c, d]` and four rows of garbage.
    """
    num_buffers, capacity, width = slots_MCD.shape
    packed_ND = slots_MCD.new_empty(num_buffers * capacity, width)
    rows, block, warps = _tile(width)
    blocks = triton.cdiv(capacity, rows)
    _pack_rows_kernel[(num_buffers * blocks, triton.cdiv(width, block))](
        slots_MCD,
        ends_LS,
        packed_ND,
        slots_MCD.stride(0),
        slots_MCD.stride(1),
        *ends_LS.shape,
        capacity,
        width,
        blocks,
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
    )
    return packed_ND


@triton.jit
def _buffer(ends, num_local_experts, num_sources, blocks):
    """This program's buffer, where its rows begin among the packed ones, and how many are real."""
    m = tl.program_id(0) // blocks
    place = (m % num_local_experts) * num_sources + m // num_local_experts
    start = tl.load(ends + place - 1, mask=place > 0, other=0)
    return m, start, tl.load(ends + place) - start


@triton.jit
def _pack_rows_kernel(
    slots,
    ends,
    packed,
    buffer_stride,
    slot_stride,
    num_local_experts,
    num_sources,
    capacity,
    width,
    blocks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m, start, num_rows = _buffer(ends, num_local_experts, num_sources, blocks)
    c = ((tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    there = (c < num_rows) & (column < width)
    source = slots + m.to(tl.int64) * buffer_stride + c * slot_stride + column
    tl.store(packed + (start + c) * width + column, tl.load(source, mask=there), mask=there)


def unpack_rows(packed_ND: Tensor, ends_LS: Tensor, *, zeros: bool = True) -> Tensor:
    """Packed rows back in their slots, zeros in empty ones.

    Args:
        packed_ND: contiguous [N, D]; rows from `ends_LS[-1, -1]` on are not read.
        ends_LS: contiguous int32; N is a multiple of its elements.
        zeros: False leaves empty slots as they are.

    Returns:
        [S * L, C, D] with C = N / (S * L).

    Example: the one of `pack_rows`, backwards, with 0 where it has `-`.
    """
    num_buffers, width = ends_LS.numel(), packed_ND.shape[1]
    capacity = packed_ND.shape[0] // num_buffers
    slots_MCD = packed_ND.new_empty(num_buffers, capacity, width)
    rows, block, warps = _tile(width)
    blocks = triton.cdiv(capacity, rows)
    _unpack_rows_kernel[(num_buffers * blocks, triton.cdiv(width, block))](
        packed_ND,
        ends_LS,
        slots_MCD,
        *ends_LS.shape,
        capacity,
        width,
        blocks,
        ZEROS=zeros,
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
    )
    return slots_MCD


@triton.jit
def _unpack_rows_kernel(
    packed,
    ends,
    slots,
    num_local_experts,
    num_sources,
    capacity,
    width,
    blocks,
    ZEROS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m, start, num_rows = _buffer(ends, num_local_experts, num_sources, blocks)
    c = ((tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    there = (c < num_rows) & (column < width)
    row = tl.load(packed + (start + c) * width + column, mask=there, other=0)
    target = slots + (m.to(tl.int64) * capacity + c) * width + column
    tl.store(target, row, mask=(c < capacity) & (column < width) if ZEROS else there)


def _tile(width: int) -> tuple[int, int, int]:
    """Rows and columns of a program, and its warps."""
    block = columns(width)
    rows = max(1, min(1024, 8192 // block))
    return rows, block, max(1, min(8, rows * block // 256))
