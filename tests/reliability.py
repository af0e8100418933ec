"""Break a training job on purpose, at several moments, and see that it ends cleanly.

    python -m tests.reliability --out FILE --commit SHA

A fault is a signal to the command, to its first or to its last worker, sent while workers import
or while they train. Within the time limit no process of the job is left, the exit code and the
last line of its output say what happened, and the folder of temporary files is as before. The
results file is complete after each fault. `--workers N` and `--only TEXT` choose.
"""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

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


def outcome(fault: Fault, num_workers: int) -> dict[str, Any]:
    """Start a job, break it, and return its row."""
    started = time.monotonic()
    command = [sys.executable, "-m", "padded_dispatch.cli", "train", "--device", "cpu"]
    command += ["--workers", str(num_workers), "--steps", "100000"]
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
    return {
        "check": "a fault ends the job cleanly",
        "name": str(fault),
        "passed": not failures,
        "facts": {"exit_code": job.returncode, "last_line": last},
        "failures": failures,
        "seconds": round(time.monotonic() - started, 1),
    }


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
    return rows.exit_code()


if __name__ == "__main__":
    sys.exit(main())
