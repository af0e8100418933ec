"""A grouped MLP over packed rows: what is not there is not computed. Or over padded ones.

    fc1 -> activation * prob -> fc2, with the biases of fc1, and of fc2 * prob, where there are any

Rows are packed as in `padded_dispatch.ops.grouped`, which has the linears;
`padded_dispatch.ops.activation` has what is between them. Where experts have equally many rows, of
which padded ones are zero with probability zero, each linear may be one batched product instead;
padded rows of the result are zero then, and so are those of all gradients.

For backward, fc1 keeps the rows, the activation what fc1 returned, and fc2 its input, which may as
well be computed again: one more pass over real rows saves N * F elements.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from padded_dispatch.ops.activation import Activation, activate
from padded_dispatch.ops.grouped import grouped_linear

# Rows, weights, ends, bias or None, probabilities or None: see `grouped_linear`.
Linear = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """Of L experts, in one dtype; G = 2F, gate before up, where the activation is gated, else F.

    `fc1_LGD`, `fc2_LDF`: on CUDA devices D and F are multiples of 8. `fc1_bias_LG`, `fc2_bias_LD`:
    None where there is no bias.
    """

    fc1_LGD: Tensor
    fc2_LDF: Tensor
    fc1_bias_LG: Tensor | None = None
    fc2_bias_LD: Tensor | None = None


def grouped_mlp(
    rows_ND: Tensor,
    probs_N: Tensor,
    offsets_L: Tensor,
    weights: ExpertWeights,
    activation: Activation,
    *,
    linear: Linear = grouped_linear,
    recompute: bool = False,
) -> Tensor:
    """Every expert's MLP on its rows, weighted: `prob * (fc2(f(fc1 + bias)) + bias)`.

    Args:
        rows_ND: floating point [N, D]; bf16 on CUDA devices.
        probs_N: at least fp32.
        offsets_L: contiguous int32, ascending, the last at most N.
        linear: `grouped_linear`, or `batched_linear` where ends are equally far apart.
        recompute: compute fc2's input again in backward.

    Returns:
        [N, D]; rows from `offsets_L[-1]` on are unspecified, as are those of the gradients.
    """
    fc1_NG = linear(rows_ND, weights.fc1_LGD, offsets_L, None, None)

    def between(fc1_NG: Tensor) -> Tensor:
        return activate(fc1_NG, probs_N, offsets_L, activation, weights.fc1_bias_LG)

    hidden_NF, kept_NG = between(fc1_NG), fc1_NG.detach()
    context = nullcontext()
    if recompute:
        context = _computed_again(hidden_NF, lambda: between(kept_NG).detach())
    with context:
        return linear(hidden_NF, weights.fc2_LDF, offsets_L, weights.fc2_bias_LD, probs_N)


def _computed_again(value: Tensor, compute: Callable[[], Tensor]) -> saved_tensors_hooks:
    """Where autograd would keep `value`, let it keep how to compute it."""
    place = value.data_ptr()  # Not the object: hooks get another one, on the same memory.

    def pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        return compute if saved.data_ptr() == place else saved

    def unpack(kept: Tensor | Callable[[], Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept()

    return saved_tensors_hooks(pack, unpack)
