"""Store rows straight into the memory of other GPUs, and back: each the transpose of the other.

Every rank has a buffer of each kind. `..._R`, int64 [R], holds the addresses of one kind on all
ranks, as this rank can store to them. Kernels only store to peers and never read from them. They do
not synchronize: the caller puts a barrier of all ranks before each of them (all ranks are done with
what the buffers held) and behind it (all rows have arrived).

`push_counts` sends every rank a number for each expert: the rows that this source keeps, or asks
for. `place_rows` computes from the kept rows of all sources where rows lie at their experts:
packed, ordered (expert, source, slot). `push_rows` sends every token there. `return_rows` sends
packed rows back into slots; for a product that stores its rows there by itself, `find_slots` finds
their addresses, and sends the numbers beside them. `padded_dispatch.kernels.links` pushes and
returns with one row of a token on each link.

A source has its rows of an expert behind each other, in slots and at the expert. So one number per
expert leads from a slot to its place there, and one number per (source, expert) leads back, however
experts share pools.

A link is shared by all programs that store over it at a time, so their destinations should differ.
`push_rows` walks tokens in their own order, whose experts differ, and each token begins with
another of its choices, in `push_tokens` with another rank. In `return_rows` every program walks its
own part of the packed rows, so that rows go to all sources at any time. 4 programs of 4 warps per
multiprocessor of an H200, times the blocks of columns.

Stores fill a link (2 H200, both ways at a time, a script that was not kept). Rows of 2048, 2880 or
7168 columns in bf16 at scattered places, all of them on the other GPU, in GB/s over the link; reads
are of random rows:

    MB over the link                            15 to 18      70     140
    stores as they are here                     352 to 358   358 to 362   362 to 365
    2, 4 or 8 rows in flight per program        349 to 357   356 to 364   361 to 366
    bulk copies from shared memory, CUDA C++    342 to 353   351 to 361   357 to 364
    the same with tensor descriptors, Gluon     344 to 352   356 to 360   361 to 364
    tensor descriptors, Triton                  336 to 345   353 to 358   358 to 361
    reads from the other GPU, any of these      314 to 325   329 to 332   334 to 335
    copy engines, all rows in one piece         281 to 302   362 to 364   378

So 378 GB/s is what a link gives, stores are at most 4 % below it, and nothing that was tried is 1 %
faster: nor are 132 to 2,112 programs of 2, 4 or 8 warps, and loads and stores past a cache. Bulk
copies need all multiprocessors, too: with 64 of them they reach 281 GB/s, with 32 153. In
`return_rows`, whose rows of a source lie behind each other, bulk copies of 4 rows at a time take
229 us instead of 232, with the barriers and sums of a return.

With `sent_R`, int64 [R], a kernel adds to it the rows that it stores at each rank; None compiles to
nothing.

P: slots of a pool of a source. X: its experts; 1, all of a rank, or all. Q: slots of a source.
"""

import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 528  # That store, for each block of columns.


def push_counts(kept_E: Tensor, table_R: Tensor, rank: int) -> None:
    """Write this rank's row of every rank's table.

    Args:
        kept_E: contiguous int32, a number for each expert.
        table_R: addresses of int32 [R, E] on every rank.
        rank: this rank.
    """
    num_experts = kept_E.shape[0]
    block = triton.next_power_of_2(num_experts)
    _push_counts_kernel[(table_R.shape[0],)](kept_E, table_R, rank, num_experts, BLOCK=block)


