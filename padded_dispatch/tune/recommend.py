"""Recommend a capacity factor: the smallest that keeps a target, over the steps of a trace.

The target is a quantile: in a share q of the steps at most a share x of the rows is dropped; a
store drops none, and there rows count that are computed again. For every step there is a smallest
replayed factor that drops no more than x; the recommended factor is the order statistic of these
that a share q of the steps does not exceed. "Rows" are those of one layer for a layer's factor, and
of all layers for the factor of all. Layers that share a store have no factors of their own.

The answer holds for steps like the ones in the trace. Each half of the steps is asked alone, too,
and a warning names both if they differ by more than a tenth. What was tried for more certainty
than that is in notebooks/results/LOG.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import CapacityPool, require
from padded_dispatch.tune.cost import LayerSizes, balanced_drop, kept_bytes
from padded_dispatch.tune.demand import Demand
from padded_dispatch.tune.replay import POOLS, Replay, replay

_ALIKE = 1.1  # factors of two halves that differ by less are the same answer


@dataclass(frozen=True, kw_only=True)
class Target:
    """At most `drop` of the rows dropped in `steps_share` of the steps.

    The default `drop` is 5 %: in studies, models that lost 7 to 10 % of their rows lost next to
    nothing in quality (padded_dispatch/tune/README.md).

    Raises:
        ValueError: names the field, its value and what to change.
    """

    drop: float = 0.05
    steps_share: float = 0.99

    def __post_init__(self) -> None:
        fix = f"for {self.drop:g} % set {self.drop / 100:g}" if 1 <= self.drop < 100 else ""
        require(0 <= self.drop < 1, "drop", self.drop, "be a share from 0 to below 1", fix)
        share = self.steps_share
        require(0 < share <= 1, "steps_share", share, "be a share above 0 and at most 1")


def percent(share: float) -> str:
    """Format a share: 0.001 is 0.1 %, 0.99 is 99 %.

    Small shares keep two digits; none is rounded to 0 or 100 %.
    """
    hundredths = share * 100
    if 0 < hundredths < 1e-4:
        return "< 0.0001 %"
    if hundredths > 99:
        hundredths = math.floor(hundredths * 100) / 100
    return f"{hundredths:.{2 if hundredths < 1 else 4}g} %"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A recommended factor.

    `room`: the slots of a cell, or the rows of a store, at it. `halves`: the factors of the first
    and the second half of the steps alone. `num_steps`: in the trace. `dropped`: share of all rows
    that it drops; `worst`: the largest share in one step.
    """

    factor: float
    room: int
    halves: tuple[float, float]
    num_steps: int
    dropped: float
    worst: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Recommendation:
    """Factors that keep the target with one kind of pool.

    `overall`: one factor for all layers. `layers`: one for each, by layer number; of layers that
    share a store, what `overall` does to each. `replay`: what they come from.
    """

    target: Target
    overall: Advice
    layers: dict[int, Advice]
    replay: Replay

    @property
    def retried(self) -> float:
        """Share of the steps in which any row has no room at the recommended factor."""
        chosen = int(np.argmax(self.replay.factors == self.overall.factor))
        return float((self.replay.dropped[chosen].sum(0) > 0).mean())

    def sentence(self) -> str:
        """Return the answer in a sentence."""
        advice, target, pool = self.overall, self.target, self.replay.pool
        room = f"{advice.room:,} slots per source rank and expert"
        if pool == "store":
            room = f"a store of {advice.room:,} rows"
        rows = f"at most {percent(target.drop)} of rows" if target.drop else "no row"
        return (
            f"Set the capacity factor to {advice.factor:g} with capacity_pool={pool} ({room}): "
            f"{rows} without room in {percent(target.steps_share)} of the "
            f"{advice.num_steps:,} steps traced."
        )

    def warnings(self) -> list[str]:
        """Return the reasons to doubt the answer, in sentences."""
        missing = self.replay.demand.missing
        found = [missing] if missing else []
        first, second = self.overall.halves
        if max(first, second) > _ALIKE * min(first, second):
            found.append(
                f"The first half of the steps needs {first:g}, the second {second:g}: routing "
                "changed. Leave out what is not like the steps to come (--from-step), or trace "
                "again later."
            )
        return found


