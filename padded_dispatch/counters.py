"""Counters on the device, what was asked for, kept and lost, and their figures on the host.

Counters are added to in place, so a replayed graph counts too; the host reads them only when a
report asks. Totals only grow (and wrap around). A reader takes the difference from what it read
before, so nothing has to be zeroed while graphs run. Every count is a whole number, so no sum
depends on an order. Counting is one launch on a GPU.

A `Snapshot` holds counts of some time as plain NumPy. Rates are ratios of sums, not means of means.

Demand is counted at the source. Rows of cells are kept there, too; those of a store are kept, and
counted, at the rank of their experts, so what became of a token or of probability is not known.

Letters: Y layers, W numbers in `totals`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from padded_dispatch.config import DispatchConfig
from padded_dispatch.kernels import SCALARS
from padded_dispatch.routing.select import Selection

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Figures that are the largest of all layers, not of the summed layers, and their least values.
_LARGEST = {"expert_overload": 1.0, "rank_overload": 1.0, "needed_factor": 0.0}


class RoutingObserver(Protocol):
    """Receiver of every selection that is counted."""

    def observe(self, asked_TE: Tensor, probs_TE: Tensor, selection: Selection) -> None:
        """Receive one pass of one layer on one rank.

        Called without gradients, possibly while a CUDA graph is captured: an implementation must
        have static shapes, change its tensors in place and read nothing on the host.

        Args:
            asked_TE: bool [T, E], what the router asked for, without padding tokens.
            probs_TE: floating point [T, E], the router's probabilities before selection.
            selection: what was kept of it; in a store its rows may still find no room.
        """


class Counters:
    """Counts of one layer on one rank since it was made; int64 tensors on the device.

    Args:
        config: its number of experts and of ranks and its `capacity_pool` are read.
        device: device of the tensors.
        rank: of this process in the expert-parallel group.

    All sums are views of `totals`, which a reader copies as one. Capturing a CUDA graph also counts
    its warm-up passes, whose inputs mean nothing; the caller that captures must restore the totals.

    Attributes:
        demand_E: rows asked for.
        kept_E: rows that have a place: of this source in cells, of all sources in a store.
        kept_L: those of this rank's experts, a view.
        lost_tokens: tokens that asked for experts, and got no slot of a cell.
        num_positions: T per pass, padding tokens included.
        num_passes: passes.
        num_slots: slots of cells offered, E * C per pass.
        num_unplaced: rows of a token beyond K, which have no place in the plan. Must be zero.
        idle_passes: passes in which this rank's experts received no row.
        struck: rows that found no slot on the wire.
        num_again: rows of a store that were overwritten; backward computes at least as many again.
        max_need: the largest need of one pass since it was last zeroed; the only number that is no
            sum. Cells: demand for one expert. A store: rows that would have held all, of this pass
            and of what shares the store with it; where rows were struck, at least.
        totals: `demand_E`, `kept_E`, then `SCALARS`.
        of_receiver: what the layout of a pass counts, by the names that `kernels.layout` has.
    """

    demand_E: Tensor
    kept_E: Tensor
    lost_tokens: Tensor
    num_positions: Tensor
    num_passes: Tensor
    num_slots: Tensor
    num_unplaced: Tensor
    idle_passes: Tensor
    struck: Tensor
    num_again: Tensor

    def __init__(
        self, config: DispatchConfig, device: torch.device | str | int, *, rank: int = 0
    ) -> None:
        num_experts, num_local = config.num_experts, config.num_local_experts
        self._of_cells, self._top_k = config.capacity_pool == "expert", config.top_k
        self._num_local = num_local
        num_totals = 2 * num_experts + len(SCALARS)
        self.totals = torch.zeros(num_totals, dtype=torch.int64, device=device)
        self.max_need = torch.zeros((), dtype=torch.int64, device=device)
        for name, count in counts_in(self.totals).items():
            setattr(self, name, count)
        self.kept_L = self.kept_E[rank * num_local : (rank + 1) * num_local]
        self.of_receiver = {"idle": self.idle_passes}
        if not self._of_cells:
            of_store = {"kept_L": self.kept_L, "num_again": self.num_again}
            self.of_receiver |= of_store | {"max_need": self.max_need}

    @torch.no_grad()
    def observe(self, asked_TE: Tensor, probs_TE: Tensor, selection: Selection) -> None:
        """Count one selection; see `RoutingObserver`."""
        demand_E = selection.demand_E
        if self._of_cells and demand_E is None:
            demand_E = asked_TE.sum(0, dtype=torch.int32)
        count = count_in_torch
        if asked_TE.is_cuda:
            from padded_dispatch.kernels.counters import count
        count(
            self.totals,
            self.max_need,
            asked_TE,
            selection.kept_TE if self._of_cells else None,
            demand_E,
            self._top_k,
            asked_TE.shape[1] * selection.capacity if self._of_cells else 0,
        )

    @torch.no_grad()
    def count_struck(self, num_rows: Tensor, num_asked: Tensor, shares_per_token: int) -> None:
        """Count rows without a slot on the wire, and the least rows of a store with slots for all.

        With C slots of a cell a source has L * C for a rank, and the store `C * E / K` for each
        share of a token. Struck rows may need more: no rank of theirs has counted them. Numbers are
        those of `exchange.collectives.Struck`, shares the store's rows in balance for each token.

        Example: E = 8, L = 4, K = 2, one layer: 10 tokens for a rank ask for C = 3, 24 rows.
        """
        self.struck += num_rows
        slots = -(-num_asked.long() // self._num_local)
        need = -(-slots * len(self.demand_E) * shares_per_token // self._top_k)
        torch.maximum(self.max_need, need, out=self.max_need)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return the memory behind all counts, to be reduced, copied or restored."""
        return self.totals, self.max_need


