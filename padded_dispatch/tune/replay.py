"""Replay counts of rows at any capacity factor, and count exactly the rows that do not fit.

How many rows fit depends on counts alone, and on `DispatchConfig.capacity_pool`:

- "cells": a source's rows for one expert have C slots, a cell. Rows beyond are dropped.
- "store": all rows of a rank, of all layers of a model chunk, share M rows. The layers of a pass
  stack their rows in order. For each row beyond M backward recomputes one. If one layer alone has
  more than M, each (source, expert) keeps its first w, the most that fit, and the others are
  dropped. All of these count as rows that do not fit.

Bytes of a factor are those of `padded_dispatch.memory`; nothing is measured here.
Letters: see `padded_dispatch.config`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import (
    CapacityPool,
    DispatchConfig,
    StoreSizes,
    in_hundredths,
    pool_named,
    require,
)
from padded_dispatch.memory import LayerMemory
from padded_dispatch.trace import TracedRun
from padded_dispatch.tune.demand import Demand

POOLS: tuple[CapacityPool, ...] = ("cells", "store")


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """The outcome of each capacity factor.

    `configs`: one for each factor, ascending. `room`: slots of a cell, or rows of a store, at each
    factor. `asked`: [layers, steps], rows asked for, summed over sources and micro-batches.
    `dropped`: [factors, layers, steps], rows that do not fit. `lost`: [factors], the rows of these
    that a store drops.
    `store_layers`: see `replay`. `needed`: [steps], a factor at which all rows fit.
    `needed_alone`: [layers], such a factor for all steps if a layer had room of its own.
    """

    pool: CapacityPool
    demand: Demand
    store_layers: int
    configs: tuple[DispatchConfig, ...]
    room: NDArray[np.int64]
    asked: NDArray[np.int64]
    lost: NDArray[np.int64]
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
        """Share of all rows that do not fit, [factors]."""
        return self.dropped.sum((1, 2)) / max(1, int(self.asked.sum()))

    @property
    def worst_step(self) -> NDArray[np.float64]:
        """Share of rows that do not fit in the worst step, [factors]."""
        return (self.dropped.sum(1) / np.maximum(self.asked.sum(0), 1)).max(1)

    @property
    def layer_shares(self) -> NDArray[np.float64]:
        """Share of each layer's rows that do not fit, [factors, layers]."""
        return self.dropped.sum(2) / np.maximum(self.asked.sum(1), 1)

    @property
    def retried(self) -> NDArray[np.float64]:
        """Share of the steps in which any row does not fit, [factors].

        With cells, `on_overflow="retry"` would repeat these steps.
        """
        return self.dropped.any(1).mean(1)

    @property
    def balanced(self) -> list[float]:
        """Share of a perfectly balanced router's rows that cells drop, by factor."""
        run = self.demand.run
        sizes = {"num_experts": run.num_experts, "top_k": run.top_k, "num_tokens": run.num_tokens}
        return [balanced_drop(**sizes, capacity=slots) for slots in self.room.tolist()]

    @property
    def kept_bytes(self) -> list[int]:
        """Bytes that packed experts keep for backward, by factor."""
        run = self.demand.run
        sizes: dict[str, Any] = {
            "num_tokens": run.num_tokens,
            "hidden_size": run.hidden_size,
            "fc1_width": run.fc1_width // run.etp_size,
            "direct": run.etp_size == 1,  # As `auto` chooses on GPUs of a host.
        }
        of_layers = (LayerMemory(config=config, **sizes) for config in self.configs)
        return [layer.kept(self.store_layers) for layer in of_layers]

    @cached_property
    def last_alike(self) -> list[int]:
        """The last factor with the store of each factor, by their numbers, [factors].

        A store has a least size, so small factors share one. Passes keep as many bytes with them:
        with a larger one they may keep tokens that are else sent again.
        """
        rooms: list[Any] = [*range(len(self.configs))]
        if self.pool == "store":
            rooms = [*zip(self.room.tolist(), self.kept_bytes, strict=True)]
        last = {room: i for i, room in enumerate(rooms)}
        return [last[room] for room in rooms]


