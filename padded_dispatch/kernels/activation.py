"""The activation of an expert times the probability, over real rows only, forward and backward.

Each direction is one pass. In torch, a bias, a chunk, clamps, a function, products and a cast would
each read and write every element; here each element is read and written once, computed in fp32 and
rounded once. The number of real rows is read from the device; programs beyond them end at once, and
their rows are neither read nor written. The function, gating and bias are known when a kernel is
compiled.

`padded_dispatch.experts.activation` explains the arguments. G: width of fc1's result, 2F if gated, else
F.
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
    """Compute `function(gate) * up * prob` or `function(x) * prob` of the real rows.

    All tensors must be contiguous.

    Returns:
        [N, F] in the dtype of `fc1_NG`; rows from `offsets_L[-1]` on are not written.

    Example: `fc1 = [[0, 5], [8, 3]]`, `probs = [1, .5]` and `offsets = [2]` give `[[0], [11.996]]`
    for a gated "silu", since silu(8) = 7.9973.
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
    """Return value and slope of the function at x."""
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
def _load(fc1, bias, place, bias_place, valid, WIDE: tl.constexpr):
    x = tl.load(fc1 + place, mask=valid, other=0).to(WIDE)
    if bias is not None:
        x += tl.load(bias + bias_place, mask=valid, other=0).to(WIDE)
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
        valid = (n < num_rows) & (column < width)
        place = n * halves * width + column
        bias_place = place
        if bias is not None:
            expert = expert_of(row, offsets, num_experts, EXPERTS)[:, None]
            bias_place = expert * halves * width + column
        prob = tl.load(probs + n, mask=n < num_rows, other=0).to(WIDE)
        x = _load(fc1, bias, place, bias_place, valid, WIDE)
        if GATED:
            up = _load(fc1, bias, place + width, bias_place + width, valid, WIDE)
            value, _ = _curve(_clamp(x, CLAMP), FUNCTION)
            value *= -_clamp(-_clamp(up, CLAMP), CLAMP) + OFFSET
        else:
            value, _ = _curve(x, FUNCTION)
        tl.store(out + n * width + column, (value * prob).to(out.dtype.element_ty), mask=valid)


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
    """Return the gradients of `fc1_NG` (equal to its bias's, before summing) and of `probs_N`.

    `grad_NF` is the gradient of the result of `activate`; the other arguments are those of
    `activate`. All tensors must be contiguous.

    Returns:
        [N, G] and [N]; rows from `offsets_L[-1]` on are not written.

    Example: `grad = [[1]]`, `fc1 = [[0, 5]]`, `probs = [.5]` and `offsets = [1]` give
    `[[1.25, 0]]` and `[0]` for a gated "silu": silu(0) = 0 and its slope there is 0.5.
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
        grad_prob = tl.zeros((ROWS,), dtype=WIDE)
        bias_row = n * 0
        if bias is not None:
            bias_row = expert_of(row, offsets, num_experts, EXPERTS)[:, None] * halves * width
        for block in range(BLOCKS):
            column = (block * BLOCK + tl.arange(0, BLOCK))[None, :]
            valid = (n < num_rows) & (column < width)
            place = n * halves * width + column
            grad_out = tl.load(grad + n * width + column, mask=valid, other=0).to(WIDE)
            x = _load(fc1, bias, place, bias_row + column, valid, WIDE)
            if GATED:
                up = _load(fc1, bias, place + width, bias_row + column + width, valid, WIDE)
                linear = -_clamp(-_clamp(up, CLAMP), CLAMP) + OFFSET
                value, slope = _curve(_clamp(x, CLAMP), FUNCTION)
                grad_x = tl.where(x > CLAMP, 0.0, grad_out * prob * linear * slope)
                grad_up = tl.where(tl.abs(up) > CLAMP, 0.0, grad_out * prob * value)
                grad_prob += tl.sum(grad_out * value * linear, 1)
                up_place = grad_fc1 + place + width
                tl.store(up_place, grad_up.to(grad_fc1.dtype.element_ty), mask=valid)
            else:
                value, slope = _curve(x, FUNCTION)
                grad_x = grad_out * prob * slope
                grad_prob += tl.sum(grad_out * value, 1)
            tl.store(grad_fc1 + place, grad_x.to(grad_fc1.dtype.element_ty), mask=valid)
        tl.store(grad_probs + row, grad_prob.to(grad_probs.dtype.element_ty), mask=row < num_rows)
