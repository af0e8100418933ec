"""Which ranks are a host, and groups of hosts and rails on processes."""

import gc
import os
import runpy
import socket
import sys
import tempfile
from datetime import timedelta
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from padded_dispatch import Activation, DispatchConfig, ExpertWeights, PaddedDispatcher
from padded_dispatch.exchange import hosts
from padded_dispatch.exchange.hosts import arranged, groups_of, hosts_of, join
from padded_dispatch.exchange.mirror import AbsentRanksError, absent_ranks_named, time_limit
from tests.support import pool as workers
from tests.support.machines import ranks_on
from tests.support.pool import WorkerError, WorkerPool
from tests.support.threads import poisoned_memory, run_on_threads
from tests.support.whole_layers import assert_found, expected, make_case, one_pass

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("machines", "ranks_HG", "words"),
    [
        ("aaaa", [[0, 1, 2, 3]], "1 hosts of 4 ranks"),
        ("aabb", [[0, 1], [2, 3]], "2 hosts of 2 ranks"),
        ("abab", [[0, 2], [1, 3]], "2 hosts of 2 ranks"),
        ("aabbaa", [[0, 1], [4, 5], [2, 3]], "3 hosts of 2 ranks"),
        ("bbaaaa", [[0, 1], [2, 3], [4, 5]], "3 hosts of 2 ranks"),
        ("aaab", [[0], [1], [2], [3]], "4 hosts of 1 rank"),
        ("aaaaaabbbb", [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], "5 hosts of 2 ranks"),
    ],
)
def test_hosts_have_as_many_ranks_each(machines, ranks_HG, words):
    for rank in range(len(machines)):
        found = arranged(machines, rank)
        host, number = found.own
        assert found.ranks_HG == ranks_HG and ranks_HG[host][number] == rank
        assert (found.num_hosts, found.num_inside) == (len(ranks_HG), len(ranks_HG[0]))
        assert str(found) == words
        assert found.num_away == sum(other != machines[rank] for other in machines)


IN_DOMAIN = [("1", "")] * 4


@pytest.mark.parametrize(
    ("answers", "words", "ranks_HG"),
    [
        (IN_DOMAIN, "1 NVLink domains of 4 ranks", [[0, 1, 2, 3]]),
        ([("1", ""), ("2", "")] * 2, "2 NVLink domains of 2 ranks", [[0, 2], [1, 3]]),
        ([("", "no fabric")] * 4, "2 hosts of 2 ranks", [[0, 1], [2, 3]]),
        (
            [*IN_DOMAIN[:2], ("1", "no channel"), ("1", "no state")],
            "2 hosts of 2 ranks (no NVLink domain, since rank 6 has no channel)",
            [[0, 1], [2, 3]],
        ),
        (
            [*IN_DOMAIN[:3], ("", "no fabric")],
            "2 hosts of 2 ranks (no NVLink domain, since rank 7 has no fabric)",
            [[0, 1], [2, 3]],
        ),
    ],
)
def test_all_ranks_take_the_worst_answer(monkeypatch, answers, words, ranks_HG):
    """And name ranks by their numbers in the job."""
    monkeypatch.setattr(hosts.nvlink, "domain", lambda: answers[dist.get_rank()])
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 5, 6, 7])
    for rank, found in enumerate(_found_on_threads("aabb", "cuda")):
        assert (str(found), found.ranks_HG) == (words, ranks_HG)
        assert rank in ranks_HG[found.own[0]]
        assert found.num_away == 4 - len(ranks_HG[found.own[0]])


def _found_on_threads(machines: str, kind: str) -> list[hosts.Hosts]:
    def found() -> hosts.Hosts:
        return hosts_of(dist.group.WORLD, torch.device(kind))

    with ranks_on(machines):
        return run_on_threads(len(machines), found)


@pytest.mark.parametrize(("machines", "kind"), [("aaaa", "cuda"), ("aabb", "cpu")])
def test_ranks_of_one_machine_and_cpus_are_not_asked(monkeypatch, machines, kind):
    monkeypatch.setattr(hosts.nvlink, "domain", Mock(side_effect=AssertionError))
    for found in _found_on_threads(machines, kind):
        assert (found.kind, found.num_hosts) == ("host", len(set(machines)))


