"""Two levels equal the all-to-all, bit by bit, forward and backward; and what each level sends.

Ranks of one host play several. Payloads are random, so that another order of a sum would show.
Rows that hold no token are NaN: in fresh memory, in the experts' output, and in its gradient.
"""

import itertools
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.library import opcheck
from torch.profiler import ProfilerActivity, profile

from padded_dispatch import DispatchConfig, PaddedDispatcher
from padded_dispatch.config import FIT
from padded_dispatch.exchange import ExpertInput, two_level
from padded_dispatch.exchange.alltoall import AllToAllExchange
from padded_dispatch.exchange.two_level import (
    LevelBytes,
    TwoLevelExchange,
    bytes_at_once,
    hosts_of,
    level_bytes,
    require_room,
)
from padded_dispatch.ops.plan import make_plan
from tests.support.collectives import Records, recorded
from tests.support.grids import grid, poisoned_memory
from tests.support.pool import WorkerError
from tests.support.routings import routing_map
from tests.support.threads import run_on_threads
from tests.test_dispatcher import is_real, poison

TOKENS, HIDDEN, LOCAL_EXPERTS = 7, 4, 2
CASES = [
    {},
    {"packed": True, "dtype": torch.bfloat16, "skew": "hot"},
    {"packed": True, "capacity_pool": "rank", "policy": "position", "skew": "same"},
    {"dtype": torch.bfloat16, "policy": "random", "skew": "none on the last"},
    {"packed": True, "remedy": "renormalize", "capacity_factor": 2.0},
    {"packed": True, "capacity_factor": FIT, "skew": "hot"},
]


def config_of(num_ranks: int, etp_size: int = 1, **changes: Any) -> DispatchConfig:
    sizes = dict(num_experts=LOCAL_EXPERTS * num_ranks, top_k=3, capacity_factor=0.75)
    return DispatchConfig(**{**sizes, **changes}, num_ranks=num_ranks, etp_size=etp_size)


def _is_real(given: ExpertInput) -> Tensor:
    if given.offsets_LS is None:
        return is_real(given)
    return torch.arange(given.rows_ND.shape[0]) < given.offsets_LS[-1, -1]


def _step(
    dispatcher: PaddedDispatcher, dtype: torch.dtype, skew: Any, source: int
) -> dict[str, Tensor]:
    """Return all that a step makes on this rank."""
    config, draw = dispatcher.config, torch.Generator().manual_seed(source)
    if skew == "none on the last":
        skew = "none" if source == config.num_sources - 1 else "uniform"
    map_TE = torch.from_numpy(
        routing_map(TOKENS, config.num_experts, config.top_k, skew=skew, seed=source)
    )
    tokens_TD = torch.randn(TOKENS, HIDDEN, generator=draw).to(dtype).requires_grad_()
    probs_TE = torch.rand(map_TE.shape, generator=draw).requires_grad_()
    weight_DD = torch.randn(HIDDEN, HIDDEN, generator=draw).to(dtype).requires_grad_()
    sent = dispatcher.dispatch(
        tokens_TD,
        probs_TE,
        map_TE,
        draw=torch.tensor(3) if config.policy == "random" else None,
    )
    given = sent.expert_input
    is_real_N = _is_real(given)
    rows_ND, probs_N = poison(given.rows_ND, is_real_N), poison(given.probs_N, is_real_N)
    out_ND = torch.where(is_real_N[:, None], rows_ND, 0) @ weight_DD
    out_ND = torch.where(is_real_N[:, None], out_ND, 0)  # Keeps NaN out of the weight's gradient.
    out_ND = poison((out_ND * probs_N[:, None]).to(dtype), is_real_N)
    out_ND.retain_grad()
    out_TD = dispatcher.combine(out_ND, sent)
    out_TD.backward(torch.randn(out_TD.shape, generator=draw).to(dtype))
    found = {"out": out_TD.detach(), "kept": given.kept_SL, "rows": given.rows_ND[is_real_N]}
    for name, of in dict(tokens=tokens_TD, probs=probs_TE, weight=weight_DD, out=out_ND).items():
        assert of.grad is not None
        found[f"gradient of {name}"] = of.grad[is_real_N] if name == "out" else of.grad
    if given.offsets_LS is None:
        assert not given.rows_ND[~is_real_N].any()
        assert out_ND.grad is not None
        assert not out_ND.grad[~is_real_N].any()
    return found


