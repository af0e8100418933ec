"""Activations round once; `tests/test_dispatcher_fuzz.py` compares each one with the oracle."""

import math

import pytest
import torch

from padded_dispatch.experts.activation import Activation, activate


def test_bf16_rounds_once():
    """In bf16 1 + 2**-9 is 1, and so is its square; fp32 holds the sum, whose square rounds up."""
    fc1_NG, bias_G = torch.tensor([[1.0]]).bfloat16(), torch.tensor([2.0**-9]).bfloat16()
    plain = Activation(function="squared_relu", gated=False)
    out = activate(fc1_NG, torch.tensor([1.0]), plain, bias_G)
    assert out.dtype == torch.bfloat16 and out.item() == 1.0 + 2.0**-7  # (1 + 2**-9)**2 = 1.0039


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"function": "relu"}, "function must be one of silu, .*, got 'relu'$"),
        ({"clamp": 0.0}, r"clamp must be above 0, got 0\.0$"),
        ({"clamp": math.nan}, "clamp must be above 0, got nan$"),
        ({"gated": False, "clamp": 7.0}, r"gated must be True with clamp=7\.0 .* got False; leave"),
        ({"gated": False, "offset": 1.0}, r"gated must be True with .* offset=1\.0, got False"),
    ],
)
def test_wrong_values_are_refused(wrong, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Activation(**wrong)
