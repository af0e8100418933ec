"""The plan: give every kept row its slot, and every slot its row.

Both maps are found by binary search in running counts. The plan needs no scatter, no atomics and no
host read, and the same map always gives the same plan. Slots are filled in token order. A token's
choices are in ascending expert order, which is the order of every sum over them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import custom_op

from padded_dispatch.utils.nvtx import nvtx_range


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """The slots of one source rank. All tensors are integers without a gradient.

    Attributes:
        slot_of_TK: int32, `e * C + c`, or -1 if token t has no k-th row.
        choice_of_slot_EC: int32, `t * K + k`, or -1 for a padded row; the inverse of `slot_of_TK`.
        kept_E: int32, rows per expert.
        unplaced_E: int32, rows of the map without a slot: beyond C per expert or beyond K per
            token. Must be zero; nonzero means that the map was not cut to capacity.
        capacity: slots per expert (C).
    """

    slot_of_TK: Tensor
    choice_of_slot_EC: Tensor
    kept_E: Tensor
    unplaced_E: Tensor
    capacity: int


@nvtx_range("plan")
def make_plan(kept_TE: Tensor, *, top_k: int, capacity: int) -> DispatchPlan:
    """Give every kept row its slot.

    Args:
        kept_TE: bool [T, E], T at least 1. Rows beyond `capacity` per expert or beyond `top_k` per
            token get no slot and are counted.
        top_k: choices per token that the plan has room for (K).
        capacity: slots per expert (C).
    """
    slot_of_TK, choice_of_slot_EC, kept_E, unplaced_E = _plan(kept_TE, top_k, capacity)
    return DispatchPlan(
        slot_of_TK=slot_of_TK,
        choice_of_slot_EC=choice_of_slot_EC,
        kept_E=kept_E,
        unplaced_E=unplaced_E,
        capacity=capacity,
    )


def plan_in_torch(
    kept_TE: Tensor, top_k: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four tensors of `DispatchPlan`, in its order.

    Example: E = 2, K = 2, C = 2 and `kept_TE = [[1, 0], [1, 1], [0, 1]]` give
    `slot_of_TK = [[0, -1], [1, 2], [3, -1]]` and `choice_of_slot_EC = [[0, 2], [3, 4]]`:
    token 1's second choice (1 * K + 1 = 3) is expert 1's first slot.
    """
    num_tokens, num_experts = kept_TE.shape
    device = kept_TE.device
    # k of each (token, expert), then c of each: running counts along E, then along T.
    running_k_TE = kept_TE.cumsum(1, dtype=torch.int32)
    fits_k_TE = kept_TE & (running_k_TE <= top_k)
    running_c_ET = fits_k_TE.T.cumsum(1, dtype=torch.int32)

    # The k-th expert of a token is the first at which its running count reaches k + 1.
    nth_TK = torch.arange(1, top_k + 1, device=device, dtype=torch.int32).expand(num_tokens, -1)
    expert_TK = torch.searchsorted(running_k_TE, nth_TK.contiguous())
    valid_expert_TK = expert_TK.clamp(max=num_experts - 1)
    c_TK = running_c_ET.T.gather(1, valid_expert_TK) - 1
    has_slot_TK = (expert_TK < num_experts) & (c_TK < capacity)
    slot_of_TK = torch.where(has_slot_TK, valid_expert_TK * capacity + c_TK, -1).to(torch.int32)

    # The c-th token of an expert, likewise.
    nth_EC = torch.arange(1, capacity + 1, device=device, dtype=torch.int32).expand(num_experts, -1)
    token_EC = torch.searchsorted(running_c_ET, nth_EC.contiguous())
    valid_token_EC = token_EC.clamp(max=num_tokens - 1)
    k_EC = running_k_TE.T.gather(1, valid_token_EC) - 1
    choice_EC = torch.where(token_EC < num_tokens, valid_token_EC * top_k + k_EC, -1)

    kept_E = running_c_ET[:, -1].clamp(max=capacity)
    unplaced_E = kept_TE.sum(0, dtype=torch.int32) - kept_E
    return slot_of_TK, choice_EC.to(torch.int32), kept_E, unplaced_E


_plan = custom_op("padded_dispatch::plan", plan_in_torch, mutates_args=())


@_plan.register_kernel("cuda")
def _(kept_TE, top_k, capacity):
    from padded_dispatch.kernels import plan

    return plan.plan(kept_TE, top_k, capacity)


@_plan.register_fake
def _(kept_TE, top_k, capacity):
    num_tokens, num_experts = kept_TE.shape
    shapes = ((num_tokens, top_k), (num_experts, capacity), (num_experts,), (num_experts,))
    return tuple(kept_TE.new_empty(shape, dtype=torch.int32) for shape in shapes)


@custom_op("padded_dispatch::packed_slots", mutates_args=())
def packed_slots(slot_of_TK: Tensor, offsets_E: Tensor, capacity: int) -> Tensor:
    """Return the packed row of every slot, for a rank that is the only source of its experts' rows.

    Args:
        slot_of_TK: contiguous int32, `e * C + c` or -1.
        offsets_E: int32, where the packed rows of each expert end; contiguous, any shape.
        capacity: C.

    Returns:
        int32 [T, K], -1 where there is no slot.

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
