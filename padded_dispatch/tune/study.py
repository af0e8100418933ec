"""Everything about one trace that tables, plots and the report show: computed once, drawn later."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import DispatchConfig, Policy, require
from padded_dispatch.tune.cost import Cost, LayerSizes, binomial_floor, cost
from padded_dispatch.tune.recommend import Advice, Recommendation, Target, percent, recommend
from padded_dispatch.tune.replay import WhatIf, what_if
from padded_dispatch.tune.time_model import Calibration
from padded_dispatch.tune.trace import Trace

_RECORDS_AT_A_TIME = 256


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of a trace.

    Args:
        target: the promise in training.
        eval_target: the promise in evaluation.
        policy: who keeps a slot.
        min_capacity: least slots per (source, expert).
        alignment: of an expert's buffer, as in `DispatchConfig`.
        etp: ranks that split every expert between them (expert tensor parallel); each of them is a
            source of its own in the trace.
        policy_given: settings name the policy, instead of leaving it to the model's config.
        factors: to try; None takes a grid up to the factor that drops nothing.
        hold_out: share of the steps, the last ones, that the recommendation does not see, and is
            checked on.

    Raises:
        ValueError: for a share that leaves no steps.
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

    def __post_init__(self) -> None:
        if not 0 <= self.hold_out < 1:
            raise ValueError(
                f"hold_out={self.hold_out:g} is not possible: give a share from 0 to below 1"
            )


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What costs are for: sizes of a layer, and how its time is modelled."""

    sizes: LayerSizes
    calibration: Calibration


