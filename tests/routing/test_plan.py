"""Plans: against the reference, and what must hold whatever the map."""

import pytest
import torch
from hypothesis import given
from torch.library import opcheck

from padded_dispatch.routing.plan import make_plan, packed_slots, plan_in_torch
from tests.support import reference
from tests.support.pools import pools
from tests.support.routing_cases import RoutingCase, assert_same, cases_with_pools
from tests.support.routings import routing_map

FIELDS = ("slot_of_TK", "expert_of_TK", "choice_of_slot_GP", "kept_E")


@pytest.mark.parametrize(
    ("slots", "offsets", "capacity", "packed"),
    [
        ([[0, 2], [3, -1]], [1, 3], 2, [[0, 1], [2, -1]]),  # The docstring's example.
        ([[0, 1], [-1, -1]], [1, 2], 1, [[0, 1], [-1, -1]]),  # A first expert with one slot.
    ],
)
def test_packed_slots(slots, offsets, capacity, packed):
    slot_of_TK, offsets_E = (torch.tensor(one, dtype=torch.int32) for one in (slots, offsets))
    assert packed_slots(slot_of_TK, offsets_E, capacity).tolist() == packed


@given(drawn=cases_with_pools())
def test_plan_is_the_reference(drawn: tuple[RoutingCase, int]):
    """Also for maps that were not cut down: rows with more than K, pools with more than P."""
    case, shared = drawn
    map_TE = torch.from_numpy(case.map_TE)
    sizes = pools(case.map_TE.shape[1], case.capacity, shared)
    plan = make_plan(map_TE, top_k=case.top_k, sizes=sizes)
    expected = reference.plan(case.map_TE, top_k=case.top_k, sizes=sizes)
    for name in FIELDS:
        assert_same(getattr(plan, name), getattr(expected, name))
    assert plan.unplaced_E.dtype == torch.int32
    assert plan.unplaced_E.sum().item() == expected.num_unplaced


@pytest.mark.parametrize(("num_pools", "slots"), [(67, 301), (1, 5003)])
def test_a_large_map_is_the_reference(num_pools: int, slots: int):
    """Beyond what property tests reach: counts past one byte, sizes off every power of two."""
    map_TE = routing_map(1031, 67, 7, skew="hot", seed=5)
    sizes = pools(67, slots, 67 // num_pools)
    plan = make_plan(torch.from_numpy(map_TE), top_k=7, sizes=sizes)
    expected = reference.plan(map_TE, top_k=7, sizes=sizes)
    lost = 1031 - 301 if num_pools == 67 else 7 * 1031 - 5003
    assert plan.unplaced_E.sum().item() == lost
    for name in FIELDS:
        assert_same(getattr(plan, name), getattr(expected, name))


def test_both_are_sound_custom_ops():
    map_TE = torch.ones(7, 6, dtype=torch.bool)
    opcheck(torch.ops.padded_dispatch.plan, (map_TE, 3, 6, 2))
    opcheck(torch.ops.padded_dispatch.plan, (map_TE, 3, 2, 4))
    slot_of_TK, _, _, kept_E, _ = plan_in_torch(map_TE, 3, 6, 2)
    offsets_E = kept_E.cumsum(0, dtype=torch.int32)
    opcheck(torch.ops.padded_dispatch.packed_slots, (slot_of_TK, offsets_E, 2))
