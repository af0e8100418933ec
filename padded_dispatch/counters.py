"""Counters on the device of the rows asked for, kept and lost, and figures of them on the host.

Counting changes tensors in place, so a replayed graph counts, too. The host reads the counters only
for a report. Totals only grow (and wrap around): a reader subtracts what it read before, so nothing
has to be zeroed while graphs run. All counts are integers, so no sum depends on its order. On a GPU
one launch counts a selection.

A `Snapshot` holds the counts of some passes as NumPy arrays. Its rates are ratios of sums, not
means of ratios.

The source counts demand. With cells it also decides and counts which rows are kept. With a store
the rank of the experts does, so the counters cannot show which tokens lost rows: a rank counts the
rows that it dropped, and not those of its tokens that other ranks dropped.

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
from padded_dispatch.routing import Selection

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Figures for which `Snapshot.figures` returns the largest of the layers, and their least values.
_LARGEST = {"expert_overload": 1.0, "rank_overload": 1.0, "needed_factor": 0.0}


class RoutingObserver(Protocol):
    """An observer of routing, called with the map and the selection of each pass of a layer."""

    def observe(self, asked_TE: Tensor, probs_TE: Tensor, selection: Selection) -> None:
        """Receive one pass of one layer on one rank.

        Called without gradients, possibly while a CUDA graph is captured: an implementation must
        have static shapes, change its tensors in place and read nothing on the host.

        Args:
            asked_TE: bool [T, E], what the router asked for, without padding tokens.
            probs_TE: floating point [T, E], the router's probabilities before selection.
            selection: with cells, the rows that have a slot; with a store, all rows.
        """


class Counters:
    """Counts of one layer on one rank since their creation; int64 tensors on the device.

    Args:
        config: of the layer; its capacity factor is not read.
        device: device of the tensors.
        rank: number of this rank in the expert-parallel group.

    All sums are views of `totals`, which a reader copies as one. Capturing a CUDA graph also counts
    its warm-up passes, whose inputs mean nothing; the caller that captures must restore the totals.

    Attributes:
        demand_E: rows that this source asked for.
        kept_E: with cells, rows of this source that have a slot; with a store, rows of all sources
            that have room, counted for this rank's experts only.
        lost_tokens: tokens that asked for experts and got no slot of any cell.
        num_positions: T per pass, padding tokens included.
        num_passes: passes.
        num_slots: slots of cells offered, E * C per pass.
        no_room: rows that arrived at this rank and found no room in the store.
        num_again: rows of a store that were overwritten, which backward recomputes with a few more.
        max_need: the largest need of one pass since it was last zeroed; the only value that is not
            a sum. With cells: demand for one expert. With a store: the rows that would have held
            this pass and those before it in the store.
        totals: `demand_E`, `kept_E`, then `SCALARS`.
        of_receiver: with a store, the counters that the receiver changes, by their argument names
            in `kernels.layout.lay_out`.
    """

    demand_E: Tensor
    kept_E: Tensor
    lost_tokens: Tensor
    num_positions: Tensor
    num_passes: Tensor
    num_slots: Tensor
    no_room: Tensor
    num_again: Tensor

    def __init__(
        self, config: DispatchConfig, device: torch.device | str | int, *, rank: int = 0
    ) -> None:
        self._has_cells = config.capacity_pool == "cells"
        num_local = config.num_local_experts
        num_totals = 2 * config.num_experts + len(SCALARS)
        self.totals = torch.zeros(num_totals, dtype=torch.int64, device=device)
        self.max_need = torch.zeros((), dtype=torch.int64, device=device)
        for name, count in counts_in(self.totals).items():
            setattr(self, name, count)
        self.of_receiver: dict[str, Tensor] = {}
        if not self._has_cells:
            kept_L = self.kept_E[rank * num_local : (rank + 1) * num_local]
            self.of_receiver = {"kept_L": kept_L, "no_room": self.no_room}
            self.of_receiver |= {"num_again": self.num_again, "max_need": self.max_need}

    def observe(self, asked_TE: Tensor, probs_TE: Tensor, selection: Selection) -> None:
        """Count one selection; see `RoutingObserver`."""
        demand_E = selection.demand_E
        if self._has_cells and demand_E is None:
            demand_E = asked_TE.sum(0, dtype=torch.int32)
        count = count_in_torch
        if asked_TE.is_cuda:
            from padded_dispatch.kernels.counters import count
        count(
            self.totals,
            self.max_need,
            asked_TE,
            selection.kept_TE if self._has_cells else None,
            demand_E,
            asked_TE.shape[1] * selection.capacity if self._has_cells else 0,
        )

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return the memory behind all counts, to be reduced, copied or restored."""
        return self.totals, self.max_need


