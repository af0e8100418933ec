"""Counters that live on the device: what was asked for, what was kept.

Added to in place, so a replayed graph counts too; read on the host only when somebody asks.
"""

import torch
from torch import Tensor

from padded_dispatch.select import Selection


class Counters:
    """Demand and kept rows per expert of one layer on one rank, since the last `reset`.

    `demand_E`, `kept_E`: int64 [E]. `num_overflow`: int64 scalar, rows that a plan had no slot for
    although they had been kept; other than zero it is somebody's bug. `num_slots`: int64 scalar,
    slots offered (E * C per call).

    Capturing a CUDA graph counts its warm-up passes, too, on inputs that mean nothing: reset after
    it.
    """

    def __init__(self, num_experts: int, device: torch.device | str | int) -> None:
        self.demand_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.kept_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.num_overflow = torch.zeros((), dtype=torch.int64, device=device)
        self.num_slots = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, selection: Selection, *, num_slots: int) -> None:
        """Count one selection, and the slots that were there for it."""
        self.demand_E += selection.demand_E
        self.kept_E += selection.kept_TE.sum(0)
        self.num_slots += num_slots

    @torch.no_grad()
    def add_overflow(self, overflow_E: Tensor) -> None:
        """Count the rows for which a plan had no slot."""
        self.num_overflow += overflow_E.sum()

    @torch.no_grad()
    def reset(self) -> None:
        """Start again at zero."""
        for count in self.tensors():
            count.zero_()

    def tensors(self) -> tuple[Tensor, ...]:
        """All counts, to be reduced or copied by whoever reads them."""
        return self.demand_E, self.kept_E, self.num_overflow, self.num_slots
