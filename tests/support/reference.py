"""The specification of the package: NumPy loops over all ranks in one process.

It computes everything between the router and the combined output, as slowly and plainly as
possible, and shares nothing with the code that it specifies.

The rules. A token's rows are ordered by ascending expert id. A source lays out its rows in G pools
of P slots, each of which belongs to X = E / G consecutive experts: in a pool, rows are ordered by
expert, then by token, without gaps. An expert's buffer belongs to its sources in blocks of P rows,
since it may fill a pool by itself; each source fills its block in token order. A row without a
token is zero, and so is its gradient. Combine adds a token's slots without weights, in the order
of its rows, in at least fp32.

Letters as in `config`. S = etp_size * R sources, of which source `i * R + r` is rank r of the i-th
expert-parallel group. Arrays over all sources start with S, arrays over all expert ranks with R.
M: rows of one expert's buffer, S * P. Where each expert has its own pool, P = C and X = 1.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import PoolSizes

# (shard i, rank r, rows [L, M, D], probs [L, M]) -> [L, M, D], one shard's part of the output.
Experts = Callable[[int, int, NDArray, NDArray], NDArray]
# (shard i, rank r, rows, probs, gradient of the output) -> gradients of rows and of probs.
ExpertsBackward = Callable[[int, int, NDArray, NDArray, NDArray], tuple[NDArray, NDArray]]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The fields of `padded_dispatch.routing.select.Selection`, for one source."""

    kept_TE: NDArray
    probs_TE: NDArray
    demand_E: NDArray


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The fields of `padded_dispatch.routing.plan.DispatchPlan`, for one source."""

    slot_of_TK: NDArray
    expert_of_TK: NDArray
    choice_of_slot_GP: NDArray
    kept_E: NDArray
    num_unplaced: int


@dataclass(frozen=True, kw_only=True)
class ExpertInput:
    """The fields of `padded_dispatch.exchange.ExpertInput`, for all expert ranks.

    All shards of an expert read the same.

    Attributes:
        rows_RLMD: rows of every expert's buffer.
        probs_RLM: their probabilities.
        kept_RSL: real rows per (rank, source, local expert).
    """

    rows_RLMD: NDArray
    probs_RLM: NDArray
    kept_RSL: NDArray


@dataclass(frozen=True, kw_only=True)
class _Slot:
    """A kept row: token t of a source, for expert e, at row m of its buffer on its rank."""

    source: int
    t: int
    e: int
    rank: int
    local: int
    m: int


def select(
    map_TE: NDArray,
    probs_TE: NDArray,
    *,
    sizes: PoolSizes,
    policy: str,
    mask_T: NDArray | None = None,
) -> Selection:
    """Keep at most P rows per pool: the first ones in the policy's order."""
    asked_TE = map_TE.copy()
    if mask_T is not None:
        asked_TE[mask_T] = False
    kept_TE = np.zeros_like(asked_TE)
    width = sizes.experts_per_pool
    for g in range(sizes.num_pools):
        rows = [
            (-probs_TE[t, e] if policy == "probs" else 0, t, e)
            for t in range(asked_TE.shape[0])
            for e in range(g * width, (g + 1) * width)
            if asked_TE[t, e]
        ]
        for _, t, e in sorted(rows)[: sizes.pool_slots]:
            kept_TE[t, e] = True
    return Selection(
        kept_TE=kept_TE,
        probs_TE=np.where(kept_TE, probs_TE, np.zeros_like(probs_TE)),
        demand_E=asked_TE.sum(0, dtype=np.int32),
    )


def select_backward(kept_TE: NDArray, grad_TE: NDArray) -> NDArray:
    """Return the gradient of the router's probabilities, zero where a row was not kept."""
    return np.where(kept_TE, grad_TE, np.zeros_like(grad_TE))


