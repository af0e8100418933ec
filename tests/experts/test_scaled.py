"""The rule of scales in plain torch, by its definition."""

import pytest
import torch

from padded_dispatch.experts.scaled import quantize, widen


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


def test_rows_of_zeros_and_rows_that_are_not_finite():
    rows = torch.zeros(5, 4)
    rows[1, 0], rows[2, 1], rows[3, 2], rows[4, 3] = torch.inf, -torch.inf, torch.nan, 1e-45
    scaled = quantize(rows)
    assert scaled.scales[[0, 4]].tolist() == [2**-126, 2**-126]
    assert scaled.scales[1:4].isnan().all()
    assert widen(scaled, torch.float32)[0].tolist() == [0, 0, 0, 0]
    assert widen(scaled, torch.float32)[1:4].isnan().all()
    assert widen(scaled, torch.float32)[4].isfinite().all()


@pytest.mark.parametrize(
    ("most", "scale"), [(448, 1), (449, 2), (224, 0.5), (1, 2**-8), (1.75, 2**-8), (1.76, 2**-7)]
)
def test_scales_by_hand(most, scale):
    assert quantize(torch.tensor([0.5, -most])).scales.item() == scale
