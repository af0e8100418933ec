"""Kernels of the plan against the plain torch that specifies them, bit by bit."""

import pytest
import torch
from hypothesis import given
from torch import Tensor

from padded_dispatch.kernels import plan
from padded_dispatch.routing import choice_probs, plan_in_torch
from tests.support.device import DEVICE, equal, few, here
from tests.support.routings import LARGE, RoutingCase, large_map, routing_cases, routing_map


def assert_are_torchs(map_TE: Tensor, top_k: int) -> None:
    equal(*zip(plan.plan(here(map_TE), top_k), plan_in_torch(map_TE, top_k), strict=True))


@few
@given(case=routing_cases())
def test_plan(case: RoutingCase):
    """Also for maps with more than K experts for a token."""
    assert_are_torchs(torch.from_numpy(case.map_TE), case.top_k)


@pytest.mark.parametrize("skew", ["uniform", "same", "none"])
def test_blocks_of_several_tiles(monkeypatch, skew):
    monkeypatch.setattr(plan, "_TILE", 128)
    monkeypatch.setattr(plan, "_MAX_BLOCKS", 7)
    map_TE = torch.from_numpy(routing_map(131, 21, 3, skew=skew))
    assert_are_torchs(map_TE, 3)
    assert_are_torchs(map_TE, 2)
    assert_are_torchs(map_TE.t(), 150)  # Not contiguous; K beyond E.


@pytest.mark.gpu
@pytest.mark.parametrize(("num_tokens", "num_experts"), LARGE)
@pytest.mark.parametrize("top_k", [8, 5])
def test_plan_of_any_size(cuda, num_tokens, num_experts, top_k):
    map_TE, probs_TE = large_map(num_tokens, num_experts)
    assert_are_torchs(map_TE.cpu(), top_k)
    expert_TK = plan_in_torch(map_TE.cpu(), top_k)[0]
    weight_TK, grads = torch.rand(num_tokens, top_k), []
    for device in ("cuda", "cpu"):
        leaf_TE = probs_TE.detach().to(device).requires_grad_()
        choice_probs(leaf_TE, expert_TK.to(device)).backward(weight_TK.to(device))
        grads.append(leaf_TE.grad)
    equal(tuple(grads))


# The interpreter does not round to bf16 as a GPU does.
NARROW = torch.bfloat16 if DEVICE == "cuda" else torch.float16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, NARROW])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 1, 1), (131, 21, 3)])
def test_probs_and_their_gradient(monkeypatch, num_tokens, num_experts, top_k, dtype):
    """Bit by bit; what no choice has is NaN and never read."""
    monkeypatch.setattr(plan, "_TILE", 128)
    generator = torch.Generator().manual_seed(0)
    map_TE = torch.from_numpy(routing_map(num_tokens, num_experts, top_k))
    map_TE[1::3] = False
    expert_TK = plan_in_torch(map_TE.cpu(), top_k)[0]
    probs_TE = torch.rand(num_tokens, num_experts, generator=generator, dtype=dtype)
    probs_TE = probs_TE.masked_fill(~map_TE, torch.nan).requires_grad_()
    expected_TK = choice_probs(probs_TE, expert_TK)
    here_TE = here(probs_TE.detach()).requires_grad_()
    prob_TK = plan.ChoiceProbs.apply(here_TE, here(expert_TK))
    grad_TK = torch.randn(num_tokens, top_k, generator=generator, dtype=expected_TK.dtype)
    grad_TK[expert_TK < 0] = torch.nan
    expected_TK.backward(grad_TK)
    prob_TK.backward(here(grad_TK))
    equal((prob_TK.detach(), expected_TK.detach()), (here_TE.grad, probs_TE.grad))


def test_choice_probs_example():
    probs_TE = here([[0.25, 0.5, 0.125]]).requires_grad_()
    prob_TK = plan.ChoiceProbs.apply(probs_TE, here(torch.tensor([[0, 2, -1]]).int()))
    prob_TK.backward(here([[3.0, 4, 5]]))
    equal((prob_TK.detach(), here([[0.25, 0.125, 0]])), (probs_TE.grad, here([[3.0, 0, 4]])))
