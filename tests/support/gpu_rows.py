"""Flags and results rows that programs of tests share, those of `tests/gpu` above all."""

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from padded_dispatch.utils.results import about, append_run, require_results


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


def add_only(parser: argparse.ArgumentParser) -> None:
    """Add a flag to run only some cases; see `wants`."""
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="run cases with this text in their name; may be given more than once",
    )


def wants(arguments: argparse.Namespace, name: str) -> bool:
    """Return whether the command line selects the case of this name."""
    return any(text in name for text in arguments.only or [""])


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line of a program with many cases.

    Adds to the result `num_ranks`, the number of processes; `num_gpus`, the number of GPUs; and
    `backend`, the backend of the process group.
    """
    add_results(parser)
    add_only(parser)
    parser.add_argument("--cpu", type=int, metavar="N", help="use N processes without GPUs")
    arguments = parser.parse_args()
    arguments.num_gpus = 0 if arguments.cpu else torch.cuda.device_count()
    arguments.num_ranks = arguments.cpu or arguments.num_gpus
    arguments.backend = "gloo" if arguments.cpu else "nccl"
    if not arguments.num_ranks:
        parser.error("this program needs a GPU, got none; set --cpu N to run without")
    return arguments


class Rows:
    """Rows of one run. The results file is complete after each row; a failure does not end the run.

    Args:
        arguments: the parsed flags of `add_results`.
        num_gpus: number of GPUs that the run uses; 0 means the CPU.
        environment: variables that libraries read when they are loaded; set here, before workers
            start.
    """

    def __init__(
        self, arguments: argparse.Namespace, num_gpus: int, environment: dict[str, str]
    ) -> None:
        os.environ.update(environment)
        program = f"python -m tests.gpu.{Path(sys.argv[0]).stem}"
        command = arguments.command or f"{program} {shlex.join(sys.argv[1:])}"
        self._path = arguments.out
        self._about = about(num_gpus=num_gpus, command=command, commit=arguments.commit)
        self._about["environment"] = environment
        self._outcomes: list[bool] = []

    def add(self, row: dict[str, Any]) -> None:
        """Append a row of a `check` or a `measure` to the file, and print its outcome."""
        append_run(self._path, self._about, [row])
        self._outcomes.append(row["passed"])
        words = f"{'passed' if row['passed'] else 'FAILED'} {row.get('check') or row['measure']}"
        names = ("name", "dtype", "model", "capacity_factor", "seconds")
        print_line(", ".join([words, *(str(row[name]) for name in names if name in row)]))
        for failure in (row.get("failures") or [])[:3]:
            print_line(f"    {failure.strip().splitlines()[-1][:300]}")

    def exit_code(self) -> int:
        """Print a summary; return 1 if a row failed."""
        num_failed = self._outcomes.count(False)
        print_line(f"{len(self._outcomes) - num_failed} passed, {num_failed} failed")
        return int(num_failed > 0)


def print_line(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
