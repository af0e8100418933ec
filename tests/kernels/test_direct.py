"""Kernels of the direct exchange, all ranks in one process, against the reference, bit by bit.

Those of `links` are among them. A rank's buffers are tensors of their own, and what would be
addresses on its peers are the addresses of those. Without a GPU they run in Triton's interpreter.
Memory is NaN beforehand.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from padded_dispatch import reference
from padded_dispatch.config import DispatchConfig, PoolSizes
from padded_dispatch.kernels import direct, links, rows
from tests.support.device import DEVICE, equal, here, ints
from tests.support.routing_cases import addresses, assert_same
from tests.support.routings import routing_map, thin_out


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


@pytest.mark.parametrize(
    ("pool_slots", "experts_per_pool", "slots"),
    [(5, 1, [0, 5, 10, 15]), (5, 2, [0, 3, 5, 5]), (10, 4, [0, 3, 4, 4])],
)
def test_place_rows_examples(pool_slots, experts_per_pool, slots):
    shift_E = empty(4, dtype=torch.int32)
    offsets_LS, count_SL = empty(2, 2, dtype=torch.int32), empty(2, 2)
    table_RE = ints([1, 0, 2, 0], [3, 1, 0, 5])
    direct.place_rows(table_RE, 1, shift_E, offsets_LS, count_SL, pool_slots, experts_per_pool)
    assert (shift_E + ints(*slots)).tolist() == [1, 4, 2, 2]
    assert offsets_LS.tolist() == [[2, 2], [2, 7]]
    assert count_SL.tolist() == [[2, 0], [0, 5]]


def test_push_rows_example():
    rows_RND = [empty(4, 1) for _ in range(2)]
    probs_RN = [empty(4) for _ in range(2)]
    direct.push_rows(
        torch.tensor([[7.0], [8.0]], device=DEVICE),
        torch.tensor([[0.5, 0.25], [0.75, 0.0]], device=DEVICE),
        ints([0, 2], [1, -1]),
        ints([0, 1], [0, -1]),
        ints(0, 1),
        pointers(rows_RND),
        pointers(probs_RN),
    )
    assert rows_RND[0][:2].tolist() == [[7], [8]] and rows_RND[0][2:].isnan().all()
    assert rows_RND[1][3].tolist() == [7] and rows_RND[1][:3].isnan().all()
    assert probs_RN[0][:2].tolist() == [0.5, 0.75] and probs_RN[1][3] == 0.25


def test_push_tokens_and_copy_rows_examples():
    rows_RND, probs_RN = [empty(8, 1) for _ in range(2)], [empty(8) for _ in range(2)]
    places_RRTK = [empty(2, 1, 3, dtype=torch.int32) for _ in range(2)]
    links.push_tokens(
        torch.tensor([[7.0]], device=DEVICE),
        torch.tensor([[0.5, 0.25, 0.125, 0.0]], device=DEVICE),
        ints([0, 2, 5]),
        ints([0, 1, 2]),
        ints(0, 0, 2, 0),
        pointers(rows_RND),
        pointers(probs_RN),
        pointers(places_RRTK),
        1,
    )
    assert rows_RND[0].isnan().flatten().tolist() == [False] + 7 * [True]
    assert rows_RND[1].isnan().flatten().tolist() == 7 * [True] + [False]
    assert rows_RND[0][0] == rows_RND[1][7] == 7
    assert probs_RN[0].nan_to_num(0).tolist() == [0.5, 0, 0.25, 0, 0, 0, 0, 0]
    assert probs_RN[1].nan_to_num(0).tolist() == [0, 0, 0, 0, 0, 0, 0, 0.125]
    assert places_RRTK[0][1].tolist() == [[0, 2, -1]]
    for unwritten in (places_RRTK[0][0], *places_RRTK[1]):
        assert (unwritten == -(2**31)).all()
    places_RRTK[0][0] = 7  # This rank's own part is not read.
    links.copy_rows(rows_RND[0], places_RRTK[0], 0)
    assert rows_RND[0].nan_to_num(0).flatten().tolist() == [7, 0, 7, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("shared", "slots"), [(1, [[0, 0, 1, 0], [0, 0, 2, 3]]), (2, [[0, 1, 0, 0], [2, 3, 0, 0]])]
)
def test_return_rows_examples(shared, slots):
    slots_RQD = [empty(4, 1) for _ in range(2)]
    metas_RQ = [empty(4) for _ in range(2)]
    direct.return_rows(
        torch.tensor([[1.0], [2.0], [3.0], [torch.nan]], device=DEVICE),
        torch.tensor([10.0, 20.0, 30.0, torch.nan], device=DEVICE),
        ints([1, 3]),
        ints([1, 1], [0, 2]) if shared == 2 else None,
        pointers(slots_RQD),
        pointers(metas_RQ),
        1,
        2,
        shared,
    )
    assert [one.flatten().nan_to_num(0).tolist() for one in slots_RQD] == slots
    assert [(one.nan_to_num(0) / 10).tolist() for one in metas_RQ] == slots


@pytest.mark.parametrize(
    ("pool_slots", "kept", "expected"),
    [(2, None, [1008, 2008, 2012]), (2, [[1, 1], [0, 2]], [1004, 2000, 2004])],
)
def test_find_slots_examples(pool_slots, kept, expected):
    """The numbers beside the rows go to the same slots."""
    at_N = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    meta = [empty(4), empty(4)]
    direct.find_slots(
        here(torch.tensor([5.0, 6.0, 7.0, 8.0])),
        ints([1, 3]),
        None if kept is None else ints(*kept),
        here(torch.tensor([1000, 2000])),
        pointers(meta),
        1,
        pool_slots,
        1 if kept is None else 2,
        row_bytes=4,
        at_N=at_N,
    )
    assert at_N.tolist() == [*expected, 0]
    for base, number, address in zip((1000, 2000, 2000), (5.0, 6.0, 7.0), expected, strict=True):
        assert meta[base // 1000 - 1][(address - base) // 4] == number
    assert sum(int(one.isfinite().sum()) for one in meta) == 3


def test_addresses_of_slots_beyond_32_bits():
    """Neither is slot * bytes, nor slot * columns, a number of 32 bits."""
    at_N = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    pool_slots, row_bytes = 2**20, 2**14
    slots_R = here(torch.tensor([2**40, 2**41]))
    given = None, ints([0, 2]), None, slots_R, slots_R, 1, pool_slots, 1
    direct.find_slots(*given, row_bytes=row_bytes, at_N=at_N)
    first = 2**41 + pool_slots * row_bytes
    assert at_N.tolist() == [first, first + row_bytes]


def test_list_slots_example():
    lists_RRTK, home_TK = [empty(2, 1, 2, 3, dtype=torch.int32) for _ in range(2)], ints([7, 7, 7])
    links.list_slots(ints([0, 2, 5]), ints([0, 1, 2]), pointers(lists_RRTK), home_TK, 1, 2)
    assert lists_RRTK[0][1].tolist() == [[[0, 2, -1], [0, 1, 0]]]
    assert lists_RRTK[1][1].tolist() == [[[-1, -1, 5], [0, 1, 0]]]
    assert home_TK.tolist() == [[0, -1, 5]]
    assert (torch.stack(lists_RRTK)[:, 0] == -(2**31)).all()


def returned_sums(packed: list[float], dtype: torch.dtype) -> list[Tensor]:
    """Return the slots of both ranks after the docstring's example, L experts with a row each."""
    slots_RQD = [empty(6, 1, dtype=dtype) for _ in range(2)]
    nowhere = [empty(4) for _ in range(2)]
    links.return_sums(
        torch.tensor(packed, dtype=dtype, device=DEVICE)[:, None],
        None,
        ints([0, 1], [1, 2], [2, 3])[: len(packed)],
        None,
        ints([[[-1, -1, -1], [0, 0, 0]]], [[[0, 2, 4 if len(packed) == 3 else -1], [0, 1, 2]]]),
        pointers(slots_RQD),
        pointers(nowhere),
        0,
        2,
        1,
    )
    assert slots_RQD[0].isnan().all() and slots_RQD[1][1:].isnan().all()
    return slots_RQD


