"""Rows in e4m3 with a scale each: parts of other kernels, and weights in both orientations.

`kernels.Scaled` says what a scale is; `padded_dispatch.experts.scaled` has the rule in plain torch.
Rows are quantized where they are made: by `rows.spread_rows` and `activation.activate`.
"""

import triton
import triton.language as tl
from torch import Tensor

from padded_dispatch.kernels import Scaled
from padded_dispatch.kernels.gemm import multiprocessors

# A program reads a strip of 32 rows twice, the second time from the L2 cache: that of an H200 holds
# the strips of two programs on each multiprocessor if rows have up to about 3,000 bf16 elements.
_ROWS, _BLOCK, _PROGRAMS = 32, 256, 2


@triton.jit
def magnitude(x):
    """Return bits whose order is that of absolute values; those of inf and NaN come last."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(most):
    """Return the scale of a row, and its inverse, from the bits of its largest magnitude.

    The largest e4m3 is 448 = 1.75 * 2**8. So take the exponent less 8; add 1 above a mantissa 1.75.
    """
    exponent = tl.maximum(((most + 0x1FFFFF) >> 23) - 8, 1)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(most < 0x7F800000, scale, float("nan")), inverse


def quantize_weight(weight_LOI: Tensor, stale: Tensor, form: Scaled, back: Scaled) -> None:
    """Quantize a weight in both orientations if it is stale.

    Args:
        weight_LOI: contiguous.
        stale: int32 [1]; nothing is written if it is 0, which the host does not read.
        form: [L, O, I], rows of `weight`; overwritten.
        back: [L, I, O], rows of its transpose, with scales of their own; overwritten.

    Example: `[[[448, 0], [1, 3]]]` gives `form` values `[[448, 0], [128, 384]]` with the scales
    `[1, 2**-7]`, and `back` values `[[448, 1], [0, 384]]` with `[1, 2**-7]`.
    """
    num_experts, width_out, width_in = weight_LOI.shape
    _quantize_weight_kernel[(_PROGRAMS * multiprocessors(weight_LOI.device),)](
        weight_LOI,
        stale,
        form.values,
        form.scales,
        back.values,
        back.scales,
        num_experts,
        width_out,
        width_in,
        ROWS=_ROWS,
        BLOCK=_BLOCK,
        num_warps=8,
    )


@triton.jit
def _quantize_weight_kernel(
    weight,
    stale,
    values,
    scales,
    back_values,
    back_scales,
    num_experts,
    width_out,
    width_in,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    strips = num_experts * tl.cdiv(width_out, ROWS)
    back_strips = num_experts * tl.cdiv(width_in, ROWS)
    end = tl.where(tl.load(stale) != 0, strips + back_strips, 0)
    for strip in range(tl.program_id(0), end, tl.num_programs(0)):
        if strip < strips:
            _strip(weight, values, scales, strip, width_out, width_in, width_in, 1, ROWS, BLOCK)
        else:
            n = strip - strips
            _strip(
                weight, back_values, back_scales, n, width_in, width_out, 1, width_in, ROWS, BLOCK
            )


@triton.jit
def _strip(
    weight,
    values,
    scales,
    strip,
    num_rows,
    width,
    stride,
    step,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantize rows of one expert; `stride` lies between rows, `step` within one."""
    strips = tl.cdiv(num_rows, ROWS)
    expert = (strip // strips).to(tl.int64)
    row = strip % strips * ROWS + tl.arange(0, ROWS)
    at = weight + expert * num_rows * width + row[:, None] * stride
    most = tl.zeros((ROWS, BLOCK), dtype=tl.int32)
    for first in range(0, width, BLOCK):
        column = (first + tl.arange(0, BLOCK))[None, :]
        valid = (row < num_rows)[:, None] & (column < width)
        most = tl.maximum(most, magnitude(tl.load(at + column * step, mask=valid, other=0)))
    scale, inverse = scale_of(tl.max(most, 1))
    tl.store(scales + expert * num_rows + row, scale, mask=row < num_rows)
    to = values + expert * num_rows * width + row[:, None] * width
    for first in range(0, width, BLOCK):
        column = (first + tl.arange(0, BLOCK))[None, :]
        valid = (row < num_rows)[:, None] & (column < width)
        value = tl.load(at + column * step, mask=valid, other=0).to(tl.float32)
        value = (value * inverse[:, None]).to(values.dtype.element_ty)
        tl.store(to + column, value, mask=valid)
