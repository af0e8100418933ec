"""`padded-dispatch compare`: several trainings, one after another, in the same processes.

    padded-dispatch compare --preset qwen3-30b-a3b --steps 40 --results runs/graphs.json \\
        --vs --dispatcher alltoall \\
        --vs --graph layer

Flags before the first `--vs` hold for all; each `--vs` starts a contender and has its own flags,
those of `padded-dispatch train`. Starting processes and importing costs more than many a run, and
contenders on the same machine in the same minutes compare best. `--repeats N`, before the first
`--vs`, trains all of them in turn, N times over, so that what changes on the machine meanwhile is
seen in every contender: equal rows of a results file are repeats.
"""

import argparse
import itertools
import sys

import torch.distributed as dist

from padded_dispatch.config import require
from padded_dispatch.train.arguments import parse
from padded_dispatch.train.command import check
from padded_dispatch.train.loop import train_in_groups
from padded_dispatch.train.settings import Settings
from padded_dispatch.train.world import free_memory, model_parallel, world
from padded_dispatch.utils.launch import start_workers

_SEPARATOR = "--vs"


def main(argv: list[str]) -> int:
    """Train every contender; 0 when all have come to their end.

    Raises:
        ValueError: the user's mistakes, in any of the contenders, before there are workers.
        SystemExit: see `start_workers`.
    """
    shared, *contenders = _split(argv)
    arguments, common = parser().parse_known_args(shared)
    repeats: int = arguments.repeats
    require(repeats >= 1, "repeats", repeats, "give 1 or more")
    runs = [parse(common + flags) for flags in contenders]
    if not runs:
        raise ValueError("no contender is not possible: give at least one --vs")
    for settings in runs:
        if (settings.layout.device, settings.layout.workers) != (
            runs[0].layout.device,
            runs[0].layout.workers,
        ):
            raise ValueError("device and workers must be the same for all: give them before --vs")
        for name in ("out", "trace"):
            folder = getattr(settings.output, name)
            if folder is not None:  # Repeats, and contenders that share it, would write over it.
                raise ValueError(f"{name}={folder} is not possible: compare keeps --results")
        check(settings)
    names = [" ".join(flags) for flags in contenders]
    start_workers(_work, (runs * repeats, names * repeats), num_workers=runs[0].layout.workers)
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of what may stand before the first `--vs` beside the flags of `train`."""
    made = argparse.ArgumentParser(
        prog="padded-dispatch compare",
        usage="padded-dispatch compare [--repeats N] [FLAGS OF padded-dispatch train] "
        "--vs [FLAGS OF padded-dispatch train] ...",
        description="Train several contenders, one after another, in the same processes. Each --vs "
        "starts one and has its own flags; flags before the first --vs hold for all.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="train all of them in turn, N times over (default: 1)",
    )
    return made


def _split(argv: list[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in argv:
        if word == _SEPARATOR:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _work(runs: list[Settings], names: list[str]) -> None:
    """A worker's whole life."""
    with world(runs[0].layout) as device:
        numbered = enumerate(zip(runs, names, strict=True), 1)
        for layout, same in itertools.groupby(numbered, key=lambda item: item[1][0].layout):
            with model_parallel(layout):
                for number, (settings, name) in same:
                    if dist.get_rank() == 0 and not settings.output.json:
                        sys.stdout.write(f"{number}/{len(runs)} {name}\n")
                    train_in_groups(settings, device)
                    free_memory(device)
