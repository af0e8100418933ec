"""Selections and plans: against the reference, and what must hold whatever the routing."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given

from padded_dispatch import routing
from padded_dispatch.config import POLICIES as ALL_POLICIES
from padded_dispatch.routing import choice_probs, make_plan, select
from tests.support import reference
from tests.support.routings import RoutingCase, assert_same, routing_cases, routing_map

POLICIES = pytest.mark.parametrize("policy", ALL_POLICIES)
# Beyond what hypothesis draws: counts past one byte, sizes off every power of two.
LARGE_TE = routing_map(1031, 67, 7, skew="hot", seed=5)
LARGE = RoutingCase(map_TE=LARGE_TE, probs_TE=LARGE_TE, top_k=6, capacity=1)


@pytest.mark.parametrize("number", [0, -1, 1.5, True, None])
def test_what_is_no_number_of_slots_or_choices_is_refused(number):
    map_TE = torch.ones(2, 2, dtype=torch.bool)
    rule = re.escape(f"must be an int of at least 1, below 2**31, got {number}")
    with pytest.raises(ValueError, match=f"^capacity {rule}$"):
        select(map_TE, map_TE.float(), capacity=number)
    with pytest.raises(ValueError, match=f"^top_k {rule}$"):
        make_plan(map_TE, top_k=number)


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (torch.ones(2, 2), "((2, 2), torch.float32, 'cpu')"),
        (torch.ones(2).bool(), "((2,), torch.bool, 'cpu')"),
        (torch.ones(2, 2).bool().to_sparse(), "'torch.sparse_coo tensor'"),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "'nested tensor'"),
        ([[True]], "'list'"),
        (None, "'NoneType'"),
    ],
    ids=["floats", "vector", "sparse", "nested", "list", "none"],
)
def test_what_is_no_map_and_probabilities_of_another_shape_are_refused(given, got):
    """A kernel would read the first bytes of floats as a map."""
    map_TE = torch.ones(2, 2, dtype=torch.bool)
    words = re.escape(f"got {got}")
    for call in (
        partial(select, probs_TE=torch.ones(2, 2), capacity=1),
        partial(make_plan, top_k=1),
    ):
        with pytest.raises(ValueError, match=rf"^map_TE must be .* torch\.bool, {words}; use \.b"):
            call(given)
    if got != "((2, 2), torch.float32, 'cpu')":  # Those are probabilities.
        with pytest.raises(ValueError, match=rf"^probs_TE must be a dense floating .* {words}$"):
            select(map_TE, given, capacity=1)


@POLICIES
@given(case=routing_cases())
def test_select_is_the_reference(policy, case: RoutingCase):
    given = dict(capacity=case.capacity, policy=policy)
    map_TE, probs_TE = case.tensors()
    same = case.capacity >= len(map_TE)
    if not same:  # What nobody asked for reaches nothing; the case changes, too.
        probs_TE[~map_TE] = torch.nan
    selection = select(map_TE, probs_TE.requires_grad_(), **given)
    kept_TE = reference.select(case.map_TE, case.probs_TE, **given)
    assert_same(selection.kept_TE, kept_TE)
    if not same:
        assert_same(selection.demand_E, case.map_TE.sum(0, dtype=np.int32))
    assert_same(selection.probs_TE, case.probs_TE if same else np.where(kept_TE, case.probs_TE, 0))
    assert selection.capacity == case.capacity
    # The gradient reaches what was kept, and nothing else.
    selection.probs_TE.sum().backward()
    assert_same(probs_TE.grad, np.ones_like(case.probs_TE) if same else kept_TE * 1.0)


@pytest.mark.parametrize("capacity", [6, 16])
def test_nothing_is_selected_where_nothing_can_be_dropped(monkeypatch, capacity):
    map_TE = torch.tensor([[True, True, False, False]] * 6)
    monkeypatch.setattr(routing, "kept_map_in_torch", None)
    probs_TE = torch.ones(6, 4)
    selection = select(map_TE, probs_TE, capacity=capacity)
    assert selection.kept_TE is map_TE
    assert selection.probs_TE is probs_TE
    assert selection.demand_E is None


def test_an_unknown_policy_is_refused():
    arguments = torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"^policy must be one of probs, position, got 'rand'$"):
        select(*arguments, capacity=1, policy="rand")  # pyright: ignore


@given(case=routing_cases())
@example(case=LARGE)
def test_plan_is_the_reference(case: RoutingCase):
    """Also for maps that were not cut down, whose rows may have more than K."""
    plan = make_plan(torch.from_numpy(case.map_TE), top_k=case.top_k)
    expected = reference.plan(case.map_TE, top_k=case.top_k)
    for name, tensor in vars(plan).items():
        assert_same(tensor, expected[name])
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
    assert probs_TE.grad.dtype == dtype
    assert probs_TE.grad.tolist() == [[1, 0, 2], [0, 3, 0], [0, 0, 0]]
