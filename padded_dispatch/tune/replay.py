"""Replay a trace at any capacity factor: what would have been dropped, exactly, without the model.

Under every policy the dispatcher fills slots in an order: of all rows that compete for the same
slots, the first C keep one. Each row is therefore ordered once among its competitors. Its place in
that order, from 0, decides everything: at capacity C the row is dropped when its place is C or
more. All factors are answered from the same places.

One 64-bit key per row holds its group of competitors, then what the policy compares. A stable sort
of these keys leaves equal rows in the order of source, token, expert, which is how the dispatcher
breaks ties.

Which rows compete, and what a factor of 1 is, depends on the pool of slots. The first three are
`DispatchConfig.capacity_pool`, so a replay is what the dispatcher does:

- "expert": a source's rows for one expert; C slots.
- "rank": a source's rows for all experts of one rank; L * C slots.
- "receiver": all sources' rows for all experts of one rank; S * L * C slots. Every (source, expert)
  has C of them for itself, and the rest is shared by `padded_dispatch.ops.acceptance`, which
  decides how many rows of each keep a slot; the policy decides which. With one source it is "rank".

The others are the field's:

- "all-sources": all sources' rows for one expert. The same formula for S * T tokens.
- "hybrid-ep": all sources' rows for all experts of one rank; T * K * factor slots for each source,
  rounded down, then up to the alignment, as `moe_expert_rank_capacity_factor` with HybridEP in
  Megatron-Core 0.19.0 (`_HybridEPManager.setup_metadata`). Which rows are kept is decided by our
  policy; their number does not depend on it. Gaps that FP8 leaves between experts are not counted.

Probability mass is counted in int64 units of 2**-32, rounded row by row, so that a sum does not
depend on its order. The dispatcher's telemetry does the same.

Letters: N records; T tokens of a record; K experts per token; E experts; L experts of one rank; S
sources of a group; C slots per (source, expert) of the dispatcher; U units, which are one
micro-batch of one layer, of one source or of all sources of a group; M tokens of several records.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from padded_dispatch.config import POLICIES, DispatchConfig, Policy, require
from padded_dispatch.ops.acceptance import accept_cells
from padded_dispatch.ops.counters import mass_units
from padded_dispatch.trace import Trace

Pool = Literal["expert", "rank", "receiver", "all-sources", "hybrid-ep"]
POOLS: tuple[str, ...] = get_args(Pool)

NEVER = np.iinfo(np.int32).max  # the place of an empty choice, which no capacity reaches
# A key holds the number of its group in 16 bits, then 16 bits of choice, then 32 bits of score.
_MAX_GROUPS = 2**16
# Pools that the experts of one rank share.
_OF_A_RANK = ("rank", "receiver", "hybrid-ep")
_CHUNK_ROWS = 2**18  # sorted at a time: small enough for a processor's cache


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """The outcome of each capacity factor for every record of a trace.

    Axes, in this order: factors, records, experts.

    `pool`: which rows share slots. `factors`: float64, ascending. `capacities`: int64, the slots of
    one pool at each factor. `slots`: float64, slots that each factor offers per record.
    `num_ranks`, `steps`, `layers`, `ranks`: of the trace. `demand_by_expert`: int32 [records,
    experts], rows asked for. `kept_by_expert`: int32 [factors, records, experts]. `asked_mass`
    [records] and `kept_mass` [factors, records]: int64, probability in units of 2**-32; None where
    the trace has none. `num_tokens`: int32 [records], tokens that asked for an expert;
    `lost_tokens`: int32 [factors, records], those of them that kept none. `needed_factor`: float64
    [records], the factor whose capacity is the largest demand for the same slots; nothing is
    dropped at it. Where sources share slots, it is over all of them, and the same for each.
    """

    pool: Pool
    num_ranks: int
    factors: NDArray[np.float64]
    capacities: NDArray[np.int64]
    slots: NDArray[np.float64]
    steps: NDArray[np.int64]
    layers: NDArray[np.int32]
    ranks: NDArray[np.int32]
    demand_by_expert: NDArray[np.int32]
    kept_by_expert: NDArray[np.int32]
    asked_mass: NDArray[np.int64] | None
    kept_mass: NDArray[np.int64] | None
    num_tokens: NDArray[np.int32]
    lost_tokens: NDArray[np.int32]
    needed_factor: NDArray[np.float64]

    @property
    def demand(self) -> NDArray[np.int64]:
        """Rows that each record asked for, [records]."""
        return self.demand_by_expert.sum(1, dtype=np.int64)

    @cached_property  # A dozen readers, and the largest array of a study.
    def kept(self) -> NDArray[np.int64]:
        """Rows of each record that keep a slot, [factors, records]."""
        return self.kept_by_expert.sum(2, dtype=np.int64)

    @property
    def dropped(self) -> NDArray[np.int64]:
        """Rows of each record that get no slot, [factors, records]."""
        return self.demand - self.kept

    def by_layer_and_step(self) -> "LayerSteps":
        """Sum the rows over the sources and micro-batches of every (layer, step)."""
        layers, layer_of_record = np.unique(self.layers, return_inverse=True)
        steps, step_of_record = np.unique(self.steps, return_inverse=True)
        shape = len(layers), len(steps)
        cells = np.ravel_multi_index((layer_of_record, step_of_record), shape)

        def summed(rows: NDArray) -> NDArray[np.int64]:
            sums = np.zeros(math.prod(shape), np.int64)
            np.add.at(sums, cells, rows)
            return sums.reshape(shape)

        return LayerSteps(
            layers=layers,
            steps=steps,
            demand=summed(self.demand),
            dropped=np.stack([summed(rows) for rows in self.dropped]),
        )


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
    factors: Sequence[float],
    *,
    policy: Policy = "probs",
    pool: Pool = "expert",
    min_capacity: int = 1,
    alignment: int = 1,
    etp: int = 1,
    seed: int = 0,
) -> Replay:
    """Replay a trace at every capacity factor of `factors`.

    The remedy "renormalize" scales what is kept and leaves every figure here as it is: mass is that
    of the router. "reroute" cannot be replayed: it needs the scores of experts that a token did not
    choose, which no trace has.

    Args:
        trace: the recorded demand. It must hold all sources of each group if `pool` is one that
            sources share.
        factors: at least one, each above 0, in any order; the result has them in ascending order.
        policy: which rows keep a slot, see `ops.select`. "random" draws with `seed`, not as the
            dispatcher drew. A trace does not hold which tokens were protected.
        pool: which rows share slots, see the module's docstring.
        min_capacity: least slots per (source, expert), not with "hybrid-ep".
        alignment: as in `DispatchConfig`; with "hybrid-ep", a rank's slots are a multiple of it.
        etp: ranks that split every expert between them; each of them is a source of the trace. The
            others hold different experts, in equal numbers, if experts share slots.
        seed: of the policy "random".

    Raises:
        ValueError: names the argument, its value and what to change.
    """
    if pool == "receiver" and trace.num_ranks == 1:
        pool = "rank"  # Nothing is shared between sources.
    slots = _Slots(trace=trace, pool=pool, min_capacity=min_capacity, alignment=alignment, etp=etp)
    _check(slots, factors, policy)
    factors = sorted(map(float, factors))
    capacities = np.array([slots.capacity(factor) for factor in factors], np.int64)
    num_records, num_factors = trace.num_records, len(factors)
    demand_by_expert = np.empty((num_records, trace.num_experts), np.int32)
    kept_by_expert = np.empty((num_factors, num_records, trace.num_experts), np.int32)
    num_tokens = np.empty(num_records, np.int32)
    lost_tokens = np.empty((num_factors, num_records), np.int32)
    asked_mass = np.empty(num_records, np.int64)
    kept_mass = np.empty((num_factors, num_records), np.int64)
    needed_factor = np.empty(num_records)
    random = np.random.default_rng(seed)
    for records_UR in slots.chunks():
        rows, records = _rows(trace, slots, records_UR, policy, random), records_UR.flatten()
        asked = rows.place_NTK < NEVER
        demand_NE = rows.count(asked)
        demand_by_expert[records] = demand_NE
        num_tokens[records] = asked.any(2).sum(1)
        asked_mass[records] = rows.mass(asked)
        demand_USE = demand_NE.reshape(*records_UR.shape, -1)
        needed_factor[records] = np.repeat(slots.needed_factors(demand_USE), records_UR.shape[1])
        for f, capacity in enumerate(capacities.tolist()):
            kept = rows.place_NTK < slots.limits(capacity, demand_USE, rows)
            kept_by_expert[f, records] = rows.count(kept)
            kept_mass[f, records] = rows.mass(kept)
            lost_tokens[f, records] = num_tokens[records] - kept.any(2).sum(1)
    has_probs = trace.probs_NTK is not None
    return Replay(
        pool=pool,
        num_ranks=trace.num_ranks,
        factors=np.array(factors, np.float64),
        capacities=capacities,
        slots=capacities * slots.pools_per_record(),
        steps=trace.steps,
        layers=trace.layers,
        ranks=trace.ranks,
        demand_by_expert=demand_by_expert,
        kept_by_expert=kept_by_expert,
        asked_mass=asked_mass if has_probs else None,
        kept_mass=kept_mass if has_probs else None,
        num_tokens=num_tokens,
        lost_tokens=lost_tokens,
        needed_factor=needed_factor,
    )


def largest_need(trace: Trace, *, pool: Pool = "expert", etp: int = 1) -> float:
    """Return the smallest factor, but for minimum and alignment, that drops nothing of the trace.

    Args:
        trace: see `replay`.
        pool: see `replay`.
        etp: see `replay`.
    """
    slots = _Slots(trace=trace, pool=pool, min_capacity=1, alignment=1, etp=etp)
    _check(slots, (1.0,), "position")
    least = trace.num_experts / (trace.num_tokens * trace.top_k * slots.cells)
    needs = [
        slots.needed_factors(_demand(trace, records_UR)).max() for records_UR in slots.chunks()
    ]
    return max(least, *needs)


def has_all_sources(trace: Trace) -> bool:
    """Return whether every micro-batch of every layer has records of all sources of its groups."""
    try:
        _competing_records(trace)
    except ValueError:
        return False
    return True


def _demand(trace: Trace, records_UR: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows asked for, by unit, source and expert, [U, R, E]."""
    ids_NTK = trace.ids_NTK[records_UR.flatten()]
    record_N11 = np.arange(len(ids_NTK))[:, None, None]
    cells = (record_N11 * trace.num_experts + ids_NTK)[ids_NTK >= 0]
    counts = np.bincount(cells, minlength=len(ids_NTK) * trace.num_experts)
    return counts.reshape(*records_UR.shape, trace.num_experts)


