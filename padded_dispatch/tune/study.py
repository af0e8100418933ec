"""Study one trace: everything that tables, plots and the report show, computed once."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import DispatchConfig, Policy, require
from padded_dispatch.tune.cost import Cost, LayerSizes, balanced_drop, cost
from padded_dispatch.tune.recommend import Advice, Recommendation, Target, percent, recommend
from padded_dispatch.tune.replay import Replay, replay
from padded_dispatch.tune.time_model import TimeModel
from padded_dispatch.tune.trace import Trace
from padded_dispatch.tune.warm_up import settled_since

_RECORDS_AT_A_TIME = 256


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question to a trace.

    Args:
        target: the promise in training.
        eval_target: the promise in evaluation.
        policy: decides which rows keep a slot.
        min_capacity: least slots per (source, expert).
        alignment: of an expert's buffer, as in `DispatchConfig`.
        etp: ranks that split every expert between them (expert tensor parallel); each of them is
            a separate source in the trace.
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
    etp: int = 1
    policy_given: bool = False
    factors: tuple[float, ...] | None = None
    hold_out: float = 0.0
    leave_out_warm_up: bool = False

    def __post_init__(self) -> None:
        for name in ("min_capacity", "alignment", "etp"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "be at least 1")
        valid = all(math.isfinite(factor) and factor > 0 for factor in self.factors or ())
        require(valid, "factors", self.factors, "be finite numbers above 0")
        require(0 <= self.hold_out < 1, "hold_out", self.hold_out, "be a share from 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The sizes of a layer and its time model, from which costs follow."""

    sizes: LayerSizes
    time_model: TimeModel


@dataclass(frozen=True, kw_only=True)
class Option:
    """One factor, what it drops and what it costs.

    `dropped`: share of all rows; `balanced_drop`: the same if all experts were equally popular;
    `worst_layer`: of the layer that loses most. `lost`: share of tokens that lost all their
    experts. `fill`: kept rows per slot. `cost`, `padded_ms`, `packed_ms`: of a layer, forward and
    backward, per micro-batch; None where the layer's sizes are not known.
    """

    factor: float
    capacity: int
    dropped: float
    balanced_drop: float
    worst_layer: float
    lost: float
    fill: float
    cost: Cost | None
    padded_ms: float | None
    packed_ms: float | None


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

    `training`, `evaluation`: the two recommendations. `num_ranks`: ranks that hold different
    experts (R). `layers_of_model`: see `study`. `warm_up`: None where no step was left out.
    """

    name: str
    num_experts: int
    top_k: int
    num_ranks: int
    num_tokens: int
    question: Question
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
    replayed = _replay(trace, question)
    training = recommend(replayed, question.target)
    evaluation = replayed if eval_trace is None else _replay(eval_trace, question)
    return Study(
        name=name,
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        num_ranks=num_ranks,
        num_tokens=trace.num_tokens,
        question=question,
        replay=replayed,
        training=training,
        evaluation=recommend(evaluation, question.eval_target),
        options=_options(trace, replayed, question, layer),
        layer=layer,
        layers_of_model=layers_of_model,
        held_out=None if unseen is None else _check(unseen, question, training.overall),
        warm_up=None if before is None else _warm_up(before, trace, question, training.overall),
    )


def _warm_up(before: Trace, trace: Trace, question: Question, advice: Advice) -> WarmUp:
    replayed = _replay(before, dataclasses.replace(question, factors=(advice.factor,)))
    return WarmUp(
        num_steps=len(np.unique(before.steps)),
        settled_since=int(trace.steps.min()),
        factor=advice.factor,
        dropped=float(replayed.dropped.sum() / max(1, int(replayed.demand.sum()))),
    )


def _check(trace: Trace, question: Question, advice: Advice) -> HeldOut:
    factor = advice.phases[-1].factor if advice.phases else advice.factor
    rows = _replay(trace, dataclasses.replace(question, factors=(factor,))).by_layer_and_step()
    demand = rows.demand.sum(0)
    kept = rows.dropped[0].sum(0) <= question.target.drop * demand
    asked = demand > 0
    return HeldOut(factor=factor, num_steps=int(asked.sum()), kept=int(kept[asked].sum()))


def largest_need(trace: Trace) -> float:
    """Return the factor at which the fullest (record, expert) of the trace drops nothing."""
    most = 1
    for start in range(0, trace.num_records, _RECORDS_AT_A_TIME):
        ids_NTK = trace.ids_NTK[start : start + _RECORDS_AT_A_TIME]
        record_NTK = np.broadcast_to(np.arange(len(ids_NTK))[:, None, None], ids_NTK.shape)
        asked_NTK = ids_NTK >= 0
        cells = record_NTK[asked_NTK] * trace.num_experts + ids_NTK[asked_NTK]
        most = max(most, int(np.bincount(cells, minlength=1).max()))
    return most * trace.num_experts / (trace.num_tokens * trace.top_k)


def grid(need: float) -> tuple[float, ...]:
    """Return factors to try, and last `need`, rounded up.

    They rise in steps of 0.05 up to 2, then by 5 % up to 4, then by 10 %.
    """
    factors = [0.5, 0.75, 0.9, *(round(1.0 + 0.05 * i, 2) for i in range(21))]
    last = math.ceil(need * 100) / 100
    while factors[-1] < last:
        factors.append(round(factors[-1] * (1.05 if factors[-1] < 4 else 1.1), 2))
    return (*(factor for factor in factors if factor < last), last)


def _replay(trace: Trace, question: Question) -> Replay:
    return replay(
        trace,
        question.factors or grid(largest_need(trace)),
        policy=question.policy,
        min_capacity=question.min_capacity,
        alignment=question.alignment,
    )


def _options(
    trace: Trace, replayed: Replay, question: Question, layer: Layer | None
) -> tuple[Option, ...]:
    dropped = replayed.dropped.sum(1) / max(1, int(replayed.demand.sum()))
    lost = replayed.lost_tokens.sum(1) / max(1, int(replayed.num_tokens.sum()))
    rows = replayed.by_layer_and_step()
    worst = (rows.dropped.sum(2) / np.maximum(rows.demand.sum(1), 1)).max(1)
    fill = replayed.kept.mean(1) / replayed.slots
    busiest = busiest_rows(trace, replayed, etp=question.etp)
    options = []
    for i in np.argsort(replayed.factors, kind="stable").tolist():
        factor, capacity = float(replayed.factors[i]), int(replayed.capacities[i])
        config = DispatchConfig(
            num_experts=trace.num_experts,
            top_k=trace.top_k,
            capacity_factor=factor,
            min_capacity=question.min_capacity,
            alignment=question.alignment,
            policy=question.policy,
            num_ranks=trace.num_ranks // question.etp,
            etp_size=question.etp,
        )
        found, padded_ms, packed_ms = None, None, None
        if layer is not None:
            found = cost(config, layer.sizes, busiest_rows=float(busiest[i]))
            local = config.num_local_experts
            padded_ms, packed_ms = (
                layer.time_model.layer_ms(found, num_local_experts=local, packed=packed)
                for packed in (False, True)
            )
        options.append(
            Option(
                factor=factor,
                capacity=capacity,
                dropped=float(dropped[i]),
                balanced_drop=balanced_drop(
                    num_tokens=trace.num_tokens,
                    top_k=trace.top_k,
                    num_experts=trace.num_experts,
                    capacity=capacity,
                ),
                worst_layer=float(worst[i]),
                lost=float(lost[i]),
                fill=float(fill[i]),
                cost=found,
                padded_ms=padded_ms,
                packed_ms=packed_ms,
            )
        )
    return tuple(options)


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
