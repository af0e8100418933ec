"""Counters on the device: what was asked for, what was kept, what was lost.

Counters are added to in place, so a replayed graph counts too; the host reads them only when a
report asks. Totals only grow (and wrap around). A reader takes the difference from what it read
before, so nothing has to be zeroed while graphs run. Every count is a whole number, probability
mass too, so no sum depends on an order. Counting is one launch on a GPU.

M: buffers of (source, local expert) pairs on this rank, S * L.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.library import custom_op

from padded_dispatch.config import DispatchConfig, PoolSizes
from padded_dispatch.kernels import SCALARS
from padded_dispatch.ops.select import Selection

# Probability mass is counted in units of 2**-32: int64 holds up to 2**31 rows of probability 1.
MASS_UNITS = 2**32


class RoutingObserver(Protocol):
    """Receiver of every selection that is counted."""

    def observe(
        self, asked_TE: Tensor, probs_TE: Tensor, selection: Selection, sizes: PoolSizes
    ) -> None:
        """Receive one pass of one layer on one rank.

        Called without gradients, possibly while a CUDA graph is captured: an implementation must
        have static shapes, change its tensors in place and read nothing on the host.

        Args:
            asked_TE: bool [T, E], what the router asked for, without padding tokens.
            probs_TE: floating point [T, E], the router's probabilities before selection.
            selection: what was kept of it.
            sizes: the sizes of the pass.
        """


def mass_units(probs: Tensor) -> Tensor:
    """Convert probabilities to whole units of 2**-32, int64, each rounded half to even."""
    wide = probs.to(torch.promote_types(probs.dtype, torch.float32))
    return (wide * MASS_UNITS).round().to(torch.int64)


class Counters:
    """Counts of one layer on one rank since it was made; int64 tensors on the device.

    Args:
        config: its numbers of experts, ranks and sources are read, and which cells share a pool.
        device: device of the tensors.

    All sums are views of `totals`, which a reader copies as one. Capturing a CUDA graph also counts
    its warm-up passes, whose inputs mean nothing; the caller that captures must restore the totals.

    Attributes:
        demand_E: rows asked for.
        kept_E: rows that got a slot; a rerouted row counts for the expert that it went to.
        asked_mass: probability of all rows asked for, in units of 2**-32.
        dropped_mass: probability of the rows that got no slot where they asked, likewise.
        num_tokens: tokens that asked for an expert.
        lost_tokens: those of them that kept none.
        num_positions: T per pass, padding tokens included.
        num_passes: passes.
        num_slots: slots offered, an equal share of all pools for each source: E * C per pass.
        num_unplaced: kept rows that a plan had no slot for. Must be zero; nonzero means that a map
            was not cut to capacity.
        idle_passes: passes in which this rank's experts received no row.
        rerouted: rows that went to another expert.
        protected_dropped: rows of protected tokens that were dropped, because they alone exceeded
            capacity.
        max_demand: the largest demand for one pool in one pass since it was last zeroed; the only
            number that is no sum. A pool is that of the config, whatever sizes a pass has.
        totals: `demand_E`, `kept_E`, then `SCALARS`.
    """

    def __init__(self, config: DispatchConfig, device: torch.device | str | int) -> None:
        num_experts = config.num_experts
        self._experts_per_pool = 1
        if config.capacity_pool != "expert":
            self._experts_per_pool = config.num_local_experts
        num_totals = 2 * num_experts + len(SCALARS)
        self.totals = torch.zeros(num_totals, dtype=torch.int64, device=device)
        self.max_demand = torch.zeros((), dtype=torch.int64, device=device)
        self.demand_E, self.kept_E = self.totals[: 2 * num_experts].view(2, num_experts)
        scalars = dict(zip(SCALARS, self.totals[2 * num_experts :], strict=True))
        self.asked_mass = scalars["asked_mass"]
        self.dropped_mass = scalars["dropped_mass"]
        self.num_tokens = scalars["num_tokens"]
        self.lost_tokens = scalars["lost_tokens"]
        self.num_positions = scalars["num_positions"]
        self.num_passes = scalars["num_passes"]
        self.num_slots = scalars["num_slots"]
        self.num_unplaced = scalars["num_unplaced"]
        self.idle_passes = scalars["idle_passes"]
        self.rerouted = scalars["rerouted"]
        self.protected_dropped = scalars["protected_dropped"]

    @torch.no_grad()
    def observe(
        self, asked_TE: Tensor, probs_TE: Tensor, selection: Selection, sizes: PoolSizes
    ) -> None:
        """Count one selection; see `RoutingObserver`."""
        _count(
            self.totals,
            self.max_demand,
            asked_TE,
            selection.kept_TE,
            probs_TE,
            selection.demand_E,
            self._experts_per_pool,
            sizes.num_pools * sizes.pool_slots,
        )
        if selection.rerouted_E is not None:
            self.rerouted += selection.rerouted_E.sum()
        if selection.protected_dropped_E is not None:
            self.protected_dropped += selection.protected_dropped_E.sum()

    @torch.no_grad()
    def add_unplaced(self, unplaced_E: Tensor) -> None:
        """Count kept rows for which a plan had no slot."""
        self.num_unplaced += unplaced_E.sum()

    @torch.no_grad()
    def add_received(self, kept_M: Tensor) -> None:
        """Count a pass as idle if none of the buffers on this rank has a row.

        Args:
            kept_M: rows in each (source, local expert)'s buffer, as received.
        """
        self.idle_passes += kept_M.sum() == 0

    @torch.no_grad()
    def reset(self) -> None:
        """Set all counts to zero. A reader must not be active, because it takes differences."""
        for count in self.tensors():
            count.zero_()

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return the memory behind all counts, to be reduced, copied or restored."""
        return self.totals, self.max_demand


def count_in_torch(
    totals: Tensor,
    max_demand: Tensor,
    asked_TE: Tensor,
    kept_TE: Tensor,
    probs_TE: Tensor,
    demand_E: Tensor,
    experts_per_pool: int,
    num_slots: int,
) -> None:
    """Add one pass to `totals` and `max_demand`, in place.

    Arguments and example: see `padded_dispatch.kernels.counters.count`.
    """
    num_tokens, num_experts = asked_TE.shape
    mass_TE = torch.where(asked_TE, mass_units(probs_TE), 0)
    asked_T = asked_TE.any(1)
    totals[:num_experts] += demand_E
    totals[num_experts : 2 * num_experts] += kept_TE.sum(0)
    scalars = dict(zip(SCALARS, totals[2 * num_experts :], strict=True))
    scalars["asked_mass"] += mass_TE.sum()
    scalars["dropped_mass"] += torch.where(kept_TE, 0, mass_TE).sum()
    scalars["num_tokens"] += asked_T.sum()
    scalars["lost_tokens"] += (asked_T & ~kept_TE.any(1)).sum()
    scalars["num_positions"] += num_tokens
    scalars["num_passes"] += 1
    scalars["num_slots"] += num_slots
    demand_G = demand_E.unflatten(0, (-1, experts_per_pool)).sum(1)
    torch.maximum(max_demand, demand_G.max(), out=max_demand)


_count = custom_op("padded_dispatch::count", count_in_torch, mutates_args=("totals", "max_demand"))


@_count.register_kernel("cuda")
def _(*args):
    from padded_dispatch.kernels import counters

    counters.count(*args)


@_count.register_fake
def _(*args):
    return None
