"""Grouped expert MLP over packed rows (skips padding) or over padded rows.

    fc1 -> activation * prob -> fc2, with the biases of fc1 and of fc2 * prob, if there are any

Rows are packed as in `padded_dispatch.experts.grouped`, which has the linears;
`padded_dispatch.experts.activation` has the step between them. If experts have equally many rows, and
padded rows are zero with probability zero, each linear may be one batched product instead; padded
rows of the result and of all gradients are zero then.

For backward, fc1 saves the rows, the activation saves fc1's result, and fc2 saves its input. That
input may be recomputed instead: one more pass over real rows saves N * F elements.

G: width of fc1's result, 2F (gate before up) if the activation is gated, else F.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from padded_dispatch.experts.activation import Activation, activate
from padded_dispatch.experts.grouped import Delayed, batched_linear, grouped_linear, row_tiles


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """Weights of L experts, in one dtype.

    Attributes:
        fc1_LGD: on CUDA devices D is a multiple of 8, and so is F.
        fc2_LDF: likewise.
        fc1_bias_LG: None if there is no bias.
        fc2_bias_LD: None if there is no bias.
        fc1_sums_LGD: fp32, to which backward adds the gradient of `fc1_LGD`; the gradient that
            autograd gets is unspecified then. None leaves it to autograd.
        fc2_sums_LDF: likewise.
        fc1_delayed: where backward keeps the gradient of `fc1_LGD` for later; None computes it.
        fc2_delayed: likewise.
    """

    fc1_LGD: Tensor
    fc2_LDF: Tensor
    fc1_bias_LG: Tensor | None = None
    fc2_bias_LD: Tensor | None = None
    fc1_sums_LGD: Tensor | None = None
    fc2_sums_LDF: Tensor | None = None
    fc1_delayed: Delayed | None = None
    fc2_delayed: Delayed | None = None


class LinearsToSums(Protocol):
    """Both linears of a pass whose rows go home inside of fc2: `exchange.fused.FusedLinears`.

    Gradients of the rows, and of their probabilities, go past `grouped_mlp`, to their tokens.
    """

    @property
    def first(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """fc1's result and the probabilities."""
        ...

    @property
    def second(self) -> Callable[..., Tensor]:
        """The sum of every token's rows, [T, D]."""
        ...


def grouped_mlp(
    rows_ND: Tensor,
    probs_N: Tensor,
    offsets_L: Tensor,
    weights: ExpertWeights,
    activation: Activation,
    *,
    padded: bool = False,
    home: LinearsToSums | None = None,
    recompute: bool = False,
) -> Tensor:
    """Compute every expert's MLP on its rows, weighted: `prob * (fc2(f(fc1 + bias)) + bias)`.

    Args:
        rows_ND: floating point [N, D]; bf16 on CUDA devices, unless `padded`.
        probs_N: at least fp32.
        offsets_L: contiguous int32, ascending, the last at most N.
        weights: of all experts on this rank.
        activation: between fc1 and fc2.
        padded: whether all experts have equally many rows.
        home: the linears of packed rows that go home inside of fc2; no gradient of `weights` is
            delayed then.
        recompute: whether to recompute fc2's input in backward.

    Returns:
        [N, D]; rows from `offsets_L[-1]` on are unspecified, as are those of the gradients. With
        `home` the sum of every token's rows, [T, D].
    """
    # All products of a pass, also backward, share the list.
    tiles = None if padded else row_tiles(offsets_L, len(rows_ND))
    linear = batched_linear if padded else partial(grouped_linear, tiles=tiles)
    first, second = weights.fc1_LGD, weights.fc2_LDF
    if home is None:
        given = None, None, weights.fc1_sums_LGD, weights.fc1_delayed
        fc1_NG = linear(rows_ND, first, offsets_L, *given)
    else:
        given = offsets_L, tiles, weights.fc1_sums_LGD
        fc1_NG, probs_N = home.first(rows_ND, probs_N, first, *given)

    def activated(fc1_NG: Tensor) -> Tensor:
        return activate(fc1_NG, probs_N, offsets_L, activation, weights.fc1_bias_LG)

    hidden_NF, saved_NG = activated(fc1_NG), fc1_NG.detach()
    context = nullcontext()
    if recompute:
        context = _recomputed(hidden_NF, lambda: activated(saved_NG).detach())
    with context:
        if home is None:
            given = weights.fc2_bias_LD, probs_N, weights.fc2_sums_LDF, weights.fc2_delayed
            return linear(hidden_NF, second, offsets_L, *given)
        given = weights.fc2_bias_LD, offsets_L, tiles, weights.fc2_sums_LDF
        return home.second(hidden_NF, probs_N, second, *given)


def _recomputed(value: Tensor, compute: Callable[[], Tensor]) -> saved_tensors_hooks:
    """Return hooks that save `compute` for backward instead of saving `value`."""
    address = value.data_ptr()  # Hooks receive another tensor object on the same memory.

    def pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        return compute if saved.data_ptr() == address else saved

    def unpack(kept: Tensor | Callable[[], Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept()

    return saved_tensors_hooks(pack, unpack)
