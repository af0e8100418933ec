"""Who keeps a slot: against the reference, and what must hold whatever the routing."""

import numpy as np
import pytest
import torch
from hypothesis import given
from routing_cases import RoutingCase, assert_same, routing_cases

from padded_dispatch import reference
from padded_dispatch.ops import select
from padded_dispatch.select import kept_map

POLICIES = pytest.mark.parametrize("policy", ["probs", "position"])


@pytest.mark.parametrize(
    ("policy", "capacity", "kept"),
    [("probs", 2, [1, 3]), ("position", 2, [0, 1]), ("probs", 1, [1]), ("position", 1, [0])],
)
def test_the_example_of_the_docstring(policy, capacity, kept):
    asked_TE = torch.tensor([[True], [True], [False], [True]])
    probs_TE = torch.tensor([[0.2], [0.5], [0.9], [0.5]])
    kept_TE = kept_map(asked_TE, probs_TE, capacity, policy)
    assert kept_TE[:, 0].nonzero().flatten().tolist() == kept


@POLICIES
@given(case=routing_cases())
def test_select_is_the_reference(policy, case: RoutingCase):
    map_TE, probs_TE, mask_T = case.tensors()
    selection = select(map_TE, probs_TE, capacity=case.capacity, policy=policy, mask_T=mask_T)
    expected = reference.select(
        case.map_TE, case.probs_TE, capacity=case.capacity, policy=policy, mask_T=case.mask_T
    )
    assert_same(selection.kept_TE, expected.kept_TE)
    assert_same(selection.probs_TE, expected.probs_TE)
    assert_same(selection.demand_E, expected.demand_E)


@POLICIES
@given(case=routing_cases())
def test_the_gradient_reaches_what_was_kept(policy, case: RoutingCase):
    map_TE, probs_TE, mask_T = case.tensors()
    probs_TE.requires_grad_()
    selection = select(map_TE, probs_TE, capacity=case.capacity, policy=policy, mask_T=mask_T)
    grad_TE = np.arange(1.0, map_TE.numel() + 1).reshape(map_TE.shape)
    selection.probs_TE.backward(torch.from_numpy(grad_TE))
    assert probs_TE.grad is not None
    assert_same(probs_TE.grad, reference.select_backward(selection.kept_TE.numpy(), grad_TE))


@POLICIES
@given(case=routing_cases())
def test_more_capacity_never_drops_more_and_enough_drops_nothing(policy, case: RoutingCase):
    map_TE, probs_TE, mask_T = case.tensors()

    def kept(capacity: int) -> torch.Tensor:
        chosen = select(map_TE, probs_TE, capacity=capacity, policy=policy, mask_T=mask_T)
        return chosen.kept_TE

    assert not (kept(case.capacity) & ~kept(case.capacity + 1)).any()
    asked_TE = map_TE if mask_T is None else map_TE & ~mask_T[:, None]
    assert torch.equal(kept(map_TE.shape[0]), asked_TE)
    demand_E = asked_TE.sum(0)
    assert torch.equal(kept(case.capacity).sum(0), demand_E.clamp(max=case.capacity))


@POLICIES
@given(case=routing_cases())
def test_probabilities_that_nobody_asked_about_are_not_read(policy, case: RoutingCase):
    map_TE, probs_TE, _ = case.tensors()
    clean = select(map_TE, probs_TE, capacity=case.capacity, policy=policy)
    probs_TE[~map_TE] = torch.nan
    poisoned = select(map_TE, probs_TE, capacity=case.capacity, policy=policy)
    assert torch.equal(clean.kept_TE, poisoned.kept_TE)
    assert torch.equal(clean.probs_TE, poisoned.probs_TE)


@POLICIES
def test_ties_keep_the_lowest_token_in_a_map_of_any_size(policy):
    # Where an unstable sort or top-k would show: thousands of equal probabilities.
    map_TE = torch.ones(4099, 3, dtype=torch.bool)
    selection = select(map_TE, torch.full((4099, 3), 0.125), capacity=1000, policy=policy)
    expected_T = torch.arange(4099) < 1000
    assert torch.equal(selection.kept_TE, expected_T[:, None].expand(-1, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_probabilities_keep_their_dtype(dtype):
    selection = select(torch.tensor([[True]]), torch.tensor([[0.3]], dtype=dtype), capacity=1)
    assert selection.probs_TE.dtype == dtype
    assert selection.probs_TE.item() == torch.tensor(0.3, dtype=dtype).item()


def test_an_unknown_policy_is_refused():
    map_TE = torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="policy='random' is not possible: choose one of probs"):
        select(map_TE, torch.ones(2, 2), capacity=1, policy="random")  # pyright: ignore
