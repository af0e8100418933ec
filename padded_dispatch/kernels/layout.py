"""Offsets of the rows of a pass in a store, by its rule, in one launch; and their release.

    base = 0 for the first pass of a stack, else top
    n    = all rows, if they are at most N; else by a water level: each (expert, source) keeps its
           first w rows, for the largest w with which there are at most N, so that none starves
    top  = min(base + n, M)

Rows from M on do not stay: the passes that follow write there, too, and backward computes them
again. All of it stays on the device. `padded_dispatch.experts.plain` has the rule in plain torch.
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
        again: likewise of the rows that do not stay.
        level: [1], the place from which on rows have no room.
        before: [1], what `top[1]` was.
    """

    offsets: Tensor
    again: Tensor
    level: Tensor
    before: Tensor


def lay_out(
    count_SL: Tensor,
    top: Tensor | None,
    *,
    first: bool,
    limit: int,
    most: int,
    kept_L: Tensor | None = None,
    idle: Tensor | None = None,
    num_again: Tensor | None = None,
    max_need: Tensor | None = None,
) -> Offsets:
    """Find room for the rows of a pass.

    Args:
        count_SL: contiguous int32, rows of every (source, local expert).
        top: int32 [2], rows that stay, and rows that would if all had room; changed in place. None:
            rows begin at 0, and nothing stays.
        first: rows begin at 0, whatever `top` says.
        limit: M.
        most: N.
        kept_L: int64, to which the rows of each local expert are added; None counts nothing.
        idle: int64 [1], to which 1 is added if no row came; likewise.
        num_again: int64 [1], to which the rows that do not stay are added; likewise.
        max_need: int64 [1], raised to the rows that would have held this pass and those before it.

    Example: `count = [[3, 1], [2, 0]]`, `top = [4, 4]`, M = 6 and N = 4: 6 rows, hence w = 1,
    offsets `[4, 5, 6, 7, 7]` in the order of expert, then source; again `[6, 6, 6, 7, 7]`; `top =
    [6, 10]`.
    """
    num_sources, num_experts = count_SL.shape
    num_cells = num_sources * num_experts
    out = count_SL.new_empty(2 * num_cells + 4)
    _lay_out_kernel[(1,)](
        count_SL,
        top,
        out,
        kept_L,
        idle,
        num_again,
        max_need,
        num_sources,
        num_experts,
        limit,
        most,
        FIRST=first,
        L_BLOCK=triton.next_power_of_2(num_experts),
        S_BLOCK=triton.next_power_of_2(num_sources),
        num_warps=4,
    )
    offsets, again, level, before = out.split([num_cells + 1, num_cells + 1, 1, 1])
    return Offsets(offsets=offsets, again=again, level=level, before=before)


@triton.jit
def _lay_out_kernel(
    count_of,
    top,
    out,
    kept_of,
    idle,
    num_again,
    max_need,
    num_sources,
    num_experts,
    limit,
    most,
    FIRST: tl.constexpr,
    L_BLOCK: tl.constexpr,
    S_BLOCK: tl.constexpr,
):
    local = tl.arange(0, L_BLOCK)[:, None]
    s = tl.arange(0, S_BLOCK)[None, :]
    valid = (local < num_experts) & (s < num_sources)
    count = tl.load(count_of + s * num_experts + local, mask=valid, other=0)
    total = tl.sum(count)
    base, asked = 0, 0
    if top is not None and not FIRST:
        base = tl.load(top)
        asked = tl.load(top + 1)
    level = tl.zeros((), dtype=tl.int32) + _NO_LEVEL
    if total > most:
        level = tl.zeros((), dtype=tl.int32)
        for i in tl.static_range(24):  # A source has less than 2**24 tokens.
            higher = level + (1 << (23 - i))
            fits = tl.sum(tl.minimum(count, higher)) <= most
            level = tl.where(fits, higher, level)
    kept = tl.minimum(count, level)
    of_expert = tl.sum(kept, 1)
    before = tl.cumsum(of_expert, 0) - of_expert
    end = base + before[:, None] + tl.cumsum(kept, 1)
    num_cells = num_experts * num_sources
    again = out + num_cells + 1
    tl.store(out + 1 + local * num_sources + s, end, mask=valid)
    tl.store(again + 1 + local * num_sources + s, tl.maximum(end, limit), mask=valid)
    tl.store(out, base)
    tl.store(again, tl.maximum(base, limit))
    tl.store(again + num_cells + 1, level)
    tl.store(again + num_cells + 2, asked)
    if top is not None:
        tl.store(top, tl.minimum(base + tl.sum(of_expert, 0), limit))
        tl.store(top + 1, asked + total)
    if kept_of is not None:
        e = tl.arange(0, L_BLOCK)
        counted = tl.load(kept_of + e, mask=e < num_experts, other=0)
        tl.store(kept_of + e, counted + of_expert, mask=e < num_experts)
    if idle is not None:
        tl.store(idle, tl.load(idle) + (total == 0).to(tl.int64))
    if num_again is not None:
        past = tl.maximum(base + tl.sum(of_expert, 0), limit) - tl.maximum(base, limit)
        tl.store(num_again, tl.load(num_again) + past.to(tl.int64))
    if max_need is not None:
        tl.store(max_need, tl.maximum(tl.load(max_need), (asked + total).to(tl.int64)))


def release(top: Tensor, offsets: Offsets, limit: int) -> None:
    """Give the rows of a pass back, behind their last use. `limit`: M.

    The device fails if the rows were given back before: backward passes of a stack must come in
    reverse order, each once.

    Example: behind that of `lay_out`, `top` is `[4, 4]` again.
    """
    last = offsets.offsets.numel() - 1
    _release_kernel[(1,)](top, offsets.offsets, last, offsets.before, limit, debug=True)


@triton.jit
def _release_kernel(top, offsets, last, before, limit):
    in_use, end = tl.load(top), tl.minimum(tl.load(offsets + last), limit)
    tl.device_assert(in_use >= end, "rows of a store were given back before their last use")
    tl.store(top, tl.load(offsets))
    tl.store(top + 1, tl.load(before))
