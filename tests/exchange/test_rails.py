"""Rails around the exchange of a host, on threads as ranks.

`tests/exchange/test_hosts.py` has the groups of processes, `tests/experts/test_packed.py` passes
with kernels.
"""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch import DispatchConfig
from padded_dispatch.config import FIT, NO_DROP
from padded_dispatch.exchange import choose
from padded_dispatch.exchange.collectives import Arrived, Collectives, Values
from padded_dispatch.exchange.rails import Rails, plan_of_host
from padded_dispatch.routing import make_plan
from tests.support import reference
from tests.support.machines import ranks_on
from tests.support.threads import ThreadGroup, _Turns, grid, run_on_threads
from tests.support.whole_layers import check, make_case

CPU = torch.device("cpu")


def config_of(num_ranks: int, **changes: Any) -> DispatchConfig:
    sizes: Any = dict(num_experts=2 * num_ranks, top_k=3, capacity_factor=0.75)
    return DispatchConfig(**sizes | {"capacity_pool": "store", "num_ranks": num_ranks} | changes)


# H 2, 3 and 4; hosts in turn and in another order; hosts of unequal size; one rank on each.
ORDERS = ["aabb", "abab", "bbaa", "abba", "aabbcc", "abcabc", "aabbccdd"]
UNEQUAL = ["aaaabb", "aaab", "abcd"]


@pytest.mark.parametrize("machines", [*ORDERS, *UNEQUAL])
def test_layers_are_the_oracle(machines):
    """Layers that overflow one after the other; all rows to one rank; hosts without tokens."""
    config = config_of(len(machines))
    for routings in (["one rank", "hot", "full"], ["masked", "idle rank", "none", "idle half"]):
        check(make_case(config, routings, machines=machines), "store")


@pytest.mark.parametrize("recompute", ["", "reentrant", "other"])
@pytest.mark.parametrize(
    "changes",
    [
        {"capacity_factor": NO_DROP},
        {"capacity_factor": FIT},
        {"capacity_factor": 0.01},
        {"num_experts": 4, "top_k": 4},
        {"top_k": 1},
    ],
    ids=str,
)
def test_every_setting_is_the_oracle(changes, recompute):
    case = make_case(config_of(4, **changes), ["thin", "hot"], machines="abba", num_tokens=9)
    check(case, "store", recompute)


@pytest.mark.parametrize(("machines", "again"), [("aaaa", False), ("aabb", True)])
def test_tokens_are_sent_again_inside_of_hosts(monkeypatch, machines, again):
    """Three others of one host are fewer than 1.5 * 3 * 0.75, so they are kept there."""
    found, start = [], Collectives.start

    def noted(exchange: Collectives, *given: Any, sends_again: bool = False) -> Any:
        found.append((exchange.num_ranks, sends_again))
        return start(exchange, *given, sends_again=sends_again)

    monkeypatch.setattr(Collectives, "start", noted)
    check(make_case(config_of(4), ["thin"], machines=machines), "store")
    # A rail of two ranks, around the exchange of the two of a host.
    assert {*found} == ({(2, False), (2, True)} if again else {(4, False)})


@pytest.mark.parametrize("pool", ["cells", "padded"])
def test_cells_cross_without_a_rail(pool):
    check(make_case(config_of(4, capacity_pool="cells"), ["hot"], machines="aabb"), pool)


def _chosen(config: DispatchConfig) -> str:
    group, etp_group, _ = grid(config.num_ranks, config.etp_size)
    exchange, reason = choose(config, group, etp_group, "auto", packed=True, device=CPU)
    return f"{type(exchange).__name__}, {reason}"


@pytest.mark.parametrize(
    ("machines", "etp_size", "words"),
    [
        ("aabb", 1, "Rails, 2 hosts of 2 ranks; direct writes need tokens on GPUs, got cpu"),
        ("abcd", 1, "Collectives, 4 hosts of 1 rank; direct"),
        ("aaab", 1, "Collectives, 4 hosts of 1 rank; direct"),
        ("aabbaabb", 2, "Collectives, 2 hosts of 2 ranks; direct writes need expert_tensor_para"),
    ],
)
def test_rails_need_hosts_of_several_ranks_and_whole_experts(machines, etp_size, words):
    config = config_of(4, etp_size=etp_size)
    with ranks_on(machines):
        found = run_on_threads(len(machines), _chosen, config)
    assert len({*found}) == 1 and found[0].startswith(words)


def rails(config: DispatchConfig) -> Rails:
    exchange, _ = choose(config, dist.group.WORLD, None, "auto", packed=True, device=CPU)
    assert isinstance(exchange, Rails)
    return exchange


