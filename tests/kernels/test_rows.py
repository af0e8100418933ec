"""Kernels that move rows against the plain torch that specifies them, bit by bit.

Without a GPU they run in Triton's interpreter, which shows their logic; with one, as they are.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from padded_dispatch.kernels import rows
from padded_dispatch.routing import rows as ops
from padded_dispatch.routing.plan import plan_in_torch
from tests.support.device import DEVICE, equal, few, here, ints
from tests.support.routing_cases import RoutingCase, cases_with_pools


def test_pack_rows_example():
    own = here([[[1.0], [9.0]], [[9.0], [9.0]], [[2.0], [3.0]], [[4.0], [9.0]]])
    one_per_source = here([[[1.0], [9.0], [9.0], [9.0]], [[2.0], [3.0], [4.0], [9.0]]])
    for slots_MPD in (own, one_per_source):
        packed_ND = rows.pack_rows(slots_MPD, ints([1, 3], [3, 4]))
        assert packed_ND.shape == (8, 1)
        assert packed_ND[:4].flatten().tolist() == [1.0, 2.0, 3.0, 4.0]


def test_unpack_rows_example():
    packed_ND = here([[1.0], [2.0], [3.0], [4.0], [9.0], [9.0], [9.0], [9.0]])
    a, _, bc, d = rows.unpack_rows(packed_ND, ints([1, 3], [3, 4]), 4).squeeze(2).tolist()
    assert (a[0], bc, d[0]) == (1.0, [2.0, 3.0], 4.0)
    a, bcd = rows.unpack_rows(packed_ND, ints([1, 3], [3, 4]), 2).squeeze(2).tolist()
    assert (a[0], bcd[:3]) == (1.0, [2.0, 3.0, 4.0])


@few
@given(drawn=cases_with_pools())
def test_moves_and_sums(drawn: tuple[RoutingCase, int]):
    """All that moves, by the maps of one plan; an odd width, rows with garbage where empty."""
    case, shared = drawn
    map_TE = torch.from_numpy(case.map_TE)
    num_pools = map_TE.shape[1] // shared
    num_experts = map_TE.shape[1]
    slots, experts, choices, kept_E, _ = plan_in_torch(map_TE, case.top_k, num_pools, case.capacity)
    tokens_TD = torch.randn(map_TE.shape[0], 19)
    rows_ECD = torch.randn(*choices.shape, 19)
    rows_ECD[choices < 0] = torch.nan
    unwritten_ECD = rows.spread_rows(here(tokens_TD), here(slots), here(choices), zeros=False)
    expected_ECD = ops._gather(tokens_TD, slots, choices, True)
    equal((unwritten_ECD[here(choices >= 0)], expected_ECD[choices >= 0]))
    meta_GPX = torch.randn(num_pools, case.capacity + num_experts // num_pools)
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
            rows.gather_meta(here(probs_TE), here(experts), here(choices), here(kept_E)),
            ops._gather_meta(probs_TE, slots, experts, choices, kept_E),
        ),
        (
            rows.scatter_meta(
                here(meta_GPX), here(slots), here(experts), case.capacity, num_experts
            ),
            ops._scatter_meta(meta_GPX, slots, experts, choices, num_experts),
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
    shared=st.booleans(),
)
def test_packing_and_unpacking(kept: list[list[int]], width: int, shared: bool):
    """Slots of a wider buffer, as probabilities are, with NaN where no row is."""
    check_packing(torch.tensor(kept, dtype=torch.int32), 5, width, shared)


def check_packing(kept_SL: torch.Tensor, room: int, width: int, shared: bool) -> None:
    offsets_LS = ops.running_offsets(kept_SL)
    kept_M, num_slots = kept_SL.flatten(), room
    if shared:
        kept_M, num_slots = kept_SL.sum(1), room * kept_SL.shape[1]
    num_pools = len(kept_M)
    slots_MPD = torch.randn(num_pools, num_slots + 1, width)[:, :-1]
    real_MP = torch.arange(num_slots) < kept_M[:, None]
    slots_MPD[~real_MP] = torch.nan
    num_rows = int(kept_SL.sum())
    expected_ND = ops._pack(slots_MPD, offsets_LS)
    packed_ND = rows.pack_rows(here(slots_MPD), here(offsets_LS))
    equal((packed_ND[:num_rows], expected_ND[:num_rows]))
    assert packed_ND.shape == expected_ND.shape
    expected_ND[num_rows:] = torch.nan
    unpacked_MPD = rows.unpack_rows(here(expected_ND), here(offsets_LS), num_pools)
    equal((unpacked_MPD[here(real_MP)], slots_MPD[real_MP]))


@pytest.mark.parametrize(("num_local", "width"), [(64, 1), (64, 2), (7, 700)])
def test_pools_of_many_blocks_and_experts(num_local: int, width: int):
    """Runs that end within a block, runs longer than a block, and experts without rows."""
    draw = torch.Generator().manual_seed(num_local)
    kept_SL = torch.randint(0, 9, (2, num_local), generator=draw, dtype=torch.int32)
    kept_SL[0, ::3] = 0
    kept_SL[1, num_local // 2] = 2500 // width
    check_packing(kept_SL, max(9, 2500 // num_local // width + 9), width, shared=True)


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
    unpacked_MCD = rows.unpack_rows(packed_ND, here(offsets_LS), 2)
    equal((unpacked_MCD.flatten(0, 1)[:8], slots_MCD.flatten(0, 1)[:8]))


@pytest.mark.gpu
def test_rows_beyond_2_to_the_31_elements():
    """The last of 2**31 + 2048 elements: read and written by either kernel, by either branch."""
    num_rows, width = 2**20 + 1, 2048
    tokens_TD = torch.zeros(num_rows, width, dtype=torch.bfloat16, device="cuda")
    tokens_TD[-1] = 3
    assert (rows.sum_rows(tokens_TD, ints([num_rows - 1])) == 3).all()
    offsets = ints([num_rows])
    assert (rows.pack_rows(tokens_TD[None], offsets)[-1] == 3).all()
    assert (rows.unpack_rows(tokens_TD, offsets, 1)[0, -1] == 3).all()
    slots = torch.full((num_rows, 1), -1, dtype=torch.int32, device="cuda")
    choices = slots.flatten().clone()
    for first, last in ((0, num_rows - 1), (num_rows - 1, 0)):
        slots.fill_(-1)[-1] = last  # the last token goes to slot `last`, the other one is empty
        choices.zero_()[first] = -1
        rows_ND = rows.spread_rows(tokens_TD, slots, choices)
        assert (rows_ND[last] == 3).all() and not rows_ND[first].any()
