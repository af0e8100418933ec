"""Routing on a GPU against torch, bit by bit; without a GPU in Triton's interpreter."""

import pytest
import torch

from padded_dispatch.kernels.router import route, route_backward
from padded_dispatch.ops.router import route_backward_in_torch, route_in_torch
from tests.support.device import DEVICE

FUNCTIONS = ("softmax", "chosen", "sigmoid")
SHAPES = [(1, 1, 1), (37, 8, 2), (130, 128, 8), (20, 160, 6), (33, 60, 5), (5, 256, 1), (3, 5, 5)]


def drawn(num_tokens, num_experts, function):
    """Return logits and a bias or None; without equal logits."""
    generator = torch.Generator().manual_seed(num_tokens)
    logits_TE = 3 * torch.randn(num_tokens, num_experts, generator=generator)
    bias_E = torch.randn(num_experts, generator=generator) / 8
    return logits_TE.to(DEVICE), bias_E.to(DEVICE) if function == "sigmoid" else None


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SHAPES)
def test_it_is_torchs(num_tokens, num_experts, top_k, function):
    logits_TE, bias_E = drawn(num_tokens, num_experts, function)
    for scaling, with_scores in ((1.0, True), (2.5, False)):
        given = logits_TE, bias_E, top_k, function, scaling, with_scores
        probs_TE, map_TE, scores_TE, counted_TE = route(*given)
        expected = route_in_torch(*given)
        assert torch.equal(map_TE, expected[1])
        assert torch.equal(counted_TE, expected[3])
        # The interpreter's exp and its sums are others.
        same_bits = DEVICE == "cuda" and num_tokens >= 16 and function != "sigmoid"
        tolerance = 0 if same_bits else 1e-6
        torch.testing.assert_close(probs_TE, expected[0], rtol=tolerance, atol=0)
        torch.testing.assert_close(scores_TE, expected[2], rtol=tolerance, atol=0)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SHAPES)
def test_gradients_are_as_near_to_fp64_as_torchs(num_tokens, num_experts, top_k, function):
    logits_TE, bias_E = drawn(num_tokens, num_experts, function)
    map_TE = route_in_torch(logits_TE, bias_E, top_k, function, 1.0, False)[1]
    # Always the same: at some gradients torch happens to be all but exact, and no other sum is.
    generator = torch.Generator().manual_seed(2)
    grad_probs_TE = torch.randn(logits_TE.shape, generator=generator).to(DEVICE)
    grad_scores_E = torch.randn(num_experts, generator=generator).to(DEVICE)
    # That of a sum over tokens, and none.
    for grad_scores_TE in (grad_scores_E.expand_as(logits_TE), None):
        rest = map_TE, top_k, function, 2.5
        mine = route_backward(grad_probs_TE, grad_scores_TE, logits_TE, *rest)
        given = grad_probs_TE, grad_scores_TE, logits_TE, bias_E
        torchs = route_backward_in_torch(*given, *rest)
        wide = [None if tensor is None else tensor.double() for tensor in given]
        exact = route_backward_in_torch(*wide, *rest)
        ulp = torch.finfo(torch.float32).eps * exact.abs().max()
        assert (mine - exact).abs().max() <= 2 * (torchs - exact).abs().max() + ulp


@pytest.mark.parametrize("function", FUNCTIONS)
def test_of_equals_the_first_ones_are_chosen(function):
    """Whole numbers, so that most logits are equal; and all equal, also to a bias of nothing."""
    logits_TE = torch.randint(0, 3, (50, 24), generator=torch.Generator().manual_seed(1)).float()
    logits_TE[7], logits_TE[8] = 0, -torch.inf
    logits_TE[8, 3:9] = -1
    expected_TK = logits_TE.sort(dim=1, descending=True, stable=True).indices[:, :6]
    map_TE = torch.zeros_like(logits_TE, dtype=torch.bool).scatter_(1, expected_TK, True)
    bias_E = torch.zeros(24, device=DEVICE) if function == "sigmoid" else None
    found = route(logits_TE.to(DEVICE), bias_E, 6, function, 1.0, True)
    assert torch.equal(found[1].cpu(), map_TE)
    if function != "softmax":
        assert torch.equal(found[3].cpu(), map_TE)


def test_the_bias_chooses_and_is_not_in_the_probability():
    logits_TE = torch.tensor([[0.0, 3.0, 2.0, 1.0]], device=DEVICE)
    bias_E = torch.tensor([9.0, 0.0, 0.0, 8.0], device=DEVICE)
    probs_TE, map_TE, _, counted_TE = route(logits_TE, bias_E, 2, "sigmoid", 1.0, True)
    assert map_TE.tolist() == [[True, False, False, True]]
    assert counted_TE.tolist() == [[False, True, True, False]]
    torch.testing.assert_close(probs_TE[0, 0].item(), 0.5 / (0.5 + 0.7310586), rtol=1e-6, atol=0)


def test_a_nan_is_chosen_and_spoils_its_token_alone():
    logits_TE = torch.zeros(3, 4, device=DEVICE)
    logits_TE[1, 2] = torch.nan
    probs_TE, map_TE, _, _ = route(logits_TE, None, 1, "softmax", 1.0, False)
    assert map_TE.cpu().nonzero().tolist()[0] == [0, 0]
    assert probs_TE[[0, 2]].isfinite().all()
    assert probs_TE[1].isnan().any()


def test_padding_of_tiles_is_not_written():
    """A gradient of NaN where no expert was chosen is not read."""
    logits_TE, _ = drawn(9, 5, "chosen")
    map_TE = route(logits_TE, None, 2, "chosen", 1.0, False)[1]
    grad_TE = torch.where(map_TE, 1.0, torch.nan)
    found = route_backward(grad_TE, None, logits_TE, map_TE, 2, "chosen", 1.0)
    # The sum of a softmax does not change with its logits.
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("function", ["softmax", "chosen"])
@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(128, 8), (32, 4), (64, 6), (256, 8), (512, 10)]
)
def test_bits_are_torchs_on_a_gpu(num_experts, top_k, function):
    """At the sizes of public models, also where many logits are equal."""
    logits_TE, bias_E = drawn(4096, num_experts, function)
    for given_TE in (logits_TE, logits_TE.bfloat16().float(), logits_TE.round()):
        # Equal scores with equal biases only: else the order of their sum is unspecified.
        bias = bias_E if given_TE is logits_TE else None
        for with_scores in (True, False):
            given = given_TE, bias, top_k, function, 2.5, with_scores
            for mine, torchs in zip(route(*given), route_in_torch(*given), strict=True):
                assert torch.equal(mine, torchs)
