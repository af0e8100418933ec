"""Break a training job in many ways, and write what came of it as rows of a results file.

    python -m tests.reliability --out notebooks/results/reliability.json --commit SHA

Every row is one fault: a signal to the parent, to a worker or to all processes of the terminal, at
one moment of a resumed run; a broken checkpoint; a disk, a port or a folder that cannot be used. It
holds the seconds from the signal (or, where a job is refused, from its start) until the job's last
process has ended, the processes that were left after 15 seconds, and the lines of earlier runs that
were lost: rows of metrics.jsonl, rows of the results file, events of TensorBoard, records of
traces, checkpoints. It needs no GPU. Full and read-only disks need root, to mount a file system in
memory; without it they are left out.
"""

import argparse
import atexit
import contextlib
import json
import os
import pickle
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from padded_dispatch.trace import load_traces
from padded_dispatch.train.integrity import checkpoints, require_whole
from padded_dispatch.utils.results import about, append_run, read_runs
from tests.support.gpu_rows import add_only, add_results, print_line, wants
from tests.support.processes import workers_of

LIMIT_S = 15.0
TRAIN = [sys.executable, "-m", "padded_dispatch.cli", "train"]
SMALL = (
    "--device cpu --workers 2 --seq-length 24 --micro-batch 3 --lr-warmup 2 --lr-decay 8 "
    "--log-every 1 --save-every 1 --trace-every 1 --run-dir run --trace trace --tensorboard"
)
DONE = 4  # steps of the earlier run
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


class Job:
    """A command in a session of its own, in `folder`; it ends with this program."""

    def __init__(self, folder: Path, flags: list[str], environment: dict[str, str]) -> None:
        self.folder = folder
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        with self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [*TRAIN, *flags],
                cwd=folder,
                env=ENVIRONMENT | environment,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        self._started = time.monotonic()
        atexit.register(self.kill)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def seconds(self) -> float:
        """Return the seconds since its start."""
        return time.monotonic() - self._started

    def lines(self) -> list[str]:
        return self._stdout.read_text().splitlines()

    def errors(self) -> str:
        return self._stderr.read_text()

    def workers(self) -> list[int]:
        with contextlib.suppress(OSError):
            return sorted(workers_of(self.process.pid))
        return []

    def left(self) -> list[int]:
        """Return the processes of the session that have not ended."""
        self.process.poll()
        command = ["ps", "-o", "pid=,stat=", "-s", str(self.process.pid)]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        pairs = [line.split() for line in found.splitlines()]
        return [int(pid) for pid, state in pairs if not state.startswith("Z")]

    def end(self, limit_s: float = LIMIT_S) -> tuple[float, int]:
        """Wait until no process is left; return the seconds, and how many were left after them."""
        begin = time.monotonic()
        while (left := self.left()) and time.monotonic() - begin < limit_s:
            time.sleep(0.02)
        seconds = time.monotonic() - begin
        self.kill()
        self.process.wait()
        atexit.unregister(self.kill)
        return seconds, len(left)


def until(job: Job, reached: Callable[[], Any], limit_s: float = 600.0) -> None:
    """Wait until `reached`, or until the job has ended."""
    begin = time.monotonic()
    while not reached() and job.process.poll() is None:
        assert time.monotonic() - begin < limit_s, "the job did not get there"
        time.sleep(0.001)


def steps(job: Job) -> int:
    return sum(line.startswith("step ") for line in job.lines())


def both_workers(job: Job) -> bool:
    return len(job.workers()) == 2


def writing(job: Job) -> bool:
    return (job.folder / "run" / "checkpoints" / "unfinished").exists()


# The moment, and how to wait for it. All but the first two have workers.
MOMENTS: dict[str, Callable[[Job], None]] = {
    "start": lambda job: time.sleep(0.1),
    "parent imports": lambda job: time.sleep(1.5),
    "workers start": lambda job: until(job, lambda: both_workers(job)),
    "workers import": lambda job: (until(job, lambda: both_workers(job)), time.sleep(1.5))[0],
    "training": lambda job: until(job, lambda: steps(job) >= 1),
    "checkpoint": lambda job: until(job, lambda: steps(job) >= 1 and writing(job)),
    "end": lambda job: until(job, lambda: any(x.startswith("loss ") for x in job.lines())),
}
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL


def signals() -> Iterator[tuple[str, signal.Signals, str]]:
    """Yield the moment, the signal and its target of every fault."""
    for number in SIGNALS:
        for moment in MOMENTS:
            yield moment, number, "parent"
            if moment not in ("start", "parent imports"):
                yield moment, number, "worker"
            if number == signal.SIGINT:
                yield moment, number, "terminal"


def earlier_run(folder: Path) -> None:
    """Train the steps that every fault must leave as they are."""
    flags = [*SMALL.split(), "--steps", str(DONE), "--out", "results.json"]
    job = Job(folder, flags, {})
    job.process.wait()
    assert job.process.returncode == 0, job.errors()


