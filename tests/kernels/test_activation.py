"""Kernels of the activation against the plain torch that specifies them.

Without a GPU they run in Triton's interpreter, which shows their logic; with one, as they are.
"""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from padded_dispatch.kernels import activation
from padded_dispatch.experts.activation import Activation, _activate, _activate_backward
from tests.support.device import here, here_if_tensor, ints

SWIGLU = ("silu", True, math.inf, 0.0)


def test_activate_example():
    given = here([[0.0, 5.0], [8.0, 3.0]]), None, here([1.0, 0.5]), ints(2)
    out_NF = activation.activate(*given, *SWIGLU)
    assert [round(value, 3) for value in out_NF.flatten().tolist()] == [0.0, 11.996]


def test_activate_backward_example():
    given = here([[1.0]]), here([[0.0, 5.0]]), None, here([0.5]), ints(1)
    grad_NG, grad_probs_N = activation.activate_backward(*given, *SWIGLU)
    assert (grad_NG.tolist(), grad_probs_N.tolist()) == ([[1.25, 0.0]], [0.0])


def wide(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def as_exact_as_torch(got: Tensor, plain: Tensor, exact: Tensor, num_rows: int) -> None:
    """At most twice torch's error, plus a unit in the last place; of the first rows."""
    assert got.shape == plain.shape and got.dtype == plain.dtype
    got, plain, exact = (value[:num_rows].cpu() for value in (got, plain, exact))
    if num_rows:
        bound = 2 * (plain - exact).abs().max()
        bound += torch.finfo(got.dtype).eps * exact.abs().max()
        assert (got - exact).abs().max() <= bound


ACTIVATIONS: list[dict[str, Any]] = [
    {},
    {"function": "gelu"},
    {"function": "quick_gelu", "clamp": 0.75, "offset": 1.0},
    {"gated": False, "function": "gelu"},
    {"gated": False, "function": "squared_relu"},
]


@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("shape", ACTIVATIONS, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(0, 5), (29, 1030)])
def test_activations_are_as_exact_as_torch(num_rows, width, shape, biased):
    """Rows behind the count are NaN."""
    generator = torch.Generator().manual_seed(width)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    how = dataclasses.astuple(Activation(**shape))
    fc1_width = 2 * width if Activation(**shape).gated else width
    fc1_NG, grad_NF, probs_N = draw(33, fc1_width), draw(33, width), draw(33)
    for rows_N in (fc1_NG, grad_NF, probs_N):
        rows_N[num_rows:] = torch.nan
    offsets_L = torch.tensor([0, num_rows // 3, num_rows // 3, num_rows], dtype=torch.int32)
    bias_LG = draw(4, fc1_width) if biased else None
    inputs = fc1_NG, bias_LG, probs_N, offsets_L, *how
    kernels = (
        (activation.activate, _activate, inputs),
        (activation.activate_backward, _activate_backward, (grad_NF, *inputs)),
    )
    for kernel, body, given in kernels:
        found = [kernel(*map(here_if_tensor, given)), body(*given), body(*map(wide, given))]
        if kernel is activation.activate:
            found = [[value] for value in found]
        for got, plain, exact in zip(*found, strict=True):
            as_exact_as_torch(got, plain, exact, num_rows)
