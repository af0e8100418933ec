"""Counters that live on the device: what was asked for, what was kept, what was lost.

Added to in place, so a replayed graph counts too; read on the host only when somebody asks. Totals
only ever grow (and wrap around): a reader takes the difference from what it read before, so that
nothing has to be zeroed while graphs run. Everything is a whole number, probability mass too, so
that no sum depends on an order. Counting is one launch on a GPU, in plain torch elsewhere; as in
`padded_dispatch.ops.rows`, the second is what the first is compared with.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.library import custom_op

from padded_dispatch.ops.select import Selection

# Probability mass is counted in units of 2**-32: in int64 up to 2**31 rows of probability 1.
MASS_UNITS = 2**32

# The order of `Counters.totals` behind the numbers per expert; one number each. The first seven are
# added by `_count`, which knows their places.
SCALARS = (
    "asked_mass",
    "dropped_mass",
    "num_tokens",
    "lost_tokens",
    "num_positions",
    "num_passes",
    "num_slots",
    "num_unplaced",
    "idle_passes",
    "rerouted",
    "protected_dropped",
)


class RoutingObserver(Protocol):
    """Is told of every selection that counts."""

    def observe(
        self, asked_TE: Tensor, probs_TE: Tensor, selection: Selection, capacity: int
    ) -> None:
        """One pass of one layer on one rank.

        Called without gradients, and possibly inside a CUDA graph's capture: static shapes, changes
        in place, nothing read on the host.

        Args:
            asked_TE: bool [T, E], what the router asked for, without padding tokens.
            probs_TE: floating point [T, E], the router's probabilities before selection.
            selection: what became of it.
            capacity: slots per expert on this rank (C).
        """
        ...


def mass_units(probs: Tensor) -> Tensor:
    """Probabilities in whole units of 2**-32, int64, each rounded half to even."""
    wide = probs.to(torch.promote_types(probs.dtype, torch.float32))
    return (wide * MASS_UNITS).round().to(torch.int64)


class Counters:
    """What one layer on one rank has counted since it was made. All int64, on the device.

    `demand_E`: rows asked for, `kept_E`: rows that got a slot, rerouted ones with the expert that
    they went to. `asked_mass`, `dropped_mass`: probabilities in units of 2**-32, of all rows asked
    for and of those that got no slot where they asked.
    `num_tokens`: tokens that asked for an expert, `lost_tokens`: those of them that kept none.
    `num_positions`: T per pass, padding tokens too. `num_passes`. `num_slots`: slots offered (E * C
    per pass). `num_unplaced`: rows that a plan had no slot for although they had been kept; other
    than zero it is somebody's bug. `idle_passes`: passes in which this rank's experts got no row
    from anybody. `rerouted`: rows that went to another expert. `protected_dropped`: rows of
    protected tokens that the policy dropped, since they alone were too many.

    `max_demand` is no sum: the largest demand for one expert in one pass since it was last zeroed.

    All sums are views of `totals`, which a reader copies as one. Capturing a CUDA graph counts its
    warm-up passes, too, on inputs that mean nothing, unless whoever captures puts the totals back.
    """

    def __init__(self, num_experts: int, device: torch.device | str | int) -> None:
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
        self, asked_TE: Tensor, probs_TE: Tensor, selection: Selection, capacity: int
    ) -> None:
        """Count one selection: see `RoutingObserver`."""
        kept_TE, demand_E = selection.kept_TE, selection.demand_E
        _count(self.totals, self.max_demand, asked_TE, kept_TE, probs_TE, demand_E, capacity)
        if selection.rerouted_E is not None:
            self.rerouted += selection.rerouted_E.sum()
        if selection.protected_dropped_E is not None:
            self.protected_dropped += selection.protected_dropped_E.sum()

    @torch.no_grad()
    def add_unplaced(self, unplaced_E: Tensor) -> None:
        """Count the rows for which a plan had no slot."""
        self.num_unplaced += unplaced_E.sum()

    @torch.no_grad()
    def add_received(self, kept_M: Tensor) -> None:
        """Count a pass as idle if none of the buffers on this rank has a row.

        Args:
            kept_M: rows in each (source, local expert)'s buffer, as they came over the wire.
        """
        self.idle_passes += kept_M.sum() == 0

    @torch.no_grad()
    def reset(self) -> None:
        """Start again at zero; not beside a reader, who takes differences."""
        for count in self.tensors():
            count.zero_()

    def tensors(self) -> tuple[Tensor, Tensor]:
        """The memory behind all counts, to be reduced, copied or put back."""
        return self.totals, self.max_demand


def _count_in_torch(
    totals: Tensor,
    max_demand: Tensor,
    asked_TE: Tensor,
    kept_TE: Tensor,
    probs_TE: Tensor,
    demand_E: Tensor,
    capacity: int,
) -> None:
    """Add one pass; the example of `padded_dispatch.kernels.counters.count` holds here."""
    num_tokens, num_experts = asked_TE.shape
    mass_TE = torch.where(asked_TE, mass_units(probs_TE), 0)
    asked_T = asked_TE.any(1)
    totals[:num_experts] += demand_E
    totals[num_experts : 2 * num_experts] += kept_TE.sum(0)
    scalars = totals[2 * num_experts :]
    scalars[0] += mass_TE.sum()
    scalars[1] += torch.where(kept_TE, 0, mass_TE).sum()
    scalars[2] += asked_T.sum()
    scalars[3] += (asked_T & ~kept_TE.any(1)).sum()
    scalars[4] += num_tokens
    scalars[5] += 1
    scalars[6] += num_experts * capacity
    torch.maximum(max_demand, demand_E.max(), out=max_demand)


_count = custom_op("padded_dispatch::count", _count_in_torch, mutates_args=("totals", "max_demand"))


@_count.register_kernel("cuda")
def _(totals, max_demand, asked_TE, kept_TE, probs_TE, demand_E, capacity):
    from padded_dispatch.kernels import counters as count

    count.count(totals, max_demand, asked_TE, kept_TE, probs_TE, demand_E, capacity)


@_count.register_fake
def _(totals, max_demand, asked_TE, kept_TE, probs_TE, demand_E, capacity):
    return None