def kept(folder: Path) -> set[str]:
    """Return everything that a run has written to `folder` and that reads back, as lines."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = folder / "run"
    found = {
        line
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if json.loads(line)["step"] <= DONE
    }
    rows = [row for run in read_runs("--out", folder / "results.json") for row in run["rows"]]
    found |= {json.dumps(row, sort_keys=True) for row in rows}
    trace = load_traces([folder / "trace"])
    for step, layer, rank in zip(trace.steps, trace.layers, trace.ranks, strict=True):
        if step <= DONE:
            found.add(f"trace {step} {layer} {rank}")
    events = EventAccumulator(str(run)).Reload()
    for tag in events.Tags()["scalars"]:
        found |= {f"{tag} {e.step} {e.value}" for e in events.Scalars(tag) if e.step <= DONE}
    for checkpoint in checkpoints(run):
        with contextlib.suppress(ValueError):
            require_whole(checkpoint)
            found.add(checkpoint.name)
    return found


def copy(earlier: Path, folder: Path) -> Path:
    return Path(shutil.copytree(earlier, folder, symlinks=True))


def interrupt(earlier: Path, folder: Path, fault: tuple[str, signal.Signals, str]) -> dict:
    """Resume a copy of the earlier run, send it a signal at a moment, and return the row."""
    moment, number, target = fault
    before = kept(copy(earlier, folder))
    num_steps = DONE + 2 if moment == "end" else 100_000
    job = Job(folder, [*SMALL.split(), "--resume", "--steps", str(num_steps)], {})
    MOMENTS[moment](job)
    begin = time.monotonic()
    with contextlib.suppress(ProcessLookupError, IndexError):
        if target == "terminal":
            os.killpg(job.process.pid, number)
        else:
            pid = job.process.pid if target == "parent" else job.workers()[-1]
            os.kill(pid, number)
    _, orphans = job.end()
    seconds = time.monotonic() - begin
    lost = len(before - kept(folder))
    broken = 0
    for checkpoint in checkpoints(folder / "run"):
        try:
            require_whole(checkpoint)
        except ValueError:
            broken += 1
    return {
        "check": "fault",
        "fault": number.name,
        "target": target,
        "moment": moment,
        "new_steps": steps(job),
        "seconds": seconds,
        "exit_code": job.process.returncode,
        "orphans": orphans,
        "lost_lines": lost,
        "broken_checkpoints": broken,
        "passed": orphans == lost == broken == 0 and seconds < LIMIT_S,
    }


class Code:
    """An object whose pickle runs code: it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def newest(folder: Path) -> Path:
    return checkpoints(folder / "run")[-1]


def cut(path: Path, num_bytes: int) -> None:
    os.truncate(path, num_bytes)


BROKEN: dict[str, Callable[[Path], Any]] = {
    "cut-off .distcp": lambda f: cut(newest(f) / "__1_0.distcp", 100_000),
    "no .distcp": lambda f: (newest(f) / "__0_0.distcp").unlink(),
    "no .metadata": lambda f: (newest(f) / ".metadata").unlink(),
    "cut-off .metadata": lambda f: cut(newest(f) / ".metadata", 5_000),
    "empty .metadata": lambda f: cut(newest(f) / ".metadata", 0),
    ".metadata with code": lambda f: (newest(f) / ".metadata").write_bytes(
        pickle.dumps(Code(f / "made"))
    ),
    "no run.json": lambda f: (newest(f) / "run.json").unlink(),
    "run.json is a list": lambda f: (newest(f) / "run.json").write_text("[]"),
    "a row of zeros": lambda f: (f / "run" / "metrics.jsonl").open("a").write("\0\0\n"),
}


def refused(job: Job, fault: str, words: str) -> dict[str, Any]:
    """Return the row of a job that should end before work starts, with one line of `words`."""
    _, orphans = job.end(120.0)
    errors = job.errors()
    one_line = errors.count("\n") == 1 and words in errors
    return {
        "check": "refused",
        "fault": fault,
        "seconds": job.seconds(),
        "exit_code": job.process.returncode,
        "error": errors.strip().splitlines()[-1].replace(str(job.folder), "FOLDER"),
        "orphans": orphans,
        "passed": one_line and job.process.returncode == 2 and orphans == 0,
    }


def resume_broken(earlier: Path, folder: Path, fault: str) -> dict[str, Any]:
    """Resume from a broken checkpoint."""
    before = kept(copy(earlier, folder))
    BROKEN[fault](folder)
    flags = [*SMALL.split(), "--resume", "--steps", str(DONE + 2)]
    words = "in line" if "row" in fault else "to continue from step-"
    row = refused(Job(folder, flags, {}), fault, words)
    assert before
    row["passed"] &= not (folder / "made").exists()
    return row


