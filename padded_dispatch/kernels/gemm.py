"""Grouped products over packed rows: rows times weights, and gradients of weights.

`rows_times_weights` multiplies every expert's rows by that expert's matrix: both forward linears
and both gradients of rows. `add_weight_gradients` multiplies two blocks of rows of one expert, and
adds the product to an fp32 buffer: no bf16 gradient is rounded, written and read again. Offsets
stay on the device. Rows behind the last one are never read into a result that is kept, and never
written. `weight_gradients` returns the same products rounded, where nothing is added.

The kernels are persistent: programs take tiles in turn, experts in ascending order. Gradients may
leave `spare` of them out, for other kernels. Of a small weight all columns are taken before the
next rows. A large one would leave the cache meanwhile, so up to 16 tiles of rows are taken
before the next columns: an expert of at most 2,048 rows has its weight read once. (16 of 128 rows
beside 8 of 256 columns are about square, and as many tiles as there are multiprocessors.)
`row_tiles` finds the tiles of the rows, once for all products with the same offsets.

Operands are read by the tensor memory accelerator (TMA). A tile that crosses an expert's last row
is computed whole, and its other rows are not stored. Every element is summed by one program in the
order of the inner dimension: the result depends on the operands and the tile sizes alone.

Rows times weights on an H200, microseconds of fc1, fc2, and the gradients of fc2's and fc1's rows,
bf16, random routing, beside `torch._grouped_mm`:

                                        this kernel          torch
    Qwen3, 128 experts of 256 rows    380 227 219 385    414 307 241 461
    Qwen3, 64 experts of 512 rows     333 188 173 345    359 220 198 371
    Qwen3, 16 experts of 2,048 rows   306 176 147 319    309 207 179 337
    GPT-OSS, 16 experts of 1,024      828 453 516 933    954 544 511 966

Tried and left out, Qwen3 with 512 rows: the end of a tile not overlapped with the beginning of the
next one (348 212 180 414); TMA stores of whole tiles beside masked stores of the others, which
Triton 3.6 does not overlap (347 210 180 374), and which take more shared memory than there is if
they are to be; 3 stages and whole tiles at the end (340 193 176 380); tiles of 64 x 256
(392 220 201 425), of 128 x 128 with 128 elements of the inner dimension (388 236 201 398) and with
two programs on a multiprocessor (474 290 253 494).

Weight gradients of fc1 and fc2, added to fp32, beside `torch._grouped_mm` and an addition, and the
addition alone of one fp32 buffer to the other:

    Qwen3, 128 experts of 256 rows     1,142  600     1,935  979     1,110  556
    Qwen3, 16 experts of 2,048 rows      396  207       489  255       141    -
    GPT-OSS, 32 experts of 512         1,891  933     2,877 1,492    1,462  733
    GPT-OSS, 4 experts of 4,096            -  520         -  558         -    -

Tried and left out, fc1 of Qwen3 at 256 and at 2,048 rows, and of GPT-OSS at 512: a whole tile of
sums at the end, which does not fit the registers (1,697 447 2,542); the second half read after the
first is written (1,227 386 1,954); quarters (1,297 391 1,968); sums read before the products (1,942
551 2,912); TMA reductions (1,968 527 2,856); descriptors of one expert each, whose rows end at its
last, and tiles that overlap (1,203 424 1,872); tiles of 128 x 256, too, with halves (1,194 405
1,956); eight warps (1,714 521 2,566); one program on a multiprocessor with four stages (2,258 529
3,290); tiles of 64 x 128 with three programs (1,888 676 3,009).

Without the addition torch is faster (fc1 519 312 979, this kernel 646 315 1,142), so it computes
gradients that are not added, but for those beside which rows travel: its programs fill the device,
and ours leave room (`padded_dispatch.exchange.beside`).

I and O: width of an input and an output row of a linear. N: rows. L: experts.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from padded_dispatch.kernels import ROWS_OF_TILE, TILES_OF_GROUP

_TILES_AT_A_TIME = 32

_SMALL_WEIGHT = 12 * 2**20  # Bytes: a quarter of the L2 cache of an H200.


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Launch parameters of a product; the defaults are the fastest on an H200.

    Attributes:
        rows: rows of a tile of the result.
        columns: columns of a tile of the result.
        inner: elements of the inner dimension that are read at a time.
        stages: tiles of the operands that are read ahead.
        warps: warps of a program.
    """

    rows: int = ROWS_OF_TILE
    columns: int = 256
    inner: int = 64
    stages: int = 4
    warps: int = 8


