"""Move rows between tokens, slots and packed rows, and what travels beside them.

Every element of a result has one writer, so there are no atomics and no order of writes that could
change a sum. All times below are from an H200 in a graph, in bf16, at T 4096 and factor 1.25, where
a copy runs at 4.15 TB/s; only real rows count.

Tokens and slots. `spread_rows` writes a token's row into each of its slots, and zeros into the
empty ones if asked to; `sum_rows`, its transpose, adds a token's slots. With E 128, K 8, D 2048:
`spread_rows` 42 us, 87 % of the copy's speed; with the zeros that the padded layout needs 50 us,
72 %, where 82 % is the upper bound; `sum_rows` 37 us, 97 %. With E 32, K 4, D 2880: 34 us, 82 %;
40 us, 70 %; 30 us, 95 %. Tried and left out: a program per slot that reads its token from L2, K
times over (58 us); loops over tokens in fewer programs, other numbers of warps, and zeros before,
behind or between the tokens (each within 2 %).

Probabilities and counts beside the rows. They have one element per slot, so one program per expert
(`gather_meta`) or per token (`scatter_meta`, its transpose) is enough.

Slots and packed rows. The received buffer is ordered (source, expert, slot) and has gaps; packed
rows are ordered (expert, source, slot) and have none. `offsets_LS`, the running count of real rows
in that order, places every row of both: source s's rows of expert l begin where the rows before
them end. The rows of one (source, expert) are a run of elements on either side. A program moves a
part of a run without regard to rows and columns, so no lane idles if the width is no power of two,
and probabilities, rows of width one, use the same kernel. `pack_rows` and `unpack_rows`: 67 us with
D 2048, K 8, 96 % of the copy's speed (rows count once read and once written); 48 us with D 2880,
K 4, 95 %. Blocks of 8192 elements were 3 % slower, and programs that kept to rows and columns 3 to
7 %.

M: buffers of (source, local expert) pairs, S * L. N: slots, or packed rows. C1: C + 1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_SLOTS = 8  # Slots that one program of `spread_rows` checks for emptiness.
_BLOCK, _WARPS = 2048, 4  # Elements of a program that packs or unpacks: 16 bytes a thread and step.


def spread_rows(
    tokens_TD: Tensor, slot_of_TK: Tensor, choice_of_slot_N: Tensor, *, zeros: bool = True
) -> Tensor:
    """Write every token's row into each of its slots, and zeros into slots without a token.

    Args:
        tokens_TD: contiguous [T, D].
        slot_of_TK: int32 [T, K]; -1 is no slot.
        choice_of_slot_N: int32, any shape, N elements in all; -1 is an empty slot. The inverse of
            `slot_of_TK`.
        zeros: False leaves slots without a token unwritten. Only the shape of `choice_of_slot_N` is
            read then, and packed rows may stand in for slots.

    Returns:
        [*choice_of_slot_N.shape, D].

    Example: `slot_of_TK = [[2, -1], [0, 3]]` and `choice_of_slot = [2, -1, 0, 3]` give
    `[tokens[1], 0, tokens[0], tokens[1]]`.
    """
    num_tokens, top_k = slot_of_TK.shape
    width, num_slots = tokens_TD.shape[1], choice_of_slot_N.numel()
    rows_ND = tokens_TD.new_empty(*choice_of_slot_N.shape, width)
    parts = triton.cdiv(width, _block(width))
    programs = num_tokens + (triton.cdiv(num_slots, _SLOTS) if zeros else 0)
    _spread_rows_kernel[(programs * parts,)](
        tokens_TD,
        slot_of_TK,
        choice_of_slot_N,
        rows_ND,
        num_tokens,
        num_slots,
        width,
        parts,
        K=top_k,
        SLOTS=_SLOTS,
        BLOCK=_block(width),
        num_warps=_warps(width),
    )
    return rows_ND


@triton.jit
def _spread_rows_kernel(
    tokens,
    slot_of,
    choice_of_slot,
    rows,
    num_tokens,
    num_slots,
    width,
    parts,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The parts of a row are neighbours: as the slower axis of a grid they are written far apart in
    # time, which cost 3 % with D 2880.
    program = (tl.program_id(0) // parts).to(tl.int64)  # 32 bits end at 2**31 elements.
    column = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    if program < num_tokens:
        row = tl.load(tokens + program * width + column, mask=column < width)
        for k in tl.static_range(K):
            slot = tl.load(slot_of + program * K + k).to(tl.int64)
            valid = column < tl.where(slot >= 0, width, 0)
            tl.store(rows + slot * width + column, row, mask=valid)
    else:
        nothing = tl.zeros((BLOCK,), dtype=rows.dtype.element_ty)
        for i in tl.static_range(SLOTS):
            slot = (program - num_tokens) * SLOTS + i
            choice = tl.load(choice_of_slot + slot, mask=slot < num_slots, other=0)
            valid = column < tl.where(choice < 0, width, 0)
            tl.store(rows + slot * width + column, nothing, mask=valid)


def sum_rows(rows_ND: Tensor, slot_of_TK: Tensor) -> Tensor:
    """Sum the slots of every token, k ascending, rounded once.

    Args:
        rows_ND: contiguous [N, D].
        slot_of_TK: int32 [T, K]; -1 adds nothing, and its row is not read.

    Returns:
        [T, D] in the dtype of the rows, accumulated in fp32 (fp64 for fp64 rows).

    Example: `slot_of_TK = [[2, -1], [0, 1]]` gives `[rows[2], rows[0] + rows[1]]`.
    """
    num_tokens, top_k = slot_of_TK.shape
    width = rows_ND.shape[1]
    summed_TD = rows_ND.new_empty(num_tokens, width)
    _sum_rows_kernel[(num_tokens, triton.cdiv(width, _block(width)))](
        rows_ND,
        slot_of_TK,
        summed_TD,
        width,
        K=top_k,
        BLOCK=_block(width),
        WIDE=tl.float64 if rows_ND.dtype == torch.float64 else tl.float32,
        num_warps=_warps(width),
    )
    return summed_TD


@triton.jit
def _sum_rows_kernel(
    rows, slot_of, summed, width, K: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=WIDE)
    for k in tl.static_range(K):
        slot = tl.load(slot_of + t * K + k)
        valid = column < tl.where(slot >= 0, width, 0)
        row = tl.load(rows + slot.to(tl.int64) * width + column, mask=valid, other=0.0)
        total += row.to(WIDE)
    tl.store(summed + t * width + column, total.to(summed.dtype.element_ty), mask=column < width)


def _block(width: int) -> int:
    """Return the columns of a program: the size with the fewest idle lanes, at most 2048.

    Example: 2880 columns are 3 x 1024; in 2 x 2048 every third lane would have nothing to do.
    """
    if width <= 2048:
        return max(16, triton.next_power_of_2(width))
    return min((2048, 1024), key=lambda block: triton.cdiv(width, block) * block)


def _warps(width: int) -> int:
    return max(1, min(8, _block(width) // 256))


def gather_meta(probs_TE: Tensor, choice_of_slot_EC: Tensor, kept_E: Tensor, top_k: int) -> Tensor:
    """Gather the probability of every slot (0 where empty), then the count of kept rows.

    Args:
        probs_TE: contiguous, floating point.
        choice_of_slot_EC: int32, `t * K + k` or -1.
        kept_E: int32.
        top_k: K.

    Returns:
        [E, C + 1], fp32 (fp64 for fp64 probabilities).

    Example: K = 1, `probs = [[.9, .1], [.8, .2]]`, `choice_of_slot = [[0, 1], [-1, -1]]` and
    `kept = [2, 0]` give `[[.9, .8, 2], [0, 0, 0]]`.
    """
    num_experts, capacity = choice_of_slot_EC.shape
    dtype = torch.promote_types(probs_TE.dtype, torch.float32)
    meta_EC1 = probs_TE.new_empty(num_experts, capacity + 1, dtype=dtype)
    block = min(1024, triton.next_power_of_2(capacity + 1))
    _gather_meta_kernel[(num_experts, triton.cdiv(capacity + 1, block))](
        probs_TE, choice_of_slot_EC, kept_E, meta_EC1, num_experts, capacity, top_k, BLOCK=block
    )
    return meta_EC1


@triton.jit
def _gather_meta_kernel(
    probs, choice_of_slot, kept, meta, num_experts, capacity, top_k, BLOCK: tl.constexpr
):
    e = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    choice = tl.load(choice_of_slot + e * capacity + c, mask=c < capacity, other=-1)
    token = (tl.maximum(choice, 0) // top_k).to(tl.int64)
    prob = tl.load(probs + token * num_experts + e, mask=choice >= 0, other=0.0)
    value = prob.to(meta.dtype.element_ty)
    value = tl.where(c == capacity, tl.load(kept + e).to(meta.dtype.element_ty), value)
    tl.store(meta + e * (capacity + 1) + c, value, mask=c <= capacity)


def scatter_meta(meta_EC1: Tensor, slot_of_TK: Tensor) -> Tensor:
    """Return every slot's value to its (token, expert); 0 where there is no slot.

    Args:
        meta_EC1: contiguous [E, C + 1], floating point; the last column is not read.
        slot_of_TK: int32, `e * C + c` or -1.

    Returns:
        [T, E] in the dtype of `meta_EC1`.

    Example: C = 1, `meta = [[.5, 1], [.7, 1]]` and `slot_of_TK = [[1], [-1]]` give
    `[[0, .7], [0, 0]]`.
    """
    num_tokens, top_k = slot_of_TK.shape
    num_experts, width = meta_EC1.shape
    values_TE = meta_EC1.new_empty(num_tokens, num_experts)
    _scatter_meta_kernel[(num_tokens,)](
        meta_EC1,
        slot_of_TK,
        values_TE,
        num_experts,
        width - 1,
        K=top_k,
        BLOCK_E=triton.next_power_of_2(num_experts),
        num_warps=1,
    )
    return values_TE


@triton.jit
def _scatter_meta_kernel(
    meta, slot_of, values, num_experts, capacity, K: tl.constexpr, BLOCK_E: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    row = tl.zeros((BLOCK_E,), dtype=values.dtype.element_ty)
    for k in tl.static_range(K):
        slot = tl.load(slot_of + t * K + k)
        expert = tl.maximum(slot, 0) // capacity
        # A slot is e * C + c, but a row of `meta` is C + 1 long.
        value = tl.load(meta + (slot + expert).to(tl.int64), mask=slot >= 0, other=0.0)
        row = tl.where((e == expert) & (slot >= 0), value, row)
    tl.store(values + t * num_experts + e, row, mask=e < num_experts)


def pack_rows(slots_MCD: Tensor, offsets_LS: Tensor) -> Tensor:
    """Pack real rows without gaps; rows behind them are not written.

    Args:
        slots_MCD: [S * L, C, D]; copied unless every [C, D] of it is contiguous.
        offsets_LS: contiguous int32.

    Returns:
        [S * L * C, D].

    Example: L = 2, S = 2, C = 2 and `offsets = [[1, 3], [3, 4]]` (expert 0 has one row from source
    0 and two from source 1; expert 1 none and one) pack the slots `[[a, -], [-, -], [b, c], [d,
    -]]` to `[a, b, c, d]` and four unwritten rows.
    """
    if not slots_MCD[0].is_contiguous():
        slots_MCD = slots_MCD.contiguous()
    num_buffers, capacity, width = slots_MCD.shape
    packed_ND = slots_MCD.new_empty(num_buffers * capacity, width)
    block = min(_BLOCK, triton.next_power_of_2(capacity * width))
    blocks = triton.cdiv(capacity * width, block)
    _pack_rows_kernel[(num_buffers * blocks,)](
        slots_MCD,
        offsets_LS,
        packed_ND,
        *offsets_LS.shape,
        slots_MCD.stride(0),
        width,
        blocks,
        BLOCK=block,
        num_warps=_WARPS,
    )
    return packed_ND


@triton.jit
def _part_of_run(
    slots,
    offsets,
    packed,
    num_local_experts,
    num_sources,
    stride,
    width,
    blocks,
    BLOCK: tl.constexpr,
):
    """Return this program's part on both sides, its first element, and the real rows of its run."""
    m = tl.program_id(0) // blocks
    place = (m % num_local_experts) * num_sources + m // num_local_experts
    start = tl.load(offsets + place - 1, mask=place > 0, other=0).to(tl.int64)
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK  # 32 bits end at 2**31 elements.
    i = tl.arange(0, BLOCK)
    in_slots = slots + (m.to(tl.int64) * stride + first) + i
    in_packed = packed + (start * width + first) + i
    return in_slots, in_packed, first, tl.load(offsets + place) - start


