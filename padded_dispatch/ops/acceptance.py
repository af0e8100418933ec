"""Acceptance: how many rows of each source and expert a receiver takes, where all share its slots.

With pool "receiver" a rank has N slots for the rows of all its experts from all sources. The
sources exchange their demands, and each rank computes the same table of accepted rows from them.

A cell is a (source, expert) pair. Of a receiver's cells,

- each keeps `min(demand, C)` rows, with C = N // (S * L) its own share of the slots, so that no
  cell keeps less than it would with slots of its own;
- the slots that are left are shared in proportion to the rows beyond that, the excess. If all of
  the excess fits, all is accepted, and nothing is dropped.

Otherwise let X be the receiver's whole excess, F < X its free slots, and Z_i the excess of the
cells up to cell i, in the order (source, expert). Cell i gets

    floor((Z_i * F + o) / X) - floor((Z_(i-1) * F + o) / X)

more rows. So

- the sum is exactly F: a receiver never has a free slot while it drops;
- a cell gets less than one row more or less than its proportional share, and never more rows than
  it asked for;
- so does a source, because its cells are neighbours, and the sum over them telescopes: the dropped
  rows of a source differ from its share of the receiver's dropped rows by less than one row;
- averaged over o = 0 ... X - 1, each cell gets exactly its share (Hermite's identity). o is taken
  from a hash of the receiver's number and demands, so over many demands rounding favours no source
  and no expert. Every o belongs to as many of the 2**32 hashes as any other, or to one more. The
  same demands give the same o, also in recompute and in a replayed graph.

Sums are exact in 64 bits: fewer than 2**31 rows and slots.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import custom_op

from padded_dispatch.config import PoolSizes

BITS_32 = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Receivers:
    """Ranks whose slots all sources share, as one source reaches them.

    Attributes:
        all_demands: takes this source's int32 [E] and returns the int32 [S, E] of all sources, on
            the device. A collective call.
        source: number of this source, its row of that table.
        num_ranks: receivers (R), each with the slots of L = E / R consecutive experts.
    """

    all_demands: Callable[[Tensor], Tensor]
    source: int
    num_ranks: int

    def accepted(self, demand_E: Tensor, sizes: PoolSizes, kept_SE: Tensor | None = None) -> Tensor:
        """Return the rows that each source may keep: int32 [S, E], the same on all ranks.

        Args:
            demand_E: int32, rows that this source asks for, those of `kept_SE` among them.
            sizes: of this pass.
            kept_SE: rows that were accepted before and stay. None is the cells' own shares.
        """
        demand_SE = self.all_demands(demand_E)
        if not sizes.may_drop:
            return demand_SE
        return accept(demand_SE, sizes.num_rows, self.num_ranks, kept_SE)


def accept_in_torch(
    demand_SE: Tensor, num_rows: int, num_ranks: int, kept_SE: Tensor | None = None
) -> Tensor:
    """Return the accepted rows of each cell: int32 [S, E].

    Args:
        demand_SE: int32, rows that each source asks for; at least 0, less than 2**31 in all.
        num_rows: slots of one receiver (N), less than 2**31.
        num_ranks: receivers (R), each with E / R consecutive experts.
        kept_SE: int32, rows that are accepted in any case: at most `demand_SE`, at most N of a
            receiver. None is the cells' own shares, `min(demand_SE, N // (S * L))`.

    Example: two sources ask one receiver with N = 8 for `[[5, 1], [0, 6]]` rows, C = 2. Shares are
    `[[2, 1], [0, 2]]`, and F = 3 slots are left for the excess `[[3, 0], [0, 4]]`. Proportional
    are 9/7 and 12/7 rows. With o = 0 the first gets 1 and the last 2, with o = 5 it is 2 and 1.
    """
    num_sources, num_experts = demand_SE.shape
    num_local = num_experts // num_ranks
    demand_RM = _cells_of_receivers(demand_SE, num_ranks)
    base_RM = None if kept_SE is None else _cells_of_receivers(kept_SE, num_ranks)
    number_R = torch.arange(num_ranks, device=demand_SE.device)
    accepted_RM = accept_cells(demand_RM, num_rows, number_R, base_RM)
    accepted_RSL = accepted_RM.view(num_ranks, num_sources, num_local)
    return accepted_RSL.transpose(0, 1).reshape(num_sources, num_experts).to(torch.int32)


def accept_cells(
    demand_RM: Tensor, num_rows: int, number_R: Tensor, base_RM: Tensor | None = None
) -> Tensor:
    """Return the accepted rows of each cell of some receivers: int64 [R, M].

    Args:
        demand_RM: int64, rows asked of each receiver by its M = S * L cells, by source, then by
            expert.
        num_rows: slots of one receiver (N).
        number_R: int64, the number of each receiver among the ranks.
        base_RM: int64, rows that are accepted in any case; None is the cells' own shares.
    """
    if base_RM is None:
        base_RM = demand_RM.clamp(max=num_rows // demand_RM.shape[1])
    excess_RM = demand_RM - base_RM
    running_RM = excess_RM.cumsum(1)
    excess_R1 = excess_RM.sum(1, keepdim=True)
    free_R1 = (num_rows - base_RM.sum(1, keepdim=True)).minimum(excess_R1)
    offset_R1 = (_hash(demand_RM, number_R)[:, None] * excess_R1) >> 32
    # With F = X the formula accepts all of the excess. Nothing to share is not divided by.
    whole_R1 = excess_R1.clamp(min=1)
    upto_RM = (running_RM * free_R1 + offset_R1) // whole_R1
    before_RM = ((running_RM - excess_RM) * free_R1 + offset_R1) // whole_R1
    return base_RM + upto_RM - before_RM


def _cells_of_receivers(rows_SE: Tensor, num_ranks: int) -> Tensor:
    """Return each receiver's cells by source, then by expert: int64 [R, S * L]."""
    rows_SRL = rows_SE.view(len(rows_SE), num_ranks, -1)
    return rows_SRL.transpose(0, 1).reshape(num_ranks, -1).to(torch.int64)


def _hash(demand_RM: Tensor, number_R: Tensor) -> Tensor:
    """Return 32 bits for each receiver, from its number and its demands: int64 [R]."""
    cells_M = torch.arange(demand_RM.shape[1], device=demand_RM.device)
    mixed_RM = mix(mix(cells_M ^ 0x9E3779B9) ^ demand_RM)
    return mix(mix(number_R) ^ (mixed_RM.sum(1) & BITS_32))


def mix(bits: Tensor) -> Tensor:
    """Apply the finalizer of MurmurHash3 to 32 bits in an int64."""
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & BITS_32
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & BITS_32
    return bits ^ (bits >> 16)


accept = custom_op("padded_dispatch::accept", accept_in_torch, mutates_args=())


@accept.register_kernel("cuda")
def _(demand_SE, num_rows, num_ranks, kept_SE=None):
    from padded_dispatch.kernels import acceptance

    return acceptance.accept(demand_SE, num_rows, num_ranks, kept_SE)


@accept.register_fake
def _(demand_SE, num_rows, num_ranks, kept_SE=None):
    return torch.empty_like(demand_SE)
