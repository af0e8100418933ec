"""What was counted, on the host: plain NumPy, per layer and expert, and the figures that follow.

Rates are ratios of sums, so that a figure of many steps, layers or ranks is that of all their rows
together, not a mean of means.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.ops.counters import SCALARS

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Figures of which the largest of all layers counts, and what they are where nobody asked.
_LARGEST = {"expert_overload": 1.0, "rank_overload": 1.0, "needed_factor": 0.0}


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What several layers counted in a stretch of time, over all sources. Y is layers.

    `layers_Y`: their numbers. `top_k`: K. `idle_passes_YR`: for each rank of the expert-parallel
    group, passes in which its experts got no row. Everything else: see `Counters`; passes of S
    sources in one step are S passes. Where nothing was counted, shares and factors are NaN.

    Properties are float64 [Y], or int64 where they count.

    Whole numbers are exact while less than 2**31 rows' worth of probability goes through one layer.
    """

    layers_Y: Ints
    top_k: int
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
        """Rows that got no slot, nor were rerouted to one."""
        return self.demand_YE.sum(1) - self.kept_YE.sum(1)

    @property
    def dropped_share(self) -> Floats:
        """Of the rows asked for, those that got no slot."""
        return _ratio(self.dropped, self.demand_YE.sum(1))

    @property
    def dropped_mass_share(self) -> Floats:
        """The same, with every row weighing its probability."""
        return _ratio(self.dropped_mass_Y, self.asked_mass_Y)

    @property
    def fill(self) -> Floats:
        """Rows per slot."""
        return _ratio(self.kept_YE.sum(1), self.num_slots_Y)

    @property
    def expert_overload(self) -> Floats:
        """Demand for the busiest expert over the mean: 1 is perfect balance, E / K the worst."""
        return _ratio(self.demand_YE.max(1), self.demand_YE.mean(1))

    @property
    def rank_overload(self) -> Floats:
        """The same over the ranks of the expert-parallel group, each with its experts' demand."""
        num_ranks = self.idle_passes_YR.shape[1]
        demand_YR = self.demand_YE.reshape(len(self.layers_Y), num_ranks, -1).sum(2)
        return _ratio(demand_YR.max(1), demand_YR.mean(1))

    @property
    def needed_factor(self) -> Floats:
        """A capacity factor with which no (source, expert) would have dropped a row.

        Capacities are whole numbers of rows, so up to a row less would do. With T changing from
        pass to pass, of the mean T.
        """
        choices_Y = self.num_positions_Y * self.top_k
        num_experts = self.demand_YE.shape[1]
        return _ratio(self.max_demand_Y * num_experts * self.num_passes_Y, choices_Y)

    def figures(self) -> dict[str, float]:
        """All layers in one number each, by the names that logs use; empty where nothing counted.

        Sums and shares of sums; of overload and needed factor the largest.
        """
        if not self.num_passes_Y.any():
            return {}
        each = self.figures_of_layers()
        counts = {name: of_Y for name, of_Y in vars(self).items() if name != "top_k"}
        sums = {name: of_Y.sum(0, keepdims=True) for name, of_Y in counts.items()}
        as_one = Snapshot(**sums, top_k=self.top_k).figures_of_layers()
        del as_one["layer"]
        return {
            name: max(_LARGEST[name], *each[name]) if name in _LARGEST else figure
            for name, (figure,) in as_one.items()
        }

    def figures_of_layers(self) -> dict[str, list[float]]:
        """The same for each layer; "layer" holds their numbers. Zero where a layer had nothing."""
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
    totals_YW: Ints, max_demand_Y: Ints, idle_passes_YR: Ints, *, layers: Sequence[int], top_k: int
) -> Snapshot:
    """A snapshot from rows of `Counters.totals`, summed over ranks.

    `idle_passes` among the totals says nothing about which rank it was, and is not read.
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
