"""The frame of programs that show something on GPUs: their flags, and rows kept as they come."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

from padded_dispatch.utils.results import about, append_run


def add_results(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Flags for a results file."""
    parser.add_argument("--out", type=Path, required=required, help="the results file")
    parser.add_argument("--commit", required=required, help="that this tree was made from")
    parser.add_argument("--command", help="as it was typed, if not as this process sees it")


def add_only(parser: argparse.ArgumentParser) -> None:
    """A flag to run some of many cases; see `wants`."""
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="run cases with this text in their name; may be given more than once",
    )


def wants(arguments: argparse.Namespace, name: str) -> bool:
    """Whether the command line asks for the case of this name."""
    return any(text in name for text in arguments.only or [""])


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, with the flags that programs of many cases have; and what they stand for.

    `num_ranks` is how many processes there can be, `num_gpus` how many of them have a GPU, and
    `backend` is what they talk with.
    """
    add_results(parser)
    add_only(parser)
    parser.add_argument("--cpu", type=int, metavar="N", help="N processes without GPUs")
    arguments = parser.parse_args()
    arguments.num_gpus = 0 if arguments.cpu else torch.cuda.device_count()
    arguments.num_ranks = arguments.cpu or arguments.num_gpus
    arguments.backend = "gloo" if arguments.cpu else "nccl"
    if not arguments.num_ranks:
        parser.error("no GPU here; --cpu N runs without")
    return arguments


class Rows:
    """Rows of one run. The results file is whole after each; a failure does not end the run.

    Args:
        arguments: with the flags of `add_results`.
        num_gpus: that the run uses; 0 stands for the CPU.
        environment: read by libraries as they are loaded, so set before a worker starts.
    """

    def __init__(
        self, arguments: argparse.Namespace, num_gpus: int, environment: dict[str, str]
    ) -> None:
        os.environ.update(environment)
        command = arguments.command or " ".join(["python", *sys.argv])
        self._path = arguments.out
        self._about = about(num_gpus=num_gpus, command=command, commit=arguments.commit)
        self._about["environment"] = environment
        self._outcomes: list[bool] = []

    def add(self, row: dict[str, Any]) -> None:
        """Keep it, and say how it ended. It is of a `check` or a `measure`."""
        append_run(self._path, self._about, [row])
        self._outcomes.append(row["passed"])
        words = f"{'passed' if row['passed'] else 'FAILED'} {row.get('check') or row['measure']}"
        names = ("name", "dtype", "model", "capacity_factor", "seconds")
        say(", ".join([words, *(str(row[name]) for name in names if name in row)]))
        for failure in (row.get("failures") or [])[:3]:
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
