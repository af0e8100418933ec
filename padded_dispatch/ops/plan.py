"""Where each kept row lies: a kept map in, slots and their inverse out.

Both maps are found by binary search in running counts, so the plan needs no scatter, no atomics
and no host read, and the same map always gives the same plan. Slots are filled in token order;
a token's choices are in ascending expert order, which is the order of every sum over them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import custom_op

from padded_dispatch.utils.nvtx import nvtx_range


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """Slots of one source rank. Integers only; nothing here has a gradient.

    `slot_of_TK`: int32, `e * C + c`, or -1 where token t has no k-th row. `choice_of_slot_EC`:
    int32, `t * K + k`, or -1 for a padded row; the inverse of the first. `kept_E`: int32 rows per
    expert. `unplaced_E`: int32 rows of the map beyond C per expert or beyond K per token; they get
    no slot, and a number other than zero is somebody's bug. `capacity`: C.
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


def plan_tensors(
    kept_TE: Tensor, top_k: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four tensors of `DispatchPlan`, in its order (a tuple because custom ops return one).

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
    here_TK = expert_TK.clamp(max=num_experts - 1)
    c_TK = running_c_ET.T.gather(1, here_TK) - 1
    valid_TK = (expert_TK < num_experts) & (c_TK < capacity)
    slot_of_TK = torch.where(valid_TK, here_TK * capacity + c_TK, -1).to(torch.int32)

    # The c-th token of an expert, likewise.
    nth_EC = torch.arange(1, capacity + 1, device=device, dtype=torch.int32).expand(num_experts, -1)
    token_EC = torch.searchsorted(running_c_ET, nth_EC.contiguous())
    there_EC = token_EC.clamp(max=num_tokens - 1)
    k_EC = running_k_TE.T.gather(1, there_EC) - 1
    choice_EC = torch.where(token_EC < num_tokens, there_EC * top_k + k_EC, -1).to(torch.int32)

    kept_E = running_c_ET[:, -1].clamp(max=capacity)
    return slot_of_TK, choice_EC, kept_E, kept_TE.sum(0, dtype=torch.int32) - kept_E


@custom_op("padded_dispatch::plan", mutates_args=())
def _plan(kept_TE: Tensor, top_k: int, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return plan_tensors(kept_TE, top_k, capacity)


@_plan.register_kernel("cuda")
def _(kept_TE, top_k, capacity):
    from padded_dispatch.kernels import plan

    return plan.plan(kept_TE, top_k, capacity)


@_plan.register_fake
def _(kept_TE, top_k, capacity):
    num_tokens, num_experts = kept_TE.shape
    shapes = ((num_tokens, top_k), (num_experts, capacity), (num_experts,), (num_experts,))
    return tuple(kept_TE.new_empty(shape, dtype=torch.int32) for shape in shapes)
