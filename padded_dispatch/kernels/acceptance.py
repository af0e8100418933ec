"""Acceptance in one launch: one program for each receiver, which holds all its cells in registers.

A receiver has S * L cells, of which a node of GPUs has a few hundred. Every rank runs the programs
of all receivers, because each source needs its row of the whole table.
"""

import triton
import triton.language as tl
from torch import Tensor

from padded_dispatch.kernels.select import mix


def accept(
    demand_SE: Tensor, num_rows: int, num_ranks: int, kept_SE: Tensor | None = None
) -> Tensor:
    """Return the accepted rows of each cell: int32 [S, E].

    Arguments and example: see `padded_dispatch.ops.acceptance.accept_in_torch`.
    """
    num_sources, num_experts = demand_SE.shape
    num_local = num_experts // num_ranks
    num_cells = num_sources * num_local
    accepted_SE = demand_SE.new_empty(demand_SE.shape)
    block = triton.next_power_of_2(num_cells)
    _accept_kernel[(num_ranks,)](
        demand_SE.contiguous(),
        None if kept_SE is None else kept_SE.contiguous(),
        accepted_SE,
        num_rows,
        num_rows // num_cells,
        num_cells,
        num_experts,
        num_local,
        BLOCK=block,
        num_warps=max(1, min(8, block // 128)),
    )
    return accepted_SE


@triton.jit
def _accept_kernel(
    demand,
    kept,
    accepted,
    num_rows,
    own_rows,
    num_cells,
    num_experts,
    num_local,
    BLOCK: tl.constexpr,
):
    receiver = tl.program_id(0)
    cell = tl.arange(0, BLOCK)
    inside = cell < num_cells
    at = (cell // num_local) * num_experts + receiver * num_local + cell % num_local
    asked = tl.load(demand + at, mask=inside, other=0).to(tl.int64)
    if kept is None:
        base = tl.minimum(asked, own_rows)
    else:
        base = tl.load(kept + at, mask=inside, other=0).to(tl.int64)
    excess = asked - base
    whole = tl.sum(excess, 0)
    free = tl.minimum(num_rows - tl.sum(base, 0), whole)

    mixed = tl.where(inside, mix(mix(cell.to(tl.int64) ^ 0x9E3779B9) ^ asked), 0)
    bits = mix(mix(receiver.to(tl.int64)) ^ (tl.sum(mixed, 0) & 0xFFFFFFFF))
    offset = (bits * whole) >> 32

    upto = tl.cumsum(excess, 0)
    divisor = tl.maximum(whole, 1)
    more = (upto * free + offset) // divisor - ((upto - excess) * free + offset) // divisor
    tl.store(accepted + at, (base + more).to(tl.int32), mask=inside)
