"""The command lines of `padded-dispatch compare` and `sweep`: many runs from one line.

`--help` and a typo in any run's flags import no torch.
"""

import argparse
import os
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from padded_dispatch.config import require
from padded_dispatch.train.arguments import parser as train_parser
from padded_dispatch.train.arguments import read, read_factor
from padded_dispatch.train.settings import flag
from padded_dispatch.utils.flags import Parser

SEPARATOR = "--vs"

# Flags of `padded-dispatch train` that differ between runs, and the flag of sweep that sets them.
_VARIED = {
    "seed": "--seeds",
    "capacity_factor": "--factors",
    "drop_policy": "--policies",
    "padded_capacity_pool": "--pools",
}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A contender of `compare`: the flags after its `--vs` as text, and all that hold for it."""

    name: str
    given: argparse.Namespace


def read_compare(argv: list[str]) -> tuple[int, list[Contender]]:
    """Return the number of repeats, and the contenders.

    Raises:
        ValueError: names the flag, its rule, its value and what to set.
        SystemExit: for `--help` and for flags that argparse refuses.
    """
    shared, *own = _split(argv)
    arguments, common = _compare_parser().parse_known_args(shared)
    repeats: int = arguments.repeats
    require(repeats >= 1, "--repeats", repeats, "be at least 1")
    fix = "add one, such as --vs --padded-experts packed"
    require(own, SEPARATOR, len(own), "be given at least once", fix)
    return repeats, [
        Contender(name=" ".join(flags), given=read(common + flags, "compare")) for flags in own
    ]


def read_sweep(argv: list[str]) -> tuple[argparse.Namespace, list[argparse.Namespace]]:
    """Return the flags that `train` lacks, and those of each run.

    Raises:
        ValueError: names the flag, its rule, its value and what to set.
        SystemExit: for `--help` and for flags that argparse refuses.
    """
    arguments, flags = _sweep_parser().parse_known_args(argv)
    jobs: int = arguments.jobs
    require(jobs >= 1, "--jobs", jobs, "be at least 1")
    require(jobs == 1 or "WORLD_SIZE" not in os.environ, "--jobs", jobs, "be 1 under torchrun")
    return arguments, _every_run(arguments, flags)


def _every_run(arguments: argparse.Namespace, flags: list[str]) -> list[argparse.Namespace]:
    """Return the flags of each run, seed by seed: an interrupted sweep is whole for some seeds."""
    train = train_parser("sweep")
    train.set_defaults(**{name: argparse.SUPPRESS for name in _VARIED if name[:6] == "padded"})
    given = vars(train.parse_args(flags))
    for name, instead in _VARIED.items():
        value = given.get(name, argparse.SUPPRESS)
        absent = value == argparse.SUPPRESS
        require(absent, flag(name), value, "be left out of sweep", f"give {instead}")
    every = []
    for seed, policy, pool, factor in product(
        arguments.seeds, arguments.policies, arguments.pools, arguments.factors
    ):
        varied = ["--capacity-factor", factor, "--seed", seed, "--drop-policy", policy]
        varied += ["--padded-capacity-pool", pool]
        every.append(read([*flags, *varied], "sweep"))
    return every


def _compare_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags that come before the first `--vs` and that `train` lacks."""
    made = Parser(
        prog="padded-dispatch compare",
        usage="padded-dispatch compare [--repeats N] [FLAGS OF padded-dispatch train] "
        "--vs [FLAGS OF padded-dispatch train] ...",
        description="Train several contenders, one after another, in the same processes. Each --vs "
        "starts a contender with flags of its own; flags before the first --vs hold for all.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="train all contenders in turn, N times over (default: 1)",
    )
    return made


def _sweep_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags that `padded-dispatch train` lacks."""
    made = Parser(
        prog="padded-dispatch sweep",
        usage="padded-dispatch sweep --out PATH [FLAGS] [FLAGS OF padded-dispatch train]",
        description="Train at several capacity factors, policies, pools and seeds, and add "
        "each run's training loss, held-out loss, dropped rows and time as a row to a results "
        "file. Runs that the file already has are left out.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--factors",
        nargs="+",
        type=_factor_text,
        default=["0.5", "0.75", "1", "1.25", "2", "none"],
        metavar="X",
        help="capacity factors; 'none' drops nothing (default: 0.5 0.75 1 1.25 2 none)",
    )
    made.add_argument(
        "--policies",
        nargs="+",
        default=["probs"],
        metavar="NAME",
        help="which rows keep a slot: values of --drop-policy (default: probs)",
    )
    made.add_argument(
        "--pools",
        nargs="+",
        default=["expert"],
        metavar="NAME",
        help="which rows share slots: values of --padded-capacity-pool (default: expert)",
    )
    made.add_argument(
        "--seeds",
        nargs="+",
        default=["0", "1", "2"],
        metavar="N",
        help="seeds of the weights and of the order of the data (default: 0 1 2)",
    )
    made.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="runs side by side, each in --workers processes; more than 1 makes times meaningless "
        "(default: 1)",
    )
    made.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="PATH",
        help="results file (JSON) to which each run adds one row",
    )
    return made


def _factor_text(text: str) -> str:
    """Return a capacity factor as it was given, if it is one."""
    read_factor(text)
    return text


def _split(argv: list[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in argv:
        if word == SEPARATOR:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts
