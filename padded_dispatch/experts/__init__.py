"""Experts: where their rows lie, and the pass of a layer from tokens to tokens.

    send tokens -> lay out rows -> fc1 -> activation * prob -> fc2, rows sent home -> sum

`packed` is that pass on a GPU, `plain` on a CPU. Both compute real rows only; each linear has one
stacked weight, and products run in e4m3 if the weights are given in e4m3, too (`scaled`). `padded`
is for experts from outside of this package: it gives them padded cells and takes back their output.
`store` decides where rows lie and which of them have room.

Letters: see `padded_dispatch.config`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from padded_dispatch.config import is_positive, require
from padded_dispatch.counters import Counters
from padded_dispatch.exchange import Wire
from padded_dispatch.experts.scaled import ScaledWeights
from padded_dispatch.experts.store import TakeRoom
from padded_dispatch.kernels import Scaled

Function = Literal["silu", "gelu", "quick_gelu", "squared_relu"]


@dataclass(frozen=True, kw_only=True)
class Activation:
    """The activation between an expert's two linears.

        plain    prob * f(x + bias)
        gated    prob * f(min(gate, clamp)) * (min(max(up, -clamp), clamp) + offset)

    If gated, the gate is the first half of `x + bias` and up the second. The definitions are those
    of `TEGroupedMLP` in Megatron-Core 0.16.1 to 0.19.0. TEGroupedMLP rounds each stage to bf16;
    here the whole expression, with the bias, is computed in at least fp32 and rounded once.

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
        known = get_args(Function)
        require(self.function in known, "function", self.function, f"be one of {', '.join(known)}")
        require(is_positive(self.clamp), "clamp", self.clamp, "be a number above 0")
        is_number = isinstance(self.offset, int | float) and math.isfinite(self.offset)
        require(is_number, "offset", self.offset, "be a finite number")
        require(isinstance(self.gated, bool), "gated", self.gated, "be True or False")
        is_default = (self.clamp, self.offset) == (math.inf, 0.0)
        rule = f"be True with clamp={self.clamp} and offset={self.offset}"
        require(self.gated or is_default, "gated", self.gated, rule, "leave both out")


@dataclass(frozen=True, kw_only=True)
class Sums:
    """The memory to which backward adds the gradient of a weight.

    Attributes:
        sums_LOI: fp32, or in the dtype of the weight.
        spare_LOI: a stand-in for the gradient that autograd gets: memory of the weight's shape and
            dtype that is never written; layers may share it.
        zeroed: int32 [2]. If the first is not 0, the sums are zeros: backward stores the next
            gradient instead of adding it, and sets the first to 0. The second is scratch.
        told: called when backward has added the gradient, before autograd gets the stand-in.
    """

    sums_LOI: Tensor
    spare_LOI: Tensor
    zeroed: Tensor
    told: Callable[[], None] | None = None

    def unspecified(self) -> Tensor:
        """Return the stand-in that autograd gets for a weight whose gradient was added."""
        if self.told is not None:
            self.told()
        # A new tensor, since autograd copies a gradient if anything else refers to its tensor.
        return self.spare_LOI.detach()


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """Weights of L experts, in one dtype.

    Attributes:
        fc1_LGD, fc2_LDF: on CUDA devices bf16, and D and F are multiples of 8.
        fc1_bias_LG, fc2_bias_LD: None if there is no bias. Where ranks split experts, each of them
            adds its fc2 bias: give it to one of them, and zeros to the others.
        fc1_sums, fc2_sums: the memory to which backward adds a weight's gradient; None returns the
            gradient to autograd.
        scaled: the same weights in e4m3, for the products of rows; the caller must refresh them. D
            and F are then multiples of 16 on CUDA devices. None computes in the weights' dtype.
    """

    fc1_LGD: Tensor
    fc2_LDF: Tensor
    fc1_bias_LG: Tensor | None = None
    fc2_bias_LD: Tensor | None = None
    fc1_sums: Sums | None = None
    fc2_sums: Sums | None = None
    scaled: ScaledWeights | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights and the biases that are given, by name."""
        biases = {"fc1_bias_LG": self.fc1_bias_LG, "fc2_bias_LD": self.fc2_bias_LD}
        given = {name: bias for name, bias in biases.items() if bias is not None}
        return {"fc1_LGD": self.fc1_LGD, "fc2_LDF": self.fc2_LDF, **given}

    def operands(self) -> "Operands":
        """Return what the products of rows read: the weights in e4m3 if there are any."""
        of = self.scaled
        if of is not None:
            back = {"fc1_back": of.fc1_LDG, "fc2_back": of.fc2_LFD}
            return Operands(fc1=of.fc1_LGD, fc2=of.fc2_LDF, **back)
        fc1, fc2 = self.fc1_LGD.detach(), self.fc2_LDF.detach()
        back = {"fc1_back": fc1.transpose(1, 2), "fc2_back": fc2.transpose(1, 2)}
        return Operands(fc1=fc1, fc2=fc2, **back)


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Weights as the products of rows read them, [L, O, I]; `..._back` for gradients of rows."""

    fc1: Tensor | Scaled
    fc2: Tensor | Scaled
    fc1_back: Tensor | Scaled
    fc2_back: Tensor | Scaled


@dataclass(frozen=True, kw_only=True)
class Call:
    """Decisions of the host about one pass of one layer.

    Attributes:
        wire: the exchange of the pass.
        take_room: a function of the counts that arrived, which returns where rows lie.
        counters: the counters to which the receiver adds; None counts nothing.
    """

    wire: Wire
    take_room: TakeRoom
    counters: Counters | None = None


def run(
    tokens_TD: Tensor, prob_TK: Tensor, weights: ExpertWeights, activation: Activation, call: Call
) -> Tensor:
    """Compute the experts of every token: `sum of prob * (fc2(f(fc1(token))) + bias)`, [T, D].

    Tokens are in the dtype of the weights; `prob_TK` is that of `routing.choice_probs`.
    Choices without room add nothing, and have a gradient of zero.
    """
    if tokens_TD.is_cuda:
        from padded_dispatch.experts.packed import run as compute
    else:
        from padded_dispatch.experts.plain import run as compute
    return compute(tokens_TD, prob_TK, weights, activation, call)