def recommend(replay: Replay, target: Target) -> Recommendation:
    """Return the smallest factors of `replay` that keep the target.

    Args:
        replay: of a trace, over factors up to one that suffices in every step.
        target: what to keep.

    Raises:
        ValueError: the largest factor is too small for some step, or no row was asked for.
    """
    if not replay.asked.any():
        raise ValueError("trace must ask for at least one expert, got padding only; trace again")

    def advice(
        demand: NDArray[np.int64], dropped: NDArray[np.int64], index: int | None = None
    ) -> Advice:
        asked = demand > 0
        demand, dropped = demand[asked], dropped[:, asked]
        needed = smallest_sufficient(demand, dropped, target.drop)
        share, most = target.steps_share, float(replay.factors[-1])
        if index is None:
            index, enough = quantile(needed, share), f"add {replay.needed.max():g}"
            require((needed < len(dropped)).all(), "factors", most, "suffice in every step", enough)
        needed = np.minimum(needed, len(dropped) - 1)
        middle = len(needed) // 2
        halves = needed[: max(1, middle)], needed[middle:]
        first, second = (replay.factors[quantile(half, share)] for half in halves)
        return Advice(
            factor=float(replay.factors[index]),
            room=int(replay.room[index]),
            halves=(float(first), float(second)),
            num_steps=len(needed),
            dropped=float(dropped[index].sum() / demand.sum()),
            worst=float((dropped[index] / demand).max()),
        )

    overall = advice(replay.asked.sum(0), replay.dropped.sum(1))
    shared = None
    if replay.pool == "store":
        shared = int(np.argmax(replay.factors == overall.factor))
    return Recommendation(
        target=target,
        replay=replay,
        overall=overall,
        layers={
            int(layer): advice(replay.asked[i], replay.dropped[:, i], shared)
            for i, layer in enumerate(replay.demand.layers)
            if replay.asked[i].any()
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


def quantile(values: NDArray, share: float) -> Any:
    """Return the smallest value that a `share` of the values does not exceed, along the last axis.

    Example: of 300 values, 0.99 gives the 297th in order.
    """
    place = math.ceil(share * values.shape[-1] - 1e-9)  # 0.07 * 100 is a little more than 7
    return np.sort(values)[..., max(1, place) - 1]


@dataclass(frozen=True, kw_only=True)
class Option:
    """One factor, what it drops and what it costs.

    `room`: see `Advice`. `dropped`: share of all rows; `in_most_steps`: share that the target's
    share of the steps does not exceed; `worst_layer`: share of the layer that loses most;
    `balanced`: of a perfectly balanced router, None for a store. `retried`: share of the steps in
    which any layer drops a row, which `on_overflow="retry"` would run again. `kept_bytes`: see
    `cost`; None where the layer's sizes are not known.
    """

    factor: float
    room: int
    dropped: float
    in_most_steps: float
    worst_layer: float
    balanced: float | None
    retried: float
    kept_bytes: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Study:
    """The answers of a trace.

    `answers`: one for each kind of pool that was compared; `chosen`: the recommended one. `sizes`:
    of the layer, None where they are not known.
    """

    name: str
    demand: Demand
    answers: tuple[Recommendation, ...]
    chosen: Recommendation
    sizes: LayerSizes | None

    @property
    def pool(self) -> CapacityPool:
        """The recommended kind of pool."""
        return self.chosen.replay.pool

    @cached_property
    def options(self) -> tuple[Option, ...]:
        """Effects of each factor with the recommended kind of pool."""
        replay, target, num_tokens = self.chosen.replay, self.chosen.target, self.demand.num_tokens
        worst = (replay.dropped.sum(2) / np.maximum(replay.asked.sum(1), 1)).max(1)
        asked = replay.asked.sum(0)
        by_step = replay.dropped.sum(1)[:, asked > 0] / asked[asked > 0]
        in_most = quantile(by_step, target.steps_share)
        found = []
        for i, config in enumerate(replay.configs):
            balanced = None
            if self.pool == "expert":
                balanced = balanced_drop(
                    num_tokens=num_tokens,
                    top_k=config.top_k,
                    num_experts=config.num_experts,
                    capacity=config.capacity(num_tokens),
                )
            found.append(
                Option(
                    factor=float(replay.factors[i]),
                    room=int(replay.room[i]),
                    dropped=float(replay.dropped_share[i]),
                    in_most_steps=float(in_most[i]),
                    worst_layer=float(worst[i]),
                    balanced=balanced,
                    retried=float((replay.dropped[i].sum(0) > 0).mean()),
                    kept_bytes=self.sizes and kept_bytes(config, num_tokens, self.sizes),
                )
            )
        return tuple(found)


def study(
    demand: Demand,
    target: Target,
    *,
    name: str,
    pools: Sequence[CapacityPool] = POOLS,
    sizes: LayerSizes | None = None,
    **given: Any,
) -> Study:
    """Replay the demand with each kind of pool, and recommend one.

    The recommended kind is that of the traced run. Where it is not known, or not among `pools`, it
    is the one with the smaller factor, which is fewer bytes.

    Args:
        demand: of training.
        target: what to keep.
        name: of the trace, for titles.
        pools: kinds to compare, "expert" first.
        sizes: of the layer, for costs.
        given: further arguments of `replay`.

    Raises:
        ValueError: names the argument, its value and what to change.
    """
    answers = {pool: recommend(replay(demand, pool=pool, **given), target) for pool in pools}
    chosen = min(answers.values(), key=lambda answer: answer.overall.factor)
    return Study(
        name=name,
        demand=demand,
        answers=tuple(answers.values()),
        chosen=answers.get(demand.pool, chosen) if demand.pool else chosen,
        sizes=sizes,
    )