def _check(slots: "_Slots", factors: Sequence[float], policy: str) -> None:
    trace, pool = slots.trace, slots.pool
    require(policy in POLICIES, "policy", policy, f"be one of {', '.join(POLICIES)}")
    require(pool in POOLS, "pool", pool, f"be one of {', '.join(POOLS)}")
    require(len(factors) >= 1, "factors", factors, "hold at least one factor")
    require(
        trace.probs_NTK is not None or policy in ("position", "random"),
        "policy",
        policy,
        "be position or random for a trace without probabilities",
        "set policy='position'",
    )
    require(
        pool != "hybrid-ep" or slots.min_capacity == 1,
        "min_capacity",
        slots.min_capacity,
        "be 1 with pool 'hybrid-ep', for which Megatron-Core has none",
        "leave it out",
    )
    require(
        trace.num_ranks % slots.etp == 0,
        "etp",
        slots.etp,
        f"divide the {trace.num_ranks} sources of the trace",
    )
    require(
        pool not in _OF_A_RANK or trace.num_experts % slots.num_ranks == 0,
        "num_experts",
        trace.num_experts,
        f"be a multiple of num_ranks={slots.num_ranks}",
    )


@dataclass(frozen=True, kw_only=True)
class _Slots:
    """The slots of one kind of pool."""

    trace: Trace
    pool: Pool
    min_capacity: int
    alignment: int
    etp: int

    @property
    def num_ranks(self) -> int:
        """Ranks that hold different experts (R)."""
        return self.trace.num_ranks // self.etp

    @property
    def shared_by_sources(self) -> bool:
        """True if rows of different sources compete."""
        return self.pool not in ("expert", "rank")

    @property
    def cells(self) -> int:
        """Pairs of a source and an expert that share one pool."""
        sources = self.trace.num_ranks if self.shared_by_sources else 1
        experts = self.trace.num_experts // self.num_ranks if self.pool in _OF_A_RANK else 1
        return sources * experts

    def capacity(self, factor: float) -> int:
        """Return the slots of one pool."""
        trace = self.trace
        if self.pool == "hybrid-ep":
            rows = int(trace.num_tokens * trace.top_k * factor) * self.etp
            return -(-rows // self.alignment) * self.alignment
        groups: dict[str, Any] = {"capacity_pool": "expert"}
        if self.pool in _OF_A_RANK:
            groups = dict(capacity_pool=self.pool, num_ranks=self.num_ranks, etp_size=self.etp)
        elif self.pool == "expert":
            # Only how many sources share a buffer matters; R need not divide E.
            groups["etp_size"] = trace.num_ranks
        config = DispatchConfig(
            num_experts=trace.num_experts,
            top_k=trace.top_k,
            capacity_factor=factor,
            min_capacity=self.min_capacity,
            alignment=self.alignment,
            **groups,
        )
        sources = trace.num_ranks if self.pool == "all-sources" else 1
        sizes = config.sizes(trace.num_tokens * sources)
        return sizes.num_rows if self.pool == "receiver" else sizes.pool_slots

    def limits(
        self, capacity: int, demand_USE: NDArray[np.int64], rows: "_Rows"
    ) -> int | NDArray[np.int64]:
        """Return the place from which on rows are dropped: one for all, or one for each row."""
        if self.pool != "receiver":
            return capacity
        num_units, num_sources, num_experts = demand_USE.shape
        by_rank = num_units, num_sources, self.num_ranks, num_experts // self.num_ranks
        demand_URSL = demand_USE.reshape(by_rank).transpose(0, 2, 1, 3)
        accepted_RM = accept_cells(
            torch.from_numpy(demand_URSL.reshape(num_units * self.num_ranks, -1)),
            capacity,
            torch.arange(self.num_ranks).repeat(num_units),
        )
        accepted_URSL = accepted_RM.numpy().reshape(demand_URSL.shape)
        return accepted_URSL.transpose(0, 2, 1, 3).reshape(-1)[rows.cell_NTK]

    def pools_per_record(self) -> np.float64:
        """Return how many pools there are for each record that competes for them."""
        per_source = {
            "expert": self.trace.num_experts,
            "rank": self.num_ranks,
            "receiver": 1 / self.etp,
            "all-sources": self.trace.num_experts / self.trace.num_ranks,
            "hybrid-ep": 1 / self.etp,
        }
        return np.float64(per_source[self.pool])

    def needed_factors(self, demand_USE: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return, for each unit, a factor with a slot for all rows, but for minimum and alignment.

        Args:
            demand_USE: rows asked for, of each source and expert.
        """
        num_units, _, num_experts = demand_USE.shape
        rows = self.trace.num_tokens * self.trace.top_k
        demand = demand_USE.sum(1, keepdims=True) if self.shared_by_sources else demand_USE
        if self.pool in _OF_A_RANK:
            by_rank = self.num_ranks, num_experts // self.num_ranks
            demand = demand.reshape(num_units, -1, *by_rank).sum(3)
        most = demand.reshape(num_units, -1).max(1)
        if self.pool == "hybrid-ep":
            factors = most / (rows * self.etp)
            # A quotient that was rounded down would lose a slot when rows * factor is, too.
            short = np.trunc(rows * factors) * self.etp < most
            return np.where(short, np.nextafter(factors, np.inf), factors)
        return most * num_experts / (rows * self.cells)

    def group_of_expert(self) -> NDArray[np.int64]:
        """Return the group, within a unit, in which each expert's rows compete, [E]."""
        experts = np.arange(self.trace.num_experts)
        if self.pool in ("rank", "hybrid-ep"):
            return experts // (self.trace.num_experts // self.num_ranks)
        return experts

    def chunks(self) -> list[NDArray[np.int64]]:
        """Return the trace's records in units that compete, some units at a time."""
        if self.shared_by_sources:
            records_UR = _competing_records(self.trace)
        else:
            records_UR = np.arange(self.trace.num_records)[:, None]
        rows = records_UR.shape[1] * self.trace.num_tokens * self.trace.top_k
        groups = records_UR.shape[1] * self.trace.num_experts
        units = max(1, min(_CHUNK_ROWS // rows, _MAX_GROUPS // groups))
        return [records_UR[start : start + units] for start in range(0, len(records_UR), units)]


def _competing_records(trace: Trace) -> NDArray[np.int64]:
    """Return the indices of records whose rows compete, by unit and rank, [U, R].

    Raises:
        ValueError: names a unit that lacks some of its ranks.
    """
    num_ranks = trace.num_ranks
    groups, places = np.divmod(trace.ranks, num_ranks)
    microbatches = trace.microbatches()
    order = np.lexsort((places, groups, trace.layers, microbatches, trace.steps))
    keys = np.stack([trace.steps, microbatches, trace.layers, groups])[:, order]
    starts = np.flatnonzero(np.diff(keys, axis=1, prepend=-1).any(0))
    lengths = np.diff(starts, append=len(order))
    if (lengths != num_ranks).any():
        step, number, layer, group = keys[:, starts[lengths != num_ranks][0]].tolist()
        raise ValueError(
            f"step {step}, micro-batch {number}, layer {layer} must have records of ranks "
            f"{group * num_ranks} to {(group + 1) * num_ranks - 1} (num_ranks={num_ranks}), got "
            "only some; merge the traces of all ranks"
        )
    return order.reshape(-1, num_ranks)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rows:
    """Rows of some records, each with its place among its competitors.

    `cell_NTK`: `n * E + e`. `mass_NTK`: 0 without probabilities.
    """

    num_experts: int
    cell_NTK: NDArray[np.int64]
    place_NTK: NDArray[np.int32]
    mass_NTK: NDArray[np.int64]

    def count(self, chosen_NTK: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Count the chosen rows by expert, [N, E]."""
        num_records = len(self.place_NTK)
        counts = np.bincount(self.cell_NTK[chosen_NTK], minlength=num_records * self.num_experts)
        return counts.reshape(num_records, self.num_experts)

    def mass(self, chosen_NTK: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the probability of the chosen rows, [N]."""
        return np.where(chosen_NTK, self.mass_NTK, 0).sum((1, 2))


def _rows(
    trace: Trace,
    slots: _Slots,
    records_UR: NDArray[np.int64],
    policy: Policy,
    random: np.random.Generator,
) -> _Rows:
    ids_NTK = trace.ids_NTK[records_UR.flatten()]
    probs_NTK = None if trace.probs_NTK is None else trace.probs_NTK[records_UR.flatten()]
    record_N11 = np.arange(len(ids_NTK))[:, None, None]
    # The id -1 indexes the last expert; its place keeps it out of every count.
    unit_N11 = record_N11 if slots.pool == "receiver" else record_N11 // records_UR.shape[1]
    group_NTK = unit_N11 * trace.num_experts + slots.group_of_expert()[ids_NTK]
    place_NTK = _places(
        ids_NTK.reshape(-1, trace.top_k),
        None if probs_NTK is None else probs_NTK.reshape(-1, trace.top_k),
        group_NTK.reshape(-1, trace.top_k),
        policy=policy,
        random=random,
    ).reshape(ids_NTK.shape)
    return _Rows(
        num_experts=trace.num_experts,
        cell_NTK=record_N11 * trace.num_experts + ids_NTK,
        place_NTK=place_NTK,
        mass_NTK=np.zeros(ids_NTK.shape, np.int64)
        if probs_NTK is None
        else mass_units(torch.from_numpy(probs_NTK)).numpy(),
    )


def _places(
    ids_MK: NDArray[np.int16],
    probs_MK: NDArray[np.float32] | None,
    group_MK: NDArray[np.int64],
    *,
    policy: Policy,
    random: np.random.Generator,
) -> NDArray[np.int32]:
    """Count the rows of its group that come before each row, [M, K]; `NEVER` where there is no row.

    Args:
        ids_MK: -1 where there is no row.
        probs_MK: their probabilities; "position" and "random" do not need them.
        group_MK: below `_MAX_GROUPS`; rows with the same number compete.
        policy: decides the order within a group, see `padded_dispatch.ops.select`.
        random: draws for the policy "random".

    Example: one token each for expert 0 with probabilities .2, .5, .9, .5: places 3, 1, 0, 2.
    """
    asks_MK = ids_MK >= 0
    if policy == "position":
        keys = group_MK[asks_MK].astype(np.uint16)
    else:
        key_MK = group_MK.astype(np.uint64) << np.uint64(48)
        if policy == "random":
            key_MK |= random.integers(2**32, size=key_MK.shape, dtype=np.uint32)
        else:
            assert probs_MK is not None
            score_MK = np.where(asks_MK, probs_MK, np.float32(-np.inf))
            if policy == "priority":
                # First choices before second ones; among these, tokens by their best probability.
                by_prob_MK = np.argsort(-score_MK, axis=1, kind="stable")
                choice_MK = np.argsort(by_prob_MK, axis=1).astype(np.uint64)
                key_MK |= choice_MK << np.uint64(32)
                score_MK = np.broadcast_to(score_MK.max(1, keepdims=True), score_MK.shape)
            key_MK |= _descending(score_MK)
        keys = key_MK[asks_MK]
    groups = group_MK[asks_MK]
    sizes = np.bincount(groups)
    places = np.empty(len(keys), np.int32)
    places[np.argsort(keys, kind="stable")] = np.arange(len(keys)) - np.repeat(
        np.cumsum(sizes) - sizes, sizes
    )
    place_MK = np.full(ids_MK.shape, NEVER, np.int32)
    place_MK[asks_MK] = places
    return place_MK


def _descending(score: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Map scores to unsigned numbers that grow as the score falls; both zeros give the same."""
    bits = (score + np.float32(0)).view(np.int32)
    # Floats compare as their bits do, where the sign is 0; in reverse where it is 1.
    ordered = np.where(bits < 0, ~bits, bits ^ np.int32(-(2**31))).view(np.uint32)
    return ~ordered