def plan(kept_TE: NDArray, *, top_k: int, sizes: PoolSizes) -> Plan:
    """Give every kept row a slot, by expert, then by token, while its pool has free slots."""
    num_tokens, num_experts = kept_TE.shape
    num_pools, capacity = sizes.num_pools, sizes.pool_slots
    slot_of_TK = np.full((num_tokens, top_k), -1, np.int32)
    expert_of_TK = np.full((num_tokens, top_k), -1, np.int32)
    choice_of_slot_GP = np.full((num_pools, capacity), -1, np.int32)
    kept_E = np.zeros(num_experts, np.int32)
    num_unplaced = 0
    num_taken_G = np.zeros(num_pools, np.int32)
    for e in range(num_experts):
        g = e * num_pools // num_experts
        for t in range(num_tokens):
            if not kept_TE[t, e]:
                continue
            k = kept_TE[t, :e].sum()
            if k < top_k and num_taken_G[g] < capacity:
                slot_of_TK[t, k] = g * capacity + num_taken_G[g]
                expert_of_TK[t, k] = e
                choice_of_slot_GP[g, num_taken_G[g]] = t * top_k + k
                num_taken_G[g] += 1
                kept_E[e] += 1
            else:
                num_unplaced += 1
    return Plan(
        slot_of_TK=slot_of_TK,
        expert_of_TK=expert_of_TK,
        choice_of_slot_GP=choice_of_slot_GP,
        kept_E=kept_E,
        num_unplaced=num_unplaced,
    )


def dispatch(
    tokens_STD: NDArray, probs_STE: NDArray, plans: Sequence[Plan], *, num_ranks: int
) -> ExpertInput:
    """Copy its token and probability to every slot that has a token."""
    num_sources, _, hidden_size = tokens_STD.shape
    num_experts, capacity = len(plans[0].kept_E), plans[0].choice_of_slot_GP.shape[1]
    num_local_experts = num_experts // num_ranks
    buffer_RLM = num_ranks, num_local_experts, num_sources * capacity
    rows_RLMD = np.zeros((*buffer_RLM, hidden_size), tokens_STD.dtype)
    probs_RLM = np.zeros(buffer_RLM, probs_STE.dtype)
    kept_RSL = np.zeros((num_ranks, num_sources, num_local_experts), np.int32)
    for slot in _slots(plans, num_ranks):
        rows_RLMD[slot.rank, slot.local, slot.m] = tokens_STD[slot.source, slot.t]
        probs_RLM[slot.rank, slot.local, slot.m] = probs_STE[slot.source, slot.t, slot.e]
        kept_RSL[slot.rank, slot.source, slot.local] += 1
    return ExpertInput(rows_RLMD=rows_RLMD, probs_RLM=probs_RLM, kept_RSL=kept_RSL)


def pack(rows_LMD: NDArray, kept_SL: NDArray) -> NDArray:
    """Pack one rank's real rows without gaps, ordered by expert, source, slot."""
    num_sources, num_local_experts = kept_SL.shape
    capacity = rows_LMD.shape[1] // num_sources
    rows = [
        rows_LMD[local, source * capacity + c]
        for local in range(num_local_experts)
        for source in range(num_sources)
        for c in range(kept_SL[source, local])
    ]
    return np.array(rows, rows_LMD.dtype).reshape(-1, *rows_LMD.shape[2:])


def dispatch_backward(
    grad_rows_RLMD: NDArray,
    grad_probs_RLM: NDArray,
    plans: Sequence[Plan],
    *,
    num_experts: int,
) -> tuple[NDArray, NDArray]:
    """Return the gradients of tokens_STD (a sum over slots) and of probs_STE (0 without a slot)."""
    num_ranks = grad_rows_RLMD.shape[0]
    num_tokens = plans[0].slot_of_TK.shape[0]
    grad_STE = np.zeros((len(plans), num_tokens, num_experts), grad_probs_RLM.dtype)
    for slot in _slots(plans, num_ranks):
        grad_STE[slot.source, slot.t, slot.e] = grad_probs_RLM[slot.rank, slot.local, slot.m]
    return combine(grad_rows_RLMD, plans), grad_STE


