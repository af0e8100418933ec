"""Recommend a capacity factor: the smallest that keeps a target, and how certain that is.

The target is a quantile: in a share q of the steps at most a share x of the rows is dropped. For
every step there is a smallest replayed factor that drops no more than x; the recommended factor is
the upper confidence bound of the q-quantile of these (`tune.quantile`). "Rows" are those of one
layer for a layer's factor, and of all layers for the factor of all.

A bound holds for steps like the ones in the trace. Four things break that, and each becomes a
caveat: ranks that were not traced; too few independent steps; a need that changes slowly over the
trace (where it leads to different factors there is a schedule, and nothing is promised for steps
after it); and last steps that need more than those before them (`tune.stationarity`). What no trace
shows is covered for a few steps only. The sentence names them, and what a need higher by a tenth
would drop: the same as the factor divided by 1.1 drops now.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import require
from padded_dispatch.tune.quantile import (
    QuantileBound,
    has_drifted,
    quantile_bound,
    steps_to_promise,
)
from padded_dispatch.tune.replay import Pool, Replay
from padded_dispatch.tune.stationarity import (
    changes_slowly,
    end_differs,
    num_covered,
)
from padded_dispatch.tune.target import Target, percent

_GROWTH = 1.1  # of the need, for the price of a change that no trace shows
_MOST_PHASES = 8
_PHASE_STEPS = 20  # fewer are too few for a phase
_MOST_NAMED = 8  # missing ranks
_ALIKE = 1.1  # factors closer than this are one phase: every change captures graphs again


_OWNERS: dict[Pool, str] = {
    "expert": "source rank and expert",
    "rank": "source and destination rank",
    "all-sources": "expert",
    "hybrid-ep": "destination rank",
}


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A `factor` from `first_step` on, as in `PaddedOptions.schedule`.

    It begins once `first_step` steps are done. A rise comes with the last step traced before it and
    a fall with the first one after it, so that neither a step in between nor the first of a phase
    gets too little, whether a trace numbers its steps from 0 (Megatron's) or from 1
    (`train --trace`).
    """

    first_step: int
    factor: float


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A factor and its evidence.

    `factor`, `capacity`: recommended, and the slots of one pool at it. `likely`, `lowest`: the
    factor without allowance for chance, and the lower confidence bound: what more steps may lead
    to. `phases`: the schedule where the need changed; else empty. `caveats`: why the target cannot
    be promised; empty where it can. `num_steps`: in the trace; `num_independent`: what they are
    worth. `steps_over`: how many of these dropped more than the target at this factor; `dropped`:
    the share of all rows that it drops; `worst`: the largest share in one step. `steps_covered`:
    how many steps after the trace a promise covers whatever comes; `dropped_if_more`: about the
    share of all rows that it drops if the need grows by a tenth, None where no factor that low was
    replayed.
    """

    factor: float
    capacity: int
    likely: float
    lowest: float
    phases: tuple[Phase, ...]
    caveats: tuple[str, ...]
    num_steps: int
    num_independent: float
    steps_over: int
    dropped: float
    worst: float
    steps_covered: int
    dropped_if_more: float | None

    @property
    def promised(self) -> bool:
        """True if the target is promised for steps like those in the trace."""
        return not self.caveats


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Recommended factors.

    `overall`: one factor for all layers. `layers`: one for each, by layer number. `pool`: the kind
    of pool, as in `Replay`.
    """

    target: Target
    overall: Advice
    layers: dict[int, Advice]
    pool: Pool

    def sentence(self) -> str:
        """Return the answer in a sentence: Set the capacity factor to 1.25 (320 slots per ...)."""
        advice, target = self.overall, self.target
        owner = _OWNERS[self.pool]
        text = f"Set the capacity factor to {advice.factor:g} ({advice.capacity} slots per {owner})"
        if self.pool != "expert":
            text += f" with capacity_pool={self.pool}"
        if not advice.promised:
            met = advice.num_steps - advice.steps_over
            return (
                f"{text}, without a promise: {target.rows} in {met:,} of the {advice.num_steps:,} "
                f"steps seen, but {advice.caveats[0]}."
            )
        text += (
            f": {target}, with {percent(target.confidence)} confidence, as long as routing stays "
            f"as in the {advice.num_steps:,} steps seen"
        )
        if advice.likely < advice.factor:
            text += f"; more steps may show that {advice.likely:g} is enough"
        text += (
            ". Changes that no trace shows are covered for the next "
            f"{advice.steps_covered:,} steps only"
        )
        if advice.dropped_if_more is not None:
            more = percent(advice.dropped_if_more)
            text += f"; a need higher by a tenth would drop {more} of the rows"
        return f"{text}."


