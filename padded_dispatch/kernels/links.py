"""Direct stores that take one row of a token over each link, or one sum of its rows back.

See `padded_dispatch.kernels.direct`, whose buffers, barriers and places these kernels share.

`push_tokens` and `copy_rows` do together what `push_rows` does, to the bit, with one copy of a
token on each link: it arrives at the first of its places on a rank, beside a list of all of them,
and behind the barrier that rank copies it to the others. A rank's own tokens are stored at all
their places at once. The copies are a kernel of their own since a row has to be there before it can
be read: an arrival that its reader waits for would need a flag for every row. The first place is
the experts' own, so that the copy which crossed the link is written once.

`list_slots` and `return_sums` are `return_rows` with one row of a token on each link: the rows that
a token has on a rank are added there, and the sum goes into the first of their slots. A source
lists the slots of its tokens for every rank beforehand, so that a return needs nothing of its push.

P: slots of a pool of a source. X: its experts. Q: slots of a source.
"""

import triton
import triton.language as tl
from torch import Tensor

from padded_dispatch.kernels import direct
from padded_dispatch.kernels.rows import columns

_LISTED = 64  # tokens of a program of `list_slots`
_TOKENS = 4  # of a program of `copy_rows`, whose rows are in flight together


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
    sent_R: Tensor | None = None,
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
        sent_R: see `padded_dispatch.kernels.direct`.

    Example: on rank 1 of 2 with E = 4, P = 2, `shift = [0, 0, 2, 0]`, `slot_of_TK = [[0, 2, 5]]`
    and `expert_of_TK = [[0, 1, 2]]`, the token goes to row 0 on rank 0 and row 7 on rank 1. On rank
    0, `places[1] = [[0, 2, -1]]`, with which `copy_rows` fills row 2.
    """
    num_tokens, top_k = slot_of_TK.shape
    width, num_experts = tokens_TD.shape[1], shift_E.shape[0]
    num_ranks = rows_R.shape[0]
    programs = min(num_tokens, direct.PROGRAMS)
    _push_tokens_kernel[(programs, triton.cdiv(width, direct.block_of(width)))](
        tokens_TD,
        probs_TE,
        slot_of_TK,
        expert_of_TK,
        shift_E,
        rows_R,
        probs_R,
        places_R,
        sent_R,
        rank,
        num_tokens,
        num_experts,
        num_experts // num_ranks,
        num_ranks,
        width,
        K=top_k,
        K_BLOCK=triton.next_power_of_2(top_k),
        BLOCK=direct.block_of(width),
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
    sent,
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
            if sent is not None:
                num_here = tl.sum(here.to(tl.int32), 0)
                num_sent = tl.where(peer == rank, num_here, tl.minimum(num_here, 1))
                tl.atomic_add(sent + peer, num_sent, mask=tl.program_id(1) == 0)
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


def list_slots(
    slot_of_TK: Tensor,
    expert_of_TK: Tensor,
    lists_R: Tensor,
    home_TK: Tensor,
    rank: int,
    num_local: int,
) -> None:
    """Tell every rank the slots and experts of this rank's tokens there, for `return_sums`.

    Args:
        slot_of_TK: int32, -1 where there is none.
        expert_of_TK: int32.
        lists_R: addresses of int32 [R, T, 2, K] on every rank: of every (source, token), its slots
            at the source, -1 for choices that are elsewhere, and its experts there. This rank's
            part is written on all ranks.
        home_TK: int32, written: the slots into which sums come, -1 for other choices.
        rank: this rank.
        num_local: experts of a rank (L).

    Example: on rank 1 with L = 2, `slot_of_TK = [[0, 2, 5]]` and `expert_of_TK = [[0, 1, 2]]` give
    `lists[1] = [[[0, 2, -1], [0, 1, 0]]]` on rank 0, `[[[-1, -1, 5], [0, 1, 0]]]` on rank 1, and
    `home = [[0, -1, 5]]`.
    """
    num_tokens, top_k = slot_of_TK.shape
    _list_slots_kernel[(triton.cdiv(num_tokens, _LISTED),)](
        slot_of_TK,
        expert_of_TK,
        lists_R,
        home_TK,
        rank,
        num_tokens,
        num_local,
        lists_R.shape[0],
        K=top_k,
        K_BLOCK=triton.next_power_of_2(top_k),
        TOKENS=_LISTED,
    )


@triton.jit
def _list_slots_kernel(
    slot_of,
    expert_of,
    lists_at,
    home,
    rank,
    num_tokens,
    num_local,
    num_ranks,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    t = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    k = tl.arange(0, K_BLOCK)[None, :]
    listed = (t < num_tokens) & (k < K)
    slot = tl.load(slot_of + t * K + k, mask=listed, other=-1)
    e = tl.load(expert_of + t * K + k, mask=listed, other=-1)
    owner = tl.where(slot >= 0, e // num_local, -1)
    first = slot >= 0
    for n in tl.static_range(K):
        before = tl.max(tl.where(k == n, owner, -1), 1)[:, None]
        first = first & ((owner != before) | (k <= n))
    tl.store(home + t * K + k, tl.where(first, slot, -1), mask=listed)
    for peer in range(num_ranks):
        lists = tl.load(lists_at + peer).to(tl.pointer_type(tl.int32))
        lists += (rank * num_tokens + t) * (2 * K) + k
        tl.store(lists, tl.where(owner == peer, slot, -1), mask=listed)
        tl.store(lists + K, tl.where(slot >= 0, e % num_local, 0), mask=listed)


def return_sums(
    packed_ND: Tensor,
    probs_N: Tensor | None,
    offsets_LS: Tensor,
    lists_STK: Tensor,
    slots_R: Tensor,
    meta_R: Tensor,
    rank: int,
    pool_slots: int,
    experts_per_pool: int,
    sent_R: Tensor | None = None,
) -> None:
    """Send the sum of each token's packed rows to its rank, and the number beside each row.

    Sums go into the first slot that the token has here; numbers go each into its own.

    Args:
        packed_ND: contiguous; rows from `offsets_LS[-1, -1]` on are not read. Added in fp32,
            experts ascending, and rounded once.
        probs_N: contiguous fp32; None if nothing travels beside the rows.
        offsets_LS: contiguous int32.
        lists_STK: int32 [S, T, 2, K] of this rank, as `list_slots` of all ranks wrote them.
        slots_R: addresses of [Q, D] on every rank, in the rows' dtype.
        meta_R: addresses of fp32 [Q] on every rank.
        rank: this rank.
        pool_slots: P.
        experts_per_pool: X.
        sent_R: see `padded_dispatch.kernels.direct`.

    Example: on rank 0 of 2 with L = 2, P = 2 and X = 1, `offsets = [[0, 1], [0, 2]]`: rank 1 has a
    row of either expert, `packed = [[5], [6]]`. With `lists[1] = [[[0, 2, -1], [0, 1, 0]]]` they
    are of one token, and 11 goes to slot 0 on rank 1.
    """
    num_sources, num_tokens, _, top_k = lists_STK.shape
    num_local, width = offsets_LS.shape[0], packed_ND.shape[1]
    shift_SL = offsets_LS.new_empty(num_sources, num_local)
    _shift_kernel[(1,)](
        offsets_LS,
        shift_SL,
        rank,
        num_local,
        num_sources,
        pool_slots,
        experts_per_pool,
        SHARED=experts_per_pool > 1,
        S_BLOCK=triton.next_power_of_2(num_sources),
        L_BLOCK=triton.next_power_of_2(num_local),
    )
    programs = min(num_sources * num_tokens, direct.PROGRAMS)
    _return_sums_kernel[(programs, triton.cdiv(width, direct.block_of(width)))](
        packed_ND,
        probs_N,
        shift_SL,
        lists_STK,
        slots_R,
        meta_R,
        sent_R,
        num_tokens,
        num_local,
        num_sources,
        width,
        K=top_k,
        K_BLOCK=triton.next_power_of_2(top_k),
        BLOCK=direct.block_of(width),
        num_warps=4,
    )


@triton.jit
def _shift_kernel(
    offsets,
    shift,
    rank,
    num_local,
    num_sources,
    pool_slots,
    num_shared,
    SHARED: tl.constexpr,
    S_BLOCK: tl.constexpr,
    L_BLOCK: tl.constexpr,
):
    """Compute the place of each source's rows of each expert here, less their slot there."""
    s = tl.arange(0, S_BLOCK)[:, None]
    local = tl.arange(0, L_BLOCK)[None, :]
    valid = (s < num_sources) & (local < num_local)
    at = local * num_sources + s
    begin = tl.load(offsets + at - 1, mask=valid & (at > 0), other=0)
    slot = (rank * num_local + local) // num_shared * pool_slots + 0 * s
    if SHARED:
        # Behind the rows of the pool's experts before it.
        count = tl.load(offsets + at, mask=valid, other=0) - begin
        slot += tl.cumsum(count, 1) - count
    tl.store(shift + s * num_local + local, begin - slot, mask=valid)


