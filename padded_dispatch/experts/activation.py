"""The activation between an expert's two linears, over real rows only.

    plain    prob * f(x + bias)
    gated    prob * f(min(gate, clamp)) * (min(max(up, -clamp), clamp) + offset)

If gated, the gate is the first half of `x + bias` and up the second. The definitions are those of
`TEGroupedMLP` in Megatron-Core 0.16.1 to 0.19.0. Its stages round to bf16 one by one; here the
whole expression, with the bias, is one pass that computes in fp32 and rounds once.

G: width of fc1's result, 2F if gated, else F.
"""

import math
from dataclasses import astuple, dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.library import custom_op

from padded_dispatch.config import require
from padded_dispatch.experts.grouped import experts_of_rows, sum_rows

Function = Literal["silu", "gelu", "quick_gelu", "squared_relu"]


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An activation of the family above.

    SwiGLU is the default; GEGLU has `function="gelu"`; GPT-OSS has `function="quick_gelu",
    clamp=7.0, offset=1.0`.

    Attributes:
        function: "silu" is `x * sigmoid(x)`; "gelu" is `x * Phi(x)`, exact, not the tanh form;
            "quick_gelu" is `x * sigmoid(1.702 * x)`; "squared_relu" is `max(x, 0) ** 2`.
        gated: whether fc1 returns a gate and up.
        clamp: above 0; infinity clamps nothing. Needs `gated`.
        offset: added to up. Needs `gated`.

    Raises:
        ValueError: names the field, its value and what to change.
    """

    function: Function = "silu"
    gated: bool = True
    clamp: float = math.inf
    offset: float = 0.0

    def __post_init__(self) -> None:
        functions = ", ".join(get_args(Function))
        is_known = self.function in get_args(Function)
        require(is_known, "function", self.function, f"be one of {functions}")
        require(self.clamp > 0, "clamp", self.clamp, "be above 0")
        require(
            self.gated or (self.clamp, self.offset) == (math.inf, 0.0),
            "gated",
            self.gated,
            f"be True with clamp={self.clamp} and offset={self.offset}",
            "leave both out",
        )


def activate(
    fc1_NG: Tensor,
    probs_N: Tensor,
    offsets_L: Tensor,
    activation: Activation,
    bias_LG: Tensor | None = None,
) -> Tensor:
    """Apply the activation to the first `offsets_L[-1]` rows: [N, G] to [N, F].

    Args:
        fc1_NG: floating point; rows behind the last real one are not read.
        probs_N: at least fp32.
        offsets_L: contiguous int32, ascending, the last at most N.
        activation: which activation.
        bias_LG: in the dtype of `fc1_NG`; None adds nothing.

    Returns:
        The dtype of `fc1_NG`; rows from `offsets_L[-1]` on are unspecified, as in the gradients.
    """
    return _activate(fc1_NG, bias_LG, probs_N, offsets_L, *astuple(activation))


def _curve(function: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return value and slope of the function at x."""
    if function == "squared_relu":
        positive = x.relu()
        return positive * positive, 2 * positive
    if function == "gelu":
        below = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        return x * below, below + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    scale = 1.702 if function == "quick_gelu" else 1.0
    sigmoid = (scale * x).sigmoid()
    return x * sigmoid, sigmoid * (1 + scale * x * (1 - sigmoid))


def _real_inputs(fc1_NG: Tensor, bias_LG: Tensor | None, offsets_L: Tensor) -> tuple[slice, Tensor]:
    """Return which rows are real, and fc1 with its bias for these rows, at least fp32."""
    real = slice(int(offsets_L[-1]))
    x_NG = fc1_NG[real].to(torch.promote_types(fc1_NG.dtype, torch.float32))
    return real, x_NG if bias_LG is None else x_NG + bias_LG[experts_of_rows(offsets_L)]


