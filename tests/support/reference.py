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
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import PoolSizes

# (shard i, rank r, rows [L, M, D], probs [L, M]) -> [L, M, D], one shard's part of the output.
Experts = Callable[[int, int, NDArray, NDArray], NDArray]
# (shard i, rank r, rows, probs, gradient of the output) -> gradients of rows and of probs.
ExpertsBackward = Callable[[int, int, NDArray, NDArray, NDArray], tuple[NDArray, NDArray]]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The fields of `padded_dispatch.ops.select.Selection`, for one source."""

    kept_TE: NDArray
    probs_TE: NDArray
    demand_E: NDArray
    protected_dropped_E: NDArray


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The fields of `padded_dispatch.ops.plan.DispatchPlan`, for one source."""

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
    protected_T: NDArray | None = None,
    draw: int = 0,
    limit_E: NDArray | None = None,
) -> Selection:
    """Keep at most P rows per pool, or `limit_E` per expert: the first ones in the policy's order.

    Where sources share the slots of a receiver, `limit_E` are the rows that `accept` gives this
    source.
    """
    asked_TE = map_TE.copy()
    if mask_T is not None:
        asked_TE[mask_T] = False
    level_TE = np.zeros(map_TE.shape, int)
    if protected_T is not None:
        level_TE += protected_T[:, None]
    limits = [sizes.pool_slots] * sizes.num_pools if limit_E is None else limit_E.tolist()
    kept_TE = _first_in_order(asked_TE, probs_TE, limits, policy, level_TE, draw)
    return Selection(
        kept_TE=kept_TE,
        probs_TE=np.where(kept_TE, probs_TE, np.zeros_like(probs_TE)),
        demand_E=asked_TE.sum(0, dtype=np.int32),
        protected_dropped_E=(asked_TE & ~kept_TE & (level_TE == 1)).sum(0, dtype=np.int32),
    )


def _first_in_order(
    asked_TE: NDArray,
    probs_TE: NDArray,
    limits: Sequence[int],
    policy: str,
    level_TE: NDArray,
    draw: int,
) -> NDArray:
    """Keep the first rows of each pool, ordered by level, then policy, then token, then expert."""
    num_tokens, num_experts = asked_TE.shape
    kept_TE = np.zeros_like(asked_TE)
    experts_per_pool = num_experts // len(limits)
    for g, limit in enumerate(limits):
        rows = []
        for t in range(num_tokens):
            for e in range(g * experts_per_pool, (g + 1) * experts_per_pool):
                if not asked_TE[t, e]:
                    continue
                # Rows with smaller criteria come first.
                criteria: tuple[float, ...] = ()
                if policy == "probs":
                    criteria = (-probs_TE[t, e],)
                elif policy == "random":
                    criteria = (-random_score(draw, t, e),)
                elif policy == "priority":
                    choices = [f for f in range(num_experts) if asked_TE[t, f]]
                    choices.sort(key=lambda f: (-probs_TE[t, f], f))
                    criteria = (choices.index(e), -probs_TE[t, choices[0]])
                rows.append((-level_TE[t, e], *criteria, t, e))
        for *_, t, e in sorted(rows)[:limit]:
            kept_TE[t, e] = True
    return kept_TE


