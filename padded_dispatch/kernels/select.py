"""Selection without sorting, for any number of tokens: strike rows from cells that overflow.

Scores order the rows of a cell, the largest first. A score is an unsigned number: the bits of the
probability, mapped to keep the order of floats, or 1 under policy "position"; 0 is no row. Equals
are ordered by token.

1. `_select_score_kernel` reads the map once. It copies it to the kept one, and writes the scores of
   each expert side by side.
2. A program of `_select_strike_kernel` for each expert counts its rows. If there are more than
   slots, it finds the score of the C-th row in the order bit by bit: a bit is set if at least C
   rows reach the score with it. It strikes the rows behind that one from the kept map; of its
   equals, the first ones stay.

The second reads the scores of an expert about as often as they have bits. Up to 32,768 in fp32 lie
in the cache of the program's multiprocessor. In each launch an element has one writer, so there are
no atomics. Grids depend on shapes alone. Scores take the size of `probs_TE`, or of the map.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048  # Elements of the map that a program holds at once.
_BLOCK = 8192  # Scores that a program holds at once.

_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def kept_map(
    asked_TE: Tensor, probs_TE: Tensor, capacity: int, policy: str
) -> tuple[Tensor, Tensor]:
    """Return the map of kept rows and the demand: see `padded_dispatch.routing.kept_map_in_torch`.

    NaN is allowed: also then at most `capacity` rows of an expert stay.
    """
    num_tokens, num_experts = asked_TE.shape
    by_probs = policy == "probs"
    num_bytes = probs_TE.element_size() if by_probs else 1
    kept_TE = torch.empty_like(asked_TE, memory_format=torch.contiguous_format)
    demand_E = asked_TE.new_empty(num_experts, dtype=torch.int32)
    score_ET = asked_TE.new_empty(num_experts, num_tokens, dtype=_UNSIGNED[num_bytes])
    sizes = num_tokens, num_experts
    # 32 experts, if there are so many: 32 bytes of the map are one access to memory.
    block_e = min(triton.next_power_of_2(num_experts), 32)
    block_t = _TILE // block_e
    _select_score_kernel[triton.cdiv(num_tokens, block_t), triton.cdiv(num_experts, block_e)](
        asked_TE.contiguous(),
        probs_TE.contiguous() if by_probs else None,
        kept_TE,
        score_ET,
        *sizes,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
    )
    _select_strike_kernel[(num_experts,)](
        score_ET,
        kept_TE,
        demand_E,
        capacity,
        *sizes,
        BITS=8 * num_bytes if by_probs else 1,
        BLOCK=min(_BLOCK, triton.next_power_of_2(num_tokens)),
        num_warps=8,
    )
    return kept_TE, demand_E


@triton.jit
def _select_score_kernel(
    asked,
    probs,
    kept,
    scores,
    num_tokens,
    num_experts,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Copy a tile of the asked map, and write its scores."""
    t = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    e = (tl.program_id(1).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E))[None, :]
    inside = (t < num_tokens) & (e < num_experts)
    at = t * num_experts + e
    asks = tl.load(asked + at, mask=inside, other=0) != 0
    tl.store(kept + at, asks, mask=inside)
    score = asks.to(scores.dtype.element_ty)
    if probs is not None:
        bits = _ordered_bits(tl.load(probs + at, mask=asks, other=0.0)).to(score.dtype)
        score *= tl.maximum(bits, 1)  # Even of a NaN, whose bits may all be set.
    tl.store(scores + e * num_tokens + t, score, mask=inside)


@triton.jit
def _select_strike_kernel(
    scores,
    kept,
    demand,
    capacity,
    num_tokens,
    num_experts,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the rows of an expert, and strike those without a slot."""
    e = tl.program_id(0)
    scores += e.to(tl.int64) * num_tokens
    one = tl.full((), 1, scores.dtype.element_ty)
    num_rows = _reach(scores, one, num_tokens, BLOCK)
    tl.store(demand + e, num_rows)
    if num_rows <= capacity:
        return

    lowest, above, reach, bit = one - one, 0, num_rows, BITS
    while (bit > 0) & (reach != capacity):
        bit -= 1
        score = lowest | (one << bit).to(one.dtype)
        reach = _reach(scores, score, num_tokens, BLOCK)
        lowest = tl.where(reach >= capacity, score, lowest)
        # Rows above the lowest score with a slot; or fewer if the loop ends early: equals fit then.
        above = tl.where(reach >= capacity, above, reach)
    room = capacity - above
    for begin in range(0, num_tokens, BLOCK):
        t = begin + tl.arange(0, BLOCK)
        score_T = tl.load(scores + t, mask=t < num_tokens, other=0)
        equals = score_T == lowest
        number = tl.cumsum(equals.to(tl.int32), 0)
        strikes = (score_T > 0) & (score_T < lowest) | equals & (number > room)
        room -= tl.sum(equals.to(tl.int32), 0)
        tl.store(kept + t.to(tl.int64) * num_experts + e, 0, mask=strikes)


@triton.jit
def _reach(scores, lowest, num_tokens, BLOCK: tl.constexpr):
    """Count the scores of an expert from `lowest` on, which is not 0."""
    reach_T = tl.zeros((BLOCK,), dtype=tl.int32)
    for begin in range(0, num_tokens, BLOCK):
        t = begin + tl.arange(0, BLOCK)
        score_T = tl.load(scores + t, mask=t < num_tokens, other=0)
        reach_T += (score_T >= lowest).to(tl.int32)
    return tl.sum(reach_T, 0)


@triton.jit
def _ordered_bits(value):
    """Return bits that, read as unsigned numbers, are ordered as the floats are; -0 equals 0."""
    # The bits of a negative float fall as it rises, so flip them all; of others flip the sign.
    BITS: tl.constexpr = value.dtype.primitive_bitwidth
    SIGN: tl.constexpr = -(2 ** (BITS - 1))
    if BITS == 64:
        bits = value.to(tl.int64, bitcast=True)
    elif BITS == 32:
        bits = value.to(tl.int32, bitcast=True)
    else:
        bits = value.to(tl.int16, bitcast=True)
    bits = tl.where(bits == SIGN, 0, bits)
    return tl.where(bits < 0, ~bits, bits ^ SIGN)
