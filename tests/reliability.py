"""Break a training job on purpose, at several moments, and see that it ends cleanly.

    python -m tests.reliability --out FILE --commit SHA

A fault is a signal to the command, to its first or to its last worker, sent while workers import
or while they train. Within the time limit no process of the job is left, the exit code and the
last line of its output say what happened, and the folder of temporary files is as before. Others
are a disk that fills up and a port that is taken. The results file is complete after each fault.
`--workers N` and `--only TEXT` choose.
"""

import argparse
import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from padded_dispatch.utils.launch import torchrun_env
from tests.support.processes import ENVIRONMENT, children_of, living_after, workers_of
from tests.support.rows import Rows, add_results, parse

END_S = 30.0  # until all processes of a job have ended, on a busy machine
START_S = 180.0
WHOM = "the command", "the first worker", "the last worker"
MOMENTS = "imports", "training"


class Fault(NamedTuple):
    """A signal, to whom, and when."""

    number: signal.Signals
    whom: str
    moment: str

    def __str__(self) -> str:
        return f"{self.number.name} to {self.whom} during {self.moment}"


ENDS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL
# Workers are only killed.
FAULTS = [
    Fault(*given)
    for given in itertools.product(ENDS, WHOM, MOMENTS)
    if given[1] == WHOM[0] or given[0] == signal.SIGKILL
]


COMMAND = [sys.executable, "-m", "padded_dispatch.cli", "train", "--device", "cpu"]
COMMAND += ["--steps", "100000", "--workers"]


def outcome(fault: Fault, num_workers: int) -> dict[str, Any]:
    """Start a job, break it, and return its row."""
    started, command = time.monotonic(), [*COMMAND, str(num_workers)]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        given = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": folder}
        with output.open("w") as file:
            job = subprocess.Popen(
                command, env=ENVIRONMENT | given, stdout=file, stderr=file, start_new_session=True
            )
        try:
            failures = _broken(fault, job, output, num_workers)
        finally:
            job.kill()
            job.wait()
        left = [path.name for path in Path(folder).glob("padded-dispatch-*")]
        if left and fault.number != signal.SIGKILL:
            failures.append(f"temporary files are left: {left}")
        last = output.read_text().strip().splitlines()[-1:]
    return _row(str(fault), failures, started, exit_code=job.returncode, last_line=last)


def _row(name: str, failures: list[str], started: float, **facts: Any) -> dict[str, Any]:
    return {
        "check": "a fault ends the job cleanly",
        "name": name,
        "passed": not failures,
        "facts": facts,
        "failures": failures,
        "seconds": round(time.monotonic() - started, 1),
    }


def full_disk(num_workers: int) -> dict[str, Any]:
    """Return the row of a job that may write files of 64 KiB, and whose traces are larger."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))

    flags = [str(num_workers), "--trace", "traces"]
    return _failing("a disk that fills up", flags, {}, "0 written", preexec_fn=limit)


def taken_port(num_workers: int) -> dict[str, Any]:
    """Return the row of a worker, as of torchrun, whose port another process has."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        given = torchrun_env(0, 1, other.getsockname()[1])
        given["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        return _failing("a port that is taken", ["1"], given, "EADDRINUSE")


def _failing(
    name: str, flags: list[str], given: dict[str, str], words: str, **how: Any
) -> dict[str, Any]:
    """Run a job that fails by itself; return the row. Its processes hold the ends of its pipes."""
    started = time.monotonic()
    given = {"OMP_NUM_THREADS": "1", **given}
    with tempfile.TemporaryDirectory() as folder:
        how |= {"env": ENVIRONMENT | given, "cwd": folder, "timeout": START_S}
        job = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, **how)
    failures = [f"the exit code is {job.returncode}, not 1"] * (job.returncode != 1)
    failures += [f"{words!r} is not in the output: {job.stderr}"] * (words not in job.stderr)
    return _row(name, failures, started, exit_code=job.returncode)


def _broken(fault: Fault, job: subprocess.Popen, output: Path, num_workers: int) -> list[str]:
    """Send the signal at its moment; return what went wrong."""
    workers: list[int] = []
    deadline = time.monotonic() + START_S
    while len(workers) < num_workers or (fault.moment == "training" and not _trains(output)):
        if job.poll() is not None or time.monotonic() > deadline:
            return ["the job did not start", output.read_text()[-1000:]]
        time.sleep(0.05)
        workers = sorted(workers_of(job.pid))
    everyone = [job.pid, *workers, *(child for pid in workers for child in children_of(pid))]
    os.kill({WHOM[0]: job.pid, WHOM[1]: workers[0], WHOM[2]: workers[-1]}[fault.whom], fault.number)
    left = living_after(everyone, END_S)
    failures = [f"process {pid} is left" for pid in left]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    expected = {WHOM[0]: {128 + fault.number, -fault.number}}.get(fault.whom, {1})
    if job.wait() not in expected:
        failures.append(f"the exit code is {job.returncode}, not one of {sorted(expected)}")
    if fault.whom != WHOM[0] and "killed by SIGKILL" not in output.read_text():
        failures.append("the output does not say which rank was killed")
    return failures


def _trains(output: Path) -> bool:
    """Whether the job has printed the line of a step."""
    return any(line.lstrip().startswith("step") for line in output.read_text().splitlines())


def main() -> int:
    """Try all faults; return 1 if a job did not end cleanly."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_results(parser)
    parser.add_argument("--workers", type=int, default=2, help="processes of a job (default: 2)")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults with this in their name")
    arguments = parse(parser)
    rows = Rows(arguments, 0)
    for fault in FAULTS:
        if arguments.only in str(fault):
            rows.add(outcome(fault, arguments.workers))
    for fails in (full_disk, taken_port):
        if arguments.only in fails.__name__:
            rows.add(fails(arguments.workers))
    return rows.exit_code()


if __name__ == "__main__":
    sys.exit(main())
