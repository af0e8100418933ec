"""A grouped MLP over packed rows: what is not there is not computed.

    fc1 -> activation * prob -> fc2, with the biases of fc1, and of fc2 * prob, where there are any

Rows are packed as in `padded_dispatch.grouped`, which has the linears;
`padded_dispatch.activation` has what is between them.
"""

from dataclasses import dataclass

from torch import Tensor

from padded_dispatch.activation import Activation, activate
from padded_dispatch.grouped import grouped_linear


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
    ends_L: Tensor,
    weights: ExpertWeights,
    activation: Activation,
) -> Tensor:
    """Every expert's MLP on its rows, weighted: `prob * (fc2(f(fc1 + bias)) + bias)`.

    Args:
        rows_ND: floating point [N, D]; bf16 on CUDA devices.
        probs_N: at least fp32.
        ends_L: contiguous int32, ascending, the last at most N.

    Returns:
        [N, D]; rows from `ends_L[-1]` on are unspecified, as are those of the gradients.
    """
    fc1_NG = grouped_linear(rows_ND, weights.fc1_LGD, ends_L)
    hidden_NF = activate(fc1_NG, probs_N, ends_L, activation, weights.fc1_bias_LG)
    return grouped_linear(hidden_NF, weights.fc2_LDF, ends_L, weights.fc2_bias_LD, probs_N)
