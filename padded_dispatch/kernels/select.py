"""Selection without sorting: the rows of every cell that overflows, for any number of tokens.

A row's place in its cell's order is one unsigned number, its score: the bits of its probability, in
the order of floats, or under policy "position" none. Equals are ordered by token.

1. `_select_count_kernel` copies the asked map to the kept one, and counts each expert's rows.
2. `_select_list_kernel` lists the rows of each expert that has more than slots, by token,
   with their scores. An expert without overflow is done.
3. The score of the C-th row in the order is found digit by digit, 8 bits each (radix selection). A
   histogram of one digit, over the rows that agree in all digits before, says which digit it is.
4. Rows behind the C-th one are struck from the kept map; of its equals, the first ones stay.

Steps 1 and 2 read the whole map once each; all others read only the listed rows, a share K / E of
it. If lists are short (T <= `_SHORT`), one program does steps 3 and 4 for an expert, in one
launch. Longer lists are divided among several programs: there is one launch for each digit, in
which each program writes a histogram of its part, and the next launch adds them up. Each element
has one writer, so there are no atomics. Grids depend on shapes alone.

Memory while it runs: 4 bytes and the size of a score for each element of the map.

T tokens, E experts, C slots of a cell, B blocks, P parts of a list, V values of a digit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # Elements of the map that a program holds at once.
_BLOCK = 2048  # Listed rows that a program holds at once.
_SHORT = 16384  # Tokens, from which on several programs share an expert's list.
_MAX_PARTS = 32  # Parts of a list, whose histograms one program adds up.
_PROGRAMS = 512  # Programs of a launch over the map: about four for each SM.
_MAX_BLOCKS = 256  # Blocks of tokens, whose counts one program adds up.

_UNSIGNED = {2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def kept_map(
    asked_TE: Tensor, probs_TE: Tensor, capacity: int, policy: str
) -> tuple[Tensor, Tensor]:
    """Return the map of kept rows and the demand.

    Arguments, results and example: see `padded_dispatch.routing.select.kept_map_in_torch`.
    """
    num_tokens, num_experts = asked_TE.shape
    asked_TE, probs_TE = asked_TE.contiguous(), probs_TE.contiguous()
    grid, tokens_per_block, blocks = _tiles(num_tokens, num_experts)
    kept_TE = torch.empty_like(asked_TE)
    demand_E = asked_TE.new_empty(num_experts, dtype=torch.int32)
    asked_BE = demand_E.new_empty(grid[0], num_experts)
    listed_ET = demand_E.new_empty(num_experts, num_tokens)
    score_ET, num_digits = None, 0
    if policy == "probs":
        num_digits = probs_TE.element_size()
        score_ET = torch.empty_like(listed_ET, dtype=_UNSIGNED[num_digits])
    sizes = num_tokens, num_experts
    _select_count_kernel[grid](asked_TE, kept_TE, asked_BE, *sizes, tokens_per_block, **blocks)
    _select_list_kernel[grid](
        asked_TE,
        probs_TE,
        asked_BE,
        demand_E,
        listed_ET,
        score_ET,
        *sizes,
        grid[0],
        tokens_per_block,
        capacity,
        BLOCK_B=triton.next_power_of_2(grid[0]),
        BITS=8 * num_digits,
        **blocks,
    )
    num_parts = min(_MAX_PARTS, triton.next_power_of_2(triton.cdiv(num_tokens, _SHORT)))
    cells = demand_E, capacity, num_tokens
    constants = dict(DIGITS=num_digits, BLOCK=_BLOCK, PARTS=num_parts, num_warps=4)
    grid = num_parts, num_experts
    count_DEPV = state_DE2 = None
    if num_parts > 1:
        count_DEPV = demand_E.new_empty(num_digits, num_experts, num_parts, 256)
        state_DE2 = demand_E.new_empty(num_digits, num_experts, 2, dtype=torch.int64)
        for digit in range(num_digits):
            _select_digit_kernel[grid](*cells, score_ET, count_DEPV, state_DE2, digit, **constants)
    _select_strike_kernel[grid](
        kept_TE, *cells, listed_ET, score_ET, count_DEPV, state_DE2, **constants
    )
    return kept_TE, demand_E


def _tiles(num_tokens: int, num_experts: int) -> tuple[tuple[int, int], int, dict[str, int]]:
    """Divide the map among programs, in blocks of tokens and of experts.

    A tile is 32 experts wide, where there are so many: that many bytes are read at once.

    Returns:
        The grid, by block of tokens and by experts; the tokens of a block, which a program reads in
        several steps; and the constants of both launches, with the sizes of a step.
    """
    block_e = min(triton.next_power_of_2(num_experts), 32)
    block_t = max(1, min(triton.next_power_of_2(num_tokens), _TILE // block_e))
    columns, steps = triton.cdiv(num_experts, block_e), triton.cdiv(num_tokens, block_t)
    num_blocks = max(1, min(steps, _PROGRAMS // columns, _MAX_BLOCKS))
    tokens_per_block = triton.cdiv(steps, num_blocks) * block_t
    blocks = dict(BLOCK_T=block_t, BLOCK_E=block_e, num_warps=8)
    return (triton.cdiv(num_tokens, tokens_per_block), columns), tokens_per_block, blocks


@triton.jit
def _select_count_kernel(
    asked,
    kept,
    asked_BE,
    num_tokens,
    num_experts,
    tokens_per_block,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Copy the asked map, and count the rows of each expert in a block of tokens."""
    block = tl.program_id(0)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_E,), dtype=tl.int32)
    start = block * tokens_per_block
    for begin in range(start, tl.minimum(num_tokens, start + tokens_per_block), BLOCK_T):
        t = (begin + tl.arange(0, BLOCK_T))[:, None]
        inside = (t < num_tokens) & (e < num_experts)[None, :]
        at = t.to(tl.int64) * num_experts + e[None, :]
        rows = tl.load(asked + at, mask=inside, other=0) != 0
        tl.store(kept + at, rows, mask=inside)
        total += tl.sum(rows.to(tl.int32), 0)
    tl.store(asked_BE + block * num_experts + e, total, mask=e < num_experts)


