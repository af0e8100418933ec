"""Rows of `python -m tests.gpu`: how a check runs, and the file that rows are appended to."""

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

from padded_dispatch.utils.results import about, append_run
from tests.support.pool import WorkerError, WorkerPool

CASE_S = 240.0

# Libraries read these when they are loaded, so they are set before a worker starts.
ENVIRONMENT = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_NVLS_ENABLE": "0",
    # Direct writes do not need multicast, which some hosts offer to some GPUs only.
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # Ranks may share a GPU: NCCL 2.30 or newer, and direct writes.
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}


class Rows:
    """Rows of one run. The results file is complete after each row; a failure does not end it."""

    def __init__(self, arguments: argparse.Namespace, num_gpus: int) -> None:
        os.environ.update(ENVIRONMENT)
        command = f"python -m tests.gpu {shlex.join(sys.argv[1:])}"
        self._path = arguments.out
        self._about = about(num_gpus=num_gpus, command=command, commit=arguments.commit)
        self._about["environment"] = ENVIRONMENT
        self._outcomes: list[bool] = []

    def add(self, row: dict[str, Any]) -> None:
        append_run(self._path, self._about, [row])
        self._outcomes.append(row["passed"])
        words = f"{'passed' if row['passed'] else 'FAILED'} {row['check']}: {row['name']}"
        print_line(f"{words}, {row['seconds']} s")
        for failure in (row.get("failures") or [])[:3]:
            print_line(f"    {failure.strip().splitlines()[-1][:300]}")

    def exit_code(self) -> int:
        num_failed = self._outcomes.count(False)
        print_line(f"{len(self._outcomes) - num_failed} passed, {num_failed} failed")
        return int(num_failed > 0 or not self._outcomes)


def found_by(pool: WorkerPool, run: Callable[..., Any], *given: Any) -> dict[str, Any]:
    """Run a check on all ranks, which return failures; return the fields of a row.

    The pool is ended after an error.
    """
    started = time.monotonic()
    try:
        found = pool.run(run, *given, timeout_s=CASE_S)
    except WorkerError as error:
        # Remove tracebacks, which contain paths of the machine.
        failures = [re.sub(r"\nTraceback.*?(?=\nrank \d|\Z)", "", str(error), flags=re.S)]
        pool.end()  # Leftover state could break the next case.
    else:
        failures = [f"rank {r}: {text}" for r, texts in enumerate(found) for text in texts]
        failures = sorted(set(failures))[:20]
    seconds = round(time.monotonic() - started, 2)
    return {"passed": not failures, "failures": failures, "seconds": seconds}


def print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
