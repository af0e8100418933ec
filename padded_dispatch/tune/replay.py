"""Replay a trace at any capacity factor: what would have been dropped, exactly, without the model.

The dispatcher fills slots in an order: of all rows that compete for the same slots, the first C
keep one. Each row is ordered once among its competitors, and its place in that order, from 0,
decides everything: at capacity C the row is dropped when its place is C or more. All factors are
answered from the same places.

Rows of one record compete within a pool, which is `DispatchConfig.capacity_pool`:

- "expert": a source's rows for one expert; C slots.
- "rank": a source's rows for all experts of one rank; L * C slots.

Equal rows keep the order of token, then expert, which is how the dispatcher breaks ties.

Letters: N records; T tokens of a record; K experts per token; E experts; L experts of one rank; C
slots per (source, expert).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import DispatchConfig, require
from padded_dispatch.trace import Trace

Pool = Literal["expert", "rank"]
POOLS: tuple[Pool, ...] = ("expert", "rank")
Policy = Literal["probs", "position"]

_NEVER = np.iinfo(np.int32).max  # the place of an empty choice, which no capacity reaches
_CHUNK_ROWS = 2**18  # sorted at a time: small enough for a processor's cache


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """The outcome of each capacity factor for every record of a trace.

    `factors`: ascending. `capacities`: the slots of one pool at each factor. `slots`: those of all
    pools. `num_ranks`, `steps`, `layers`, `ranks`: of the trace. `demand_by_expert`: [records,
    experts], rows asked for. `kept_by_expert`: [factors, records, experts]. `num_tokens`:
    [records], tokens that asked for an expert; `lost_tokens`: [factors, records], those of them
    that kept none. `needed_factor`: [records], a factor at which nothing is dropped, from the
    largest demand for one pool.
    """

    pool: Pool
    num_ranks: int
    factors: NDArray[np.float64]
    capacities: NDArray[np.int64]
    slots: NDArray[np.int64]
    steps: NDArray[np.int64]
    layers: NDArray[np.int32]
    ranks: NDArray[np.int32]
    demand_by_expert: NDArray[np.int32]
    kept_by_expert: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    lost_tokens: NDArray[np.int32]
    needed_factor: NDArray[np.float64]

    @cached_property
    def demand(self) -> NDArray[np.int64]:
        """Rows that each record asked for, [records]."""
        return self.demand_by_expert.sum(1, dtype=np.int64)

    @cached_property
    def kept(self) -> NDArray[np.int64]:
        """Rows of each record that keep a slot, [factors, records]."""
        return self.kept_by_expert.sum(2, dtype=np.int64)

    @property
    def dropped(self) -> NDArray[np.int64]:
        """Rows of each record that get no slot, [factors, records]."""
        return self.demand - self.kept

    @cached_property
    def dropped_share(self) -> NDArray[np.float64]:
        """Share of all rows that each factor drops, [factors]."""
        return self.dropped.sum(1) / max(1, int(self.demand.sum()))

    @cached_property
    def by_layer_and_step(self) -> "LayerSteps":
        """Rows, summed over the sources and micro-batches of every (layer, step)."""
        layers, layer_of_record = np.unique(self.layers, return_inverse=True)
        steps, step_of_record = np.unique(self.steps, return_inverse=True)
        shape = len(layers), len(steps)
        cells = np.ravel_multi_index((layer_of_record, step_of_record), shape)

        def summed(rows: NDArray) -> NDArray[np.int64]:
            sums = np.zeros(math.prod(shape), np.int64)
            np.add.at(sums, cells, rows)
            return sums.reshape(shape)

        dropped = np.stack([summed(rows) for rows in self.dropped])
        return LayerSteps(layers=layers, steps=steps, demand=summed(self.demand), dropped=dropped)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerSteps:
    """Rows per layer and step.

    `layers`, `steps`: ascending. `demand`: [layers, steps]. `dropped`: [factors, layers, steps].
    """

    layers: NDArray[np.int32]
    steps: NDArray[np.int64]
    demand: NDArray[np.int64]
    dropped: NDArray[np.int64]


def replay(
    trace: Trace,
    factors: Sequence[float] | None = None,
    *,
    pool: Pool = "expert",
    policy: Policy | None = None,
    etp: int = 1,
) -> Replay:
    """Replay a trace at every capacity factor of `factors`.

    Args:
        trace: the recorded demand.
        factors: each above 0, in any order; the result has them in ascending order. None takes a
            grid that ends with a factor that drops nothing, see `grid`.
        pool: which rows share slots, see the module's docstring.
        policy: which rows keep a slot: the most probable, or those of the first tokens, as
            Megatron's `moe_token_drop_policy`. Their number does not depend on it. None takes
            "probs" where the trace has probabilities.
        etp: ranks that split every expert between them; each of them is a source of the trace.

    Raises:
        ValueError: names the argument, its value and what to change.
    """
    if policy is None:
        policy = "position" if trace.probs_NTK is None else "probs"
    require(policy in ("probs", "position"), "policy", policy, "be probs or position")
    probs_NTK = trace.probs_NTK if policy == "probs" else None
    rule = "be position for a trace without probabilities"
    require(policy == "position" or probs_NTK is not None, "policy", policy, rule)
    config = _config(trace, 1.0, pool, etp)
    pool_of_expert = np.arange(trace.num_experts) // config.sizes(1).experts_per_pool
    num_pools = int(pool_of_expert[-1]) + 1
    demand_by_expert = np.stack([_count(trace, ids_TK) for ids_TK in trace.ids_NTK])
    most = demand_by_expert.reshape(len(demand_by_expert), num_pools, -1).sum(2).max(1)
    needed_factor = most * num_pools / (trace.num_tokens * trace.top_k)
    factors = sorted(map(float, grid(float(needed_factor.max())) if factors is None else factors))
    require(len(factors) >= 1, "factors", factors, "hold at least one factor")
    capacities = [
        _config(trace, factor, pool, etp).sizes(trace.num_tokens).pool_slots for factor in factors
    ]
    shape = len(factors), trace.num_records
    kept_by_expert = np.empty((*shape, trace.num_experts), np.int32)
    lost_tokens = np.empty(shape, np.int32)
    num_tokens = (trace.ids_NTK >= 0).any(2).sum(1, dtype=np.int32)
    for here in _chunks(trace):
        ids_NTK = trace.ids_NTK[here]
        record_N11 = np.arange(len(ids_NTK))[:, None, None]
        # The id -1 is in no count: it never has a place below a capacity.
        cell_NTK = record_N11 * trace.num_experts + ids_NTK
        pool_NTK = record_N11 * num_pools + pool_of_expert[ids_NTK]
        place_NTK = places(ids_NTK, None if probs_NTK is None else probs_NTK[here], pool_NTK)
        for f, capacity in enumerate(capacities):
            kept_NTK = place_NTK < capacity
            counts = np.bincount(cell_NTK[kept_NTK], minlength=kept_by_expert[f, here].size)
            kept_by_expert[f, here] = counts.reshape(-1, trace.num_experts)
            lost_tokens[f, here] = num_tokens[here] - kept_NTK.any(2).sum(1)
    return Replay(
        pool=pool,
        num_ranks=trace.num_ranks,
        factors=np.array(factors),
        capacities=np.array(capacities),
        slots=np.array(capacities) * num_pools,
        steps=trace.steps,
        layers=trace.layers,
        ranks=trace.ranks,
        demand_by_expert=demand_by_expert,
        kept_by_expert=kept_by_expert,
        num_tokens=num_tokens,
        lost_tokens=lost_tokens,
        needed_factor=needed_factor,
    )


def grid(need: float) -> tuple[float, ...]:
    """Return factors to try, and last `need`, rounded up.

    They rise in steps of 0.05 up to 2, then by 5 % up to 4, then by 10 %.
    """
    factors = [0.5, 0.75, 0.9, *(round(1.0 + 0.05 * i, 2) for i in range(21))]
    last = max(0.01, math.ceil(need * 100) / 100)
    while factors[-1] < last:
        factors.append(round(factors[-1] * (1.05 if factors[-1] < 4 else 1.1), 2))
    return (*(factor for factor in factors if factor < last), last)


def places(
    ids_NTK: NDArray[np.int16],
    probs_NTK: NDArray[np.float32] | None,
    pool_NTK: NDArray[np.int64],
) -> NDArray[np.int32]:
    """Count the rows that come before each row in its pool, [N, T, K].

    Args:
        ids_NTK: -1 where there is no row; no capacity reaches its place.
        probs_NTK: the most probable rows come first; None: those of the first tokens.
        pool_NTK: rows with the same number compete.

    Example: one token each for expert 0 with probabilities .2, .5, .9, .5: places 3, 1, 0, 2.
    """
    asks_NTK = ids_NTK >= 0
    pools = pool_NTK[asks_NTK]
    by_pool = (pools,) if probs_NTK is None else (-probs_NTK[asks_NTK], pools)
    order = np.lexsort(by_pool)  # stable
    sizes = np.bincount(pools)
    counts = np.empty(len(pools), np.int32)
    counts[order] = np.arange(len(pools)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    place_NTK = np.full(ids_NTK.shape, _NEVER, np.int32)
    place_NTK[asks_NTK] = counts
    return place_NTK


def _config(trace: Trace, factor: float, pool: Pool, etp: int) -> DispatchConfig:
    require(pool in POOLS, "pool", pool, f"be one of {', '.join(POOLS)}")
    num_sources = trace.num_ranks
    fix = "give the expert tensor parallel size of the run"
    rule = f"divide the {num_sources} sources of the trace"
    require(etp >= 1 and num_sources % etp == 0, "etp", etp, rule, fix)
    return DispatchConfig(
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        capacity_factor=factor,
        capacity_pool=pool,
        num_ranks=num_sources // etp,
        etp_size=etp,
    )


def _count(trace: Trace, ids_TK: NDArray[np.int16]) -> NDArray[np.int32]:
    """Return the rows that a record asks of each expert, [E]."""
    return np.bincount(ids_TK[ids_TK >= 0], minlength=trace.num_experts).astype(np.int32)


def _chunks(trace: Trace) -> list[slice]:
    """Return the trace's records, some at a time."""
    step = max(1, _CHUNK_ROWS // (trace.num_tokens * trace.top_k))
    return [slice(start, start + step) for start in range(0, trace.num_records, step)]
