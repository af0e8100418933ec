"""Grouped products over packed rows: rows times weights, and gradients of weights.

`rows_times_weights` multiplies every expert's rows by that expert's matrix: both forward linears
and both gradients of rows. `rows_times_weights_at` stores each row of the product at an address of
its own, also on other GPUs. `add_weight_gradients` multiplies two blocks of rows of one expert, and
adds the product to an fp32 buffer; `weight_gradients` returns the same products rounded. Offsets
stay on the device. Rows behind the last one are never read into a result that is kept, and never
written.

The kernels are persistent: programs take tiles in turn, experts in ascending order. Of a small
weight all columns are taken before the next rows; of a large one, up to 16 tiles of rows before the
next columns, so that an expert of at most 2,048 rows has its weight read once. `row_tiles` finds
the tiles of the rows, once for all products with the same offsets.

Operands are read, and results written, by the tensor memory accelerator (TMA); sums, and rows with
addresses, are written by stores. An expert's rows end where its descriptor does, as in Triton's own
`triton.tools.ragged_tma` (MIT), whose idea and constants these descriptors take over: a tile that
crosses the last row reads zeros there, and does not write the others. Every element is summed by
one program in the order of the inner dimension: the result depends on the operands alone.
notebooks/results/LOG.md has times beside torch's products, and what was tried and left out.

I and O: width of an input and an output row of a linear. N: rows. L: experts.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from padded_dispatch.kernels import ROWS_OF_TILE, TILES_OF_GROUP

_TILES_AT_A_TIME = 32

_SMALL_WEIGHT = 12 * 2**20  # Bytes: a quarter of the L2 cache of an H200.
_FEW_ROWS = 384  # Of an expert, between the 256 and 512 that were measured.


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Launch parameters of a product; the defaults are the fastest on an H200.

    Attributes:
        rows: rows of a tile of the result.
        columns: columns of a tile of the result.
        inner: elements of the inner dimension that are read at a time.
        stages: tiles of the operands that are read ahead.
        warps: warps of a program.
        programs: programs on a multiprocessor, of gradients of weights.
    """

    rows: int = ROWS_OF_TILE
    columns: int = 256
    inner: int = 64
    stages: int = 4
    warps: int = 8
    programs: int = 1


_TILES = Tiles()


