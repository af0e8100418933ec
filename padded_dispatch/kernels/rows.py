"""Rows between tokens and experts: spread a token over its rows, and sum the rows of a token.

A token has K choices; `row_SPK` has the row of each: -1 if it is none of this rank, -2 if it found
no room. Every element of a result has one writer and every sum one order, so there are no atomics.
Which rows a kernel touches is decided on the device; grids follow shapes alone.

`spread_rows` reads each token once and writes all its rows; rows without room leave zeros at home.
`sum_rows` is the transpose. `take` reads numbers beside rows. `..._M` is stored, `..._N` loose: see
`Segments`.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from padded_dispatch.kernels import Scaled, Segments
from padded_dispatch.kernels.scaled import magnitude, scale_of


def spread_rows(
    rows_SPD: Tensor,
    row_SPK: Tensor,
    segments: Segments,
    *,
    own_TD: Tensor | None = None,
    own: int | None = None,
    homes_S: Tensor | None = None,
    scaled: Scaled | None = None,
    plain: bool = True,
    kept_SPD: Tensor | None = None,
    expert_SPK: Tensor | None = None,
    place_SPK: Tensor | None = None,
    prob_SPK: Tensor | None = None,
    level: Tensor | None = None,
    prob_M: Tensor | None = None,
    home_M: Tensor | None = None,
) -> Tensor:
    """Write a row of every token into all its rows: loose [N, D].

    All tensors are contiguous. Tokens: see `exchange.collectives.Values`. `row_SPK`, int32, has the
    row of each choice; a row before the first offset is left out. `homes_S`, int64, has the address
    of [P * K, D] at each source, whose rows begin at multiples of 16; None if no rows go home.

    With `scaled`, loose, each token is also quantized into all its rows there. Without `plain` it
    is written nowhere else, and the result has no rows.

    With `prob_M` and `prob_SPK` the probability of each row is stored, and with `homes_S` its
    address at home in `home_M`: see `experts.store.Buffers`. With `expert_SPK` and `place_SPK` of
    `exchange.collectives.Arrived` rows are found first, and `row_SPK` is written; places from
    `level`, int32 [1], on have no room. `kept_SPD`, if given, takes those of `rows_SPD` that have
    rows.

    Examples: rows a and b, `row = [[[6, 5]], [[-1, 7]]]` and offsets that begin at 5 give `[a, a,
    b]`. S = 1, L = 2, offsets `[5, 6, 7]`, level 1, tokens a, b, c with experts `[[0, 1], [1, 7],
    [1, -1]]` and places `[[0, 0], [1, 0], [2, 0]]`: rows `[[5, 6], [-2, -1], [-2, -1]]`, which are
    `[a, a]`, and zeros go home for b and c.
    """
    num_sources, num_slots, top_k = row_SPK.shape
    width = rows_SPD.shape[2]
    block, warps = _columns(width)
    if scaled is not None:  # A program quantizes a whole row.
        block, warps = whole_row(width)
    parts = triton.cdiv(width, block)
    out = rows_SPD.new_empty(segments.num_rows if plain else 0, width)
    _spread_kernel[(num_sources * num_slots * parts,)](
        rows_SPD,
        own_TD,
        row_SPK,
        expert_SPK,
        place_SPK,
        prob_SPK,
        segments.offsets,
        level,
        homes_S,
        out if plain else None,
        *((None, None) if scaled is None else (scaled.values, scaled.scales)),
        kept_SPD,
        prob_M,
        home_M,
        num_sources if own is None else own,
        num_sources,
        num_slots,
        segments.num_experts,
        width,
        parts,
        K=top_k,
        K_BLOCK=triton.next_power_of_2(top_k),
        BLOCK=block,
        num_warps=warps,
    )
    return out


@triton.jit
def _spread_kernel(
    rows,
    own_rows,
    row_of,
    expert_of,
    place_of,
    probs,
    offsets,
    level,
    homes,
    out,
    quantized_out,
    scale_out,
    kept,
    prob_out,
    home_out,
    own,
    num_sources,
    num_slots,
    num_experts,
    width,
    parts,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The parts of a row are neighbours: as the slower axis of a grid they are written far apart.
    token = (tl.program_id(0) // parts).to(tl.int64)  # 32 bits end at 2**31 elements.
    source, slot = (token // num_slots).to(tl.int32), token % num_slots
    column = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, K_BLOCK)
    listed = k < K
    first = k < tl.where(tl.program_id(0) % parts == 0, K, 0)  # by one program of a row
    base = tl.load(offsets)
    row_bytes = width * (rows.dtype.element_ty.primitive_bitwidth // 8)
    home = 0
    if homes is not None:
        home = tl.load(homes + source) + slot * K * row_bytes
    if expert_of is not None:
        expert = tl.load(expert_of + token * K + k, mask=listed, other=-1)
        place = tl.load(place_of + token * K + k, mask=listed, other=0)
        mine = (expert >= 0) & (expert < num_experts)
        begin = tl.load(offsets + expert * num_sources + source, mask=mine, other=0)
        row = tl.where(mine, tl.where(place < tl.load(level), begin + place, -2), -1)
        tl.store(row_of + token * K + k, row, mask=first)
    else:
        row = tl.load(row_of + token * K + k, mask=listed, other=-1)
        row = tl.where(row >= base, row, tl.minimum(row, -1))
    if tl.max((row != -1).to(tl.int32), 0) == 0:
        return
    if prob_out is not None:
        prob = tl.load(probs + token * K + k, mask=first & (row >= 0), other=0)
        tl.store(prob_out + row, prob.to(prob_out.dtype.element_ty), mask=first & (row >= 0))
        if homes is not None:
            tl.store(home_out + row, home + k * row_bytes, mask=first & (row >= 0))
    wanted = column < tl.where(tl.max(row, 0) >= 0, width, 0)
    other = token - tl.where(source > own, num_slots, 0)
    at = rows + other * width
    if own_rows is not None:
        at = tl.where(source == own, own_rows + slot * width, at)
    value = tl.load(at + column, mask=wanted, other=0)
    if kept is not None:
        there = wanted & (column < tl.where(source == own, 0, width))
        tl.store(kept + other * width + column, value, mask=there)
    if quantized_out is not None:
        scale, inverse = scale_of(tl.max(magnitude(value), 0))
        quantized = (value.to(tl.float32) * inverse).to(quantized_out.dtype.element_ty)
    for n in tl.static_range(K):
        to = tl.max(tl.where(k == n, row, -3), 0)
        there = column < tl.where(to >= 0, width, 0)
        place = (to - base).to(tl.int64)
        if out is not None:
            tl.store(out + place * width + column, value, mask=there)
        if quantized_out is not None:
            tl.store(quantized_out + place * width + column, quantized, mask=there)
            tl.store(scale_out + place, scale, mask=to >= 0)
        # Not in a recompute, before backward's push: a peer may still sum the rows at its home.
        if homes is not None and (expert_of is not None or prob_out is None):
            lost = (home + n * row_bytes).to(tl.pointer_type(rows.dtype.element_ty))
            lost = tl.multiple_of(lost, 16) + column
            nothing = tl.zeros((BLOCK,), dtype=rows.dtype.element_ty)
            tl.store(lost, nothing, mask=column < tl.where(to == -2, width, 0))


def sum_rows(
    rows_ND: Tensor,
    index_TK: Tensor,
    *,
    offsets: Tensor | None = None,
    choices: bool = False,
    wide: bool = False,
) -> Tensor:
    """Sum the rows of every token, k ascending, in at least fp32, and round once.

    Args:
        rows_ND: contiguous [N, D].
        index_TK: int32, contiguous [..., K], the row of each choice; a negative one adds nothing.
        offsets: of the pass, if the rows are loose and `index_TK` counts from the beginning of the
            store; None reads row `index_TK`.
        choices: read row t * K + k instead, wherever `index_TK` is not negative.
        wide: do not round.

    Returns:
        [..., D] in the dtype of the rows, or of the sums.

    Example: `index = [[2, -1], [0, 1]]` gives `[rows[2], rows[0] + rows[1]]`; with `choices`
    `[rows[0], rows[2] + rows[3]]`.
    """
    *shape, top_k = index_TK.shape
    width = rows_ND.shape[-1]
    dtype = torch.promote_types(rows_ND.dtype, torch.float32)
    summed = rows_ND.new_empty(*shape, width, dtype=dtype if wide else rows_ND.dtype)
    block, warps = _columns(width)
    _sum_rows_kernel[(index_TK.numel() // top_k, triton.cdiv(width, block))](
        rows_ND,
        index_TK,
        offsets,
        summed,
        width,
        K=top_k,
        CHOICES=choices,
        BLOCK=block,
        WIDE=tl.float64 if dtype == torch.float64 else tl.float32,
        num_warps=warps,
    )
    return summed


@triton.jit
def _sum_rows_kernel(
    rows,
    index,
    offsets,
    summed,
    width,
    K: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    shift = 0
    if offsets is not None:
        shift = tl.load(offsets)
    total = tl.zeros((BLOCK,), dtype=WIDE)
    for k in tl.static_range(K):
        row = tl.load(index + t * K + k)
        valid = column < tl.where(row >= 0, width, 0)
        at = (row - shift).to(tl.int64)
        if CHOICES:
            at = t * K + k
        total += tl.load(rows + at * width + column, mask=valid, other=0.0).to(WIDE)
    tl.store(summed + t * width + column, total.to(summed.dtype.element_ty), mask=column < width)


def take(beside_N: Tensor, row_SPK: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Return the number beside the row of every choice, [S, P, K]; 0 where it has no row.

    Args:
        beside_N: contiguous [N].
        row_SPK: contiguous int32.
        offsets: of the pass, if `beside_N` is loose; None takes element `row_SPK`.

    Example: `beside = [.1, .2]`, `row = [[[6, 5]], [[-1, -2]]]` and offsets that begin at 5 give
    `[[[.2, .1]], [[0, 0]]]`.
    """
    taken = torch.empty_like(row_SPK, dtype=beside_N.dtype)
    block = 1024
    _take_kernel[(triton.cdiv(row_SPK.numel(), block),)](
        beside_N, row_SPK, offsets, taken, row_SPK.numel(), BLOCK=block
    )
    return taken


