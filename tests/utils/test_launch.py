"""Every result, error, death or timeout of a worker reaches the parent, and no worker is left.

A `WorkerPool` of the tests stands on the same `Workers` as `start_workers`, and is tested with it.
"""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from padded_dispatch.utils import launch
from padded_dispatch.utils.launch import WorkerError, start_workers
from tests.support.pool import WorkerPool
from tests.support.processes import ENVIRONMENT, workers_of


@pytest.fixture(autouse=True)
def short_grace_period(monkeypatch):
    """Stop peers sooner that wait in a collective for a failed rank."""
    monkeypatch.setattr(launch, "_PEERS_S", 0.3)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Provide a separate pool, since these tests kill its workers."""
    with WorkerPool(2) as pool:
        yield pool


def _sum_of_ranks(offset: int) -> torch.Tensor:
    mine = torch.tensor([dist.get_rank() + offset, dist.get_rank()])
    dist.all_reduce(mine[:1])
    return mine


def _fail_on(ranks: tuple[int, ...]) -> None:
    if dist.get_rank() in ranks:
        raise ValueError(f"bad factor on rank {dist.get_rank()}")
    dist.barrier()


def _die() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _exit_alone() -> None:
    if dist.get_rank() == 0:
        os._exit(7)


def _hang(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


class TwoArguments(Exception):  # noqa: N818
    """Cannot be unpickled: `args` holds one value, the constructor wants two."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


def _raise_what_does_not_pickle() -> None:
    raise TwoArguments("rows", "too many")


def _pid() -> int:
    return os.getpid()


def test_results_come_by_rank_from_a_working_group(pool):
    first, second = pool.run(_sum_of_ranks, 10)
    assert first.tolist() == [21, 0]
    assert second.tolist() == [21, 1]


def test_workers_stay_and_use_one_thread(pool):
    pids = pool.run(_pid)
    assert pool.run(_pid) == pids
    assert len({*pids, os.getpid()}) == 3
    assert pool.run(torch.get_num_threads) == [1, 1]


def test_an_error_on_one_rank_does_not_wait_for_peers_in_a_collective(pool):
    with pytest.raises(WorkerError) as caught:
        pool.run(_fail_on, (1,))
    assert list(caught.value.errors) == [1]
    error = caught.value.errors[1]
    assert type(error) is ValueError
    assert str(error) == "bad factor on rank 1"
    # The message shows where, and the pool is whole again.
    assert "rank 1: ValueError: bad factor on rank 1" in str(caught.value)
    assert "in _fail_on" in str(caught.value)
    assert pool.run(dist.get_rank) == [0, 1]


def test_an_error_on_all_ranks_keeps_the_workers(pool):
    pids = pool.run(_pid)
    with pytest.raises(WorkerError) as caught:
        pool.run(_fail_on, (0, 1))
    assert {r: str(e) for r, e in caught.value.errors.items()} == {
        0: "bad factor on rank 0",
        1: "bad factor on rank 1",
    }
    assert pool.run(_pid) == pids
    assert pool.run(_sum_of_ranks, 0)[0].tolist() == [1, 0]


def test_a_killed_worker_is_named(pool):
    with pytest.raises(WorkerError) as caught:
        pool.run(_die)
    assert caught.value.first() == 1
    assert repr(caught.value.errors[1]) == "ChildProcessError('killed by SIGKILL')"
    assert pool.run(dist.get_rank) == [0, 1]


