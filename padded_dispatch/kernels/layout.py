"""Offsets of the rows of a pass in a store, by its rule, in one launch; and their release.

    n    = all rows, if they are at most M; else by a water level: each (expert, source) keeps its
           first w rows, for the largest w with which there are at most M, so that none starves
    base = 0 for the first pass of a stack, else min(top, M - n)
    low  = M for the first pass; min(low, base) where base is below top
    top  = base + n

So a pass that finds no room overwrites the last rows of those before it, and backward recomputes
rows from `low` on. The host reads none of it. `experts.plain` has the rule in plain torch.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

_NO_LEVEL = tl.constexpr(2**31 - 1)  # Every place is below it.


@dataclass(frozen=True, kw_only=True)
class Offsets:
    """The result of `lay_out`, int32 on the device.

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
    num_again: Tensor | None = None,
    max_need: Tensor | None = None,
) -> Offsets:
    """Find room for the rows of a pass.

    Args:
        count_SL: contiguous int32, rows of every (source, local expert).
        top: int32 [3], changed in place: `top` of the rule, what it would be if all rows had had
            room, and `low`. None: rows begin at 0, and nothing is kept for later passes.
        first: whether this is the first pass, which does not read `top`.
        limit: M.
        kept_L: int64; the rows of each local expert that have room are added. None counts nothing.
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
        num_again,
        max_need,
        num_sources,
        num_experts,
        limit,
        FIRST=first,
        L_BLOCK=triton.next_power_of_2(num_experts),
        S_BLOCK=triton.next_power_of_2(num_sources),
        num_warps=4,
    )
    offsets, level, before = out.split([num_cells + 1, 1, 2])
    return Offsets(offsets=offsets, level=level, before=before)


@triton.jit
def _lay_out_kernel(
    count_of,
    top,
    out,
    kept_of,
    num_again,
    max_need,
    num_sources,
    num_experts,
    limit,
    FIRST: tl.constexpr,
    L_BLOCK: tl.constexpr,
    S_BLOCK: tl.constexpr,
):
    local = tl.arange(0, L_BLOCK)[:, None]
    s = tl.arange(0, S_BLOCK)[None, :]
    valid = (local < num_experts) & (s < num_sources)
    count = tl.load(count_of + s * num_experts + local, mask=valid, other=0)
    total = tl.sum(count)
    in_use, asked, low = 0, 0, limit
    if top is not None and not FIRST:
        in_use = tl.load(top)
        asked = tl.load(top + 1)
        low = tl.load(top + 2)
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
    if num_again is not None:
        tl.store(num_again, tl.load(num_again) + (in_use - base).to(tl.int64))
    if max_need is not None:
        tl.store(max_need, tl.maximum(tl.load(max_need), (asked + total).to(tl.int64)))


def release(top: Tensor, offsets: Offsets) -> None:
    """Give the rows of a pass back, behind their last use.

    The device fails if the rows were given back before: backward passes of a stack must come in
    reverse order, each once. `low` stays, since rows from there on were overwritten.

    Example: behind that of `lay_out`, `top` is `[4, 4, 1]`.
    """
    last = offsets.offsets.numel() - 1
    # One warp, so that none loads `top` behind the store of another.
    _release_kernel[(1,)](top, offsets.offsets, last, offsets.before, debug=True, num_warps=1)


@triton.jit
def _release_kernel(top, offsets, last, before):
    in_use, end = tl.load(top), tl.load(offsets + last)
    tl.device_assert(in_use >= end, "rows of a store were given back before their last use")
    tl.store(top, tl.load(before))
    tl.store(top + 1, tl.load(before + 1))