@dataclass(frozen=True, kw_only=True, eq=False)
class _Steps:
    """Rows of the steps that asked for some, and the index of the factor that each needs.

    `dropped`: [factors, steps].
    """

    steps: NDArray[np.int64]
    demand: NDArray[np.int64]
    dropped: NDArray[np.int64]
    needed: NDArray[np.int64]
    factors: NDArray[np.float64]
    capacities: NDArray[np.int64]


def recommend(replay: Replay, target: Target) -> Recommendation:
    """Return the smallest factors of `replay` that keep the target.

    Args:
        replay: of a trace, over a grid of factors up to one that suffices in every step.
        target: the promise.

    Raises:
        ValueError: the largest factor is too small for some step, or no row was asked for.
    """
    factors, rows = replay.factors, replay.by_layer_and_step()
    missing = _missing_ranks(replay)
    if not rows.demand.any():
        raise ValueError("trace must ask for at least one expert, got padding only; trace again")

    def advice(demand: NDArray[np.int64], dropped: NDArray[np.int64]) -> Advice:
        asked = demand > 0
        demand, dropped = demand[asked], dropped[:, asked]
        needed = smallest_sufficient(demand, dropped, target.drop)
        require(
            (needed < len(factors)).all(),
            "factors",
            f"at most {factors[-1]:g}",
            "suffice in every step",
            f"add {replay.needed_factor.max():g}",
        )
        steps = _Steps(
            steps=rows.steps[asked],
            demand=demand,
            dropped=dropped,
            needed=needed,
            factors=factors,
            capacities=replay.capacities,
        )
        return _advise(steps, target, missing)

    overall = advice(rows.demand.sum(0), rows.dropped.sum(1))
    if len(rows.layers) == 1:
        layers = {int(rows.layers[0]): overall}
        return Recommendation(target=target, overall=overall, layers=layers, pool=replay.pool)
    return Recommendation(
        target=target,
        pool=replay.pool,
        overall=overall,
        layers={
            int(layer): advice(rows.demand[i], rows.dropped[:, i])
            for i, layer in enumerate(rows.layers)
            if rows.demand[i].any()
        },
    )


def smallest_sufficient(
    demand: NDArray[np.int64], dropped: NDArray[np.int64], drop: float
) -> NDArray[np.int64]:
    """Return the index of the first factor from which on at most `drop` is dropped, [steps].

    It is the number of factors where even the last one drops more. `dropped` is [factors, steps],
    and factors rise.

    Example: of 10 rows, three factors drop 4, 1 and 0: for 0.1 it is 1, for 0 it is 2.
    """
    enough = dropped <= drop * demand
    # Count from the last factor down, as long as all are enough.
    return len(enough) - np.cumprod(enough[::-1], axis=0).sum(0)


def _missing_ranks(replay: Replay) -> tuple[str, ...]:
    """Return a caveat where some ranks of a group did not trace a step of a layer."""
    num_ranks = replay.num_ranks
    keys = np.unique(np.stack([replay.steps, replay.layers, replay.ranks]), axis=1)
    steps, layers, ranks = keys
    groups = ranks // num_ranks
    _, num_traced = np.unique(np.stack([steps, layers, groups]), axis=1, return_counts=True)
    num_partly = int((num_traced < num_ranks).sum())
    if not num_partly:
        return ()
    expected = (np.unique(groups)[:, None] * num_ranks + np.arange(num_ranks)).flatten()
    nowhere = [str(rank) for rank in np.setdiff1d(expected, ranks)]
    named = ", ".join([*nowhere[:_MOST_NAMED], *["..."] * (len(nowhere) > _MOST_NAMED)])
    what = (
        f"traces of {len(nowhere)} of {len(expected)} ranks are missing ({named})"
        if nowhere
        else f"{num_partly:,} of {len(num_traced):,} steps of a layer lack some of their "
        f"{num_ranks} ranks"
    )
    return (f"{what}, so their demand is unknown; give the traces of all ranks",)


