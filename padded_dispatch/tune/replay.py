"""Replay counts of rows at any capacity factor: what would have been dropped, exactly.

Which rows find room depends on counts alone, as does `DispatchConfig.capacity_pool`:

- "expert": a source's rows for one expert have C slots, a cell.
- "store": all rows of a rank, of all layers of a model chunk, share M rows. The layers of a pass
  stack their rows in order. A layer may fill the store up to M less what the layers after it are
  sure to get: min(1, factor) of a balanced share each. What does not fit is cut by a water level:
  each (expert, source) keeps at most w rows, with the largest w that fits.

A layer's own limit of rows (N) never binds in a store, which it is at least as large as.

Letters: T tokens; K experts per token; E experts; L experts of one rank; R ranks of experts; C
slots of a cell; M rows of a store.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import CapacityPool, DispatchConfig, Policy, require
from padded_dispatch.tune.demand import Demand, most_tokens, strike

POOLS: tuple[CapacityPool, ...] = ("expert", "store")


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """The outcome of each capacity factor.

    `configs`: one for each factor, which rise. `room`: slots of a cell, or rows of a store, at each
    factor. `asked`: [layers, steps], rows asked for, summed over sources and micro-batches.
    `dropped`: [factors, layers, steps]. `needed`: [steps], a factor at which nothing is dropped.
    `needed_alone`: [layers], the same if a layer had no other to share with, over all steps.
    """

    pool: CapacityPool
    demand: Demand
    configs: tuple[DispatchConfig, ...]
    room: NDArray[np.int64]
    asked: NDArray[np.int64]
    dropped: NDArray[np.int64]
    needed: NDArray[np.float64]
    needed_alone: NDArray[np.float64]

    @cached_property
    def factors(self) -> NDArray[np.float64]:
        """The capacity factors, ascending."""
        return np.array([config.capacity_factor for config in self.configs])

    @property
    def steps(self) -> NDArray[np.int64]:
        """The steps, ascending."""
        return np.unique(self.demand.steps)

    @cached_property
    def dropped_share(self) -> NDArray[np.float64]:
        """Share of all rows that each factor drops, [factors]."""
        return self.dropped.sum((1, 2)) / max(1, int(self.asked.sum()))


def replay(
    demand: Demand,
    factors: Sequence[float] | None = None,
    *,
    pool: CapacityPool = "expert",
    etp: int = 1,
    store_layers: int | None = None,
    strikes: Policy | None = None,
) -> Replay:
    """Replay a demand at every capacity factor of `factors`.

    Args:
        demand: the rows asked for.
        factors: each above 0, in any order; the result has them in ascending order. None takes a
            grid that ends with a factor that drops nothing, see `grid`.
        pool: what has room, see the module's docstring.
        etp: ranks that split every expert between them; each of them is a source.
        store_layers: consecutive layers that share a store, which are those of a model chunk of
            one pipeline stage; None: all.
        strikes: whether to drop what collectives cannot send to a store, and by which
            `moe_token_drop_policy`: tokens of a source for one rank past
            `DispatchConfig.wire_slots`.

    Raises:
        ValueError: names the argument, its value and what to change.
    """
    require(pool in POOLS, "pool", pool, f"be one of {', '.join(POOLS)}")
    num_layers = len(demand.layers)
    store_layers = num_layers if store_layers is None else store_layers
    rule = f"be from 1 to the trace's {num_layers} layers"
    require(1 <= store_layers <= num_layers, "store_layers", store_layers, rule)
    trace, config = demand.trace, _config(demand, 1.0, pool, etp)
    require(strikes is None or trace, "strikes", strikes, "be None for counts without a trace")
    if pool == "expert" or config.num_ranks == 1:
        strikes = None  # Cells always have slots on the wire.
    stacks = [slice(i, i + store_layers) for i in range(0, num_layers, store_layers)]
    steps, step_of_pass = np.unique(demand.steps, return_inverse=True)
    needed, needed_alone = _needed(demand, config, stacks)
    if strikes and trace:
        crossing = most_tokens(trace, config.num_ranks) * config.num_ranks
        needed = np.maximum(needed, crossing / (demand.num_tokens * demand.top_k))
    factors = sorted(map(float, grid(float(needed.max())) if factors is None else factors))
    require(len(factors) >= 1, "factors", factors, "hold at least one factor")
    configs = tuple(_config(demand, factor, pool, etp) for factor in factors)
    asked = demand.counts.sum((2, 3), dtype=np.int64)
    room, kept = [], []
    for config in configs:
        if pool == "expert":
            room.append(config.capacity(demand.num_tokens))
            kept.append(np.minimum(demand.counts, room[-1]).sum((2, 3), dtype=np.int64))
            continue
        counts, num_slots = demand.counts, config.wire_slots(demand.num_tokens)
        if strikes and trace and num_slots < demand.num_tokens:
            counts = strike(trace, num_slots, config.num_ranks, strikes)
        room.append(config.rows(demand.num_tokens) * store_layers)
        cells = _cells(counts, config)
        stacked = [_stack(cells[:, stack], config, demand.num_tokens) for stack in stacks]
        kept.append(np.concatenate(stacked, axis=1))

    def by_step(rows: NDArray[np.int64]) -> NDArray[np.int64]:
        sums = np.zeros((len(steps), num_layers), np.int64)
        np.add.at(sums, step_of_pass, rows)
        return sums.T

    return Replay(
        pool=pool,
        demand=demand,
        configs=configs,
        room=np.array(room),
        asked=by_step(asked),
        dropped=np.stack([by_step(asked - rows) for rows in kept]),
        needed=np.array([needed[step_of_pass == i].max() for i in range(len(steps))]),
        needed_alone=needed_alone,
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


def _config(demand: Demand, factor: float, pool: CapacityPool, etp: int) -> DispatchConfig:
    num_sources = demand.num_sources
    fix = "give the expert tensor parallel size of the run"
    rule = f"divide the {num_sources} sources of the trace"
    require(etp >= 1 and num_sources % etp == 0, "etp", etp, rule, fix)
    return DispatchConfig(
        num_experts=demand.num_experts,
        top_k=demand.top_k,
        capacity_factor=factor,
        capacity_pool=pool,
        num_ranks=num_sources // etp,
        etp_size=etp,
    )


def _cells(counts: NDArray[np.integer], config: DispatchConfig) -> NDArray[np.int64]:
    """Return rows by rank, each rank's cells in ascending order: [passes, layers, R, S * L]."""
    shape = *counts.shape[:3], config.num_ranks, config.num_local_experts
    by_rank = counts.reshape(shape).swapaxes(2, 3)
    cells = by_rank.reshape(*by_rank.shape[:3], -1).astype(np.int64)
    cells.sort(-1)
    return cells


