"""Kernels of the direct exchange, all ranks in one process, against the reference, bit by bit.

A rank's buffers are tensors of their own, and what would be addresses on its peers are the
addresses of those. Without a GPU they run in Triton's interpreter. Memory is NaN beforehand.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from padded_dispatch.config import DispatchConfig, PoolSizes
from padded_dispatch.kernels import direct, rows
from tests.support import reference
from tests.support.device import DEVICE, equal, here, ints
from tests.support.routing_cases import addresses, assert_same
from tests.support.routings import routing_map, thin_out


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    fill = float("nan") if dtype.is_floating_point else -(2**31)
    return torch.full(shape, fill, dtype=dtype, device=DEVICE)


def pointers(buffers: list[Tensor]) -> Tensor:
    return torch.tensor([buffer.data_ptr() for buffer in buffers], device=DEVICE)


def test_addresses_of_slots_beyond_32_bits():
    """Neither is slot * bytes, nor slot * columns, a number of 32 bits."""
    at_N = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    pool_slots, row_bytes = 2**20, 2**14
    slots_R = here(torch.tensor([2**40, 2**41]))
    given = None, ints([0, 2]), slots_R, slots_R, 1, pool_slots, 1
    direct.find_slots(*given, row_bytes=row_bytes, at_N=at_N)
    first = 2**41 + pool_slots * row_bytes
    assert at_N.tolist() == [first, first + row_bytes]


# All ranks.


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Buffers of one rank."""

    table_RE: Tensor
    rows_ND: Tensor
    probs_N: Tensor
    slots_QD: Tensor
    meta_Q: Tensor
    shift_E: Tensor
    offsets_LS: Tensor
    count_SL: Tensor
    places_STK: Tensor


