"""The frame of programs that show something on GPUs: their flags, and rows kept as they come."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

from padded_dispatch.results import about, append_run


def add_results(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Flags for a results file."""
    parser.add_argument("--out", type=Path, required=required, help="the results file")
    parser.add_argument("--commit", required=required, help="that this tree was made from")
    parser.add_argument("--command", help="as it was typed, if not as this process sees it")


def about_run(
    arguments: argparse.Namespace, num_gpus: int, environment: dict[str, str]
) -> dict[str, Any]:
    """What a results file says of a run with these flags.

    Args:
        environment: read by libraries as they are loaded, so set before a worker starts.
    """
    command = arguments.command or " ".join(["python", *sys.argv])
    return about(num_gpus=num_gpus, command=command, commit=arguments.commit) | {
        "environment": environment
    }


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, with the flags that programs of many cases have."""
    add_results(parser)
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="run cases with this text in their name; may be given more than once",
    )
    parser.add_argument("--cpu", type=int, metavar="N", help="N processes without GPUs")
    arguments = parser.parse_args()
    if not arguments.cpu and torch.cuda.device_count() == 0:
        parser.error("no GPU here; --cpu N runs without")
    return arguments


class Rows:
    """Rows of one run. The results file is whole after each; a failure does not end the run.

    Args:
        arguments: see `parsed`.
        environment: see `about_run`.
    """

    def __init__(self, arguments: argparse.Namespace, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        self.num_ranks = arguments.cpu or torch.cuda.device_count()
        self.backend = "gloo" if arguments.cpu else "nccl"
        self._only, self._path = arguments.only or [""], arguments.out
        self._about = about_run(arguments, 0 if arguments.cpu else self.num_ranks, environment)
        self._outcomes: list[bool] = []

    def wants(self, case: Any) -> bool:
        """Whether the command line asks for it."""
        return any(text in case.name for text in self._only)

    def add(self, row: dict[str, Any]) -> None:
        """Keep it, and say how it ended."""
        append_run(self._path, self._about, [row])
        self._outcomes.append(row["passed"])
        words = "passed" if row["passed"] else "FAILED"
        known = (row[name] for name in ("name", "dtype", "seconds") if name in row)
        say(f"{words} {row['check']}: {', '.join(map(str, known))}")
        for failure in (row["failures"] or [])[:3]:
            say(f"    {failure.strip().splitlines()[-1][:300]}")

    def exit_code(self) -> int:
        """1 when a row failed."""
        num_failed = self._outcomes.count(False)
        say(f"{len(self._outcomes) - num_failed} passed, {num_failed} failed")
        return int(num_failed > 0)


def say(line: str) -> None:
    """A line for whoever watches."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
