"""What checks find, and results rows of programs: their flags, the file that they append to."""

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from padded_dispatch.utils.results import about, append_run, require_results
from tests.support.pool import WorkerError, WorkerPool

CASE_S = 240.0

# Libraries read these when they are loaded, so they are set before a worker starts.
ENVIRONMENT = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_NVLS_ENABLE": "0",
    # Direct stores do not need multicast, which some hosts offer to some GPUs only.
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # Ranks may share a GPU: NCCL 2.30 or newer, and direct stores.
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}


def add_results(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add flags for a results file."""
    parser.add_argument("--out", type=Path, required=required, help="the results file")
    parser.add_argument("--commit", required=required, help="commit that this tree was made from")
    parser.add_argument("--command", help="the command as typed, if this process sees another one")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; end the program if its `--out` cannot take results."""
    arguments = parser.parse_args()
    if arguments.out:
        try:
            require_results("--out", arguments.out)
        except ValueError as error:
            parser.error(str(error))
    return arguments


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Findings of one rank: tensors that differ, in how many steps; facts; other failures."""

    differing: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    broken: tuple[str, ...] = ()

    def failures(self) -> list[str]:
        """Return all failures as text."""
        differing = (f"{name} differs in {n} steps" for name, n in self.differing.items())
        return [*differing, *self.broken]


class Rows:
    """Rows of one run. The results file is complete after each row; a failure does not end it."""

    def __init__(self, arguments: argparse.Namespace, num_gpus: int) -> None:
        os.environ.update(ENVIRONMENT)
        program = Path(sys.argv[0])
        program = program.parent.name if program.stem == "__main__" else program.stem
        command = arguments.command or f"python -m tests.{program} {shlex.join(sys.argv[1:])}"
        self._path = arguments.out
        self._about = about(num_gpus=num_gpus, command=command, commit=arguments.commit)
        self._about["environment"] = ENVIRONMENT
        self._outcomes: list[bool] = []

    def add(self, row: dict[str, Any]) -> None:
        """Append a row to the file, and print its outcome."""
        append_run(self._path, self._about, [row])
        self._outcomes.append(row["passed"])
        words = f"{'passed' if row['passed'] else 'FAILED'} {row['check']}: {row['name']}"
        print_line(f"{words}, {row['seconds']} s")
        for failure in (row.get("failures") or [])[:3]:
            print_line(f"    {failure.strip().splitlines()[-1][:300]}")

    def exit_code(self) -> int:
        """Print a summary; return 1 if a row failed."""
        num_failed = self._outcomes.count(False)
        print_line(f"{len(self._outcomes) - num_failed} passed, {num_failed} failed")
        return int(num_failed > 0)


def found_by(
    pool: WorkerPool, run: Callable[..., Any], *given: Any, timeout_s: float = CASE_S
) -> dict[str, Any]:
    """Run a check on all ranks; return the fields of a row: facts, failures, passed, seconds.

    The pool is ended after an error.
    """
    started, facts = time.monotonic(), None
    try:
        found = pool.run(run, *given, timeout_s=timeout_s)
    except WorkerError as error:
        # Remove tracebacks, which contain paths of the machine.
        failures = [re.sub(r"\nTraceback.*?(?=\nrank \d|\Z)", "", str(error), flags=re.S)]
        pool.end()  # Leftover state could break the next case.
    else:
        facts = found[0].facts
        failures = {f"rank {r}: {text}" for r, f in enumerate(found) for text in f.failures()}
        failures = sorted(failures)[:20]
    seconds = round(time.monotonic() - started, 2)
    return {"passed": not failures, "facts": facts, "failures": failures, "seconds": seconds}


def print_line(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
