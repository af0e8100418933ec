"""Kernels against the plain torch that specifies them, bit by bit.

Without a GPU they run in Triton's interpreter, which shows their logic; with one, as they are.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from padded_dispatch.config import POLICIES
from padded_dispatch.kernels import plan, rows, select
from padded_dispatch.ops import rows as ops
from padded_dispatch.ops.plan import packed_slots, plan_in_torch
from padded_dispatch.ops.select import choice_ranks_in_torch, kept_map_in_torch
from padded_dispatch.utils.routings import routing_map
from tests.support.routing_cases import RoutingCase, routing_cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

few = settings(max_examples=30)  # The interpreter takes up to a tenth of a second for one.


def here(array) -> Tensor:
    return torch.as_tensor(array).to(DEVICE)


def ints(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def equal(*pairs: tuple[Tensor, Tensor]) -> None:
    for got, expected in pairs:
        assert got.dtype == expected.dtype and got.shape == expected.shape
        assert torch.equal(got.cpu(), expected.cpu())


# The examples of the docstrings.


def test_select_example():
    asked_TE = here([[True], [True], [False], [True]])
    probs_TE = here([[0.2], [0.5], [0.9], [0.5]])
    for capacity, policy, expected in (
        (2, "probs", [False, True, False, True]),
        (2, "position", [True, True, False, False]),
        (1, "probs", [False, True, False, False]),
        (1, "position", [True, False, False, False]),
    ):
        kept_TE, demand_E = select.kept_map(asked_TE, probs_TE, capacity, policy)
        assert kept_TE.flatten().tolist() == expected
        assert demand_E.tolist() == [3]


def test_choice_ranks_example():
    asked_TE = here([[True, False, True, True]])
    ranks_TE = select.choice_ranks(asked_TE, here([[0.2, 0.9, 0.4, 0.2]]))
    assert ranks_TE[asked_TE].tolist() == [1, 0, 2]


def test_plan_example():
    kept_TE = here([[True, False], [True, True], [False, True]])
    slot_of_TK, choice_of_slot_EC, kept_E, unplaced_E = plan.plan(kept_TE, 2, 2)
    assert slot_of_TK.tolist() == [[0, -1], [1, 2], [3, -1]]
    assert choice_of_slot_EC.tolist() == [[0, 2], [3, 4]]
    assert (kept_E.tolist(), unplaced_E.tolist()) == ([2, 2], [0, 0])


def test_packed_slots_example():
    packed_TK = plan.packed_slots(ints([0, 2], [3, -1]), ints(1, 3), 2)
    assert packed_TK.tolist() == [[0, 1], [2, -1]]


def test_spread_rows_example():
    tokens_TD = here([[1.0, 2.0], [3.0, 4.0]])
    rows_ND = rows.spread_rows(tokens_TD, ints([2, -1], [0, 3]), ints(2, -1, 0, 3))
    assert rows_ND.tolist() == [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]


def test_sum_rows_example():
    rows_ND = here([[1.0], [2.0], [4.0]])
    assert rows.sum_rows(rows_ND, ints([2, -1], [0, 1])).tolist() == [[4.0], [3.0]]


def test_gather_meta_example():
    probs_TE = here([[0.9, 0.1], [0.8, 0.2]])
    meta_EC1 = rows.gather_meta(probs_TE, ints([0, 1], [-1, -1]), ints(2, 0), 1)
    equal((meta_EC1, torch.tensor([[0.9, 0.8, 2.0], [0.0, 0.0, 0.0]])))


def test_scatter_meta_example():
    meta_EC1 = here([[0.5, 1.0], [0.7, 1.0]])
    equal((rows.scatter_meta(meta_EC1, ints([1], [-1])), torch.tensor([[0.0, 0.7], [0.0, 0.0]])))


def test_pack_rows_example():
    slots_MCD = here([[[1.0], [9.0]], [[9.0], [9.0]], [[2.0], [3.0]], [[4.0], [9.0]]])
    packed_ND = rows.pack_rows(slots_MCD, ints([1, 3], [3, 4]))
    assert packed_ND.shape == (8, 1)
    assert packed_ND[:4].flatten().tolist() == [1.0, 2.0, 3.0, 4.0]


def test_unpack_rows_example():
    packed_ND = here([[1.0], [2.0], [3.0], [4.0], [9.0], [9.0], [9.0], [9.0]])
    slots_MCD = rows.unpack_rows(packed_ND, ints([1, 3], [3, 4]))
    assert slots_MCD.squeeze(2).tolist() == [[1.0, 0.0], [0.0, 0.0], [2.0, 3.0], [4.0, 0.0]]


# Any routing.


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@few
@given(case=routing_cases(), draw=st.integers(-(2**63), 2**63 - 1), data=st.data())
def test_select(dtype: torch.dtype, policy, case: RoutingCase, draw: int, data: st.DataObject):
    # Negative, zero of either sign, and equal scores: quarters from -1/2 on.
    probs_TE = (torch.from_numpy(case.probs_TE) - 0.5).to(dtype)
    probs_TE = torch.where(probs_TE == 0, torch.copysign(probs_TE, torch.randn(())), probs_TE)
    asked_TE = torch.from_numpy(case.map_TE)
    probs_TE[~asked_TE] = torch.nan
    levels = arrays(np.uint8, case.map_TE.shape, elements=st.integers(0, 3))
    level_TE = data.draw(st.none() | levels | levels.map(lambda level_TE: level_TE[:, :1]))
    level_TE = None if level_TE is None else torch.from_numpy(level_TE)
    number = torch.tensor(draw)
    kept_TE, demand_E = select.kept_map(
        here(asked_TE),
        here(probs_TE),
        case.capacity,
        policy,
        None if level_TE is None else here(level_TE),
        here(number),
    )
    expected_TE, _ = kept_map_in_torch(asked_TE, probs_TE, case.capacity, policy, level_TE, number)
    equal((kept_TE, expected_TE), (demand_E, asked_TE.sum(0, dtype=torch.int32)))


@given(case=routing_cases())
def test_choice_ranks(case: RoutingCase):
    asked_TE, probs_TE = torch.from_numpy(case.map_TE), torch.from_numpy(case.probs_TE)
    probs_TE[~asked_TE] = torch.nan
    ranks_TE = select.choice_ranks(here(asked_TE), here(probs_TE))
    equal((ranks_TE[here(asked_TE)], choice_ranks_in_torch(asked_TE, probs_TE)[asked_TE]))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("skew", ["uniform", "same", "none"])
def test_select_of_many_tokens_in_odd_sizes(policy, skew):
    """More tokens than one warp of a program holds, more than one block of ranks, three warps."""
    map_TE = torch.from_numpy(routing_map(1027, 13, 3, skew=skew))
    probs_TE = torch.rand(1027, 13).mul(8).round()
    draw = torch.tensor(5)
    for level_TE in (None, (torch.arange(1027) % 3 == 0)[:, None].to(torch.uint8)):
        kept_TE, demand_E = select.kept_map(
            here(map_TE),
            here(probs_TE),
            100,
            policy,
            None if level_TE is None else here(level_TE),
            here(draw),
        )
        expected_TE, _ = kept_map_in_torch(map_TE, probs_TE, 100, policy, level_TE, draw)
        equal((kept_TE, expected_TE), (demand_E, map_TE.sum(0, dtype=torch.int32)))


@few
@given(case=routing_cases())
def test_plan(case: RoutingCase):
    map_TE = torch.from_numpy(case.map_TE)
    got = plan.plan(here(map_TE), case.top_k, case.capacity)
    equal(*zip(got, plan_in_torch(map_TE, case.top_k, case.capacity), strict=True))


@few
@given(case=routing_cases())
def test_moves_and_sums(case: RoutingCase):
    """All that moves, by the maps of one plan; an odd width, rows with garbage where empty."""
    map_TE = torch.from_numpy(case.map_TE)
    slots, choices, kept_E, _ = plan_in_torch(map_TE, case.top_k, case.capacity)
    tokens_TD = torch.randn(map_TE.shape[0], 19)
    rows_ECD = torch.randn(*choices.shape, 19)
    rows_ECD[choices < 0] = torch.nan
    unwritten_ECD = rows.spread_rows(here(tokens_TD), here(slots), here(choices), zeros=False)
    expected_ECD = ops._gather(tokens_TD, slots, choices, True)
    equal((unwritten_ECD[here(choices >= 0)], expected_ECD[choices >= 0]))
    meta_EC1 = torch.randn(choices.shape[0], choices.shape[1] + 1)
    probs_TE = torch.from_numpy(case.probs_TE).float()
    offsets_E1 = ops.running_offsets(kept_E[None])
    equal(
        (
            plan.packed_slots(here(slots), here(offsets_E1), case.capacity),
            packed_slots(slots, offsets_E1, case.capacity),
        ),
        (
            rows.spread_rows(here(tokens_TD), here(slots), here(choices)),
            ops._gather(tokens_TD, slots, choices, True),
        ),
        (
            rows.sum_rows(here(rows_ECD).flatten(0, 1), here(slots)),
            ops._combine(rows_ECD, slots, choices, True),
        ),
        (
            rows.gather_meta(here(probs_TE), here(choices), here(kept_E), case.top_k),
            ops._gather_meta(probs_TE, slots, choices, kept_E),
        ),
        (
            rows.scatter_meta(here(meta_EC1), here(slots)),
            ops._scatter_meta(meta_EC1, slots, choices),
        ),
    )


@few
@given(
    kept=st.integers(1, 3).flatmap(
        lambda width: st.lists(
            st.lists(st.integers(0, 5), min_size=width, max_size=width), min_size=1
        )
    ),
    width=st.sampled_from([1, 19]),
)
def test_packing_and_unpacking(kept: list[list[int]], width: int):
    """Slots of a wider buffer, as probabilities are, with NaN where no row is."""
    kept_SL = torch.tensor(kept, dtype=torch.int32)
    offsets_LS = ops.running_offsets(kept_SL)
    slots_MCD = torch.randn(kept_SL.numel(), 6, width)[:, :-1]
    slots_MCD[torch.arange(5) >= kept_SL.view(-1, 1)] = torch.nan
    num_rows = int(kept_SL.sum())
    expected_ND = ops._pack(slots_MCD, offsets_LS, True)
    packed_ND = rows.pack_rows(here(slots_MCD), here(offsets_LS))
    equal((packed_ND[:num_rows], expected_ND[:num_rows]))
    assert packed_ND.shape == expected_ND.shape
    expected_ND[num_rows:] = torch.nan
    unpacked_MCD = rows.unpack_rows(here(expected_ND), here(offsets_LS))
    equal((unpacked_MCD, ops._unpack(expected_ND, offsets_LS, True)))
    assert not unpacked_MCD.isnan().any()
    real_MC = torch.arange(5) < kept_SL.view(-1, 1)
    unpacked_MCD = rows.unpack_rows(here(expected_ND), here(offsets_LS), zeros=False)
    equal((unpacked_MCD[here(real_MC)], slots_MCD[real_MC]))


def test_packing_a_gradient_that_is_one_row_everywhere():
    row_D = torch.tensor([1.0, 2.0, 3.0])
    packed_ND = rows.pack_rows(here(row_D).expand(2, 4, 3), ints([2, 5]))
    equal((packed_ND[:5], row_D.expand(5, 3)))


# Triton's interpreter (3.6) cuts fp32 off to bf16 instead of rounding it; the hardware rounds.
NARROW = [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [*NARROW, torch.float64])
def test_sums_round_once_in_every_dtype(dtype: torch.dtype):
    slots = torch.stack([torch.randperm(40)[:5] for _ in range(9)]).int()
    rows_ND = torch.randn(40, 33, dtype=torch.float64).to(dtype)
    choices = torch.full((8, 5), -1, dtype=torch.int32)
    expected = ops._combine(rows_ND.view(8, 5, 33), slots, choices, True)
    equal((rows.sum_rows(here(rows_ND), here(slots)), expected))


def test_more_than_one_block_of_everything():
    """More tokens than a block of the plan's, wider rows than a block of a row's."""
    map_TE = torch.rand(1500, 3) < 0.7
    expected = plan_in_torch(map_TE, 2, 1100)
    equal(*zip(plan.plan(here(map_TE), 2, 1100), expected, strict=True))
    slots, offsets_E1 = expected[0], ops.running_offsets(expected[2][None])
    packed_TK = plan.packed_slots(here(slots), here(offsets_E1), 1100)
    equal((packed_TK, packed_slots(slots, offsets_E1, 1100)))
    tokens_TD = torch.randn(3, 2500)
    slots = torch.tensor([[2], [3], [0]], dtype=torch.int32)
    choices = torch.tensor([2, -1, 0, 1], dtype=torch.int32)
    expected_ND = torch.stack([tokens_TD[2], torch.zeros(2500), tokens_TD[0], tokens_TD[1]])
    equal((rows.spread_rows(here(tokens_TD), here(slots), here(choices)), expected_ND))
    offsets_LS = torch.tensor([[7, 8]], dtype=torch.int32)
    slots_MCD = torch.randn(2, 7, 2500)
    packed_ND = rows.pack_rows(here(slots_MCD), here(offsets_LS))
    equal((packed_ND[:8], slots_MCD.flatten(0, 1)[:8]))
    expected_MCD = slots_MCD.clone()
    expected_MCD[1, 1:] = 0
    equal((rows.unpack_rows(packed_ND, here(offsets_LS)), expected_MCD))


@pytest.mark.gpu
def test_rows_beyond_2_to_the_31_elements():
    """The last of 2**31 + 2048 elements: read and written by either kernel, by either branch."""
    num_rows, width = 2**20 + 1, 2048
    tokens_TD = torch.zeros(num_rows, width, dtype=torch.bfloat16, device="cuda")
    tokens_TD[-1] = 3
    assert (rows.sum_rows(tokens_TD, ints([num_rows - 1])) == 3).all()
    offsets = ints([num_rows])
    assert (rows.pack_rows(tokens_TD[None], offsets)[-1] == 3).all()
    assert (rows.unpack_rows(tokens_TD, offsets)[0, -1] == 3).all()
    slots = torch.full((num_rows, 1), -1, dtype=torch.int32, device="cuda")
    choices = slots.flatten().clone()
    for first, last in ((0, num_rows - 1), (num_rows - 1, 0)):
        slots.fill_(-1)[-1] = last  # the last token goes to slot `last`, the other one is empty
        choices.zero_()[first] = -1
        rows_ND = rows.spread_rows(tokens_TD, slots, choices)
        assert (rows_ND[last] == 3).all() and not rows_ND[first].any()
