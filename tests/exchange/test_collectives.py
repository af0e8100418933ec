"""The exchange over collectives: sums, and that all ranks start the same.

`tests/experts/test_packed.py` has whole passes with kernels, `tests/test_dispatcher.py` without.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch import DispatchConfig
from padded_dispatch.exchange.collectives import Collectives
from padded_dispatch.routing import make_plan
from tests.support.device import INTERPRETED, ints
from tests.support.threads import ThreadGroup, _Turns, grid, run_on_threads
from tests.support.whole_layers import check, make_case


def test_one_rank_moves_nothing():
    map_TE = torch.tensor([[True, False], [True, True], [False, False]])
    plan = make_plan(map_TE, top_k=2)
    tokens_TD, prob_TK = torch.ones(3, 4), torch.ones(3, 2)
    of_one: Any = SimpleNamespace(size=lambda: 1)  # A group without any collective.
    for group in (None, of_one):
        exchange = Collectives(2, group, group)
        assert (exchange.kind, exchange.num_sources) == ("none", 1)
        wire = exchange.start(plan, tokens_TD, 1)
        arrived = wire.open(tokens_TD, prob_TK)
        assert arrived.values.rows_SPD.data_ptr() == tokens_TD.data_ptr()
        assert arrived.expert_SPK.data_ptr() == plan.expert_TK.data_ptr()
        assert wire.bring(tokens_TD[None]).data_ptr() == tokens_TD.data_ptr()
        assert wire.bring_beside(torch.full((1, 3, 2), 7.0)).tolist() == [[7, 0], [7, 7], [0, 0]]
        wire = exchange.start(plan, tokens_TD, 5)  # More slots than tokens.
        assert wire.bring_beside(torch.full((1, 5, 2), 7.0)).tolist() == [[7, 0], [7, 7], [0, 0]]
        assert wire.bring(torch.ones(1, 5, 4)).tolist() == tokens_TD.tolist()


def _shards_and_ranks() -> list[Tensor]:
    """Return sums of 256 and ones in bf16 over etp ranks, and over ranks, and their transposes."""
    found = []
    for num_ranks, etp_size in ((1, 4), (4, 1)):
        group, etp_group, _ = grid(num_ranks, etp_size)
        tokens_TD = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
        plan = make_plan(torch.ones(1, num_ranks, dtype=torch.bool), top_k=num_ranks)
        exchange = Collectives(1, group, etp_group)
        value = 256.0 if dist.get_rank() == 0 else 1.0
        wire = exchange.start(plan, tokens_TD, 1)
        rows_SPD = wire.open(tokens_TD, torch.ones(1, num_ranks)).values.rows_SPD
        # Not contiguous, as the gradient of a sum.
        rows_SPD.backward(torch.tensor(value, dtype=torch.bfloat16).expand(4, 1, 1))
        dtype = torch.float32 if etp_size > 1 else torch.bfloat16
        found.append(wire.bring(torch.tensor(value, dtype=dtype).expand(4, 1, 1)))
        found.append(tokens_TD.grad)
    return found


def test_bf16_adds_up_in_fp32():
    # Above 256 bf16 has even numbers only: adding 1 changes nothing. 259 rounds to 260.
    ones = torch.ones((), dtype=torch.bfloat16)
    assert (((256 * ones) + ones) + ones) + ones == 256
    for results in run_on_threads(4, _shards_and_ranks):
        for summed in results:
            assert summed.tolist() == [[260.0]]
            assert summed.dtype == torch.bfloat16


def _sums_of_ranks() -> list[Any]:
    plan = make_plan(torch.ones(1, 2, dtype=torch.bool), top_k=2)
    tokens_TD = torch.ones(1, 1, dtype=torch.float16)
    wire = Collectives(1, dist.group.WORLD).start(plan, tokens_TD, 1)
    wide_SPD = torch.full((2, 1, 1), [2049.0, 1.0][dist.get_rank()])
    return wire.bring(wide_SPD).tolist()


def test_the_sum_of_each_rank_is_rounded():
    """As kernels do before it goes home: 2049 is 2048 in fp16, and so is 2048 + 1."""
    assert run_on_threads(2, _sums_of_ranks) == [[[2048.0]]] * 2


def _home_of_shards() -> tuple[list[Any], Any]:
    """Return the sum of 2048 and 1, of one shard, and of 1 and 0, of the other, and what is beside.

    In fp16 it is 2050, and 2048 if a shard's sum is rounded first.
    """
    from padded_dispatch.kernels import layout

    _, etp_group, shard = grid(1, 2)
    plan = make_plan(torch.ones(1, 2, dtype=torch.bool), top_k=2)
    tokens_TD = torch.ones(1, 4, dtype=torch.float16)
    wire = Collectives(2, None, etp_group).start(plan, tokens_TD, 1)
    arrived, offsets = wire.open(tokens_TD, torch.ones(1, 2)), ints(0, 1, 2, 3, 4)
    choices = arrived.expert_SPK, arrived.place_SPK, arrived.prob_SPK
    listed = layout.list_slots(*choices, offsets, ints(9), 2)
    # The rows of both sources for one expert, then those for the other.
    number_N = torch.tensor([[2048.0, 2048, 1, 1], [1, 1, 0, 0]][shard])
    rows_ND = number_N[:, None].expand(4, 4).half().contiguous()
    sum_TD, beside_TK = wire.home(lambda: rows_ND, listed, offsets, number_N)
    assert beside_TK is not None
    return sum_TD.tolist(), beside_TK.tolist()


@INTERPRETED
def test_parts_of_split_experts_come_home_as_one_rounded_sum():
    assert run_on_threads(2, _home_of_shards) == [([[2050.0] * 4], [[2049.0, 1.0]])] * 2


def _other_tokens() -> list[Any]:
    """Ranks have 1, 2 and 3 tokens in 4 slots, each for the first expert of each rank."""
    num_tokens = dist.get_rank() + 1
    tokens_TD = torch.randint(-9, 9, (num_tokens, 3)).double()
    plan = make_plan(torch.tensor([[True, False] * 3] * num_tokens), top_k=3)
    wire = Collectives(2, dist.group.WORLD).start(plan, tokens_TD, 4)
    arrived = wire.open(tokens_TD, torch.ones(num_tokens, 3))
    assert torch.equal(wire.bring(arrived.values.rows_SPD), 3 * tokens_TD)
    assert arrived.count_SL.tolist() == [[1, 0], [2, 0], [3, 0]]
    is_here_SPK = (arrived.expert_SPK >= 0) & (arrived.expert_SPK < 2)
    return is_here_SPK.sum(2).tolist()


def test_slots_of_other_ranks_with_fewer_tokens_have_no_expert():
    slots = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert run_on_threads(3, _other_tokens) == [slots] * 3


def _sends_again() -> list[bool]:
    exchange, tokens_TD = Collectives(1, dist.group.WORLD), torch.ones(2, 3)
    plan = make_plan(torch.eye(2, dtype=torch.bool), top_k=1)
    wires = [exchange.start(plan, tokens_TD, slots, sends_again=True) for slots in (1, 2)]
    return [wire.sends_again for wire in wires]


def test_a_pass_with_fewer_slots_than_tokens_keeps_them():
    assert run_on_threads(2, _sends_again) == [[False, True]] * 2


@pytest.mark.parametrize("pool", ["store", "cells"])
def test_all_ranks_start_the_same_collectives_whatever_the_routing(monkeypatch, pool):
    """Forward and backward, with slots for all tokens and for fewer, in groups of other ranks."""
    of_rank, meet = defaultdict(list), _Turns.meet

    def noted(turns: _Turns, group: ThreadGroup, started: str, *given: Any) -> None:
        of_rank[group.own_rank].append((started, len(group.ranks)))
        meet(turns, group, started, *given)

    monkeypatch.setattr(_Turns, "meet", noted)
    sizes: Any = dict(num_experts=8, top_k=3, num_ranks=4, etp_size=2, capacity_factor=0.3)
    config = DispatchConfig(**sizes, capacity_pool=pool, policy="position")
    assert config.wire_slots(7) == (7 if pool == "store" else 2)
    check(make_case(config, ["thin", "idle rank", "idle source", "masked", "none"]), pool)
    assert all(started == of_rank[0] for started in of_rank.values()) and len(of_rank) == 8
