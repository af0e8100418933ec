"""The activation between an expert's two linears.

    plain    prob * f(x + bias)
    gated    prob * f(min(gate, clamp)) * (min(max(up, -clamp), clamp) + offset)

If gated, the gate is the first half of `x + bias` and up the second. The definitions are those of
`TEGroupedMLP` in Megatron-Core 0.16.1 to 0.19.0. TEGroupedMLP rounds each stage to bf16; here the
whole expression, with the bias, is computed in at least fp32 and rounded once. This is plain torch
with autograd's backward; on GPUs `kernels.activation` takes its place.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from padded_dispatch.config import require

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
    fc1_NG: Tensor, prob_N: Tensor, activation: Activation, bias: Tensor | None = None
) -> Tensor:
    """Apply the activation to rows, and multiply by their probabilities: [N, G] to [N, F].

    Args:
        fc1_NG: floating point.
        prob_N: at least fp32.
        activation: which activation.
        bias: added to the rows: [G], the same for all, or [N, G], one for each; None adds nothing.

    Returns:
        The dtype of `fc1_NG`, computed in at least fp32 and rounded once.
    """
    x_NG = fc1_NG.to(torch.promote_types(fc1_NG.dtype, torch.float32))
    if bias is not None:
        x_NG = x_NG + bias
    if activation.gated:
        gate, up = x_NG.chunk(2, dim=1)
        up = up.clamp(-activation.clamp, activation.clamp) + activation.offset
        value = _curve(activation.function, gate.clamp(max=activation.clamp)) * up
    else:
        value = _curve(activation.function, x_NG)
    return (value * prob_N[:, None]).to(fc1_NG.dtype)


def _curve(function: Function, x: Tensor) -> Tensor:
    if function == "squared_relu":
        return x.relu().square()
    if function == "gelu":
        return F.gelu(x)
    return x * ((1.702 if function == "quick_gelu" else 1.0) * x).sigmoid()