def _advise(steps: _Steps, target: Target, missing: tuple[str, ...]) -> Advice:
    bound = quantile_bound(steps.needed, target.steps_share, target.confidence)
    phases = _phases(steps, target) if has_drifted(steps.needed) else ()
    largest = max((phase.factor for phase in phases), default=0.0)
    covered = num_covered(len(steps.steps), target.confidence)
    index = max(bound.upper, int(np.searchsorted(steps.factors, largest)))
    dropped = steps.dropped[index]
    lower = int(np.searchsorted(steps.factors, steps.factors[index] / _GROWTH, side="right")) - 1
    more = None if lower < 0 else float(steps.dropped[lower].sum() / steps.demand.sum())
    return Advice(
        factor=float(steps.factors[index]),
        capacity=int(steps.capacities[index]),
        likely=float(steps.factors[bound.estimate]),
        lowest=float(steps.factors[bound.lower]),
        phases=phases,
        caveats=missing + _caveats(steps, target, bound, phases),
        num_steps=len(steps.steps),
        num_independent=bound.num_independent,
        steps_over=int((steps.needed > index).sum()),
        dropped=float(dropped.sum() / steps.demand.sum()),
        worst=float((dropped / steps.demand).max()),
        steps_covered=int(covered * np.median(np.diff(steps.steps))) if covered else 0,
        dropped_if_more=more,
    )


def _phases(steps: _Steps, target: Target) -> tuple[Phase, ...]:
    """Split the steps into equal parts with one bound each; similar neighbours are one phase.

    Empty where all parts are similar: then the change does not affect the factor.
    """
    num_parts = min(_MOST_PHASES, max(2, len(steps.steps) // _PHASE_STEPS))
    phases: list[Phase] = []
    lowest = math.inf
    for part in np.array_split(np.arange(len(steps.steps)), num_parts):
        bound = quantile_bound(steps.needed[part], target.steps_share, target.confidence)
        factor = float(steps.factors[bound.upper])
        lowest = min(lowest, factor)
        if phases and max(phases[-1].factor, factor) <= _ALIKE * lowest:
            last = phases.pop()
            phases.append(Phase(first_step=last.first_step, factor=max(last.factor, factor)))
        else:
            rises = bool(phases) and factor > phases[-1].factor
            first_step = int(steps.steps[part[0] - rises]) if phases else 0
            phases.append(Phase(first_step=first_step, factor=factor))
            lowest = factor
    return tuple(phases) if len(phases) > 1 else ()


def _caveats(
    steps: _Steps, target: Target, bound: QuantileBound, phases: Sequence[Phase]
) -> tuple[str, ...]:
    factors = steps.factors[steps.needed]
    found = []
    if phases:
        middle = len(factors) // 2
        halves = [np.quantile(half, 0.5) for half in (factors[:middle], factors[middle:])]
        found.append(
            "the need changes over the trace: the median step of its first half needs "
            f"{halves[0]:g}, of its second half {halves[1]:g}; what comes after it may differ again"
        )
    elif changes_slowly(steps.needed, target.steps_share):
        found.append(
            "the need changes slowly over the trace, more than by chance; what comes after it may "
            "differ again"
        )
    elif bound.promised and end_differs(steps.needed, target.steps_share, target.confidence):
        found.append(
            "the last tenth of the steps needs more than the steps before it; the need may still "
            "rise"
        )
    elif not bound.promised:
        needed = steps_to_promise(target.steps_share, target.confidence)
        needed = math.ceil(needed * len(factors) / bound.num_independent)
        found.append(
            f"{len(factors)} steps, worth {bound.num_independent:.0f} independent ones, promise "
            f"no more than {percent(bound.promised_share)} of steps; about {needed:,} would do"
        )
    return tuple(found)
