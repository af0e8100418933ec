"""Store rows and their plan straight into the memory of other GPUs.

Every rank has a buffer of each kind. `..._R`, int64 [R], holds the addresses of one kind on all
ranks, as this rank can store to them; S = R. Kernels store to peers and never read from them. They
do not synchronize: `exchange.direct` has the barriers. Products store rows at home themselves:
`gemm.rows_times_weights`.

Programs that store to the same rank at a time share a link, so token t begins with rank t % R.
Plans leave in pieces of 4 KiB, since a link is slow with the few bytes of a token.
notebooks/results/LOG.md has times, and other ways to store that were tried.
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
    rows_R: Tensor,
    plan_R: Tensor,
    *,
    rank: int,
    num_slots: int,
    num_local_experts: int,
    beside: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Send the row of every token to each other rank of its experts; a plan to all ranks.

    Args:
        values_TD: contiguous.
        expert_TK: contiguous int32, the experts of each token, -1 for none.
        rows_R: addresses of [S - 1, P, D] on every rank, multiples of 16, in the values' dtype,
            for the tokens of all others in order. Token t is written to slot t of this rank on
            other ranks that have one of its experts.
        plan_R: addresses of the plans on every rank, int32 [3, S, P, K] and [S, L] behind it. This
            rank's part is written on all ranks, itself included: local experts, places, the bits of
            the probabilities, and the counts of the receiver's experts. Experts of other ranks, and
            no expert, are numbers below 0 or from L on.
        rank: this rank.
        num_slots: P, at least T.
        num_local_experts: L.
        beside: place_TK (contiguous int32), prob_TK (contiguous fp32) and kept_E (contiguous
            int32); None sends rows only.

    Example: on rank 1 of 2 with L = 2 and P = 2, `expert_TK = [[0, 3]]` sends the token to [0, 0]
    on rank 0. The plan has the experts `[[0, 3], [-1, -1]]` there and `[[-2, 1], [-3, -3]]` here.
    """
    num_tokens, top_k = expert_TK.shape
    width, num_ranks = values_TD.shape[1], rows_R.shape[0]
    place_TK, prob_TK, kept_E = (None, None, None) if beside is None else beside
    senders = 0 if beside is None else min(PROGRAMS, triton.cdiv(num_slots * top_k, _CHUNK))
    # Columns of a row that a program stores: 2880 are two blocks of 2048.
    block = min(2048, max(16, triton.next_power_of_2(width)))
    parts = triton.cdiv(width, block)
    _push_kernel[(senders + min(num_tokens, PROGRAMS) * parts,)](
        values_TD,
        expert_TK,
        place_TK,
        prob_TK,
        kept_E,
        rows_R,
        plan_R,
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
    expert_of,
    place_of,
    prob_of,
    kept,
    rows_at,
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
            e = tl.load(expert_of + t * K + k, mask=k < K, other=-1)
            owner = tl.where(e >= 0, e // num_local, -1)
            turn = (t % num_ranks).to(tl.int32)
            for i in range(num_ranks):
                peer = (turn + i) % num_ranks
                goes = tl.max((owner == peer).to(tl.int32), 0) * (peer != rank).to(tl.int32)
                rows = tl.load(rows_at + peer).to(tl.pointer_type(values.dtype.element_ty))
                place = (rank - (rank > peer).to(tl.int32)) * num_slots + t
                target = tl.multiple_of(rows, 16) + place * width + column
                tl.store(target, row, mask=column < goes * width)
            t += (tl.num_programs(0) - senders) // parts


@triton.jit
def _send_plan(
    expert_of,
    place_of,
    prob_of,
    kept,
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
            plan = tl.load(plan_at + peer).to(tl.pointer_type(tl.int32)) + rank * length + n
            tl.store(plan, e - peer * num_local, mask=n < length)
            tl.store(plan + kind, place, mask=n < length)
            bits = prob.to(tl.int32, bitcast=True)
            tl.store(plan + 2 * kind, bits, mask=n < length)
    if program == 0:
        local = tl.arange(0, L_BLOCK)
        for peer in range(num_ranks):
            counts = tl.load(plan_at + peer).to(tl.pointer_type(tl.int32)) + 3 * kind
            count = tl.load(kept + peer * num_local + local, mask=local < num_local)
            tl.store(counts + rank * num_local + local, count, mask=local < num_local)


def send_beside(beside_N: Tensor, row_SPK: Tensor, besides_S: Tensor, offsets: Tensor) -> None:
    """Send the number beside the row of every choice to its source; 0 for one without room.

    Args:
        beside_N: loose, contiguous fp32.
        row_SPK: contiguous int32: a row; -1 where it is no choice of this rank, and nothing is
            sent; -2 where it found no room.
        besides_S: addresses of fp32 [P, K] at every source.
        offsets: of the pass; its first row is element 0 of `beside_N`.

    Example: `beside = [.1, .2]`, `row = [[[6, -1]], [[-2, 5]]]` and offsets that begin at 5 send .2
    to the first source, 0 and .1 to the second.
    """
    _send_beside_kernel[(triton.cdiv(row_SPK.numel(), _CHUNK),)](
        beside_N,
        row_SPK,
        besides_S,
        offsets,
        row_SPK.numel(),
        row_SPK[0].numel(),
        BLOCK=_CHUNK,
        num_warps=4,
    )


@triton.jit
def _send_beside_kernel(
    beside, row_of, besides_at, offsets, num_choices, num_of_source, BLOCK: tl.constexpr
):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_of + n, mask=n < num_choices, other=-1)
    value = tl.load(beside + (row - tl.load(offsets)), mask=row >= 0, other=0)
    home = tl.load(besides_at + n // num_of_source, mask=n < num_choices)
    home = home.to(tl.pointer_type(tl.float32)) + n % num_of_source
    tl.store(home, value, mask=row != -1)