def _both(
    case: dict[str, Any], ranks_per_host: int, etp_size: int = 1, link_rows: Any = "auto"
) -> list[str]:
    """Return what differs between the exchanges on this rank; with fp64, by more than rounding."""
    case = {"packed": False, "dtype": torch.float32, "skew": "uniform", **case}
    packed, dtype, skew = (case.pop(name) for name in ("packed", "dtype", "skew"))
    num_ranks = dist.get_world_size() // etp_size
    group, etp_group = dist.group.WORLD, None
    if etp_size > 1:
        here = grid(num_ranks, etp_size)
        group, etp_group = here.group, here.etp_group
    found = []
    for exchange in ("alltoall", "two-level"):
        dispatcher = PaddedDispatcher(
            config_of(num_ranks, etp_size, **case),
            group=group,
            etp_group=etp_group,
            packed=packed,
            exchange=exchange,
            ranks_per_host=ranks_per_host if exchange == "two-level" else None,
            link_rows=link_rows if exchange == "two-level" else "auto",
        )
        with poisoned_memory():
            found.append(_step(dispatcher, dtype, skew, dist.get_rank()))
    # Ranks may have other numbers of tokens in passes that fit.
    assert type(dispatcher.exchanges._fitting) is AllToAllExchange
    assert dispatcher.exchanges.num_hosts == num_ranks // ranks_per_host
    plain, levels = found
    if dtype == torch.float64:
        return [n for n, value in plain.items() if not torch.allclose(value, levels[n], 1e-12)]
    return [name for name, value in plain.items() if not torch.equal(value, levels[name])]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_hosts_of_two_ranks_equal_the_all_to_all(pool4, case):
    assert pool4.run(_both, case, 2) == [[]] * 4


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_on_hosts_differ_by_rounding_alone(pool4, case):
    case = {**case, "dtype": torch.float64}
    assert pool4.run(_both, case, 2, 1, "summed") == [[]] * 4


