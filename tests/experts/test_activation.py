"""Every activation against its definition in plain torch, forward and every gradient."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from padded_dispatch.experts.activation import Activation, activate

ALL: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "geglu": {"function": "gelu"},
    "gpt-oss": {"function": "quick_gelu", "clamp": 0.7, "offset": 1.0},
    "clamped swiglu": {"clamp": 0.5},
    "silu": {"gated": False},
    "gelu": {"gated": False, "function": "gelu"},
    "quick gelu": {"gated": False, "function": "quick_gelu"},
    "squared relu": {"gated": False, "function": "squared_relu"},
}
EACH = pytest.mark.parametrize("name", ALL)
BIASED = pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
G = 10


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x) ** 2


FUNCTIONS = {"silu": F.silu, "gelu": F.gelu, "quick_gelu": quick_gelu, "squared_relu": squared_relu}


def in_torch(
    fc1_NG: Tensor, prob_N: Tensor, activation: Activation, bias_G: Tensor | None
) -> Tensor:
    """What Megatron computes."""
    x_NG = fc1_NG if bias_G is None else fc1_NG + bias_G
    function = FUNCTIONS[activation.function]
    if not activation.gated:
        return function(x_NG) * prob_N[:, None]
    gate, up = x_NG.chunk(2, dim=-1)
    gate = gate.clamp(min=None, max=activation.clamp)
    up = up.clamp(min=-activation.clamp, max=activation.clamp)
    return function(gate) * (up + activation.offset) * prob_N[:, None]


@BIASED
@EACH
def test_output_and_gradients(name, biased):
    """Of three rows, and of none."""
    activation, generator = Activation(**ALL[name]), torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    for num_rows in (3, 0):
        leaves = [draw(num_rows, G), draw(num_rows)] + ([draw(G)] if biased else [])
        bias_G = leaves[2] if biased else None
        out_NF, expected_NF = (
            activate(*leaves[:2], activation, bias_G),
            in_torch(*leaves[:2], activation, bias_G),
        )
        assert out_NF.shape == (num_rows, G // 2 if activation.gated else G)
        torch.testing.assert_close(out_NF, expected_NF, rtol=1e-13, atol=1e-14)
        grad_NF = torch.linspace(-1, 1, out_NF.numel(), dtype=out_NF.dtype).view_as(out_NF)
        found, expected = (torch.autograd.grad(o, leaves, grad_NF) for o in (out_NF, expected_NF))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_gpt_oss_by_hand():
    """Gate 8 is cut to 7, up -9 to -7: 7 * sigmoid(11.914) * (-7 + 1), and prob 0.5."""
    gpt_oss = Activation(function="quick_gelu", clamp=7.0, offset=1.0)
    fc1_NG = torch.tensor([[8.0, -9.0]], requires_grad=True)
    out = activate(fc1_NG, torch.tensor([0.5]), gpt_oss)
    assert math.isclose(out.item(), -21 / (1 + math.exp(-11.914)), rel_tol=1e-6)
    out.backward()
    assert fc1_NG.grad is not None and not fc1_NG.grad.any()


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