@triton.jit
def _select_list_kernel(
    asked,
    probs,
    asked_BE,
    demand,
    listed,
    scores,
    num_tokens,
    num_experts,
    num_blocks,
    tokens_per_block,
    capacity,
    BLOCK_B: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """List the rows of overflowing experts in a block of tokens, behind those of earlier blocks."""
    block = tl.program_id(0)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    b = tl.arange(0, BLOCK_B)[:, None]
    known = (b < num_blocks) & (e < num_experts)[None, :]
    counts = tl.load(asked_BE + b * num_experts + e[None, :], mask=known, other=0)
    total = tl.sum(counts, 0)
    if block == 0:
        tl.store(demand + e, total, mask=e < num_experts)
    overflows = total > capacity
    if tl.max(overflows.to(tl.int32), 0) == 0:
        return

    num_listed = tl.sum(tl.where(b < block, counts, 0), 0)
    list_at = (e.to(tl.int64) * num_tokens)[None, :]
    start = block * tokens_per_block
    for begin in range(start, tl.minimum(num_tokens, start + tokens_per_block), BLOCK_T):
        t = (begin + tl.arange(0, BLOCK_T))[:, None]
        inside = (t < num_tokens) & overflows[None, :]
        at = t.to(tl.int64) * num_experts + e[None, :]
        rows = tl.load(asked + at, mask=inside, other=0) != 0
        one = rows.to(tl.int32)
        to = list_at + num_listed[None, :] + tl.cumsum(one, 0) - one
        num_listed += tl.sum(one, 0)
        tl.store(listed + to, t, mask=rows)
        if scores is not None:
            prob = tl.load(probs + at, mask=rows, other=0.0)
            tl.store(scores + to, _ordered_bits(prob, BITS), mask=rows)


@triton.jit(do_not_specialize=["digit"])
def _select_digit_kernel(
    demand,
    capacity,
    num_tokens,
    scores,
    counts,
    states,
    digit,
    DIGITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write the histogram of a digit over one part of an expert's list."""
    part, e = tl.program_id(0), tl.program_id(1)
    num_rows = tl.load(demand + e)
    if num_rows <= capacity:
        return
    num_experts = tl.num_programs(1)
    score, room = _found_before(counts, states, capacity, e, num_experts, digit, DIGITS, PARTS)
    at = digit * num_experts + e
    if part == 0:
        tl.store(states + at * 2, score.to(tl.int64))
        tl.store(states + at * 2 + 1, room.to(tl.int64))
    rows_per_part = tl.cdiv(num_rows, PARTS)
    start = part * rows_per_part
    stop = tl.minimum(num_rows, start + rows_per_part)
    list_at = e.to(tl.int64) * num_tokens
    count = _histogram(scores, list_at, start, stop, score, digit, DIGITS, BLOCK)
    tl.store(counts + (at * PARTS + part) * 256 + tl.arange(0, 256), count)


@triton.jit
def _select_strike_kernel(
    kept,
    demand,
    capacity,
    num_tokens,
    listed,
    scores,
    counts,
    states,
    DIGITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Strike the rows without a slot from one part of an expert's list, or from all of it.

    A program that has all of it finds the score of the last row with a slot by itself.
    """
    part, e = tl.program_id(0), tl.program_id(1)
    num_rows = tl.load(demand + e)
    if num_rows <= capacity:
        return
    num_experts = tl.num_programs(1)
    list_at = e.to(tl.int64) * num_tokens
    rows_per_part = tl.cdiv(num_rows, PARTS)
    start = tl.minimum(num_rows, part * rows_per_part)
    num_equals = start
    if PARTS == 1:
        score, room = _lowest(capacity, DIGITS)
        for digit in range(DIGITS):
            count = _histogram(scores, list_at, 0, num_rows, score, digit, DIGITS, BLOCK)
            score, room = _narrow(count, score, room, digit, DIGITS)
    else:
        score, room = _found_before(counts, states, capacity, e, num_experts, DIGITS, DIGITS, PARTS)
        if DIGITS > 0:
            # Rows that agree in all digits: counted where the last digit was.
            parts = tl.arange(0, PARTS)
            at = ((DIGITS - 1) * num_experts + e) * PARTS + parts
            last = (score & 255).to(tl.int32)
            num_equals = tl.sum(tl.load(counts + at * 256 + last, mask=parts < part, other=0), 0)
    # Rows below the score go, and of its equals those beyond the room that is left.
    room -= num_equals
    stop = tl.minimum(num_rows, start + rows_per_part)
    for begin in range(start, stop, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        inside = i < stop
        score_N = _scores(scores, list_at + i, inside, DIGITS)
        equals = inside & (score_N == score)
        number = tl.cumsum(equals.to(tl.int32), 0)
        keeps = (score_N > score) | (equals & (number <= room))
        room -= tl.sum(equals.to(tl.int32), 0)
        t = tl.load(listed + list_at + i, mask=inside, other=0)
        tl.store(kept + t.to(tl.int64) * num_experts + e, 0, mask=inside & ~keeps)


@triton.jit
def _lowest(capacity, DIGITS: tl.constexpr):
    """Return the lowest score, which all rows reach, and the room for them."""
    WIDE: tl.constexpr = tl.uint64 if DIGITS == 8 else tl.uint32
    return tl.zeros((), dtype=WIDE), tl.zeros((), dtype=tl.int32) + capacity


@triton.jit
def _found_before(
    counts, states, capacity, e, num_experts, digit, DIGITS: tl.constexpr, PARTS: tl.constexpr
):
    """Return the digits that are found before `digit`, and the room left for rows that have them.

    The launch before this one began with one digit less, and counted the rows of that digit.
    """
    score, room = _lowest(capacity, DIGITS)
    if digit > 0:
        at = (digit - 1) * num_experts + e
        score = tl.load(states + at * 2).to(score.dtype)
        room = tl.load(states + at * 2 + 1).to(tl.int32)
        parts = at * PARTS + tl.arange(0, PARTS)
        count_PV = tl.load(counts + parts[:, None] * 256 + tl.arange(0, 256)[None, :])
        score, room = _narrow(tl.sum(count_PV, 0), score, room, digit - 1, DIGITS)
    return score, room


@triton.jit
def _narrow(count, score, room, digit, DIGITS: tl.constexpr):
    """Set a digit of the score: the largest with which at least `room` rows reach it."""
    reach = tl.sum(count, 0) - tl.cumsum(count, 0) + count
    value = tl.sum((reach >= room).to(tl.int32), 0) - 1
    room -= tl.sum(tl.where(tl.arange(0, 256) > value, count, 0), 0)
    score |= value.to(score.dtype) << (8 * (DIGITS - 1 - digit))
    return score, room


@triton.jit
def _histogram(
    scores, list_at, start, stop, score, digit, DIGITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Count the values of a digit among listed rows that agree with the digits before it."""
    count = tl.zeros((256,), dtype=tl.int32)
    shift = 8 * (DIGITS - 1 - digit)
    for begin in range(start, stop, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        score_N = _scores(scores, list_at + i, i < stop, DIGITS)
        value_N = ((score_N >> shift) & 255).to(tl.int32)
        agrees_N = score_N >> shift >> 8 == score >> shift >> 8
        count += tl.histogram(value_N, 256, mask=agrees_N & (i < stop))
    return count


@triton.jit
def _scores(scores, at, inside, DIGITS: tl.constexpr):
    """Read the scores of listed rows; all are 0 where there are no digits."""
    if DIGITS == 0:
        score = tl.zeros(at.shape, dtype=tl.uint32)
    elif DIGITS == 8:
        score = tl.load(scores + at, mask=inside, other=0)
    else:
        score = tl.load(scores + at, mask=inside, other=0).to(tl.uint32)
    return score


@triton.jit
def _ordered_bits(value, BITS: tl.constexpr):
    """Return unsigned numbers that are ordered like the floats, with -0 equal to 0."""
    # The bits of a negative float fall as it rises: flip them all. In a positive float, flip the
    # sign alone.
    SIGN: tl.constexpr = -(2 ** (BITS - 1))
    if BITS == 64:
        bits = value.to(tl.int64, bitcast=True)
    elif BITS == 32:
        bits = value.to(tl.int32, bitcast=True)
    else:
        bits = value.to(tl.int16, bitcast=True)
    bits = tl.where(bits == SIGN, 0, bits)
    return tl.where(bits < 0, ~bits, bits ^ SIGN)
