"""Experts: where their rows lie, and the pass of a layer from tokens to tokens.

    open -> lay out -> fc1 -> activation * prob -> fc2 + way home -> sum

`packed` is that pass on a GPU, `plain` on a CPU; both compute real rows only, with weights of one
parameter per linear, in e4m3 if they are given in e4m3, too (`scaled`). `padded` is for experts of
others: it hands out padded cells and takes them back. `store` decides where rows lie and which find
room.

Letters: see `padded_dispatch.config`.
"""

from dataclasses import dataclass

from torch import Tensor

from padded_dispatch.counters import Counters
from padded_dispatch.exchange.choose import Wire
from padded_dispatch.experts.activation import Activation
from padded_dispatch.experts.scaled import ScaledWeights
from padded_dispatch.experts.store import TakeRoom


@dataclass(frozen=True, kw_only=True)
class Sums:
    """The memory to which backward adds the gradient of a weight.

    Attributes:
        sums_LOI: fp32, or in the dtype of the weight.
        spare_LOI: what autograd gets as the gradient: memory of the weight's shape and dtype that
            is never written; layers may share it.
        zeroed: int32 [2]; unless the first is 0, the next gradient is stored, not added, because
            the sums are zeros, and it becomes 0. The second is scratch.
    """

    sums_LOI: Tensor
    spare_LOI: Tensor
    zeroed: Tensor

    def unspecified(self) -> Tensor:
        """Return what autograd gets for a weight whose gradient was added."""
        # Autograd takes a gradient as it is only if nothing else refers to its tensor, else a copy.
        return self.spare_LOI.detach()


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """Weights of L experts, in one dtype.

    Attributes:
        fc1_LGD, fc2_LDF: on CUDA devices bf16, and D and F are multiples of 8.
        fc1_bias_LG, fc2_bias_LD: None if there is no bias.
        fc1_sums, fc2_sums: to which backward adds the gradient of a weight; None leaves it to
            autograd.
        scaled: the same weights in e4m3, with which a pass computes its rows; None computes in the
            dtype of the weights. Its refreshed state is read, so all passes between two steps
            share it. Then D and F are multiples of 16 on CUDA devices.
    """

    fc1_LGD: Tensor
    fc2_LDF: Tensor
    fc1_bias_LG: Tensor | None = None
    fc2_bias_LD: Tensor | None = None
    fc1_sums: Sums | None = None
    fc2_sums: Sums | None = None
    scaled: ScaledWeights | None = None


@dataclass(frozen=True, kw_only=True)
class Call:
    """Decisions of the host about one pass of one layer.

    Attributes:
        wire: the exchange of this rank's tokens.
        take_room: called with what arrived, returns where rows lie.
        counters: to which the receiver adds what it kept; None counts nothing.
    """

    wire: Wire
    take_room: TakeRoom
    counters: Counters | None = None


def run(
    tokens_TD: Tensor, prob_TK: Tensor, weights: ExpertWeights, activation: Activation, call: Call
) -> Tensor:
    """Compute the experts of every token: `sum of prob * (fc2(f(fc1(token))) + bias)`, [T, D].

    Tokens are in the dtype of the weights; `prob_TK` is that of `routing.plan.choice_probs`.
    Choices without room add nothing, and have a gradient of zero.
    """
    if tokens_TD.is_cuda:
        from padded_dispatch.experts.packed import run as compute
    else:
        from padded_dispatch.experts.plain import run as compute
    return compute(tokens_TD, prob_TK, weights, activation, call)
