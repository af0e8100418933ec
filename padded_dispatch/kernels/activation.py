"""The activation of an expert times the probability, over real rows only, forward and backward.

Each direction is one launch of one kernel: each element is read once, computed in fp32 and rounded
once. Backward returns the hidden rows again, for the gradient of fc2's weight, so forward need not
keep them. Grids follow the multiprocessors of a GPU, not the rows that there is room for.
"""

import triton
import triton.language as tl
from torch import Tensor

from padded_dispatch.kernels import Scaled, Segments
from padded_dispatch.kernels.grouped import expert_of, launch
from padded_dispatch.kernels.rows import whole_row
from padded_dispatch.kernels.scaled import magnitude, scale_of


def activate(
    fc1_MG: Tensor,
    bias_LG: Tensor | None,
    prob_M: Tensor,
    segments: Segments,
    grad_NF: Tensor | None = None,
    grad_prob_N: Tensor | None = None,
    *,
    function: str,
    gated: bool,
    clamp: float,
    offset: float,
    scaled: Scaled | None = None,
) -> Tensor:
    """Compute `function(gate) * up * prob` or `function(x) * prob` of the real rows.

    With `grad_NF`, the gradient of that result, also overwrite `fc1_MG` with its gradient, whose
    rows sum to the bias's, and write that of `prob_M` to `grad_prob_N`.

    `fc1_MG` and `prob_M` are stored, gradients loose; all are contiguous. A bias of None adds
    nothing. `function` to `offset` are those of `experts.Activation`.

    `scaled`, loose, gets what the next product reads: with a gradient that of fc1's result, [N, G];
    without one the result, [N, F], which is then written nowhere else.

    Returns:
        Loose [N, F] in the dtype of `fc1_MG`; rows outside of the offsets are not written. N is 0
        if `scaled` alone has the result.

    Example: `fc1 = [nan, [0, 5], [8, 3]]`, `prob = [nan, 1, .5]` and `offsets = [1, 3]` give the
    loose rows `[[0], [11.996]]` for a gated "silu", since silu(8) = 7.9973. Backward, `grad =
    [[1]]`, `fc1 = [nan, [0, 5]]`, `prob = [nan, .5]` and `offsets = [1, 2]` give `[[0]]`, the
    gradient `[0]` of `prob`, and `fc1 = [nan, [1.25, 0]]`: silu(0) = 0 and its slope there is 0.5.
    """
    width = fc1_MG.shape[1] // (2 if gated else 1)
    writes = scaled is None or grad_NF is not None
    hidden_NF = fc1_MG.new_empty(segments.num_rows if writes else 0, width)
    grid, constants = launch(fc1_MG.device, width, segments.num_experts)
    if scaled is not None:  # A program quantizes whole rows.
        block, warps = whole_row(width)
        warps = max(4, warps) if grad_NF is None else min(16, max(4, 2 * warps))
        constants = constants | {"ROWS": max(1, min(128, 2048 // block)), "BLOCK": block}
        constants |= {"BLOCKS": 1, "num_warps": warps}
    _activate_kernel[grid](
        grad_NF,
        fc1_MG,
        bias_LG,
        prob_M,
        segments.offsets,
        segments.num_sources,
        hidden_NF if writes else None,
        *((None, None) if scaled is None else (scaled.values, scaled.scales)),
        grad_prob_N,
        segments.num_experts,
        width,
        FUNCTION=function,
        GATED=gated,
        CLAMP=clamp,
        OFFSET=offset,
        **constants,
    )
    return hidden_NF


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
    # Unlike tl.minimum, this keeps NaN.
    return tl.where(x > CLAMP, CLAMP, x)


@triton.jit
def _load(fc1, bias, place, bias_place, valid):
    x = tl.load(fc1 + place, mask=valid, other=0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + bias_place, mask=valid, other=0).to(tl.float32)
    return x


@triton.jit
def _activate_kernel(
    grad,
    fc1,
    bias,
    probs,
    offsets,
    num_sources,
    hidden,
    quantized,
    scales,
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
):
    """Write `hidden`, and if there is a gradient of it, gradients over `fc1` and to `grad_probs`.

    A program reads a gate and its up before it overwrites both. It quantizes rounded rows, so that
    scales and values do not depend on whether the rows are stored, too.
    """
    dtype: tl.constexpr = fc1.dtype.element_ty
    halves: tl.constexpr = 2 if GATED else 1
    base, end = tl.load(offsets), tl.load(offsets + num_experts * num_sources)
    for first in tl.range(base + tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        n = row[:, None]
        prob = tl.load(probs + n, mask=n < end, other=0).to(tl.float32)
        grad_prob = tl.zeros((ROWS,), dtype=tl.float32)
        bias_row = n * 0
        if bias is not None:
            expert = expert_of(row, offsets, num_sources, num_experts, EXPERTS)
            bias_row = expert[:, None] * halves * width
        for block in range(BLOCKS):
            column = (block * BLOCK + tl.arange(0, BLOCK))[None, :]
            valid = (n < end) & (column < width)
            place = n * halves * width + column
            loose_place = (n - base) * width + column
            x = _load(fc1, bias, place, bias_row + column, valid)
            value, slope = _curve(_clamp(x, CLAMP) if GATED else x, FUNCTION)
            if GATED:
                up = _load(fc1, bias, place + width, bias_row + column + width, valid)
                linear = -_clamp(-_clamp(up, CLAMP), CLAMP) + OFFSET
            if grad is not None:
                grad_out = tl.load(grad + loose_place, mask=valid, other=0).to(tl.float32)
                if GATED:
                    grad_x = tl.where(x > CLAMP, 0.0, grad_out * prob * linear * slope)
                    grad_up = tl.where(tl.abs(up) > CLAMP, 0.0, grad_out * prob * value).to(dtype)
                    tl.store(fc1 + place + width, grad_up, mask=valid)
                    grad_prob += tl.sum(grad_out * (value * linear), 1)
                else:
                    grad_x = grad_out * prob * slope
                    grad_prob += tl.sum(grad_out * value, 1)
                grad_x = grad_x.to(dtype)
                tl.store(fc1 + place, grad_x, mask=valid)
            if GATED:
                value *= linear
            out = (value * prob).to(dtype)
            if hidden is not None:
                tl.store(hidden + loose_place, out, mask=valid)
            if quantized is not None:
                first_half = out if grad is None else grad_x
                most = tl.max(magnitude(first_half), 1)
                both: tl.constexpr = GATED and grad is not None
                if both:
                    most = tl.maximum(most, tl.max(magnitude(grad_up), 1))
                scale, inverse = scale_of(most)
                tl.store(scales + row - base, scale, mask=row < end)
                to = quantized + (n - base) * (2 * width if both else width) + column
                eight: tl.constexpr = quantized.dtype.element_ty
                tl.store(to, (first_half.to(tl.float32) * inverse[:, None]).to(eight), mask=valid)
                if both:
                    second = (grad_up.to(tl.float32) * inverse[:, None]).to(eight)
                    tl.store(to + width, second, mask=valid)
        if grad is not None:
            grad_prob = grad_prob.to(grad_probs.dtype.element_ty)
            tl.store(grad_probs + row - base, grad_prob, mask=row < end)