def _summed() -> Tensor:
    """Return a token's sum of three rows, two of them on one of two hosts of one rank."""
    config = DispatchConfig(num_experts=4, top_k=3, capacity_factor=4.0, num_ranks=2)
    dispatcher = PaddedDispatcher(
        config,
        group=dist.group.WORLD,
        exchange="two-level",
        ranks_per_host=1,
        link_rows="summed",
    )
    map_TE = torch.tensor([[True, True, True, False]])
    tokens_TD = torch.ones(1, 1, dtype=torch.bfloat16)
    sent = dispatcher.dispatch(tokens_TD, map_TE.float(), map_TE)
    given = sent.expert_input
    # Experts 0, 1 and 2 return 256, 1 and 1.
    factor = torch.tensor([256.0, 1.0] if dist.get_rank() == 0 else [1.0, 0.0])
    factor_N = factor.repeat_interleave(len(given.rows_ND) // 2)
    return dispatcher.combine((given.rows_ND * factor_N[:, None]).bfloat16(), sent)


def test_a_sum_on_a_host_is_rounded_before_it_goes_back(pool2):
    """256 + 1 is 256 in bf16, and so is 256 + 1 again; rounded once, the sum would be 258."""
    assert [float(sum_TD) for sum_TD in pool2.run(_summed)] == [256.0, 256.0]


@pytest.mark.parametrize("per_host", [1, 2, 4])
def test_eight_ranks_equal_the_all_to_all(per_host):
    for case in CASES[:3]:
        assert run_on_threads(8, _both, case, per_host) == [[]] * 8


def test_experts_that_are_split_equal_the_all_to_all(pool4):
    assert pool4.run(_both, {}, 1, 2) == [[]] * 4


def _one_step(exchange: Any, skew: str, capacity_pool: Any) -> None:
    config = config_of(8, capacity_pool=capacity_pool)
    packed = capacity_pool == "rank"
    per_host = None if exchange == "alltoall" else 2
    dispatcher = PaddedDispatcher(
        config,
        group=dist.group.WORLD,
        packed=packed,
        exchange=exchange.removesuffix(" summed"),
        ranks_per_host=per_host,
        link_rows="summed" if exchange.endswith("summed") else "auto",
    )
    _step(dispatcher, torch.float32, skew, dist.get_rank())


def _sent(records: Records, rank: int, per_host: int) -> tuple[int, int]:
    """Return the bytes that a rank sends to other hosts and to its own, in payload collectives."""
    between = within = 0
    for name, group, (_, (dtype, shape)) in records.of_rank[rank]:
        num_bytes = dtype.itemsize * shape.numel()
        for peer in group:
            if peer == rank:
                continue
            to_peer = num_bytes if name == "all_gather_single" else num_bytes // len(group)
            if peer // per_host == rank // per_host:
                within += to_peer
            else:
                between += to_peer
    return between, within


@pytest.mark.parametrize("skew", ["uniform", "hot"])
@pytest.mark.parametrize("pool", ["expert", "rank"])
@pytest.mark.parametrize("exchange", ["alltoall", "two-level", "two-level summed"])
def test_each_level_sends_the_bytes_that_were_predicted(exchange, pool, skew):
    with recorded(8) as records:
        run_on_threads(8, _one_step, exchange, skew, pool)
    for started in records.of_rank:
        started[:] = [one for one in started if one[0].endswith("_single")]
    config = config_of(8, capacity_pool=pool)
    levels = dict(two_levels=exchange != "alltoall", summed=exchange.endswith("summed"))
    forward = level_bytes(config, TOKENS, HIDDEN, 4, ranks_per_host=2, **levels)
    # Backward, gradients of rows go the other way; those of probabilities go, and counts with them.
    sizes = config.sizes(TOKENS)
    meta = 4 * (sizes.num_pools * sizes.pool_slots + config.num_experts)
    back = meta * 6 // 8 + forward.back_between, meta // 8 + forward.back_within
    there = forward.there_between - meta * 6 // 8, forward.there_within - meta // 8
    for rank in range(8):
        assert _sent(records, rank, 2) == (
            forward.there_between + forward.back_between + there[0] + back[0],
            forward.there_within + forward.back_within + there[1] + back[1],
        )


def test_bytes_of_a_public_model():
    config = DispatchConfig(num_experts=128, top_k=8, capacity_factor=1.25, num_ranks=64)

    def there(two_levels: bool, ranks_per_host: int) -> LevelBytes:
        return level_bytes(
            config, 4096, 2048, 2, ranks_per_host=ranks_per_host, two_levels=two_levels
        )

    # 7 * 4096 rows of 4 KiB; a number, a probability and a count for 7/8 of 128 * 320 slots.
    assert there(True, 8).there_between == 7 * 4096 * 4096 + 112 * (320 * 8 + 4)
    assert there(False, 8).there_between == 112 * (320 * 4100 + 4)
    assert there(True, 32).there_between == 4096 * 4096 + 64 * (320 * 8 + 4)
    assert there(True, 8).back_between == there(False, 8).back_between == 112 * 320 * 4096
    assert there(True, 8).there_within == 112 * 320 * 4096 + 14 * (320 * 4 + 4)
    assert there(False, 8).there_within == 14 * (320 * 4100 + 4)
    assert there(True, 8).back_within == 112 * 320 * 4096
    assert there(False, 8).back_within == 14 * 320 * 4096


def _allocated(
    config: DispatchConfig, ranks_per_host: int, summed: bool = False
) -> list[tuple[int, int]]:
    """Return the bytes of rows that each way allocates in all, and the most of them at once."""
    hosts = hosts_of(dist.group.WORLD, ranks_per_host)
    groups = hosts, dist.group.WORLD
    exchange = TwoLevelExchange(LOCAL_EXPERTS, *groups, packed=True, summed=summed)
    map_TE = torch.from_numpy(routing_map(TOKENS, config.num_experts, config.top_k))
    plan = make_plan(map_TE, top_k=config.top_k, sizes=config.sizes(TOKENS))
    maps = plan.slot_of_TK, plan.choice_of_slot_GP
    tokens_TD, rows_GPD = torch.ones(TOKENS, 2048), torch.ones(*maps[1].shape, 2048)
    found = []
    for way, rows in ((two_level._go, tokens_TD), (two_level._return, rows_GPD)):
        way(rows, *maps, *exchange._way)
        # Gloo copies what it gathers, and the sum of a token's rows has copies in torch; neither
        # is of the exchange.
        with (
            patch.object(two_level, "gather_into", lambda *_: None),
            patch.object(
                torch.ops.padded_dispatch,
                "combine",
                lambda rows, slots, *_: rows.new_zeros(len(slots) if summed else 1, 2048),
            ),
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        ):
            kept = way(rows, *maps, *exchange._way)
            torch.empty(1)  # The profiler leaves out what is freed last.
        assert profiler.profiler is not None
        events = [one for one in profiler.profiler.kineto_results.events() if one.nbytes()]
        sizes = [one.nbytes() for one in sorted(events, key=lambda one: one.start_ns())]
        of_rows = [size for size in sizes if abs(size) > 2048 * 4]
        alive = itertools.accumulate(of_rows)
        found.append((sum(size for size in of_rows if size > 0), max(alive)))
        del kept
    return found


@pytest.mark.parametrize("ranks_per_host", [1, 2])
@pytest.mark.parametrize("factor", [0.25, 2.0])
def test_bytes_are_those_that_ranks_allocate(pool4, factor, ranks_per_host):
    config, row = config_of(4, capacity_factor=factor, num_experts=8), 2048 * 4
    hosts = 4 // ranks_per_host
    sizes = TOKENS, 2048, 4
    plain, levels = (
        config.buffer_bytes(*sizes, packed=True, num_hosts=num_hosts) for num_hosts in (1, hosts)
    )
    slots = 8 * config.capacity(TOKENS) * row
    meta = 4 * 8 * (config.capacity(TOKENS) + 1)
    assert plain.send == plain.receive == slots + meta
    there = levels.send + levels.receive - 2 * meta
    back = slots + levels.back - plain.back
    found = pool4.run(_allocated, config, ranks_per_host)
    assert [(all_there, all_back) for (all_there, _), (all_back, _) in found] == [(there, back)] * 4
    # A thread of gloo may hold a buffer a moment longer on some ranks.
    most = bytes_at_once(config, *sizes, num_hosts=hosts)
    assert min(most_there for (_, most_there), _ in found) == most
    assert min(most_back for _, (_, most_back) in found) == 2 * slots
    assert (levels.experts, levels.plan) == (plain.experts, plain.plan)


@pytest.mark.parametrize("factor", [0.25, 2.0])
def test_ranks_hold_no_more_at_once_than_was_predicted_with_sums_on_hosts(pool4, factor):
    config, sizes = config_of(4, capacity_factor=factor, num_experts=8), (TOKENS, 2048, 4)
    slots, tokens = 8 * config.capacity(TOKENS), 2 * TOKENS
    found = pool4.run(_allocated, config, 2, True)
    there, back = slots + max(slots, tokens + 1), 2 * max(slots, tokens)
    assert min(most_there for (_, most_there), _ in found) == there * 2048 * 4
    assert min(most_back for _, (_, most_back) in found) == back * 2048 * 4
    most = bytes_at_once(config, *sizes, num_hosts=2, summed=True)
    assert most == max(there, back) * 2048 * 4


def test_too_little_memory_is_refused_by_name():
    config = DispatchConfig(num_experts=128, top_k=8, capacity_factor=1.25, num_ranks=64)
    tokens_TD = Mock(spec=Tensor, is_cuda=True, shape=(4096, 2048))
    tokens_TD.element_size.return_value = 2
    need = 2 * 128 * 320 * 4096
    with patch.object(two_level, "free_bytes", lambda group, device: need):
        require_room(config, tokens_TD, Mock(), 8)
    with (
        patch.object(two_level, "free_bytes", lambda group, device: need - 2**26),
        pytest.raises(ValueError) as caught,
    ):
        require_room(config, tokens_TD, Mock(), 8)
    assert str(caught.value) == (
        "exchange='two-level' must have 0.31 GiB free for slots before and after a hop, got '0.25 "
        "GiB on the rank that has least'; lower the capacity factor or the tokens per rank, or set "
        "exchange='alltoall'"
    )


def test_rows_are_padded_unless_packed_ones_are_asked_for():
    hosts: Any = SimpleNamespace(way=("rail", "host", 2, 2))
    group: Any = SimpleNamespace(size=lambda: 4, group_name="group")
    for given, packed in (({}, False), ({"packed": True}, True)):
        exchange = TwoLevelExchange(2, hosts, group, **given)
        way = "rail", "host", 2, 2, not packed, False
        assert (exchange.packed, exchange._way) == (packed, way)


def _hosts(names: list[str]) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(two_level.socket, "gethostname", lambda: names[dist.get_rank()])
        hosts = hosts_of(dist.group.WORLD)
    assert hosts is hosts_of(dist.group.WORLD, 2)
    return [dist.get_process_group_ranks(group) for group in (hosts.rail, hosts.host)]


def test_hosts_are_those_of_the_names(pool4):
    assert pool4.run(_hosts, ["b", "b", "a", "a"]) == [
        [[0, 2], [0, 1]],
        [[1, 3], [0, 1]],
        [[0, 2], [2, 3]],
        [[1, 3], [2, 3]],
    ]


@pytest.mark.parametrize(
    "names", [["a"] * 4, ["a", "a", "a", "b"], ["a", "b", "a", "b"], ["a", "b", "b", "a"]]
)
def test_other_hosts_are_refused_by_name(pool4, names):
    with pytest.raises(WorkerError) as caught:
        pool4.run(_hosts, names)
    for error in caught.value.errors.values():
        assert str(error).startswith(
            "the ranks of exchange='two-level' must be on several hosts, equally many on each, got "
        )
        assert "set exchange='alltoall', or ranks_per_host" in str(error)


def _pairs_of(bound_to: str | None, part: bool) -> list[list[int]] | str:
    """Return the groups of two hosts of one rank each, or why there are none.

    `bound_to`: the device that the default group is bound to. `part`: of {0, 1} or {2, 3}.
    """
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    group = pairs[dist.get_rank() // 2] if part else dist.new_group()
    default = SimpleNamespace(bound_device_id=bound_to)
    names = SimpleNamespace(_world=distributed_c10d._world, _get_default_group=lambda: default)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(two_level, "distributed_c10d", names)
        try:
            hosts = hosts_of(group, 1)
        except ValueError as error:
            return str(error)
    return [dist.get_process_group_ranks(group) for group in (hosts.rail, hosts.host)]


def test_a_part_of_a_default_group_that_is_bound_to_a_device_is_refused(pool4):
    assert pool4.run(_pairs_of, None, True) == [
        [[0, 1], [0]],
        [[0, 1], [1]],
        [[2, 3], [2]],
        [[2, 3], [3]],
    ]
    [words] = set(pool4.run(_pairs_of, "cuda:0", True))
    assert "got 'a part of a default group that is bound to cuda:0'; leave device_id out" in words
    assert pool4.run(_pairs_of, "cuda:0", False) == [[[0, 1, 2, 3], [r]] for r in range(4)]


def _one_group_more() -> None:
    dist.new_group([0])
    hosts_of(dist.new_group(), 1)


def test_ranks_that_have_made_other_numbers_of_groups_are_refused(pool2):
    with pytest.raises(WorkerError) as caught:
        pool2.run(_one_group_more)
    errors = [str(error) for error in caught.value.errors.values()]
    assert len(errors) == 2
    assert all("must be equally many, since torch names new ones" in error for error in errors)


def _refused(ranks_per_host: int | None, **changes: Any) -> None:
    PaddedDispatcher(
        config_of(dist.get_world_size(), **changes),
        group=dist.group.WORLD,
        packed=True,
        exchange="two-level",
        ranks_per_host=ranks_per_host,
    )


def _another_number() -> None:
    _refused(1 + dist.get_rank())


def _receiver() -> None:
    _refused(1, capacity_pool="receiver")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_another_number, "ranks_per_host is 1 on rank 0, 2 on rank 1"),
        (_receiver, "capacity_pool must be 'expert' or 'rank' with exchange='two-level', got"),
    ],
)
def test_what_cannot_work_is_refused_on_all_ranks(pool2, make, words):
    with pytest.raises(WorkerError) as caught:
        pool2.run(make)
    errors = list(caught.value.errors.values())
    assert len(errors) == 2
    assert all(words in str(error) for error in errors)


def test_one_rank_has_no_levels():
    with pytest.raises(ValueError, match="must be on several hosts, got one rank"):
        PaddedDispatcher(config_of(1, top_k=2), exchange="two-level")


def _ops() -> None:
    draw = torch.Generator().manual_seed(dist.get_rank())
    slot_of_TK = torch.tensor([[0, 3], [5, -1], [7, 2]], dtype=torch.int32)
    choice_of_slot_GP = torch.full((4, 2), -1, dtype=torch.int32)
    for choice, slot in enumerate(slot_of_TK.flatten().tolist()):
        if slot >= 0:
            choice_of_slot_GP.view(-1)[slot] = choice
    way = slot_of_TK, choice_of_slot_GP, *hosts_of(dist.group.WORLD, 2).way, True, True
    tokens_TD = torch.randn(3, 2, generator=draw, dtype=torch.float64, requires_grad=True)
    slots_MPD = torch.randn(4, 2, 2, generator=draw, dtype=torch.float64, requires_grad=True)
    opcheck(two_level._go, (tokens_TD, *way))
    opcheck(two_level._return, (slots_MPD, *way))


def test_the_ops_are_ordinary_ops(pool4):
    pool4.run(_ops, timeout_s=60)
