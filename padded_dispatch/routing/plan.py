"""The plan: give every kept row its slot, and every slot its row.

A source lays out its rows in pools, each of which belongs to X consecutive experts (X = 1: every
expert has its own). In a pool, rows lie by expert, then by token, without gaps.

Both maps are found by binary search in running counts. The plan needs no scatter, no atomics and no
host read, and the same map always gives the same plan. A token's choices are in ascending expert
order, which is the order of every sum over them.

Letters: T tokens, K experts per token, E experts, G pools of P slots, X = E / G experts of a pool.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import custom_op

from padded_dispatch.config import PoolSizes
from padded_dispatch.utils.nvtx import nvtx_range


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """The slots of one source rank. All tensors are integers without a gradient.

    Attributes:
        slot_of_TK: int32, `g * P + p`, or -1 if token t has no k-th row.
        expert_of_TK: int32, the expert of each row, or -1.
        choice_of_slot_GP: int32, `t * K + k`, or -1 for a padded row; the inverse of `slot_of_TK`.
        kept_E: int32, rows per expert.
        unplaced_E: int32, rows of the map without a slot: beyond P per pool or beyond K per token.
            Must be zero; nonzero means that the map was not cut to capacity.
    """

    slot_of_TK: Tensor
    expert_of_TK: Tensor
    choice_of_slot_GP: Tensor
    kept_E: Tensor
    unplaced_E: Tensor


@nvtx_range("plan")
def make_plan(kept_TE: Tensor, *, top_k: int, sizes: PoolSizes) -> DispatchPlan:
    """Give every kept row its slot.

    Args:
        kept_TE: bool [T, E], T at least 1. Rows beyond P per pool or beyond `top_k` per token get
            no slot and are counted.
        top_k: choices per token that the plan has room for (K).
        sizes: its pools are read.
    """
    slot_of_TK, expert_of_TK, choice_of_slot_GP, kept_E, unplaced_E = _plan(
        kept_TE, top_k, sizes.num_pools, sizes.pool_slots
    )
    return DispatchPlan(
        slot_of_TK=slot_of_TK,
        expert_of_TK=expert_of_TK,
        choice_of_slot_GP=choice_of_slot_GP,
        kept_E=kept_E,
        unplaced_E=unplaced_E,
    )


def plan_in_torch(
    kept_TE: Tensor, top_k: int, num_pools: int, pool_slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors of `DispatchPlan`, in its order.

    Example: E = 2, K = 2, a pool of P = 2 slots for each expert, and `kept_TE = [[1, 0], [1, 1],
    [0, 1]]` give `slot_of_TK = [[0, -1], [1, 2], [3, -1]]`, `expert_of_TK = [[0, -1], [0, 1],
    [1, -1]]` and `choice_of_slot_GP = [[0, 2], [3, 4]]`: token 1's second choice (1 * K + 1 = 3) is
    expert 1's first slot. One pool of P = 3 slots for both gives the same slots but for token 2's,
    which has none: [-1, -1].
    """
    num_tokens, num_experts = kept_TE.shape
    num_shared = num_experts // num_pools
    device = kept_TE.device
    # k of each (token, expert), then c of each: running counts along E, then along T.
    running_k_TE = kept_TE.cumsum(1, dtype=torch.int32)
    fits_k_TE = kept_TE & (running_k_TE <= top_k)
    running_c_ET = fits_k_TE.T.cumsum(1, dtype=torch.int32)
    rows_E = running_c_ET[:, -1]
    rows_GX = rows_E.view(num_pools, num_shared)
    before_E = (rows_GX.cumsum(1, dtype=torch.int32) - rows_GX).flatten()

    # The k-th expert of a token is the first at which its running count reaches k + 1.
    nth_TK = torch.arange(1, top_k + 1, device=device, dtype=torch.int32).expand(num_tokens, -1)
    expert_TK = torch.searchsorted(running_k_TE, nth_TK.contiguous())
    valid_expert_TK = expert_TK.clamp(max=num_experts - 1)
    p_TK = before_E[valid_expert_TK] + running_c_ET.T.gather(1, valid_expert_TK) - 1
    has_slot_TK = (expert_TK < num_experts) & (p_TK < pool_slots)
    slot_TK = valid_expert_TK // num_shared * pool_slots + p_TK
    slot_of_TK = torch.where(has_slot_TK, slot_TK, -1).to(torch.int32)
    expert_of_TK = torch.where(has_slot_TK, expert_TK, -1).to(torch.int32)

    # The p-th row of a pool, likewise, along its experts and their tokens.
    of_pool = fits_k_TE.T.reshape(num_pools, num_shared * num_tokens)
    nth_P = torch.arange(1, pool_slots + 1, device=device, dtype=torch.int32)
    nth_GP = nth_P.expand(num_pools, -1).contiguous()
    found_GP = torch.searchsorted(of_pool.cumsum(1, dtype=torch.int32), nth_GP)
    valid_GP = found_GP.clamp(max=num_shared * num_tokens - 1)
    first_expert_G1 = num_shared * torch.arange(num_pools, device=device)[:, None]
    expert_GP, token_GP = first_expert_G1 + valid_GP // num_tokens, valid_GP % num_tokens
    choice_GP = token_GP * top_k + running_k_TE[token_GP, expert_GP] - 1
    choice_GP = torch.where(found_GP < num_shared * num_tokens, choice_GP, -1)

    kept_E = torch.minimum(rows_E, (pool_slots - before_E).clamp(min=0))
    unplaced_E = kept_TE.sum(0, dtype=torch.int32) - kept_E
    return slot_of_TK, expert_of_TK, choice_GP.to(torch.int32), kept_E, unplaced_E


_plan = custom_op("padded_dispatch::plan", plan_in_torch, mutates_args=())


@_plan.register_kernel("cuda")
def _(kept_TE, top_k, num_pools, pool_slots):
    from padded_dispatch.kernels import plan

    return plan.plan(kept_TE, top_k, num_pools, pool_slots)


@_plan.register_fake
def _(kept_TE, top_k, num_pools, pool_slots):
    num_tokens, num_experts = kept_TE.shape
    choices, experts = (num_tokens, top_k), (num_experts,)
    shapes = (choices, choices, (num_pools, pool_slots), experts, experts)
    return tuple(kept_TE.new_empty(shape, dtype=torch.int32) for shape in shapes)


@custom_op("padded_dispatch::packed_slots", mutates_args=())
def packed_slots(slot_of_TK: Tensor, offsets_E: Tensor, capacity: int) -> Tensor:
    """Return the packed row of every slot, for a rank that is the only source of its experts' rows.

    Every expert has its own pool of C slots here. A slot is `e * C + c`, or -1 as in the result;
    `offsets_E`, contiguous int32 of any shape, are the ends of the packed rows of each expert.

    Example: C = 2 and `offsets = [1, 3]` (one row, then two) turn the slots `[[0, 2], [3, -1]]`
    into `[[0, 1], [2, -1]]`.
    """
    offsets_E = offsets_E.flatten()
    starts_E = torch.cat([offsets_E.new_zeros(1), offsets_E[:-1]])
    expert_TK = slot_of_TK.clamp(min=0) // capacity
    return torch.where(slot_of_TK >= 0, starts_E[expert_TK] + slot_of_TK % capacity, -1)


@packed_slots.register_kernel("cuda")
def _(slot_of_TK, offsets_E, capacity):
    from padded_dispatch.kernels import plan

    return plan.packed_slots(slot_of_TK, offsets_E, capacity)


@packed_slots.register_fake
def _(slot_of_TK, offsets_E, capacity):
    return torch.empty_like(slot_of_TK)