def test_a_domain_of_too_many_ranks_is_divided(monkeypatch):
    """Symmetric memory has signals for 72."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(group.size())))
    for size, words in (
        (72, "1 NVLink domains of 72 ranks"),
        (76, "19 hosts of 4 ranks (no NVLink domain, since 76 ranks are in one, of at most 72)"),
    ):
        answers = [str(rank // 4) for rank in range(size)], [("1", "")] * size
        monkeypatch.setattr(hosts.nvlink, "domain", lambda: ("1", ""))
        monkeypatch.setattr(hosts, "gather_objects", Mock(side_effect=answers))
        group: Any = Mock(**{"size.return_value": size, "rank.return_value": 5})
        assert str(hosts_of(group, torch.device("cuda"))) == words


def test_a_machine_is_known_by_its_boot(pool2, monkeypatch, tmp_path):
    here = hosts.machine()
    assert pool2.run(hosts.machine) == [here, here]
    monkeypatch.setattr(hosts, "_BOOT_ID", tmp_path / "boot_id")
    assert hosts.machine() == os.uname().nodename
    (tmp_path / "boot_id").write_text("another boot\n")
    assert hosts.machine() == "another boot"


def _numbers(machines: str) -> tuple[list[int], list[int], float]:
    """Return the ranks of this rank's host and rail, as their groups gather them, and a limit."""
    group: Any = dist.new_group(timeout=timedelta(seconds=77))
    with ranks_on(machines):
        inside, rail = groups_of(group, CPU)
        assert groups_of(group, CPU)[1] is rail and hosts_of(group, CPU) is hosts_of(group, CPU)
    found = []
    for one in (inside, rail):
        gathered = torch.empty(one.size(), dtype=torch.int64)
        dist.all_gather_into_tensor(gathered, torch.tensor([dist.get_rank()]), group=one)
        received = torch.empty_like(gathered)
        dist.all_to_all_single(received, torch.arange(one.size()), group=one)
        assert received.tolist() == [one.rank()] * one.size()
        found.append(gathered.tolist())
    return *found, time_limit(rail)


def test_groups_of_processes_have_their_order_and_limit(pool4):
    found = pool4.run(_numbers, "abba", timeout_s=60)
    assert [inside for inside, _, _ in found] == [[0, 3], [1, 2], [1, 2], [0, 3]]
    assert [rail for _, rail, _ in found] == [[0, 1], [0, 1], [3, 2], [3, 2]]
    assert {limit for _, _, limit in found} == {77.0}


def _passed(machines: str) -> Any:
    config = DispatchConfig(
        num_experts=8, top_k=3, num_ranks=4, capacity_factor=0.75, capacity_pool="store"
    )
    case = make_case(config, ["full", "hot", "thin"], machines=machines)
    with poisoned_memory(), ranks_on(machines):
        return one_pass(case, "store")[0], expected(case)


@pytest.mark.parametrize("machines", ["aabb", "baba"])
def test_layers_on_processes_are_the_oracle(pool4, machines):
    results = pool4.run(_passed, machines, timeout_s=60)
    assert_found([found for found, _ in results], results[0][1])


def _one_host_is_late() -> str:
    """Ranks 2 and 3, of host b, make no second pass; the others wait for them in the comparison."""
    group: Any = dist.new_group(timeout=timedelta(seconds=2))
    config = DispatchConfig(num_experts=4, top_k=1, num_ranks=4, capacity_pool="store")
    machines, rank = "aabb", dist.get_rank()
    name = patch.object(socket, "gethostname", lambda: f"host-{machines[rank]}")
    with ranks_on(machines), name:
        dispatcher = PaddedDispatcher(config, group=group)
        weights = ExpertWeights(fc1_LGD=torch.ones(1, 2, 3), fc2_LDF=torch.ones(1, 3, 1))
        given = torch.ones(2, 3), torch.ones(2, 4), torch.eye(4, dtype=torch.bool)[:2]
        dispatcher.run(*given, weights, Activation())
        if rank >= 2:
            return ""
        with pytest.raises(AbsentRanksError) as caught:
            dispatcher.run(*given, weights, Activation())
        return str(caught.value)


def test_a_host_that_does_not_come_is_named(pool4):
    first, second, *others = pool4.run(_one_host_is_late, timeout_s=60)
    assert first == second and others == ["", ""]
    assert "within 2 s, got no call from ranks 2, 3 on host host-b; the last call that all" in first


def _one_host_ends() -> None:
    """Host b ends while the others are in a collective, as a replay or a step has them."""
    machines, rank = "aabb", dist.get_rank()
    name = patch.object(socket, "gethostname", lambda: f"host-{machines[rank]}")
    with ranks_on(machines), name, absent_ranks_named():
        config = DispatchConfig(num_experts=4, top_k=1, num_ranks=4, capacity_pool="store")
        PaddedDispatcher(config, group=dist.group.WORLD)
        _, rail = groups_of(dist.group.WORLD, CPU)
        if rank >= 2:
            os._exit(3)
        dist.all_to_all_single(torch.empty(2), torch.ones(2), group=rail)


def test_a_host_that_ends_is_named_by_all_others(monkeypatch):
    monkeypatch.setattr(workers, "_PEERS_S", 30.0)
    with WorkerPool(4) as pool, pytest.raises(WorkerError) as caught:
        pool.run(_one_host_ends, timeout_s=60)
    first, second, *ended = (caught.value.errors[rank] for rank in range(4))
    assert {type(error) for error in ended} == {ChildProcessError}
    assert isinstance(first, AbsentRanksError) and str(first) == str(second)
    assert "got no answer from the processes of ranks 2, 3 on host host-b; the last" in str(first)