def rows_times_weights(
    rows_NI: Tensor,
    weight_LOI: Tensor,
    offsets_L: Tensor,
    *,
    table: Tensor | None = None,
    tiles: Tiles = _TILES,
) -> Tensor:
    """Compute `rows @ weight[l].T` for every expert's rows: [N, I] to [N, O].

    Args:
        rows_NI: contiguous bf16 or fp16; I is a multiple of 8.
        weight_LOI: same dtype, contiguous or the transpose (1, 2) of a contiguous one; O is a
            multiple of 8.
        offsets_L: contiguous int32, where the rows of each expert end.
        table: `row_tiles` of these offsets and number of rows; None makes it.
        tiles: launch parameters.

    Example: the rows `[1, 2]` and `[3, 4]` of two experts, `offsets = [1, 2]`, and their weights
    `[[1, 0]]` and `[[0, 1]]`, of one output each, give `[[1], [4]]`.
    """
    out_NO = rows_NI.new_empty(rows_NI.shape[0], weight_LOI.shape[1])
    operands, launch = _launch(rows_NI, weight_LOI, tiles)
    if table is None:
        table = row_tiles(offsets_L, len(rows_NI), tiles.rows)
    _rows_times_weights_kernel[(_multiprocessors(rows_NI.device),)](
        *operands,
        _packed(out_NO, tiles.rows, tiles.columns // 2),
        offsets_L,
        table,
        rows_NI.shape[1],
        triton.cdiv(weight_LOI.shape[1], tiles.columns),
        **launch,
    )
    return out_NO


def rows_times_weights_at(
    rows_NI: Tensor,
    weight_LOI: Tensor,
    offsets_L: Tensor,
    at_N: Tensor,
    *,
    bias_LO: Tensor | None = None,
    probs_N: Tensor | None = None,
    table: Tensor | None = None,
    tiles: Tiles = _TILES,
) -> None:
    """Store every row of `rows_times_weights` at an address of its own.

    The arguments are those of `rows_times_weights`, and:
        at_N: int64, the address of each result, a multiple of 16: on this GPU or on one that it
            can access. Those behind the last row are not read.
        bias_LO: contiguous, same dtype; adds `prob * bias[l]` to the rounded product.
        probs_N: contiguous, floating point; required with a bias.

    Example: the rows, weights and offsets above, and the addresses of the second and the first row
    of a buffer, leave `[[4], [1]]` in it.
    """
    operands, launch = _launch(rows_NI, weight_LOI, tiles)
    if table is None:
        table = row_tiles(offsets_L, len(rows_NI), tiles.rows)
    width_in, width_out = rows_NI.shape[1], weight_LOI.shape[1]
    _rows_times_weights_at_kernel[(_multiprocessors(rows_NI.device),)](
        *operands,
        bias_LO,
        probs_N,
        at_N,
        offsets_L,
        table,
        width_in,
        width_out,
        triton.cdiv(width_out, tiles.columns),
        **launch,
    )


def _launch(
    rows_NI: Tensor, weight_LOI: Tensor, tiles: Tiles
) -> tuple[tuple[TensorDescriptor, TensorDescriptor], dict[str, Any]]:
    """Return descriptors of both operands, and the other launch parameters of a product."""
    # A descriptor needs the contiguous dimension last.
    transposed = not weight_LOI.is_contiguous()
    weight = weight_LOI.transpose(1, 2) if transposed else weight_LOI
    block = [tiles.inner, tiles.columns] if transposed else [tiles.columns, tiles.inner]
    operands = (
        _packed(rows_NI, tiles.rows, tiles.inner),
        TensorDescriptor.from_tensor(weight, [1, *block]),
    )
    return operands, {
        "TRANSPOSED": transposed,
        "DOWN": weight[0].nbytes > _SMALL_WEIGHT,
        "ROWS": tiles.rows,
        "COLUMNS": tiles.columns,
        "INNER": tiles.inner,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def _packed(rows_NI: Tensor, num_rows: int, columns: int) -> TensorDescriptor:
    """Describe packed rows for tiles that end at an expert's last row, see `_place`."""
    width = rows_NI.shape[1]
    most = 2**31 - 2**16
    shape = [most, most, 2**30, width]
    return TensorDescriptor(
        rows_NI, shape, [2**34 - width, width, width, 1], [1, 1, num_rows, columns]
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # Triton's interpreter.
    return torch.cuda.get_device_properties(device).multi_processor_count


def row_tiles(offsets_L: Tensor, num_rows: int, tile_rows: int = ROWS_OF_TILE) -> Tensor:
    """List the tiles of rows: int32 [1 + most tiles, 4], see `padded_dispatch.experts.grouped`.

    Example: `offsets = [3, 3, 7]` and tiles of 2 rows give the lines `[4, 0, 0, 0]`,
    `[0, 0, 2, 0]` twice, and `[2, 2, 2, 3]` twice.
    """
    num_experts = offsets_L.shape[0]
    most = num_rows // tile_rows + num_experts
    table = offsets_L.new_empty(1 + most, 4)
    _row_tiles_kernel[(triton.cdiv(most, _TILES_AT_A_TIME),)](
        offsets_L,
        table,
        num_experts,
        ROWS=tile_rows,
        GROUP=TILES_OF_GROUP,
        EXPERTS=triton.next_power_of_2(num_experts),
        TILES=_TILES_AT_A_TIME,
        num_warps=4,
    )
    return table


@triton.jit
def _row_tiles_kernel(
    offsets,
    table,
    num_experts,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILES: tl.constexpr,
):
    e = tl.arange(0, EXPERTS)
    valid = e < num_experts
    start = tl.load(offsets + e - 1, mask=valid & (e > 0), other=0)
    end = tl.load(offsets + e, mask=valid, other=0)
    num_tiles = tl.where(valid, tl.cdiv(end - start, ROWS), 0)
    last = tl.cumsum(num_tiles, 0)
    total = tl.sum(num_tiles, 0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    # The expert of a tile is the number of experts whose tiles end at it or before.
    expert = tl.sum(((last[None, :] <= tile[:, None]) & valid[None, :]).to(tl.int32), 1)
    mine = e[None, :] == expert[:, None]
    last_tile = tl.sum(tl.where(mine, last[None, :], 0), 1)
    first_tile = last_tile - tl.sum(tl.where(mine, num_tiles[None, :], 0), 1)
    first_row = tl.sum(tl.where(mine, start[None, :], 0), 1)
    before = (tile - first_tile) // GROUP * GROUP
    there = tile < total
    line = table + 4 * (1 + tile)
    tl.store(line, expert, mask=there)
    tl.store(line + 1, first_tile + before, mask=there)
    tl.store(line + 2, tl.minimum(last_tile - first_tile - before, GROUP), mask=there)
    tl.store(line + 3, first_row + before * ROWS, mask=there)
    if tl.program_id(0) == 0:
        tl.store(table + tl.arange(0, 4), tl.where(tl.arange(0, 4) == 0, total, 0))


@triton.jit
def _rows_times_weights_kernel(
    rows,
    weight,
    out,
    offsets,
    table,
    width_in,
    tiles_across,
    TRANSPOSED: tl.constexpr,
    DOWN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    num_tiles = tl.load(table) * tiles_across
    half: tl.constexpr = COLUMNS // 2
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        expert, row, column = _tile(tile, table, tiles_across, DOWN, ROWS, COLUMNS)
        end = tl.load(offsets + expert)
        sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for inner in range(0, width_in, INNER):
            a, b = _operands(
                rows, weight, expert, row, end, column, inner, TRANSPOSED, ROWS, COLUMNS, INNER
            )
            sums = tl.dot(a, b, sums)
        # In two halves: the buffer through which a tile is stored takes half the shared memory,
        # which leaves room for a fourth stage.
        left, right = _halves(sums, ROWS, COLUMNS)
        _store_rows(out, left, row, end, column, ROWS, half)
        _store_rows(out, right, row, end, column + half, ROWS, half)


@triton.jit
def _rows_times_weights_at_kernel(
    rows,
    weight,
    bias,
    probs,
    at,
    offsets,
    table,
    width_in,
    width_out,
    tiles_across,
    TRANSPOSED: tl.constexpr,
    DOWN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    num_tiles = tl.load(table) * tiles_across
    half: tl.constexpr = COLUMNS // 2
    dtype: tl.constexpr = rows.dtype
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        expert, row, column = _tile(tile, table, tiles_across, DOWN, ROWS, COLUMNS)
        end = tl.load(offsets + expert)
        sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for inner in range(0, width_in, INNER):
            a, b = _operands(
                rows, weight, expert, row, end, column, inner, TRANSPOSED, ROWS, COLUMNS, INNER
            )
            sums = tl.dot(a, b, sums)
        n = row + tl.arange(0, ROWS)
        place = tl.load(at + n, mask=n < end, other=0).to(tl.pointer_type(dtype))
        place = tl.multiple_of(place, [16])[:, None]
        here = (n < end)[:, None]
        o = column + tl.arange(0, half)
        left, right = _halves(sums, ROWS, COLUMNS)
        if bias is not None:
            prob = tl.load(probs + n, mask=n < end, other=0).to(tl.float32)
            of_expert = bias + expert.to(tl.int64) * width_out
            left = _add_bias(left, of_expert, prob, o, width_out, dtype)
            right = _add_bias(right, of_expert, prob, o + half, width_out, dtype)
        first, second = o[None, :], (o + half)[None, :]
        tl.store(place + first, left.to(dtype), mask=here & (first < width_out))
        tl.store(place + second, right.to(dtype), mask=here & (second < width_out))


@triton.jit
def _add_bias(sums, bias, prob, o, width_out, dtype: tl.constexpr):
    """Add as `kernels.grouped.add_bias` does: to rounded sums."""
    added = tl.load(bias + o, mask=o < width_out, other=0).to(tl.float32)
    return sums.to(dtype).to(tl.float32) + prob[:, None] * added[None, :]


@triton.jit
def _tile(tile, table, tiles_across, DOWN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the expert of a tile, its first row and its first column."""
    line = table + 4 * (1 + tile // tiles_across)
    of_group = tile - tl.load(line + 1) * tiles_across
    if DOWN:
        group = tl.load(line + 2)
        down, across = of_group % group, of_group // group
    else:
        down, across = of_group // tiles_across, of_group % tiles_across
    return tl.load(line), tl.load(line + 3) + down * ROWS, across * COLUMNS


@triton.jit
def _operands(
    rows,
    weight,
    expert,
    row,
    end,
    column,
    inner,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    a = rows.load(_place(row, end, inner)).reshape(ROWS, INNER)
    if TRANSPOSED:
        b = weight.load([expert, inner, column]).reshape(INNER, COLUMNS)
    else:
        b = weight.load([expert, column, inner]).reshape(COLUMNS, INNER).T
    return a, b


@triton.jit
def _place(row, end, column):
    """Return where `row` is in a descriptor of packed rows that end at `end`.

    Its elements (F, end, i, column), F = 2**30, are those of row `i + end - F`: F times its first
    stride, 2**34 elements less a row, is F rows back, modulo 2**64 bytes. i ends at F, so that rows
    from `end` on are out of bounds: read as zeros, and never written.
    """
    return 1 << 30, end, (1 << 30) + row - end, column


@triton.jit
def _halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _store_rows(out, sums, row, end, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    out.store(_place(row, end, column), sums.to(out.dtype).reshape(1, 1, ROWS, COLUMNS))


def add_weight_gradients(
    grad_NO: Tensor,
    rows_NI: Tensor,
    offsets_L: Tensor,
    sums_LOI: Tensor,
    *,
    tiles: Tiles | None = None,
) -> None:
    """Add every expert's `grad.T @ rows` to its sums, in place.

    Args:
        grad_NO: contiguous bf16 or fp16; O is a multiple of 8.
        rows_NI: contiguous, same dtype; I is a multiple of 8.
        offsets_L: contiguous int32, where the rows of each expert end.
        sums_LOI: contiguous fp32.
        tiles: launch parameters; None are those of `gradient_tiles`.

    Example: `grad = [[1], [2], [3]]`, `rows = [[1], [10], [100]]` and `offsets = [2, 2, 3]` add
    `[[[21]], [[0]], [[300]]]`.
    """
    _multiply_rows(grad_NO, rows_NI, offsets_L, sums_LOI, True, tiles)


def weight_gradients(
    grad_NO: Tensor, rows_NI: Tensor, offsets_L: Tensor, *, tiles: Tiles | None = None
) -> Tensor:
    """Compute every expert's `grad.T @ rows`, rounded once: [L, O, I] in the dtype of the rows.

    The arguments are those of `add_weight_gradients`.
    """
    shape = offsets_L.shape[0], grad_NO.shape[1], rows_NI.shape[1]
    out_LOI = rows_NI.new_empty(shape)
    _multiply_rows(grad_NO, rows_NI, offsets_L, out_LOI, False, tiles)
    return out_LOI


def gradient_tiles(num_rows: int, num_experts: int, adds: bool) -> Tiles:
    """Return the fastest launch parameters of gradients of weights.

    Two small programs on a multiprocessor compute beside each other's stores, which few rows of an
    expert are soon due. Sums that are read take the shared memory of the fourth stage.
    """
    if adds:
        return Tiles(stages=3)
    if num_rows <= _FEW_ROWS * num_experts:
        return Tiles(columns=128, stages=3, warps=4, programs=2)
    return _TILES


def _multiply_rows(
    grad_NO: Tensor,
    rows_NI: Tensor,
    offsets_L: Tensor,
    out_LOI: Tensor,
    adds: bool,
    tiles: Tiles | None,
) -> None:
    num_experts, width_out, width_in = out_LOI.shape
    if tiles is None:
        tiles = gradient_tiles(rows_NI.shape[0], num_experts, adds)
    half = [1, tiles.rows, tiles.columns // 2]
    num_programs = tiles.programs * _multiprocessors(rows_NI.device)
    _weight_gradients_kernel[(num_programs,)](
        _packed(grad_NO, tiles.inner, tiles.rows),
        _packed(rows_NI, tiles.inner, tiles.columns),
        out_LOI if adds else TensorDescriptor.from_tensor(out_LOI, half),
        offsets_L,
        num_experts,
        width_out,
        width_in,
        triton.cdiv(width_out, tiles.rows),
        triton.cdiv(width_in, tiles.columns),
        ADDS=adds,
        EXPERTS=triton.next_power_of_2(num_experts),
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        INNER=tiles.inner,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


@triton.jit
def _weight_gradients_kernel(
    grad,
    rows,
    out,
    offsets,
    num_experts,
    width_out,
    width_in,
    tiles_down,
    tiles_across,
    ADDS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    of_expert = tiles_down * tiles_across
    # How many blocks of rows the tiles of this program have. No rows are one block of zeros.
    e = tl.arange(0, EXPERTS)
    valid = e < num_experts
    starts = tl.load(offsets + e - 1, mask=valid & (e > 0), other=0)
    ends = tl.load(offsets + e, mask=valid, other=0)
    before = (e * of_expert + num_programs - 1 - program) // num_programs
    until = ((e + 1) * of_expert + num_programs - 1 - program) // num_programs
    blocks = (until - before) * tl.maximum(tl.cdiv(ends - starts, INNER), 1)
    num_steps = tl.sum(tl.where(valid, blocks, 0), 0)

    # One loop over all of them, so that the next tile is read while one is stored. Triton does not
    # make it of two loops whose inner one has another length for each expert.
    half: tl.constexpr = COLUMNS // 2
    tile = program - num_programs
    block, num_blocks = -1, 0
    expert, start, end, down, across = 0, 0, 0, 0, 0
    product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(0, num_steps):
        block = tl.where(block == num_blocks - 1, 0, block + 1)
        if block == 0:
            tile += num_programs
            expert = tile // of_expert
            down = tile // tiles_across % tiles_down * ROWS
            across = tile % tiles_across * COLUMNS
            start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
            end = tl.load(offsets + expert)
            num_blocks = tl.maximum(tl.cdiv(end - start, INNER), 1)
        n = start + block * INNER
        g = grad.load(_place(n, end, down))
        x = rows.load(_place(n, end, across))
        product = tl.dot(g.reshape(INNER, ROWS).T, x.reshape(INNER, COLUMNS), product)
        if block == num_blocks - 1:
            # In two halves, see above; and the registers cannot hold a whole tile of sums, too.
            left, right = _halves(product, ROWS, COLUMNS)
            if ADDS:
                # Both are read before one is written, so that the second does not wait.
                o = (down + tl.arange(0, ROWS))[:, None]
                i = (across + tl.arange(0, half))[None, :]
                at = out + (expert.to(tl.int64) * width_out + o) * width_in + i
                on_left = (o < width_out) & (i < width_in)
                on_right = (o < width_out) & (i + half < width_in)
                left += tl.load(at, mask=on_left, other=0)
                right += tl.load(at + half, mask=on_right, other=0)
                tl.store(at, left, mask=on_left)
                tl.store(at + half, right, mask=on_right)
            else:
                shape: tl.constexpr = (1, ROWS, half)
                out.store([expert, down, across], left.to(out.dtype).reshape(shape))
                out.store([expert, down, across + half], right.to(out.dtype).reshape(shape))
            product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
