"""The activation of an expert times the probability, over real rows only, forward and backward.

One pass each: what would be a bias, a chunk, clamps, a function, products and a cast in torch reads
and writes every element once here, computes in fp32 and rounds once. How many rows are real is read
from the device; programs beyond them end at once, and their rows are neither read nor written.
Which function, gated or not, biased or not is known when a kernel is compiled.

`padded_dispatch.ops.activation` says what the arguments mean.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from padded_dispatch.kernels.grouped import expert_of, tile, wide


def activate(
    fc1_NG: Tensor,
    bias_LG: Tensor | None,
    probs_N: Tensor,
    offsets_L: Tensor,
    function: str,
    gated: bool,
    clamp: float,
    offset: float,
) -> Tensor:
    """`function(gate) * up * prob` or `function(x) * prob` of the first `offsets_L[-1]` rows.

    Args:
        fc1_NG, probs_N, offsets_L, bias_LG: contiguous.

    Returns:
        [N, F] in the dtype of `fc1_NG`; rows from `offsets_L[-1]` on are not written.

    Example: `fc1 = [[0, 5], [8, 3]]`, `probs = [1, .5]` and `ends = [2]` give `[[0], [11.996]]` for
    a gated "silu", since silu(8) = 7.9973.
    """
    num_rows, width = fc1_NG.shape[0], fc1_NG.shape[1] // (2 if gated else 1)
    out_NF = fc1_NG.new_empty(num_rows, width)
    rows, block = tile(width)
    _activate_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(width, block))](
        fc1_NG,
        bias_LG,
        probs_N,
        offsets_L,
        out_NF,
        offsets_L.shape[0],
        width,
        FUNCTION=function,
        GATED=gated,
        CLAMP=clamp,
        OFFSET=offset,
        EXPERTS=triton.next_power_of_2(offsets_L.shape[0]),
        ROWS=rows,
        BLOCK=block,
        WIDE=wide(fc1_NG),
    )
    return out_NF


@triton.jit
def _curve(x, FUNCTION: tl.constexpr):
    """Value and slope of the function at x."""
    if FUNCTION == "squared_relu":
        positive = tl.where(x < 0, 0.0, x)
        value = positive * positive
        slope = 2 * positive
    elif FUNCTION == "gelu":
        below = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        value = x * below
        slope = below + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        scale: tl.constexpr = 1.702 if FUNCTION == "quick_gelu" else 1.0
        sigmoid = 1 / (1 + tl.exp(-scale * x))
        value = x * sigmoid
        slope = sigmoid * (1 + scale * x * (1 - sigmoid))
    return value, slope


@triton.jit
def _clamp(x, CLAMP: tl.constexpr):
    return tl.where(x > CLAMP, CLAMP, x)


@triton.jit
def _load(fc1, bias, place, bias_place, there, WIDE: tl.constexpr):
    x = tl.load(fc1 + place, mask=there, other=0).to(WIDE)
    if bias is not None:
        x += tl.load(bias + bias_place, mask=there, other=0).to(WIDE)
    return x


@triton.jit
def _activate_kernel(
    fc1,
    bias,
    probs,
    offsets,
    out,
    num_experts,
    width,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    CLAMP: tl.constexpr,
    OFFSET: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    halves: tl.constexpr = 2 if GATED else 1
    num_rows = tl.load(offsets + num_experts - 1)
    if tl.program_id(0) * ROWS < num_rows:
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        n = row[:, None]
        column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
        there = (n < num_rows) & (column < width)
        place = n * halves * width + column
        bias_place = place
        if bias is not None:
            expert = expert_of(row, offsets, num_experts, EXPERTS)[:, None]
            bias_place = expert * halves * width + column
        prob = tl.load(probs + n, mask=n < num_rows, other=0).to(WIDE)
        x = _load(fc1, bias, place, bias_place, there, WIDE)
        if GATED:
            up = _load(fc1, bias, place + width, bias_place + width, there, WIDE)
            value, _ = _curve(_clamp(x, CLAMP), FUNCTION)
            value *= -_clamp(-_clamp(up, CLAMP), CLAMP) + OFFSET
        else:
            value, _ = _curve(x, FUNCTION)
        tl.store(out + n * width + column, (value * prob).to(out.dtype.element_ty), mask=there)


def activate_backward(
    grad_NF: Tensor,
    fc1_NG: Tensor,
    bias_LG: Tensor | None,
    probs_N: Tensor,
    offsets_L: Tensor,
    function: str,
    gated: bool,
    clamp: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of `fc1_NG`, with its bias or without, and of `probs_N`.

    Args:
        grad_NF: of the result of `activate`; contiguous.
        fc1_NG, bias_LG, probs_N, offsets_L, function, gated, clamp, offset: what it was given.

    Returns:
        [N, G] and [N]; rows from `offsets_L[-1]` on are not written.

    Example: `grad = [[1]]`, `fc1 = [[0, 5]]`, `probs = [.5]` and `ends = [1]` give `[[1.25, 0]]`
    and `[0]` for a gated "silu": silu(0) = 0 and its slope there is 0.5.
    """
    num_rows, width = grad_NF.shape
    grad_fc1_NG = torch.empty_like(fc1_NG)
    grad_probs_N = torch.empty_like(probs_N)
    rows, block = tile(width)
    _activate_backward_kernel[(triton.cdiv(num_rows, rows),)](
        grad_NF,
        fc1_NG,
        bias_LG,
        probs_N,
        offsets_L,
        grad_fc1_NG,
        grad_probs_N,
        offsets_L.shape[0],
        width,
        FUNCTION=function,
        GATED=gated,
        CLAMP=clamp,
        OFFSET=offset,
        EXPERTS=triton.next_power_of_2(offsets_L.shape[0]),
        ROWS=rows,
        BLOCK=block,
        BLOCKS=triton.cdiv(width, block),
        WIDE=wide(fc1_NG),
    )
    return grad_fc1_NG, grad_probs_N