@triton.jit
def _take_kernel(beside, row_of, offsets, taken, num_choices, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_of + i, mask=i < num_choices, other=-1)
    shift = 0
    if offsets is not None:
        shift = tl.load(offsets)
    value = tl.load(beside + row - shift, mask=row >= 0, other=0)
    tl.store(taken + i, value, mask=i < num_choices)


def zero_padding(rows_MD: Tensor, prob_M: Tensor | None, count_SL: Tensor) -> None:
    """Write zeros into the padded rows of cells [L, S, C], and beside them.

    Args:
        rows_MD: contiguous [L * S * C, D]; changed in place.
        prob_M: contiguous [L * S * C], changed likewise; None if nothing lies beside the rows.
        count_SL: contiguous int32; real rows are the first of each cell.

    Example: S = 1, L = 2, C = 2 and `count = [[1, 0]]` leave row 0 and zero rows 1, 2 and 3.
    """
    num_sources, num_experts = count_SL.shape
    num_rows, width = rows_MD.shape
    block, warps = _columns(width)
    _zero_padding_kernel[(num_rows, triton.cdiv(width, block))](
        rows_MD,
        prob_M,
        count_SL,
        num_rows // count_SL.numel(),
        num_sources,
        num_experts,
        width,
        BLOCK=block,
        num_warps=warps,
    )