def _die_with_a_child(end: Path) -> None:
    """Fork a child, such as a writer of a checkpoint, that lives until `end` exists; then die."""
    if dist.get_rank() == 1:
        if os.fork() == 0:
            if launch._libc is not None:
                launch._libc.prctl(launch._PR_SET_PDEATHSIG, 0)
            for _ in range(600):
                if end.exists():
                    break
                time.sleep(0.1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_noticed_while_its_child_lives(tmp_path, monkeypatch):
    # Spawned, as users' workers are: the child of a forked worker would also hold its pipe.
    monkeypatch.setattr(launch, "multiprocessing", multiprocessing)
    try:
        with WorkerPool(2) as pool, pytest.raises(WorkerError) as caught:
            pool.run(_die_with_a_child, tmp_path / "end", timeout_s=45)
    finally:
        (tmp_path / "end").touch()
    assert repr(caught.value.errors[1]) == "ChildProcessError('killed by SIGKILL')"


def _die_before_a_child(port: int) -> None:
    """Fork a child that keeps a connection for as long as it lives; then die."""
    if dist.get_rank() == 1:
        alive = socket.create_connection(("127.0.0.1", port))
        if os.fork() == 0:
            alive.sendall(b"forked\n")
            time.sleep(600)
        alive.recv(1)  # The test answers when it has seen the child's line.
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the children of a process")
def test_the_children_of_a_killed_worker_end_with_it(pool):
    with socket.create_server(("127.0.0.1", 0)) as server:
        with ThreadPoolExecutor(1) as thread:
            connection = thread.submit(_answer_the_first_line, server)
            with pytest.raises(WorkerError):
                pool.run(_die_before_a_child, server.getsockname()[1])
        with connection.result() as ended:
            assert ended.recv(1) == b""


def _answer_the_first_line(server: socket.socket) -> socket.socket:
    connection, _ = server.accept()
    connection.settimeout(20)
    assert connection.recv(7) == b"forked\n"
    connection.sendall(b"!")
    return connection


def test_a_failed_start_leaves_no_worker(monkeypatch):
    process = launch.multiprocessing.get_context("spawn").Process
    start, started = process.start, []

    def start_one(self) -> None:
        if started:
            raise OSError("no more processes")
        start(self)
        started.append(self)

    monkeypatch.setattr(process, "start", start_one)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(OSError, match="no more processes"):
        WorkerPool(2).run(dist.get_rank)
    assert signal.getsignal(signal.SIGINT) is handler
    assert not started[0].is_alive()


def test_a_worker_that_exits_is_named(pool):
    with pytest.raises(WorkerError) as caught:
        pool.run(_exit_alone)
    assert {r: str(e) for r, e in caught.value.errors.items()} == {0: "exited with code 7"}
    assert pool.run(dist.get_rank) == [0, 1]


def test_a_worker_that_died_between_two_runs_is_named(pool):
    os.kill(pool.run(_pid)[1], signal.SIGKILL)
    with pytest.raises(WorkerError) as caught:
        pool.run(dist.barrier)
    assert str(caught.value.errors[1]) == "killed by SIGKILL"
    assert pool.run(dist.get_rank) == [0, 1]


def test_a_timeout_names_the_ranks_that_did_not_answer(pool):
    pool.run(dist.get_rank)
    with pytest.raises(WorkerError) as caught:
        pool.run(_hang, 0, timeout_s=1.0)
    assert {r: repr(e) for r, e in caught.value.errors.items()} == {
        0: "TimeoutError('no answer within 1.0 s')"
    }
    assert pool.run(dist.get_rank) == [0, 1]


def test_an_exception_that_does_not_pickle_arrives_as_text(pool):
    with pytest.raises(WorkerError) as caught:
        pool.run(_raise_what_does_not_pickle)
    assert repr(caught.value.errors[0]) == "RuntimeError('TwoArguments: rows: too many')"


def test_a_closed_pool_starts_again(pool):
    before = pool.run(_pid)
    pool.close()
    assert set(pool.run(_pid)).isdisjoint(before)


def test_a_pool_without_a_group_never_runs_anything():
    with WorkerPool(1, backend="carrier_pigeon") as pool:
        for _ in range(2):
            with pytest.raises(WorkerError, match="carrier_pigeon"):
                pool.run(_pid)


# start_workers: a job in a separate process. Its workers connect to a socket of the test and keep
# it open, so the connection of a worker ends exactly when the worker does. tests/test_cli.py covers
# Ctrl-C and a killed worker.

JOB = """
    import atexit, os, socket, sys, time
    import torch
    import torch.distributed as dist
    from padded_dispatch.utils import launch
    from padded_dispatch.utils.launch import start_workers

    def job(port, how):
        rank = int(os.environ["RANK"])
        alive = socket.create_connection(("127.0.0.1", port))
        dist.init_process_group("gloo")
        total = torch.tensor(int(os.environ["LOCAL_RANK"]) + 1)
        dist.all_reduce(total)
        alive.sendall(f"{rank} of {os.environ['WORLD_SIZE']}: {total.item()}\\n".encode())
        if how == "raise" and rank == 1:
            raise ValueError("loss is nan at step 3")
        if how == "return":
            atexit.register(alive.sendall, b"bye")
            return
        if how == "sleep" and rank == 0:
            time.sleep(600)
        dist.barrier()

    if __name__ == "__main__":
        launch._PEERS_S = 0.3
        start_workers(job, (int(sys.argv[1]), sys.argv[2]), num_workers=2)
"""


class Job:
    """A running `JOB` and a connection to each of its workers."""

    def __init__(self, folder, how: str, source: str = JOB) -> None:
        script = folder / "job.py"
        # A job inherits what is ignored: SIGHUP under nohup.
        heard = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        script.write_text(heard + textwrap.dedent(source))
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(60)
            self.process = subprocess.Popen(
                [sys.executable, str(script), str(server.getsockname()[1]), how],
                env=ENVIRONMENT,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            connections = [server.accept()[0] for _ in range(2)]
            for connection in connections:
                connection.settimeout(60)
            self.workers = [connection.makefile() for connection in connections]
        self.first_lines = sorted(worker.readline() for worker in self.workers)
        self.last_words: list[str] = []

    def end(self) -> tuple[int, str]:
        """Return its exit code and stderr after it and all workers have ended."""
        _, stderr = self.process.communicate(timeout=60)
        self.last_words = [worker.read() for worker in self.workers]
        return self.process.returncode, stderr


def test_a_job_gets_the_environment_of_torchrun_and_ends_by_itself(tmp_path):
    job = Job(tmp_path, "return")
    assert job.first_lines == ["0 of 2: 3\n", "1 of 2: 3\n"]
    assert job.end() == (0, "")
    assert job.last_words == ["bye", "bye"]  # Exit handlers ran.


def test_a_failing_worker_ends_the_job(tmp_path):
    code, stderr = Job(tmp_path, "raise").end()
    assert code == 1
    assert stderr.startswith("Traceback (most recent call last):\n")
    assert stderr.endswith("\nrank 1 of 2 failed: ValueError: loss is nan at step 3\n")


def test_sigterm_ends_the_job(tmp_path):
    job = Job(tmp_path, "sleep")
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == (143, "SIGTERM: stopping all workers\n")


def test_workers_end_with_a_killed_parent(tmp_path):
    job = Job(tmp_path, "sleep")
    job.process.kill()
    assert job.end()[0] == -signal.SIGKILL


# A job whose workers import for ever.
IMPORTING = """
    import socket, sys, time
    if __name__ == "__mp_main__":
        alive = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
        alive.sendall(b"importing\\n")
        while True:
            try:
                time.sleep(600)
            except BaseException:  # As around optional imports.
                pass
    from padded_dispatch.utils.launch import start_workers

    if __name__ == "__main__":
        start_workers(print, num_workers=2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_while_workers_import_ends_all_processes(tmp_path, number):
    job = Job(tmp_path, "", IMPORTING)
    assert job.first_lines == ["importing\n"] * 2
    begin = time.monotonic()
    job.process.send_signal(number)
    code, stderr = job.end()
    assert time.monotonic() - begin < 15
    killed = number == signal.SIGKILL
    assert code == (-number if killed else 128 + number)
    assert stderr == ("" if killed else f"{number.name}: stopping all workers\n")


def test_ctrl_c_ends_importing_workers_without_their_words(tmp_path):
    job = Job(tmp_path, "", IMPORTING)
    os.killpg(job.process.pid, signal.SIGINT)  # A terminal signals all processes.
    assert job.end() == (130, "SIGINT: stopping all workers\n")


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="looks into /proc")
def test_a_signal_to_one_worker_ends_the_job(tmp_path):
    job = Job(tmp_path, "sleep")
    os.kill(workers_of(job.process.pid)[0], signal.SIGINT)
    code, stderr = job.end()
    assert code == 1
    assert stderr.endswith("of 2 failed: ChildProcessError: killed by SIGINT\n")


def test_under_torchrun_the_function_is_only_called(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    called = []
    start_workers(called.append, (os.getpid(),), num_workers=8)
    assert called == [os.getpid()]


def test_a_taken_port_is_named_at_once(monkeypatch):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        for name, value in torchrun.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        message = f"^MASTER_PORT must be a free port, got {port}; set another one on all ranks, or"
        with pytest.raises(ValueError, match=message):
            start_workers(print, num_workers=2)
        # The store of torchrun's agent, and that of rank 0, are there already.
        called = []
        with monkeypatch.context() as agent:
            agent.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
            start_workers(called.append, (0,), num_workers=2)
        monkeypatch.setenv("RANK", "1")
        start_workers(called.append, (1,), num_workers=2)
    monkeypatch.setenv("RANK", "0")
    start_workers(called.append, (2,), num_workers=2)
    assert called == [0, 1, 2]
