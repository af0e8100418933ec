"""Rows between tokens and experts: spread a token over its rows, and sum the rows of a token.

A token has K choices; the list (`kernels.SlotList`) has the row of each. Kernels that walk it are
persistent: their programs take entries in turn, so they cost what arrived, not what could have.
Every element of a result has one writer and every sum one order, so there are no atomics. Which
rows a kernel touches is decided on the device; grids follow shapes alone.

`spread_rows` reads each token once and writes all its rows; rows without room leave zeros at home.
`sum_slots` is the transpose. `send_numbers` moves numbers beside rows back to the choices of slots.
`sum_rows` sums at home. `..._M` is stored, `..._N` loose: see `Segments`.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from padded_dispatch.kernels import Scaled, Segments, SlotList
from padded_dispatch.kernels.gemm import multiprocessors
from padded_dispatch.kernels.scaled import magnitude, scale_of

_WARPS = 64  # that a multiprocessor runs at a time
_CHUNK = 1024  # choices that a program of `send_numbers` takes at a time


def spread_rows(
    rows_SPD: Tensor,
    listed: SlotList,
    segments: Segments,
    *,
    own_TD: Tensor | None = None,
    own: int | None = None,
    homes_S: Tensor | None = None,
    scaled: Scaled | None = None,
    plain: bool = True,
    kept_SPD: Tensor | None = None,
    prob_M: Tensor | None = None,
    home_M: Tensor | None = None,
) -> Tensor:
    """Write a row of every token into all its rows: loose [N, D].

    Args:
        rows_SPD: contiguous, see `exchange.collectives.Values`.
        listed: the slots to read, and their rows; rows before the first offset are left out.
        segments: where rows lie.
        own_TD: contiguous, likewise.
        own: likewise.
        homes_S: int64, the address of [P * K, D] at each source, a multiple of 16. Rows without
            room are zeroed there. None zeroes nothing.
        scaled: loose; each token is also quantized into all its rows there.
        plain: False writes only `scaled`, and the result has no rows.
        kept_SPD: takes the tokens of `rows_SPD` that have rows; None keeps none.
        prob_M: stored; gets the probability of each row. None stores none.
        home_M: stored int64; gets the address at home of each row. Needs `homes_S` and `prob_M`.

    Example: the tokens a, b and c in slots 0, 1 and 3, with the rows `[[5, -1], [-2, -1], [6, 7]]`
    and offsets that begin at 5, give `[a, c, c]`, and b's first choice is zeroed at home.
    """
    top_k, width = listed.row_AK.shape[1], rows_SPD.shape[2]
    block, warps = _columns(width)
    if scaled is not None:  # A program quantizes a whole row.
        block, warps = whole_row(width)
    parts = triton.cdiv(width, block)
    out = rows_SPD.new_empty(segments.num_rows if plain else 0, width)
    _spread_kernel[_walkers(listed, parts, warps)](
        rows_SPD,
        own_TD,
        listed.slot_A,
        listed.length,
        listed.row_AK,
        listed.prob_AK,
        segments.offsets,
        homes_S,
        out if plain else None,
        *((None, None) if scaled is None else (scaled.values, scaled.scales)),
        kept_SPD,
        prob_M,
        home_M,
        listed.num_sources if own is None else own,
        listed.num_slots,
        width,
        parts,
        K=top_k,
        K_BLOCK=triton.next_power_of_2(top_k),
        BLOCK=block,
        num_warps=warps,
    )
    return out


def _walkers(listed: SlotList, parts: int, warps: int) -> tuple[int]:
    """Return the grid of a kernel whose programs walk the list, `parts` of them for an entry.

    Twice as many as run at a time, so that one that ends early leaves no gap.
    """
    most = listed.row_AK.shape[0]
    at_a_time = multiprocessors(listed.row_AK.device) * _WARPS // warps
    return (parts * min(most, max(1, 2 * at_a_time // parts)),)


@triton.jit
def _length(length, num_slots):
    """Return how many entries the list has; with one source, as many as slots."""
    if length is None:
        return num_slots
    else:
        return tl.load(length)


@triton.jit
def _slot(slot_of, entry):
    """Return the slot of an entry of the list; with one source they are equal."""
    if slot_of is None:
        return entry
    else:
        return tl.load(slot_of + entry).to(tl.int64)


@triton.jit
def _spread_kernel(
    rows,
    own_rows,
    slot_of,
    length,
    row_of,
    probs,
    offsets,
    homes,
    out,
    quantized_out,
    scale_out,
    kept,
    prob_out,
    home_out,
    own,
    num_slots,
    width,
    parts,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The parts of a row are neighbours: as the slower axis of a grid they are written far apart.
    part = tl.program_id(0) % parts
    column = part * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, K_BLOCK)
    base = tl.load(offsets)
    row_bytes = width * (rows.dtype.element_ty.primitive_bitwidth // 8)
    entry = (tl.program_id(0) // parts).to(tl.int64)  # 32 bits end at 2**31 elements.
    end = _length(length, num_slots)
    while entry < end:
        slot = _slot(slot_of, entry)
        source, slot_there = (slot // num_slots).to(tl.int32), slot % num_slots
        row = tl.load(row_of + entry * K + k, mask=k < K, other=-1)
        row = tl.where(row >= base, row, tl.minimum(row, -1))
        home = 0
        if homes is not None:
            home = tl.load(homes + source) + slot_there * K * row_bytes
        if prob_out is not None:
            here = (row >= 0) & (k < tl.where(part == 0, K, 0))  # by one program of a row
            prob = tl.load(probs + entry * K + k, mask=here, other=0)
            tl.store(prob_out + row, prob.to(prob_out.dtype.element_ty), mask=here)
            if home_out is not None:
                tl.store(home_out + row, home + k * row_bytes, mask=here)
        wanted = column < tl.where(tl.max(row, 0) >= 0, width, 0)
        other = slot - tl.where(source > own, num_slots, 0)
        at = rows + other * width
        if own_rows is not None:
            at = tl.where(source == own, own_rows + slot_there * width, at)
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
            if homes is not None:
                lost = (home + n * row_bytes).to(tl.pointer_type(rows.dtype.element_ty))
                lost = tl.multiple_of(lost, 16) + column
                nothing = tl.zeros((BLOCK,), dtype=rows.dtype.element_ty)
                tl.store(lost, nothing, mask=column < tl.where(to == -2, width, 0))
        entry += tl.num_programs(0) // parts


def sum_slots(
    rows_ND: Tensor, listed: SlotList, *, offsets: Tensor | None = None, wide: bool = False
) -> Tensor:
    """Sum the rows of every slot in the list, k ascending, in at least fp32, and round once.

    Args:
        rows_ND: contiguous [N, D].
        listed: the slots and their rows.
        offsets: of the pass, if the rows are loose; None reads row `row_AK`.
        wide: do not round.

    Returns:
        [S, P, D] in the dtype of the rows, or of the sums; unspecified in slots that are not in the
        list.

    Example: S = 1, P = 2 and the rows `[[2, -1], [0, 1]]` give `[rows[2], rows[0] + rows[1]]`.
    """
    top_k, width = listed.row_AK.shape[1], rows_ND.shape[1]
    dtype = torch.promote_types(rows_ND.dtype, torch.float32)
    shape = listed.num_sources, listed.num_slots, width
    summed = rows_ND.new_empty(shape, dtype=dtype if wide else rows_ND.dtype)
    block, warps = _columns(width)
    parts = triton.cdiv(width, block)
    _sum_slots_kernel[_walkers(listed, parts, warps)](
        rows_ND,
        listed.slot_A,
        listed.length,
        listed.row_AK,
        offsets,
        summed,
        listed.num_slots,
        width,
        parts,
        K=top_k,
        BLOCK=block,
        WIDE=_wide(dtype),
        num_warps=warps,
    )
    return summed


@triton.jit
def _sum_slots_kernel(
    rows,
    slot_of,
    length,
    row_of,
    offsets,
    summed,
    num_slots,
    width,
    parts,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    column = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    base = 0
    if offsets is not None:
        base = tl.load(offsets)
    entry = (tl.program_id(0) // parts).to(tl.int64)
    end = _length(length, num_slots)
    while entry < end:
        slot = _slot(slot_of, entry)
        total = tl.zeros((BLOCK,), dtype=WIDE)
        for k in tl.static_range(K):
            row = tl.load(row_of + entry * K + k)
            valid = column < tl.where(row >= 0, width, 0)
            at = (row - base).to(tl.int64) * width + column
            total += tl.load(rows + at, mask=valid, other=0.0).to(WIDE)
        to = summed + slot * width + column
        tl.store(to, total.to(summed.dtype.element_ty), mask=column < width)
        entry += tl.num_programs(0) // parts


def sum_rows(rows_QD: Tensor, index_TK: Tensor, *, choices: bool = False) -> Tensor:
    """Sum the rows of every token at home, k ascending, in at least fp32, and round once.

    Args:
        rows_QD: contiguous.
        index_TK: int32, contiguous: a row for each choice; a negative one adds nothing.
        choices: read row t * K + k instead, wherever `index_TK` is not negative.

    Returns:
        [T, D] in the dtype of the rows.

    Example: `index = [[2, -1], [0, 1]]` gives `[rows[2], rows[0] + rows[1]]`; with `choices`
    `[rows[0], rows[2] + rows[3]]`.
    """
    (num_tokens, top_k), width = index_TK.shape, rows_QD.shape[1]
    dtype = torch.promote_types(rows_QD.dtype, torch.float32)
    summed = rows_QD.new_empty(num_tokens, width)
    block, warps = _columns(width)
    _sum_rows_kernel[(num_tokens, triton.cdiv(width, block))](
        rows_QD,
        index_TK,
        summed,
        width,
        K=top_k,
        CHOICES=choices,
        BLOCK=block,
        WIDE=_wide(dtype),
        num_warps=warps,
    )
    return summed


def _wide(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


@triton.jit
def _sum_rows_kernel(
    rows,
    index,
    summed,
    width,
    K: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=WIDE)
    for k in tl.static_range(K):
        row = tl.load(index + t * K + k)
        valid = column < tl.where(row >= 0, width, 0)
        at = row.to(tl.int64)
        if CHOICES:
            at = t * K + k
        total += tl.load(rows + at * width + column, mask=valid, other=0.0).to(WIDE)
    tl.store(summed + t * width + column, total.to(summed.dtype.element_ty), mask=column < width)


def send_numbers(
    number_N: Tensor,
    listed: SlotList,
    *,
    offsets: Tensor | None = None,
    homes_S: Tensor | None = None,
    home_at: int = 0,
) -> Tensor:
    """Move the number beside each row to its choice: 0 for a choice without room.

    Args:
        number_N: contiguous; with `homes_S` fp32.
        listed: the slots and their rows.
        offsets: of the pass, if the numbers are loose; None takes element `row_AK`.
        homes_S: int64, addresses at every source; None stores the numbers here.
        home_at: bytes from there to the [P, K] to which a source's numbers are stored.

    Returns:
        [S, P, K]: unspecified for choices of other ranks. It has no elements with `homes_S`.

    Example: S = 2, P = 1, the numbers `[.1, .2]`, the rows `[[6, -1]]` and `[[-2, 5]]`, and offsets
    that begin at 5 give .2 and an unspecified number for the first source, 0 and .1 for the second.
    """
    most, top_k = listed.row_AK.shape
    shape = (listed.num_sources, listed.num_slots, top_k) if homes_S is None else (0,)
    sent = number_N.new_empty(shape)
    programs = min(triton.cdiv(most * top_k, _CHUNK), 2 * multiprocessors(number_N.device))
    _send_numbers_kernel[(programs,)](
        number_N,
        listed.slot_A,
        listed.length,
        listed.row_AK,
        offsets,
        homes_S,
        home_at,
        sent if homes_S is None else None,
        listed.num_slots,
        K=top_k,
        BLOCK=_CHUNK,
        num_warps=4,
    )
    return sent


@triton.jit
def _send_numbers_kernel(
    numbers,
    slot_of,
    length,
    row_of,
    offsets,
    homes,
    home_at,
    out,
    num_slots,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    base = 0
    if offsets is not None:
        base = tl.load(offsets)
    end = _length(length, num_slots) * K
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < end:
        i = first + tl.arange(0, BLOCK)
        row = tl.load(row_of + i, mask=i < end, other=-1)
        here = row != -1
        number = tl.load(numbers + (row - base), mask=row >= 0, other=0)
        if slot_of is None:
            slot = i // K
        else:
            slot = tl.load(slot_of + i // K, mask=here, other=0).to(tl.int64)
        if homes is None:
            tl.store(out + slot * K + i % K, number, mask=here)
        else:
            home = tl.load(homes + slot // num_slots, mask=here, other=0) + home_at
            to = home.to(tl.pointer_type(tl.float32)) + slot % num_slots * K + i % K
            tl.store(to, number, mask=here)
        first += tl.num_programs(0) * BLOCK


def zero_padding(rows_MD: Tensor, prob_M: Tensor | None, count_SL: Tensor) -> None:
    """Write zeros into the padded rows of cells [L, S, C], and beside them.

    Args:
        rows_MD: contiguous [L * S * C, D]; changed in place.
        prob_M: contiguous [L * S * C], changed likewise; None if nothing lies beside the rows.
        count_SL: contiguous int32; real rows are the first of each cell. The device fails if one is
            `TOO_MANY`.

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
        debug=True,  # For the assertion.
        sanitize_overflow=False,
    )


@triton.jit
def _zero_padding_kernel(
    rows, probs, count_of, capacity, num_sources, num_experts, width, BLOCK: tl.constexpr
):
    n = tl.program_id(0)
    cell, place = n // capacity, n % capacity
    count = tl.load(count_of + cell % num_sources * num_experts + cell // num_sources)
    tl.device_assert(count >= 0, "a token has more experts than top_k (moe_router_topk): raise it")
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
