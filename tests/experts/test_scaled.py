"""The rule of scales in plain torch, by its definition."""

import copy

import pytest
import torch

from padded_dispatch.experts.scaled import ScaledWeights, quantize, widen
from tests.support.device import here


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_scale_is_the_smallest_power_of_two_that_fits(dtype):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 24, generator=generator)
    rows = (rows * torch.randint(-100, 100, (200, 1), generator=generator).float().exp2()).to(dtype)
    scaled, most = quantize(rows), rows.double().abs().amax(1)
    scales = scaled.scales.double()
    assert (scales.log2() == scales.log2().round()).all()
    assert (most <= 448 * scales).all() and (most > 224 * scales).all()
    error = (widen(scaled, torch.float64) - rows.double()).abs()
    # Half a unit of three bits behind the point, and of the smallest values.
    assert (error <= (rows.double().abs() * 2**-4).clamp(min=2**-10 * scales[:, None])).all()


def test_scales_by_hand():
    most = torch.tensor([448, 449, 224, 1, 1.75, 1.76])
    scales = quantize(torch.stack([torch.full((6,), 0.5), -most], 1)).scales
    assert scales.tolist() == [1, 2, 0.5, 2**-8, 2**-8, 2**-7]
    rows = torch.zeros(5, 4)
    rows[1, 0], rows[2, 1], rows[3, 2], rows[4, 3] = torch.inf, -torch.inf, torch.nan, 1e-45
    scaled = quantize(rows)
    assert scaled.scales[[0, 4]].tolist() == [2**-126, 2**-126]
    assert scaled.scales[1:4].isnan().all()
    assert widen(scaled, torch.float32)[0].tolist() == [0, 0, 0, 0]
    assert widen(scaled, torch.float32)[1:4].isnan().all()
    assert widen(scaled, torch.float32)[4].isfinite().all()


def test_weights_are_quantized_in_both_orientations_when_they_are_stale():
    generator = torch.Generator().manual_seed(1)
    fc1_LGD, fc2_LDF = (
        here(torch.randn(shape, generator=generator).bfloat16())
        for shape in ((2, 64, 32), (2, 32, 16))
    )
    scaled = copy.deepcopy(ScaledWeights(fc1_LGD, fc2_LDF))
    # Of a refresh: what the weights are multiplied by, and what their scales then are.
    for factor, found in ((1, 1), (2, 1), (4, 4), (8, 4)):
        if factor == 4:  # Copies follow optimizers, too.
            torch.optim.SGD([torch.nn.Parameter(fc1_LGD)]).step()
        scaled.refresh(fc1_LGD * factor, fc2_LDF * factor)
        for form, rows in (
            (scaled.fc1_LGD, fc1_LGD),
            (scaled.fc1_LDG, fc1_LGD.transpose(1, 2)),
            (scaled.fc2_LDF, fc2_LDF),
            (scaled.fc2_LFD, fc2_LDF.transpose(1, 2)),
        ):
            expected = quantize(rows)
            assert form.dtype == torch.bfloat16
            assert torch.equal(form.values.view(torch.uint8), expected.values.view(torch.uint8))
            assert torch.equal(form.scales, found * expected.scales)