@custom_op("padded_dispatch::activate", mutates_args=())
def _activate(
    fc1_NG: Tensor,
    bias_LG: Tensor | None,
    probs_N: Tensor,
    offsets_L: Tensor,
    function: str,
    gated: bool,
    clamp: float,
    offset: float,
) -> Tensor:
    real, x_NG = _real_inputs(fc1_NG, bias_LG, offsets_L)
    if gated:
        gate, up = x_NG.chunk(2, dim=1)
        value = _curve(function, gate.clamp(max=clamp))[0] * (up.clamp(-clamp, clamp) + offset)
    else:
        value = _curve(function, x_NG)[0]
    out_NF = fc1_NG.new_empty(fc1_NG.shape[0], value.shape[1])
    out_NF[real] = (value * probs_N[real, None]).to(fc1_NG.dtype)
    return out_NF


@_activate.register_kernel("cuda")
def _(fc1_NG, bias_LG, probs_N, offsets_L, function, gated, clamp, offset):
    from padded_dispatch.kernels import activation

    bias_LG = None if bias_LG is None else bias_LG.contiguous()
    inputs = fc1_NG.contiguous(), bias_LG, probs_N.contiguous(), offsets_L
    return activation.activate(*inputs, function, gated, clamp, offset)


@_activate.register_fake
def _(fc1_NG, bias_LG, probs_N, offsets_L, function, gated, clamp, offset):
    num_rows, width = fc1_NG.shape
    return fc1_NG.new_empty(num_rows, width // 2 if gated else width)


@custom_op("padded_dispatch::activate_backward", mutates_args=())
def _activate_backward(
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
    """Return the gradients of fc1 (equal to its bias's, before summing) and of `probs_N`."""
    real, x_NG = _real_inputs(fc1_NG, bias_LG, offsets_L)
    grad, prob = grad_NF[real].to(x_NG.dtype), probs_N[real, None]
    if gated:
        gate, up = x_NG.chunk(2, dim=1)
        value, slope = _curve(function, gate.clamp(max=clamp))
        linear = up.clamp(-clamp, clamp) + offset
        grad_gate = torch.where(gate > clamp, 0, grad * prob * linear * slope)
        grad_up = torch.where(up.abs() > clamp, 0, grad * prob * value)
        grad_x, value = torch.cat([grad_gate, grad_up], dim=1), value * linear
    else:
        value, slope = _curve(function, x_NG)
        grad_x = grad * prob * slope
    grad_fc1_NG, grad_probs_N = torch.empty_like(fc1_NG), torch.empty_like(probs_N)
    grad_fc1_NG[real] = grad_x.to(fc1_NG.dtype)
    grad_probs_N[real] = (grad * value).sum(1).to(probs_N.dtype)
    return grad_fc1_NG, grad_probs_N


@_activate_backward.register_kernel("cuda")
def _(grad_NF, fc1_NG, bias_LG, probs_N, offsets_L, function, gated, clamp, offset):
    from padded_dispatch.kernels import activation

    bias_LG = None if bias_LG is None else bias_LG.contiguous()
    inputs = grad_NF.contiguous(), fc1_NG.contiguous(), bias_LG, probs_N.contiguous(), offsets_L
    return activation.activate_backward(*inputs, function, gated, clamp, offset)


@_activate_backward.register_fake
def _(grad_NF, fc1_NG, bias_LG, probs_N, offsets_L, function, gated, clamp, offset):
    return fc1_NG.new_empty(fc1_NG.shape), probs_N.new_empty(probs_N.shape)


def _save_inputs(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.activation = inputs[4:]


def _backward(ctx, grad_NF):
    fc1_NG, bias_LG, probs_N, offsets_L = ctx.saved_tensors
    grad_NG, grad_N = _activate_backward(
        grad_NF, fc1_NG, bias_LG, probs_N, offsets_L, *ctx.activation
    )
    grad_LG = sum_rows(grad_NG, None, offsets_L) if ctx.needs_input_grad[1] else None
    return grad_NG, grad_LG, grad_N, None, None, None, None, None


_activate.register_autograd(_backward, setup_context=_save_inputs)