def accept(
    demand_SE: NDArray, *, num_ranks: int, num_rows: int, kept_SE: NDArray | None = None
) -> NDArray:
    """Share the N slots of each receiver among the sources and experts that ask for them.

    Each (source, expert) gets the rows of `kept_SE`, or else its own share, N // (S * L), if it
    asks for so many. Free slots are shared in proportion to what is asked beyond that.
    """
    num_sources, num_experts = demand_SE.shape
    num_local = num_experts // num_ranks
    accepted_SE = np.zeros_like(demand_SE)
    for r in range(num_ranks):
        cells = [(s, r * num_local + i) for s in range(num_sources) for i in range(num_local)]
        demand = [int(demand_SE[cell]) for cell in cells]
        if kept_SE is None:
            base = [min(asked, num_rows // len(cells)) for asked in demand]
        else:
            base = [int(kept_SE[cell]) for cell in cells]
        excess = sum(demand) - sum(base)
        free = min(num_rows - sum(base), excess)
        offset = excess * _hash(r, demand) // 2**32
        before = 0
        for i, cell in enumerate(cells):
            upto = before + demand[i] - base[i]
            more = 0
            if excess > 0:
                more = (upto * free + offset) // excess - (before * free + offset) // excess
            accepted_SE[cell] = base[i] + more
            before = upto
    return accepted_SE


def _hash(receiver: int, demand: Sequence[int]) -> int:
    """Mix 32 bits from a receiver's number and its demands."""
    total = sum(_mix(_mix(i ^ 0x9E3779B9) ^ rows) for i, rows in enumerate(demand))
    return _mix(_mix(receiver) ^ total % 2**32)


def renormalize(selection: Selection, asked_TE: NDArray, probs_TE: NDArray) -> Selection:
    """Scale a token's kept probabilities up to the sum that it asked with, in at least fp32."""
    dtype = probs_TE.dtype
    least = np.sqrt(np.finfo(dtype).smallest_normal)
    wide_TE = probs_TE.astype(np.promote_types(dtype, np.float32))
    scaled_TE = selection.probs_TE.copy()
    for t in range(asked_TE.shape[0]):
        asked = sum(wide_TE[t, e] for e in np.flatnonzero(asked_TE[t]))
        kept = sum(wide_TE[t, e] for e in np.flatnonzero(selection.kept_TE[t]))
        lost_some = selection.kept_TE[t].sum() < asked_TE[t].sum()
        if lost_some and kept >= least:
            scaled_TE[t] = wide_TE[t] * selection.kept_TE[t] / kept * asked
    return replace(selection, probs_TE=scaled_TE)


def reroute(
    selection: Selection,
    asked_TE: NDArray,
    scores_TE: NDArray,
    choice_TE: NDArray,
    *,
    sizes: PoolSizes,
    policy: str,
    rounds: int,
    protected_T: NDArray | None = None,
    draw: int = 0,
) -> Selection:
    """Send dropped rows to their tokens' best other experts, by choice, while slots are free."""
    limits = [sizes.pool_slots] * sizes.num_pools
    kept_TE = selection.kept_TE.copy()
    for _ in range(rounds):
        taken_G = _rows_of_pools(kept_TE, sizes.num_pools)
        wanted_TE = _with_proposals(kept_TE, asked_TE, choice_TE, taken_G < sizes.pool_slots)
        kept_TE = _first_in_order(
            wanted_TE, scores_TE, limits, policy, _levels(kept_TE, protected_T), draw
        )
    return _rerouted(selection, kept_TE, asked_TE, scores_TE)


def reroute_to_receivers(
    selections: Sequence[Selection],
    asked_STE: NDArray,
    scores_STE: NDArray,
    choice_STE: NDArray,
    *,
    num_ranks: int,
    num_rows: int,
    policy: str,
    rounds: int,
    protected_ST: NDArray | None = None,
    draw: int = 0,
) -> list[Selection]:
    """Do the same for all sources, which share the N slots of each receiver."""
    sources = range(len(selections))
    kept_STE = np.array([selection.kept_TE for selection in selections])
    for _ in range(rounds):
        kept_SE = kept_STE.sum(1, dtype=np.int32)
        has_room_R = _rows_of_pools(kept_SE, num_ranks) < num_rows
        wanted_STE = np.array(
            [_with_proposals(kept_STE[s], asked_STE[s], choice_STE[s], has_room_R) for s in sources]
        )
        accepted_SE = accept(
            wanted_STE.sum(1, dtype=np.int32),
            num_ranks=num_ranks,
            num_rows=num_rows,
            kept_SE=kept_SE,
        )
        for s in sources:
            kept_STE[s] = _first_in_order(
                wanted_STE[s],
                scores_STE[s],
                accepted_SE[s].tolist(),
                policy,
                _levels(kept_STE[s], None if protected_ST is None else protected_ST[s]),
                draw,
            )
    return [_rerouted(selections[s], kept_STE[s], asked_STE[s], scores_STE[s]) for s in sources]


def _rows_of_pools(rows_NE: NDArray, num_pools: int) -> NDArray:
    """Count the rows of each pool of consecutive experts."""
    return np.array([part_NE.sum() for part_NE in np.split(rows_NE, num_pools, axis=1)])


def _with_proposals(
    kept_TE: NDArray, asked_TE: NDArray, choice_TE: NDArray, has_room_G: NDArray
) -> NDArray:
    """Add to the kept rows the experts that tokens with dropped rows propose."""
    num_tokens, num_experts = asked_TE.shape
    wanted_TE = kept_TE.copy()
    for t in range(num_tokens):
        others = [
            e
            for e in range(num_experts)
            if not (asked_TE[t, e] or kept_TE[t, e])
            and choice_TE[t, e] > -np.inf
            and has_room_G[e * len(has_room_G) // num_experts]
        ]
        others.sort(key=lambda e: (-choice_TE[t, e], e))
        for e in others[: asked_TE[t].sum() - kept_TE[t].sum()]:
            wanted_TE[t, e] = True
    return wanted_TE


def _levels(kept_TE: NDArray, protected_T: NDArray | None) -> NDArray:
    """Put kept rows before all others, and protected tokens before the rest."""
    return 2 * kept_TE + (0 if protected_T is None else protected_T[:, None])


def _rerouted(
    selection: Selection, kept_TE: NDArray, asked_TE: NDArray, scores_TE: NDArray
) -> Selection:
    """Return the selection with the rows that found another expert, and their scores."""
    probs_TE = np.where(kept_TE & ~asked_TE, scores_TE, selection.probs_TE)
    return replace(selection, kept_TE=kept_TE, probs_TE=probs_TE)


def random_score(draw: int, t: int, e: int) -> int:
    """Mix 32 random bits for a row from the number of the draw, the token and the expert."""
    bits = 0x9E3779B9
    for value in (draw >> 32 & 0xFFFFFFFF, draw & 0xFFFFFFFF, t, e):
        bits = _mix(bits ^ value)
    return bits


def _mix(bits: int) -> int:
    """Apply the finalizer of MurmurHash3 to 32 bits."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        bits = (bits ^ bits >> shift) * factor % 2**32
    return bits


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
