"""Kernels of the plan against the plain torch that specifies them, bit by bit.

Without a GPU they run in Triton's interpreter, which shows their logic; with one, as they are.
"""

import torch
from hypothesis import given

from padded_dispatch.kernels import plan
from padded_dispatch.ops.plan import packed_slots, plan_in_torch
from tests.support.device import equal, few, here, ints
from tests.support.routing_cases import RoutingCase, routing_cases


def test_plan_example():
    kept_TE = here([[True, False], [True, True], [False, True]])
    slot_of_TK, choice_of_slot_EC, kept_E, unplaced_E = plan.plan(kept_TE, 2, 2)
    assert slot_of_TK.tolist() == [[0, -1], [1, 2], [3, -1]]
    assert choice_of_slot_EC.tolist() == [[0, 2], [3, 4]]
    assert (kept_E.tolist(), unplaced_E.tolist()) == ([2, 2], [0, 0])


def test_packed_slots_example():
    packed_TK = plan.packed_slots(ints([0, 2], [3, -1]), ints(1, 3), 2)
    assert packed_TK.tolist() == [[0, 1], [2, -1]]


@few
@given(case=routing_cases())
def test_plan(case: RoutingCase):
    map_TE = torch.from_numpy(case.map_TE)
    got = plan.plan(here(map_TE), case.top_k, case.capacity)
    equal(*zip(got, plan_in_torch(map_TE, case.top_k, case.capacity), strict=True))


@few
@given(case=routing_cases())
def test_packed_slots(case: RoutingCase):
    map_TE = torch.from_numpy(case.map_TE)
    slots, _, kept_E, _ = plan_in_torch(map_TE, case.top_k, case.capacity)
    offsets_E = kept_E.cumsum(0, dtype=torch.int32)
    packed_TK = plan.packed_slots(here(slots), here(offsets_E), case.capacity)
    equal((packed_TK, packed_slots(slots, offsets_E, case.capacity)))


def test_more_tokens_than_one_block():
    map_TE = torch.rand(1500, 3) < 0.7
    expected = plan_in_torch(map_TE, 2, 1100)
    equal(*zip(plan.plan(here(map_TE), 2, 1100), expected, strict=True))
    slots, offsets_E = expected[0], expected[2].cumsum(0, dtype=torch.int32)
    packed_TK = plan.packed_slots(here(slots), here(offsets_E), 1100)
    equal((packed_TK, packed_slots(slots, offsets_E, 1100)))
