"""Store rows and their plan straight into the memory of other GPUs.

Every rank has the same buffers. `arriving_R`, int64 [R], holds the address of the first one on all
ranks, as this rank can store to them; S = R. Kernels store to peers and never read from them. They
do not synchronize: `exchange.direct` has the barriers. Products store rows at home themselves:
`gemm.rows_times_weights`.

Programs that store to the same rank at a time share a link, so token t begins with choice t % K.
Plans leave in pieces of 4 KiB, since a link is slow with the few bytes of a token.
.github/LOG.md has times, and other ways to store that were tried.
"""

import triton
import triton.language as tl
from torch import Tensor

# Programs that store rows, at most, for each block of columns: 4 on a multiprocessor of an H200.
PROGRAMS = 528
_CHUNK = 1024  # choices of a plan that a program sends at a time


def push(
    values_TD: Tensor,
    expert_TK: Tensor,
    arriving_R: Tensor,
    *,
    rank: int,
    num_slots: int,
    num_local_experts: int,
    again_TD: Tensor | None = None,
    again_at: int = 0,
    beside: tuple[Tensor, Tensor, Tensor] | None = None,
    plan_at: int = 0,
) -> None:
    """Send the row of every token to each other rank of its experts; a plan to all ranks.

    Args:
        values_TD: contiguous.
        expert_TK: contiguous int32, the experts of each token, ascending, -1 for none.
        arriving_R: addresses of [S - 1, P, D] on every rank, multiples of 16, in the values' dtype,
            for the tokens of all others in order. Token t is written to slot t of this rank on
            other ranks that have one of its experts.
        rank: this rank.
        num_slots: P, at least T.
        num_local_experts: L.
        again_TD: like the values, sent likewise to a second buffer; None sends the values only.
        again_at: bytes from `arriving_R` to that buffer, a multiple of 16.
        beside: place_TK (contiguous int32), prob_TK (contiguous fp32) and kept_E (contiguous
            int32); None sends no plan.
        plan_at: bytes from `arriving_R` to the plans, int32 [3, S, P, K] and [S, L] behind it. This
            rank's part is written on all ranks, itself included: local experts, places, the bits of
            the probabilities, and the counts of the receiver's experts. Experts of other ranks, and
            no expert, are numbers below 0 or from L on.

    Example: on rank 1 of 2 with L = 2 and P = 2, `expert_TK = [[0, 3]]` sends the token to [0, 0]
    on rank 0. The plan has the experts `[[0, 3], [-1, -1]]` there and `[[-2, 1], [-3, -3]]` here.
    """
    num_tokens, top_k = expert_TK.shape
    width, num_ranks = values_TD.shape[1], arriving_R.shape[0]
    place_TK, prob_TK, kept_E = (None, None, None) if beside is None else beside
    senders = 0 if beside is None else min(PROGRAMS, triton.cdiv(num_slots * top_k, _CHUNK))
    # Columns of a row that a program stores: 2880 are two blocks of 2048.
    block = min(2048, max(16, triton.next_power_of_2(width)))
    parts = triton.cdiv(width, block)
    _push_kernel[(senders + min(num_tokens, PROGRAMS) * parts,)](
        values_TD,
        again_TD,
        expert_TK,
        place_TK,
        prob_TK,
        kept_E,
        arriving_R,
        again_at,
        plan_at,
        rank,
        num_ranks,
        num_tokens,
        num_slots,
        num_local_experts,
        width,
        parts,
        senders,
        K=top_k,
        K_BLOCK=triton.next_power_of_2(top_k),
        L_BLOCK=triton.next_power_of_2(num_local_experts),
        BLOCK=block,
        CHUNK=_CHUNK,
        num_warps=4,
    )


@triton.jit
def _push_kernel(
    values,
    again,
    expert_of,
    place_of,
    prob_of,
    kept,
    arriving,
    again_at,
    plan_at,
    rank,
    num_ranks,
    num_tokens,
    num_slots,
    num_local,
    width,
    parts,
    senders,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    L_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Send the plan by the first `senders` programs, rows by the others, which read them once."""
    if tl.program_id(0) < senders:
        if place_of is not None:
            _send_plan(
                expert_of,
                place_of,
                prob_of,
                kept,
                arriving,
                plan_at,
                rank,
                num_ranks,
                num_tokens * K,
                num_slots * K,
                num_local,
                senders,
                L_BLOCK,
                CHUNK,
            )
    else:
        program = tl.program_id(0) - senders
        column = program % parts * BLOCK + tl.arange(0, BLOCK)
        k = tl.arange(0, K_BLOCK)
        t = (program // parts).to(tl.int64)  # 32 bits end at 2**31 elements.
        while t < num_tokens:
            row = tl.load(values + t * width + column, mask=column < width)
            if again is not None:
                token = tl.load(again + t * width + column, mask=column < width)
            # Experts ascend, so the choices of a rank are neighbours: the first of them sends.
            e = tl.load(expert_of + t * K + k, mask=k < K, other=-1)
            before = tl.load(expert_of + t * K + k - 1, mask=(k > 0) & (k < K), other=-1)
            owner = tl.where(e >= 0, e // num_local, -1)
            follows = (before >= 0) & (before // num_local == owner)
            owner = tl.where(follows | (owner == rank), -1, owner)
            turn = (t % K).to(tl.int32)
            for i in range(K):
                peer = tl.max(tl.where(k == (turn + i) % K, owner, -1), 0)
                there = column < tl.where(peer >= 0, width, 0)
                buffer = tl.load(arriving + peer, mask=peer >= 0, other=0)
                place = (rank - (rank > peer).to(tl.int32)) * num_slots + t
                rows = buffer.to(tl.pointer_type(values.dtype.element_ty))
                tl.store(tl.multiple_of(rows, 16) + place * width + column, row, mask=there)
                if again is not None:
                    tokens = (buffer + again_at).to(tl.pointer_type(values.dtype.element_ty))
                    tl.store(tl.multiple_of(tokens, 16) + place * width + column, token, mask=there)
            t += (tl.num_programs(0) - senders) // parts


@triton.jit
def _send_plan(
    expert_of,
    place_of,
    prob_of,
    kept,
    arriving,
    plan_at,
    rank,
    num_ranks,
    num_choices,
    length,
    num_local,
    senders,
    L_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write this rank's part of every rank's plan: `length` numbers of each kind, then counts."""
    program = tl.program_id(0)
    kind = num_ranks.to(tl.int64) * length
    for first in range(program * CHUNK, length, senders * CHUNK):
        n = first + tl.arange(0, CHUNK)
        e = tl.load(expert_of + n, mask=n < num_choices, other=-1)
        place = tl.load(place_of + n, mask=n < num_choices, other=-1)
        prob = tl.load(prob_of + n, mask=n < num_choices, other=0)
        for i in range(num_ranks):
            peer = (program + i) % num_ranks
            plan = (tl.load(arriving + peer) + plan_at).to(tl.pointer_type(tl.int32))
            plan += rank * length + n
            tl.store(plan, e - peer * num_local, mask=n < length)
            tl.store(plan + kind, place, mask=n < length)
            bits = prob.to(tl.int32, bitcast=True)
            tl.store(plan + 2 * kind, bits, mask=n < length)
    if program == 0:
        local = tl.arange(0, L_BLOCK)
        for peer in range(num_ranks):
            counts = (tl.load(arriving + peer) + plan_at).to(tl.pointer_type(tl.int32)) + 3 * kind
            count = tl.load(kept + peer * num_local + local, mask=local < num_local)
            tl.store(counts + rank * num_local + local, count, mask=local < num_local)