_TILES = Tiles()
_GRADIENT_TILES = Tiles(columns=128, stages=3, warps=4)


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
    num_rows, width_in = rows_NI.shape
    width_out = weight_LOI.shape[1]
    # A descriptor needs the contiguous dimension last.
    transposed = not weight_LOI.is_contiguous()
    weight = weight_LOI.transpose(1, 2) if transposed else weight_LOI
    block = [tiles.inner, tiles.columns] if transposed else [tiles.columns, tiles.inner]
    out_NO = rows_NI.new_empty(num_rows, width_out)
    if table is None:
        table = row_tiles(offsets_L, num_rows, tiles.rows)
    _rows_times_weights_kernel[(_multiprocessors(rows_NI.device),)](
        TensorDescriptor.from_tensor(rows_NI, [tiles.rows, tiles.inner]),
        TensorDescriptor.from_tensor(weight, [1, *block]),
        out_NO,
        offsets_L,
        table,
        width_in,
        width_out,
        triton.cdiv(width_out, tiles.columns),
        TRANSPOSED=transposed,
        DOWN=width_in * width_out * rows_NI.element_size() > _SMALL_WEIGHT,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        INNER=tiles.inner,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out_NO


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # Triton's interpreter.
    return torch.cuda.get_device_properties(device).multi_processor_count


def row_tiles(offsets_L: Tensor, num_rows: int, tile_rows: int = ROWS_OF_TILE) -> Tensor:
    """List the tiles of rows: int32 [1 + most tiles, 4], see `padded_dispatch.ops.grouped`.

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
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        line = table + 4 * (1 + tile // tiles_across)
        expert = tl.load(line)
        first = tl.load(line + 1)
        of_group = tile - first * tiles_across
        if DOWN:
            group = tl.load(line + 2)
            down, across = of_group % group, of_group // group
        else:
            down, across = of_group // tiles_across, of_group % tiles_across
        row = tl.load(line + 3) + down * ROWS
        column = across * COLUMNS
        sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for inner in range(0, width_in, INNER):
            a = rows.load([row, inner])
            if TRANSPOSED:
                b = weight.load([expert, inner, column]).reshape(INNER, COLUMNS)
            else:
                b = weight.load([expert, column, inner]).reshape(COLUMNS, INNER).T
            sums = tl.dot(a, b, sums)
        end = tl.load(offsets + expert)
        # In two halves: the buffer through which a tile is stored takes half the shared memory,
        # which leaves room for a fourth stage.
        left, right = _halves(sums, ROWS, COLUMNS)
        _store_rows(out, left, row, column, end, width_out, ROWS, half)
        _store_rows(out, right, row, column + half, end, width_out, ROWS, half)


@triton.jit
def _halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _store_rows(out, sums, row, column, end, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store a tile without its rows from `end` on, which are the next expert's."""
    n = (row + tl.arange(0, ROWS))[:, None]
    o = (column + tl.arange(0, COLUMNS))[None, :]
    at = out + n.to(tl.int64) * width + o
    tl.store(at, sums.to(out.dtype.element_ty), mask=(n < end) & (o < width))


def add_weight_gradients(
    grad_NO: Tensor,
    rows_NI: Tensor,
    offsets_L: Tensor,
    sums_LOI: Tensor,
    *,
    tiles: Tiles = _GRADIENT_TILES,
    spare: int = 0,
) -> None:
    """Add every expert's `grad.T @ rows` to its sums, in place.

    Args:
        grad_NO: contiguous bf16 or fp16; O is a multiple of 8.
        rows_NI: contiguous, same dtype; I is a multiple of 8.
        offsets_L: contiguous int32, where the rows of each expert end.
        sums_LOI: contiguous fp32.
        tiles: launch parameters.
        spare: programs that are left out, of two on each multiprocessor.

    Example: `grad = [[1], [2], [3]]`, `rows = [[1], [10], [100]]` and `offsets = [2, 2, 3]` add
    `[[[21]], [[0]], [[300]]]`.
    """
    _multiply_rows(grad_NO, rows_NI, offsets_L, sums_LOI, True, tiles, spare)


def weight_gradients(
    grad_NO: Tensor,
    rows_NI: Tensor,
    offsets_L: Tensor,
    *,
    tiles: Tiles = _GRADIENT_TILES,
    spare: int = 0,
) -> Tensor:
    """Compute every expert's `grad.T @ rows`, rounded once: [L, O, I] in the dtype of the rows.

    The arguments are those of `add_weight_gradients`.
    """
    shape = offsets_L.shape[0], grad_NO.shape[1], rows_NI.shape[1]
    out_LOI = rows_NI.new_empty(shape)
    _multiply_rows(grad_NO, rows_NI, offsets_L, out_LOI, False, tiles, spare)
    return out_LOI


def _multiply_rows(
    grad_NO: Tensor,
    rows_NI: Tensor,
    offsets_L: Tensor,
    out_LOI: Tensor,
    adds: bool,
    tiles: Tiles,
    spare: int,
) -> None:
    num_experts, width_out, width_in = out_LOI.shape
    num_programs = max(1, 2 * _multiprocessors(rows_NI.device) - spare)
    _weight_gradients_kernel[(num_programs,)](
        TensorDescriptor.from_tensor(grad_NO, [tiles.inner, tiles.rows]),
        TensorDescriptor.from_tensor(rows_NI, [tiles.inner, tiles.columns]),
        out_LOI,
        offsets_L,
        num_experts,
        width_out,
        width_in,
        triton.cdiv(width_out, tiles.rows),
        triton.cdiv(width_in, tiles.columns),
        ADDS=adds,
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    tile = tl.program_id(0)
    while tile < num_experts * tiles_down * tiles_across:
        expert = tile // (tiles_down * tiles_across)
        down = tile // tiles_across % tiles_down * ROWS
        across = tile % tiles_across * COLUMNS
        start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offsets + expert)
        product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        num_whole = (end - start) // INNER
        for block in range(0, num_whole):
            n = start + block * INNER
            product = tl.dot(grad.load([n, down]).T, rows.load([n, across]), product)
        n = start + num_whole * INNER
        if n < end:
            # The other rows are the next expert's, or unspecified: NaN, perhaps.
            real = (n + tl.arange(0, INNER) < end)[:, None]
            g = tl.where(real, grad.load([n, down]), 0)
            x = tl.where(real, rows.load([n, across]), 0)
            product = tl.dot(g.T, x, product)
        # In two halves: the registers cannot hold a whole tile of products and one of sums. Both
        # are read before one is written, so that the second does not wait for the first.
        half: tl.constexpr = COLUMNS // 2
        left, right = _halves(product, ROWS, COLUMNS)
        o = (down + tl.arange(0, ROWS))[:, None]
        i = (across + tl.arange(0, half))[None, :]
        at = out + (expert.to(tl.int64) * width_out + o) * width_in + i
        on_left = (o < width_out) & (i < width_in)
        on_right = (o < width_out) & (i + half < width_in)
        if ADDS:
            left += tl.load(at, mask=on_left, other=0)
            right += tl.load(at + half, mask=on_right, other=0)
        tl.store(at, left.to(out.dtype.element_ty), mask=on_left)
        tl.store(at + half, right.to(out.dtype.element_ty), mask=on_right)
        tile += tl.num_programs(0)
