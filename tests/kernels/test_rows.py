"""Kernels that move rows against the plain torch that specifies them, bit by bit.

Without a GPU they run in Triton's interpreter, which shows their logic; with one, as they are.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from padded_dispatch.kernels import rows
from padded_dispatch.ops import rows as ops
from padded_dispatch.ops.plan import plan_in_torch
from tests.support.device import DEVICE, equal, few, here, ints
from tests.support.routing_cases import RoutingCase, routing_cases


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
    equal(
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


def test_rows_wider_than_one_block():
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
