"""Kernels that quantize, against the rule in plain torch, bit by bit."""

import pytest
import torch
from torch import Tensor

from padded_dispatch.experts.scaled import quantize
from padded_dispatch.kernels import Scaled
from padded_dispatch.kernels.scaled import quantize_weight
from tests.support.device import DEVICE, equal, here, ints


def same(found: Scaled, rows: Tensor) -> None:
    """Assert scales as in plain torch, and values of rows that are finite; NaN has many forms."""
    expected = quantize(rows)
    finite = expected.scales.isfinite()
    equal((found.scales.nan_to_num(-1.0), expected.scales.nan_to_num(-1.0)))
    values = found.values.view(torch.uint8)[here(finite)]
    equal((values, expected.values.view(torch.uint8)[finite]))


def forms_of(weight_LOI: Tensor) -> tuple[Scaled, Scaled]:
    num_experts, width_out, width_in = weight_LOI.shape
    like = weight_LOI.to(DEVICE)
    form = Scaled.empty(num_experts, width_out, width_in, like=like)
    return form, Scaled.empty(num_experts, width_in, width_out, like=like)


# The interpreter takes subnormal bf16 for zero, so only fp32 has the first.
SPECIAL = [1e-40, 0.0, 3e38, torch.inf, -torch.inf, torch.nan, 448.0, 449.0, 2.0**-126]


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 33, 257), (3, 70, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stale_weights_are_quantized_in_both_orientations(shape, dtype):
    """Special values, each in a row of its own, spoil no other row."""
    generator = torch.Generator().manual_seed(sum(shape))
    weight_LOI = torch.randn(shape, generator=generator)
    weight_LOI *= torch.randint(-90, 90, shape[:2], generator=generator)[..., None].float().exp2()
    for place, value in enumerate(SPECIAL[dtype == torch.bfloat16 :] if shape[1] > 1 else []):
        weight_LOI[-1, 2 * place + 1] = value
    weight_LOI[0, 0, 0] = torch.nan
    weight_LOI = weight_LOI.to(dtype)
    form, back = forms_of(weight_LOI)
    for given, stale in ((weight_LOI, 1), (2 * weight_LOI, 0)):
        quantize_weight(here(given), ints(stale), form, back)
        same(form, weight_LOI)
        same(back, weight_LOI.transpose(1, 2))


def test_quantize_weight_example():
    weight_LOI = here([[[448.0, 0], [1, 3]]])
    form, back = forms_of(weight_LOI)
    quantize_weight(weight_LOI, ints(1), form, back)
    found = [part.float().tolist() for part in (form.values, back.values)]
    assert found == [[[[448, 0], [128, 384]]], [[[448, 1], [0, 384]]]]
    assert form.scales.tolist() == back.scales.tolist() == [[1, 2**-7]]
