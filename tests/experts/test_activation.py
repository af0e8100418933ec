"""Every activation against its definition in plain torch, forward and every gradient."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck

from padded_dispatch.experts.activation import Activation, _activate, _activate_backward, activate
from tests.support.grids import poisoned_memory

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
COUNTS, SPARE, G = [0, 3, 0, 4, 1, 0], 2, 10


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x) ** 2


FUNCTIONS = {"silu": F.silu, "gelu": F.gelu, "quick_gelu": quick_gelu, "squared_relu": squared_relu}


def in_torch(
    fc1_NG: Tensor, probs_N: Tensor, activation: Activation, bias_NG: Tensor | None
) -> Tensor:
    """What Megatron computes, for rows whose biases are already looked up."""
    x_NG = fc1_NG if bias_NG is None else fc1_NG + bias_NG
    function = FUNCTIONS[activation.function]
    if not activation.gated:
        return function(x_NG) * probs_N[:, None]
    gate, up = x_NG.chunk(2, dim=-1)
    gate = gate.clamp(min=None, max=activation.clamp)
    up = up.clamp(min=-activation.clamp, max=activation.clamp)
    return function(gate) * (up + activation.offset) * probs_N[:, None]


def inputs(biased: bool, spare: int = SPARE) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """fc1, probabilities, bias and ends; the last `spare` rows are NaN."""
    generator = torch.Generator().manual_seed(1)
    num_rows = sum(COUNTS)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    fc1_NG, probs_N, bias_LG = draw(num_rows + spare, G), draw(num_rows + spare), draw(6, G)
    fc1_NG[num_rows:] = probs_N[num_rows:] = torch.nan
    offsets_L = torch.tensor(COUNTS).cumsum(0).int()
    leaves = [value.requires_grad_() for value in (fc1_NG, probs_N)]
    return leaves[0], leaves[1], bias_LG.requires_grad_() if biased else None, offsets_L


@BIASED
@EACH
def test_output_and_gradients(name, biased):
    activation, num_rows = Activation(**ALL[name]), sum(COUNTS)
    fc1_NG, probs_N, bias_LG, offsets_L = inputs(biased)
    with poisoned_memory():
        out_NF = activate(fc1_NG, probs_N, offsets_L, activation, bias_LG)
        grad_NF = torch.full_like(out_NF, torch.nan)
        grad_NF[:num_rows] = torch.linspace(-1, 1, out_NF[:num_rows].numel()).view(num_rows, -1)
        out_NF.backward(grad_NF)
    leaves = [value for value in (fc1_NG, probs_N, bias_LG) if value is not None]
    ours = [leaf.grad for leaf in leaves]
    again = [leaf.detach().requires_grad_() for leaf in leaves]
    bias_NG = again[2].repeat_interleave(torch.tensor(COUNTS), 0) if biased else None
    expected_NF = in_torch(again[0][:num_rows], again[1][:num_rows], activation, bias_NG)
    expected_NF.backward(grad_NF[:num_rows])
    assert out_NF.shape[1] == (G // 2 if activation.gated else G)
    torch.testing.assert_close(out_NF[:num_rows], expected_NF, rtol=1e-13, atol=1e-14)
    for got, leaf in zip(ours[:2], again, strict=False):
        assert got is not None and leaf.grad is not None
        torch.testing.assert_close(got[:num_rows], leaf.grad[:num_rows], rtol=1e-12, atol=1e-14)
    if biased:
        torch.testing.assert_close(ours[2], again[2].grad, rtol=1e-12, atol=1e-14)
        assert ours[2] is not None and not ours[2][0].any() and not ours[2][-1].any()


def test_gpt_oss_by_hand():
    """Gate 8 is cut to 7, up -9 to -7: 7 * sigmoid(11.914) * (-7 + 1), and prob 0.5."""
    gpt_oss = Activation(function="quick_gelu", clamp=7.0, offset=1.0)
    fc1_NG = torch.tensor([[8.0, -9.0]], requires_grad=True)
    offsets_L = torch.tensor([1], dtype=torch.int32)
    out_NF = activate(fc1_NG, torch.tensor([0.5]), offsets_L, gpt_oss)
    assert math.isclose(out_NF.item(), -21 / (1 + math.exp(-11.914)), rel_tol=1e-6)
    out_NF.backward()
    assert fc1_NG.grad is not None and not fc1_NG.grad.any()


def test_bf16_rounds_once():
    """In bf16 1 + 2**-9 is 1, and so is its square; fp32 holds the sum, whose square rounds up."""
    fc1_NG, bias_LG = torch.tensor([[1.0]]).bfloat16(), torch.tensor([[2.0**-9]]).bfloat16()
    plain = Activation(function="squared_relu", gated=False)
    offsets_L = torch.tensor([1], dtype=torch.int32)
    out = activate(fc1_NG, torch.tensor([1.0]), offsets_L, plain, bias_LG)
    assert out.dtype == torch.bfloat16 and out.item() == 1.0 + 2.0**-7  # (1 + 2**-9)**2 = 1.0039


@BIASED
@pytest.mark.parametrize("name", ["gpt-oss", "squared relu"])
def test_all_are_sound_custom_ops(name, biased):
    fc1_NG, probs_N, bias_LG, offsets_L = inputs(biased, spare=0)
    shape = Activation(**ALL[name])
    how = shape.function, shape.gated, shape.clamp, shape.offset
    opcheck(_activate, (fc1_NG, bias_LG, probs_N, offsets_L, *how))
    grad_NF = torch.randn(fc1_NG.shape[0], G // 2 if shape.gated else G, dtype=torch.float64)
    given = grad_NF, fc1_NG.detach(), None if bias_LG is None else bias_LG.detach()
    opcheck(_activate_backward, (*given, probs_N.detach(), offsets_L, *how))


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