@triton.jit
def _push_counts_kernel(kept, table_at, rank, num_experts, BLOCK: tl.constexpr):
    e = tl.arange(0, BLOCK)
    count = tl.load(kept + e, mask=e < num_experts)
    table = tl.load(table_at + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    tl.store(table + rank * num_experts + e, count, mask=e < num_experts)


def place_rows(
    table_RE: Tensor,
    rank: int,
    shift_E: Tensor,
    offsets_LS: Tensor,
    count_SL: Tensor,
    pool_slots: int,
    experts_per_pool: int,
) -> None:
    """Compute where rows begin and end at their experts.

    Args:
        table_RE: contiguous int32, the rows of every (source, expert).
        rank: this rank.
        shift_E: int32, written: place of this rank's rows at each expert's rank, less their slot.
        offsets_LS: int32, written: where the rows of each (local expert, source) end on this rank.
        count_SL: fp32, written: the rows of each (source, local expert) on this rank.
        pool_slots: P.
        experts_per_pool: X.

    Example: R = 2, `table = [[1, 0, 2, 0], [3, 1, 0, 5]]`, P = 5 and X = 1 on rank 1, which has
    experts 2 and 3. Its rows begin at `[1, 4, 2, 2]` and its slots at `[0, 5, 10, 15]`: `shift =
    [1, -1, -8, -13]`, `offsets = [[2, 2], [2, 7]]` and `count = [[2, 0], [0, 5]]`. With X = 2 its
    slots begin at `[0, 3, 5, 5]`.
    """
    num_local, num_ranks = offsets_LS.shape
    _place_rows_kernel[(num_ranks,)](
        table_RE,
        shift_E,
        offsets_LS,
        count_SL,
        rank,
        num_ranks,
        num_local,
        pool_slots,
        experts_per_pool,
        SHARED=experts_per_pool > 1,
        S_BLOCK=triton.next_power_of_2(num_ranks),
        L_BLOCK=triton.next_power_of_2(num_local),
    )


@triton.jit
def _place_rows_kernel(
    table,
    shift,
    offsets,
    count_SL,
    rank,
    num_ranks,
    num_local,
    pool_slots,
    num_shared,
    SHARED: tl.constexpr,
    S_BLOCK: tl.constexpr,
    L_BLOCK: tl.constexpr,
):
    owner = tl.program_id(0)  # The rank whose experts this program computes.
    s = tl.arange(0, S_BLOCK)[:, None]
    local = tl.arange(0, L_BLOCK)[None, :]
    valid = (s < num_ranks) & (local < num_local)
    e = owner * num_local + local
    count = tl.load(table + s * (num_ranks * num_local) + e, mask=valid, other=0)
    all_sources = tl.sum(count, 0)
    before = tl.cumsum(all_sources, 0) - all_sources
    end = before[None, :] + tl.cumsum(count, 0)
    slot = e // num_shared * pool_slots
    if SHARED:
        # Behind the rows of the pool's experts before it.
        slot += tl.cumsum(count, 1) - count
    tl.store(shift + e + 0 * s, end - count - slot, mask=valid & (s == rank))
    if owner == rank:
        tl.store(offsets + local * num_ranks + s, end, mask=valid)
        tl.store(count_SL + s * num_local + local, count.to(tl.float32), mask=valid)


def push_rows(
    tokens_TD: Tensor,
    probs_TE: Tensor | None,
    slot_of_TK: Tensor,
    expert_of_TK: Tensor,
    shift_E: Tensor,
    rows_R: Tensor,
    probs_R: Tensor,
    sent_R: Tensor | None = None,
) -> None:
    """Send every token's row, and its probability, to each of its experts.

    Args:
        tokens_TD: contiguous.
        probs_TE: contiguous, floating point; None if nothing travels beside the rows.
        slot_of_TK: int32, -1 where there is none.
        expert_of_TK: int32.
        shift_E: int32, from `place_rows`.
        rows_R: addresses of [N, D] on every rank, in the tokens' dtype.
        probs_R: addresses of fp32 [N] on every rank.
        sent_R: see above.

    Example: R = 2, E = 2, P = 2, `shift = [0, 1]`, `slot_of_TK = [[0, 2], [1, -1]]` and
    `expert_of_TK = [[0, 1], [0, -1]]`: both tokens go to rows 0 and 1 on rank 0; the first one also
    goes to row 3 on rank 1.
    """
    num_tokens, top_k = slot_of_TK.shape
    width, num_experts = tokens_TD.shape[1], shift_E.shape[0]
    programs = min(num_tokens, PROGRAMS)
    _push_rows_kernel[(programs, triton.cdiv(width, block_of(width)))](
        tokens_TD,
        probs_TE,
        slot_of_TK,
        expert_of_TK,
        shift_E,
        rows_R,
        probs_R,
        sent_R,
        num_tokens,
        num_experts,
        num_experts // rows_R.shape[0],
        width,
        K=top_k,
        BLOCK=block_of(width),
        num_warps=4,
    )


@triton.jit
def _push_rows_kernel(
    tokens,
    probs,
    slot_of,
    expert_of,
    shift,
    rows_at,
    probs_at,
    sent,
    num_tokens,
    num_experts,
    num_local,
    width,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = tl.program_id(0).to(tl.int64)
    while t < num_tokens:
        row = tl.load(tokens + t * width + column, mask=column < width)
        for i in tl.static_range(K):
            k = (t + i) % K
            slot = tl.load(slot_of + t * K + k)
            e = tl.load(expert_of + t * K + k)
            if slot >= 0:
                rank = e // num_local
                place = (slot + tl.load(shift + e)).to(tl.int64)
                rows = tl.load(rows_at + rank).to(tl.pointer_type(tokens.dtype.element_ty))
                target = tl.multiple_of(rows, 16) + place * width + column
                tl.store(target, row, mask=column < width)
                if probs is not None:
                    beside = tl.load(probs_at + rank).to(tl.pointer_type(tl.float32))
                    prob = tl.load(probs + t * num_experts + e).to(tl.float32)
                    tl.store(beside + place, prob, mask=tl.program_id(1) == 0)
                if sent is not None:
                    tl.atomic_add(sent + rank, 1, mask=tl.program_id(1) == 0)
        t += tl.num_programs(0)


def return_rows(
    packed_ND: Tensor,
    probs_N: Tensor | None,
    offsets_LS: Tensor,
    slots_R: Tensor,
    meta_R: Tensor,
    rank: int,
    pool_slots: int,
    experts_per_pool: int,
    sent_R: Tensor | None = None,
) -> None:
    """Send packed rows, and a number beside each, back into their slots on their source ranks.

    Args:
        packed_ND: contiguous; rows from `offsets_LS[-1, -1]` on are not read.
        probs_N: contiguous fp32; None if nothing travels beside the rows.
        offsets_LS: contiguous int32.
        slots_R: addresses of [Q, D] on every rank, in the rows' dtype. Empty slots are not written.
        meta_R: addresses of fp32 [Q] on every rank.
        rank: this rank.
        pool_slots: P.
        experts_per_pool: X.
        sent_R: see above.

    Example: on rank 1 of 2 with L = 1, P = 2 and X = 1, `offsets = [[1, 3]]`: row 0 goes to slot 2
    on rank 0, rows 1 and 2 to slots 2 and 3 on rank 1.
    """
    width = packed_ND.shape[1]
    programs = min(packed_ND.shape[0], PROGRAMS)
    num_local, num_ranks = offsets_LS.shape
    _return_rows_kernel[(programs, triton.cdiv(width, block_of(width)))](
        packed_ND,
        probs_N,
        offsets_LS,
        slots_R,
        meta_R,
        sent_R,
        rank,
        num_local,
        num_ranks,
        pool_slots,
        experts_per_pool,
        width,
        SHARED=experts_per_pool > 1,
        BUFFERS=triton.next_power_of_2(offsets_LS.numel()),
        L_BLOCK=triton.next_power_of_2(num_local),
        BLOCK=block_of(width),
        num_warps=4,
    )


@triton.jit
def _return_rows_kernel(
    packed,
    probs,
    offsets,
    slots_at,
    meta_at,
    sent,
    rank,
    num_local,
    num_sources,
    pool_slots,
    num_shared,
    width,
    SHARED: tl.constexpr,
    BUFFERS: tl.constexpr,
    L_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    num_buffers = num_local * num_sources
    total = tl.load(offsets + num_buffers - 1)
    share = tl.cdiv(total, tl.num_programs(0))
    row = tl.program_id(0) * share
    last = tl.minimum(row + share, total)
    b = tl.arange(0, BUFFERS)
    ends = tl.load(offsets + b, mask=b < num_buffers, other=2147483647)
    while row < last:
        # The row's buffer is the first one that ends behind it.
        buffer = tl.sum((ends <= row).to(tl.int32), 0)
        begin = tl.load(offsets + buffer - 1, mask=buffer > 0, other=0)
        stop = tl.minimum(tl.load(offsets + buffer), last)
        source = buffer % num_sources
        first_slot = _first_slot(
            buffer,
            offsets,
            rank,
            num_local,
            num_sources,
            pool_slots,
            num_shared,
            SHARED,
            L_BLOCK,
        )
        slots = tl.load(slots_at + source).to(tl.pointer_type(packed.dtype.element_ty))
        meta = tl.load(meta_at + source).to(tl.pointer_type(tl.float32))
        if sent is not None:
            tl.atomic_add(sent + source, stop - row, mask=tl.program_id(1) == 0)
        while row < stop:
            slot = first_slot + (row - begin)
            value = tl.load(packed + row.to(tl.int64) * width + column, mask=column < width)
            target = tl.multiple_of(slots, 16) + slot * width + column
            tl.store(target, value, mask=column < width)
            if probs is not None:
                tl.store(meta + slot, tl.load(probs + row), mask=tl.program_id(1) == 0)
            row += 1


@triton.jit
def _first_slot(
    buffer,
    offsets,
    rank,
    num_local,
    num_sources,
    pool_slots,
    num_shared,
    SHARED: tl.constexpr,
    L_BLOCK: tl.constexpr,
):
    """Return the slot, at its source, of the first row of a (local expert, source)."""
    source, local = buffer % num_sources, buffer // num_sources
    slot = ((rank * num_local + local) // num_shared).to(tl.int64) * pool_slots
    if SHARED:
        # Behind the rows of the pool's experts before it.
        x = tl.arange(0, L_BLOCK)
        place = x * num_sources + source
        here = tl.load(offsets + place, mask=x < local, other=0)
        here -= tl.load(offsets + place - 1, mask=(x < local) & (place > 0), other=0)
        slot += tl.sum(here, 0)
    return slot


def find_slots(
    probs_N: Tensor | None,
    offsets_LS: Tensor,
    slots_R: Tensor,
    meta_R: Tensor,
    rank: int,
    pool_slots: int,
    experts_per_pool: int,
    *,
    row_bytes: int,
    at_N: Tensor,
) -> None:
    """Find where `return_rows` sends packed rows, and send the numbers beside them.

    Args:
        probs_N: as in `return_rows`, and so are all others but these two.
        offsets_LS: see there.
        slots_R: see there.
        meta_R: see there.
        rank: see there.
        pool_slots: see there.
        experts_per_pool: see there.
        row_bytes: bytes of a row in a slot.
        at_N: int64, written: the address of the slot of each row.

    Example: rows of 4 bytes, and slots at the addresses 1000 on rank 0 and 2000 on rank 1. The rows
    of the first example there have the addresses 1008, 2008 and 2012.
    """
    num_local, num_ranks = offsets_LS.shape
    _find_slots_kernel[(num_local * num_ranks,)](
        probs_N,
        offsets_LS,
        slots_R,
        meta_R,
        at_N,
        rank,
        num_local,
        num_ranks,
        pool_slots,
        experts_per_pool,
        row_bytes,
        SHARED=experts_per_pool > 1,
        L_BLOCK=triton.next_power_of_2(num_local),
        BLOCK=512,
        num_warps=4,
    )


@triton.jit
def _find_slots_kernel(
    probs,
    offsets,
    slots_at,
    meta_at,
    at,
    rank,
    num_local,
    num_sources,
    pool_slots,
    num_shared,
    row_bytes,
    SHARED: tl.constexpr,
    L_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    buffer = tl.program_id(0)
    begin = tl.load(offsets + buffer - 1, mask=buffer > 0, other=0)
    end = tl.load(offsets + buffer)
    first_slot = _first_slot(
        buffer,
        offsets,
        rank,
        num_local,
        num_sources,
        pool_slots,
        num_shared,
        SHARED,
        L_BLOCK,
    )
    slots = tl.load(slots_at + buffer % num_sources)
    meta = tl.load(meta_at + buffer % num_sources).to(tl.pointer_type(tl.float32))
    for first in range(begin, end, BLOCK):
        row = first + tl.arange(0, BLOCK)
        slot = first_slot + (row - begin)
        tl.store(at + row, slots + slot * row_bytes, mask=row < end)
        if probs is not None:
            tl.store(meta + slot, tl.load(probs + row, mask=row < end), mask=row < end)


def block_of(width: int) -> int:
    """Return the columns of a row that a program stores at a time."""
    # 2880 columns: 2 x 2048, not the 3 x 1024 of `rows`, which were not shown to be better: a
    # GPT-OSS layer took 5.40 ms with them (2 H200, EP 2, factor 1.25) and 5.34 ms without, on other
    # machines.
    return min(2048, max(16, triton.next_power_of_2(width)))