@triton.jit
def _zero_padding_kernel(
    rows, probs, count_of, capacity, num_sources, num_experts, width, BLOCK: tl.constexpr
):
    n = tl.program_id(0)
    cell, place = n // capacity, n % capacity
    count = tl.load(count_of + cell % num_sources * num_experts + cell // num_sources)
    if place >= count:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        nothing = tl.zeros((BLOCK,), dtype=rows.dtype.element_ty)
        tl.store(rows + n.to(tl.int64) * width + column, nothing, mask=column < width)
        if probs is not None:
            tl.store(probs + n, 0.0, mask=tl.program_id(1) == 0)


@functools.cache
def _columns(width: int) -> tuple[int, int]:
    """Return columns and warps of a program: all up to 2048, else 1024 or 2048 with fewer idle.

    Example: 2880 columns are 3 x 1024, with 6 % of the lanes idle; in 2 x 2048 it would be 30 %.
    """
    if width <= 2048:
        block = max(16, triton.next_power_of_2(width))
    else:
        block = 1024 if triton.cdiv(width, 1024) * 1024 < triton.cdiv(width, 2048) * 2048 else 2048
    return block, max(1, min(8, block // 256))


def whole_row(width: int) -> tuple[int, int]:
    """Return columns and warps of a program that has a whole row, whatever its width."""
    block = max(16, triton.next_power_of_2(width))
    return block, max(1, min(16, block // 256))
