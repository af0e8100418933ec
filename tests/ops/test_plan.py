"""Plans: against the reference, and what must hold whatever the map."""

import pytest
import torch
from hypothesis import given
from torch.library import opcheck

from padded_dispatch.ops.plan import make_plan, packed_slots, plan_in_torch
from tests.support import reference
from tests.support.pools import pools
from tests.support.routing_cases import (
    RoutingCase,
    assert_same,
    cases_with_pools,
    routing_cases,
)
from tests.support.routings import routing_map


def test_the_examples_of_the_docstring():
    kept_TE = torch.tensor([[1, 0], [1, 1], [0, 1]], dtype=torch.bool)
    slot_of_TK, expert_of_TK, choice_of_slot_GP, kept_E, unplaced_E = plan_in_torch(
        kept_TE, 2, 2, 2
    )
    assert slot_of_TK.tolist() == [[0, -1], [1, 2], [3, -1]]
    assert expert_of_TK.tolist() == [[0, -1], [0, 1], [1, -1]]
    assert choice_of_slot_GP.tolist() == [[0, 2], [3, 4]]
    assert kept_E.tolist() == [2, 2]
    assert unplaced_E.tolist() == [0, 0]
    slot_of_TK, expert_of_TK, choice_of_slot_GP, kept_E, unplaced_E = plan_in_torch(
        kept_TE, 2, 1, 3
    )
    assert slot_of_TK.tolist() == [[0, -1], [1, 2], [-1, -1]]
    assert expert_of_TK.tolist() == [[0, -1], [0, 1], [-1, -1]]
    assert choice_of_slot_GP.tolist() == [[0, 2, 3]]
    assert kept_E.tolist() == [2, 1]
    assert unplaced_E.tolist() == [0, 1]


def test_the_example_of_packed_slots():
    slot_of_TK = torch.tensor([[0, 2], [3, -1]], dtype=torch.int32)
    offsets_E = torch.tensor([1, 3], dtype=torch.int32)
    assert packed_slots(slot_of_TK, offsets_E, 2).tolist() == [[0, 1], [2, -1]]


def test_the_only_slot_of_the_first_expert_is_its_own():
    slot_of_TK, offsets_E = torch.tensor([[0, 1], [-1, -1]]), torch.tensor([1, 2])
    assert packed_slots(slot_of_TK.int(), offsets_E.int(), 1).tolist() == [[0, 1], [-1, -1]]


@given(drawn=cases_with_pools())
def test_plan_is_the_reference(drawn: tuple[RoutingCase, int]):
    """Also for maps that were not cut down: rows with more than K, pools with more than P."""
    case, shared = drawn
    sizes = pools(case.map_TE.shape[1], case.capacity, shared)
    kept_SE = torch.zeros(1, dtype=torch.int32)
    map_TE = torch.from_numpy(case.map_TE)
    plan = make_plan(map_TE, top_k=case.top_k, sizes=sizes, kept_SE=kept_SE)
    expected = reference.plan(case.map_TE, top_k=case.top_k, sizes=sizes)
    assert_same(plan.slot_of_TK, expected.slot_of_TK)
    assert_same(plan.expert_of_TK, expected.expert_of_TK)
    assert_same(plan.choice_of_slot_GP, expected.choice_of_slot_GP)
    assert_same(plan.kept_E, expected.kept_E)
    assert plan.unplaced_E.dtype == torch.int32
    assert plan.unplaced_E.sum().item() == expected.num_unplaced
    assert plan.kept_SE is kept_SE


@given(drawn=cases_with_pools())
def test_every_row_has_one_slot_and_no_slot_has_two(drawn: tuple[RoutingCase, int]):
    case, shared = drawn
    map_TE = torch.from_numpy(case.map_TE)
    num_tokens = map_TE.shape[0]
    sizes = pools(case.map_TE.shape[1], case.capacity, shared)
    plan = make_plan(map_TE, top_k=case.top_k, sizes=sizes)
    # Shapes depend on sizes alone.
    assert plan.slot_of_TK.shape == plan.expert_of_TK.shape == (num_tokens, case.top_k)
    assert plan.choice_of_slot_GP.shape == (sizes.num_pools, case.capacity)
    slots = plan.slot_of_TK[plan.slot_of_TK >= 0]
    assert slots.unique().numel() == slots.numel() == plan.kept_E.sum()
    assert (slots < sizes.num_pools * case.capacity).all()
    assert slots.numel() + plan.unplaced_E.sum() == map_TE.sum()
    # The two maps are each other's inverse.
    choices = plan.choice_of_slot_GP.flatten()
    assert (choices >= 0).sum() == slots.numel()
    for choice, slot in enumerate(plan.slot_of_TK.flatten().tolist()):
        if slot >= 0:
            assert choices[slot] == choice
    # A pool has no gaps, and as many rows as ask for it, up to its slots.
    asked_G = (map_TE & (map_TE.cumsum(1) <= case.top_k)).sum(0).view(sizes.num_pools, -1).sum(1)
    kept_G = asked_G.clamp(max=case.capacity)
    assert torch.equal(plan.kept_E.view(sizes.num_pools, -1).sum(1), kept_G)
    assert torch.equal(plan.choice_of_slot_GP >= 0, torch.arange(case.capacity) < kept_G[:, None])


@given(case=routing_cases())
def test_enough_room_keeps_every_row_of_every_expert(case: RoutingCase):
    map_TE = torch.from_numpy(case.map_TE)
    plan = make_plan(map_TE, top_k=map_TE.shape[1], sizes=pools(map_TE.shape[1], case.capacity))
    assert torch.equal(plan.kept_E, map_TE.sum(0).clamp(max=case.capacity).int())
    roomy = make_plan(map_TE, top_k=map_TE.shape[1], sizes=pools(*map_TE.shape[::-1]))
    assert roomy.unplaced_E.sum().item() == 0


@pytest.mark.parametrize(("num_pools", "slots"), [(67, 301), (1, 5003)])
def test_a_large_map_is_the_reference(num_pools: int, slots: int):
    """Beyond what property tests reach: counts past one byte, sizes off every power of two."""
    map_TE = routing_map(1031, 67, 7, skew="hot", seed=5)
    sizes = pools(67, slots, 67 // num_pools)
    plan = make_plan(torch.from_numpy(map_TE), top_k=7, sizes=sizes)
    expected = reference.plan(map_TE, top_k=7, sizes=sizes)
    lost = 1031 - 301 if num_pools == 67 else 7 * 1031 - 5003
    assert plan.unplaced_E.sum().item() == lost
    assert_same(plan.slot_of_TK, expected.slot_of_TK)
    assert_same(plan.choice_of_slot_GP, expected.choice_of_slot_GP)


def test_all_are_sound_custom_ops():
    map_TE = torch.ones(7, 6, dtype=torch.bool)
    opcheck(torch.ops.padded_dispatch.plan, (map_TE, 3, 6, 2))
    opcheck(torch.ops.padded_dispatch.plan, (map_TE, 3, 2, 4))
    plan = make_plan(map_TE, top_k=3, sizes=pools(6, 2))
    offsets_E = plan.kept_E.cumsum(0, dtype=torch.int32)
    opcheck(torch.ops.padded_dispatch.packed_slots, (plan.slot_of_TK, offsets_E, 2))
