"""Recommend a capacity factor: the smallest that leaves at most a share of a trace's rows no room.

With cells, a row without room is dropped. In a full store it overwrites another row, which backward
computes again, so it costs only time. Rows of one layer beyond the whole store are dropped. "Rows"
are those of one layer for a layer's factor, and of all layers for the factor of all. Layers that
share a store have no factors of their own.

The answer holds for steps like those in the trace. Each half of the steps is also studied alone,
and a warning names both factors if they, and their rooms, differ by more than a tenth.
notebooks/results/LOG.md has what was tried for more certainty.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import CapacityPool
from padded_dispatch.tune.demand import Demand, missing_ranks
from padded_dispatch.tune.replay import POOLS, Replay, replay

_ALIKE = 1.1  # factors of two halves that differ by less are the same answer
DROP = 0.01  # share of rows without room, where none is given


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

    `room`: the slots of a cell, or the rows of a store, at this factor. `dropped`: share of all
    rows without room; `worst`: the largest share in one step.
    """

    factor: float
    room: int
    dropped: float
    worst: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Recommendation:
    """The smallest factors with one kind of pool that leave at most `drop` of the rows no room.

    `overall`: one factor for all layers, number `index` of `replay.factors`. `layers`: by layer
    number, with cells a factor for each; with a store the shares of each layer's rows at the factor
    of `overall`. `num_steps`: steps with rows. `halves`: the factors for each half of them alone.
    """

    drop: float
    index: int
    num_steps: int
    halves: tuple[float, float]
    overall: Advice
    layers: dict[int, Advice]
    replay: Replay

    def sentence(self) -> str:
        """Return the answer in a sentence."""
        advice, pool = self.overall, self.replay.pool
        room = f"{advice.room:,} slots per source rank and expert"
        if pool == "store":
            room = f"a store of {advice.room:,} rows"
        steps = "step" if self.num_steps == 1 else f"{self.num_steps:,} steps"
        sentence = (
            f"Set the capacity factor to {advice.factor:g} with capacity_pool={pool} ({room}): "
            f"{percent(advice.dropped)} of the rows of the {steps} traced find "
            f"no room there, at most {percent(advice.worst)} in one step."
        )
        if lost := self.replay.lost[self.index]:
            share = percent(lost / self.replay.asked.sum())
            sentence += f" {share} are dropped, for want of room for a layer."
        return sentence

    def warnings(self) -> list[str]:
        """Return the reasons to doubt the answer, in sentences."""
        reasons = []
        trace = self.replay.demand.trace
        if trace is not None and (missing := missing_ranks(trace)):
            reasons.append(missing)
        first, second = self.halves
        few, many = sorted(self.halves)
        room_of = dict(zip(self.replay.factors.tolist(), self.replay.room.tolist(), strict=True))
        # Small factors may have nearly the same room: a store has a least size.
        if many > _ALIKE * few and room_of[many] > _ALIKE * room_of[few]:
            reasons.append(
                f"The first half of the steps needs {first:g}, the second {second:g}: routing "
                "changed. Leave out what is not like the steps to come (--from-step), or trace "
                "again later."
            )
        return reasons


def recommend(replay: Replay, drop: float = DROP) -> Recommendation:
    """Return the smallest factors of `replay` that leave at most `drop` of the rows no room.

    Where no factor is enough, the largest is the answer, with the share that it drops.

    Raises:
        ValueError: no row was asked for.
    """
    if not replay.asked.any():
        raise ValueError("trace must ask for at least one expert, got padding only; trace again")

    def smallest(asked: NDArray[np.int64], dropped: NDArray[np.int64]) -> int:
        enough = dropped.sum(1) <= drop * asked.sum()
        enough[-1] = True
        return int(np.argmax(enough))

    def advice(asked: NDArray[np.int64], dropped: NDArray[np.int64], index: int) -> Advice:
        return Advice(
            factor=float(replay.factors[index]),
            room=int(replay.room[index]),
            dropped=float(dropped[index].sum() / asked.sum()),
            worst=float((dropped[index] / np.maximum(asked, 1)).max()),
        )

    asked, dropped = replay.asked.sum(0), replay.dropped.sum(1)
    index, steps = smallest(asked, dropped), np.flatnonzero(asked)
    middle = len(steps) // 2
    halves = steps[: max(1, middle)], steps[middle:]
    first, second = (smallest(asked[half], dropped[:, half]) for half in halves)
    layers = {}
    for layer, layer_asked, layer_dropped in zip(
        replay.demand.layers.tolist(), replay.asked, replay.dropped.swapaxes(0, 1), strict=True
    ):
        if layer_asked.any():
            own = index if replay.pool == "store" else smallest(layer_asked, layer_dropped)
            layers[layer] = advice(layer_asked, layer_dropped, own)
    return Recommendation(
        drop=drop,
        index=index,
        num_steps=len(steps),
        halves=(float(replay.factors[first]), float(replay.factors[second])),
        overall=advice(asked, dropped, index),
        layers=layers,
        replay=replay,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Study:
    """The answers of a trace.

    `answers`: one for each kind of pool that was compared; `chosen`: the recommended one.
    """

    name: str
    answers: tuple[Recommendation, ...]
    chosen: Recommendation

    @property
    def pool(self) -> CapacityPool:
        """The recommended kind of pool."""
        return self.chosen.replay.pool


def study(
    demand: Demand,
    drop: float = DROP,
    *,
    name: str,
    pools: Sequence[CapacityPool] = POOLS,
    store_layers: int | None = None,
) -> Study:
    """Replay the demand with each kind of pool, and recommend one.

    The recommended kind is that of the traced run. If it is not known, or not among `pools`, it is
    the kind with the smaller factor, which takes less memory.

    Args:
        demand: the rows asked for in training.
        drop: the largest share of rows without room.
        name: the trace's name, for titles.
        pools: kinds to compare, "cells" first.
        store_layers: see `replay`.

    Raises:
        ValueError: names the argument, its value and what to change.
    """
    replays = {pool: replay(demand, pool=pool, store_layers=store_layers) for pool in pools}
    answers = {pool: recommend(replayed, drop) for pool, replayed in replays.items()}
    chosen = min(answers.values(), key=lambda answer: answer.overall.factor)
    traced_pool = demand.run.capacity_pool
    return Study(
        name=name,
        answers=tuple(answers.values()),
        chosen=answers.get(traced_pool, chosen) if traced_pool else chosen,
    )
