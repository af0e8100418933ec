"""The plan in two launches, and the probabilities of its choices in one, forward and backward.

Tokens are divided into at most `_MAX_BLOCKS` blocks, a program for each, which goes through its
tokens in tiles of whole rows of the map. The first launch counts along each token's experts, which
gives k. It writes the experts, -1 for what is no choice, the rows of each expert in its block, and
the most experts of a token there. The second adds up the rows of the blocks before its own, and
counts along each expert's tokens, which gives the places. Every element has one writer, so there
are no atomics.

Arguments, results and examples: see `padded_dispatch.routing`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from padded_dispatch.kernels import TOO_MANY

_TOO_MANY = tl.constexpr(TOO_MANY)
_TILE = 4096  # Elements of the map that a program holds at once; twice as many of large maps.
_MAX_BLOCKS = 128  # Blocks of tokens, whose counts one program adds up.


def plan(map_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors of a plan, as `routing.plan_in_torch` specifies them."""
    num_tokens, num_experts = map_TE.shape
    map_TE = map_TE.contiguous()
    block_e = triton.next_power_of_2(num_experts)
    tile = _TILE if num_tokens * block_e <= _TILE * _MAX_BLOCKS else 2 * _TILE
    block_t = max(1, min(triton.next_power_of_2(num_tokens), tile // block_e))
    steps = triton.cdiv(num_tokens, block_t)
    tokens_per_block = triton.cdiv(steps, min(steps, _MAX_BLOCKS)) * block_t
    num_blocks = triton.cdiv(num_tokens, tokens_per_block)
    expert_TK = map_TE.new_empty(num_tokens, top_k, dtype=torch.int32)
    place_TK = torch.empty_like(expert_TK)
    count_BX = expert_TK.new_empty(num_blocks, num_experts + 1)  # The last is the most of a token.
    kept_E = expert_TK.new_empty(num_experts)
    sizes = num_tokens, num_experts, top_k, tokens_per_block
    blocks = dict(BLOCK_T=block_t, BLOCK_E=block_e, num_warps=8)
    block_k = triton.next_power_of_2(top_k)
    _expert_kernel[(num_blocks,)](
        map_TE, expert_TK, place_TK, count_BX, *sizes, BLOCK_K=block_k, **blocks
    )
    block_b = triton.next_power_of_2(num_blocks)
    _place_kernel[(num_blocks,)](
        map_TE, place_TK, count_BX, kept_E, *sizes, BLOCK_B=block_b, **blocks
    )
    return expert_TK, place_TK, kept_E


@triton.jit
def _expert_kernel(
    map_,
    expert_of,
    place_of,
    counts,
    num_tokens,
    num_experts,
    top_k,
    tokens_per_block,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write a block's experts, -1 behind a token's last (places, too); count each one's rows."""
    block = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    k_of_choice = tl.arange(0, BLOCK_K)[None, :]
    placed, most = tl.zeros((BLOCK_E,), dtype=tl.int32), 0
    start = block * tokens_per_block
    for begin in range(start, tl.minimum(num_tokens, start + tokens_per_block), BLOCK_T):
        t = begin + tl.arange(0, BLOCK_T)
        row, k = _rows_of_tile(map_, t, e, num_tokens, num_experts)
        at = t[:, None].to(tl.int64) * top_k
        has_place = (row > 0) & (k < top_k)
        tl.store(expert_of + at + k, e[None, :], mask=has_place)
        asked = tl.sum(row, 1)
        most = tl.maximum(most, tl.max(asked, 0))
        without = (k_of_choice >= asked[:, None]) & (k_of_choice < top_k)
        without = without & (t < num_tokens)[:, None]
        tl.store(expert_of + at + k_of_choice, -1, mask=without)
        tl.store(place_of + at + k_of_choice, -1, mask=without)
        placed += tl.sum(has_place.to(tl.int32), 0)
    counts += block * (num_experts + 1)
    tl.store(counts + e, placed, mask=e < num_experts)
    tl.store(counts + num_experts, most)


@triton.jit
def _place_kernel(
    map_,
    place_of,
    counts,
    kept_of,
    num_tokens,
    num_experts,
    top_k,
    tokens_per_block,
    BLOCK_B: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write the places of a block's tokens; the last block also writes the counts of all."""
    block = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    placed = _sum_of_blocks(counts, block, num_experts, 2 * BLOCK_T, BLOCK_E)
    start = block * tokens_per_block
    for begin in range(start, tl.minimum(num_tokens, start + tokens_per_block), BLOCK_T):
        t = begin + tl.arange(0, BLOCK_T)
        row, k = _rows_of_tile(map_, t, e, num_tokens, num_experts)
        has_place = (row > 0) & (k < top_k)
        one = has_place.to(tl.int32)
        place = placed[None, :] + tl.cumsum(one, 0) - one
        tl.store(place_of + t[:, None].to(tl.int64) * top_k + k, place, mask=has_place)
        placed += tl.sum(one, 0)
    if block == tl.num_programs(0) - 1:
        b = tl.arange(0, BLOCK_B)
        most_of = counts + b * (num_experts + 1) + num_experts
        most = tl.max(tl.load(most_of, mask=b <= block, other=0), 0)
        placed = tl.where(most > top_k, _TOO_MANY, placed)
        tl.store(kept_of + e, placed, mask=e < num_experts)


@triton.jit
def _rows_of_tile(map_, t, e, num_tokens, num_experts):
    """Return 1 for each row in a tile of the map, else 0, and how many its token has before."""
    inside = (t < num_tokens)[:, None] & (e < num_experts)[None, :]
    at = t[:, None].to(tl.int64) * num_experts + e[None, :]
    row = (tl.load(map_ + at, mask=inside, other=0) != 0).to(tl.int32)
    return row, tl.cumsum(row, 1) - row


@triton.jit
def _sum_of_blocks(counts, num_blocks, num_experts, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr):
    """Add up the counts of the first `num_blocks` blocks."""
    e = tl.arange(0, BLOCK_E)[None, :]
    total = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for begin in range(0, num_blocks, BLOCK_B):
        b = begin + tl.arange(0, BLOCK_B)[:, None]
        counted = (b < num_blocks) & (e < num_experts)
        total += tl.sum(tl.load(counts + b * (num_experts + 1) + e, mask=counted, other=0), 0)
    return total


class ChoiceProbs(torch.autograd.Function):
    """The probability of every choice, at least fp32; 0 where there is none.

    Neither direction reads a probability or gradient that belongs to no choice.

    Example: `probs = [[.2, .7, .1]]` and `expert = [[0, 2, -1]]` give `[[.2, .1, 0]]`; the gradient
    `[[3, 4, 5]]` gives that of the probabilities, `[[3, 0, 4]]`.
    """

    @staticmethod
    def forward(ctx: Any, probs_TE: Tensor, expert_TK: Tensor) -> Tensor:
        """Return the probability of every choice, [T, K]."""
        ctx.save_for_backward(expert_TK)
        ctx.num_experts, ctx.dtype = probs_TE.shape[1], probs_TE.dtype
        num_choices, top_k = expert_TK.numel(), expert_TK.shape[1]
        probs_TE = probs_TE.contiguous()
        wide = torch.promote_types(probs_TE.dtype, torch.float32)
        prob_TK = torch.empty_like(expert_TK, dtype=wide)
        block = 256
        _choice_kernel[(triton.cdiv(num_choices, block),)](
            probs_TE, expert_TK, prob_TK, num_choices, top_k, ctx.num_experts, BLOCK=block
        )
        return prob_TK

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        """Return the gradient of the probabilities, [T, E]."""
        (grad_TK,), (expert_TK,), num_experts = grads, ctx.saved_tensors, ctx.num_experts
        num_tokens, top_k = expert_TK.shape
        grad_TE = grad_TK.new_empty(num_tokens, num_experts, dtype=ctx.dtype)
        block_e = triton.next_power_of_2(num_experts)
        block_t = max(1, min(triton.next_power_of_2(num_tokens), _TILE // block_e))
        _spread_probs_kernel[(triton.cdiv(num_tokens, block_t),)](
            grad_TK.contiguous(),
            expert_TK,
            grad_TE,
            num_tokens,
            num_experts,
            TOP_K=top_k,
            BLOCK_T=block_t,
            BLOCK_E=block_e,
            num_warps=8,
        )
        return grad_TE, None


@triton.jit
def _choice_kernel(probs, expert_of, prob_of, num_choices, top_k, num_experts, BLOCK: tl.constexpr):
    choice = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(expert_of + choice, mask=choice < num_choices, other=-1)
    prob = tl.load(probs + choice // top_k * num_experts + expert, mask=expert >= 0, other=0.0)
    tl.store(prob_of + choice, prob, mask=choice < num_choices)


@triton.jit
def _spread_probs_kernel(
    grad_of,
    expert_of,
    grad,
    num_tokens,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)[None, :]
    spread = tl.zeros((BLOCK_T, BLOCK_E), dtype=grad_of.dtype.element_ty)
    for k in tl.static_range(TOP_K):
        expert = tl.load(expert_of + t * TOP_K + k, mask=t < num_tokens, other=-1)
        value = tl.load(grad_of + t * TOP_K + k, mask=expert >= 0, other=0.0)
        spread = tl.where(expert[:, None] == e, value[:, None], spread)
    inside = (t < num_tokens)[:, None] & (e < num_experts)
    tl.store(grad + t[:, None] * num_experts + e, spread, mask=inside)
