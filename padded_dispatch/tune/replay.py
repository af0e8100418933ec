"""What would have been dropped: a trace replayed at any capacity, exactly, without the model.

Under every policy the dispatcher fills slots in an order: of all rows that ask for the same slots,
the first C keep one. So a row needs to be ordered once, among those it competes with; its rank in
that order, from 0, says it all: at capacity C it is dropped when the rank is C or more. All factors
are answered from the same ranks.

Three definitions of capacity decide who competes with whom, and what a factor of 1 is:

- "source", ours: a source's rows for one expert; `DispatchConfig.capacity` slots.
- "pooled": all sources' rows for one expert. The same formula for R * T tokens.
- "rank": all sources' rows for all experts of one rank; T * K * factor slots, rounded down, then up
  to the alignment, as `moe_expert_rank_capacity_factor` with HybridEP in Megatron-Core 0.19.0
  (`_HybridEPManager.setup_metadata`). The policy is our answer to whose rows those are; how many
  they are in all does not depend on it. Gaps that FP8 leaves between experts are not counted.

Probability mass is counted in int64 units of 2**-32, rounded row by row, so that a sum does not
depend on its order; so does the dispatcher's telemetry.

Who comes first: the rank of every row among the rows that it competes with for slots.

One 64-bit key per row holds the group of rows it competes in, then what the policy looks at. A
stable sort of these keys leaves equal rows in the order of source, token, expert, which is how the
dispatcher breaks ties.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from padded_dispatch.config import POLICIES, DispatchConfig, Policy, Remedy, require
from padded_dispatch.ops.counters import mass_units
from padded_dispatch.tune.trace import Trace

NEVER = np.iinfo(np.int32).max  # the rank of a choice that asks for nothing: no slot is for it
MAX_GROUPS = 2**16  # their numbers have 16 bits of the key, choices the next 16, scores the last 32


def competing_records(trace: Trace, num_ranks: int) -> NDArray[np.int64]:
    """Records whose rows meet: [U, R] indices into the trace's records, by rank.

    A unit is one pass of one layer on all ranks of an expert-parallel group.

    Raises:
        ValueError: names a unit that lacks some of its ranks.
    """
    groups_N, places_N = np.divmod(trace.ranks, num_ranks)
    passes_N = trace.passes()
    order_N = np.lexsort((places_N, groups_N, trace.layers, passes_N, trace.steps))
    units_4N = np.stack([trace.steps, passes_N, trace.layers, groups_N])[:, order_N]
    starts_U = np.flatnonzero(np.diff(units_4N, axis=1, prepend=-1).any(0))
    lengths_U = np.diff(starts_U, append=len(order_N))
    if (lengths_U != num_ranks).any():
        first = starts_U[lengths_U != num_ranks][0]
        step, number, layer, group = units_4N[:, first].tolist()
        raise ValueError(
            f"num_ranks={num_ranks} is not possible: step {step}, pass {number}, layer {layer} "
            f"lacks some of the ranks {group * num_ranks} to {(group + 1) * num_ranks - 1}; merge "
            "the traces of all ranks, or give the number of ranks that share experts"
        )
    return order_N.reshape(-1, num_ranks)


def row_ranks(
    ids_MK: NDArray[np.int16],
    probs_MK: NDArray[np.float32] | None,
    group_MK: NDArray[np.int64],
    *,
    policy: Policy,
    random: np.random.Generator,
) -> NDArray[np.int32]:
    """[M, K]: how many rows of its group come before each row; `NEVER` where there is no row.

    Args:
        ids_MK: of M tokens, -1 where there is no row.
        probs_MK: their probabilities; "position" and "random" do without.
        group_MK: below `MAX_GROUPS`, rows with the same number compete.
        policy: decides the order within a group, see `padded_dispatch.ops.select`.
        random: what the policy "random" draws from.

    Example: one token each for expert 0 with probabilities .2, .5, .9, .5 ranks 3, 1, 0, 2.
    """
    asks_MK = ids_MK >= 0
    if policy == "position":
        key_A = group_MK[asks_MK].astype(np.uint16)
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
        key_A = key_MK[asks_MK]
    rank_MK = np.full(ids_MK.shape, NEVER, np.int32)
    rank_MK[asks_MK] = _ranks_in_group(key_A, group_MK[asks_MK])
    return rank_MK


def _ranks_in_group(key_A: NDArray, group_A: NDArray[np.int64]) -> NDArray[np.int32]:
    order_A = np.argsort(key_A, kind="stable")
    size_G = np.bincount(group_A)
    start_G = np.cumsum(size_G) - size_G
    rank_A = np.empty(len(key_A), np.int32)
    rank_A[order_A] = np.arange(len(key_A)) - np.repeat(start_G, size_G)
    return rank_A


def _descending(score: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Unsigned numbers that grow as `score` falls; both zeros give the same."""
    bits = (score + np.float32(0)).view(np.int32)
    # Floats compare as their bits do, where the sign is 0; in reverse where it is 1.
    ordered = np.where(bits < 0, ~bits, bits ^ np.int32(-(2**31))).view(np.uint32)
    return ~ordered