class World:
    """What every rank of a world does, one rank after another; that is where barriers go."""

    def __init__(self, kept_STE: np.ndarray, top_k: int, sizes: PoolSizes, width: int) -> None:
        self.pools = sizes.pool_slots, sizes.experts_per_pool
        self.plans = [reference.plan(kept_TE, top_k=top_k, sizes=sizes) for kept_TE in kept_STE]
        assert all(plan.num_unplaced == 0 for plan in self.plans)
        size, num_experts = len(kept_STE), kept_STE.shape[2]
        num_slots = sizes.num_pools * sizes.pool_slots
        self.ranks = [
            Rank(
                table_RE=empty(size, num_experts, dtype=torch.int32),
                rows_ND=empty(sizes.num_rows, width),
                probs_N=empty(sizes.num_rows),
                slots_QD=empty(num_slots, width),
                meta_Q=empty(num_slots),
                shift_E=empty(num_experts, dtype=torch.int32),
                offsets_LS=empty(num_experts // size, size, dtype=torch.int32),
                count_SL=empty(size, num_experts // size),
                places_STK=empty(size, kept_STE.shape[1], top_k, dtype=torch.int32),
            )
            for _ in self.plans
        ]

    def pointers(self, name: str) -> Tensor:
        return pointers([getattr(rank, name) for rank in self.ranks])

    def push(self, tokens_STD: np.ndarray, probs_STE: np.ndarray | None) -> None:
        for r, plan in enumerate(self.plans):
            direct.push_counts(here(plan.kept_E), self.pointers("table_RE"), r)
        for r, rank in enumerate(self.ranks):
            out = rank.shift_E, rank.offsets_LS, rank.count_SL
            direct.place_rows(rank.table_RE, r, *out, *self.pools)
        for r, (rank, plan) in enumerate(zip(self.ranks, self.plans, strict=True)):
            direct.push_tokens(
                here(tokens_STD[r]),
                None if probs_STE is None else here(probs_STE[r]),
                here(plan.slot_of_TK),
                here(plan.expert_of_TK),
                rank.shift_E,
                self.pointers("rows_ND"),
                self.pointers("probs_N"),
                self.pointers("places_STK"),
                r,
            )
        for r, rank in enumerate(self.ranks):
            self._check_crossed_once(r)
            direct.copy_rows(rank.rows_ND, rank.places_STK, r)

    def _check_crossed_once(self, r: int) -> None:
        """Rows are there for own tokens, and for the first place of each token of other ranks."""
        rank, size = self.ranks[r], len(self.ranks)
        owner_TK = self.plans[r].expert_of_TK // rank.offsets_LS.shape[0]
        written = int((owner_TK[self.plans[r].slot_of_TK >= 0] == r).sum())
        assert (rank.places_STK[r] == -(2**31)).all()
        for s in range(size):
            if s != r:
                written += int((rank.places_STK[s] >= 0).any(1).sum())
        assert int((~rank.rows_ND.isnan()).all(1).sum()) == written

    def return_rows(self, packed: list[Tensor], beside: list[Tensor] | None) -> None:
        for r, rank in enumerate(self.ranks):
            beside_N = None if beside is None else beside[r]
            to = self.pointers("slots_QD"), self.pointers("meta_Q"), r, *self.pools
            direct.return_rows(packed[r], beside_N, rank.offsets_LS, *to)
            self._check_found(packed[r], (beside_N, rank.offsets_LS, *to))

    def _check_found(self, packed_ND: Tensor, found: tuple[Any, ...]) -> None:
        """Compare rows that were sent with those at the addresses of their slots."""
        row_bytes = packed_ND[0].nbytes
        at_N = torch.empty(len(packed_ND), dtype=torch.int64, device=DEVICE)
        direct.find_slots(*found, row_bytes=row_bytes, at_N=at_N)
        num_rows, seen = int(found[1][-1, -1]), 0
        for rank in self.ranks:
            place_N = (at_N[:num_rows] - rank.slots_QD.data_ptr()) // row_bytes
            mine = (place_N >= 0) & (place_N < len(rank.slots_QD))
            equal((rank.slots_QD[place_N[mine]], packed_ND[:num_rows][mine]))
            seen += int(mine.sum())
        assert seen == num_rows

    def home(self, r: int) -> tuple[Tensor, Tensor]:
        """Return the sums of rank r's slots, and the numbers beside them."""
        slot_of_TK, expert_of_TK = here(self.plans[r].slot_of_TK), here(self.plans[r].expert_of_TK)
        rank, (pool_slots, _) = self.ranks[r], self.pools
        values_TE = rows.scatter_meta(
            rank.meta_Q.view(-1, pool_slots),
            slot_of_TK,
            expert_of_TK,
            pool_slots,
            rank.shift_E.shape[0],
        )
        return rows.sum_rows(rank.slots_QD, slot_of_TK).cpu(), values_TE.cpu()

    def padded(self, rows: np.ndarray, kept_RSL: np.ndarray) -> list[Tensor]:
        """Payloads [R, L, M, ...] in the packed layout, NaN behind the last row."""
        packed = []
        for r, rows_LM in enumerate(rows):
            real = reference.pack(rows_LM, kept_RSL[r])
            held = empty(len(self.ranks[r].rows_ND), *rows_LM.shape[2:])
            held[: len(real)] = here(real)
            packed.append(held)
        return packed


def check(kept_STE: np.ndarray, top_k: int, pool: Any, width: int) -> None:
    """Compare all that kernels write; numbers are whole, so their sums have one value each."""
    size, num_tokens, num_experts = kept_STE.shape
    world = World(kept_STE, top_k, sizes_of(pool, kept_STE, top_k), width)
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
    for r, (rank, plan) in enumerate(zip(world.ranks, world.plans, strict=True)):
        sum_TD, values_TE = world.home(r)
        assert_same(sum_TD, sums_STD[r])
        assert_same(values_TE, values_STE[r])
        empty_Q = torch.ones(len(rank.slots_QD), dtype=torch.bool, device=DEVICE)
        empty_Q[here(plan.slot_of_TK[plan.slot_of_TK >= 0])] = False
        assert rank.slots_QD[empty_Q].isnan().all()

    # Gradients of the output, and the output without anything beside it.
    for rank in world.ranks:
        rank.rows_ND.fill_(torch.nan)
        rank.places_STK.fill_(-(2**31))
    world.push(tokens_STD + 1, None)
    world.return_rows([rank.rows_ND.clone() for rank in world.ranks], None)
    grad_RLMD = reference.combine_backward(tokens_STD + 1, world.plans, num_ranks=size)
    home_STD = reference.combine(grad_RLMD, world.plans)
    for r, rank in enumerate(world.ranks):
        expected = reference.pack(grad_RLMD[r], given.kept_RSL[r])
        assert_same(rank.rows_ND[: len(expected)].cpu(), expected)
        assert_same(world.home(r)[0], home_STD[r])


def sizes_of(pool: Any, kept_STE: np.ndarray, top_k: int) -> PoolSizes:
    """Return the sizes of a pool with as many slots as rows need."""
    size, num_tokens, num_experts = kept_STE.shape
    config = DispatchConfig(
        num_experts=num_experts, top_k=top_k, capacity_pool=pool, num_ranks=size
    )
    kept_SE = kept_STE.sum(1)
    most = kept_SE if pool == "expert" else kept_SE.reshape(size, size, -1).sum(2)
    return config.sizes_that_fit(num_tokens, int(most.max()))


@settings(max_examples=8)
@given(
    pool=st.sampled_from(["expert", "rank"]),
    size=st.sampled_from([2, 3, 4]),
    num_local=st.integers(1, 3),
    num_tokens=st.integers(1, 5),
    top_k=st.integers(1, 3),
    width=st.sampled_from([1, 19]),
    share=st.sampled_from([0.0, 0.3, 0.9]),
    seed=st.integers(0, 99),
)
def test_any_routing(pool, size, num_local, num_tokens, top_k, width, share, seed):
    num_experts = size * num_local
    top_k = min(top_k, num_experts)
    maps = [routing_map(num_tokens, num_experts, top_k, seed=seed + s) for s in range(size)]
    check(np.stack([thin_out(one, share=share) for one in maps]), top_k, pool, width)


@pytest.mark.parametrize("pool", ["expert", "rank"])
@pytest.mark.parametrize("skews", ["same same", "none none", "hot hot", "uniform none"])
def test_skewed_routings(skews, pool):
    maps = [routing_map(6, 4, 2, skew=skew, seed=s) for s, skew in enumerate(skews.split())]
    check(np.stack(maps), 2, pool, 5)


@pytest.mark.parametrize("pool", ["expert", "rank"])
def test_more_than_one_block_of_everything(monkeypatch, pool):
    """Fewer programs than tokens and rows, wider rows than a block of a row's."""
    monkeypatch.setattr(direct, "PROGRAMS", 3)
    check(np.stack([routing_map(11, 4, 3, seed=seed) for seed in range(2)]), 3, pool, 2500)


@pytest.mark.gpu
def test_rows_beyond_2_to_the_31_elements():
    num_rows, width = 2**20 + 1, 2048
    rows_ND = torch.zeros(num_rows, width, dtype=torch.bfloat16, device="cuda")
    nowhere = pointers([rows_ND])
    token_TD = torch.full((1, width), 4, dtype=torch.bfloat16, device="cuda")
    direct.push_tokens(
        token_TD, None, ints([num_rows - 1]), ints([0]), ints(0), nowhere, *(nowhere, nowhere), 0
    )
    assert (rows_ND[-1] == 4).all() and not rows_ND[:-1].any()
    places_RTK = ints([[0, 0]], [[num_rows - 2, num_rows - 1]])
    rows_ND[-2] = 3
    direct.copy_rows(rows_ND, places_RTK, 0)
    assert (rows_ND[-2:] == 3).all() and not rows_ND[:-2].any()
    rows_ND[-2] = 0
    slots_QD = torch.zeros_like(rows_ND)
    slots_R = pointers([slots_QD])
    direct.return_rows(rows_ND, None, ints([num_rows]), slots_R, nowhere, 0, num_rows, 1)
    assert (slots_QD[-1] == 3).all() and not slots_QD[:-1].any()
