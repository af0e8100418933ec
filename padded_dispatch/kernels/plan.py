"""The plan in two launches: a slot for every kept row.

The first launch counts along each token's experts, which gives k. The second counts along each
expert's tokens, which gives c, and writes both maps. Every element of both has one writer, so there
are no atomics.

If experts share a pool, a launch between the two counts the rows of each, because an expert's rows
begin behind those of the experts before it.

If this rank is the only source of its experts' rows, `packed_slots` turns slots into packed rows,
so that no row is moved twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def plan(
    kept_TE: Tensor, top_k: int, num_pools: int, pool_slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the five tensors of a plan.

    Arguments, results and example: see `padded_dispatch.routing.plan.plan_in_torch`.
    """
    num_tokens, num_experts = kept_TE.shape
    num_shared = num_experts // num_pools
    kept_TE = kept_TE.contiguous()
    rank_TE = torch.empty_like(kept_TE, dtype=torch.int16)
    slot_of_TK = kept_TE.new_empty(num_tokens, top_k, dtype=torch.int32)
    expert_of_TK = torch.empty_like(slot_of_TK)
    choice_of_slot_GP = kept_TE.new_empty(num_pools, pool_slots, dtype=torch.int32)
    kept_E = kept_TE.new_empty(num_experts, dtype=torch.int32)
    unplaced_E = torch.empty_like(kept_E)
    rows_E = None
    block = min(_BLOCK, triton.next_power_of_2(num_tokens))
    blocks = triton.cdiv(num_tokens, block)
    _rank_kernel[(num_tokens,)](
        kept_TE,
        rank_TE,
        slot_of_TK,
        expert_of_TK,
        num_experts,
        top_k,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_K=triton.next_power_of_2(top_k),
        num_warps=1,
    )
    if num_shared > 1:
        rows_E = torch.empty_like(kept_E)
        _plan_count_kernel[(num_experts,)](
            kept_TE,
            rank_TE,
            rows_E,
            num_tokens,
            num_experts,
            top_k,
            BLOCK=block,
            BLOCKS_T=blocks,
            num_warps=4,
        )
    _slot_kernel[(num_experts,)](
        kept_TE,
        rank_TE,
        rows_E,
        slot_of_TK,
        expert_of_TK,
        choice_of_slot_GP,
        kept_E,
        unplaced_E,
        num_tokens,
        num_experts,
        top_k,
        pool_slots,
        num_shared,
        BLOCK=block,
        BLOCKS_T=blocks,
        BLOCK_X=triton.next_power_of_2(num_shared),
        num_warps=4,
    )
    return slot_of_TK, expert_of_TK, choice_of_slot_GP, kept_E, unplaced_E


@triton.jit
def _rank_kernel(
    kept, rank, slot_of, expert_of, num_experts, top_k, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Write k of each of one token's experts, and -1 in the choices without an expert."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    mine = tl.load(kept + t * num_experts + e, mask=e < num_experts, other=0).to(tl.int32)
    before = tl.cumsum(mine, 0) - mine
    tl.store(rank + t * num_experts + e, before.to(tl.int16), mask=e < num_experts)
    k = tl.arange(0, BLOCK_K)
    without = (k < top_k) & (k >= tl.sum(mine, 0))
    tl.store(slot_of + t * top_k + k, -1, mask=without)
    tl.store(expert_of + t * top_k + k, -1, mask=without)


@triton.jit
def _plan_count_kernel(
    kept, rank, rows, num_tokens, num_experts, top_k, BLOCK: tl.constexpr, BLOCKS_T: tl.constexpr
):
    """Write the rows of one expert, without those beyond K of their token."""
    e = tl.program_id(0).to(tl.int64)
    num_rows = 0
    for block in range(BLOCKS_T):
        t = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        mine = tl.load(kept + t * num_experts + e, mask=t < num_tokens, other=0).to(tl.int32)
        k = tl.load(rank + t * num_experts + e, mask=t < num_tokens, other=0).to(tl.int32)
        num_rows += tl.sum(tl.where(k < top_k, mine, 0), 0)
    tl.store(rows + e, num_rows)


@triton.jit
def _slot_kernel(
    kept,
    rank,
    rows,
    slot_of,
    expert_of,
    choice_of_slot,
    kept_E,
    unplaced_E,
    num_tokens,
    num_experts,
    top_k,
    pool_slots,
    num_shared,
    BLOCK: tl.constexpr,
    BLOCKS_T: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """Write both maps for one expert, whose tokens are counted to find c."""
    e = tl.program_id(0).to(tl.int64)
    place_in_pool = e % num_shared
    first_slot = e // num_shared * pool_slots
    start = 0  # Where the expert's rows begin in its pool.
    if rows is not None:
        x = tl.arange(0, BLOCK_X)
        of_pool = tl.load(rows + e - place_in_pool + x, mask=x < num_shared, other=0)
        start = tl.sum(tl.where(x < place_in_pool, of_pool, 0), 0)
    num_asked = 0
    num_rows = 0
    for block in range(BLOCKS_T):
        t = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        mine = tl.load(kept + t * num_experts + e, mask=t < num_tokens, other=0).to(tl.int32)
        k = tl.load(rank + t * num_experts + e, mask=t < num_tokens, other=0).to(tl.int32)
        row = tl.where(k < top_k, mine, 0)
        p = start + num_rows + tl.cumsum(row, 0) - row
        fits = (row > 0) & (p < pool_slots)
        slot = (first_slot + p).to(tl.int32)
        tl.store(slot_of + t * top_k + k, tl.where(fits, slot, -1), mask=row > 0)
        expert = tl.where(fits, e, -1).to(tl.int32)
        tl.store(expert_of + t * top_k + k, expert, mask=row > 0)
        choice = (t * top_k + k).to(tl.int32)
        tl.store(choice_of_slot + first_slot + p, choice, mask=fits)
        num_asked += tl.sum(mine, 0)
        num_rows += tl.sum(row, 0)
    num_kept = tl.minimum(num_rows, tl.maximum(pool_slots - start, 0))
    tl.store(kept_E + e, num_kept)
    tl.store(unplaced_E + e, num_asked - num_kept)
    # The experts of a pool share the work of emptying the slots behind its last row.
    filled = num_kept
    if rows is not None:
        filled = tl.sum(of_pool, 0)
    p = filled + place_in_pool * BLOCK + tl.arange(0, BLOCK)
    while tl.min(p, 0) < pool_slots:
        tl.store(choice_of_slot + first_slot + p, -1, mask=p < pool_slots)
        p += num_shared * BLOCK


def packed_slots(slot_of_TK: Tensor, offsets_E: Tensor, capacity: int) -> Tensor:
    """Return the packed row of every slot, int32 [T, K]; -1 where there is no slot.

    Arguments and example: see `padded_dispatch.routing.plan.packed_slots`.
    """
    packed_TK = torch.empty_like(slot_of_TK)
    num_choices = slot_of_TK.numel()
    _packed_slot_kernel[(triton.cdiv(num_choices, _BLOCK),)](
        slot_of_TK, offsets_E, packed_TK, num_choices, capacity, BLOCK=_BLOCK
    )
    return packed_TK


@triton.jit
def _packed_slot_kernel(slot_of, offsets, packed, num_choices, capacity, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_of + i, mask=i < num_choices, other=-1)
    expert = tl.maximum(slot, 0) // capacity
    start = tl.load(offsets + expert - 1, mask=(slot >= 0) & (expert > 0), other=0)
    tl.store(packed + i, tl.where(slot >= 0, start + slot % capacity, -1), mask=i < num_choices)
