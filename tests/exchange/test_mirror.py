"""A rank that does not come: all that wait raise one error, which names it.

Each test has a group of its own, since a mirror is of no more use after such an error.
"""

import gc
import os
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist

from padded_dispatch.exchange import mirror as mirror_module
from padded_dispatch.exchange.mirror import (
    AbsentRanksError,
    Mirror,
    _format_ranks,
    _in_time,
    _wait,
    absent_ranks_named,
    differing,
    mirror_of,
)
from tests.support import pool as workers
from tests.support.pool import WorkerError, WorkerPool
from tests.support.threads import grid

LONG_S = 100.0


def own_row() -> torch.Tensor:
    return torch.tensor([dist.get_rank(), 7])


def errors_of_calls(mirror: Mirror, *limits_s: float) -> list[str]:
    """Return the errors of one call after the other, the first of them call 2."""
    errors = []
    for number, limit_s in enumerate(limits_s, start=2):
        with pytest.raises(AbsentRanksError) as caught:
            mirror._limit_s = limit_s
            mirror.gather(own_row(), f"call {number} of layer 1")
        errors.append(str(caught.value))
    return errors


def _late_in_a_grid(late: int) -> tuple[list[int], list[str]]:
    """Return the rows of call 1, and the errors of the next two; one rank comes after its peers."""
    mirror = Mirror(grid(2, 2)[:2], LONG_S)
    rows = mirror.gather(own_row(), "call 1 of layer 1")
    is_late = dist.get_rank() == late
    if is_late:
        dist.barrier()
    errors = errors_of_calls(mirror, *((LONG_S, LONG_S) if is_late else (0.5, LONG_S)))
    if not is_late:
        dist.barrier()
    mirror.require_all_alive()  # It has said all.
    assert mirror.ranks == [0, 1, 2, 3]
    return rows.tolist(), errors


@pytest.mark.parametrize("late", [0, 3])  # The first rank compares the rows.
def test_all_ranks_of_a_grid_raise_one_error_also_the_late_one(pool4, late):
    results = pool4.run(_late_in_a_grid, late, timeout_s=60)
    words = results[0][1][0]
    assert words.startswith(
        "all 4 ranks of the layer must come to call 2 of layer 1 within 0.5 s, got no call from "
        f"rank {late}; the last call that all made: call 1 of layer 1; look for the first error"
    )
    assert "give the process groups a longer timeout" in words
    rows = [[rank, 7] for rank in range(4)]
    assert results == [(rows, [words, words])] * 4


def _two_are_late(hosts: str) -> str:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(mirror_module.socket, "gethostname", lambda: hosts[dist.get_rank()])
        mirror = Mirror([dist.new_group()], LONG_S)
    words = "" if dist.get_rank() in (1, 2) else errors_of_calls(mirror, 0.5)[0]
    dist.barrier()  # Absent ranks keep their connections until then.
    return words


def test_all_absent_ranks_are_named_with_their_hosts(pool4):
    first, *nothing, last = pool4.run(_two_are_late, "abba", timeout_s=60)
    assert (nothing, first) == (["", ""], last)
    words = "got no call from ranks 1, 2 on host b; the last call that all made: none;"
    assert f"within 0.5 s, {words}" in first
    for hosts, named in ("aaaa", "ranks 1, 2"), ("aabb", "ranks 1, 2 on hosts a, b"):
        mirror: Any = SimpleNamespace(_hosts=dict(enumerate(hosts)))
        assert Mirror._ranks_and_hosts(mirror, [1, 2]) == named


def _one_ends() -> None:
    mirror = Mirror([dist.new_group()], LONG_S)
    mirror.gather(own_row(), "call 1 of layer 1")
    if dist.get_rank() == 1:
        os._exit(3)
    mirror.gather(own_row(), "call 2 of layer 1")


def _one_ends_before_a_collective() -> None:
    """Send to a rank that has ended, as a step does; gloo's error names no rank."""
    mirror_of([dist.group.WORLD])
    with absent_ranks_named():
        if dist.get_rank() == 1:
            os._exit(3)
        dist.all_to_all_single(torch.empty(3), torch.ones(3))


