"""Selection without sorting: the rows of every pool that overflows, for any number of tokens.

A row's place in its pool's order is two unsigned numbers. The first one has few bits: the row's
level and, under "priority", which choice of its token it is. The second one is the policy's score:
the bits of a float, in its order, or random bits. Equals are ordered by token, then by expert.

1. `_select_count_kernel` copies the asked map to the kept one, and counts each expert's rows.
2. `_select_list_kernel` lists the rows of each pool that has more of them than slots, by token,
   then by expert, with their two numbers. A pool without overflow is done.
3. The numbers of the P-th row in the order are found digit by digit, 8 bits each (radix selection).
   A histogram of one digit, over the rows that agree in all digits before, says which digit it is.
4. Rows behind the P-th one are struck from the kept map; of its equals, the first ones stay.

Steps 1 and 2 read the whole map once each; all others read only the listed rows, a share K / E of
it. If lists are short (T * X <= `_SHORT`), one program does steps 3 and 4 for a pool, in one
launch. Longer lists are divided among several programs: there is one launch for each digit, in
which each program writes a histogram of its part, and the next launch adds them up. Each element
has one writer, so there are no atomics. Grids depend on shapes alone.

Memory while it runs: 4 bytes and the size of a score (4 for random bits), and 4 more bytes with
levels or "priority", for each element of the map.

T tokens, E experts, G pools of X experts, B blocks of tokens, N candidates of a pool, T * X.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # Elements of the map that a program holds at once.
_BLOCK = 2048  # Listed rows that a program holds at once.
_SHORT = 16384  # Candidates of a pool, from which on several programs share its list.
_MAX_PARTS = 32  # Parts of a list, whose histograms one program adds up.
_PROGRAMS = 512  # Programs of a launch over the map: about four for each SM.
_MAX_BLOCKS = 256  # Blocks of tokens, whose counts one program adds up.


def kept_map(
    asked_TE: Tensor,
    probs_TE: Tensor,
    slots: int,
    policy: str,
    level_TE: Tensor | None = None,
    draw: Tensor | None = None,
    experts_per_pool: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return the map of kept rows and the demand.

    Arguments, results and example: see `padded_dispatch.ops.select.kept_map_in_torch`.
    """
    num_tokens, num_experts = asked_TE.shape
    asked_TE, score_TE = asked_TE.contiguous(), probs_TE.contiguous()
    num_choices, rank_TE = 1, None
    if policy == "priority":
        num_choices, rank_TE = num_experts, choice_ranks(asked_TE, probs_TE)
        best_T = torch.where(asked_TE, probs_TE, -torch.inf).amax(1)
        score_TE = best_T[:, None].expand(-1, num_experts)
    if level_TE is not None:
        level_TE = level_TE.expand(-1, num_experts)
    first_bits = (num_choices * (1 if level_TE is None else 4) - 1).bit_length()
    # Without bits to compare, all rows are equal, and the first ones win.
    second_bits = 8 * score_TE.element_size()
    if policy in ("position", "random"):
        second_bits = 0 if policy == "position" else 32

    num_pools = num_experts // experts_per_pool
    tiles = _tiles(num_tokens, num_pools, experts_per_pool)
    kept_TE = torch.empty_like(asked_TE)
    demand_E = asked_TE.new_empty(num_experts, dtype=torch.int32)
    asked_BE = demand_E.new_empty(tiles.num_blocks, num_experts)
    asked_BG = demand_E.new_empty(tiles.num_blocks, num_pools)
    listed_GN = demand_E.new_empty(num_pools, num_tokens * experts_per_pool)
    first_GN = torch.empty_like(listed_GN) if first_bits else None
    second_GN = None
    if second_bits:
        second_GN = torch.empty_like(listed_GN, dtype=_UNSIGNED[second_bits])
    blocks = dict(BLOCK_T=tiles.block_t, BLOCK_G=tiles.block_g, BLOCK_X=tiles.block_x, num_warps=8)
    _select_count_kernel[tiles.grid](
        asked_TE,
        kept_TE,
        asked_BE,
        asked_BG,
        num_tokens,
        num_pools,
        tiles.tokens_per_block,
        X=experts_per_pool,
        **blocks,
    )
    _select_list_kernel[tiles.grid](
        asked_TE,
        score_TE,
        rank_TE,
        level_TE,
        draw,
        asked_BE,
        asked_BG,
        demand_E,
        listed_GN,
        first_GN,
        second_GN,
        num_tokens,
        num_pools,
        tiles.num_blocks,
        tiles.tokens_per_block,
        slots,
        *score_TE.stride(),
        *(0, 0) if level_TE is None else level_TE.stride(),
        X=experts_per_pool,
        BLOCK_B=triton.next_power_of_2(tiles.num_blocks),
        SECOND_BITS=second_bits,
        RANDOM=policy == "random",
        **blocks,
    )
    _strike(kept_TE, demand_E, slots, listed_GN, first_GN, second_GN, first_bits)
    return kept_TE, demand_E


