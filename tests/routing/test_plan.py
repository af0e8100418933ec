"""Plans: against the reference, and what must hold whatever the map."""

import pytest
import torch
from hypothesis import given

from padded_dispatch.routing.plan import choice_probs, make_plan
from tests.support import reference
from tests.support.routings import RoutingCase, assert_same, routing_cases, routing_map

FIELDS = ("expert_TK", "place_TK", "kept_E")


@given(case=routing_cases())
def test_plan_is_the_reference(case: RoutingCase):
    """Also for maps that were not cut down, whose rows may have more than K."""
    plan = make_plan(torch.from_numpy(case.map_TE), top_k=case.top_k)
    expected = reference.plan(case.map_TE, top_k=case.top_k)
    for name in FIELDS:
        assert_same(getattr(plan, name), getattr(expected, name))


@pytest.mark.parametrize("top_k", [6, 7])
def test_a_large_map_is_the_reference(top_k: int):
    """Beyond what property tests reach: counts past one byte, sizes off every power of two."""
    map_TE = routing_map(1031, 67, 7, skew="hot", seed=5)
    plan = make_plan(torch.from_numpy(map_TE), top_k=top_k)
    expected = reference.plan(map_TE, top_k=top_k)
    for name in FIELDS:
        assert_same(getattr(plan, name), getattr(expected, name))
    assert plan.kept_E.sum() == top_k * 1031
    assert all(tensor.is_contiguous() for tensor in vars(plan).values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_probs_of_choices_and_their_gradient(dtype):
    """By hand; the probability of what is no choice is NaN, and reaches nothing."""
    nan = torch.nan
    expert_TK = torch.tensor([[0, 2], [1, -1], [-1, -1]], dtype=torch.int32)
    probs_TE = torch.tensor([[0.25, nan, 0.5], [nan, 0.75, nan], [nan] * 3], dtype=dtype)
    prob_TK = choice_probs(probs_TE.requires_grad_(), expert_TK)
    assert prob_TK.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert prob_TK.tolist() == [[0.25, 0.5], [0.75, 0.0], [0.0, 0.0]]
    prob_TK.backward(torch.tensor([[1.0, 2.0], [3.0, nan], [nan, nan]], dtype=prob_TK.dtype))
    assert probs_TE.grad is not None
    assert probs_TE.grad.dtype == dtype
    assert probs_TE.grad.tolist() == [[1, 0, 2], [0, 3, 0], [0, 0, 0]]