@triton.jit
def _activate_backward_kernel(
    grad,
    fc1,
    bias,
    probs,
    offsets,
    grad_fc1,
    grad_probs,
    num_experts,
    width,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    CLAMP: tl.constexpr,
    OFFSET: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDE: tl.constexpr,
):
    halves: tl.constexpr = 2 if GATED else 1
    num_rows = tl.load(offsets + num_experts - 1)
    if tl.program_id(0) * ROWS < num_rows:
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        n = row[:, None]
        prob = tl.load(probs + n, mask=n < num_rows, other=0).to(WIDE)
        of_probs = tl.zeros((ROWS,), dtype=WIDE)
        bias_row = n * 0
        if bias is not None:
            bias_row = expert_of(row, offsets, num_experts, EXPERTS)[:, None] * halves * width
        for number in range(BLOCKS):
            column = (number * BLOCK + tl.arange(0, BLOCK))[None, :]
            there = (n < num_rows) & (column < width)
            place = n * halves * width + column
            of_out = tl.load(grad + n * width + column, mask=there, other=0).to(WIDE)
            x = _load(fc1, bias, place, bias_row + column, there, WIDE)
            if GATED:
                up = _load(fc1, bias, place + width, bias_row + column + width, there, WIDE)
                linear = -_clamp(-_clamp(up, CLAMP), CLAMP) + OFFSET
                value, slope = _curve(_clamp(x, CLAMP), FUNCTION)
                of_x = tl.where(x > CLAMP, 0.0, of_out * prob * linear * slope)
                of_up = tl.where(tl.abs(up) > CLAMP, 0.0, of_out * prob * value)
                of_probs += tl.sum(of_out * value * linear, 1)
                up_place = grad_fc1 + place + width
                tl.store(up_place, of_up.to(grad_fc1.dtype.element_ty), mask=there)
            else:
                value, slope = _curve(x, FUNCTION)
                of_x = of_out * prob * slope
                of_probs += tl.sum(of_out * value, 1)
            tl.store(grad_fc1 + place, of_x.to(grad_fc1.dtype.element_ty), mask=there)
        tl.store(grad_probs + row, of_probs.to(grad_probs.dtype.element_ty), mask=row < num_rows)