@dataclass(frozen=True, kw_only=True)
class Option:
    """One factor, what it drops and what it costs.

    `dropped`: share of all rows; `floor`: the same where all experts are equally popular;
    `worst_layer`: of the layer that loses most. `lost`: share of tokens that lost all their
    experts. `fill`: kept rows per slot. `cost`, `padded_ms`, `packed_ms`: of a layer, forward and
    backward, per micro-batch; None where the layer's sizes are not known.
    """

    factor: float
    capacity: int
    dropped: float
    floor: float
    worst_layer: float
    lost: float
    fill: float
    cost: Cost | None
    padded_ms: float | None
    packed_ms: float | None


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A check on steps that the recommendation did not see: in `kept` of `num_steps` it held.

    `factor`: the recommended one, or the last of a schedule.
    """

    factor: float
    num_steps: int
    kept: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Study:
    """A trace's answers. `training`, `evaluation`: recommendations for the two.

    `num_ranks`: that hold different experts (R). `layers_of_model`: see `study`.
    """

    name: str
    num_experts: int
    top_k: int
    num_ranks: int
    num_tokens: int
    question: Question
    what_if: WhatIf
    training: Recommendation
    evaluation: Recommendation
    options: tuple[Option, ...]
    layer: Layer | None
    layers_of_model: bool
    held_out: HeldOut | None

    def held_out_sentence(self) -> str:
        """What the check on unseen steps gave."""
        assert self.held_out is not None
        kept, num_steps = self.held_out.kept, self.held_out.num_steps
        return (
            f"Checked on the last {num_steps:,} steps, which the recommendation has not seen: the "
            f"target is kept at {self.held_out.factor:g} in {kept:,} of them "
            f"({percent(kept / max(1, num_steps))})."
        )

    def option(self, factor: float) -> Option:
        """The one at `factor`, which is among those tried."""
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
    """Replay the trace at every factor, recommend, and cost it.

    Args:
        trace: of training.
        question: what is asked of it.
        name: of the trace, for people.
        layer: for costs.
        eval_trace: of evaluation; without one, evaluation is recommended from the training trace.
        layers_of_model: layer numbers of the trace are those of the model, which settings take.

    Raises:
        ValueError: names what is not possible and what to change.
    """
    num_sources, num_ranks = trace.num_ranks, trace.num_ranks // max(1, question.etp)
    require(
        num_sources == num_ranks * question.etp and trace.num_experts % num_ranks == 0,
        "etp",
        question.etp,
        f"{num_sources} sources over etp must be ranks that hold equally many of "
        f"{trace.num_experts} experts; give the expert tensor parallel size of the run",
    )
    later = None
    if question.hold_out:
        steps_S = np.unique(trace.steps)
        first_unseen = steps_S[math.ceil((1 - question.hold_out) * (len(steps_S) - 1))]
        if first_unseen == steps_S[0]:
            raise ValueError(
                f"hold_out={question.hold_out:g} is not possible: it leaves none of "
                f"{len(steps_S)} steps"
            )
        later = trace.where(trace.steps >= first_unseen)
        trace = trace.where(trace.steps < first_unseen)
    found = _replay(trace, question)
    training = recommend(found, question.target)
    evaluation = found if eval_trace is None else _replay(eval_trace, question)
    return Study(
        name=name,
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        num_ranks=num_ranks,
        num_tokens=trace.num_tokens,
        question=question,
        what_if=found,
        training=training,
        evaluation=recommend(evaluation, question.eval_target),
        options=_options(trace, found, question, layer),
        layer=layer,
        layers_of_model=layers_of_model,
        held_out=None if later is None else _check(later, question, training.overall),
    )


def _check(trace: Trace, question: Question, advice: Advice) -> HeldOut:
    factor = advice.phases[-1].factor if advice.phases else advice.factor
    rows = _replay(trace, dataclasses.replace(question, factors=(factor,))).by_layer_and_step()
    demand_S = rows.demand_LS.sum(0)
    kept_S = rows.dropped_FLS[0].sum(0) <= question.target.drop * demand_S
    asked_S = demand_S > 0
    kept = int(kept_S[asked_S].sum())
    return HeldOut(factor=factor, num_steps=int(asked_S.sum()), kept=kept)


def largest_need(trace: Trace) -> float:
    """The factor at which the fullest (record, expert) of the trace drops nothing."""
    most = 1
    for start in range(0, trace.num_records, _RECORDS_AT_A_TIME):
        ids_NTK = trace.ids_NTK[start : start + _RECORDS_AT_A_TIME]
        record_NTK = np.broadcast_to(np.arange(len(ids_NTK))[:, None, None], ids_NTK.shape)
        asked_NTK = ids_NTK >= 0
        cells = record_NTK[asked_NTK] * trace.num_experts + ids_NTK[asked_NTK]
        most = max(most, int(np.bincount(cells, minlength=1).max()))
    return most * trace.num_experts / (trace.num_tokens * trace.top_k)


def grid(need: float) -> tuple[float, ...]:
    """Factors to try, and `need`, rounded up, at the end: steps of 0.05 up to 2, 5 % to 4, 10 %."""
    factors = [0.5, 0.75, 0.9, *(round(1.0 + 0.05 * i, 2) for i in range(21))]
    last = math.ceil(need * 100) / 100
    while factors[-1] < last:
        factors.append(round(factors[-1] * (1.05 if factors[-1] < 4 else 1.1), 2))
    return (*(factor for factor in factors if factor < last), last)


def _replay(trace: Trace, question: Question) -> WhatIf:
    return what_if(
        trace,
        question.factors or grid(largest_need(trace)),
        policy=question.policy,
        min_capacity=question.min_capacity,
        alignment=question.alignment,
    )


def _options(
    trace: Trace, found: WhatIf, question: Question, layer: Layer | None
) -> tuple[Option, ...]:
    dropped_F = found.dropped.sum(1) / max(1, int(found.demand.sum()))
    lost_F = found.lost_tokens_FN.sum(1) / max(1, int(found.num_tokens_N.sum()))
    layers = found.by_layer_and_step()
    worst_F = (layers.dropped_FLS.sum(2) / np.maximum(layers.demand_LS.sum(1), 1)).max(1)
    fill_F = found.kept.mean(1) / found.slots_F
    busiest_F = busiest_rows(trace, found, etp=question.etp)
    options = []
    for i in np.argsort(found.factors_F, kind="stable").tolist():
        config = DispatchConfig(
            num_experts=trace.num_experts,
            top_k=trace.top_k,
            capacity_factor=float(found.factors_F[i]),
            min_capacity=question.min_capacity,
            alignment=question.alignment,
            policy=question.policy,
            num_ranks=trace.num_ranks // question.etp,
            etp_size=question.etp,
        )
        costs = None
        if layer is not None:
            costs = cost(config, layer.sizes, busiest_rows=float(busiest_F[i]))
        options.append(
            Option(
                factor=float(found.factors_F[i]),
                capacity=int(found.capacities_F[i]),
                dropped=float(dropped_F[i]),
                floor=binomial_floor(
                    num_tokens=trace.num_tokens,
                    top_k=trace.top_k,
                    num_experts=trace.num_experts,
                    capacity=int(found.capacities_F[i]),
                ),
                worst_layer=float(worst_F[i]),
                lost=float(lost_F[i]),
                fill=float(fill_F[i]),
                cost=costs,
                padded_ms=_ms(layer, config, costs, packed=False),
                packed_ms=_ms(layer, config, costs, packed=True),
            )
        )
    return tuple(options)


def _ms(
    layer: Layer | None, config: DispatchConfig, costs: Cost | None, *, packed: bool
) -> float | None:
    if layer is None or costs is None:
        return None
    local = config.num_local_experts
    return layer.calibration.layer_ms(costs, num_local_experts=local, packed=packed)


def busiest_rows(trace: Trace, found: WhatIf, *, etp: int = 1) -> NDArray[np.float64]:
    """[F], rows that the busiest rank of a group receives in a pass, in the mean over passes.

    Ranks that split experts between them receive the same rows, from all sources. Where a trace
    holds some of a group's sources only, the others are taken to be like them.
    """
    keys_N4 = np.stack(
        [trace.steps, trace.layers, trace.passes(), trace.ranks // trace.num_ranks], axis=1
    )
    _, pass_of_N, sources_P = np.unique(keys_N4, axis=0, return_inverse=True, return_counts=True)
    num_ranks = trace.num_ranks // etp
    by_rank = (num_ranks, trace.num_experts // num_ranks)
    most_F = []
    for kept_NE in found.kept_FNE:
        received_PR = np.zeros((len(sources_P), num_ranks))
        np.add.at(received_PR, pass_of_N.reshape(-1), kept_NE.reshape(-1, *by_rank).sum(2))
        most_F.append((received_PR.max(1) * trace.num_ranks / sources_P).mean())
    return np.array(most_F)
