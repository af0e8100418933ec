"""Kernels of the plan against the plain torch that specifies them, bit by bit.

Without a GPU they run in Triton's interpreter, which shows their logic; with one, as they are.
"""

import pytest
import torch
from hypothesis import given
from torch import Tensor

from padded_dispatch.kernels import plan
from padded_dispatch.routing.plan import packed_slots, plan_in_torch
from tests.support.device import equal, few, here
from tests.support.routing_cases import RoutingCase, cases_with_pools

EXAMPLE_TE = torch.tensor([[True, False], [True, True], [False, True]])


@pytest.mark.parametrize("run", [plan.plan, plan_in_torch])
@pytest.mark.parametrize(
    ("pools", "slots", "choices", "kept", "unplaced"),
    [
        ((2, 2), [[0, -1], [1, 2], [3, -1]], [[0, 2], [3, 4]], [2, 2], [0, 0]),
        ((1, 3), [[0, -1], [1, 2], [-1, -1]], [[0, 2, 3]], [2, 1], [0, 1]),
    ],
)
def test_plan_examples(pools, slots, choices, kept, unplaced, run):
    slot_of_TK, expert_of_TK, choice_of_slot_GP, kept_E, unplaced_E = run(
        here(EXAMPLE_TE), 2, *pools
    )
    assert slot_of_TK.tolist() == slots
    assert expert_of_TK.tolist() == [[0, -1], [0, 1], [1 if pools[0] == 2 else -1, -1]]
    assert choice_of_slot_GP.tolist() == choices
    assert (kept_E.tolist(), unplaced_E.tolist()) == (kept, unplaced)


def assert_are_torchs(map_TE: Tensor, top_k: int, num_pools: int, slots: int) -> None:
    """Compare the plan, and the packed rows of its slots where each expert has a pool."""
    expected = plan_in_torch(map_TE, top_k, num_pools, slots)
    equal(*zip(plan.plan(here(map_TE), top_k, num_pools, slots), expected, strict=True))
    if num_pools == map_TE.shape[1]:
        slot_of_TK, offsets_E = expected[0], expected[3].cumsum(0, dtype=torch.int32)
        packed_TK = plan.packed_slots(here(slot_of_TK), here(offsets_E), slots)
        equal((packed_TK, packed_slots(slot_of_TK, offsets_E, slots)))


@few
@given(drawn=cases_with_pools())
def test_plan(drawn: tuple[RoutingCase, int]):
    case, shared = drawn
    num_pools = case.map_TE.shape[1] // shared
    assert_are_torchs(torch.from_numpy(case.map_TE), case.top_k, num_pools, case.capacity)


@pytest.mark.parametrize("pools", [(4, 140), (2, 290), (1, 590), (1, 1)])
def test_more_tokens_than_one_block(monkeypatch, pools):
    monkeypatch.setattr(plan, "_BLOCK", 128)
    map_TE = torch.rand(190, 4, generator=torch.Generator().manual_seed(0)) < 0.7
    assert_are_torchs(map_TE, 2, *pools)
