"""Kernels of the direct exchange, all ranks in one process, against loops, bit by bit.

A rank's buffers are tensors of their own, and what would be addresses on its peers are the
addresses of those. Without a GPU they run in Triton's interpreter. Memory is NaN beforehand.
"""

import math

import pytest
import torch
from torch import Tensor

from padded_dispatch.kernels import direct
from padded_dispatch.routing import Plan, plan_in_torch
from tests.support.device import DEVICE, addresses, equal, here, ints, nan
from tests.support.routings import maps_of


def plan_of(map_TE: Tensor, top_k: int) -> Plan:
    expert_TK, place_TK, kept_E = map(here, plan_in_torch(map_TE, top_k))
    return Plan(expert_TK=expert_TK, place_TK=place_TK, kept_E=kept_E)


@pytest.mark.parametrize("routing", ["thin", "one rank", "idle source"])
@pytest.mark.parametrize(
    ("num_ranks", "num_tokens", "local", "top_k", "width", "dtype", "extra"),
    [
        (2, 17, 3, 2, 5, torch.bfloat16, 0),
        (4, 5, 2, 3, 33, torch.float32, 2),
        (8, 3, 1, 8, 2080, torch.float16, 0),
        (2, 1, 1, 1, 1, torch.bfloat16, 0),
    ],
)
def test_tokens_and_plans_of_all_ranks_arrive(
    monkeypatch, num_ranks, num_tokens, local, top_k, width, dtype, extra, routing
):
    monkeypatch.setattr(direct, "PROGRAMS", 3)  # less than tokens, and than pieces of the plan
    monkeypatch.setattr(direct, "_CHUNK", 8)
    slots, ranks = num_tokens + extra, range(num_ranks)
    given = num_tokens, num_ranks * local, top_k
    maps = maps_of(routing, given, num_ranks=num_ranks, num_sources=num_ranks)
    plans = [plan_of(map_TE, top_k) for map_TE in map(torch.from_numpy, maps)]
    tokens = [torch.randn(num_tokens, width, device=DEVICE).to(dtype) for _ in ranks]
    probs = [torch.rand(num_tokens, top_k, device=DEVICE) for _ in ranks]
    numbers = num_ranks * slots * top_k
    # Zero, where no plan is written, would be an expert of each rank.
    plan_size = 3 * numbers + num_ranks * local
    landing = num_ranks - 1, slots, width
    again_at = -(-math.prod(landing) * dtype.itemsize // 16) * 16
    memories = [ints(*[0] * (again_at // 2 + plan_size)).view(torch.uint8) for _ in ranks]
    plan_buffers = [memory[2 * again_at :].view(torch.int32) for memory in memories]
    # A forward pass, and backward passes without the plan, which may send tokens again.
    for beside, sends_again in ((True, False), (False, False), (False, True)):
        rows, again = (
            [
                memory[at:][: math.prod(landing) * dtype.itemsize].view(dtype).view(landing)
                for memory in memories
            ]
            for at in (0, again_at)
        )
        for buffer in (*rows, *again):
            buffer.fill_(torch.nan)
        for rank in ranks:
            plan = plans[rank]
            given = plan.place_TK, probs[rank], plan.kept_E
            direct.push(
                tokens[rank],
                plan.expert_TK,
                addresses(*memories),
                again_TD=-tokens[rank] if sends_again else None,
                again_at=again_at,
                beside=given if beside else None,
                plan_at=2 * again_at,
                rank=rank,
                num_slots=slots,
                num_local_experts=local,
            )
        if sends_again:
            for one, other in zip(rows, again, strict=True):
                equal((-one.nan_to_num(7), other.nan_to_num(-7)))
        else:
            assert all(buffer.isnan().all() for buffer in again)
        for rank, rows_SPD in enumerate(rows):
            expected = nan(num_ranks - 1, slots, width, dtype=dtype)
            for place, source in enumerate(source for source in ranks if source != rank):
                owner_TK = torch.where(
                    plans[source].expert_TK >= 0, plans[source].expert_TK // local, -1
                )
                sent_T = (owner_TK == rank).any(1)
                expected[place, :num_tokens][sent_T] = tokens[source][sent_T]
            assert torch.equal(rows_SPD.isnan(), expected.isnan())
            equal((rows_SPD.nan_to_num(7), expected.nan_to_num(7)))
    for rank, buffer in enumerate(plan_buffers):
        by_kind = buffer[: 3 * numbers].view(3, num_ranks, slots, top_k)
        experts_SPK, places_SPK, bits_SPK = by_kind
        mine = (experts_SPK >= 0) & (experts_SPK < local)
        assert not mine[:, num_tokens:].any()
        for source, plan in enumerate(plans):
            expert_TK = plan.expert_TK - rank * local
            there = (plan.expert_TK >= 0) & (expert_TK >= 0) & (expert_TK < local)
            assert torch.equal(mine[source, :num_tokens], there)
            found = (source, slice(num_tokens))
            equal((experts_SPK[found][there], expert_TK[there]))
            equal((places_SPK[found][there], plan.place_TK[there]))
            equal((bits_SPK[found].view(torch.float32)[there], probs[source][there]))
            counts = buffer[3 * numbers :].view(num_ranks, local)[source]
            equal((counts, plan.kept_E[rank * local : (rank + 1) * local]))


def test_push_example():
    memories = [nan(2 + 2 + 28) for _ in range(2)]
    rows = [memory[:2].view(1, 2, 1) for memory in memories]
    plans = [memory[4:].view(torch.int32) for memory in memories]
    beside = ints([0, 0]), here(torch.ones(1, 2)), ints(1, 0, 0, 1)
    inputs = here(torch.ones(1, 1)), ints([0, 3]), addresses(*memories)
    direct.push(*inputs, rank=1, num_slots=2, num_local_experts=2, beside=beside, plan_at=16)
    assert rows[0].isnan().tolist() == [[[False], [True]]] and rows[1].isnan().all()
    experts = [plan[:8].view(2, 2, 2)[1].tolist() for plan in plans]
    assert experts == [[[0, 3], [-1, -1]], [[-2, 1], [-3, -3]]]