def test_return_sums_example():
    assert returned_sums([5.0, 6.0], torch.float32)[1][0] == 11


def test_a_sum_is_rounded_once_to_the_dtype_of_rows():
    """1 + 2^-8 is between two numbers of bf16, 1 and 1 + 2^-7."""
    assert returned_sums([1.0, 2**-8], torch.bfloat16)[1][0] == 1
    assert returned_sums([1.0, 2**-8, 2**-8], torch.bfloat16)[1][0] == 1 + 2**-7


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
    lists_STK: Tensor
    home_TK: Tensor
    sent_R: Tensor


class World:
    """What every rank of a world does, one rank after another; that is where barriers go.

    `once`: whether a token crosses a link once. `summed`: whether sums go home.
    """

    def __init__(
        self, kept_STE: np.ndarray, top_k: int, sizes: PoolSizes, width: int, way: str
    ) -> None:
        self.once, self.summed = way != "each", way == "summed"
        self.pools = sizes.pool_slots, sizes.experts_per_pool
        self.plans = [reference.plan(kept_TE, top_k=top_k, sizes=sizes) for kept_TE in kept_STE]
        assert all(plan.num_unplaced == 0 for plan in self.plans)
        size, num_experts = len(kept_STE), kept_STE.shape[2]
        num_local, num_slots = num_experts // size, sizes.num_pools * sizes.pool_slots
        self.ranks = [
            Rank(
                table_RE=empty(size, num_experts, dtype=torch.int32),
                rows_ND=empty(sizes.num_rows, width),
                probs_N=empty(sizes.num_rows),
                slots_QD=empty(num_slots, width),
                meta_Q=empty(num_slots),
                shift_E=empty(num_experts, dtype=torch.int32),
                offsets_LS=empty(num_local, size, dtype=torch.int32),
                count_SL=empty(size, num_local),
                places_STK=empty(size, kept_STE.shape[1], top_k, dtype=torch.int32),
                lists_STK=empty(size, kept_STE.shape[1], 2, top_k, dtype=torch.int32),
                home_TK=here(plan.slot_of_TK).clone(),
                sent_R=torch.zeros(size, dtype=torch.int64, device=DEVICE),
            )
            for plan in self.plans
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
            pushed = (
                here(tokens_STD[r]),
                None if probs_STE is None else here(probs_STE[r]),
                here(plan.slot_of_TK),
                here(plan.expert_of_TK),
                rank.shift_E,
                self.pointers("rows_ND"),
                self.pointers("probs_N"),
            )
            sent_R = None if probs_STE is None else rank.sent_R.zero_()
            if self.once:
                links.push_tokens(*pushed, self.pointers("places_STK"), r, sent_R)
            else:
                direct.push_rows(*pushed, sent_R)
        if self.once:
            for r, rank in enumerate(self.ranks):
                links.copy_rows(rank.rows_ND, rank.places_STK, r)

    def return_rows(self, packed: list[Tensor], beside: list[Tensor] | None) -> None:
        lists_R = self.pointers("lists_STK")
        if self.summed:
            for r, (rank, plan) in enumerate(zip(self.ranks, self.plans, strict=True)):
                maps = here(plan.slot_of_TK), here(plan.expert_of_TK)
                num_local = rank.offsets_LS.shape[0]
                links.list_slots(*maps, lists_R, rank.home_TK, r, num_local)
        for r, rank in enumerate(self.ranks):
            returned = packed[r], None if beside is None else beside[r], rank.offsets_LS
            to = self.pointers("slots_QD"), self.pointers("meta_Q"), r, *self.pools
            sent_R = None if beside is None else rank.sent_R.zero_()
            if self.summed:
                links.return_sums(*returned, rank.lists_STK, *to, sent_R)
            else:
                direct.return_rows(*returned, *to, sent_R)
                self._check_found(returned, to)

    def _check_found(self, returned: tuple[Any, ...], to: tuple[Any, ...]) -> None:
        """Compare rows that were sent with those at the addresses of their slots."""
        packed_ND, *found = returned
        row_bytes = packed_ND[0].nbytes
        at_N = torch.empty(len(packed_ND), dtype=torch.int64, device=DEVICE)
        direct.find_slots(*found, *to, row_bytes=row_bytes, at_N=at_N)
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
        return rows.sum_rows(rank.slots_QD, rank.home_TK).cpu(), values_TE.cpu()

    def padded(self, rows: np.ndarray, kept_RSL: np.ndarray) -> list[Tensor]:
        """Payloads [R, L, M, ...] in the packed layout, NaN behind the last row."""
        packed = []
        for r, rows_LM in enumerate(rows):
            real = reference.pack(rows_LM, kept_RSL[r])
            held = empty(len(self.ranks[r].rows_ND), *rows_LM.shape[2:])
            held[: len(real)] = here(real)
            packed.append(held)
        return packed


def check(kept_STE: np.ndarray, top_k: int, sizes: PoolSizes, width: int, way: str) -> None:
    """Compare all that kernels write; numbers are whole, so their sums have one value each."""
    size, num_tokens, num_experts = kept_STE.shape
    world = World(kept_STE, top_k, sizes, width, way)
    kept_STRL = kept_STE.reshape(size, num_tokens, size, -1)
    tokens_STD = addresses(size, num_tokens, width, offset=0).astype(np.float32)
    probs_STE = addresses(size, num_tokens, num_experts, offset=10_000).astype(np.float32)
    given = reference.dispatch(tokens_STD, probs_STE, world.plans, num_ranks=size)
    world.push(tokens_STD, probs_STE)
    for r, rank in enumerate(world.ranks):
        sent_R = kept_STRL[r].sum((0, 2))
        if world.once:
            own, sent_R = sent_R[r], kept_STRL[r].any(2).sum(0)
            sent_R[r] = own
            assert (rank.places_STK[r] == -(2**31)).all()
        assert_same(rank.sent_R.cpu(), sent_R)
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
        kept_STL = kept_STRL[:, :, r]
        sent_R = kept_STL.any(2).sum(1) if world.summed else kept_STL.sum((1, 2))
        assert_same(rank.sent_R.cpu(), sent_R)
        sum_TD, values_TE = world.home(r)
        assert_same(sum_TD, sums_STD[r])
        assert_same(values_TE, values_STE[r])
        empty_Q = torch.ones(len(rank.slots_QD), dtype=torch.bool, device=DEVICE)
        empty_Q[rank.home_TK[rank.home_TK >= 0]] = False
        assert rank.slots_QD[empty_Q].isnan().all()

    # Gradients of the output, and the output without anything beside it.
    world.push(tokens_STD + 1, None)
    world.return_rows([rank.rows_ND.clone() for rank in world.ranks], None)
    grad_RLMD = reference.combine_backward(tokens_STD + 1, world.plans, num_ranks=size)
    home_STD = reference.combine(grad_RLMD, world.plans)
    for r, rank in enumerate(world.ranks):
        expected = reference.pack(grad_RLMD[r], given.kept_RSL[r])
        assert_same(rank.rows_ND[: len(expected)].cpu(), expected)
        assert_same(world.home(r)[0], home_STD[r])


# No way of rows over links asks for the pool: each pool takes some of them.
PATHS = pytest.mark.parametrize(
    ("pool", "way"),
    [
        ("expert", "once"),
        ("expert", "summed"),
        ("rank", "each"),
        ("rank", "summed"),
    ],
)


def sizes_of(pool: Any, kept_STE: np.ndarray, top_k: int, capacity: int) -> PoolSizes:
    """Return the sizes of a pool with `capacity` slots per expert, or as many as rows need."""
    size, num_tokens, num_experts = kept_STE.shape
    config = DispatchConfig(
        num_experts=num_experts, top_k=top_k, capacity_pool=pool, num_ranks=size
    )
    if pool == "expert":
        config = replace(config, capacity_factor=0.01, min_capacity=capacity)
        return config.sizes(num_tokens)
    kept_SR = kept_STE.sum(1).reshape(size, size, -1).sum(2)
    return config.sizes_that_fit(num_tokens, int(kept_SR.max()))


@settings(max_examples=20)
@given(
    pool=st.sampled_from(["expert", "rank"]),
    size=st.sampled_from([2, 3, 4]),
    num_local=st.integers(1, 3),
    num_tokens=st.integers(1, 5),
    top_k=st.integers(1, 3),
    capacity=st.integers(1, 4),
    width=st.sampled_from([1, 19]),
    share=st.sampled_from([0.0, 0.3, 0.9]),
    way=st.sampled_from(["each", "once", "summed"]),
    seed=st.integers(0, 99),
)
def test_any_routing(pool, size, num_local, num_tokens, top_k, capacity, width, share, way, seed):
    num_experts = size * num_local
    top_k = min(top_k, num_experts)
    kept_STE = np.stack(
        [
            thin_out(routing_map(num_tokens, num_experts, top_k, seed=seed + s), share=share)
            for s in range(size)
        ]
    )
    kept_STE &= kept_STE.cumsum(1) <= min(capacity, num_tokens)
    check(kept_STE, top_k, sizes_of(pool, kept_STE, top_k, capacity), width, way)


@PATHS
@pytest.mark.parametrize("skew", ["same", "none", "hot"])
def test_skewed_routings(skew, pool, way):
    kept_STE = np.stack([routing_map(6, 4, 2, skew=skew, seed=seed) for seed in range(2)])
    check(kept_STE, 2, sizes_of(pool, kept_STE, 2, 6), 5, way)


@PATHS
def test_a_rank_without_rows(pool, way):
    kept_STE = np.stack([routing_map(6, 4, 2, seed=0), routing_map(6, 4, 2, skew="none")])
    check(kept_STE, 2, sizes_of(pool, kept_STE, 2, 6), 5, way)


@PATHS
def test_more_than_one_block_of_everything(monkeypatch, pool, way):
    """Fewer programs than tokens and rows, wider rows than a block of a row's."""
    monkeypatch.setattr(direct, "PROGRAMS", 3)
    kept_STE = np.stack([routing_map(11, 4, 3, seed=seed) for seed in range(2)])
    check(kept_STE, 3, sizes_of(pool, kept_STE, 3, 11), 2500, way)


@pytest.mark.gpu
def test_rows_beyond_2_to_the_31_elements():
    num_rows, width = 2**20 + 1, 2048
    rows_ND = torch.zeros(num_rows, width, dtype=torch.bfloat16, device="cuda")
    nowhere = pointers([rows_ND])
    token_TD = torch.full((1, width), 3, dtype=torch.bfloat16, device="cuda")
    slot = ints([num_rows - 1])
    direct.push_rows(token_TD, None, slot, ints([0]), ints(0), pointers([rows_ND]), nowhere)
    assert (rows_ND[-1] == 3).all() and not rows_ND[:-1].any()
    links.push_tokens(
        token_TD + 1, None, slot, ints([0]), ints(0), pointers([rows_ND]), *(nowhere, nowhere), 0
    )
    assert (rows_ND[-1] == 4).all() and not rows_ND[:-1].any()
    places_RTK = ints([[0, 0]], [[num_rows - 2, num_rows - 1]])
    rows_ND[-2] = 3
    links.copy_rows(rows_ND, places_RTK, 0)
    assert (rows_ND[-2:] == 3).all() and not rows_ND[:-2].any()
    rows_ND[-2] = 0
    slots_QD = torch.zeros_like(rows_ND)
    offsets, slots_R = ints([num_rows]), pointers([slots_QD])
    direct.return_rows(rows_ND, None, offsets, slots_R, nowhere, 0, num_rows, 1)
    assert (slots_QD[-1] == 3).all() and not slots_QD[:-1].any()
