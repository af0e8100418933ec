"""The exchange over collectives: sums, what is struck, and that all ranks start the same.

`tests/experts/test_packed.py` has whole passes with kernels, `tests/test_dispatcher.py` without.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch import DispatchConfig
from padded_dispatch.exchange.collectives import Collectives
from padded_dispatch.routing import make_plan
from tests.support import reference
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
        assert exchange.strike(map_TE, prob_TK, 1, "probs") == (map_TE, None)
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


def _struck(map_TE: Tensor, probs_TE: Tensor, num_slots: int, policy: str) -> Any:
    exchange = Collectives(map_TE.shape[1] // 2, dist.group.WORLD)
    return exchange.strike(map_TE, probs_TE, num_slots, policy)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_tokens_past_the_slots_of_a_rank_are_struck(policy):
    random = np.random.default_rng(0)
    for num_slots in (1, 2, 5, 6):
        map_TE = torch.from_numpy(random.random((6, 6)) < 0.4)
        probs_TE = torch.from_numpy(random.choice([0.5, 0.25, 0.0, -0.0], (6, 6)))  # with ties
        for kept_TE, struck in run_on_threads(2, _struck, map_TE, probs_TE, num_slots, policy):
            given = dict(num_slots=num_slots, num_ranks=2, policy=policy)
            kept = reference.strike(map_TE.numpy(), probs_TE.numpy(), **given)
            expected_TE = torch.from_numpy(kept)
            assert torch.equal(kept_TE, expected_TE)
            if num_slots == 6:
                assert struck is None
            else:
                assert struck.num_rows.dtype == struck.num_asked.dtype == torch.int32
                assert struck.num_rows == (map_TE & ~expected_TE).sum()
                of_ranks = [int(part.any(1).sum()) for part in map_TE.split(3, 1)]
                assert struck.num_asked == max(of_ranks)


@pytest.mark.parametrize("factor", [4.0, 0.3])
def test_all_ranks_start_the_same_collectives_whatever_the_routing(monkeypatch, factor):
    """Forward and backward, with a struck token and without, in groups of other ranks, too."""
    of_rank, meet = defaultdict(list), _Turns.meet

    def noted(turns: _Turns, group: ThreadGroup, started: str, *given: Any) -> None:
        of_rank[group.own_rank].append((started, len(group.ranks)))
        meet(turns, group, started, *given)

    monkeypatch.setattr(_Turns, "meet", noted)
    sizes: Any = dict(num_experts=8, top_k=3, num_ranks=4, etp_size=2, capacity_factor=factor)
    config = DispatchConfig(**sizes, capacity_pool="store", policy="position")
    check(make_case(config, ["thin", "idle rank", "idle source", "masked", "none"]), "store")
    assert all(started == of_rank[0] for started in of_rank.values()) and len(of_rank) == 8