_UNSIGNED = {16: torch.uint16, 32: torch.uint32, 64: torch.uint64}


@dataclass(frozen=True, kw_only=True)
class _Tiles:
    """The map's division among the programs of a launch: in blocks of tokens and of pools.

    Attributes:
        block_t: tokens that a program holds at once.
        block_g: pools of a program.
        block_x: experts of a pool, rounded up to a power of two.
        tokens_per_block: tokens of a program, which reads them in several steps.
        num_blocks: programs for the same pools.
        grid: programs by block of tokens, and by pools.
    """

    block_t: int
    block_g: int
    block_x: int
    tokens_per_block: int
    num_blocks: int
    grid: tuple[int, int]


def _tiles(num_tokens: int, num_pools: int, experts_per_pool: int) -> _Tiles:
    """Return tiles of whole pools, at least 32 experts wide: that many bytes are read at once."""
    block_x = triton.next_power_of_2(experts_per_pool)
    block_g = min(triton.next_power_of_2(num_pools), max(1, 32 // block_x))
    block_t = max(1, min(triton.next_power_of_2(num_tokens), _TILE // (block_g * block_x)))
    columns, steps = triton.cdiv(num_pools, block_g), triton.cdiv(num_tokens, block_t)
    num_blocks = max(1, min(steps, _PROGRAMS // columns, _MAX_BLOCKS))
    tokens_per_block = triton.cdiv(steps, num_blocks) * block_t
    num_blocks = triton.cdiv(num_tokens, tokens_per_block)
    return _Tiles(
        block_t=block_t,
        block_g=block_g,
        block_x=block_x,
        tokens_per_block=tokens_per_block,
        num_blocks=num_blocks,
        grid=(num_blocks, columns),
    )


def _strike(
    kept_TE: Tensor,
    demand_E: Tensor,
    slots: int,
    listed_GN: Tensor,
    first_GN: Tensor | None,
    second_GN: Tensor | None,
    first_bits: int,
) -> None:
    """Clear the rows of `kept_TE` that have no slot, by the lists of their pools.

    The arguments are those of `kept_map`, the lists, and the bits of the first number.
    """
    num_pools, num_candidates = listed_GN.shape
    num_experts = len(demand_E)
    first_digits = triton.cdiv(first_bits, 8)
    second_digits = 0 if second_GN is None else second_GN.element_size()
    num_digits = first_digits + second_digits
    num_parts = min(_MAX_PARTS, triton.next_power_of_2(triton.cdiv(num_candidates, _SHORT)))
    pools = demand_E, slots, num_candidates
    order = listed_GN, first_GN, second_GN
    constants = dict(
        X=num_experts // num_pools,
        BLOCK_X=triton.next_power_of_2(num_experts // num_pools),
        FIRST_DIGITS=first_digits,
        SECOND_DIGITS=second_digits,
        BLOCK=_BLOCK,
        PARTS=num_parts,
        num_warps=4,
    )
    grid = num_parts, num_pools
    count_DGPV = state_DG3 = None
    if num_parts > 1:
        count_DGPV = demand_E.new_empty(num_digits, num_pools, num_parts, 256)
        state_DG3 = demand_E.new_empty(num_digits, num_pools, 3, dtype=torch.int64)
        for digit in range(num_digits):
            _select_digit_kernel[grid](
                *pools, *order[1:], count_DGPV, state_DG3, digit, **constants
            )
    _select_strike_kernel[grid](
        kept_TE, *pools, *order, count_DGPV, state_DG3, num_experts, **constants
    )


def choice_ranks(asked_TE: Tensor, probs_TE: Tensor) -> Tensor:
    """Rank each token's experts by probability: int32 [T, E], unspecified where not asked for.

    Example: see `padded_dispatch.ops.select.choice_ranks_in_torch`.
    """
    num_tokens, num_experts = asked_TE.shape
    rank_TE = asked_TE.new_empty(asked_TE.shape, dtype=torch.int32)
    block_e = triton.next_power_of_2(num_experts)
    block_t = max(1, 2048 // block_e)
    _choice_ranks_kernel[(triton.cdiv(num_tokens, block_t),)](
        asked_TE.contiguous(),
        probs_TE.contiguous(),
        rank_TE,
        num_tokens,
        NUM_EXPERTS=num_experts,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        WIDE=tl.float64 if probs_TE.dtype == torch.float64 else tl.float32,
    )
    return rank_TE


@triton.jit
def _select_count_kernel(
    asked,
    kept,
    asked_BE,
    asked_BG,
    num_tokens,
    num_pools,
    tokens_per_block,
    X: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """Copy the asked map, and count the rows of each expert and pool in a block of tokens."""
    block = tl.program_id(0)
    g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    x = tl.arange(0, BLOCK_X)
    e = g[:, None] * X + x[None, :]
    owned = (g < num_pools)[:, None] & (x < X)[None, :]
    num_experts = num_pools * X
    total = tl.zeros((BLOCK_G, BLOCK_X), dtype=tl.int32)
    start = block * tokens_per_block
    for begin in range(start, tl.minimum(num_tokens, start + tokens_per_block), BLOCK_T):
        t = (begin + tl.arange(0, BLOCK_T))[:, None, None]
        inside = (t < num_tokens) & owned[None, :, :]
        at = t.to(tl.int64) * num_experts + e[None, :, :]
        rows = tl.load(asked + at, mask=inside, other=0) != 0
        tl.store(kept + at, rows, mask=inside)
        total += tl.sum(rows.to(tl.int32), 0)
    tl.store(asked_BE + block * num_experts + e, total, mask=owned)
    tl.store(asked_BG + block * num_pools + g, tl.sum(total, 1), mask=g < num_pools)


@triton.jit
def _select_list_kernel(
    asked,
    score,
    rank,
    level,
    draw,
    asked_BE,
    asked_BG,
    demand,
    listed,
    firsts,
    seconds,
    num_tokens,
    num_pools,
    num_blocks,
    tokens_per_block,
    slots,
    score_stride_t,
    score_stride_e,
    level_stride_t,
    level_stride_e,
    X: tl.constexpr,
    BLOCK_B: tl.constexpr,
    SECOND_BITS: tl.constexpr,
    RANDOM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """List the rows of overflowing pools in a block of tokens, behind those of earlier blocks."""
    block = tl.program_id(0)
    g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    x = tl.arange(0, BLOCK_X)
    e = g[:, None] * X + x[None, :]
    owned = (g < num_pools)[:, None] & (x < X)[None, :]
    num_experts = num_pools * X

    if block == 0:
        total = tl.zeros((BLOCK_G, BLOCK_X), dtype=tl.int32)
        for begin in range(0, num_blocks, BLOCK_T):
            of_block = (begin + tl.arange(0, BLOCK_T))[:, None, None]
            counted = (of_block < num_blocks) & owned[None, :, :]
            at_expert = of_block * num_experts + e[None, :, :]
            total += tl.sum(tl.load(asked_BE + at_expert, mask=counted, other=0), 0)
        tl.store(demand + e, total, mask=owned)

    b = tl.arange(0, BLOCK_B)[:, None]
    known = (b < num_blocks) & (g < num_pools)[None, :]
    counts = tl.load(asked_BG + b * num_pools + g[None, :], mask=known, other=0)
    overflows = tl.sum(counts, 0) > slots
    if tl.max(overflows.to(tl.int32), 0) == 0:
        return

    num_listed = tl.sum(tl.where(b < block, counts, 0), 0)
    list_at = g.to(tl.int64) * (num_tokens * X)
    start = block * tokens_per_block
    for begin in range(start, tl.minimum(num_tokens, start + tokens_per_block), BLOCK_T):
        t = (begin + tl.arange(0, BLOCK_T))[:, None, None]
        inside = (t < num_tokens) & (owned & overflows[:, None])[None, :, :]
        at = t.to(tl.int64) * num_experts + e[None, :, :]
        rows = tl.load(asked + at, mask=inside, other=0) != 0
        one = rows.to(tl.int32)
        of_token = tl.sum(one, 2)
        place = num_listed[None, :] + tl.cumsum(of_token, 0) - of_token
        to = list_at[None, :, None] + place[:, :, None] + tl.cumsum(one, 2) - one
        num_listed += tl.sum(of_token, 0)
        tl.store(listed + to, t * X + x[None, None, :], mask=rows)

        if firsts is not None:
            first = tl.zeros((BLOCK_T, BLOCK_G, BLOCK_X), dtype=tl.int32)
            if level is not None:
                level_at = t.to(tl.int64) * level_stride_t + e[None, :, :] * level_stride_e
                first += tl.load(level + level_at, mask=rows, other=0).to(tl.int32)
            if rank is not None:
                choice = tl.load(rank + at, mask=rows, other=0)
                first = first * num_experts + num_experts - 1 - choice
            tl.store(firsts + to, first, mask=rows)
        if RANDOM:
            tl.store(seconds + to, _random_bits(tl.load(draw), t, e[None, :, :]), mask=rows)
        elif SECOND_BITS > 0:
            score_at = t.to(tl.int64) * score_stride_t + e[None, :, :] * score_stride_e
            value = tl.load(score + score_at, mask=rows, other=0.0)
            tl.store(seconds + to, _ordered_bits(value, SECOND_BITS), mask=rows)


@triton.jit(do_not_specialize=["digit"])
def _select_digit_kernel(
    demand,
    slots,
    num_candidates,
    firsts,
    seconds,
    counts,
    states,
    digit,
    X: tl.constexpr,
    BLOCK_X: tl.constexpr,
    FIRST_DIGITS: tl.constexpr,
    SECOND_DIGITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write the histogram of a digit over one part of a pool's list."""
    part, g = tl.program_id(0), tl.program_id(1)
    num_rows, room = _rows_and_room(demand, slots, g, X, BLOCK_X)
    if num_rows <= room:
        return
    num_pools = tl.num_programs(1)
    first, second, room = _found_before(
        counts, states, room, g, num_pools, digit, FIRST_DIGITS, SECOND_DIGITS, PARTS
    )
    at = digit * num_pools + g
    if part == 0:
        tl.store(states + at * 3, first.to(tl.int64))
        tl.store(states + at * 3 + 1, second.to(tl.int64))
        tl.store(states + at * 3 + 2, room.to(tl.int64))
    rows_per_part = tl.cdiv(num_rows, PARTS)
    count = _histogram(
        firsts,
        seconds,
        g.to(tl.int64) * num_candidates,
        part * rows_per_part,
        tl.minimum(num_rows, (part + 1) * rows_per_part),
        first,
        second,
        digit,
        FIRST_DIGITS,
        SECOND_DIGITS,
        BLOCK,
    )
    tl.store(counts + (at * PARTS + part) * 256 + tl.arange(0, 256), count)


@triton.jit
def _select_strike_kernel(
    kept,
    demand,
    slots,
    num_candidates,
    listed,
    firsts,
    seconds,
    counts,
    states,
    num_experts,
    X: tl.constexpr,
    BLOCK_X: tl.constexpr,
    FIRST_DIGITS: tl.constexpr,
    SECOND_DIGITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Strike the rows without a slot from one part of a pool's list, or from all of it.

    A program that has all of it finds the last row with a slot by itself.
    """
    part, g = tl.program_id(0), tl.program_id(1)
    num_rows, room = _rows_and_room(demand, slots, g, X, BLOCK_X)
    if num_rows <= room:
        return
    num_pools = tl.num_programs(1)
    list_at = g.to(tl.int64) * num_candidates
    DIGITS: tl.constexpr = FIRST_DIGITS + SECOND_DIGITS
    rows_per_part = tl.cdiv(num_rows, PARTS)
    start = tl.minimum(num_rows, part * rows_per_part)
    num_equals = start
    if PARTS == 1:
        first, second = _lowest(SECOND_DIGITS)
        for digit in range(DIGITS):
            count = _histogram(
                firsts,
                seconds,
                list_at,
                0,
                num_rows,
                first,
                second,
                digit,
                FIRST_DIGITS,
                SECOND_DIGITS,
                BLOCK,
            )
            first, second, room = _narrow(
                count, first, second, room, digit, FIRST_DIGITS, SECOND_DIGITS
            )
    else:
        first, second, room = _found_before(
            counts, states, room, g, num_pools, DIGITS, FIRST_DIGITS, SECOND_DIGITS, PARTS
        )
        if DIGITS > 0:
            # Rows that agree in all digits: counted where the last digit was.
            parts = tl.arange(0, PARTS)
            last = (second if SECOND_DIGITS > 0 else first) & 255
            at = (((DIGITS - 1) * num_pools + g) * PARTS + parts) * 256 + last.to(tl.int32)
            num_equals = tl.sum(tl.load(counts + at, mask=parts < part, other=0), 0)
    # Rows below both numbers go, and of their equals those beyond the room that is left.
    room -= num_equals
    stop = tl.minimum(num_rows, start + rows_per_part)
    for begin in range(start, stop, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        inside = i < stop
        first_N, second_N = _order(
            firsts, seconds, list_at + i, inside, FIRST_DIGITS, SECOND_DIGITS
        )
        equals = inside & (first_N == first) & (second_N == second)
        above = (first_N > first) | ((first_N == first) & (second_N > second))
        number = tl.cumsum(equals.to(tl.int32), 0)
        keeps = above | (equals & (number <= room))
        room -= tl.sum(equals.to(tl.int32), 0)
        row = tl.load(listed + list_at + i, mask=inside, other=0)
        in_map = (row // X).to(tl.int64) * num_experts + g * X + row % X
        tl.store(kept + in_map, 0, mask=inside & ~keeps)


@triton.jit
def _rows_and_room(demand, slots, g, X: tl.constexpr, BLOCK_X: tl.constexpr):
    """Return how many rows ask for a pool, and how many of them it can take."""
    x = tl.arange(0, BLOCK_X)
    num_rows = tl.sum(tl.load(demand + g * X + x, mask=x < X, other=0), 0)
    return num_rows, tl.zeros((), dtype=tl.int32) + slots


@triton.jit
def _lowest(SECOND_DIGITS: tl.constexpr):
    """Return the two lowest numbers, which all rows reach."""
    WIDE: tl.constexpr = tl.uint64 if SECOND_DIGITS == 8 else tl.uint32
    return tl.zeros((), dtype=tl.uint32), tl.zeros((), dtype=WIDE)


@triton.jit
def _found_before(
    counts,
    states,
    room,
    g,
    num_pools,
    digit,
    FIRST_DIGITS: tl.constexpr,
    SECOND_DIGITS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return the digits that are found before `digit`, and the room left for rows that have them.

    The launch before this one began with one digit less, and counted the rows of that digit.
    """
    first, second = _lowest(SECOND_DIGITS)
    if digit > 0:
        at = (digit - 1) * num_pools + g
        first = tl.load(states + at * 3).to(first.dtype)
        second = tl.load(states + at * 3 + 1).to(second.dtype)
        room = tl.load(states + at * 3 + 2).to(tl.int32)
        parts = at * PARTS + tl.arange(0, PARTS)
        count_PV = tl.load(counts + parts[:, None] * 256 + tl.arange(0, 256)[None, :])
        first, second, room = _narrow(
            tl.sum(count_PV, 0), first, second, room, digit - 1, FIRST_DIGITS, SECOND_DIGITS
        )
    return first, second, room


@triton.jit
def _narrow(
    count,
    first,
    second,
    room,
    digit,
    FIRST_DIGITS: tl.constexpr,
    SECOND_DIGITS: tl.constexpr,
):
    """Set a digit of both numbers: the largest with which at least `room` rows reach them."""
    reach = tl.sum(count, 0) - tl.cumsum(count, 0) + count
    value = tl.sum((reach >= room).to(tl.int32), 0) - 1
    room -= tl.sum(tl.where(tl.arange(0, 256) > value, count, 0), 0)
    if digit < FIRST_DIGITS:
        first |= value.to(first.dtype) << (8 * (FIRST_DIGITS - 1 - digit))
    else:
        second |= value.to(second.dtype) << (8 * (FIRST_DIGITS + SECOND_DIGITS - 1 - digit))
    return first, second, room


@triton.jit
def _histogram(
    firsts,
    seconds,
    list_at,
    start,
    stop,
    first,
    second,
    digit,
    FIRST_DIGITS: tl.constexpr,
    SECOND_DIGITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the values of a digit among listed rows that agree with both numbers before it."""
    count = tl.zeros((256,), dtype=tl.int32)
    for begin in range(start, stop, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        first_N, second_N = _order(
            firsts, seconds, list_at + i, i < stop, FIRST_DIGITS, SECOND_DIGITS
        )
        if digit < FIRST_DIGITS:
            shift = 8 * (FIRST_DIGITS - 1 - digit)
            value_N = ((first_N >> shift) & 255).to(tl.int32)
            agrees_N = first_N >> shift >> 8 == first >> shift >> 8
        else:
            shift = 8 * (FIRST_DIGITS + SECOND_DIGITS - 1 - digit)
            value_N = ((second_N >> shift) & 255).to(tl.int32)
            agrees_N = (first_N == first) & (second_N >> shift >> 8 == second >> shift >> 8)
        count += tl.histogram(value_N, 256, mask=agrees_N & (i < stop))
    return count


@triton.jit
def _order(firsts, seconds, at, inside, FIRST_DIGITS: tl.constexpr, SECOND_DIGITS: tl.constexpr):
    """Read both numbers of listed rows; a number without digits is 0."""
    if FIRST_DIGITS > 0:
        first = tl.load(firsts + at, mask=inside, other=0).to(tl.uint32)
    else:
        first = tl.zeros(at.shape, dtype=tl.uint32)
    if SECOND_DIGITS == 8:
        second = tl.load(seconds + at, mask=inside, other=0)
    elif SECOND_DIGITS > 0:
        second = tl.load(seconds + at, mask=inside, other=0).to(tl.uint32)
    else:
        second = tl.zeros(at.shape, dtype=tl.uint32)
    return first, second


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


@triton.jit
def _random_bits(draw, t, e):
    """Compute `padded_dispatch.ops.select.random_scores` for token t and expert e."""
    high, low = (draw >> 32) & 0xFFFFFFFF, draw & 0xFFFFFFFF
    mixed = mix(mix(high ^ 0x9E3779B9) ^ low)
    return mix(mix(mixed ^ t.to(tl.int64)) ^ e.to(tl.int64)).to(tl.uint32)


@triton.jit
def mix(bits):
    """Apply the finalizer of MurmurHash3 to 32 bits in an int64."""
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return bits ^ (bits >> 16)


@triton.jit
def _choice_ranks_kernel(
    asked,
    probs,
    rank,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Take each token's best expert that is left, until none is; of equals the first one."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    inside = (t < num_tokens)[:, None] & (e < NUM_EXPERTS)[None, :]
    at = t[:, None] * NUM_EXPERTS + e[None, :]
    prob = tl.load(probs + at, mask=inside, other=0.0).to(WIDE)
    left = tl.load(asked + at, mask=inside, other=0) != 0
    ranks = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.int32)
    for choice in range(tl.max(tl.sum(left.to(tl.int32), 1))):
        best = tl.max(tl.where(left, prob, -float("inf")), 1)
        equals = left & (prob == best[:, None])
        expert = tl.min(tl.where(equals, e[None, :], BLOCK_E), 1)
        chosen = e[None, :] == expert[:, None]
        ranks = tl.where(chosen, choice, ranks)
        left = left & ~chosen
    tl.store(rank + at, ranks, mask=inside)