def counts_in(totals: Any) -> dict[str, Any]:
    """Return views of the parts of `Counters.totals`, [..., W], by name."""
    num_experts = (totals.shape[-1] - len(SCALARS)) // 2
    scalars = {name: totals[..., 2 * num_experts + i] for i, name in enumerate(SCALARS)}
    kept_E = totals[..., num_experts : 2 * num_experts]
    return {"demand_E": totals[..., :num_experts], "kept_E": kept_E} | scalars


def dropped_rows(counts: dict[str, Any], *, in_cells: bool) -> Any:
    """Return the rows that were dropped, in the shape of the counts' scalars.

    The counts may be those of one rank, or sums over ranks. With cells a source drops its own rows;
    with a store the rank of the experts drops those that found no room.
    """
    if in_cells:
        return counts["demand_E"].sum(-1) - counts["kept_E"].sum(-1)
    return counts["no_room"]


def count_in_torch(
    totals: Tensor,
    max_need: Tensor,
    asked_TE: Tensor,
    kept_TE: Tensor | None,
    demand_E: Tensor | None,
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
    if kept_TE is not None:
        counts["kept_E"] += kept_TE.sum(0)
        counts["lost_tokens"] += (asked_TE.any(1) & ~kept_TE.any(1)).sum()
    if demand_E is not None:
        torch.maximum(max_need, demand_E.max(), out=max_need)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Counts of several layers during some passes, summed over all sources.

    A pass that S sources take part in counts as S passes. Shares and factors are float64 [Y], NaN
    for layers without counts.

    Attributes:
        layers_Y: numbers of the layers.
        top_k: K.
        totals_YW: `Counters.totals` of each layer, summed over sources; see `counts`.
        max_need_Y: the largest needs, see `Counters`.
        num_ranks: R.
        share_rows_Y: rows of each layer's store in perfect balance, the sum of `config.share` over
            the layers that share the store; None with cells.
    """

    layers_Y: Ints
    top_k: int
    share_rows_Y: Ints | None = None
    totals_YW: Ints
    max_need_Y: Ints
    num_ranks: int

    @property
    def counts(self) -> dict[str, Ints]:
        """The counts by their names in `Counters`, [Y] or [Y, E]."""
        return counts_in(self.totals_YW)

    @property
    def dropped_share(self) -> Floats:
        """Rows dropped, divided by rows dropped and kept."""
        dropped_Y = dropped_rows(self.counts, in_cells=self.share_rows_Y is None)
        return _ratio(dropped_Y, dropped_Y + self.counts["kept_E"].sum(1))

    @property
    def needed_factor(self) -> Floats:
        """Capacity factor with which all rows would have had room.

        C is rounded up, so with cells a factor for almost one slot less would be enough, too.
        If T changes from pass to pass, the factor of cells is for the mean T.
        """
        if self.share_rows_Y is not None:
            return _ratio(self.max_need_Y, self.share_rows_Y)
        counts = self.counts
        num_experts = counts["demand_E"].shape[1]
        choices_Y = counts["num_positions"] * self.top_k
        return _ratio(self.max_need_Y * num_experts * counts["num_passes"], choices_Y)

    def figures(self) -> dict[str, float]:
        """Return one number per figure for all layers, by the names that logs use.

        Overloads and the needed factor are the largest of all layers; the other figures are of the
        summed counts. Empty if nothing was counted.
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
        }

    def figures_of_layers(self) -> dict[str, list[float]]:
        """Return the figures of each layer of `layers_Y`, 0 where nothing was counted.

        dropped: see `dropped_share`.
        expert_overload: demand for the busiest expert over the mean: 1 is perfect balance, E / K
            the worst.
        rank_overload: demand for the experts of the busiest expert-parallel rank over the mean of
            the ranks.
        needed_factor: see the property.

        With a store also:
        recomputed: rows that found the store full, divided by rows asked for; backward recomputes
            them, and a few more.

        With cells also:
        lost_tokens: a count, see `Counters`.
        fill: kept rows per slot.
        """
        counts, demand_YE = self.counts, self.counts["demand_E"]
        demand_YR = demand_YE.reshape(len(demand_YE), self.num_ranks, -1).sum(2)
        columns: dict[str, Any] = {
            "dropped": self.dropped_share,
            "expert_overload": _ratio(demand_YE.max(1), demand_YE.mean(1)),
            "rank_overload": _ratio(demand_YR.max(1), demand_YR.mean(1)),
            "needed_factor": self.needed_factor,
        }
        if self.share_rows_Y is None:
            columns["lost_tokens"] = counts["lost_tokens"]
            columns["fill"] = _ratio(counts["kept_E"].sum(1), counts["num_slots"])
        else:
            columns["recomputed"] = _ratio(counts["num_again"], demand_YE.sum(1))
        return {name: np.nan_to_num(column).tolist() for name, column in columns.items()}


def _ratio(part_Y: NDArray[Any], whole_Y: NDArray[Any]) -> Floats:
    result = np.full(len(part_Y), np.nan)
    np.divide(part_Y, whole_Y, out=result, where=whole_Y != 0)
    return result
