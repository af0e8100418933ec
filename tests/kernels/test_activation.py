"""Kernels of the activation against plain torch, whose autograd writes the backward."""

from typing import Any

import pytest
import torch
from torch import Tensor

from padded_dispatch.experts import Activation
from padded_dispatch.experts.plain import activate
from padded_dispatch.experts.scaled import quantize
from padded_dispatch.kernels import Scaled, activation
from tests.support.device import DEVICE, equal, here, operand, real, segments_of


def in_torch(
    grad_nF: Tensor, fc1_nG: Tensor, bias_nG: Tensor | None, prob_n: Tensor, how: Activation
) -> list[Tensor]:
    """Hidden rows, and gradients of fc1's result (with its bias) and of probabilities."""
    leaves = fc1_nG.clone().requires_grad_(), prob_n.clone().requires_grad_()
    hidden_nF = activate(*leaves, how, bias_nG)
    hidden_nF.backward(grad_nF)
    return [hidden_nF.detach(), *(leaf.grad for leaf in leaves)]


def as_exact_as_torch(got: Tensor, plain: Tensor, exact: Tensor) -> None:
    """At most twice torch's error, plus a unit in the last place."""
    assert got.shape == plain.shape and got.dtype == plain.dtype
    if len(got):
        bound = 2 * (plain - exact).abs().max()
        bound += torch.finfo(got.dtype).eps * exact.abs().max()
        assert (got.cpu() - exact).abs().max() <= bound


ACTIVATIONS: list[dict[str, Any]] = [
    {},
    {"function": "gelu"},
    {"function": "quick_gelu", "clamp": 0.75, "offset": 1.0},
    {"gated": False, "function": "gelu"},
    {"gated": False, "function": "squared_relu"},
]


@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("shape", ACTIVATIONS, ids=str)
@pytest.mark.parametrize(
    ("counts", "width", "base", "num_sources"),
    [([0, 0, 0], 5, 4, 2), ([1], 1, 0, 1), ([9, 0, 20, 0], 1030, 3, 2), ([0, 300], 5, 7, 8)],
    ids=["none", "one", "wide", "many"],
)
def test_activations_are_as_exact_as_torch(counts, width, base, num_sources, shape, biased):
    """Other rows are NaN, and stay so. Scaled rows are the same, quantized as in plain torch."""
    generator, how = torch.Generator().manual_seed(width), Activation(**shape)
    segments = segments_of(counts, base=base, num_sources=num_sources)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    num_rows, fc1_width = sum(counts), 2 * width if how.gated else width
    grad_nF, fc1_nG, prob_n = draw(num_rows, width), draw(num_rows, fc1_width), draw(num_rows)
    if how.clamp < torch.inf:  # Torch's slope at a bound is that inside.
        fc1_nG[::2, 0], fc1_nG[::2, -1] = how.clamp, -how.clamp
    bias_LG = draw(len(counts), fc1_width) if biased else None
    bias_nG = None
    if bias_LG is not None:
        bias_nG = bias_LG.repeat_interleave(torch.tensor(counts), 0)
    given = grad_nF, fc1_nG, bias_nG, prob_n
    plain = in_torch(*given, how)
    exact = in_torch(*(None if value is None else value.double() for value in given), how)

    fc1_MG = operand(fc1_nG, segments, stored=True)
    inputs = fc1_MG, None if bias_LG is None else here(bias_LG), operand(prob_n, segments, True)
    inputs = *inputs, segments
    hidden_NF = activation.activate(*inputs, **vars(how))
    grad_NF = operand(grad_nF, segments, False)
    grad_prob_N = torch.full_like(grad_NF[:, 0], torch.nan)
    again_NF = activation.activate(*inputs, grad_NF, grad_prob_N, **vars(how))
    found = [
        real(hidden_NF, segments, False),
        real(fc1_MG, segments, True),
        real(grad_prob_N, segments, False),
    ]
    equal((real(again_NF, segments, False), found[0]))
    assert fc1_MG[:base].isnan().all() and fc1_MG[base + num_rows :].isnan().all()
    for got, expected, wanted in zip(found, plain, exact, strict=True):
        as_exact_as_torch(got, expected, wanted)

    hidden, gradient = (
        Scaled.empty(segments.num_rows, columns, like=grad_NF) for columns in (width, fc1_width)
    )
    again_MG = operand(fc1_nG, segments, stored=True)
    inputs = again_MG, *inputs[1:]
    assert not activation.activate(*inputs, **vars(how), scaled=hidden).numel()
    rows_NF = activation.activate(*inputs, grad_NF, grad_prob_N, **vars(how), scaled=gradient)
    if DEVICE == "cpu" or how.function != "gelu":  # On a GPU each program rounds erf in its way.
        equal((real(rows_NF, segments, False), found[0]))
        equal((real(again_MG, segments, True), found[1]))
    for scaled, rows in ((hidden, found[0]), (gradient, real(again_MG, segments, True))):
        expected = quantize(rows.cpu())
        equal((scaled.scales[:num_rows], expected.scales))
        equal((scaled.values[:num_rows].view(torch.uint8), expected.values.view(torch.uint8)))


def test_activate_example():
    nan, swiglu = torch.nan, vars(Activation())
    fc1_MG, prob_M = here([[nan, nan], [0, 5], [8, 3]]), here([nan, 1, 0.5])
    hidden_NF = activation.activate(fc1_MG, None, prob_M, segments_of([1, 1], base=1), **swiglu)
    assert hidden_NF[:2].flatten().tolist() == pytest.approx([0, 11.996], abs=1e-4)
    fc1_MG, grad_prob_N, one = fc1_MG[:2].clone(), here([nan]), segments_of([1], base=1)
    inputs = fc1_MG, None, here([nan, 0.5]), one, here([[1.0]]), grad_prob_N
    assert activation.activate(*inputs, **swiglu)[0].item() == grad_prob_N.item() == 0
    assert fc1_MG[1].tolist() == [1.25, 0]


@pytest.mark.parametrize("clamp", [7.0, torch.inf])
def test_a_row_with_nan_stays_one(clamp: float):
    how = vars(Activation(clamp=clamp))
    fc1_MG, prob_M = here([[torch.nan, 1], [1, torch.nan], [1, 1]]), here([1.0, 1, 1])
    hidden_NF = activation.activate(fc1_MG, None, prob_M, segments_of([3]), **how)
    assert hidden_NF[:3].isnan().flatten().tolist() == [True, True, False]
