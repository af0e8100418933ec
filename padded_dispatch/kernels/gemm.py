"""Grouped products over packed rows: rows times weights, and gradients of weights.

`rows_times_weights` multiplies every expert's rows by that expert's matrix: both forward linears
and both gradients of rows. Each row of the product may go to an address of its own, also on other
GPUs. `weight_gradients` multiplies two blocks of rows of one expert. It may add the product to a
buffer, or store it there if the buffer counts as zeros.

The kernels are persistent: programs take tiles in turn. Rows times weights take experts in
ascending order, with a small weight all columns before the next rows. With a large one they take up
to 16 tiles of rows before the next columns, so that an expert of at most 2,048 rows has its weight
read once. A tile of a weight's gradient takes as long as its expert has rows: experts with many
rows come first, so that programs end together. `with_tiles` lists tiles of rows, and that order of
experts, once for all products with the same offsets.

The tensor memory accelerator (TMA) reads operands and writes results. Plain stores write sums that
are added to, and rows with addresses. A descriptor of rows ends at an expert's last row, as in
Triton's own `triton.tools.ragged_tma` (MIT), which Triton 3.4 lacks: idea and constants are taken
over. So a tile reads zeros behind that row, and writes nothing there. Every element is summed by
one program in the order of the inner dimension: the result depends on the operands alone.
.github/LOG.md has times beside torch's products, and what was tried and left out.

Rows and weights may both be `Scaled`. Then tensor cores multiply their values, and add in sums that
are faster and less exact than fp32. Scales are applied at the end.
"""

import dataclasses
import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from padded_dispatch.config import require
from padded_dispatch.kernels import Scaled, Segments

_TILES_OF_GROUP = 16  # of one expert, at most, before the next columns of a large weight
_TILES_AT_A_TIME = 32

_SMALL_WEIGHT = 12 * 2**20  # Bytes: a quarter of the L2 cache of an H200.


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Launch parameters of a product; the defaults are the fastest on an H200."""

    rows: int = 128  # of a tile of the result, as columns
    columns: int = 256
    inner: int = 64  # elements of the inner dimension that are read at a time
    stages: int = 4  # tiles of the operands that are read ahead
    warps: int = 8
    programs: int = 1  # on a multiprocessor, of gradients of weights


_TILES = Tiles()


def rows_times_weights(
    rows: Tensor | Scaled,
    weight_LOI: Tensor | Scaled,
    segments: Segments,
    *,
    stored: bool,
    out: Tensor | None = None,
    at_M: Tensor | None = None,
    bias_LO: Tensor | None = None,
    prob_M: Tensor | None = None,
) -> Tensor:
    """Compute `rows @ weight[l].T` for every expert's rows.

    Args:
        rows: contiguous bf16 or fp16, as wide as I, a multiple of 8; or scaled, I a multiple of 16.
        weight_LOI: same dtype, contiguous or the transpose (1, 2) of a contiguous one; O is a
            multiple of 8. Scaled with scaled rows, and contiguous.
        segments: with tiles.
        stored: whether `rows` are stored, or loose.
        out: stored, contiguous, in the dtype of the rows, as wide as O; None makes a loose one of N
            rows, unless there is `at_M`.
        at_M: stored int64, the address of each row of the product, a multiple of 16, on this GPU or
            on one that it can access; requires that `out` is None.
        bias_LO: contiguous; `prob * bias[l]` is added to the rounded product, and rounded again.
        prob_M: stored, floating point; required with a bias.

    Returns:
        `out`, in which rows outside of the offsets are not written; `at_M` if that is given.

    Example, without the zeros that pad widths to 8: the loose rows `[1, 2]` and `[3, 4]` of two
    experts, `offsets = [5, 6, 7]`, and the weights `[[1, 0]]` and `[[0, 1]]` give the loose rows
    `[[1], [4]]`. With the addresses of the second and the first row of a buffer at `at[5]` and
    `at[6]`, the buffer holds `[[4], [1]]`.
    """
    assert segments.tiles is not None
    tiles, dtype, scales = _TILES, rows.dtype, (None, None)
    inner = tiles.inner
    if isinstance(rows, Scaled):
        assert isinstance(weight_LOI, Scaled)
        scales, inner = (rows.scales, weight_LOI.scales), 2 * inner
        rows, weight_LOI = rows.values, weight_LOI.values
    assert isinstance(weight_LOI, Tensor)
    width_out, width_in = weight_LOI.shape[1:]
    out_stored = out is not None
    if out is None and at_M is None:
        out = rows.new_empty(segments.num_rows, width_out, dtype=dtype)
    # A descriptor needs the contiguous dimension last.
    transposed = not weight_LOI.is_contiguous()
    weight = weight_LOI.transpose(1, 2) if transposed else weight_LOI
    assert scales[0] is None or not transposed
    block = [inner, tiles.columns] if transposed else [tiles.columns, inner]
    _rows_times_weights_kernel[(multiprocessors(rows.device),)](
        _packed(rows, tiles.rows, inner),
        TensorDescriptor.from_tensor(weight, [1, *block]),
        None if out is None else _packed(out, tiles.rows, tiles.columns // 2),
        at_M,
        *scales,
        bias_LO,
        prob_M,
        segments.offsets,
        segments.num_sources,
        segments.tiles,
        width_in,
        width_out,
        triton.cdiv(width_out, tiles.columns),
        TRANSPOSED=transposed,
        DOWN=weight[0].nbytes > _SMALL_WEIGHT,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        INNER=inner,
        DTYPE=getattr(tl, str(dtype).removeprefix("torch.")),
        STORED=stored,
        OUT_STORED=out_stored,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    written = out if at_M is None else at_M
    assert written is not None
    return written


def _packed(rows: Tensor, num_rows: int, columns: int) -> TensorDescriptor:
    """Describe packed rows for tiles that end at an expert's last row: see `_place`."""
    width = rows.shape[1]
    most = 2**31 - 2**16
    shape = [most, most, 2**30, width]
    return TensorDescriptor(
        rows, shape, [2**34 - width, width, width, 1], [1, 1, num_rows, columns]
    )


