"""Probabilities and counts beside the rows: one element per slot, so one program per expert.

`gather_side` reads the router's [T, E] for every slot; `scatter_side`, its transpose, builds each
token's row of [T, E] from its K slots. Every element has one writer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def gather_side(probs_TE: Tensor, choice_of_slot_EC: Tensor, kept_E: Tensor, top_k: int) -> Tensor:
    """The probability of every slot (0 where empty), then the count of kept rows.

    Args:
        probs_TE: contiguous, floating point.
        choice_of_slot_EC: int32, `t * K + k` or -1.
        kept_E: int32.
        top_k: K.

    Returns:
        [E, C + 1], fp32 (fp64 for fp64 probabilities).

    Example: K = 1, `probs = [[.9, .1], [.8, .2]]`, `choice_of_slot = [[0, 1], [-1, -1]]` and
    `kept = [2, 0]` give `[[.9, .8, 2], [0, 0, 0]]`.
    """
    num_experts, capacity = choice_of_slot_EC.shape
    dtype = torch.promote_types(probs_TE.dtype, torch.float32)
    side_EC1 = probs_TE.new_empty(num_experts, capacity + 1, dtype=dtype)
    block = min(1024, triton.next_power_of_2(capacity + 1))
    _gather_side_kernel[(num_experts, triton.cdiv(capacity + 1, block))](
        probs_TE, choice_of_slot_EC, kept_E, side_EC1, num_experts, capacity, top_k, BLOCK=block
    )
    return side_EC1


@triton.jit
def _gather_side_kernel(
    probs, choice_of_slot, kept, side, num_experts, capacity, top_k, BLOCK: tl.constexpr
):
    e = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    choice = tl.load(choice_of_slot + e * capacity + c, mask=c < capacity, other=-1)
    token = (tl.maximum(choice, 0) // top_k).to(tl.int64)
    prob = tl.load(probs + token * num_experts + e, mask=choice >= 0, other=0.0)
    value = prob.to(side.dtype.element_ty)
    value = tl.where(c == capacity, tl.load(kept + e).to(side.dtype.element_ty), value)
    tl.store(side + e * (capacity + 1) + c, value, mask=c <= capacity)


def scatter_side(side_EC1: Tensor, slot_of_TK: Tensor) -> Tensor:
    """Every slot's value to the (token, expert) that it came from; 0 where none did.

    Args:
        side_EC1: contiguous [E, C + 1], floating point; the last column is not read.
        slot_of_TK: int32, `e * C + c` or -1.

    Returns:
        [T, E] in the dtype of `side_EC1`.

    Example: C = 1, `side = [[.5, 1], [.7, 1]]` and `slot_of_TK = [[1], [-1]]` give
    `[[0, .7], [0, 0]]`.
    """
    num_tokens, top_k = slot_of_TK.shape
    num_experts, width = side_EC1.shape
    values_TE = side_EC1.new_empty(num_tokens, num_experts)
    _scatter_side_kernel[(num_tokens,)](
        side_EC1,
        slot_of_TK,
        values_TE,
        num_experts,
        width - 1,
        K=top_k,
        BLOCK_E=triton.next_power_of_2(num_experts),
        num_warps=1,
    )
    return values_TE


@triton.jit
def _scatter_side_kernel(
    side, slot_of, values, num_experts, capacity, K: tl.constexpr, BLOCK_E: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    row = tl.zeros((BLOCK_E,), dtype=values.dtype.element_ty)
    for k in tl.static_range(K):
        slot = tl.load(slot_of + t * K + k)
        expert = tl.maximum(slot, 0) // capacity
        # Slots are e * C + c, rows of `side` are C + 1 long.
        value = tl.load(side + (slot + expert).to(tl.int64), mask=slot >= 0, other=0.0)
        row = tl.where((e == expert) & (slot >= 0), value, row)
    tl.store(values + t * num_experts + e, row, mask=e < num_experts)