def _one_waits_and_one_is_lost() -> str:
    """Rank 1 has ended; rank 0 sees it in `gather`, which closes its connections, rank 2 beside."""
    mirror = Mirror([dist.new_group()], LONG_S)
    mirror.gather(own_row(), "call 1 of layer 1")
    if dist.get_rank() == 1:
        os._exit(3)
    if dist.get_rank() == 0:
        mirror.gather(own_row(), "call 2 of layer 1")
    while not mirror._store.check(["waits/0"]):
        pass
    mirror.require_all_alive()
    return ""


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (
            _one_ends,
            "must come to call 2 of layer 1, got a closed connection and no call from rank 1; "
            "the last call that all made: call 1 of layer 1;",
        ),
        (
            _one_ends_before_a_collective,
            "all 3 ranks of the layer must stay until the job ends, got no answer from the process "
            "of rank 1; the last call that all made: none;",
        ),
        (_one_waits_and_one_is_lost, "rank 1; the last call that all made: call 1 of layer 1;"),
    ],
)
def test_a_process_that_ends_is_named_by_all_others_long_before_the_limit(monkeypatch, run, words):
    monkeypatch.setattr(workers, "_PEERS_S", 30.0)
    with WorkerPool(3) as pool, pytest.raises(WorkerError) as caught:
        pool.run(run, timeout_s=60)
    errors = [caught.value.errors[rank] for rank in range(3)]
    kinds = AbsentRanksError, ChildProcessError, AbsentRanksError
    assert tuple(map(type, errors)) == kinds
    assert str(errors[0]) == str(errors[2]) and words in str(errors[0])


def test_errors_of_one_rank_stay_as_they_are():
    with pytest.raises(RuntimeError, match="out of luck"), absent_ranks_named():
        raise RuntimeError("out of luck")


def _one_creates_none() -> str:
    group = dist.new_group()
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(AbsentRanksError) as caught:
        Mirror([group], 0.5)
    return str(caught.value)


def test_a_rank_that_creates_no_dispatcher_is_named(pool2):
    words, _ = pool2.run(_one_creates_none, timeout_s=60)
    assert words.startswith(
        "all 2 ranks of a group must create their dispatcher within 0.5 s, got none from rank 1; "
    )


def test_the_store_is_not_waited_for(monkeypatch):
    answered = threading.Event()

    def never() -> str:
        answered.wait()
        return "late"

    before = set(threading.enumerate())
    with monkeypatch.context() as patched:
        patched.setattr(mirror_module, "_GRACE_S", 0.0)
        patched.setattr(mirror_module, "_STORE_S", 0.01)
        assert _in_time(never) == ""
    (waiting,) = set(threading.enumerate()) - before
    assert waiting.daemon  # Nor does a process that wants to end wait for it.
    answered.set()
    assert _in_time(lambda: "words") == "words"

    def fail() -> str:
        raise RuntimeError("the store is gone")

    assert _in_time(fail) == ""


@pytest.mark.parametrize("waiting", [(0, 1), (0, 2), (1, 2)])
def test_a_limit_that_expired_is_the_problem_of_all(monkeypatch, waiting):
    """It closes the connections of the others, which have nothing else to tell."""
    monkeypatch.setattr(mirror_module, "_GRACE_S", 0.0)
    mirror: Any = Mirror.__new__(Mirror)
    store, hosts = dist.HashStore(), dict.fromkeys(range(3), "a")
    vars(mirror).update(_store=store, ranks=[0, 1, 2], _me=waiting[0], _hosts=hosts, _last="none")
    closed, (absent,) = mirror_module._CLOSED, {0, 1, 2} - {*waiting}
    store.set(f"waits/{waiting[1]}", " within 2 s, got")
    words = (
        f"all 3 ranks of the layer must come to a call within 2 s, got no call from rank {absent};"
    )
    assert mirror._verdict("a call", closed).startswith(words)
    mirror._me = waiting[1]
    assert mirror._verdict("another call", closed).startswith(words)