def check_on_gpu(rows: Tensor, weight_LOI: Tensor, multiple: int = 8) -> None:
    """Raise if packed experts on a GPU do not support such rows and weights."""
    fix = "use an experts module on the padded layout"
    require(
        rows.dtype == torch.bfloat16,
        "dtype",
        rows.dtype,
        "be torch.bfloat16 for packed experts on a GPU",
        f"train in bf16, or {fix}",
    )
    sizes = tuple(weight_LOI.shape[1:])
    require(
        sizes[0] % multiple == 0 and sizes[1] % multiple == 0,
        "hidden and ffn sizes",
        sizes,
        f"be multiples of {multiple} for packed experts on a GPU",
        fix,
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has; 2 for Triton's interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def with_tiles(segments: Segments) -> Segments:
    """Return the segments with `tiles`, what products compute: int32 [1 + most tiles, 5].

    Line 0 has the number of tiles. The line of a tile has its expert, and the first tile, number of
    tiles, and first row, as offsets count, of its group: at most 16 tiles of one expert, with equal
    lines. Lines behind the last tile are unspecified. The last column has the experts, those with
    more rows first, from line 1 on.

    Example: `offsets = [10, 13, 13, 17]` of three experts and tiles of 2 rows give the lines
    `[4, 0, 0, 0, _]`, `[0, 0, 2, 10, 2]`, `[0, 0, 2, 10, 0]`, `[2, 2, 2, 13, 1]` and `[2, 2, 2, 13,
    _]`.
    """
    most = segments.num_rows // _TILES.rows + segments.num_experts
    table = segments.offsets.new_empty(1 + most, 5)
    _row_tiles_kernel[(triton.cdiv(most, _TILES_AT_A_TIME),)](
        segments.offsets,
        segments.num_sources,
        table,
        segments.num_experts,
        ROWS=_TILES.rows,
        GROUP=_TILES_OF_GROUP,
        EXPERTS=triton.next_power_of_2(segments.num_experts),
        TILES=_TILES_AT_A_TIME,
        num_warps=4,
    )
    return dataclasses.replace(segments, tiles=table)


@triton.jit
def _row_tiles_kernel(
    offsets,
    num_sources,
    table,
    num_experts,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILES: tl.constexpr,
):
    e = tl.arange(0, EXPERTS)
    valid = e < num_experts
    start = tl.load(offsets + e * num_sources, mask=valid, other=0)
    end = tl.load(offsets + (e + 1) * num_sources, mask=valid, other=0)
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
    line = table + 5 * (1 + tile)
    tl.store(line, expert, mask=there)
    tl.store(line + 1, first_tile + before, mask=there)
    tl.store(line + 2, tl.minimum(last_tile - first_tile - before, GROUP), mask=there)
    tl.store(line + 3, first_row + before * ROWS, mask=there)
    if tl.program_id(0) == 0:
        tl.store(table + tl.arange(0, 4), tl.where(tl.arange(0, 4) == 0, total, 0))
    # The place of expert `tile` in the order is the number of experts that come before it.
    own = e[None, :] == tile[:, None]
    num_rows = tl.where(valid, end - start, 0)
    of_own = tl.sum(tl.where(own, num_rows[None, :], 0), 1)[:, None]
    before_own = (num_rows[None, :] == of_own) & (e[None, :] < tile[:, None])
    before_own = ((num_rows[None, :] > of_own) | before_own) & valid[None, :]
    place = tl.sum(before_own.to(tl.int32), 1)
    tl.store(table + 5 * (1 + place) + 4, tile, mask=tile < num_experts)


@triton.jit
def _rows_times_weights_kernel(
    rows,
    weight,
    out,
    at,
    row_scales,
    weight_scales,
    bias,
    probs,
    offsets,
    num_sources,
    table,
    width_in,
    width_out,
    tiles_across,
    TRANSPOSED: tl.constexpr,
    DOWN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    DTYPE: tl.constexpr,
    STORED: tl.constexpr,
    OUT_STORED: tl.constexpr,
):
    """Multiply; store the result in `out`, or if that is None, its rows at the addresses `at`."""
    num_tiles = tl.load(table) * tiles_across
    half: tl.constexpr = COLUMNS // 2
    first = 0 if STORED else tl.load(offsets)
    out_first = 0 if OUT_STORED else tl.load(offsets)
    # Flattened with the inner loop, so that the next tile is read while one is stored.
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        expert, row, column = _tile(tile, table, tiles_across, DOWN, ROWS, COLUMNS)
        end = tl.load(offsets + (expert + 1) * num_sources)
        sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for inner in range(0, width_in, INNER):
            a = rows.load(_place(row - first, end - first, inner)).reshape(ROWS, INNER)
            if TRANSPOSED:
                b = weight.load([expert, inner, column]).reshape(INNER, COLUMNS)
            else:
                b = weight.load([expert, column, inner]).reshape(COLUMNS, INNER).T
            sums = tl.dot(a, b, sums)
        n = row + tl.arange(0, ROWS)
        if row_scales is not None:
            across = column + tl.arange(0, COLUMNS)
            of_expert = weight_scales + expert.to(tl.int64) * width_out
            sums *= tl.load(row_scales + n - first, mask=n < end, other=0)[:, None]
            sums *= tl.load(of_expert + across, mask=across < width_out, other=0)[None, :]
        # In two halves: the buffer through which a tile is stored takes half the shared memory,
        # which leaves room for a fourth stage.
        left, right = _halves(sums, ROWS, COLUMNS)
        o = column + tl.arange(0, half)
        if bias is not None:
            prob = tl.load(probs + n, mask=n < end, other=0).to(tl.float32)
            of_expert = bias + expert.to(tl.int64) * width_out
            left = _add_bias(left, of_expert, prob, o, width_out, DTYPE)
            right = _add_bias(right, of_expert, prob, o + half, width_out, DTYPE)
        if out is not None:
            shape: tl.constexpr = (1, 1, ROWS, half)
            begin, last = row - out_first, end - out_first
            out.store(_place(begin, last, column), left.to(DTYPE).reshape(shape))
            out.store(_place(begin, last, column + half), right.to(DTYPE).reshape(shape))
        else:
            place = tl.load(at + n, mask=n < end, other=0).to(tl.pointer_type(DTYPE))
            place = tl.multiple_of(place, [16])[:, None]
            here, across = (n < end)[:, None], o[None, :]
            tl.store(place + across, left.to(DTYPE), mask=here & (across < width_out))
            across += half
            tl.store(place + across, right.to(DTYPE), mask=here & (across < width_out))


@triton.jit
def _add_bias(sums, bias, prob, o, width_out, dtype: tl.constexpr):
    """Add to rounded sums, so that a bias of zeros changes nothing."""
    added = tl.load(bias + o, mask=o < width_out, other=0).to(tl.float32)
    return sums.to(dtype).to(tl.float32) + prob[:, None] * added[None, :]


@triton.jit
def _tile(tile, table, tiles_across, DOWN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the expert of a tile, its first row and its first column.

    Tiles are numbered group by group, and in a group down its rows first if DOWN, else across. The
    line that is read is one of the group, whose lines are equal.
    """
    line = table + 5 * (1 + tile // tiles_across)
    of_group = tile - tl.load(line + 1) * tiles_across
    if DOWN:
        group = tl.load(line + 2)
        down, across = of_group % group, of_group // group
    else:
        down, across = of_group // tiles_across, of_group % tiles_across
    return tl.load(line), tl.load(line + 3) + down * ROWS, across * COLUMNS


@triton.jit
def _place(row, end, column):
    """Return where `row` is in a descriptor of packed rows that end at `end`.

    Its element (F, end, i, column), F = 2**30, is in row `i + end - F`: F times its first stride,
    2**34 elements less a row, is F rows back, modulo 2**64 bytes. i ends at F, so that rows from
    `end` on are out of bounds: read as zeros, and never written.
    """
    return 1 << 30, end, (1 << 30) + row - end, column


@triton.jit
def _halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


def weight_gradients(
    grad: Tensor,
    rows: Tensor,
    segments: Segments,
    sums_LOI: Tensor | None = None,
    zeroed: Tensor | None = None,
    *,
    stored: bool,
) -> Tensor:
    """Compute every expert's `grad.T @ rows`, and add it to its sums if there are any.

    Sums that count as zeros need not be read. The host does not read whether they do, so there are
    two launches, one of which ends at once.

    Args:
        grad: contiguous bf16 or fp16, as wide as O, a multiple of 8.
        rows: loose, contiguous, same dtype, as wide as I, a multiple of 8.
        segments: where the rows of each expert lie, with tiles.
        sums_LOI: contiguous, in fp32 or the dtype of the rows; None makes a result in the latter.
            Either is rounded once, after the addition.
        zeroed: int32 [2], required with sums. Unless the first is 0, products are stored, whatever
            the sums hold, and it becomes 0. The second is scratch.
        stored: whether `grad` is stored, or loose.

    Returns:
        The sums or the result, [L, O, I].

    Example: the loose `grad = [[1], [2], [3]]` and `rows = [[1], [10], [100]]`, with `offsets = [7,
    9, 9, 10]` of three experts, give `[[[21]], [[0]], [[300]]]`. With `zeroed = [0, 0]` sums of
    ones become `[[[22]], [[1]], [[301]]]`, and with `[1, 0]` the products.
    """
    assert segments.tiles is not None
    num_experts, width_out, width_in = segments.num_experts, grad.shape[1], rows.shape[1]
    out_LOI = rows.new_empty(num_experts, width_out, width_in) if sums_LOI is None else sums_LOI
    rows_of_expert = segments.num_expected / num_experts
    for adds in [False] if sums_LOI is None else [False, True]:
        # Parts of as many bytes, whatever the dtype: sums are fp32 until they are rounded.
        parts = 4 if adds else out_LOI.itemsize
        tiles = gradient_tiles(rows_of_expert, out_LOI.itemsize, adds)
        part = [1, tiles.rows, tiles.columns // parts]
        _weight_gradients_kernel[(tiles.programs * multiprocessors(rows.device),)](
            _packed(grad, tiles.inner, tiles.rows),
            _packed(rows, tiles.inner, tiles.columns),
            out_LOI if adds else TensorDescriptor.from_tensor(out_LOI, part),
            zeroed,
            segments.offsets,
            segments.num_sources,
            segments.tiles,
            num_experts,
            width_out,
            width_in,
            triton.cdiv(width_out, tiles.rows),
            triton.cdiv(width_in, tiles.columns),
            ADDS=adds,
            PARTS=parts,
            STORED=stored,
            EXPERTS=triton.next_power_of_2(num_experts),
            ROWS=tiles.rows,
            COLUMNS=tiles.columns,
            INNER=tiles.inner,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    return out_LOI


def gradient_tiles(rows_of_expert: float, itemsize: int, adds: bool) -> Tiles:
    """Return the fastest launch parameters, for `itemsize` bytes of each element of the result.

    Of two small programs on a multiprocessor, one multiplies while the other stores. That gains if
    a tile's products take about as long as its stores, so for neither very few nor many rows, and
    not if sums are read, too.
    """
    if not adds and 48 * itemsize <= rows_of_expert <= 192 * itemsize:
        return Tiles(columns=128, stages=3, warps=4, programs=2)
    return _TILES


@triton.jit
def _weight_gradients_kernel(
    grad,
    rows,
    out,
    zeroed,
    offsets,
    num_sources,
    table,
    num_experts,
    width_out,
    width_in,
    tiles_down,
    tiles_across,
    ADDS: tl.constexpr,
    PARTS: tl.constexpr,
    STORED: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    of_expert = tiles_down * tiles_across
    # How many blocks of rows the tiles of this program have. No rows are one block of zeros.
    place = tl.arange(0, EXPERTS)
    valid = place < num_experts
    e = tl.load(table + 5 * (1 + place) + 4, mask=valid, other=0)
    starts = tl.load(offsets + e * num_sources, mask=valid, other=0)
    ends = tl.load(offsets + (e + 1) * num_sources, mask=valid, other=0)
    before = (place * of_expert + num_programs - 1 - program) // num_programs
    until = ((place + 1) * of_expert + num_programs - 1 - program) // num_programs
    blocks = (until - before) * tl.maximum(tl.cdiv(ends - starts, INNER), 1)
    num_steps = tl.sum(tl.where(valid, blocks, 0), 0)
    if zeroed is not None:
        # The launch that stores goes first. Each launch writes only what the other one reads.
        are_zeros = tl.load(zeroed + 1 if ADDS else zeroed)
        if program == 0:
            tl.store(zeroed if ADDS else zeroed + 1, 0 if ADDS else are_zeros)
        num_steps = tl.where((are_zeros != 0) == ADDS, 0, num_steps)

    base = tl.load(offsets)
    first = 0 if STORED else base
    # One loop over the blocks of all tiles, so that the next tile is read while one is stored.
    # Triton cannot flatten two loops whose inner one has another length for each expert.
    half: tl.constexpr = COLUMNS // 2
    tile = program - num_programs
    block, num_blocks = -1, 0
    expert, start, end, down, across = 0, 0, 0, 0, 0
    product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(0, num_steps):
        block = tl.where(block == num_blocks - 1, 0, block + 1)
        if block == 0:
            tile += num_programs
            expert = tl.load(table + 5 * (1 + tile // of_expert) + 4)
            down = tile // tiles_across % tiles_down * ROWS
            across = tile % tiles_across * COLUMNS
            start = tl.load(offsets + expert * num_sources)
            end = tl.load(offsets + (expert + 1) * num_sources)
            num_blocks = tl.maximum(tl.cdiv(end - start, INNER), 1)
        n = start + block * INNER
        g = grad.load(_place(n - first, end - first, down))
        x = rows.load(_place(n - base, end - base, across))
        product = tl.dot(g.reshape(INNER, ROWS).T, x.reshape(INNER, COLUMNS), product)
        if block == num_blocks - 1:
            # In parts, to save shared memory; and registers cannot hold a tile of sums as well.
            parts = _halves(product, ROWS, COLUMNS)
            if PARTS == 4:
                parts = _halves(parts[0], ROWS, half) + _halves(parts[1], ROWS, half)
            width: tl.constexpr = COLUMNS // PARTS
            if ADDS:
                o = (down + tl.arange(0, ROWS))[:, None]
                i = (across + tl.arange(0, width))[None, :]
                at = out + (expert.to(tl.int64) * width_out + o) * width_in + i
                inside = (o < width_out) & (i < width_in)
                ahead = tl.load(at, mask=inside, other=0)
                for part in tl.static_range(PARTS):
                    # The next sums are read before these are written, so that they do not wait.
                    sums, at_sums, inside_sums = ahead, at, inside
                    i, at = i + width, at + width
                    inside = (o < width_out) & (i < width_in)
                    if part + 1 < PARTS:
                        ahead = tl.load(at, mask=inside, other=0)
                    sums = (parts[part] + sums).to(out.dtype.element_ty)
                    tl.store(at_sums, sums, mask=inside_sums)
            else:
                shape: tl.constexpr = (1, ROWS, width)
                for part in tl.static_range(PARTS):
                    stored = parts[part].to(out.dtype).reshape(shape)
                    out.store([expert, down, across + part * width], stored)
            product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