def _members_alone() -> bool:
    """Ranks 1 to 3, a group's 0 to 2, make groups without rank 0; rank 3 is in one group more."""
    three: Any = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return True
    one = join(three, [2, 0, 1], CPU)
    if dist.get_rank() == 3:
        join(three, [2], CPU)
    made = (one, [3, 1, 2]), (join(three, [0, 2, 1], CPU), [1, 3, 2])
    return all(
        _gathered(group) == ranks == dist.get_process_group_ranks(group) for group, ranks in made
    )


def _gathered(group: dist.ProcessGroup) -> list[int]:
    gathered = torch.empty(group.size(), dtype=torch.int64)
    dist.all_gather_into_tensor(gathered, torch.tensor([dist.get_rank()]), group=group)
    return gathered.tolist()


def test_a_group_is_made_by_its_members_alone(pool4):
    assert pool4.run(_members_alone, timeout_s=60) == [True] * 4


def _threads_of_groups() -> list[int]:
    """Return the threads beyond those before a group: with its hosts' groups, and after it."""
    gc.collect()
    before = len(os.listdir("/proc/self/task"))
    group: Any = dist.new_group()
    with_group = len(os.listdir("/proc/self/task")) - before
    with ranks_on("ab" * 2):
        groups_of(group, CPU)
    found = [with_group, len(os.listdir("/proc/self/task")) - before]
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return [*found, len(os.listdir("/proc/self/task")) - before]


def _known_in_each_world() -> list[bool]:
    """Return whether symmetric memory finds a group, in two worlds whose groups have one name."""
    from torch._C._distributed_c10d import _resolve_process_group

    found = []
    for _ in range(2):
        dist.destroy_process_group()
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        for _ in range(2):  # A group of the same name may also have ended alone.
            made = join(dist.group.WORLD, [0], CPU)
            hosts._make_known(made.group_name, made, dist.HashStore())
            name: Any = made.group_name
            found.append(_resolve_process_group(name) is made)
    return found


def test_symmetric_memory_finds_the_groups_of_each_world():
    with WorkerPool(1) as pool:
        assert pool.run(_known_in_each_world, timeout_s=60) == [[True] * 4]


def _closed() -> list[str]:
    """Return names of groups in the order in which they are closed."""
    closed, shutdown = [], dist.ProcessGroup.shutdown

    def noted(group: Any) -> None:
        closed.append(group.group_name)
        shutdown(group)

    with ranks_on("aabb"), patch.object(dist.ProcessGroup, "shutdown", noted):
        groups_of(dist.group.WORLD, CPU)
        dist.destroy_process_group()
    return closed


def test_the_groups_are_closed_before_all_others_in_one_order():
    with WorkerPool(4) as pool:
        found = pool.run(_closed, timeout_s=60)
    for rank, (first, second, world) in enumerate(found):
        names = "0-1" if rank < 2 else "2-3", "0-2" if rank % 2 == 0 else "1-3"
        assert sorted([first, second], reverse=True) == [first, second]
        assert {first, second} == {f"padded_dispatch/{world}/cpu/{name}" for name in names}


def test_groups_end_with_that_of_the_layer(pool4):
    for with_group, with_hosts, after in pool4.run(_threads_of_groups, timeout_s=60):
        assert 0 < with_group < with_hosts and after == 0


@pytest.mark.parametrize("own_gpus", [True, False])
def test_a_program_sees_the_machine_that_it_is_told(tmp_path, monkeypatch, capsys, own_gpus):
    (tmp_path / "said.py").write_text("""
import os, sys
from padded_dispatch.exchange.hosts import machine
print(machine(), *map(os.environ.get, ("NCCL_HOSTID", "LOCAL_RANK")), *sys.argv[1:])
""")
    rank = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "TMPDIR": str(tmp_path)}
    monkeypatch.setattr("os.environ", os.environ | rank)
    monkeypatch.setattr(tempfile, "tempdir", None)
    program = [*["--own-gpus"] * own_gpus, str(tmp_path / "said.py"), "--seed", "5"]
    monkeypatch.setattr("sys.argv", ["machines", "2", *program])
    monkeypatch.delitem(sys.modules, "tests.support.machines")  # runpy warns of it.
    runpy.run_module("tests.support.machines", run_name="__main__", alter_sys=True)
    told = "None 1" if own_gpus else "machine1 0"
    assert capsys.readouterr().out == f"machine1 {told} --seed 5\n"
    assert hosts.machine() != "machine1" and (tmp_path / "machine1").exists() != own_gpus
