"""Counters in one launch: add the rows asked for and kept, and the tokens lost, to running totals.

Each program reads the maps of some tokens and adds its sums atomically. These are whole numbers, so
the order of the programs does not matter. The first program alone writes the other numbers.
"""

import triton
import triton.language as tl
from torch import Tensor

from padded_dispatch.kernels import SCALARS

_TILE = 4096  # Elements of the maps per program.

_LOST_TOKENS = tl.constexpr(SCALARS.index("lost_tokens"))
_NUM_POSITIONS = tl.constexpr(SCALARS.index("num_positions"))
_NUM_PASSES = tl.constexpr(SCALARS.index("num_passes"))
_NUM_SLOTS = tl.constexpr(SCALARS.index("num_slots"))


def count(
    totals: Tensor,
    max_need: Tensor,
    asked_TE: Tensor,
    kept_TE: Tensor | None,
    demand_E: Tensor | None,
    num_slots: int,
) -> None:
    """Count one pass in `totals` and `max_need`, in place.

    Args:
        totals: int64, contiguous: demand [E], kept [E], then `SCALARS`.
        max_need: int64 scalar, raised to the largest of `demand_E`.
        asked_TE: bool [T, E].
        kept_TE: bool [T, E], a part of `asked_TE`; None counts no row as kept and no token as lost.
        demand_E: int32 [E], the column sums of `asked_TE`; None leaves `max_need` as it is.
        num_slots: slots of all cells; 0 with a store.

    Example: E = 2, 2 slots, `asked = [[1, 1], [1, 0]]`, `kept = [[0, 1], [1, 0]]`, `demand = [2,
    1]` add demand [2, 1], kept [1, 1], no lost token, 2 positions, 1 pass and 2 slots. Without
    `kept` they add kept [0, 0].
    """
    num_tokens, num_experts = asked_TE.shape
    block_e = triton.next_power_of_2(num_experts)
    block_t = max(1, _TILE // block_e)
    _count_kernel[(triton.cdiv(num_tokens, block_t),)](
        totals,
        max_need,
        asked_TE.contiguous(),
        None if kept_TE is None else kept_TE.contiguous(),
        demand_E,
        num_tokens,
        num_slots,
        NUM_EXPERTS=num_experts,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
    )


@triton.jit
def _count_kernel(
    totals,
    max_need,
    asked,
    kept,
    demand,
    num_tokens,
    num_slots,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    inside = (t < num_tokens)[:, None] & (e < NUM_EXPERTS)[None, :]
    at = t[:, None] * NUM_EXPERTS + e[None, :]
    asks = tl.load(asked + at, mask=inside, other=0) != 0

    scalars = totals + 2 * NUM_EXPERTS
    demand_e = tl.sum(asks.to(tl.int32), 0)
    tl.atomic_add(totals + e, demand_e.to(tl.int64), mask=demand_e > 0)
    if kept is not None:
        keeps = tl.load(kept + at, mask=inside, other=0) != 0
        lost = tl.max(asks.to(tl.int32), 1) - tl.max(keeps.to(tl.int32), 1)
        kept_e = tl.sum(keeps.to(tl.int32), 0)
        at_kept = totals + NUM_EXPERTS + e
        tl.atomic_add(at_kept, kept_e.to(tl.int64), mask=kept_e > 0)
        tl.atomic_add(scalars + _LOST_TOKENS, tl.sum(lost).to(tl.int64))
    if tl.program_id(0) == 0:
        if demand is not None:
            need_e = tl.load(demand + e, mask=e < NUM_EXPERTS, other=0).to(tl.int64)
            tl.store(max_need, tl.maximum(tl.load(max_need), tl.max(need_e)))
        _add(scalars + _NUM_POSITIONS, num_tokens)
        _add(scalars + _NUM_PASSES, 1)
        _add(scalars + _NUM_SLOTS, num_slots)


@triton.jit
def _add(total, number):
    tl.store(total, tl.load(total) + number)
