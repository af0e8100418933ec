"""Cost and behaviour of many ranks and hosts, on a machine without GPUs.

    python -m tests.hosts --out FILE --commit SHA

`torchrun`: a job of two torchruns with two workers each, which play two hosts and share a folder:
one rank writes each file, and where one host is killed, the other ends and names it.

`agreement`: the milliseconds of a comparison before a layer's call, with 8 and 64 processes, beside
those of an all-gather of the same row. All processes share this machine, so with more processes
than cores a time is the work of all of them, one after the other; no network is in it. 256
processes make 32,640 connections: minutes, and nothing else runs meanwhile.

`collectives`: jobs of 64 and 256 ranks as threads, in every situation, see
`tests.support.many_ranks`: all ranks of a group must start the same collectives in the same order
with the same sizes, and all ranks of a stage the same over all their groups. A world's steps are
split over jobs, one process with all its ranks each, since threads of one process use one core. A
row has fewer steps than were wanted where the minutes were up. Most of the time goes into the
layers' own Python code, which takes as long per rank with 256 ranks as with 16.
"""

import argparse
import functools
import gc
import json
import math
import os
import shlex
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

from padded_dispatch.exchange.agreement import Agreement
from padded_dispatch.exchange.mirror import mirror_of
from padded_dispatch.utils.results import about, append_run
from tests.support.gpu_rows import parse
from tests.support.many_ranks import World, train
from tests.support.processes import children_of
from tests.support.two_hosts import Hosts

_LIMIT_S = 900.0


def agreement(num_ranks: int, num_calls: int) -> dict[str, Any]:
    """Return what a comparison costs with so many processes, a row of a results file."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    reading, writing = os.pipe()
    ends_s = timedelta(seconds=_LIMIT_S)
    server_pid = _forked(lambda: _serve(port, ends_s))
    pids = [
        _forked(lambda rank=rank: _rank(rank, num_ranks, num_calls, port, writing))
        for rank in range(num_ranks)
    ]
    os.close(writing)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os.kill(server_pid, 15)
    os.waitpid(server_pid, 0)
    with os.fdopen(reading) as pipe:
        lines = pipe.read().splitlines()
    row = {"check": "agreement", "ranks": num_ranks, "calls": num_calls, "passed": not any(codes)}
    if lines:
        create_s, *times_ms = map(float, lines[0].split())
        compare_ms, gather_ms = times_ms[:num_calls], times_ms[num_calls:]
        row |= {
            "create_s": create_s,
            "compare_ms": statistics.median(compare_ms),
            "all_gather_ms": statistics.median(gather_ms),
            "samples_compare_ms": compare_ms,
            "samples_all_gather_ms": gather_ms,
        }
    return row


_WORLDS = [
    World(name="EP64, one level", ep=64),
    World(name="EP64, two levels", ep=64, ranks_per_host=8),
    World(name="EP256", ep=256),
    World(name="EP8 x ETP2 x PP2/VPP2", ep=8, etp=2, pp=2, vpp=2),
    World(name="EP32 x ETP2 x PP4/VPP2", ep=32, etp=2, pp=4, vpp=2),
]


def collectives(
    world: World, num_steps: int, seconds: float = math.inf, num_jobs: int = 1
) -> dict[str, Any]:
    """Return whether all ranks start the same collectives, a row of a results file.

    Args:
        world: the grid of ranks of each job.
        num_steps: the most steps of all jobs together.
        seconds: after which no step begins.
        num_jobs: jobs with seeds of their own, one per core: threads of a process use one.
    """
    start = time.monotonic()
    reading, writing = os.pipe()
    pids = [
        _forked(lambda job=job: _job(world, 1 + job, num_steps // num_jobs, seconds, writing))
        for job in range(num_jobs)
    ]
    os.close(writing)
    with os.fdopen(reading) as pipe:
        jobs = [json.loads(line) for line in pipe]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    row = {"check": "collectives", "world": world.name, "ranks": world.num_ranks}
    row |= {"jobs": num_jobs, "wanted_steps": num_steps}
    sums = ("steps", "training_steps", "repeated_steps", "collectives_of_a_rank", "cpu_seconds")
    row |= {name: sum(job[name] for job in jobs) for name in sums}
    row |= {name: [line for job in jobs for line in job[name]] for name in _FOUND}
    row["seconds"] = time.monotonic() - start
    return row | {"passed": not any(codes) and not any(row[name] for name in _FOUND)}


_KINDS = ("agreement", "collectives", "torchrun")


def shared_folder() -> dict[str, Any]:
    """Return whether a job of two torchruns ends well, and writes each file from one rank only."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(Path(folder), num_steps=4)
        try:
            codes = [process.wait(180.0) for process in hosts.processes]
        finally:
            hosts.end()
        files = hosts.writers()
        output = hosts.output(0)
    shared = {path: ranks for path, ranks in files.items() if len(ranks) > 1}
    return {
        "check": "torchrun --nnodes 2",
        "exit_codes": codes,
        "last_line": output.splitlines()[-1],
        "files": len(files),
        "files_of_several_ranks": shared,
        "seconds": time.monotonic() - start,
        "passed": codes == [0, 0] and len(files) > 10 and not shared,
    }