def replay(
    demand: Demand,
    factors: Sequence[float] | None = None,
    *,
    pool: CapacityPool = "cells",
    store_layers: int | None = None,
) -> Replay:
    """Replay a demand at every capacity factor of `factors`.

    Args:
        demand: the rows asked for.
        factors: each above 0, in any order; the result has them in ascending order. None takes a
            grid that ends with a factor that drops nothing, see `grid`.
        pool: which rows share room, see the module's docstring.
        store_layers: consecutive layers that share a store, which are those of a model chunk of
            one pipeline stage; None: all.

    Raises:
        ValueError: names the argument, its value and what to change.
    """
    num_layers, pool = len(demand.layers), pool_named(pool)
    store_layers = num_layers if store_layers is None else store_layers
    rule = f"be from 1 to the trace's {num_layers} layers"
    require(1 <= store_layers <= num_layers, "store_layers", store_layers, rule)
    run = demand.run
    stacks = [slice(i, i + store_layers) for i in range(0, num_layers, store_layers)]
    needed, needed_alone = _needed(demand, _config(run, 1.0, pool), stacks)
    factors = sorted(map(float, grid(float(needed.max())) if factors is None else factors))
    configs = tuple(_config(run, factor, pool) for factor in factors)
    asked = demand.counts.sum((2, 3), dtype=np.int64)
    room, kept, lost = [], [], []
    for config in configs:
        if pool == "cells":
            slots = config.capacity(run.num_tokens)
            room.append(slots)
            kept.append(np.minimum(demand.counts, slots).sum((2, 3), dtype=np.int64))
            lost.append(0)
        else:
            in_store, beyond = _kept_in_stores(demand.counts, config, run.num_tokens, stacks)
            room.append(StoreSizes.of([config] * store_layers, run.num_tokens).num_rows)
            kept.append(in_store)
            lost.append(beyond)
    steps, step_of_pass = np.unique(demand.steps, return_inverse=True)

    def by_step(rows: NDArray[np.int64]) -> NDArray[np.int64]:
        sums = np.zeros((len(steps), num_layers), np.int64)
        np.add.at(sums, step_of_pass, rows)
        return sums.T

    return Replay(
        pool=pool,
        demand=demand,
        store_layers=store_layers,
        configs=configs,
        room=np.array(room),
        asked=by_step(asked),
        lost=np.array(lost),
        dropped=np.stack([by_step(asked - rows) for rows in kept]),
        needed=np.array([needed[step_of_pass == i].max() for i in range(len(steps))]),
        needed_alone=needed_alone,
    )


def grid(need: float) -> tuple[float, ...]:
    """Return the factors to try, ascending; the last is `need`, rounded up.

    From 1 they rise in steps of 0.05 up to 2, then by 5 % up to 4, then by 10 %.
    """
    factors = [0.5, 0.75, 0.9, *(round(1.0 + 0.05 * i, 2) for i in range(21))]
    last = max(0.01, in_hundredths(need))
    while factors[-1] < last:
        factors.append(round(factors[-1] * (1.05 if factors[-1] < 4 else 1.1), 2))
    return (*(factor for factor in factors if factor < last), last)


def _config(run: TracedRun, factor: float, pool: CapacityPool) -> DispatchConfig:
    return DispatchConfig(
        num_experts=run.num_experts,
        top_k=run.top_k,
        capacity_factor=factor,
        capacity_pool=pool,
        num_ranks=run.num_ranks // run.etp_size,
        etp_size=run.etp_size,
    )


def _by_rank(counts: NDArray[np.integer], config: DispatchConfig) -> NDArray[np.int64]:
    """Return the rows of each rank, [passes, layers, R]."""
    shape = *counts.shape[:2], config.num_sources, config.num_ranks, config.num_local_experts
    return counts.reshape(shape).sum((2, 4), dtype=np.int64)


