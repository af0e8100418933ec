"""Plans: against the reference, and what must hold whatever the map."""

import torch
from hypothesis import given
from torch.library import opcheck

from padded_dispatch import reference
from padded_dispatch.ops.plan import make_plan, packed_slots, plan_in_torch
from padded_dispatch.utils.routings import routing_map
from tests.support.routing_cases import RoutingCase, assert_same, routing_cases


def test_the_example_of_the_docstring():
    kept_TE = torch.tensor([[1, 0], [1, 1], [0, 1]], dtype=torch.bool)
    slot_of_TK, choice_of_slot_EC, kept_E, unplaced_E = plan_in_torch(kept_TE, 2, 2)
    assert slot_of_TK.tolist() == [[0, -1], [1, 2], [3, -1]]
    assert choice_of_slot_EC.tolist() == [[0, 2], [3, 4]]
    assert kept_E.tolist() == [2, 2]
    assert unplaced_E.tolist() == [0, 0]


def test_the_example_of_packed_slots():
    slot_of_TK = torch.tensor([[0, 2], [3, -1]], dtype=torch.int32)
    offsets_E = torch.tensor([1, 3], dtype=torch.int32)
    assert packed_slots(slot_of_TK, offsets_E, 2).tolist() == [[0, 1], [2, -1]]


@given(case=routing_cases())
def test_plan_is_the_reference(case: RoutingCase):
    """Also for maps that were not cut down: rows with more than K, experts with more than C."""
    plan = make_plan(torch.from_numpy(case.map_TE), top_k=case.top_k, capacity=case.capacity)
    expected = reference.plan(case.map_TE, top_k=case.top_k, capacity=case.capacity)
    assert_same(plan.slot_of_TK, expected.slot_of_TK)
    assert_same(plan.choice_of_slot_EC, expected.choice_of_slot_EC)
    assert_same(plan.kept_E, expected.kept_E)
    assert plan.unplaced_E.dtype == torch.int32
    assert plan.unplaced_E.sum().item() == expected.num_unplaced
    assert plan.capacity == case.capacity


@given(case=routing_cases())
def test_every_row_has_one_slot_and_no_slot_has_two(case: RoutingCase):
    map_TE = torch.from_numpy(case.map_TE)
    num_tokens, num_experts = map_TE.shape
    plan = make_plan(map_TE, top_k=case.top_k, capacity=case.capacity)
    # Shapes depend on sizes alone.
    assert plan.slot_of_TK.shape == (num_tokens, case.top_k)
    assert plan.choice_of_slot_EC.shape == (num_experts, case.capacity)
    slots = plan.slot_of_TK[plan.slot_of_TK >= 0]
    assert slots.unique().numel() == slots.numel() == plan.kept_E.sum()
    assert (slots < num_experts * case.capacity).all()
    assert slots.numel() + plan.unplaced_E.sum() == map_TE.sum()
    # The two maps are each other's inverse.
    choices = plan.choice_of_slot_EC.flatten()
    assert (choices >= 0).sum() == slots.numel()
    for choice, slot in enumerate(plan.slot_of_TK.flatten().tolist()):
        if slot >= 0:
            assert choices[slot] == choice


@given(case=routing_cases())
def test_enough_room_keeps_every_row_of_every_expert(case: RoutingCase):
    map_TE = torch.from_numpy(case.map_TE)
    plan = make_plan(map_TE, top_k=map_TE.shape[1], capacity=case.capacity)
    assert torch.equal(plan.kept_E, map_TE.sum(0).clamp(max=case.capacity).int())
    roomy = make_plan(map_TE, top_k=map_TE.shape[1], capacity=map_TE.shape[0])
    assert roomy.unplaced_E.sum().item() == 0


def test_a_large_map_is_the_reference():
    """Beyond what property tests reach: counts past one byte, sizes off every power of two."""
    map_TE = routing_map(1031, 67, 7, skew="hot", seed=5)
    plan = make_plan(torch.from_numpy(map_TE), top_k=7, capacity=301)
    expected = reference.plan(map_TE, top_k=7, capacity=301)
    assert plan.unplaced_E.sum().item() == 1031 - 301
    assert_same(plan.slot_of_TK, expected.slot_of_TK)
    assert_same(plan.choice_of_slot_EC, expected.choice_of_slot_EC)


def test_all_are_sound_custom_ops():
    map_TE = torch.ones(7, 5, dtype=torch.bool)
    opcheck(torch.ops.padded_dispatch.plan, (map_TE, 3, 2))
    plan = make_plan(map_TE, top_k=3, capacity=2)
    offsets_E = plan.kept_E.cumsum(0, dtype=torch.int32)
    opcheck(torch.ops.padded_dispatch.packed_slots, (plan.slot_of_TK, offsets_E, 2))