def _sums(hosts_HG: Any, rows_RKD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of a token that has a choice on each rank, and its gradient, likewise."""
    num_ranks = len(rows_RKD)
    tokens_TD = torch.zeros(1, rows_RKD.shape[2], dtype=rows_RKD.dtype, requires_grad=True)
    config = config_of(num_ranks, num_experts=num_ranks, top_k=num_ranks)
    plan = make_plan(torch.ones(1, num_ranks, dtype=torch.bool), top_k=num_ranks)
    wire = rails(config).start(plan, tokens_TD, 1)
    arrived = wire.open(tokens_TD, torch.ones(1, num_ranks))
    own_D = rows_RKD[dist.get_rank(), 0]
    sum_SPD = own_D.expand(arrived.values.rows_SPD.shape)
    arrived.values.rows_SPD.backward(sum_SPD)
    assert tokens_TD.grad is not None
    return wire.bring(sum_SPD.contiguous()), tokens_TD.grad


@pytest.mark.parametrize("machines", ["aabb", "abab", "abcabc"])
def test_sums_are_rounded_once_for_each_host(machines):
    """Bit for bit; 256 and three ones are 258 if they are of two hosts, and 260 of one."""
    random = np.random.default_rng(0)
    rows = torch.from_numpy(random.normal(size=(len(machines), 1, 64))).bfloat16()
    rows[:, :, 0] = 1
    rows[0, :, 0] = 256
    ranks_HG = reference.hosts(machines)
    host_R = [int(np.argwhere(ranks_HG == rank)[0, 0]) for rank in range(len(machines))]
    parts = [row.float().numpy() for row in rows[:, 0]]
    wanted = torch.from_numpy(reference.sum_at_home(parts, host_R, len(ranks_HG), _bf16)).bfloat16()
    with ranks_on(machines):
        found = run_on_threads(len(machines), _sums, ranks_HG, rows)
    for both in found:
        for summed in both:
            assert torch.equal(summed[0], wanted)
    if machines == "aabb":
        assert wanted[0] == 258


def _bf16(values: Any) -> Any:
    return torch.from_numpy(values).bfloat16().float().numpy()


def test_the_plan_of_a_host_by_hand():
    given = {
        "expert_SPK": torch.tensor([[[0, 2]], [[0, -1]]], dtype=torch.int32),
        "place_SPK": torch.tensor([[[4, 0]], [[0, 1]]], dtype=torch.int32),
        "count_SL": torch.tensor([[5, 0], [1, 0]], dtype=torch.int32),
    }
    values = Values(rows_SPD=torch.zeros(2, 1, 1))
    plan = plan_of_host(
        Arrived(values=values, prob_SPK=torch.ones(2, 1, 2), sent_TD=torch.ones(1, 1), **given)
    )
    assert plan.expert_TK.tolist() == [[0, -1], [0, -1]]
    assert plan.place_TK.tolist() == [[4, 0], [5, 1]]
    assert plan.kept_E.tolist() == [6, 0]
    assert {tensor.dtype for tensor in vars(plan).values()} == {torch.int32}


def _other_tokens() -> bool:
    """Ranks have 2, 3, 4 and 5 tokens in 6 slots; each comes home twice, once for each choice."""
    num_tokens = dist.get_rank() + 2
    tokens_TD = torch.randint(-9, 9, (num_tokens, 3)).double()
    map_TE = torch.zeros(num_tokens, 8, dtype=torch.bool)
    map_TE[:, [1, 6]] = True
    plan = make_plan(map_TE, top_k=2)
    wire = rails(config_of(4, top_k=2)).start(plan, tokens_TD, 6)
    arrived = wire.open(tokens_TD, torch.ones(num_tokens, 2))
    number_SP = ((arrived.expert_SPK >= 0) & (arrived.expert_SPK < 2)).sum(2)
    assert number_SP.shape == (2, 12) and number_SP.sum() == arrived.count_SL.sum()
    values = arrived.values.rows_SPD
    rows = torch.where(number_SP[..., None] > 0, number_SP[..., None] * values, 0)
    return torch.equal(wire.bring(rows), 2 * tokens_TD)


def test_ranks_may_have_different_numbers_of_tokens():
    with ranks_on("abab"):
        assert run_on_threads(4, _other_tokens) == [True] * 4


@pytest.mark.parametrize("machines", ["aabb", "abcabc"])
def test_all_ranks_start_the_same_collectives_whatever_the_routing(monkeypatch, machines):
    """And so many bytes cross: H - 1 blocks of tokens and plans a layer and way, and of sums."""
    of_rank, crossed, meet = defaultdict(list), defaultdict(int), _Turns.meet

    def noted(turns: _Turns, group: ThreadGroup, started: str, data: Any, copy: Any) -> None:
        of_rank[group.own_rank].append((started, len(group.ranks)))
        if len({machines[rank] for rank in group.ranks}) == len(group.ranks):
            tensors = [part for part in data if isinstance(part, Tensor)]
            if len(tensors) == 2:  # What arrives, of which this rank's own block does not cross.
                arrived = tensors[0]
                own = arrived.nbytes // len(group.ranks)
                crossed[group.own_rank] += arrived.nbytes - own
        meet(turns, group, started, data, copy)

    monkeypatch.setattr(_Turns, "meet", noted)
    config, hidden, num_tokens = config_of(len(machines)), 6, 7
    routings = ["thin", "idle rank", "idle source", "masked", "none"]
    check(make_case(config, routings, machines=machines, hidden=hidden), "store")
    assert all(started == of_rank[0] for started in of_rank.values())
    hosts = len(set(machines))
    tokens, choices = num_tokens * hidden * 8, num_tokens * config.top_k
    plan = choices * (4 + 4 + 8) + config.num_experts * 4
    # Forward: tokens, plans; sums home. Backward: gradients; sums home, numbers beside.
    of_layer = (hosts - 1) * (4 * tokens + plan + choices * 8)
    assert set(crossed.values()) == {len(routings) * of_layer}
