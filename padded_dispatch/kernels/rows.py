"""Move rows between tokens, slots and packed rows, and what travels beside them.

Every element of a result has one writer, so there are no atomics and no order of writes that could
change a sum. `spread_rows` writes a token's row into each of its slots, and zeros into the empty
ones if asked to; `sum_rows`, its transpose, adds a token's slots. Probabilities and counts beside
the rows have one element per slot, so one program per pool (`gather_meta`) or per token
(`scatter_meta`, its transpose) is enough.

Slots and packed rows. The received buffer is ordered (source, pool, slot) and has gaps behind the
rows of each pool; packed rows are ordered (expert, source, slot) and have none. `offsets_LS`, the
running count of real rows in that order, places every row of both: source s's rows of expert l
begin where the rows before them end; in their pool, behind those of the pool's earlier experts. The
rows of one (source, expert) are a run of elements on either side. A program moves a part of a pool
without regard to rows and columns, so no lane idles if the width is no power of two, and
probabilities, rows of width one, use the same kernel. Where every expert has its own pool, that is
a part of one run; else the program goes from run to run, and finds each by one comparison with the
ends of all runs of its pool. notebooks/results/LOG.md has the times.

G, P, X: pools of this source, their slots and experts. M: received pools, S * L / X. N: slots, or
packed rows. PX: P + X.
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
    parts = triton.cdiv(width, columns(width))
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
        BLOCK=columns(width),
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
    # The parts of a row are neighbours: as the slower axis of a grid they are written far apart.
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
    _sum_rows_kernel[(num_tokens, triton.cdiv(width, columns(width)))](
        rows_ND,
        slot_of_TK,
        summed_TD,
        width,
        K=top_k,
        BLOCK=columns(width),
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


def columns(width: int) -> int:
    """Return the columns of a program: the size with the fewest idle lanes, at most 2048.

    Example: 2880 columns are 3 x 1024; in 2 x 2048 every third lane would have nothing to do.
    """
    if width <= 2048:
        return max(16, triton.next_power_of_2(width))
    return min((2048, 1024), key=lambda block: triton.cdiv(width, block) * block)


def _warps(width: int) -> int:
    return max(1, min(8, columns(width) // 256))


def gather_meta(
    probs_TE: Tensor, expert_of_TK: Tensor, choice_of_slot_GP: Tensor, kept_E: Tensor
) -> Tensor:
    """Gather the probability of every slot (0 where empty), then the counts of kept rows.

    Args:
        probs_TE: contiguous, floating point.
        expert_of_TK: int32; -1 where a token has no row.
        choice_of_slot_GP: int32, `t * K + k` or -1.
        kept_E: int32.

    Returns:
        [G, P + X], fp32 (fp64 for fp64 probabilities).

    Example: K = 1, `probs = [[.9, .1], [.8, .2]]`, `expert_of_TK = [[0], [0]]`, `choice_of_slot =
    [[0, 1], [-1, -1]]` and `kept = [2, 0]` give `[[.9, .8, 2], [0, 0, 0]]`. With one pool for both
    experts, `choice_of_slot = [[0, 1]]`, they give `[[.9, .8, 2, 0]]`.
    """
    num_pools, pool_slots = choice_of_slot_GP.shape
    num_experts = kept_E.shape[0]
    width = pool_slots + num_experts // num_pools
    dtype = torch.promote_types(probs_TE.dtype, torch.float32)
    meta_GPX = probs_TE.new_empty(num_pools, width, dtype=dtype)
    block = min(1024, triton.next_power_of_2(width))
    _gather_meta_kernel[(num_pools, triton.cdiv(width, block))](
        probs_TE,
        expert_of_TK,
        choice_of_slot_GP,
        kept_E,
        meta_GPX,
        num_experts,
        pool_slots,
        width,
        expert_of_TK.shape[1],
        SHARED=num_experts > num_pools,
        BLOCK=block,
    )
    return meta_GPX


@triton.jit
def _gather_meta_kernel(
    probs,
    expert_of,
    choice_of_slot,
    kept,
    meta,
    num_experts,
    pool_slots,
    width,
    top_k,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pool = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    choice = tl.load(choice_of_slot + pool * pool_slots + p, mask=p < pool_slots, other=-1)
    token = (tl.maximum(choice, 0) // top_k).to(tl.int64)
    expert = pool
    if SHARED:
        expert = tl.load(expert_of + choice, mask=choice >= 0, other=0)
    prob = tl.load(probs + token * num_experts + expert, mask=choice >= 0, other=0.0)
    value = prob.to(meta.dtype.element_ty)
    is_count = (p >= pool_slots) & (p < width)
    first = pool * (width - pool_slots)
    count = tl.load(kept + first + p - pool_slots, mask=is_count, other=0)
    value = tl.where(is_count, count.to(meta.dtype.element_ty), value)
    tl.store(meta + pool * width + p, value, mask=p < width)


def scatter_meta(
    meta_GPX: Tensor, slot_of_TK: Tensor, expert_of_TK: Tensor, pool_slots: int, num_experts: int
) -> Tensor:
    """Return every slot's value to its (token, expert); 0 where there is no slot.

    Args:
        meta_GPX: contiguous, floating point; columns from P on are not read, and there may be none.
        slot_of_TK: int32, `g * P + p` or -1.
        expert_of_TK: int32.
        pool_slots: P.
        num_experts: E.

    Returns:
        [T, E] in the dtype of `meta_GPX`.

    Example: P = 1, E = 2, `meta = [[.5, 1], [.7, 1]]`, `slot_of_TK = [[1], [-1]]` and
    `expert_of_TK = [[1], [-1]]` give `[[0, .7], [0, 0]]`.
    """
    num_tokens, top_k = slot_of_TK.shape
    values_TE = meta_GPX.new_empty(num_tokens, num_experts)
    _scatter_meta_kernel[(num_tokens,)](
        meta_GPX,
        slot_of_TK,
        expert_of_TK,
        values_TE,
        num_experts,
        pool_slots,
        meta_GPX.shape[1] - pool_slots,
        K=top_k,
        BLOCK_E=triton.next_power_of_2(num_experts),
        num_warps=1,
    )
    return values_TE


@triton.jit
def _scatter_meta_kernel(
    meta,
    slot_of,
    expert_of,
    values,
    num_experts,
    pool_slots,
    num_counts,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    row = tl.zeros((BLOCK_E,), dtype=values.dtype.element_ty)
    for k in tl.static_range(K):
        slot = tl.load(slot_of + t * K + k)
        expert = tl.load(expert_of + t * K + k)
        # Counts stand between the slots of two pools.
        place = slot.to(tl.int64) + tl.maximum(slot, 0) // pool_slots * num_counts
        value = tl.load(meta + place, mask=slot >= 0, other=0.0)
        row = tl.where((e == expert) & (slot >= 0), value, row)
    tl.store(values + t * num_experts + e, row, mask=e < num_experts)


def pack_rows(slots_MPD: Tensor, offsets_LS: Tensor) -> Tensor:
    """Pack real rows without gaps; rows behind them are not written.

    Args:
        slots_MPD: copied unless every [P, D] of it is contiguous.
        offsets_LS: contiguous int32; its number of elements is a multiple of M.

    Returns:
        [M * P, D].

    Example: L = 2, S = 2, P = 2 and `offsets = [[1, 3], [3, 4]]` (expert 0 has one row from source
    0 and two from source 1; expert 1 none and one) pack the slots `[[a, -], [-, -], [b, c], [d,
    -]]` to `[a, b, c, d]` and four unwritten rows. One pool per source, of P = 4, has the slots
    `[[a, -, -, -], [b, c, d, -]]`, with the same result.
    """
    if not slots_MPD[0].is_contiguous():
        slots_MPD = slots_MPD.contiguous()
    num_pools, pool_slots, width = slots_MPD.shape
    packed_ND = slots_MPD.new_empty(num_pools * pool_slots, width)
    _move_rows(slots_MPD, offsets_LS, packed_ND, unpack=False)
    return packed_ND


def unpack_rows(packed_ND: Tensor, offsets_LS: Tensor, num_pools: int) -> Tensor:
    """Put packed rows back in their slots; empty ones are not written.

    Args:
        packed_ND: contiguous [N, D]; rows from `offsets_LS[-1, -1]` on are not read.
        offsets_LS: contiguous int32; its number of elements is a multiple of M.
        num_pools: M, of which N is a multiple.

    Returns:
        [M, P, D] with P = N / M.

    Example: that of `pack_rows` in reverse.
    """
    num_rows, width = packed_ND.shape
    slots_MPD = packed_ND.new_empty(num_pools, num_rows // num_pools, width)
    _move_rows(slots_MPD, offsets_LS, packed_ND, unpack=True)
    return slots_MPD


def _move_rows(slots_MPD: Tensor, offsets_LS: Tensor, packed_ND: Tensor, *, unpack: bool) -> None:
    num_pools, pool_slots, width = slots_MPD.shape
    num_shared = offsets_LS.numel() // num_pools
    # A block of probabilities would be many runs, which one program moves one after another.
    largest = _BLOCK // 8 if num_shared > 1 and width == 1 else _BLOCK
    block = min(largest, triton.next_power_of_2(pool_slots * width))
    blocks = triton.cdiv(pool_slots * width, block)
    _move_rows_kernel[(num_pools * blocks,)](
        slots_MPD,
        offsets_LS,
        packed_ND,
        *offsets_LS.shape,
        slots_MPD.stride(0),
        width,
        blocks,
        num_shared,
        UNPACK=unpack,
        SHARED=num_shared > 1,
        BLOCK=block,
        BLOCK_X=triton.next_power_of_2(num_shared),
        num_warps=_WARPS,
    )


@triton.jit
def _move_rows_kernel(
    slots,
    offsets,
    packed,
    num_local_experts,
    num_sources,
    stride,
    width,
    blocks,
    num_shared,
    UNPACK: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    pool = tl.program_id(0) // blocks
    pools_per_source = num_local_experts // num_shared
    source = pool // pools_per_source
    place = pool % pools_per_source * num_shared * num_sources + source
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK  # 32 bits end at 2**31 elements.
    i = tl.arange(0, BLOCK)
    in_slots = slots + (pool.to(tl.int64) * stride + first) + i
    if SHARED:
        begins, ends = _runs(offsets, place, num_sources, num_shared, BLOCK_X)
        element = first
        last = tl.minimum(first + BLOCK, tl.max(ends, 0).to(tl.int64) * width)
        while element < last:
            shift, end = _run_at(element // width, begins, ends, num_shared, BLOCK_X)
            stop = tl.minimum(end * width, last)
            mine = (first + i >= element) & (first + i < stop)
            _copy(in_slots, packed + (shift * width + first) + i, mine, UNPACK)
            element = stop
    else:
        begin = tl.load(offsets + place - 1, mask=place > 0, other=0).to(tl.int64)
        is_real = i < (tl.load(offsets + place) - begin) * width - first
        _copy(in_slots, packed + (begin * width + first) + i, is_real, UNPACK)


@triton.jit
def _copy(in_slots, in_packed, is_real, UNPACK: tl.constexpr):
    if UNPACK:
        tl.store(in_slots, tl.load(in_packed, mask=is_real), mask=is_real)
    else:
        tl.store(in_packed, tl.load(in_slots, mask=is_real), mask=is_real)


@triton.jit
def _runs(offsets, place, num_sources, num_shared, BLOCK_X: tl.constexpr):
    """Return where the packed rows of each run of a pool begin, and where each run ends in it."""
    x = tl.arange(0, BLOCK_X)
    place += x * num_sources
    begin = tl.load(offsets + place - 1, mask=(x < num_shared) & (place > 0), other=0)
    end = tl.load(offsets + place, mask=x < num_shared, other=0)
    return begin, tl.cumsum(end - begin, 0)


@triton.jit
def _run_at(row, begins, ends, num_shared, BLOCK_X: tl.constexpr):
    """Return how far behind its place in the pool the run with this row lies, and its end there."""
    x = tl.arange(0, BLOCK_X)
    this = tl.sum(((ends <= row) & (x < num_shared)).to(tl.int32), 0)
    begin = tl.sum(tl.where(x == this, begins, 0), 0).to(tl.int64)
    end_before = tl.sum(tl.where(x == this - 1, ends, 0), 0)
    return begin - end_before, tl.sum(tl.where(x == this, ends, 0), 0).to(tl.int64)
