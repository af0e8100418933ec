"""Plans: against the reference, and what must hold whatever the map."""

import pytest
import torch
from hypothesis import example, given

from padded_dispatch.routing.plan import choice_probs, make_plan
from tests.support import reference
from tests.support.routings import RoutingCase, assert_same, routing_cases, routing_map

# Beyond what hypothesis draws: counts past one byte, sizes off every power of two.
LARGE_TE = routing_map(1031, 67, 7, skew="hot", seed=5)
LARGE = RoutingCase(map_TE=LARGE_TE, probs_TE=LARGE_TE, top_k=6, capacity=1)


@given(case=routing_cases())
@example(case=LARGE)
def test_plan_is_the_reference(case: RoutingCase):
    """Also for maps that were not cut down, whose rows may have more than K."""
    plan = make_plan(torch.from_numpy(case.map_TE), top_k=case.top_k)
    expected = reference.plan(case.map_TE, top_k=case.top_k)
    for name, tensor in vars(plan).items():
        assert_same(tensor, getattr(expected, name))
        assert tensor.is_contiguous()


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