def counts_in(totals: Any) -> dict[str, Any]:
    """Return the parts of `Counters.totals` by name, as views; also of rows of them, [..., W]."""
    num_experts = (totals.shape[-1] - len(SCALARS)) // 2
    scalars = {name: totals[..., 2 * num_experts + i] for i, name in enumerate(SCALARS)}
    kept_E = totals[..., num_experts : 2 * num_experts]
    return {"demand_E": totals[..., :num_experts], "kept_E": kept_E} | scalars


def count_in_torch(
    totals: Tensor,
    max_need: Tensor,
    asked_TE: Tensor,
    kept_TE: Tensor | None,
    demand_E: Tensor | None,
    top_k: int,
    num_slots: int,
) -> None:
    """Add one pass to `totals` and `max_need`, in place.

    Arguments and example: see `padded_dispatch.kernels.counters.count`.
    """
    counts = counts_in(totals)
    counts["demand_E"] += asked_TE.sum(0)
    counts["num_positions"] += len(asked_TE)
    counts["num_passes"] += 1
    counts["num_slots"] += num_slots
    goes_on_TE = asked_TE if kept_TE is None else kept_TE
    counts["num_unplaced"] += (goes_on_TE.sum(1) - top_k).clamp(min=0).sum()
    if kept_TE is not None:
        counts["kept_E"] += kept_TE.sum(0)
        counts["lost_tokens"] += (asked_TE.any(1) & ~kept_TE.any(1)).sum()
    if demand_E is not None:
        torch.maximum(max_need, demand_E.max(), out=max_need)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Counts of several layers over a stretch of time, summed over all sources.

    Passes of S sources in one step are S passes. Shares and factors are float64 [Y], NaN where
    nothing was counted.

    Attributes:
        layers_Y: numbers of the layers.
        top_k: K.
        totals_YW: rows of `Counters.totals`, summed; see `counts`.
        max_need_Y: the largest needs, see `Counters`.
        share_rows_Y: rows of the store of each layer in perfect balance, the sum of `config.share`
            over the layers that share it; None if rows lie in cells.
        idle_passes_YR: for each rank of the expert-parallel group, passes in which its experts
            received no row.
    """

    layers_Y: Ints
    top_k: int
    share_rows_Y: Ints | None = None
    totals_YW: Ints
    max_need_Y: Ints
    idle_passes_YR: Ints

    @property
    def counts(self) -> dict[str, Ints]:
        """The counts by their names in `Counters`, [Y] or [Y, E]."""
        return counts_in(self.totals_YW)

    @property
    def dropped_share(self) -> Floats:
        """Rows that found no room over rows asked for."""
        asked_Y, kept_Y = (self.counts[name].sum(1) for name in ("demand_E", "kept_E"))
        return _ratio(asked_Y - kept_Y, asked_Y)

    @property
    def needed_factor(self) -> Floats:
        """Capacity factor with which all rows would have had room, or more if rows were struck.

        Capacities of cells are whole numbers of rows, so up to one row less per cell would be
        enough. If T changes from pass to pass, their factor is for the mean T.
        """
        if self.share_rows_Y is not None:
            return _ratio(self.max_need_Y, self.share_rows_Y)
        counts = self.counts
        num_experts = counts["demand_E"].shape[1]
        choices_Y = counts["num_positions"] * self.top_k
        return _ratio(self.max_need_Y * num_experts * counts["num_passes"], choices_Y)

    def figures(self) -> dict[str, float]:
        """Return one number per figure for all layers, by the names that logs use.

        Overloads and needed factor are the largest of a layer. Empty if nothing was counted.
        """
        if not self.counts["num_passes"].any():
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
        """Return the figures of each layer, 0 where nothing was counted.

        layer: its number.
        dropped: rows that found no room over rows asked for.
        expert_overload: demand for the busiest expert over the mean: 1 is perfect balance, E / K
            the worst.
        rank_overload: demand for the experts of the busiest expert-parallel rank over the mean of
            the ranks.
        needed_factor: as the property.
        idle_passes, struck, unplaced: counts, see `Counters`.

        Of a store also:
        again: rows that were overwritten over rows asked for; backward computes at least as many.

        Of cells also:
        lost_tokens: a count, see `Counters`.
        fill: kept rows per slot.
        """
        counts, demand_YE = self.counts, self.counts["demand_E"]
        num_layers, num_ranks = self.idle_passes_YR.shape
        demand_YR = demand_YE.reshape(num_layers, num_ranks, -1).sum(2)
        columns = {
            "layer": self.layers_Y,
            "dropped": self.dropped_share,
            "expert_overload": _ratio(demand_YE.max(1), demand_YE.mean(1)),
            "rank_overload": _ratio(demand_YR.max(1), demand_YR.mean(1)),
            "needed_factor": self.needed_factor,
            "idle_passes": self.idle_passes_YR.sum(1),
            "struck": counts["struck"],
            "unplaced": counts["num_unplaced"],
        }
        if self.share_rows_Y is None:
            columns["lost_tokens"] = counts["lost_tokens"]
            columns["fill"] = _ratio(counts["kept_E"].sum(1), counts["num_slots"])
        else:
            columns["again"] = _ratio(counts["num_again"], demand_YE.sum(1))
        return {name: np.nan_to_num(column).tolist() for name, column in columns.items()}


def _ratio(part_Y: NDArray[Any], whole_Y: NDArray[Any]) -> Floats:
    result = np.full(len(part_Y), np.nan)
    np.divide(part_Y, whole_Y, out=result, where=whole_Y != 0)
    return result
