"""Kernels of the direct exchange, all ranks in one process, against the reference, bit by bit.

A rank's buffers are tensors of their own, and what would be addresses on its peers are the
addresses of those. Without a GPU they run in Triton's interpreter. Memory is NaN beforehand.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from padded_dispatch import reference
from padded_dispatch.kernels import direct, rows
from padded_dispatch.utils.routings import routing_map, thin_out
from tests.support.device import DEVICE, here, ints
from tests.support.routing_cases import addresses, assert_same


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    fill = float("nan") if dtype.is_floating_point else -(2**31)
    return torch.full(shape, fill, dtype=dtype, device=DEVICE)


def pointers(buffers: list[Tensor]) -> Tensor:
    return torch.tensor([buffer.data_ptr() for buffer in buffers], device=DEVICE)


# The examples of the docstrings.


def test_push_counts_example():
    tables = [empty(2, 2, dtype=torch.int32) for _ in range(2)]
    for rank, kept_E in enumerate((ints(1, 2), ints(3, 4))):
        direct.push_counts(kept_E, pointers(tables), rank)
    assert [table.tolist() for table in tables] == [[[1, 2], [3, 4]]] * 2


def test_place_rows_example():
    start_E = empty(4, dtype=torch.int32)
    offsets_LS, count_SL = empty(2, 2, dtype=torch.int32), empty(2, 2)
    direct.place_rows(ints([1, 0, 2, 0], [3, 1, 0, 5]), 1, start_E, offsets_LS, count_SL)
    assert start_E.tolist() == [1, 4, 2, 2]
    assert offsets_LS.tolist() == [[2, 2], [2, 7]]
    assert count_SL.tolist() == [[2, 0], [0, 5]]


def test_push_rows_example():
    rows_RND = [empty(4, 1) for _ in range(2)]
    probs_RN = [empty(4) for _ in range(2)]
    direct.push_rows(
        torch.tensor([[7.0], [8.0]], device=DEVICE),
        torch.tensor([[0.5, 0.25], [0.75, 0.0]], device=DEVICE),
        ints([0, 2], [1, -1]),
        ints(0, 3),
        pointers(rows_RND),
        pointers(probs_RN),
        2,
    )
    assert rows_RND[0][:2].tolist() == [[7], [8]] and rows_RND[0][2:].isnan().all()
    assert rows_RND[1][3].tolist() == [7] and rows_RND[1][:3].isnan().all()
    assert probs_RN[0][:2].tolist() == [0.5, 0.75] and probs_RN[1][3] == 0.25


def test_return_rows_example():
    slots_RECD = [empty(2, 2, 1) for _ in range(2)]
    metas_REC1 = [empty(2, 3) for _ in range(2)]
    direct.return_rows(
        torch.tensor([[1.0], [2.0], [3.0], [torch.nan]], device=DEVICE),
        torch.tensor([0.1, 0.2, 0.3, torch.nan], device=DEVICE),
        ints([1, 3]),
        pointers(slots_RECD),
        pointers(metas_REC1),
        1,
        2,
    )
    assert slots_RECD[0].flatten().nan_to_num(0).tolist() == [0, 0, 1, 0]
    assert slots_RECD[1].flatten().nan_to_num(0).tolist() == [0, 0, 2, 3]
    torch.testing.assert_close(metas_REC1[0][1, 0].item(), 0.1)
    torch.testing.assert_close(metas_REC1[1][1, :2].tolist(), [0.2, 0.3])
    assert torch.stack(metas_REC1).isfinite().sum() == 3


# All ranks.


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Buffers of one rank."""

    table_RE: Tensor
    rows_ND: Tensor
    probs_N: Tensor
    slots_ECD: Tensor
    meta_EC1: Tensor
    start_E: Tensor
    offsets_LS: Tensor
    count_SL: Tensor


