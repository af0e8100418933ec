"""Results and errors of workers reach the parent; no worker is left, however the parent ends."""

import functools
import multiprocessing
import os
import signal
import textwrap
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from padded_dispatch.utils import launch
from padded_dispatch.utils.launch import start_processes, start_workers
from tests.support.processes import ENVIRONMENT, started, still_living, workers_of


def job(how: str) -> Any:
    dist.init_process_group("gloo")
    total = torch.tensor(int(os.environ["LOCAL_RANK"]) + 1)
    dist.all_reduce(total)
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("loss is nan at step 3")
        if how == "full disk":
            vars(launch)["Path"] = Mock(**{"return_value.write_text.side_effect": OSError(28, how)})
            raise OSError(28, how)
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    # More than a pipe holds.
    return total.item(), os.environ["WORLD_SIZE"], torch.get_num_threads(), "x" * 2**17


def ends_with_its_peer(parent: int, path: Path) -> None:
    dist.init_process_group("gloo")

    def end(*_: object) -> None:
        time.sleep(0.1)
        dist.barrier()
        path.touch()
        os._exit(0)

    if dist.get_rank() == 0:
        signal.signal(signal.SIGTERM, end)
        os.kill(parent, signal.SIGTERM)
        while True:  # A signal that comes just before a sleep is handled after it.
            time.sleep(0.01)
    while True:
        dist.barrier()


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Run as a user's command does, stop peers of a failed worker sooner, and leave no worker.

    Workers are forked from a process that has imported torch; a command's start by themselves.
    """
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "_END_S", 0.5)
    forked = functools.partial(start_processes, start_method="forkserver")
    monkeypatch.setattr(launch, "start_processes", forked)
    earlier = multiprocessing.active_children()
    yield
    assert set(multiprocessing.active_children()) <= set(earlier)


def test_the_result_of_rank_0_and_the_environment_of_torchrun():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert start_workers(job, ("return",), num_workers=2) == (3, "2", 1, "x" * 2**17)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


@pytest.mark.parametrize(
    ("how", "first", "last"),
    [
        ("raise", "rank 1 of 2 failed:", "ValueError: loss is nan at step 3"),
        ("die", "rank 1 of 2 failed: killed by SIGKILL", ""),
    ],
)
def test_the_rank_that_failed_first_is_named(capsys, how, first, last):
    """Rank 0 fails, too, since its peer has left."""
    with pytest.raises(SystemExit, match="1"):
        start_workers(job, (how,), num_workers=2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == first and lines[-1] == (last or first)


def test_the_rank_that_failed_first_is_named_where_the_disk_is_full(capsys):
    with pytest.raises(SystemExit, match="1"):
        start_workers(job, ("full disk",), num_workers=2)
    assert capsys.readouterr().err == "rank 1 of 2 failed: exited with code 1\n"


def test_peers_of_rank_0_go_on_until_it_has_ended(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(launch, "_END_S", 30)  # Both end before, on a busy machine, too.
    with pytest.raises(SystemExit, match="143"):
        start_workers(ends_with_its_peer, (os.getpid(), tmp_path / "met"), num_workers=2)
    assert (tmp_path / "met").exists()
    assert capfd.readouterr().err.splitlines()[-1] == "SIGTERM: stopping all workers"


def test_rank_0_is_ended_first_also_where_its_pid_is_the_larger():
    ended = []
    workers = [Mock(_identity=(9 + rank,), pid=32_767 - rank) for rank in range(3)]
    for rank, worker in enumerate(workers):
        worker.terminate.side_effect = functools.partial(ended.append, rank)
        worker.kill.side_effect = functools.partial(ended.append, f"{rank} has ended")
    launch._end(set(workers))
    assert ended == [0, "0 has ended", 1, 2, "1 has ended", "2 has ended"]


def test_under_torchrun_the_function_is_only_called(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    called: list[int] = []
    start_workers(called.append, (os.getpid(),), num_workers=8)
    assert called == [os.getpid()]


# Workers sleep while they import, or in their function.
JOB = """
    import os, sys, time
    from padded_dispatch.utils.launch import start_workers

    def sleep():
        os.write(1, b"here\\n")
        time.sleep(600)

    if __name__ == "__mp_main__" and sys.argv[1] == "importing":
        sleep()
    if __name__ == "__main__":
        start_workers(sleep, num_workers=1)
"""


def _as_a_terminal_starts() -> None:
    """Block and ignore no signal: a child inherits both from the process that runs the tests.

    Shells start commands in the background, as `.ci/run &`, with SIGINT ignored.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="looks into /proc")
@pytest.mark.parametrize(
    ("where", "number"),
    [("importing", signal.SIGINT), ("working", signal.SIGTERM), ("working", signal.SIGKILL)],
)
def test_a_signal_ends_all_processes(tmp_path, where, number):
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB))
    command = str(tmp_path / "job.py"), where
    with started(*command, env=ENVIRONMENT, preexec_fn=_as_a_terminal_starts) as process:
        assert process.stdout.readline() == "here\n"
        workers = workers_of(process.pid)
        assert len(workers) == 1
        # A terminal signals all processes.
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        _, stderr = process.communicate(timeout=60)
    killed = number == signal.SIGKILL
    assert process.returncode == (-number if killed else 128 + number)
    assert stderr == ("" if killed else f"{number.name}: stopping all workers\n")
    assert still_living(workers) == []


def test_a_reader_that_has_gone_ends_no_work():
    code = "from padded_dispatch.utils.logs import show\nfor _ in range(9): show('line')"
    with started("-c", code) as process:
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (0, "")