def _kept_in_stores(
    counts: NDArray[np.integer], config: DispatchConfig, num_tokens: int, stacks: Sequence[slice]
) -> tuple[NDArray[np.int64], int]:
    """Return the rows that fit, [passes, layers], and the rows that stores drop."""
    rows, local = _by_rank(counts, config), config.num_local_experts
    kept, lost = np.empty(rows.shape[:2], np.int64), 0
    for stack in stacks:  # The last one may have fewer layers.
        in_stack = rows[:, stack]
        limit = StoreSizes.of([config] * in_stack.shape[1], num_tokens).num_rows
        if (beyond := in_stack > limit).any():
            # [passes, layers, R, S, L], then the cells of each of the ranks that have too many.
            cells = counts[:, stack].reshape(*beyond.shape[:2], config.num_sources, -1, local)
            cells = cells.swapaxes(2, 3)[beyond].reshape(beyond.sum(), -1)
            fitting = _below_level(cells, limit)
            lost += int((in_stack[beyond] - fitting).sum())
            in_stack[beyond] = fitting
        tops = np.minimum(in_stack.cumsum(1), limit)
        kept[:, stack] = np.diff(tops, axis=1, prepend=0).sum(2)
    return kept, lost


def _below_level(cells: NDArray[np.integer], limit: int) -> NDArray[np.int64]:
    """Return how many rows are kept where each cell keeps its first w, the most that fit; [n].

    `cells`: [n, cells], rows of each, more than `limit` together.

    Example: `[[9, 9, 2]]` keeps 6 + 6 + 2 of 15: w is 6.
    """
    low, high = np.zeros((2, len(cells)), np.int64)
    high += cells.max()
    while (low < high).any():  # w is from low to high.
        middle = (low + high + 1) // 2
        fits = np.minimum(cells, middle[:, None]).sum(1, dtype=np.int64) <= limit
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    return np.minimum(cells, low[:, None]).sum(1, dtype=np.int64)


def _needed(
    demand: Demand, config: DispatchConfig, stacks: Sequence[slice]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the factors at which all rows fit: [passes], and of layers alone, [layers].

    `config`: of a factor of 1.
    """
    if config.capacity_pool == "cells":
        most = demand.counts.max((2, 3)) / demand.mean_rows
        return most.max(1), most.max(0)
    share = config.share(demand.run.num_tokens)
    rows = _by_rank(demand.counts, config)
    of_stacks = [rows[:, stack].mean(1) for stack in stacks]
    return np.max(of_stacks, axis=(0, 2)) / share, rows.max((0, 2)) / share


def balanced_drop(*, num_tokens: int, top_k: int, num_experts: int, capacity: int) -> float:
    """Return the expected share of rows that a perfectly balanced router drops.

    It asks for more than its cells have, because its tokens choose at random. Every token takes K
    of E equally likely experts, so an expert's number of rows is binomial: T draws with probability
    K / E. Its relative width is about 1 / sqrt(m), m = T * K / E, so a factor that drops nothing at
    m = 1024 drops rows at m = 32. Do not copy a factor of cells from a job with another m.

    The terms are positive and computed from their logarithms, so nothing cancels or overflows.

    Args:
        num_tokens: tokens of a source (T).
        top_k: experts of each token (K).
        num_experts: experts in all (E).
        capacity: slots of one (source, expert) (C).

    Example: T = 4,096, K = 8, E = 1,024 (m = 32), C = 40 drops 0.72 % of the rows.
    """
    if top_k == num_experts:
        return max(0, num_tokens - capacity) / num_tokens
    rows = np.arange(1, num_tokens + 1)
    log_odds = math.log(top_k) - math.log(num_experts - top_k)
    log_ratios = np.log(num_tokens + 1 - rows) - np.log(rows) + log_odds
    log_none = num_tokens * math.log1p(-top_k / num_experts)
    probability = np.exp(log_none + np.cumsum(log_ratios))[capacity:]
    excess = float(np.sum(probability * np.arange(1, len(probability) + 1)))
    return excess / (num_tokens * top_k / num_experts)
