"""Rows into slots and back, each other's transpose.

`spread_rows` writes a token's row into each of its slots, and, if they are wanted, zeros into the
empty ones; `sum_rows` adds a token's slots. Every element has one writer, so no sum has an order to
promise.

Measured on an H200 in a graph (T 4096, E 128, K 8, D 2048, factor 1.25, bf16; a copy runs at 4.15
TB/s, real rows count): `spread_rows` 42 us, 87 % of the copy's speed; with the zeros that the
padded layout wants 50 us, 72 %, of which 82 % is the most that there can be; `sum_rows` 37 us,
97 %. With E 32, K 4, D 2880: 34 us, 82 %; 40 us, 70 %; 30 us, 95 %. A program per slot that read
its token from L2, K times over, took 58 us; loops over tokens in fewer programs, other numbers of
warps, and zeros before, behind or between the tokens changed nothing by more than 2 %.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def spread_rows(
    tokens_TD: Tensor, slot_of_TK: Tensor, choice_of_slot_N: Tensor, *, zeros: bool = True
) -> Tensor:
    """Every token's row in each of its slots, zeros in slots that no token has.

    Args:
        tokens_TD: contiguous [T, D].
        slot_of_TK: int32 [T, K]; -1 is no slot.
        choice_of_slot_N: int32, any shape, N elements in all; -1 is an empty slot. The inverse of
            `slot_of_TK`.
        zeros: False leaves slots that no token has as they are. Of `choice_of_slot_N` only the
            shape is read then, and rows may stand in for slots.

    Returns:
        [*choice_of_slot_N.shape, D].

    Example: `slot_of_TK = [[2, -1], [0, 3]]` and `choice_of_slot = [2, -1, 0, 3]` give
    `[tokens[1], 0, tokens[0], tokens[1]]`.
    """
    num_tokens, top_k = slot_of_TK.shape
    width, num_slots = tokens_TD.shape[1], choice_of_slot_N.numel()
    rows_ND = tokens_TD.new_empty(*choice_of_slot_N.shape, width)
    parts = triton.cdiv(width, _block(width))
    programs = num_tokens + (triton.cdiv(num_slots, _SLOTS) if zeros else 0)
    _spread_rows_kernel[(programs * parts,)](
        tokens_TD,
        slot_of_TK,
        choice_of_slot_N,
        rows_ND,
        num_tokens,
        num_slots,
        width,
        parts,
        K=top_k,
        SLOTS=_SLOTS,
        BLOCK=_block(width),
        num_warps=_warps(width),
    )
    return rows_ND


_SLOTS = 8  # that one program looks at for emptiness


@triton.jit
def _spread_rows_kernel(
    tokens,
    slot_of,
    choice_of_slot,
    rows,
    num_tokens,
    num_slots,
    width,
    parts,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The parts of a row side by side: as the slower axis of a grid they are written far apart in
    # time, which cost 3 % with D 2880.
    program = (tl.program_id(0) // parts).to(tl.int64)  # 32 bits end at 2**31 elements
    column = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    if program < num_tokens:
        row = tl.load(tokens + program * width + column, mask=column < width)
        for k in tl.static_range(K):
            slot = tl.load(slot_of + program * K + k).to(tl.int64)
            there = column < tl.where(slot >= 0, width, 0)
            tl.store(rows + slot * width + column, row, mask=there)
    else:
        nothing = tl.zeros((BLOCK,), dtype=rows.dtype.element_ty)
        for i in tl.static_range(SLOTS):
            slot = (program - num_tokens) * SLOTS + i
            choice = tl.load(choice_of_slot + slot, mask=slot < num_slots, other=0)
            there = column < tl.where(choice < 0, width, 0)
            tl.store(rows + slot * width + column, nothing, mask=there)


def sum_rows(rows_ND: Tensor, slot_of_TK: Tensor) -> Tensor:
    """The sum of its slots for every token, k ascending, rounded once.

    Args:
        rows_ND: contiguous [N, D].
        slot_of_TK: int32 [T, K]; -1 adds nothing, and its row is not read.

    Returns:
        [T, D] in the dtype of the rows, accumulated in fp32 (fp64 for fp64 rows).

    Example: `slot_of_TK = [[2, -1], [0, 1]]` gives `[rows[2], rows[0] + rows[1]]`.
    """
    num_tokens, top_k = slot_of_TK.shape
    width = rows_ND.shape[1]
    summed_TD = rows_ND.new_empty(num_tokens, width)
    _sum_rows_kernel[(num_tokens, triton.cdiv(width, _block(width)))](
        rows_ND,
        slot_of_TK,
        summed_TD,
        width,
        K=top_k,
        BLOCK=_block(width),
        WIDE=tl.float64 if rows_ND.dtype == torch.float64 else tl.float32,
        num_warps=_warps(width),
    )
    return summed_TD


@triton.jit
def _sum_rows_kernel(
    rows, slot_of, summed, width, K: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=WIDE)
    for k in tl.static_range(K):
        slot = tl.load(slot_of + t * K + k)
        there = column < tl.where(slot >= 0, width, 0)
        row = tl.load(rows + slot.to(tl.int64) * width + column, mask=there, other=0.0)
        total += row.to(WIDE)
    tl.store(summed + t * width + column, total.to(summed.dtype.element_ty), mask=column < width)


def _block(width: int) -> int:
    """Columns of a program: the size that leaves least of the last block idle, else the largest.

    Example: 2880 columns are 3 x 1024; in 2 x 2048 every third lane would have nothing to do.
    """
    if width <= 2048:
        return max(16, triton.next_power_of_2(width))
    return min((2048, 1024), key=lambda block: triton.cdiv(width, block) * block)


def _warps(width: int) -> int:
    return max(1, min(8, _block(width) // 256))