def dead_host(number: int) -> dict[str, Any]:
    """Return how the other host ends when one is killed, torchrun and workers, and what it says."""
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(Path(folder), num_steps=10_000)
        try:
            hosts.wait_for("  loss ", 180.0)
            other = hosts.processes[1 - number]
            workers = children_of(other.pid)
            hosts.kill(number)
            start = time.monotonic()
            code = other.wait(180.0)
            seconds = time.monotonic() - start
        finally:
            hosts.end()
        output = hosts.output(1 - number)
    errors = [line for line in output.splitlines() if "AbsentRanksError: " in line]
    message = errors[0].partition("AbsentRanksError: ")[2] if errors else output[-500:]
    named = f"on host host{number}"
    left = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    return {
        "check": f"host {number} of 2 is killed",
        "exit_code": code,
        "seconds": seconds,
        "message": message,
        "processes_left": len(left),
        "passed": code != 0 and named in message and not left,
    }


_FOUND = ("ranks_in_another_order", "differing")


def _job(world: World, seed: int, num_steps: int, seconds: float, pipe: int) -> None:
    """Run one job, and write a line of JSON into `pipe`."""
    gc.disable()  # Nothing is in cycles, and visiting the objects of 256 ranks takes long.
    start = time.process_time()
    records, steps = train(world, seed=seed, num_steps=num_steps, seconds=seconds)
    orders = [rank for stage in world.stages() for rank in records.differing_orders(stage)]
    row = {
        "steps": steps.made,
        "training_steps": steps.trained,
        "repeated_steps": steps.repeated,
        "collectives_of_a_rank": len(records.of_rank[0]),
        "ranks_in_another_order": orders,
        "differing": [line[:300] for line in records.differing()[:10]],
        "cpu_seconds": time.process_time() - start,
    }
    os.write(pipe, f"{json.dumps(row)}\n".encode())


def _forked(work: Callable[[], None]) -> int:
    """Call `work` in a fork of this process, which has imported torch, and return its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _serve(port: int, ends_s: timedelta) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=True, timeout=ends_s, wait_for_workers=False)
    time.sleep(ends_s.total_seconds())  # The parent ends it.
    del store


def _rank(rank: int, num_ranks: int, num_calls: int, port: int, pipe: int) -> None:
    """Measure on one rank; the first one writes what it found into `pipe`.

    The group is fake: only the mirror of it has connections.
    """
    assert fake_pg  # Its import makes the back end known.
    limit = timedelta(seconds=_LIMIT_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("fake", store=store, rank=rank, world_size=num_ranks)
    group = dist.group.WORLD
    start = time.perf_counter()
    compared = Agreement(group, timeout=_LIMIT_S)
    times = [time.perf_counter() - start]
    mirror = mirror_of([group], _LIMIT_S)
    row = torch.arange(5)
    for _ in range(3):
        compared.check(T=4096, D=2048)
        mirror.gather(row, _LIMIT_S, "a call")
    for work in (
        lambda: compared.check(T=4096, D=2048),
        lambda: mirror.gather(row, _LIMIT_S, "a call"),
    ):
        for _ in range(num_calls):
            start = time.perf_counter()
            work()
            times.append((time.perf_counter() - start) * 1000)
    try:
        compared.check(T=4097 if rank == num_ranks - 1 else 4096, D=2048)
    except ValueError as error:
        assert f"4097 on rank {num_ranks - 1}" in str(error)
    else:
        raise AssertionError("all ranks must see that one differs")
    if rank == 0:
        os.write(pipe, " ".join(map(str, times)).encode())
    mirror.gather(row, _LIMIT_S, "the end")


def main() -> None:
    """Measure, and write what was found after each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=_KINDS, help="one of them")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64], help="(8 64)")
    parser.add_argument("--worlds", default="", metavar="TEXT", help="those with it in their name")
    parser.add_argument("--steps", type=int, default=200, help="of each world (200)")
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="for each world; then no step begins (5)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="that share a world's steps (2)")
    parser.add_argument("--calls", type=int, default=20, help="that are measured (20)")
    parser.add_argument("--out", type=Path, help="results file")
    parser.add_argument("--commit", help="Git SHA of the code")
    arguments = parse(parser)
    torch.set_num_threads(1)
    command = f"python -m tests.hosts {shlex.join(sys.argv[1:])}"
    rows: list[dict[str, Any]] = []
    works: list[Callable[[], dict[str, Any]]] = []
    if arguments.only in (None, "torchrun"):
        works += [shared_folder, *(functools.partial(dead_host, number) for number in (1, 0))]
    if arguments.only in (None, "agreement"):
        works += [functools.partial(agreement, n, arguments.calls) for n in arguments.ranks]
    if arguments.only in (None, "collectives"):
        works += [
            functools.partial(
                collectives, world, arguments.steps, 60 * arguments.minutes, arguments.jobs
            )
            for world in _WORLDS
            if arguments.worlds in world.name
        ]
    for work in works:
        rows.append(work())
        shown = {name: value for name, value in rows[-1].items() if "samples" not in name}
        sys.stdout.write(f"{shown}\n")
        sys.stdout.flush()
        if arguments.out:
            ran = about(num_gpus=0, command=command, commit=arguments.commit)
            append_run(arguments.out, ran, rows[-1:])
    raise SystemExit(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    main()
