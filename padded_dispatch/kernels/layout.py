"""Offsets of the rows of a pass in a store, the list of its slots, and the release of its rows.

    n    = all rows, if they are at most M; else by a water level: each (expert, source) keeps its
           first w rows, for the largest w with which there are at most M, so that none starves
    base = 0 for the first pass of a stack, else min(top, M - n)
    low  = M for the first pass; min(low, base) where base is below top
    top  = base + n

So a pass that finds no room overwrites the last rows of those before it, and backward recomputes
rows from `low` on. The host reads none of it. `experts.plain` has the rule in plain torch.

The list (`kernels.SlotList`) takes two launches, as a plan does: blocks of slots are counted, then
each block writes its entries behind those of the blocks before it. No atomics.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from padded_dispatch.kernels import SlotList

_NO_LEVEL = tl.constexpr(2**31 - 1)  # Every place is below it.
_MAX_BLOCKS = 512  # Blocks of slots, whose counts one program adds up.
_TILE = 1024  # Choices of slots that a program holds at once.


@dataclass(frozen=True, kw_only=True)
class Offsets:
    """The place of the rows of a pass, int32 on the device.

    Attributes:
        offsets: [L * S + 1], where the rows of each (expert, source) begin; the last is their end.
        level: [1], the place from which on rows have no room.
        before: [2], the first two numbers of `top` before the pass; zeros before the first one.
    """

    offsets: Tensor
    level: Tensor
    before: Tensor


def lay_out(
    count_SL: Tensor,
    top: Tensor | None,
    *,
    first: bool,
    limit: int,
    kept_L: Tensor | None = None,
    no_room: Tensor | None = None,
    num_again: Tensor | None = None,
    max_need: Tensor | None = None,
) -> Offsets:
    """Find room for the rows of a pass.

    Args:
        count_SL: contiguous int32, rows of every (source, local expert). The device fails if one is
            `TOO_MANY`.
        top: int32 [3], changed in place: `top` of the rule, what it would be if all rows had had
            room, and `low`. None: rows begin at 0, and nothing is kept for later passes.
        first: whether this is the first pass, which does not read `top`.
        limit: M.
        kept_L: int64; the rows of each local expert that have room are added. None counts nothing.
        no_room: int64, one number; the rows that have no room are added. Likewise.
        num_again: int64, one number; the rows that this pass overwrites are added. Likewise.
        max_need: int64, one number, raised to the second number of `top` afterwards. Likewise.

    Example: `count = [[3, 1], [2, 0]]`, `top = [4, 4, 7]` and M = 7: 6 rows, offsets `[1, 4, 6, 7,
    7]` in the order of expert, then source; `top = [7, 10, 1]`. With M = 5 w is 2, 5 rows have
    room, offsets are `[0, 2, 4, 5, 5]`.
    """
    num_sources, num_experts = count_SL.shape
    num_cells = num_sources * num_experts
    out = count_SL.new_empty(num_cells + 4)
    _lay_out_kernel[(1,)](
        count_SL,
        top,
        out,
        kept_L,
        no_room,
        num_again,
        max_need,
        num_sources,
        num_experts,
        limit,
        first,
        L_BLOCK=triton.next_power_of_2(num_experts),
        S_BLOCK=triton.next_power_of_2(num_sources),
        num_warps=4,
        debug=True,  # For the assertion.
        sanitize_overflow=False,
    )
    offsets, level, before = out.split([num_cells + 1, 1, 2])
    return Offsets(offsets=offsets, level=level, before=before)


@triton.jit
def _lay_out_kernel(
    count_of,
    top,
    out,
    kept_of,
    no_room,
    num_again,
    max_need,
    num_sources,
    num_experts,
    limit,
    first,
    L_BLOCK: tl.constexpr,
    S_BLOCK: tl.constexpr,
):
    local = tl.arange(0, L_BLOCK)[:, None]
    s = tl.arange(0, S_BLOCK)[None, :]
    valid = (local < num_experts) & (s < num_sources)
    count = tl.load(count_of + s * num_experts + local, mask=valid, other=0)
    tl.device_assert(count >= 0, "a token has more experts than top_k (moe_router_topk): raise it")
    total = tl.sum(count)
    in_use, asked, low = 0, 0, limit
    if top is not None:  # An argument, not a constant: a capture must not compile another variant.
        later = first == 0
        in_use = tl.load(top, mask=later, other=0)
        asked = tl.load(top + 1, mask=later, other=0)
        low = tl.load(top + 2, mask=later, other=limit)
    level = tl.zeros((), dtype=tl.int32) + _NO_LEVEL
    if total > limit:
        level = tl.zeros((), dtype=tl.int32)
        for i in tl.static_range(24):  # A source has less than 2**24 tokens.
            higher = level + (1 << (23 - i))
            fits = tl.sum(tl.minimum(count, higher)) <= limit
            level = tl.where(fits, higher, level)
    kept = tl.minimum(count, level)
    of_expert = tl.sum(kept, 1)
    num_rows = tl.sum(of_expert, 0)
    base = tl.minimum(in_use, limit - num_rows)
    before = tl.cumsum(of_expert, 0) - of_expert
    end = base + before[:, None] + tl.cumsum(kept, 1)
    tl.store(out, base)
    tl.store(out + 1 + local * num_sources + s, end, mask=valid)
    behind = out + num_experts * num_sources + 1
    tl.store(behind, level)
    tl.store(behind + 1, in_use)
    tl.store(behind + 2, asked)
    if top is not None:
        tl.store(top, base + num_rows)
        tl.store(top + 1, asked + total)
        tl.store(top + 2, tl.where(base < in_use, tl.minimum(low, base), low))
    if kept_of is not None:
        e = tl.arange(0, L_BLOCK)
        counted = tl.load(kept_of + e, mask=e < num_experts, other=0)
        tl.store(kept_of + e, counted + of_expert, mask=e < num_experts)
    if no_room is not None:
        tl.store(no_room, tl.load(no_room) + (total - num_rows).to(tl.int64))
    if num_again is not None:
        tl.store(num_again, tl.load(num_again) + (in_use - base).to(tl.int64))
    if max_need is not None:
        tl.store(max_need, tl.maximum(tl.load(max_need), (asked + total).to(tl.int64)))


def list_slots(
    expert_SPK: Tensor,
    place_SPK: Tensor,
    prob_SPK: Tensor,
    offsets: Tensor,
    level: Tensor,
    num_experts: int,
) -> SlotList:
    """List the slots whose token has an expert of this rank, with the rows of their choices.

    Args:
        expert_SPK: contiguous, see `exchange.collectives.Arrived`.
        place_SPK: likewise.
        prob_SPK: likewise.
        offsets: see `Offsets`.
        level: see `Offsets`.
        num_experts: L.

    Example: S = 2, P = 2, L = 2, offsets `[5, 6, 7, 7, 8]`, level 1. The experts `[[0, 2], [0,
    -1]]` and `[[2, 3], [0, 1]]` with the places `[[0, 0], [1, -1]]` and `[[0, 0], [0, 0]]` give
    three entries: the slots `[0, 1, 3]` with the rows `[[5, -1], [-2, -1], [6, 7]]`.
    """
    num_sources, num_slots, top_k = expert_SPK.shape
    most = num_sources * num_slots
    k_block = triton.next_power_of_2(top_k)
    block = max(1, _TILE // k_block)
    num_blocks = min(_MAX_BLOCKS, triton.cdiv(most, block))
    slots_of_block = triton.cdiv(triton.cdiv(most, num_blocks), block) * block
    grid = (triton.cdiv(most, slots_of_block),)
    constants = {"K": top_k, "K_BLOCK": k_block, "BLOCK": block}
    row_AK = expert_SPK.new_empty(most, top_k)
    slot_A = length = counts = None
    prob_AK = prob_SPK.flatten(0, 1)
    if num_sources > 1:
        slot_A, length = row_AK.new_empty(most), row_AK.new_empty(1)
        prob_AK = torch.empty_like(prob_AK)
        counts = row_AK.new_empty(grid)
        _count_slots_kernel[grid](
            expert_SPK, counts, most, slots_of_block, num_experts, **constants, num_warps=4
        )
    _list_slots_kernel[grid](
        expert_SPK,
        place_SPK,
        None if counts is None else prob_SPK,
        offsets,
        level,
        counts,
        slot_A,
        length,
        row_AK,
        None if counts is None else prob_AK,
        most,
        slots_of_block,
        num_slots,
        num_sources,
        num_experts,
        BLOCKS=_MAX_BLOCKS,
        **constants,
        num_warps=4,
    )
    return SlotList(
        slot_A=slot_A,
        length=length,
        row_AK=row_AK,
        prob_AK=prob_AK,
        num_sources=num_sources,
        num_slots=num_slots,
    )


@triton.jit
def _experts_of(expert_of, slot, num_slots, num_experts, K: tl.constexpr, K_BLOCK: tl.constexpr):
    """Return the place of each choice of some slots, its expert, and whether that is of here."""
    k = tl.arange(0, K_BLOCK)[None, :]
    at = slot[:, None].to(tl.int64) * K + k
    expert = tl.load(expert_of + at, mask=(slot < num_slots)[:, None] & (k < K), other=-1)
    return at, expert, (expert >= 0) & (expert < num_experts)


@triton.jit
def _count_slots_kernel(
    expert_of,
    counts,
    num_slots,
    slots_of_block,
    num_experts,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0) * slots_of_block
    total = 0
    for begin in range(start, tl.minimum(num_slots, start + slots_of_block), BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        _, _, mine = _experts_of(expert_of, slot, num_slots, num_experts, K, K_BLOCK)
        total += tl.sum(tl.max(mine.to(tl.int32), 1), 0)
    tl.store(counts + tl.program_id(0), total)


@triton.jit
def _list_slots_kernel(
    expert_of,
    place_of,
    prob_of,
    offsets,
    level,
    counts,
    slot_out,
    length,
    row_out,
    prob_out,
    num_slots,
    slots_of_block,
    slots_of_source,
    num_sources,
    num_experts,
    BLOCKS: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    listed = 0  # entries of the blocks before this one
    if counts is not None:
        b = tl.arange(0, BLOCKS)
        listed = tl.sum(tl.load(counts + b, mask=b < block, other=0), 0)
    k = tl.arange(0, K_BLOCK)[None, :]
    last_level = tl.load(level)
    start = block * slots_of_block
    for begin in range(start, tl.minimum(num_slots, start + slots_of_block), BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        at, expert, mine = _experts_of(expert_of, slot, num_slots, num_experts, K, K_BLOCK)
        place = tl.load(place_of + at, mask=mine, other=0)
        segment = expert * num_sources + (slot // slots_of_source)[:, None]
        first_row = tl.load(offsets + segment, mask=mine, other=0)
        row = tl.where(mine, tl.where(place < last_level, first_row + place, -2), -1)
        entry, inside = slot, (slot < num_slots).to(tl.int32)
        if counts is not None:
            inside = tl.max(mine.to(tl.int32), 1)
            entry = listed + tl.cumsum(inside, 0) - inside
            listed += tl.sum(inside, 0)
            tl.store(slot_out + entry, slot, mask=inside > 0)
        to = entry[:, None].to(tl.int64) * K + k
        there = (inside > 0)[:, None] & (k < K)
        tl.store(row_out + to, row, mask=there)
        if prob_out is not None:
            prob = tl.load(prob_of + at, mask=row >= 0, other=0)
            tl.store(prob_out + to, prob, mask=there)
    if length is not None:
        tl.store(length, listed, mask=block == tl.num_programs(0) - 1)


def release(top: Tensor, offsets: Tensor, before: Tensor) -> None:
    """Give the rows of a pass back, behind their last use: see `Offsets`.

    The device fails if the rows were given back before: backward passes of a stack must come in
    reverse order, each once. `low` stays, since rows from there on were overwritten.

    Example: behind that of `lay_out`, `top` is `[4, 4, 1]`.
    """
    last = offsets.numel() - 1
    # One warp, so that none loads `top` behind the store of another.
    _release_kernel[(1,)](top, offsets, last, before, debug=True, num_warps=1)


@triton.jit
def _release_kernel(top, offsets, last, before):
    in_use, end = tl.load(top), tl.load(offsets + last)
    tl.device_assert(in_use >= end, "rows of a store were given back before their last use")
    tl.store(top, tl.load(before))
    tl.store(top + 1, tl.load(before + 1))
