"""Counts on the host, as plain NumPy per layer and expert, and the figures computed from them.

Rates are ratios of sums, so a figure of many steps, layers or ranks describes all their rows
together; it is not a mean of means.

Y: layers. W: numbers in `Counters.totals`.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.ops.counters import SCALARS

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Figures that are the largest of all layers, not of the summed layers, and their least values.
_LARGEST = {"expert_overload": 1.0, "rank_overload": 1.0, "needed_factor": 0.0}


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Counts of several layers over a stretch of time, summed over all sources.

    `Counters` explains the counts that are not listed; passes of S sources in one step are S
    passes. Whole numbers are exact while less than 2**31 rows' worth of probability goes through
    one layer.

    Properties are float64 [Y], or int64 [Y] if they count. Shares and factors are NaN where nothing
    was counted.

    Attributes:
        layers_Y: numbers of the layers.
        top_k: K.
        cells_per_pool: pairs of (source, expert) that share a pool.
        idle_passes_YR: for each rank of the expert-parallel group, passes in which its experts
            received no row.
    """

    layers_Y: Ints
    top_k: int
    cells_per_pool: int = 1
    demand_YE: Ints
    kept_YE: Ints
    asked_mass_Y: Ints
    dropped_mass_Y: Ints
    num_tokens_Y: Ints
    lost_tokens_Y: Ints
    num_positions_Y: Ints
    num_passes_Y: Ints
    num_slots_Y: Ints
    num_unplaced_Y: Ints
    rerouted_Y: Ints
    protected_dropped_Y: Ints
    max_demand_Y: Ints
    idle_passes_YR: Ints

    @property
    def dropped(self) -> Ints:
        """Rows that got no slot, neither where they asked nor by rerouting."""
        return self.dropped_of_experts.sum(1)

    @property
    def dropped_of_experts(self) -> Ints:
        """Demand minus kept rows of each expert; a rerouted row lowers it where it went."""
        return self.demand_YE - self.kept_YE

    @property
    def demand_of_ranks(self) -> Ints:
        """Rows asked for, per rank of the expert-parallel group whose experts they asked for."""
        return self._of_ranks(self.demand_YE)

    @property
    def dropped_of_ranks(self) -> Ints:
        """`dropped_of_experts`, summed over the experts of each rank."""
        return self._of_ranks(self.dropped_of_experts)

    @property
    def dropped_share(self) -> Floats:
        """Dropped rows over rows asked for."""
        return _ratio(self.dropped, self.demand_YE.sum(1))

    @property
    def dropped_mass_share(self) -> Floats:
        """Dropped probability over probability asked for."""
        return _ratio(self.dropped_mass_Y, self.asked_mass_Y)

    @property
    def fill(self) -> Floats:
        """Kept rows per slot."""
        return _ratio(self.kept_YE.sum(1), self.num_slots_Y)

    @property
    def expert_overload(self) -> Floats:
        """Demand for the busiest expert over the mean: 1 is perfect balance, E / K the worst."""
        return _ratio(self.demand_YE.max(1), self.demand_YE.mean(1))

    @property
    def rank_overload(self) -> Floats:
        """Demand for the experts of the busiest expert-parallel rank over the mean of the ranks."""
        return _ratio(self.demand_of_ranks.max(1), self.demand_of_ranks.mean(1))

    @property
    def needed_factor(self) -> Floats:
        """Capacity factor with which no pool would have dropped a row.

        Capacities are whole numbers of rows, so up to one row less per (source, expert) would be
        enough. If T changes from pass to pass, the factor is for the mean T.
        """
        choices_Y = self.num_positions_Y * self.top_k * self.cells_per_pool
        num_experts = self.demand_YE.shape[1]
        return _ratio(self.max_demand_Y * num_experts * self.num_passes_Y, choices_Y)

    def _of_ranks(self, rows_YE: Ints) -> Ints:
        num_ranks = self.idle_passes_YR.shape[1]
        return rows_YE.reshape(len(self.layers_Y), num_ranks, -1).sum(2)

    def figures(self) -> dict[str, float]:
        """Return one number per figure for all layers, by the names that logs use.

        Each is a sum or a ratio of sums over the layers; overloads and needed factor are the
        largest of a layer. Empty if nothing was counted.
        """
        if not self.num_passes_Y.any():
            return {}
        of_layers = self.figures_of_layers()
        sums = {
            name: count.sum(0, keepdims=True)
            for name, count in vars(self).items()
            if isinstance(count, np.ndarray)
        }
        of_all = dataclasses.replace(self, **sums).figures_of_layers()
        return {
            name: max(_LARGEST[name], *of_layers[name]) if name in _LARGEST else figure
            for name, (figure,) in of_all.items()
            if name != "layer"
        }

    def figures_of_layers(self) -> dict[str, list[float]]:
        """Return the figures of each layer, 0 where nothing was counted; "layer" has its number."""
        return {
            "layer": self.layers_Y.tolist(),
            "dropped": np.nan_to_num(self.dropped_share).tolist(),
            "dropped_mass": np.nan_to_num(self.dropped_mass_share).tolist(),
            "lost_tokens": self.lost_tokens_Y.tolist(),
            "fill": np.nan_to_num(self.fill).tolist(),
            "expert_overload": np.nan_to_num(self.expert_overload).tolist(),
            "rank_overload": np.nan_to_num(self.rank_overload).tolist(),
            "needed_factor": np.nan_to_num(self.needed_factor).tolist(),
            "idle_passes": self.idle_passes_YR.sum(1).tolist(),
            "unplaced": self.num_unplaced_Y.tolist(),
            "rerouted": self.rerouted_Y.tolist(),
            "protected_dropped": self.protected_dropped_Y.tolist(),
        }


def snapshot_of(
    totals_YW: Ints,
    max_demand_Y: Ints,
    idle_passes_YR: Ints,
    *,
    layers: Sequence[int],
    top_k: int,
    cells_per_pool: int = 1,
) -> Snapshot:
    """Make a snapshot from rows of `Counters.totals`, summed over ranks.

    `idle_passes` among the totals is not read, because it does not name the rank; `idle_passes_YR`
    does.
    """
    num_experts = (totals_YW.shape[1] - len(SCALARS)) // 2
    demand_YE, kept_YE = totals_YW[:, :num_experts], totals_YW[:, num_experts : 2 * num_experts]
    scalars: dict[str, Any] = {
        f"{name}_Y": column
        for name, column in zip(SCALARS, totals_YW[:, 2 * num_experts :].T, strict=True)
        if name != "idle_passes"
    }
    return Snapshot(
        layers_Y=np.array(layers, dtype=np.int64),
        top_k=top_k,
        cells_per_pool=cells_per_pool,
        demand_YE=demand_YE,
        kept_YE=kept_YE,
        max_demand_Y=max_demand_Y,
        idle_passes_YR=idle_passes_YR,
        **scalars,
    )


def _ratio(part_Y: NDArray[Any], whole_Y: NDArray[Any]) -> Floats:
    result = np.full(len(part_Y), np.nan)
    np.divide(part_Y, whole_Y, out=result, where=whole_Y != 0)
    return result
