"""Kernels of the plan against the plain torch that specifies them, bit by bit.

Without a GPU they run in Triton's interpreter, which shows their logic; with one, as they are.
"""

import pytest
import torch
from hypothesis import given

from padded_dispatch.kernels import plan
from padded_dispatch.ops.plan import packed_slots, plan_in_torch
from tests.support.device import equal, few, here, ints
from tests.support.routing_cases import RoutingCase, cases_with_pools, routing_cases


@pytest.mark.parametrize(
    ("pools", "slots", "choices", "kept", "unplaced"),
    [
        ((2, 2), [[0, -1], [1, 2], [3, -1]], [[0, 2], [3, 4]], [2, 2], [0, 0]),
        ((1, 3), [[0, -1], [1, 2], [-1, -1]], [[0, 2, 3]], [2, 1], [0, 1]),
    ],
)
def test_plan_examples(pools, slots, choices, kept, unplaced):
    kept_TE = here([[True, False], [True, True], [False, True]])
    slot_of_TK, expert_of_TK, choice_of_slot_GP, kept_E, unplaced_E = plan.plan(kept_TE, 2, *pools)
    assert slot_of_TK.tolist() == slots
    assert expert_of_TK.tolist() == [[0, -1], [0, 1], [1 if pools[0] == 2 else -1, -1]]
    assert choice_of_slot_GP.tolist() == choices
    assert (kept_E.tolist(), unplaced_E.tolist()) == (kept, unplaced)


def test_packed_slots_example():
    packed_TK = plan.packed_slots(ints([0, 2], [3, -1]), ints(1, 3), 2)
    assert packed_TK.tolist() == [[0, 1], [2, -1]]


@few
@given(drawn=cases_with_pools())
def test_plan(drawn: tuple[RoutingCase, int]):
    case, shared = drawn
    map_TE = torch.from_numpy(case.map_TE)
    pools = map_TE.shape[1] // shared, case.capacity
    got = plan.plan(here(map_TE), case.top_k, *pools)
    equal(*zip(got, plan_in_torch(map_TE, case.top_k, *pools), strict=True))


@few
@given(case=routing_cases())
def test_packed_slots(case: RoutingCase):
    map_TE = torch.from_numpy(case.map_TE)
    num_experts = map_TE.shape[1]
    slots, _, _, kept_E, _ = plan_in_torch(map_TE, case.top_k, num_experts, case.capacity)
    offsets_E = kept_E.cumsum(0, dtype=torch.int32)
    packed_TK = plan.packed_slots(here(slots), here(offsets_E), case.capacity)
    equal((packed_TK, packed_slots(slots, offsets_E, case.capacity)))


@pytest.mark.parametrize("pools", [(4, 140), (2, 290), (1, 590), (1, 1)])
def test_more_tokens_than_one_block(monkeypatch, pools):
    monkeypatch.setattr(plan, "_BLOCK", 128)
    map_TE = torch.rand(190, 4) < 0.7
    expected = plan_in_torch(map_TE, 2, *pools)
    equal(*zip(plan.plan(here(map_TE), 2, *pools), expected, strict=True))
    if pools[0] == 4:
        slots, offsets_E = expected[0], expected[3].cumsum(0, dtype=torch.int32)
        packed_TK = plan.packed_slots(here(slots), here(offsets_E), 140)
        equal((packed_TK, packed_slots(slots, offsets_E, 140)))