def taken_port(earlier: Path, folder: Path) -> dict[str, Any]:
    """Start rank 0 as torchrun would, at a port that another process has."""
    folder.mkdir()
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": port}
        job = Job(folder, [*SMALL.split(), "--steps", "2"], torchrun | {"MASTER_ADDR": "127.0.0.1"})
        return refused(job, "a taken port", "MASTER_PORT must be a free port")


@contextmanager
def disk(folder: Path, options: str) -> Iterator[None]:
    """Mount a file system in memory at `folder`."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def read_only(earlier: Path, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    with disk(folder / "run", "ro"):
        job = Job(folder, [*SMALL.split(), "--steps", "2"], {})
        return refused(job, "a read-only disk", "--run-dir must be")


def full(earlier: Path, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    with disk(folder / "run", "size=2m"):
        (folder / "run" / "other").write_bytes(bytes(2**21 - 2**14))
        job = Job(folder, [*SMALL.split(), "--steps", "2"], {})
        return refused(job, "a full disk", "--run-dir must be in a folder that takes")


def fills(earlier: Path, folder: Path) -> dict[str, Any]:
    """Resume on a disk that has room for one more checkpoint; it is full while the run saves."""
    folder.mkdir()
    size = sum(path.stat().st_size for path in earlier.rglob("*") if path.is_file())
    with disk(folder, f"size={size + 40 * 2**20}"):
        shutil.copytree(earlier, folder, symlinks=True, dirs_exist_ok=True)
        before = kept(folder)
        job = Job(folder, [*SMALL.split(), "--resume", "--steps", "100000"], {})
        until(job, lambda: False)
        seconds, orphans = job.end()
        lost = len(before - kept(folder))
        whole = require_whole(newest(folder))["step"] > DONE
        error = job.errors().strip().splitlines()[-1]
        return {
            "check": "fault",
            "fault": "a disk that fills",
            "moment": "checkpoint",
            "seconds": seconds,
            "exit_code": job.process.returncode,
            "error": error.replace(str(folder), "FOLDER"),
            "orphans": orphans,
            "lost_lines": lost,
            "passed": orphans == lost == 0 and whole and job.process.returncode == 1,
        }


def two_jobs(earlier: Path, folder: Path) -> dict[str, Any]:
    """Start two jobs in one folder at the same moment; one of them must train to its end."""
    copy(earlier, folder)
    flags = [*SMALL.split(), "--resume", "--steps", str(DONE + 2)]
    folders = [folder / name for name in ("first", "second")]
    for own in folders:
        own.mkdir()
        for shared in ("run", "trace"):
            (own / shared).symlink_to(folder / shared)
    jobs = [Job(own, flags, {}) for own in folders]
    while all(job.process.poll() is None for job in jobs):
        time.sleep(0.02)
    winner, loser = sorted(jobs, key=lambda job: job.process.returncode is not None)
    row = refused(loser, "two jobs in one folder", "must be used by one job at a time; process ")
    winner.process.wait()
    trained = winner.process.returncode in (0, 1) and steps(winner) == 2
    row["passed"] &= trained and newest(folder).name == f"step-{DONE + 2:08d}"
    return row


OTHERS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "a taken port": taken_port,
    "two jobs in one folder": two_jobs,
}
NEED_ROOT: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "a read-only disk": read_only,
    "a full disk": full,
    "a disk that fills": fills,
}


def cases() -> Iterator[tuple[str, Callable[[Path, Path], dict[str, Any]]]]:
    """Yield the name of every case, and a function of the earlier run and of an empty place."""
    yield from OTHERS.items()
    if os.geteuid() == 0:
        yield from NEED_ROOT.items()
    for name in BROKEN:
        yield name, lambda earlier, folder, name=name: resume_broken(earlier, folder, name)
    for fault in signals():
        moment, number, target = fault
        name = f"{number.name} to {target}, {moment}"
        yield name, lambda earlier, folder, fault=fault: interrupt(earlier, folder, fault)


def main() -> int:
    """Run all cases; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_results(parser)
    add_only(parser)
    arguments = parser.parse_args()
    # Jobs inherit what is ignored: SIGINT in a shell's background job, SIGHUP under nohup.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    command = arguments.command or f"python -m tests.reliability {shlex.join(sys.argv[1:])}"
    run_about = about(num_gpus=0, command=command, commit=arguments.commit)
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        earlier = Path(place) / "earlier"
        earlier.mkdir()
        earlier_run(earlier)
        for name, case in cases():
            if not wants(arguments, name):
                continue
            folder = Path(place) / "run"
            row = case(earlier, folder)
            shutil.rmtree(folder)
            append_run(arguments.out, run_about, [row])
            failed += not row["passed"]
            outcome = "passed" if row["passed"] else f"FAILED {row}"
            print_line(f"{outcome} {name}, {row['seconds']:.1f} s")
    print_line(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
