"""Store rows straight into the memory of other GPUs, and back: each the transpose of the other.

Every rank has a buffer of each kind. `..._R`, int64 [R], holds the addresses of one kind on all
ranks, as this rank can store to them. Kernels only store to peers and never read from them. They do
not synchronize: the caller puts a barrier of all ranks before each of them (all ranks are done with
what the buffers held) and behind it (all rows have arrived).

`push_counts` sends every rank a number for each expert. `place_rows` computes from the kept rows of
all sources where rows lie at their experts: packed, ordered (expert, source, slot). `push_tokens`
sends every token once to each rank of its experts, to the first of its places there, and behind the
barrier `copy_rows` copies it to the others. A rank's own tokens are stored at all their places at
once. `return_rows` sends packed rows back into slots; for a product that stores its rows there by
itself, `find_slots` finds their addresses, and sends the numbers beside them.

A source has its rows of an expert behind each other, in slots and at the expert. So one number per
expert leads from a slot to its place there, and one number per (source, expert) leads back.

A link is shared by all programs that store over it at a time, so their destinations should differ:
each token begins with another rank, and each program of `return_rows` walks its own part of the
packed rows. Stores fill a link to 96 %: notebooks/results/LOG.md has what else was tried.

P: slots of a pool of a source. X: its experts; 1, or all of a rank. Q: slots of a source.
"""

import triton
import triton.language as tl
from torch import Tensor

from padded_dispatch.kernels.rows import columns

# Programs that store, for each block of columns: 4 of 4 warps per multiprocessor of an H200.
PROGRAMS = 528
_TOKENS = 4  # of a program of `copy_rows`, whose rows are in flight together


def push_counts(kept_E: Tensor, table_R: Tensor, rank: int) -> None:
    """Write this rank's row of every rank's table.

    Args:
        kept_E: contiguous int32, a number for each expert.
        table_R: addresses of int32 [R, E] on every rank.
        rank: this rank.
    """
    num_experts = kept_E.shape[0]
    block = triton.next_power_of_2(num_experts)
    _push_counts_kernel[(table_R.shape[0],)](kept_E, table_R, rank, num_experts, BLOCK=block)


