"""Recommend a capacity factor: the least room that costs little on the routing of a trace.

With cells, a row that does not fit is dropped, and the share of dropped rows has a limit. A row
that does not fit into a store is recomputed in backward, which costs time and no quality. So a
store's factor is the smallest at which this costs at most `EXTRA_TIME` of a step; or the largest
with the same store, since one has a least size, and a factor below it would be too little for more
layers. The rows of one layer beyond the whole store are dropped, and have the limit of dropped
rows. "Rows" are the rows of one layer for a layer's factor, and of all layers for the factor of
all. Layers that share a store have no factors of their own.

The answer holds for steps like those in the trace. Each half of the steps is also studied alone,
and a warning names both factors if they, and their rooms, differ by more than a tenth.
.github/LOG.md has what was tried for more certainty.
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
DROP = 0.01  # share of rows that may be dropped, where none is given
# A step takes this share longer for each share of all rows that backward recomputes: with a quarter
# of the rows 193 ms instead of 186 (notebooks/results/README.md, Qwen3-30B-A3B, six layers).
TIME_PER_ROW = 0.15
EXTRA_TIME = 0.005


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
    rows that do not fit; `worst`: the largest share in one step.
    """

    factor: float
    room: int
    dropped: float
    worst: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Recommendation:
    """The factors with one kind of pool that cost little; see the module's docstring.

    `drop`: largest share of rows that may be dropped.
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
        advice = self.overall
        steps = "step" if self.num_steps == 1 else f"{self.num_steps:,} steps"
        if self.replay.pool == "cells":
            return (
                f"Set the capacity factor to {advice.factor:g}: {advice.room:,} slots for each "
                f"source rank and expert. {percent(advice.dropped)} of the rows of the {steps} "
                f"traced would be dropped, at most {percent(advice.worst)} in one step."
            )
        lost, recomputed = self.shares
        few = f"{percent(lost)} dropped, for want of room for a layer"
        dropped = few if lost else "none dropped"
        return (
            f"Set the capacity factor to {advice.factor:g}: a store of {advice.room:,} rows. "
            f"{percent(recomputed)} of the rows of the {steps} traced would be recomputed in "
            f"backward ({dropped}), at most {percent(advice.worst)} in one step. This makes a step "
            f"about {percent(TIME_PER_ROW * recomputed)} longer."
        )

    @property
    def shares(self) -> tuple[float, float]:
        """Shares of all rows that are dropped, and that are recomputed, at the factor."""
        return shares_at(self.replay, self.index)

    def warnings(self) -> list[str]:
        """Return the reasons to doubt the answer, in sentences."""
        reasons = []
        trace = self.replay.demand.trace
        if trace is not None and (missing := missing_ranks(trace)):
            reasons.append(missing)
        first, second = self.halves
        few, many = sorted(self.halves)
        at = int(self.replay.steps[np.flatnonzero(self.replay.asked.sum(0))[self.num_steps // 2]])
        room_of = dict(zip(self.replay.factors.tolist(), self.replay.room.tolist(), strict=True))
        # Factors about a store's least size have nearly the same room.
        if many > _ALIKE * few and room_of[many] > _ALIKE * room_of[few]:
            what = "The router is still settling" if first > second else "Routing changed"
            reasons.append(
                f"{what}: the steps before {at} need {first:g}, the others {second:g}. If the "
                f"steps to come are like the later ones, give --from-step {at}, or record later."
            )
        return reasons


def shares_at(replay: Replay, index: int) -> tuple[float, float]:
    """Return the shares of all rows that are dropped, and recomputed, at factor `index`."""
    share = float(replay.dropped_share[index])
    if replay.pool == "cells":
        return share, 0.0
    lost = float(replay.lost[index] / replay.asked.sum())
    return lost, max(0.0, share - lost)


def recommend(replay: Replay, drop: float = DROP) -> Recommendation:
    """Return the factors of `replay` that are just enough; see the module's docstring.

    Where no factor is enough, the largest is the answer, with the share that it drops.

    Raises:
        ValueError: no row was asked for.
    """
    if not replay.asked.any():
        raise ValueError("trace must ask for at least one expert, got padding only; trace again")

    in_store = replay.pool == "store"
    limit = EXTRA_TIME / TIME_PER_ROW if in_store else drop
    loses_little = replay.lost <= drop * replay.asked.sum()

    def enough_for(asked: NDArray[np.int64], dropped: NDArray[np.int64]) -> int:
        enough = (dropped.sum(1) <= limit * asked.sum()) & loses_little
        enough[-1] = True
        return replay.last_alike[int(np.argmax(enough))]

    def advice(asked: NDArray[np.int64], dropped: NDArray[np.int64], index: int) -> Advice:
        return Advice(
            factor=float(replay.factors[index]),
            room=int(replay.room[index]),
            dropped=float(dropped[index].sum() / asked.sum()),
            worst=float((dropped[index] / np.maximum(asked, 1)).max()),
        )

    asked, dropped = replay.asked.sum(0), replay.dropped.sum(1)
    index, steps = enough_for(asked, dropped), np.flatnonzero(asked)
    middle = len(steps) // 2
    halves = steps[: max(1, middle)], steps[middle:]
    first, second = (enough_for(asked[half], dropped[:, half]) for half in halves)
    layers = {}
    for layer, layer_asked, layer_dropped in zip(
        replay.demand.layers.tolist(), replay.asked, replay.dropped.swapaxes(0, 1), strict=True
    ):
        if layer_asked.any():
            own = index if in_store else enough_for(layer_asked, layer_dropped)
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
        drop: the largest share of rows that may be dropped.
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
