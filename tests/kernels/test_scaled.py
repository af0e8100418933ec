"""Kernels that quantize, against the rule in plain torch, bit by bit.

Without a GPU they run in Triton's interpreter, which shows their logic; with one, as they are.
"""

import pytest
import torch
from torch import Tensor

from padded_dispatch.experts.scaled import quantize
from padded_dispatch.kernels import Scaled
from padded_dispatch.kernels.scaled import quantize_weight
from tests.support.device import DEVICE, equal, here, ints


def bits(scaled: Scaled) -> tuple[Tensor, Tensor]:
    """Return what can be compared bit by bit; NaN has one form."""
    return scaled.values.view(torch.uint8), scaled.scales.nan_to_num(-1.0)


def same(found: Scaled, expected: Scaled) -> None:
    """Assert equal scales, and equal values of rows that are finite."""
    (values, scales), (wanted, wanted_scales) = bits(found), bits(expected)
    finite = wanted_scales >= 0
    equal((scales, wanted_scales), (values[here(finite)], wanted[finite]))


def forms_of(weight_LOI: Tensor) -> tuple[Scaled, Scaled]:
    num_experts, width_out, width_in = weight_LOI.shape
    how = {"dtype": weight_LOI.dtype, "device": torch.device(DEVICE)}
    form = Scaled.empty(num_experts, width_out, width_in, **how)
    return form, Scaled.empty(num_experts, width_in, width_out, **how)


def test_quantize_weight_example():
    form, back = forms_of(weight := torch.tensor([[[448.0, 0.0], [1.0, 3.0]]]))
    quantize_weight(here(weight), ints(1), form, back)
    assert form.values.float().tolist() == [[[448, 0], [128, 384]]]
    assert back.values.float().tolist() == [[[448, 1], [0, 384]]]
    assert form.scales.tolist() == back.scales.tolist() == [[1, 2**-7]]


SPECIAL = [0.0, 1e-40, 3e38, torch.inf, -torch.inf, torch.nan, 448.0, 449.0, 2.0**-126]


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 33, 257), (3, 70, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_quantized_in_both_orientations(shape, dtype):
    generator = torch.Generator().manual_seed(sum(shape))
    weight_LOI = torch.randn(shape, generator=generator)
    weight_LOI *= torch.randint(-90, 90, shape[:2], generator=generator)[..., None].float().exp2()
    weight_LOI = weight_LOI.to(dtype)
    weight_LOI[-1, -1, -1] = torch.nan
    form, back = forms_of(weight_LOI)
    quantize_weight(here(weight_LOI), ints(1), form, back)
    same(form, quantize(weight_LOI))
    same(back, quantize(weight_LOI.transpose(1, 2)))


@pytest.mark.parametrize("value", SPECIAL, ids=str)
def test_special_values_stay_in_their_row(value):
    weight_LOI = torch.ones(1, 3, 20)
    weight_LOI[0, 1] = value
    form, back = forms_of(weight_LOI)
    quantize_weight(here(weight_LOI), ints(1), form, back)
    same(form, quantize(weight_LOI))
    others = form.scales[0, [0, 2]]
    assert others.tolist() == [2**-8, 2**-8]
    assert form.values[0, [0, 2]].float().unique().tolist() == [256]


def test_a_weight_that_is_not_stale_is_left():
    form, back = forms_of(weight := torch.ones(2, 33, 20))
    quantize_weight(here(weight), ints(1), form, back)
    quantize_weight(here(2 * weight), ints(0), form, back)
    same(form, quantize(weight))
    same(back, quantize(weight.transpose(1, 2)))
