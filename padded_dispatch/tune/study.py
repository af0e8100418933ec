"""Study one trace: everything that tables, plots and the report show, computed once."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import CAPACITY_POOLS, CapacityPool, DispatchConfig, Policy, require
from padded_dispatch.trace import Trace
from padded_dispatch.tune.cost import Cost, LayerSizes, balanced_drop, cost, members_per_host
from padded_dispatch.tune.hosts import Links, OverHosts, by_ranks
from padded_dispatch.tune.recommend import Recommendation, recommend
from padded_dispatch.tune.replay import Replay, has_all_sources, largest_need, replay
from padded_dispatch.tune.target import Target, percent
from padded_dispatch.tune.time_model import TimeModel
from padded_dispatch.tune.warm_up import settled_since

# A pool that more rows share is chosen if its factor is at most this share of the other's.
_WORTH_SHARING = 0.97


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question to a trace.

    Args:
        target: the promise in training.
        eval_target: the promise in evaluation.
        policy: decides which rows keep a slot.
        min_capacity: least slots per (source, expert).
        alignment: of an expert's buffer, as in `DispatchConfig`.
        pools: values of `capacity_pool` to compare, those that fewer rows share first; None takes
            all that can serve the traced run.
        etp: ranks that split every expert between them (expert tensor parallel); each of them is
            a separate source in the trace.
        ranks_per_host: ranks of a host, which direct stores reach.
        policy_given: settings name the policy, instead of leaving it to the model's config.
        factors: to try; None takes a grid up to the factor that drops nothing.
        hold_out: share of the steps, the last ones, that the recommendation does not see and is
            checked on.
        leave_out_warm_up: find the end of the warm-up, and recommend from the steps after it.

    Raises:
        ValueError: names the field, its value and what to change.
    """

    target: Target
    eval_target: Target
    policy: Policy = "probs"
    min_capacity: int = 1
    alignment: int = 1
    pools: tuple[CapacityPool, ...] | None = ("expert",)
    etp: int = 1
    ranks_per_host: int = 8
    policy_given: bool = False
    factors: tuple[float, ...] | None = None
    hold_out: float = 0.0
    leave_out_warm_up: bool = False

    def __post_init__(self) -> None:
        for name in ("min_capacity", "alignment", "etp", "ranks_per_host"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "be at least 1")
        valid = all(math.isfinite(factor) and factor > 0 for factor in self.factors or ())
        require(valid, "factors", self.factors, "be finite numbers above 0")
        require(0 <= self.hold_out < 1, "hold_out", self.hold_out, "be a share from 0 to below 1")
        known = self.pools is None or (self.pools and set(self.pools) <= set(CAPACITY_POOLS))
        require(known, "pools", self.pools, f"be some of {', '.join(CAPACITY_POOLS)}")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The sizes of a layer, its time model, and the rates of its links, from which costs follow."""

    sizes: LayerSizes
    time_model: TimeModel
    links: Links = field(default_factory=Links)


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolAnswer:
    """The recommendation for one kind of pool, `pool`, and the replay that it comes from."""

    pool: CapacityPool
    replay: Replay
    training: Recommendation

    @property
    def dropped(self) -> float:
        """Share of all rows that the recommended factor drops."""
        return self.training.overall.dropped

    @property
    def retried(self) -> float:
        """Share of the steps in which any layer drops a row at the recommended factor."""
        rows = self.replay.by_layer_and_step()
        chosen = int(np.argmax(self.replay.factors == self.training.overall.factor))
        return float((rows.dropped[chosen].sum(0) > 0).mean())

    @property
    def needed(self) -> float:
        """Factor that drops nothing of the trace."""
        return float(self.replay.needed_factor.max())


@dataclass(frozen=True, kw_only=True)
class Option:
    """One factor, what it drops and what it costs.

    `dropped`: share of all rows; `balanced_drop`: the same if all experts were equally popular,
    None where several share a pool; `worst_layer`: of the layer that loses most. `lost`: share of
    tokens that lost all their experts. `retried`: share of the steps in which any layer dropped a
    row, which `on_overflow="retry"` would run again. `fill`: kept rows per slot. `cost`,
    `padded_ms`, `packed_ms`: of a layer, forward and backward, per micro-batch; None where the
    layer's sizes are not known.
    """

    factor: float
    capacity: int
    dropped: float
    balanced_drop: float | None
    worst_layer: float
    lost: float
    retried: float
    fill: float
    cost: Cost | None
    padded_ms: float | None
    packed_ms: float | None

    @property
    def memory_gib(self) -> float:
        """`Cost.memory_bytes` in GiB, where the layer's sizes are known."""
        assert self.cost is not None
        return self.cost.memory_bytes / 2**30


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A check on steps that the recommendation did not see: `kept` of `num_steps` kept the target.

    `factor`: the recommended one, or the last of a schedule.
    """

    factor: float
    num_steps: int
    kept: int


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Steps that were left out: the first `num_steps`, up to before step `settled_since`.

    `dropped`: the share of their rows that the recommended `factor` drops.
    """

    num_steps: int
    settled_since: int
    factor: float
    dropped: float

    def sentence(self) -> str:
        """Return what was left out, and what it means."""
        return (
            f"The first {self.num_steps:,} steps of the trace, before step "
            f"{self.settled_since:,}, are a warm-up and were left out: {self.factor:g} drops "
            f"{percent(self.dropped)} of their rows."
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Study:
    """The answers of a trace.

    `pools`: the answer for each kind of pool that was compared; `pool`: the recommended kind, which
    all that follows is for. `training`, `evaluation`: the two recommendations. `num_ranks`: ranks
    that hold different experts (R). `hosts`: the exchanges by number of ranks; empty where one host
    has all of them, or the sizes of the layer are not known. `layers_of_model`: see `study`.
    `warm_up`: None where no step was left out.
    """

    name: str
    num_experts: int
    top_k: int
    num_ranks: int
    num_tokens: int
    question: Question
    hosts: tuple[OverHosts, ...]
    pools: tuple[PoolAnswer, ...]
    pool: CapacityPool
    replay: Replay
    training: Recommendation
    evaluation: Recommendation
    options: tuple[Option, ...]
    layer: Layer | None
    layers_of_model: bool
    held_out: HeldOut | None
    warm_up: WarmUp | None

    def held_out_sentence(self) -> str:
        """Return the result of the check on unseen steps."""
        assert self.held_out is not None
        kept, num_steps = self.held_out.kept, self.held_out.num_steps
        return (
            f"Checked on the last {num_steps:,} steps, which the recommendation has not seen: the "
            f"target is kept at {self.held_out.factor:g} in {kept:,} of them "
            f"({percent(kept / max(1, num_steps))})."
        )

    def option(self, factor: float) -> Option:
        """Return the option at `factor`, which is among those tried."""
        return next(option for option in self.options if option.factor == factor)


def study(
    trace: Trace,
    question: Question,
    *,
    name: str,
    layer: Layer | None = None,
    eval_trace: Trace | None = None,
    layers_of_model: bool = True,
) -> Study:
    """Replay the trace at every factor, recommend, and compute the cost.

    Args:
        trace: of training.
        question: targets, slots and factors.
        name: of the trace, for titles.
        layer: for costs.
        eval_trace: of evaluation; without one, evaluation is recommended from the training trace.
        layers_of_model: the trace numbers layers as the model does, which settings need.

    Raises:
        ValueError: names the field, its value and what to change.
    """
    num_sources, num_ranks = trace.num_ranks, max(1, trace.num_ranks // question.etp)
    require(
        num_sources == num_ranks * question.etp and trace.num_experts % num_ranks == 0,
        "etp",
        question.etp,
        f"split {num_sources} sources into ranks that hold equally many of {trace.num_experts} "
        "experts",
        "give the expert tensor parallel size of the run",
    )
    unseen = None
    if question.hold_out:
        steps = np.unique(trace.steps)
        first_unseen = steps[math.ceil((1 - question.hold_out) * (len(steps) - 1))]
        require(
            first_unseen > steps[0],
            "hold_out",
            question.hold_out,
            f"leave at least one of {len(steps)} steps to recommend from",
        )
        unseen = trace.where(trace.steps >= first_unseen)
        trace = trace.where(trace.steps < first_unseen)
    before = None
    if question.leave_out_warm_up:
        since = settled_since(trace)
        if since > trace.steps.min():
            before, trace = trace.where(trace.steps < since), trace.where(trace.steps >= since)
    answers = []
    for pool in question.pools or _pools_for(trace, num_ranks, question.ranks_per_host):
        replayed = _replay(trace, question, pool)
        training = recommend(replayed, question.target)
        answers.append(PoolAnswer(pool=pool, replay=replayed, training=training))
    chosen = best_pool(answers)
    evaluation = chosen.replay
    if eval_trace is not None:
        evaluation = _replay(eval_trace, question, chosen.pool)
    return Study(
        name=name,
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        num_ranks=num_ranks,
        num_tokens=trace.num_tokens,
        question=question,
        hosts=_hosts(trace, chosen, question, layer),
        pools=tuple(answers),
        pool=chosen.pool,
        replay=chosen.replay,
        training=chosen.training,
        evaluation=recommend(evaluation, question.eval_target),
        options=_options(trace, chosen, question, layer),
        layer=layer,
        layers_of_model=layers_of_model,
        held_out=None if unseen is None else _check(unseen, question, chosen),
        warm_up=None if before is None else _warm_up(before, trace, question, chosen),
    )


def _warm_up(before: Trace, trace: Trace, question: Question, chosen: PoolAnswer) -> WarmUp:
    factor = chosen.training.overall.factor
    replayed = _replay(before, dataclasses.replace(question, factors=(factor,)), chosen.pool)
    return WarmUp(
        num_steps=len(np.unique(before.steps)),
        settled_since=int(trace.steps.min()),
        factor=factor,
        dropped=float(replayed.dropped.sum() / max(1, int(replayed.demand.sum()))),
    )


def best_pool(answers: Sequence[PoolAnswer]) -> PoolAnswer:
    """Return the pool with the smallest factor; a simpler one wins if it needs hardly more.

    Args:
        answers: at least one, those that fewer rows share first.
    """
    best, *others = answers
    for other in others:
        if other.training.overall.factor <= _WORTH_SHARING * best.training.overall.factor:
            best = other
    return best


def _pools_for(trace: Trace, num_ranks: int, ranks_per_host: int) -> tuple[CapacityPool, ...]:
    """Return the pools that can serve the traced run, those that fewer rows share first.

    With one rank, "receiver" is "rank". It needs direct stores, which reach the GPUs of one host.
    Its demand is known only if all sources were traced.
    """
    one_source = trace.num_ranks == 1
    if one_source or num_ranks > ranks_per_host or not has_all_sources(trace):
        return "expert", "rank"
    return "expert", "rank", "receiver"


def _check(trace: Trace, question: Question, chosen: PoolAnswer) -> HeldOut:
    advice = chosen.training.overall
    factor = advice.phases[-1].factor if advice.phases else advice.factor
    question = dataclasses.replace(question, factors=(factor,))
    rows = _replay(trace, question, chosen.pool).by_layer_and_step()
    demand = rows.demand.sum(0)
    kept = rows.dropped[0].sum(0) <= question.target.drop * demand
    asked = demand > 0
    return HeldOut(factor=factor, num_steps=int(asked.sum()), kept=int(kept[asked].sum()))


def grid(need: float) -> tuple[float, ...]:
    """Return factors to try, and last `need`, rounded up.

    They rise in steps of 0.05 up to 2, then by 5 % up to 4, then by 10 %.
    """
    factors = [0.5, 0.75, 0.9, *(round(1.0 + 0.05 * i, 2) for i in range(21))]
    last = math.ceil(need * 100) / 100
    while factors[-1] < last:
        factors.append(round(factors[-1] * (1.05 if factors[-1] < 4 else 1.1), 2))
    return (*(factor for factor in factors if factor < last), last)


def _replay(trace: Trace, question: Question, pool: CapacityPool) -> Replay:
    slots: dict[str, Any] = dict(
        policy=question.policy,
        pool=pool,
        min_capacity=question.min_capacity,
        alignment=question.alignment,
        etp=question.etp,
    )
    factors = question.factors or grid(largest_need(trace, pool=pool, etp=question.etp))
    return replay(trace, factors, **slots)


def _options(
    trace: Trace, chosen: PoolAnswer, question: Question, layer: Layer | None
) -> tuple[Option, ...]:
    replayed = chosen.replay
    dropped = replayed.dropped.sum(1) / max(1, int(replayed.demand.sum()))
    lost = replayed.lost_tokens.sum(1) / max(1, int(replayed.num_tokens.sum()))
    rows = replayed.by_layer_and_step()
    worst = (rows.dropped.sum(2) / np.maximum(rows.demand.sum(1), 1)).max(1)
    retried = (rows.dropped.sum(1) > 0).mean(1)
    fill = replayed.kept.mean(1) / replayed.slots
    busiest = busiest_rows(trace, replayed, etp=question.etp)
    options = []
    settings = zip(replayed.factors.tolist(), replayed.capacities.tolist(), strict=True)
    for i, (factor, capacity) in enumerate(settings):
        config = _config(trace, chosen, question, factor)
        found, padded_ms, packed_ms = None, None, None
        if layer is not None:
            found = cost(
                config,
                layer.sizes,
                busiest_rows=float(busiest[i]),
                ranks_per_host=question.ranks_per_host,
            )
            padded_ms, packed_ms = (
                layer.time_model.layer_ms(
                    found,
                    num_local_experts=config.num_local_experts,
                    packed=packed,
                    network_gb_per_s=layer.links.network_gb_per_s,
                )
                for packed in (False, True)
            )
        options.append(
            Option(
                factor=factor,
                capacity=capacity,
                dropped=float(dropped[i]),
                balanced_drop=None
                if chosen.pool != "expert"
                else balanced_drop(
                    num_tokens=trace.num_tokens,
                    top_k=trace.top_k,
                    num_experts=trace.num_experts,
                    capacity=capacity,
                ),
                worst_layer=float(worst[i]),
                lost=float(lost[i]),
                retried=float(retried[i]),
                fill=float(fill[i]),
                cost=found,
                padded_ms=padded_ms,
                packed_ms=packed_ms,
            )
        )
    return tuple(options)


def _hosts(
    trace: Trace, chosen: PoolAnswer, question: Question, layer: Layer | None
) -> tuple[OverHosts, ...]:
    """Return what serves the recommended factor, if the group spans hosts."""
    config = _config(trace, chosen, question, chosen.training.overall.factor)
    # Sources that share slots need direct stores, which no other host can reach.
    within = members_per_host(config, question.ranks_per_host) == config.num_ranks
    if layer is None or within or chosen.pool == "receiver":
        return ()
    return by_ranks(config, layer.sizes, question.ranks_per_host, layer.links)


def _config(trace: Trace, chosen: PoolAnswer, question: Question, factor: float) -> DispatchConfig:
    return DispatchConfig(
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        capacity_factor=factor,
        min_capacity=question.min_capacity,
        alignment=question.alignment,
        capacity_pool=chosen.pool,
        policy=question.policy,
        num_ranks=trace.num_ranks // question.etp,
        etp_size=question.etp,
    )


def busiest_rows(trace: Trace, replayed: Replay, *, etp: int = 1) -> NDArray[np.float64]:
    """Return the rows that the busiest rank of a group receives, at each factor.

    The mean over micro-batches. Ranks that split experts between them receive the same rows, from
    all sources. Where a trace holds only some of a group's sources, the others are taken to be like
    them.
    """
    keys = np.stack(
        [trace.steps, trace.layers, trace.microbatches(), trace.ranks // trace.num_ranks], axis=1
    )
    _, unit_of_record, num_sources = np.unique(
        keys, axis=0, return_inverse=True, return_counts=True
    )
    num_ranks = trace.num_ranks // etp
    by_rank = (num_ranks, trace.num_experts // num_ranks)
    most = []
    for kept_NE in replayed.kept_by_expert:
        received = np.zeros((len(num_sources), num_ranks))
        np.add.at(received, unit_of_record.reshape(-1), kept_NE.reshape(-1, *by_rank).sum(2))
        most.append((received.max(1) * trace.num_ranks / num_sources).mean())
    return np.array(most)