def combine(out_RLMD: NDArray, plans: Sequence[Plan]) -> NDArray:
    """Sum the slots of every token: [S, T, D]. Padded rows are not read."""
    num_ranks, *_, hidden_size = out_RLMD.shape
    num_tokens = plans[0].slot_of_TK.shape[0]
    dtype = np.promote_types(out_RLMD.dtype, np.float32)
    sum_STD = np.zeros((len(plans), num_tokens, hidden_size), dtype)
    for slot in _slots(plans, num_ranks):
        sum_STD[slot.source, slot.t] += out_RLMD[slot.rank, slot.local, slot.m]
    return sum_STD.astype(out_RLMD.dtype)


def combine_backward(grad_STD: NDArray, plans: Sequence[Plan], *, num_ranks: int) -> NDArray:
    """Return the gradient of out_RLMD: its token's in every slot, exactly 0 in padded rows."""
    num_experts, capacity = len(plans[0].kept_E), plans[0].choice_of_slot_GP.shape[1]
    num_rows = len(plans) * capacity
    shape = num_ranks, num_experts // num_ranks, num_rows, grad_STD.shape[-1]
    grad_RLMD = np.zeros(shape, grad_STD.dtype)
    for slot in _slots(plans, num_ranks):
        grad_RLMD[slot.rank, slot.local, slot.m] = grad_STD[slot.source, slot.t]
    return grad_RLMD


def layer(
    tokens_STD: NDArray,
    probs_STE: NDArray,
    plans: Sequence[Plan],
    experts: Experts,
    *,
    num_ranks: int,
    etp_size: int = 1,
) -> NDArray:
    """Compute dispatch, experts, combine: [S, T, D]. Outputs of an expert's shards are summed."""
    sent = dispatch(tokens_STD, probs_STE, plans, num_ranks=num_ranks)
    out_RLMD = np.zeros_like(sent.rows_RLMD)
    for r in range(num_ranks):
        for i in range(etp_size):
            out_RLMD[r] += experts(i, r, sent.rows_RLMD[r], sent.probs_RLM[r])
    return combine(out_RLMD, plans)


def layer_backward(
    tokens_STD: NDArray,
    probs_STE: NDArray,
    plans: Sequence[Plan],
    experts_backward: ExpertsBackward,
    grad_STD: NDArray,
    *,
    num_ranks: int,
    etp_size: int = 1,
) -> tuple[NDArray, NDArray]:
    """Return the gradients of tokens_STD and probs_STE; those of shards are summed."""
    sent = dispatch(tokens_STD, probs_STE, plans, num_ranks=num_ranks)
    grad_out_RLMD = combine_backward(grad_STD, plans, num_ranks=num_ranks)
    grad_rows_RLMD = np.zeros_like(sent.rows_RLMD)
    grad_probs_RLM = np.zeros_like(sent.probs_RLM)
    for r in range(num_ranks):
        for i in range(etp_size):
            grad_rows_LMD, grad_probs_LM = experts_backward(
                i, r, sent.rows_RLMD[r], sent.probs_RLM[r], grad_out_RLMD[r]
            )
            grad_rows_RLMD[r] += grad_rows_LMD
            grad_probs_RLM[r] += grad_probs_LM
    num_experts = probs_STE.shape[-1]
    return dispatch_backward(grad_rows_RLMD, grad_probs_RLM, plans, num_experts=num_experts)


def _slots(plans: Sequence[Plan], num_ranks: int) -> Iterator[_Slot]:
    """Yield every kept row, by source, then token, then ascending expert."""
    for source, plan_of_source in enumerate(plans):
        num_experts = len(plan_of_source.kept_E)
        num_pools, capacity = plan_of_source.choice_of_slot_GP.shape
        num_shared = num_experts // num_pools
        for t, slots_K in enumerate(plan_of_source.slot_of_TK.tolist()):
            for k, slot in enumerate(slots_K):
                if slot == -1:
                    continue
                e = int(plan_of_source.expert_of_TK[t, k])
                pool = e // num_shared
                before = int(plan_of_source.kept_E[pool * num_shared : e].sum())
                rank, local = divmod(e, num_experts // num_ranks)
                m = source * capacity + slot - pool * capacity - before
                yield _Slot(source=source, t=t, e=e, rank=rank, local=local, m=m)
