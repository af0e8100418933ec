"""SwiGLU times the probability, over real rows only, forward and backward.

One pass each: what would be a chunk, silu, two products and a cast in torch reads and writes every
element once here, computes in fp32 and rounds once. How many rows are real is read from the device;
programs beyond them end at once, and their rows are neither read nor written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def swiglu(fc1_NG: Tensor, probs_N: Tensor, ends_L: Tensor) -> Tensor:
    """`silu(gate) * up * prob` of the first `ends_L[-1]` rows.

    Args:
        fc1_NG: contiguous, G = 2F, gate before up.
        probs_N: contiguous, at least fp32.
        ends_L: contiguous int32.

    Returns:
        [N, F] in the dtype of `fc1_NG`; rows from `ends_L[-1]` on are not written.

    Example: F = 1, `fc1 = [[0, 5], [8, 3]]`, `probs = [1, .5]` and `ends = [2]` give
    `[[0], [11.996]]`, since silu(8) = 7.9973.
    """
    num_rows, width = fc1_NG.shape[0], fc1_NG.shape[1] // 2
    out_NF = fc1_NG.new_empty(num_rows, width)
    rows, block = _tile(width)
    _swiglu_activation_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(width, block))](
        fc1_NG,
        probs_N,
        ends_L[-1:],
        out_NF,
        width,
        ROWS=rows,
        BLOCK=block,
        WIDE=_wide(fc1_NG),
    )
    return out_NF


@triton.jit
def _swiglu_activation_kernel(
    fc1,
    probs,
    end,
    out,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    num_rows = tl.load(end)
    if tl.program_id(0) * ROWS < num_rows:
        n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
        there = (n < num_rows) & (column < width)
        gate = tl.load(fc1 + n * 2 * width + column, mask=there, other=0).to(WIDE)
        up = tl.load(fc1 + n * 2 * width + width + column, mask=there, other=0).to(WIDE)
        prob = tl.load(probs + n, mask=n < num_rows, other=0).to(WIDE)
        value = gate / (1 + tl.exp(-gate)) * up * prob
        tl.store(out + n * width + column, value.to(out.dtype.element_ty), mask=there)


def swiglu_backward(
    grad_NF: Tensor, fc1_NG: Tensor, probs_N: Tensor, ends_L: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `swiglu`'s first two arguments, from that of its result.

    Args:
        grad_NF: contiguous.
        fc1_NG, probs_N, ends_L: what `swiglu` was given.

    Returns:
        [N, G] and [N]; rows from `ends_L[-1]` on are not written.

    Example: F = 1, `grad = [[1]]`, `fc1 = [[0, 5]]`, `probs = [.5]` and `ends = [1]` give
    `[[1.25, 0]]` and `[0]`: silu(0) = 0 and silu'(0) = 0.5.
    """
    num_rows, width = grad_NF.shape
    grad_fc1_NG = torch.empty_like(fc1_NG)
    grad_probs_N = torch.empty_like(probs_N)
    rows, block = _tile(width)
    _swiglu_backward_activation_kernel[(triton.cdiv(num_rows, rows),)](
        grad_NF,
        fc1_NG,
        probs_N,
        ends_L[-1:],
        grad_fc1_NG,
        grad_probs_N,
        width,
        ROWS=rows,
        BLOCK=block,
        BLOCKS=triton.cdiv(width, block),
        WIDE=_wide(fc1_NG),
    )
    return grad_fc1_NG, grad_probs_N


@triton.jit
def _swiglu_backward_activation_kernel(
    grad,
    fc1,
    probs,
    end,
    grad_fc1,
    grad_probs,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDE: tl.constexpr,
):
    num_rows = tl.load(end)
    if tl.program_id(0) * ROWS < num_rows:
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        n = row[:, None]
        prob = tl.load(probs + n, mask=n < num_rows, other=0).to(WIDE)
        of_probs = tl.zeros((ROWS,), dtype=WIDE)
        for number in range(BLOCKS):
            column = (number * BLOCK + tl.arange(0, BLOCK))[None, :]
            there = (n < num_rows) & (column < width)
            first = n * 2 * width + column
            gate = tl.load(fc1 + first, mask=there, other=0).to(WIDE)
            up = tl.load(fc1 + first + width, mask=there, other=0).to(WIDE)
            of_out = tl.load(grad + n * width + column, mask=there, other=0).to(WIDE)
            sigmoid = 1 / (1 + tl.exp(-gate))
            silu = gate * sigmoid
            of_probs += tl.sum(of_out * silu * up, 1)
            of_gate = of_out * prob * up * sigmoid * (1 + gate * (1 - sigmoid))
            of_up = of_out * prob * silu
            tl.store(grad_fc1 + first, of_gate.to(grad_fc1.dtype.element_ty), mask=there)
            tl.store(grad_fc1 + first + width, of_up.to(grad_fc1.dtype.element_ty), mask=there)
        tl.store(grad_probs + row, of_probs.to(grad_probs.dtype.element_ty), mask=row < num_rows)


def _tile(width: int) -> tuple[int, int]:
    """Rows and columns of a program of four warps."""
    block = min(1024, triton.next_power_of_2(width))
    return max(1, min(128, 2048 // block)), block


def _wide(rows: Tensor) -> tl.dtype:
    return tl.float64 if rows.dtype == torch.float64 else tl.float32