def _mirrors_and_rows() -> tuple[list[bool], list[int]]:
    """Return which mirrors are the same, and ranks that were gathered.

    Rank 0 is in one group more than rank 1.
    """
    dist.new_group([0])
    one, two = dist.new_group(timeout=timedelta(seconds=33)), dist.new_group()
    first, again, other, both = map(mirror_of, ([one], [one], [two], [one, two]))
    assert 33.0 == first._limit_s < both._limit_s == other._limit_s
    rows = other.gather(own_row(), "a call")
    same = [first is again, both is mirror_of([two, one]), first is other, first is both]
    return same, [int(row[0]) for row in rows]


def test_layers_share_the_mirror_of_their_groups(pool2):
    assert pool2.run(_mirrors_and_rows, timeout_s=60) == [([True, True, False, False], [0, 1])] * 2


def _written() -> tuple[int, int]:
    """Return the bytes that a rank writes to others in a `gather` of 48 bytes, and its messages."""

    def counted() -> list[int]:
        lines = Path("/proc/self/io").read_text().splitlines()
        counts = dict(line.split(": ") for line in lines)
        return [int(counts["wchar"]), int(counts["syscw"])]

    mirror, row, calls = mirror_of([dist.group.WORLD]), torch.zeros(6, dtype=torch.int64), 50
    mirror.gather(row, "a call")
    dist.barrier()
    before = counted()
    for _ in range(calls):
        mirror.gather(row, "a call")
    size, messages = (after - b for after, b in zip(counted(), before, strict=True))
    dist.barrier()
    return size // calls, messages // calls


def test_what_a_comparison_sends(pool4):
    """As the architecture page says, for R = 4; gloo adds 48 bytes to each message, and answers."""
    size, messages = map(sum, zip(*pool4.run(_written, timeout_s=60), strict=True))
    assert (size, messages) == (48 * 3 * 11, 6 * 3)


def test_many_ranks_are_named_in_a_few_words():
    assert _format_ranks([7]) == "rank 7"
    assert _format_ranks([0, 1]) == "ranks 0, 1"
    assert _format_ranks([1, 2, 4, 5, 6, 9]) == "ranks 1, 2, 4-6, 9"
    assert _format_ranks(list(range(207)) + list(range(208, 256))) == "ranks 0-206, 208-255"
    assert differing({0: 8, 1: 9, 2: 9, 3: 9}) == "8 on rank 0, 9 on ranks 1-3"
    assert differing({4: 8}) == differing({4: 8, 7: 8}) == ""


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _threads_of_a_mirror() -> list[int]:
    """Return the threads beyond those before a group: with it, with a mirror, after it."""
    gc.collect()  # Mirrors of the test before this one.
    before, found = _threads(), []
    group = dist.new_group()
    found.append(_threads() - before)
    mirror_of([group])
    found.append(_threads() - before)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return [*found, _threads() - before]


def test_threads_of_a_mirror_end_with_its_group(pool2):
    for with_group, with_mirror, after in pool2.run(_threads_of_a_mirror, timeout_s=60):
        assert 0 < with_group < with_mirror and after == 0


def test_a_collective_that_ends_as_a_look_for_signals_begins():
    timed_out = RuntimeError("timed out")
    work = Mock(**{"wait.side_effect": [timed_out, None]})
    _wait(work)
    # Ctrl-C waits for a second at most.
    assert work.wait.mock_calls == [call(timedelta(seconds=1)), call()]
    work.wait.side_effect = [timed_out, RuntimeError("closed")]
    with pytest.raises(RuntimeError, match="closed"):
        _wait(work)


def _one_is_absent_and_the_store_is_gone() -> str:
    mirror = Mirror([dist.new_group()], LONG_S)
    mirror._store = Mock(**{"set.side_effect": RuntimeError("connection closed")})
    words = errors_of_calls(mirror, 0.5)[0] if dist.get_rank() == 1 else ""
    dist.barrier()
    return words


def test_without_a_store_the_call_is_named(pool2):
    _, words = pool2.run(_one_is_absent_and_the_store_is_gone, timeout_s=60)
    assert words.startswith(
        "all 2 ranks of the layer must come to call 2 of layer 1 within 0.5 s, got no call from "
        "some (the store of the job, which has their numbers, does not answer); "
    )