Meaning = Literal["source", "rank", "pooled"]
MEANINGS: tuple[str, ...] = get_args(Meaning)

_CHUNK_ROWS = 2**18  # sorted at a time: small enough for a processor's cache


@dataclass(frozen=True, kw_only=True, eq=False)
class WhatIf:
    """What F capacity factors would have done with the N records of a trace.

    `factors_F`: float64. `capacities_F`: int64, the C of each. `slots_F`: float64, slots that they
    offer per record. `num_ranks`, `steps_N`, `layers_N`, `ranks_N`: the trace's. `demand_NE`:
    int32, rows asked for. `kept_FNE`: int32. `asked_mass_N`, `kept_mass_FN`: int64, probability in
    units of 2**-32; None where the trace has none. `lost_tokens_FN`: int32, tokens that asked for
    an expert and kept none; `num_tokens_N`: int32, those that asked.
    `needed_factor_N`: float64, the factor whose capacity is the largest demand for the same slots;
    with "pooled" and "rank", over all sources, and the same for all of them. At that factor nothing
    is dropped.
    """

    meaning: Meaning
    num_ranks: int
    factors_F: NDArray[np.float64]
    capacities_F: NDArray[np.int64]
    slots_F: NDArray[np.float64]
    steps_N: NDArray[np.int64]
    layers_N: NDArray[np.int32]
    ranks_N: NDArray[np.int32]
    demand_NE: NDArray[np.int32]
    kept_FNE: NDArray[np.int32]
    asked_mass_N: NDArray[np.int64] | None
    kept_mass_FN: NDArray[np.int64] | None
    num_tokens_N: NDArray[np.int32]
    lost_tokens_FN: NDArray[np.int32]
    needed_factor_N: NDArray[np.float64]

    @property
    def demand(self) -> NDArray[np.int64]:
        """[N], rows that a record asked for."""
        return self.demand_NE.sum(1, dtype=np.int64)

    @property
    def kept(self) -> NDArray[np.int64]:
        """[F, N], rows of a record that keep a slot."""
        return self.kept_FNE.sum(2, dtype=np.int64)

    @property
    def dropped(self) -> NDArray[np.int64]:
        """[F, N], rows of a record that get none."""
        return self.demand - self.kept

    @property
    def fill(self) -> NDArray[np.float64]:
        """[F, N], kept rows per slot."""
        return self.kept / self.slots_F[:, None]

    @property
    def dropped_share(self) -> NDArray[np.float64]:
        """[F, N], dropped rows per row asked for; 0 for a record that asked for nothing."""
        return _share(self.dropped, self.demand)

    @property
    def dropped_mass_share(self) -> NDArray[np.float64]:
        """[F, N], the same of probability.

        Raises:
            ValueError: the trace has no probabilities.
        """
        if self.asked_mass_N is None or self.kept_mass_FN is None:
            raise ValueError(
                "probs_NTK=None is not possible here: record a trace with probabilities"
            )
        return _share(self.asked_mass_N - self.kept_mass_FN, self.asked_mass_N)

    def by_layer_and_step(self) -> "LayerSteps":
        """Rows, summed over the sources and passes of every (layer, step)."""
        layers_L, layer_of_N = np.unique(self.layers_N, return_inverse=True)
        steps_S, step_of_N = np.unique(self.steps_N, return_inverse=True)
        shape = len(layers_L), len(steps_S)
        cell_N = np.ravel_multi_index((layer_of_N, step_of_N), shape)

        def summed(rows_N: NDArray) -> NDArray[np.int64]:
            sums = np.zeros(math.prod(shape), np.int64)
            np.add.at(sums, cell_N, rows_N)
            return sums.reshape(shape)

        return LayerSteps(
            layers_L=layers_L,
            steps_S=steps_S,
            demand_LS=summed(self.demand),
            dropped_FLS=np.stack([summed(dropped_N) for dropped_N in self.dropped]),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerSteps:
    """Rows per layer and step: `layers_L`, `steps_S` ascending, `demand_LS` and `dropped_FLS`."""

    layers_L: NDArray[np.int32]
    steps_S: NDArray[np.int64]
    demand_LS: NDArray[np.int64]
    dropped_FLS: NDArray[np.int64]

    @property
    def dropped_share(self) -> NDArray[np.float64]:
        """[F, L, S], dropped rows per row asked for; 0 where nothing was asked for, or recorded."""
        return _share(self.dropped_FLS, self.demand_LS)


def what_if(
    trace: Trace,
    factors: Sequence[float],
    *,
    policy: Policy = "probs",
    meaning: Meaning = "source",
    min_capacity: int = 1,
    alignment: int = 1,
    num_ranks: int | None = None,
    remedy: Remedy = "none",
    seed: int = 0,
) -> WhatIf:
    """Replay a trace at every capacity factor of `factors`.

    Args:
        trace: what was asked for.
        factors: at least one, each above 0, in any order.
        policy: who keeps a slot, see `ops.select`. "random" draws with `seed`, not as
            the dispatcher drew. Tokens that were protected are not known here.
        meaning: what the capacity belongs to, see the module's docstring.
        min_capacity: least slots, not with meaning "rank".
        alignment: as in `DispatchConfig`; with "rank", a rank's slots are a multiple of it.
        num_ranks: sources in an expert-parallel group; None takes the trace's. With "pooled" and
            "rank" it divides the sources that the trace has; with "rank" also the experts, of which
            each rank holds as many as the others.
        remedy: "renormalize" scales what is kept and leaves every figure here as it is: mass is
            that of the router. "reroute" asks for scores of experts that a token did not choose,
            which no trace has.
        seed: of the policy "random".

    Raises:
        ValueError: names the argument, its value and what to change.
    """
    num_ranks = trace.num_ranks if num_ranks is None else num_ranks
    _check(trace, factors, policy, meaning, min_capacity, remedy, num_ranks)
    slots = _Slots(
        trace=trace,
        meaning=meaning,
        min_capacity=min_capacity,
        alignment=alignment,
        num_ranks=num_ranks,
    )
    capacities_F = np.array([slots.capacity(float(factor)) for factor in factors], np.int64)
    shape_N, shape_FN = (trace.num_records,), (len(factors), trace.num_records)
    demand_NE = np.empty((*shape_N, trace.num_experts), np.int32)
    kept_FNE = np.empty((*shape_FN, trace.num_experts), np.int32)
    num_tokens_N, lost_tokens_FN = np.empty(shape_N, np.int32), np.empty(shape_FN, np.int32)
    asked_mass_N, kept_mass_FN = np.empty(shape_N, np.int64), np.empty(shape_FN, np.int64)
    needed_factor_N = np.empty(shape_N)
    random = np.random.default_rng(seed)
    for records_UR in slots.chunks():
        rows, records_N = _rows(trace, slots, records_UR, policy, random), records_UR.flatten()
        demand_NE[records_N] = rows.count(NEVER)
        num_tokens_N[records_N] = rows.num_tokens(NEVER)
        asked_mass_N[records_N] = rows.mass(NEVER)
        needed_factor_N[records_N] = np.repeat(
            [slots.needed_factor(demand) for demand in rows.largest_demands(len(records_UR))],
            records_UR.shape[1],
        )
        for f, capacity in enumerate(capacities_F.tolist()):
            kept_FNE[f, records_N] = rows.count(capacity)
            kept_mass_FN[f, records_N] = rows.mass(capacity)
            lost_tokens_FN[f, records_N] = num_tokens_N[records_N] - rows.num_tokens(capacity)
    knows_mass = trace.probs_NTK is not None
    return WhatIf(
        meaning=meaning,
        num_ranks=trace.num_ranks,
        factors_F=np.array(factors, np.float64),
        capacities_F=capacities_F,
        slots_F=capacities_F * slots.buffers_per_record(),
        steps_N=trace.steps,
        layers_N=trace.layers,
        ranks_N=trace.ranks,
        demand_NE=demand_NE,
        kept_FNE=kept_FNE,
        asked_mass_N=asked_mass_N if knows_mass else None,
        kept_mass_FN=kept_mass_FN if knows_mass else None,
        num_tokens_N=num_tokens_N,
        lost_tokens_FN=lost_tokens_FN,
        needed_factor_N=needed_factor_N,
    )


def _check(
    trace: Trace,
    factors: Sequence[float],
    policy: str,
    meaning: str,
    min_capacity: int,
    remedy: str,
    num_ranks: int,
) -> None:
    require(policy in POLICIES, "policy", policy, f"choose one of {', '.join(POLICIES)}")
    require(meaning in MEANINGS, "meaning", meaning, f"choose one of {', '.join(MEANINGS)}")
    require(
        remedy in ("none", "renormalize"),
        "remedy",
        remedy,
        "a trace can replay none and renormalize; train with reroute to see what it does",
    )
    require(len(factors) >= 1, "factors", factors, "give at least one")
    require(
        trace.probs_NTK is not None or policy in ("position", "random"),
        "policy",
        policy,
        "this trace has no probabilities; choose position or random",
    )
    require(
        meaning != "rank" or min_capacity == 1,
        "min_capacity",
        min_capacity,
        "Megatron-Core has none for a rank; leave it out",
    )
    require(
        meaning != "rank" or trace.num_experts % num_ranks == 0,
        "num_experts",
        trace.num_experts,
        f"make it a multiple of num_ranks={num_ranks}",
    )


@dataclass(frozen=True, kw_only=True)
class _Slots:
    """What one meaning of capacity says about slots."""

    trace: Trace
    meaning: Meaning
    min_capacity: int
    alignment: int
    num_ranks: int

    def capacity(self, factor: float) -> int:
        """Slots for the rows of one group (C)."""
        trace, pooled = self.trace, self.meaning == "pooled"
        config = DispatchConfig(
            num_experts=trace.num_experts,
            top_k=trace.top_k,
            capacity_factor=factor,
            min_capacity=self.min_capacity,
            alignment=self.alignment,
            # Only how many sources share a buffer matters; with expert tensor parallelism there
            # may be more of them than experts.
            etp_size=1 if pooled else self.num_ranks,
        )
        if self.meaning == "rank":
            budget = int(trace.num_tokens * trace.top_k * factor)
            return -(-budget // self.alignment) * self.alignment
        return config.capacity(trace.num_tokens * (self.num_ranks if pooled else 1))

    def buffers_per_record(self) -> np.float64:
        """Groups of slots, shared out among the records that compete for them."""
        num_experts = self.trace.num_experts
        buffers = {"source": num_experts, "rank": 1, "pooled": num_experts / self.num_ranks}
        return np.float64(buffers[self.meaning])

    def needed_factor(self, demand: int) -> float:
        """A factor whose capacity is `demand`, but for minimum and alignment."""
        rows = self.trace.num_tokens * self.trace.top_k
        if self.meaning == "rank":
            factor = demand / rows
            # What a division rounds down would lose a slot when rows * factor is rounded down.
            return factor if int(rows * factor) >= demand else math.nextafter(factor, math.inf)
        sources = self.num_ranks if self.meaning == "pooled" else 1
        return demand * self.trace.num_experts / (rows * sources)

    def group_of_expert(self) -> NDArray[np.int64]:
        """[E], which of a unit's groups an expert's rows compete in."""
        experts_E = np.arange(self.trace.num_experts)
        if self.meaning == "rank":
            return experts_E // (self.trace.num_experts // self.num_ranks)
        return experts_E

    def chunks(self) -> list[NDArray[np.int64]]:
        """The trace's records, in units that compete, some units at a time."""
        if self.meaning == "source":
            records_UR = np.arange(self.trace.num_records)[:, None]
        else:
            records_UR = competing_records(self.trace, self.num_ranks)
        rows = records_UR.shape[1] * self.trace.num_tokens * self.trace.top_k
        units = max(1, min(_CHUNK_ROWS // rows, MAX_GROUPS // self.trace.num_experts))
        return [records_UR[start : start + units] for start in range(0, len(records_UR), units)]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rows:
    """Rows of some records, each with its rank among those that it competes with.

    `cell_NTK`: `n * E + e`. `first_NT`: the lowest rank of a token's rows. `mass_NTK`: 0 without
    probabilities.
    """

    num_experts: int
    cell_NTK: NDArray[np.int64]
    rank_NTK: NDArray[np.int32]
    first_NT: NDArray[np.int32]
    mass_NTK: NDArray[np.int64]

    def count(self, capacity: int) -> NDArray[np.int64]:
        """[N, E], rows that keep one of `capacity` slots."""
        cells = self.cell_NTK[self.rank_NTK < capacity]
        num_records = len(self.rank_NTK)
        counts = np.bincount(cells, minlength=num_records * self.num_experts)
        return counts.reshape(num_records, self.num_experts)

    def mass(self, capacity: int) -> NDArray[np.int64]:
        """[N], their probability."""
        return np.where(self.rank_NTK < capacity, self.mass_NTK, 0).sum((1, 2))

    def num_tokens(self, capacity: int) -> NDArray[np.int64]:
        """[N], tokens with at least one of them."""
        return (self.first_NT < capacity).sum(1)

    def largest_demands(self, num_units: int) -> list[int]:
        """Of each unit: one more than the highest rank."""
        rank_UM = np.where(self.rank_NTK == NEVER, -1, self.rank_NTK).reshape(num_units, -1)
        return (rank_UM.max(1) + 1).tolist()


def _rows(
    trace: Trace,
    slots: _Slots,
    records_UR: NDArray[np.int64],
    policy: Policy,
    random: np.random.Generator,
) -> _Rows:
    ids_NTK = trace.ids_NTK[records_UR.flatten()]
    probs_NTK = None if trace.probs_NTK is None else trace.probs_NTK[records_UR.flatten()]
    n_N11 = np.arange(len(ids_NTK))[:, None, None]
    # A choice of nobody points to the last expert; its rank keeps it out of every count.
    group_NTK = n_N11 // records_UR.shape[1] * trace.num_experts + slots.group_of_expert()[ids_NTK]
    rank_NTK = row_ranks(
        ids_NTK.reshape(-1, trace.top_k),
        None if probs_NTK is None else probs_NTK.reshape(-1, trace.top_k),
        group_NTK.reshape(-1, trace.top_k),
        policy=policy,
        random=random,
    ).reshape(ids_NTK.shape)
    return _Rows(
        num_experts=trace.num_experts,
        cell_NTK=n_N11 * trace.num_experts + ids_NTK,
        rank_NTK=rank_NTK,
        first_NT=rank_NTK.min(2),
        mass_NTK=np.zeros(ids_NTK.shape, np.int64)
        if probs_NTK is None
        else mass_units(torch.from_numpy(probs_NTK)).numpy(),
    )


def _share(part: NDArray[np.int64], whole: NDArray[np.int64]) -> NDArray[np.float64]:
    return part / np.maximum(whole, 1)
