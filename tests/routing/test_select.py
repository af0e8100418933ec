"""Selection: against the reference, and what must hold whatever the routing."""

import numpy as np
import pytest
import torch
from hypothesis import given

from padded_dispatch.config import POLICIES as ALL_POLICIES
from padded_dispatch.routing import select as module
from padded_dispatch.routing.select import select
from tests.support import reference
from tests.support.routings import RoutingCase, assert_same, routing_cases

POLICIES = pytest.mark.parametrize("policy", ALL_POLICIES)


@POLICIES
@given(case=routing_cases())
def test_select_is_the_reference(policy, case: RoutingCase):
    given = dict(capacity=case.capacity, policy=policy)
    map_TE, probs_TE = case.tensors()
    selection = select(map_TE, probs_TE.requires_grad_(), **given)
    expected = reference.select(case.map_TE, case.probs_TE, **given)
    assert_same(selection.kept_TE, expected.kept_TE)
    if case.capacity < len(map_TE):
        assert_same(selection.demand_E, expected.demand_E)
    same = case.capacity >= len(map_TE)
    assert_same(selection.probs_TE, case.probs_TE if same else expected.probs_TE)
    assert selection.capacity == case.capacity
    # The gradient reaches what was kept, and nothing else.
    selection.probs_TE.sum().backward()
    assert_same(probs_TE.grad, np.ones_like(case.probs_TE) if same else expected.kept_TE * 1.0)


@pytest.mark.parametrize("capacity", [6, 16])
def test_nothing_is_selected_where_nothing_can_be_dropped(monkeypatch, capacity):
    map_TE = torch.tensor([[True, True, False, False]] * 6)
    monkeypatch.setattr(module, "kept_map_in_torch", None)
    probs_TE = torch.ones(6, 4)
    selection = select(map_TE, probs_TE, capacity=capacity)
    assert selection.kept_TE is map_TE
    assert selection.probs_TE is probs_TE
    assert selection.demand_E is None


def test_an_unknown_policy_is_refused():
    arguments = torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"^policy must be one of probs, position, got 'rand'$"):
        select(*arguments, capacity=1, policy="rand")  # pyright: ignore