class World:
    """What every rank of a world does, one rank after another; that is where barriers go."""

    def __init__(self, kept_STE: np.ndarray, top_k: int, capacity: int, width: int) -> None:
        self.capacity = capacity
        self.plans = [
            reference.plan(kept_TE, top_k=top_k, capacity=capacity) for kept_TE in kept_STE
        ]
        size, num_experts = len(kept_STE), kept_STE.shape[2]
        num_local, num_rows = num_experts // size, num_experts * capacity
        self.ranks = [
            Rank(
                table_RE=empty(size, num_experts, dtype=torch.int32),
                rows_ND=empty(num_rows, width),
                probs_N=empty(num_rows),
                slots_ECD=empty(num_experts, capacity, width),
                meta_EC1=empty(num_experts, capacity + 1),
                start_E=empty(num_experts, dtype=torch.int32),
                offsets_LS=empty(num_local, size, dtype=torch.int32),
                count_SL=empty(size, num_local),
            )
            for _ in range(size)
        ]

    def pointers(self, name: str) -> Tensor:
        return pointers([getattr(rank, name) for rank in self.ranks])

    def push(self, tokens_STD: np.ndarray, probs_STE: np.ndarray | None) -> None:
        for r, plan in enumerate(self.plans):
            direct.push_counts(here(plan.kept_E), self.pointers("table_RE"), r)
        for r, rank in enumerate(self.ranks):
            out = rank.start_E, rank.offsets_LS, rank.count_SL
            direct.place_rows(rank.table_RE, r, *out)
        for r, (rank, plan) in enumerate(zip(self.ranks, self.plans, strict=True)):
            direct.push_rows(
                here(tokens_STD[r]),
                None if probs_STE is None else here(probs_STE[r]),
                here(plan.slot_of_TK),
                rank.start_E,
                self.pointers("rows_ND"),
                self.pointers("probs_N"),
                self.capacity,
            )

    def return_rows(self, packed: list[Tensor], beside: list[Tensor] | None) -> None:
        for r, rank in enumerate(self.ranks):
            direct.return_rows(
                packed[r],
                None if beside is None else beside[r],
                rank.offsets_LS,
                self.pointers("slots_ECD"),
                self.pointers("meta_EC1"),
                r,
                self.capacity,
            )

    def padded(self, rows: np.ndarray, kept_RSL: np.ndarray) -> list[Tensor]:
        """Payloads [R, L, M, ...] in the packed layout, NaN behind the last row."""
        packed = []
        for r, rows_LM in enumerate(rows):
            real = reference.pack(rows_LM, kept_RSL[r])
            held = empty(rows_LM.shape[0] * rows_LM.shape[1], *rows_LM.shape[2:])
            held[: len(real)] = here(real)
            packed.append(held)
        return packed


def check(kept_STE: np.ndarray, top_k: int, capacity: int, width: int) -> None:
    size, num_tokens, num_experts = kept_STE.shape
    world = World(kept_STE, top_k, capacity, width)
    tokens_STD = addresses(size, num_tokens, width, offset=0).astype(np.float32)
    probs_STE = addresses(size, num_tokens, num_experts, offset=10_000).astype(np.float32)
    given = reference.dispatch(tokens_STD, probs_STE, world.plans, num_ranks=size)
    world.push(tokens_STD, probs_STE)
    for r, rank in enumerate(world.ranks):
        assert_same(rank.count_SL.int().cpu(), given.kept_RSL[r])
        for got, expected_RLM in ((rank.rows_ND, given.rows_RLMD), (rank.probs_N, given.probs_RLM)):
            expected = reference.pack(expected_RLM[r], given.kept_RSL[r])
            assert_same(got[: len(expected)].cpu(), expected)
            assert got[len(expected) :].isnan().all()

    # The way back of the experts' output, and of gradients.
    back_RLMD = addresses(*given.rows_RLMD.shape, offset=20_000).astype(np.float32)
    beside_RLM = addresses(*given.probs_RLM.shape, offset=30_000).astype(np.float32)
    world.return_rows(
        world.padded(back_RLMD, given.kept_RSL), world.padded(beside_RLM, given.kept_RSL)
    )
    sums_STD = reference.combine(back_RLMD, world.plans)
    _, values_STE = reference.dispatch_backward(
        back_RLMD, beside_RLM, world.plans, num_experts=num_experts
    )
    for r, rank in enumerate(world.ranks):
        slot_of_TK = here(world.plans[r].slot_of_TK)
        assert_same(rows.sum_rows(rank.slots_ECD.flatten(0, 1), slot_of_TK).cpu(), sums_STD[r])
        assert_same(rows.scatter_meta(rank.meta_EC1, slot_of_TK).cpu(), values_STE[r])
        empty_EC = here(world.plans[r].choice_of_slot_EC) < 0
        assert rank.slots_ECD[empty_EC].isnan().all()

    # Gradients of the output, and the output without anything beside it.
    world.push(tokens_STD + 1, None)
    world.return_rows([rank.rows_ND.clone() for rank in world.ranks], None)
    grad_RLMD = reference.combine_backward(tokens_STD + 1, world.plans, num_ranks=size)
    home_STD = reference.combine(grad_RLMD, world.plans)
    for r, rank in enumerate(world.ranks):
        expected = reference.pack(grad_RLMD[r], given.kept_RSL[r])
        assert_same(rank.rows_ND[: len(expected)].cpu(), expected)
        slot_of_TK = here(world.plans[r].slot_of_TK)
        assert_same(rows.sum_rows(rank.slots_ECD.flatten(0, 1), slot_of_TK).cpu(), home_STD[r])