@triton.jit
def _push_counts_kernel(kept, table_at, rank, num_experts, BLOCK: tl.constexpr):
    e = tl.arange(0, BLOCK)
    count = tl.load(kept + e, mask=e < num_experts)
    table = tl.load(table_at + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    tl.store(table + rank * num_experts + e, count, mask=e < num_experts)


def place_rows(
    table_RE: Tensor,
    rank: int,
    shift_E: Tensor,
    offsets_LS: Tensor,
    count_SL: Tensor,
    pool_slots: int,
    experts_per_pool: int,
) -> None:
    """Compute where rows begin and end at their experts.

    Args:
        table_RE: contiguous int32, the rows of every (source, expert).
        rank: this rank.
        shift_E: int32, written: place of this rank's rows at each expert's rank, less their slot.
        offsets_LS: int32, written: where the rows of each (local expert, source) end on this rank.
        count_SL: fp32, written: the rows of each (source, local expert) on this rank.
        pool_slots: P.
        experts_per_pool: X.

    Example: R = 2, `table = [[1, 0, 2, 0], [3, 1, 0, 5]]`, P = 5 and X = 1 on rank 1, which has
    experts 2 and 3. Its rows begin at `[1, 4, 2, 2]` and its slots at `[0, 5, 10, 15]`: `shift =
    [1, -1, -8, -13]`, `offsets = [[2, 2], [2, 7]]` and `count = [[2, 0], [0, 5]]`. With X = 2 its
    slots begin at `[0, 3, 5, 5]`.
    """
    num_local, num_ranks = offsets_LS.shape
    _place_rows_kernel[(num_ranks,)](
        table_RE,
        shift_E,
        offsets_LS,
        count_SL,
        rank,
        num_ranks,
        num_local,
        pool_slots,
        experts_per_pool,
        SHARED=experts_per_pool > 1,
        S_BLOCK=triton.next_power_of_2(num_ranks),
        L_BLOCK=triton.next_power_of_2(num_local),
    )


@triton.jit
def _place_rows_kernel(
    table,
    shift,
    offsets,
    count_SL,
    rank,
    num_ranks,
    num_local,
    pool_slots,
    num_shared,
    SHARED: tl.constexpr,
    S_BLOCK: tl.constexpr,
    L_BLOCK: tl.constexpr,
):
    owner = tl.program_id(0)  # The rank whose experts this program computes.
    s = tl.arange(0, S_BLOCK)[:, None]
    local = tl.arange(0, L_BLOCK)[None, :]
    valid = (s < num_ranks) & (local < num_local)
    e = owner * num_local + local
    count = tl.load(table + s * (num_ranks * num_local) + e, mask=valid, other=0)
    all_sources = tl.sum(count, 0)
    before = tl.cumsum(all_sources, 0) - all_sources
    end = before[None, :] + tl.cumsum(count, 0)
    slot = e // num_shared * pool_slots
    if SHARED:
        # Behind the rows of the pool's experts before it.
        slot += tl.cumsum(count, 1) - count
    tl.store(shift + e + 0 * s, end - count - slot, mask=valid & (s == rank))
    if owner == rank:
        tl.store(offsets + local * num_ranks + s, end, mask=valid)
        tl.store(count_SL + s * num_local + local, count.to(tl.float32), mask=valid)


def push_tokens(
    tokens_TD: Tensor,
    probs_TE: Tensor | None,
    slot_of_TK: Tensor,
    expert_of_TK: Tensor,
    shift_E: Tensor,
    rows_R: Tensor,
    probs_R: Tensor,
    places_R: Tensor,
    rank: int,
) -> None:
    """Send every token's row once to each rank of its experts, and its probabilities to all.

    Args:
        tokens_TD: contiguous.
        probs_TE: contiguous, floating point; None if nothing travels beside the rows.
        slot_of_TK: int32, -1 where there is none.
        expert_of_TK: int32.
        shift_E: int32, from `place_rows`.
        rows_R: addresses of [N, D] on every rank, in the tokens' dtype.
        probs_R: addresses of fp32 [N] on every rank.
        places_R: addresses of int32 [R, T, K] on every rank: where the rows of every (source,
            token) lie there, -1 for choices that are elsewhere. This rank's part is written on all
            other ranks.
        rank: this rank.

    Example: on rank 1 of 2 with E = 4, P = 2, `shift = [0, 0, 2, 0]`, `slot_of_TK = [[0, 2, 5]]`
    and `expert_of_TK = [[0, 1, 2]]`, the token goes to row 0 on rank 0 and row 7 on rank 1. On rank
    0, `places[1] = [[0, 2, -1]]`, with which `copy_rows` fills row 2.
    """
    num_tokens, top_k = slot_of_TK.shape
    width, num_experts = tokens_TD.shape[1], shift_E.shape[0]
    num_ranks = rows_R.shape[0]
    programs = min(num_tokens, PROGRAMS)
    _push_tokens_kernel[(programs, triton.cdiv(width, block_of(width)))](
        tokens_TD,
        probs_TE,
        slot_of_TK,
        expert_of_TK,
        shift_E,
        rows_R,
        probs_R,
        places_R,
        rank,
        num_tokens,
        num_experts,
        num_experts // num_ranks,
        num_ranks,
        width,
        K=top_k,
        K_BLOCK=triton.next_power_of_2(top_k),
        BLOCK=block_of(width),
        num_warps=4,
    )


@triton.jit
def _push_tokens_kernel(
    tokens,
    probs,
    slot_of,
    expert_of,
    shift,
    rows_at,
    probs_at,
    places_at,
    rank,
    num_tokens,
    num_experts,
    num_local,
    num_ranks,
    width,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, K_BLOCK)
    listed = k < tl.where(tl.program_id(1) == 0, K, 0)  # by one program of a row
    t = tl.program_id(0).to(tl.int64)
    while t < num_tokens:
        row = tl.load(tokens + t * width + column, mask=column < width)
        slot = tl.load(slot_of + t * K + k, mask=k < K, other=-1)
        e = tl.load(expert_of + t * K + k, mask=k < K, other=-1)
        real = slot >= 0
        place = slot + tl.load(shift + e, mask=real, other=0)
        owner = tl.where(real, e // num_local, -1)
        if probs is not None:
            prob = tl.load(probs + t * num_experts + e, mask=real, other=0).to(tl.float32)
        turn = (t % num_ranks).to(tl.int32)
        for i in range(num_ranks):
            peer = (turn + i) % num_ranks
            here = owner == peer
            rows = tl.load(rows_at + peer).to(tl.pointer_type(tokens.dtype.element_ty))
            rows = tl.multiple_of(rows, 16)
            if peer == rank:
                for n in tl.static_range(K):
                    at = tl.max(tl.where(here & (k == n), place, -1), 0)
                    target = rows + at.to(tl.int64) * width + column
                    tl.store(target, row, mask=column < tl.where(at >= 0, width, 0))
            else:
                first = tl.min(tl.where(here, place, 2147483647), 0)
                target = rows + first.to(tl.int64) * width + column
                tl.store(target, row, mask=column < tl.where(first < 2147483647, width, 0))
                places = tl.load(places_at + peer).to(tl.pointer_type(tl.int32))
                places += (rank * num_tokens + t) * K
                tl.store(places + k, tl.where(here, place, -1), mask=listed)
            if probs is not None:
                beside = tl.load(probs_at + peer).to(tl.pointer_type(tl.float32))
                tl.store(beside + place, prob, mask=here & listed)
        t += tl.num_programs(0)


def copy_rows(rows_ND: Tensor, places_RTK: Tensor, rank: int) -> None:
    """Copy each token of another rank from the first of its places on this rank to the others.

    Args:
        rows_ND: contiguous; changed in place.
        places_RTK: contiguous int32, as `push_tokens` of all other ranks wrote them: ascending but
            for -1. This rank's own part is not read.
        rank: this rank.

    Example: on rank 0 of 2, `places = [[[7, 7]], [[0, 2]]]` copies row 0 to row 2.
    """
    num_ranks, num_tokens, top_k = places_RTK.shape
    width = rows_ND.shape[1]
    block = columns(width)
    parts = triton.cdiv(width, block)
    _copy_rows_kernel[(triton.cdiv((num_ranks - 1) * num_tokens, _TOKENS) * parts,)](
        rows_ND,
        places_RTK,
        rank,
        num_tokens,
        (num_ranks - 1) * num_tokens,
        width,
        parts,
        K=top_k,
        K_BLOCK=triton.next_power_of_2(top_k),
        TOKENS=_TOKENS,
        BLOCK=block,
        num_warps=max(1, block // 256),
    )


@triton.jit
def _copy_rows_kernel(
    rows,
    places,
    rank,
    num_tokens,
    num_others,
    width,
    parts,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Tokens of all ranks but this one; the parts of a row are neighbours.
    other = tl.program_id(0) // parts * TOKENS + tl.arange(0, TOKENS)
    column = (tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK))[None, :]
    token = (other + tl.where(other >= rank * num_tokens, num_tokens, 0)).to(tl.int64)
    k = tl.arange(0, K_BLOCK)[None, :]
    listed = (k < K) & (other < num_others)[:, None]
    place = tl.load(places + token[:, None] * K + k, mask=listed, other=-1)
    first = tl.min(tl.where(place >= 0, place, 2147483647), 1)
    again = tl.max(place, 1) > first
    source = rows + first.to(tl.int64)[:, None] * width + column
    row = tl.load(source, mask=again[:, None] & (column < width))
    for n in tl.static_range(1, K):
        at = tl.max(tl.where(k == n, place, -1), 1)
        target = rows + at.to(tl.int64)[:, None] * width + column
        tl.store(target, row, mask=(at > first)[:, None] & (column < width))


def return_rows(
    packed_ND: Tensor,
    probs_N: Tensor | None,
    offsets_LS: Tensor,
    slots_R: Tensor,
    meta_R: Tensor,
    rank: int,
    pool_slots: int,
    experts_per_pool: int,
) -> None:
    """Send packed rows, and a number beside each, back into their slots on their source ranks.

    Args:
        packed_ND: contiguous; rows from `offsets_LS[-1, -1]` on are not read.
        probs_N: contiguous fp32; None if nothing travels beside the rows.
        offsets_LS: contiguous int32.
        slots_R: addresses of [Q, D] on every rank, in the rows' dtype. Empty slots are not written.
        meta_R: addresses of fp32 [Q] on every rank.
        rank: this rank.
        pool_slots: P.
        experts_per_pool: X.

    Example: on rank 1 of 2 with L = 1, P = 2 and X = 1, `offsets = [[1, 3]]`: row 0 goes to slot 2
    on rank 0, rows 1 and 2 to slots 2 and 3 on rank 1.
    """
    width = packed_ND.shape[1]
    programs = min(packed_ND.shape[0], PROGRAMS)
    num_local, num_ranks = offsets_LS.shape
    _return_rows_kernel[(programs, triton.cdiv(width, block_of(width)))](
        packed_ND,
        probs_N,
        offsets_LS,
        slots_R,
        meta_R,
        rank,
        num_local,
        num_ranks,
        pool_slots,
        experts_per_pool,
        width,
        SHARED=experts_per_pool > 1,
        BUFFERS=triton.next_power_of_2(offsets_LS.numel()),
        L_BLOCK=triton.next_power_of_2(num_local),
        BLOCK=block_of(width),
        num_warps=4,
    )


@triton.jit
def _return_rows_kernel(
    packed,
    probs,
    offsets,
    slots_at,
    meta_at,
    rank,
    num_local,
    num_sources,
    pool_slots,
    num_shared,
    width,
    SHARED: tl.constexpr,
    BUFFERS: tl.constexpr,
    L_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    num_buffers = num_local * num_sources
    total = tl.load(offsets + num_buffers - 1)
    share = tl.cdiv(total, tl.num_programs(0))
    row = tl.program_id(0) * share
    last = tl.minimum(row + share, total)
    b = tl.arange(0, BUFFERS)
    ends = tl.load(offsets + b, mask=b < num_buffers, other=2147483647)
    while row < last:
        # The row's buffer is the first one that ends behind it.
        buffer = tl.sum((ends <= row).to(tl.int32), 0)
        begin = tl.load(offsets + buffer - 1, mask=buffer > 0, other=0)
        stop = tl.minimum(tl.load(offsets + buffer), last)
        source = buffer % num_sources
        first_slot = _first_slot(
            buffer, offsets, rank, num_local, num_sources, pool_slots, num_shared, SHARED, L_BLOCK
        )
        slots = tl.load(slots_at + source).to(tl.pointer_type(packed.dtype.element_ty))
        meta = tl.load(meta_at + source).to(tl.pointer_type(tl.float32))
        while row < stop:
            slot = first_slot + (row - begin)
            value = tl.load(packed + row.to(tl.int64) * width + column, mask=column < width)
            target = tl.multiple_of(slots, 16) + slot * width + column
            tl.store(target, value, mask=column < width)
            if probs is not None:
                tl.store(meta + slot, tl.load(probs + row), mask=tl.program_id(1) == 0)
            row += 1


@triton.jit
def _first_slot(
    buffer,
    offsets,
    rank,
    num_local,
    num_sources,
    pool_slots,
    num_shared,
    SHARED: tl.constexpr,
    L_BLOCK: tl.constexpr,
):
    """Return the slot, at its source, of the first row of a (local expert, source)."""
    source, local = buffer % num_sources, buffer // num_sources
    slot = ((rank * num_local + local) // num_shared).to(tl.int64) * pool_slots
    if SHARED:
        # Behind the rows of the pool's experts before it.
        x = tl.arange(0, L_BLOCK)
        place = x * num_sources + source
        here = tl.load(offsets + place, mask=x < local, other=0)
        here -= tl.load(offsets + place - 1, mask=(x < local) & (place > 0), other=0)
        slot += tl.sum(here, 0)
    return slot


def find_slots(
    probs_N: Tensor | None,
    offsets_LS: Tensor,
    slots_R: Tensor,
    meta_R: Tensor,
    rank: int,
    pool_slots: int,
    experts_per_pool: int,
    *,
    row_bytes: int,
    at_N: Tensor,
) -> None:
    """Find where `return_rows` sends packed rows, and send the numbers beside them.

    The arguments are those of `return_rows`, and `row_bytes`, the bytes of a row in a slot. Into
    `at_N`, int64, the address of the slot of each row is written.

    Example: rows of 4 bytes, and slots at the addresses 1000 on rank 0 and 2000 on rank 1. The rows
    of the first example there have the addresses 1008, 2008 and 2012.
    """
    num_local, num_ranks = offsets_LS.shape
    _find_slots_kernel[(num_local * num_ranks,)](
        probs_N,
        offsets_LS,
        slots_R,
        meta_R,
        at_N,
        rank,
        num_local,
        num_ranks,
        pool_slots,
        experts_per_pool,
        row_bytes,
        SHARED=experts_per_pool > 1,
        L_BLOCK=triton.next_power_of_2(num_local),
        BLOCK=512,
        num_warps=4,
    )


@triton.jit
def _find_slots_kernel(
    probs,
    offsets,
    slots_at,
    meta_at,
    at,
    rank,
    num_local,
    num_sources,
    pool_slots,
    num_shared,
    row_bytes,
    SHARED: tl.constexpr,
    L_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    buffer = tl.program_id(0)
    begin = tl.load(offsets + buffer - 1, mask=buffer > 0, other=0)
    end = tl.load(offsets + buffer)
    first_slot = _first_slot(
        buffer, offsets, rank, num_local, num_sources, pool_slots, num_shared, SHARED, L_BLOCK
    )
    slots = tl.load(slots_at + buffer % num_sources)
    meta = tl.load(meta_at + buffer % num_sources).to(tl.pointer_type(tl.float32))
    for first in range(begin, end, BLOCK):
        row = first + tl.arange(0, BLOCK)
        slot = first_slot + (row - begin)
        tl.store(at + row, slots + slot * row_bytes, mask=row < end)
        if probs is not None:
            tl.store(meta + slot, tl.load(probs + row, mask=row < end), mask=row < end)


def block_of(width: int) -> int:
    """Return the columns of a row that a program stores at a time: 2880 are 2 x 2048."""
    return min(2048, max(16, triton.next_power_of_2(width)))