@triton.jit
def _pack_rows_kernel(
    slots,
    offsets,
    packed,
    num_local_experts,
    num_sources,
    stride,
    width,
    blocks,
    BLOCK: tl.constexpr,
):
    in_slots, in_packed, first, num_rows = _part_of_run(
        slots, offsets, packed, num_local_experts, num_sources, stride, width, blocks, BLOCK
    )
    is_real = tl.arange(0, BLOCK) < num_rows * width - first
    tl.store(in_packed, tl.load(in_slots, mask=is_real), mask=is_real)


def unpack_rows(packed_ND: Tensor, offsets_LS: Tensor, *, zeros: bool = True) -> Tensor:
    """Put packed rows back in their slots, with zeros in empty ones.

    Args:
        packed_ND: contiguous [N, D]; rows from `offsets_LS[-1, -1]` on are not read.
        offsets_LS: contiguous int32; N is a multiple of its number of elements.
        zeros: False leaves empty slots unwritten.

    Returns:
        [S * L, C, D] with C = N / (S * L).

    Example: that of `pack_rows` in reverse, with 0 where it has `-`.
    """
    num_buffers, width = offsets_LS.numel(), packed_ND.shape[1]
    capacity = packed_ND.shape[0] // num_buffers
    slots_MCD = packed_ND.new_empty(num_buffers, capacity, width)
    block = min(_BLOCK, triton.next_power_of_2(capacity * width))
    blocks = triton.cdiv(capacity * width, block)
    _unpack_rows_kernel[(num_buffers * blocks,)](
        packed_ND,
        offsets_LS,
        slots_MCD,
        *offsets_LS.shape,
        capacity * width,
        width,
        blocks,
        ZEROS=zeros,
        BLOCK=block,
        num_warps=_WARPS,
    )
    return slots_MCD


@triton.jit
def _unpack_rows_kernel(
    packed,
    offsets,
    slots,
    num_local_experts,
    num_sources,
    size,
    width,
    blocks,
    ZEROS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    in_slots, in_packed, first, num_rows = _part_of_run(
        slots, offsets, packed, num_local_experts, num_sources, size, width, blocks, BLOCK
    )
    is_real = tl.arange(0, BLOCK) < num_rows * width - first
    value = tl.load(in_packed, mask=is_real, other=0)
    tl.store(in_slots, value, mask=tl.arange(0, BLOCK) < size - first if ZEROS else is_real)