def _stack(cells: NDArray[np.int64], config: DispatchConfig, num_tokens: int) -> NDArray[np.int64]:
    """Return the rows that find room in the stores of all ranks, [passes, layers].

    Args:
        cells: of the layers that share a store, see `_cells`.
        config: with the factor.
        num_tokens: of a source (T).
    """
    num_layers, rows = cells.shape[1], config.rows(num_tokens)
    sure = min(rows, config.share(num_tokens))
    top, kept = np.zeros(cells.shape[:1] + cells.shape[2:3], np.int64), []
    for layer in range(num_layers):
        limit = num_layers * rows - (num_layers - 1 - layer) * sure
        kept.append(_below_water(cells[:, layer], limit - top))
        top += kept[-1]
    return np.stack([rows.sum(1) for rows in kept], axis=1)


def _below_water(cells: NDArray[np.int64], room: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows that the highest water level keeps which fits into `room`.

    Example: cells 1, 4, 9 and room 11 have the level 5 and keep 1 + 4 + 5 = 10 rows.
    """
    num_cells, sums = cells.shape[-1], cells.cumsum(-1)
    above = np.arange(num_cells - 1, -1, -1)
    whole = (sums + above * cells <= room[..., None]).sum(-1)  # cells at or below the level
    below = np.take_along_axis(sums, np.maximum(whole - 1, 0)[..., None], -1)[..., 0] * (whole > 0)
    rest = num_cells - whole
    return below + rest * ((room - below) // np.maximum(rest, 1))


def _needed(
    demand: Demand, config: DispatchConfig, stacks: Sequence[slice]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the factors at which nothing is dropped: [passes], and each layer alone, [layers]."""
    if config.capacity_pool == "expert":
        most = demand.counts.max((2, 3)) / demand.mean_rows
        return most.max(1), most.max(0)
    share = config.share(demand.num_tokens)
    rows = _cells(demand.counts, config).sum(-1)  # [passes, layers, R]
    needed = []
    for stack in stacks:
        sums = rows[:, stack].cumsum(1)
        number = np.arange(1, sums.shape[1] + 1)[:, None]
        last = number[-1, 0]
        # Up to factor 1 each layer has its part for itself; beyond, later ones keep one share.
        below = (sums / (number * share)).max((1, 2))
        beyond = (sums + (last - number) * share).max((1, 2)) / (last * share)
        needed.append(np.where(below <= 1, below, beyond))
    return np.max(needed, axis=0), rows.max((0, 2)) / share