@settings(max_examples=15)
@given(
    size=st.sampled_from([2, 3, 4]),
    num_local=st.integers(1, 3),
    num_tokens=st.integers(1, 5),
    top_k=st.integers(1, 3),
    capacity=st.integers(1, 4),
    width=st.sampled_from([1, 19]),
    share=st.sampled_from([0.0, 0.3, 0.9]),
    seed=st.integers(0, 99),
)
def test_any_routing(size, num_local, num_tokens, top_k, capacity, width, share, seed):
    num_experts = size * num_local
    top_k = min(top_k, num_experts)
    kept_STE = np.stack(
        [
            thin_out(routing_map(num_tokens, num_experts, top_k, seed=seed + s), share=share)
            for s in range(size)
        ]
    )
    check(kept_STE & (kept_STE.cumsum(1) <= capacity), top_k, capacity, width)


@pytest.mark.parametrize("skew", ["same", "none", "hot"])
def test_skewed_routings(skew):
    maps = [routing_map(6, 4, 2, skew=skew, seed=seed) for seed in range(2)]
    check(np.stack(maps), 2, 6, 5)


def test_a_rank_without_rows():
    maps = [routing_map(6, 4, 2, seed=0), routing_map(6, 4, 2, skew="none")]
    check(np.stack(maps), 2, 6, 5)


def test_more_than_one_block_of_everything(monkeypatch):
    """Fewer programs than tokens and rows, wider rows than a block of a row's."""
    monkeypatch.setattr(direct, "_PROGRAMS", 3)
    maps = [routing_map(11, 4, 3, seed=seed) for seed in range(2)]
    check(np.stack(maps), 3, 11, 2500)


@pytest.mark.gpu
def test_rows_beyond_2_to_the_31_elements():
    num_rows, width = 2**20 + 1, 2048
    rows_ND = torch.zeros(num_rows, width, dtype=torch.bfloat16, device="cuda")
    nowhere = pointers([rows_ND])
    token_TD = torch.full((1, width), 3, dtype=torch.bfloat16, device="cuda")
    slot = ints([num_rows - 1])
    direct.push_rows(token_TD, None, slot, ints(0), pointers([rows_ND]), nowhere, num_rows)
    assert (rows_ND[-1] == 3).all() and not rows_ND[:-1].any()
    slots_ECD = torch.zeros_like(rows_ND)[None]
    offsets = ints([num_rows])
    direct.return_rows(rows_ND, None, offsets, pointers([slots_ECD]), nowhere, 0, num_rows)
    assert (slots_ECD[0, -1] == 3).all() and not slots_ECD[0, :-1].any()