@triton.jit
def _return_sums_kernel(
    packed,
    probs,
    shift,
    lists,
    slots_at,
    meta_at,
    sent,
    num_tokens,
    num_local,
    num_sources,
    width,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, K_BLOCK)
    i = tl.program_id(0).to(tl.int64)
    while i < num_tokens * num_sources:
        t = i // num_sources
        source = ((i + t) % num_sources).to(tl.int32)
        listed = lists + (source * num_tokens + t) * (2 * K) + k
        slot = tl.load(listed, mask=k < K, other=-1)
        real = slot >= 0
        e = tl.load(listed + K, mask=k < K, other=0)
        place = slot + tl.load(shift + source * num_local + e, mask=real, other=0)
        first = tl.min(tl.where(real, slot, 2147483647), 0)
        if first < 2147483647:
            total = tl.zeros((BLOCK,), dtype=tl.float32)
            for n in tl.static_range(K):
                at = tl.max(tl.where(real & (k == n), place, -1), 0)
                value = packed + at.to(tl.int64) * width + column
                valid = column < tl.where(at >= 0, width, 0)
                total += tl.load(value, mask=valid, other=0.0).to(tl.float32)
            slots = tl.load(slots_at + source).to(tl.pointer_type(packed.dtype.element_ty))
            target = tl.multiple_of(slots, 16) + first.to(tl.int64) * width + column
            tl.store(target, total.to(packed.dtype.element_ty), mask=column < width)
            if probs is not None:
                meta = tl.load(meta_at + source).to(tl.pointer_type(tl.float32))
                beside = real & (k < tl.where(tl.program_id(1) == 0, K, 0))
                tl.store(meta + slot, tl.load(probs + place, mask=beside), mask=beside)
            if sent is not None:
                tl.atomic_add(sent + source, 1, mask=tl.program_id(1) == 0)
        i += tl.num_programs(0)
