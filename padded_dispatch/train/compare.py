"""`padded-dispatch compare`: train several contenders, one after another, in the same processes.

    padded-dispatch compare --preset qwen3-30b-a3b --steps 40 --out runs/graphs.json \\
        --vs --dispatcher alltoall \\
        --vs --graph layer

Flags before the first `--vs` hold for all; each `--vs` starts a contender with flags of
`padded-dispatch train`. One set of processes has two reasons: starting and importing takes longer
than many runs, and contenders compare best on one machine within the same minutes. `--repeats N`,
before the first `--vs`, trains all contenders in turn, N times over, so that a drift of the machine
shows in every contender: equal rows of a results file are repeats.

`check_runs` and `in_turn` serve `padded-dispatch sweep` as well.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from padded_dispatch.config import require
from padded_dispatch.megatron.world import world
from padded_dispatch.train.arguments import resolve
from padded_dispatch.train.check import check
from padded_dispatch.train.loop import train_in_groups
from padded_dispatch.train.runs import SEPARATOR, read_compare
from padded_dispatch.train.settings import Settings, flag
from padded_dispatch.train.world import free_memory, model_parallel
from padded_dispatch.utils.launch import start_workers


def main(argv: list[str]) -> int:
    """Train every contender; return 0 when all have finished.

    Raises:
        ValueError: a mistake in any contender's flags, found before any worker starts.
        SystemExit: see `start_workers`.
    """
    repeats, contenders = read_compare(argv)
    runs = [resolve(contender.given) for contender in contenders]
    check_runs("compare", runs)
    names = [contender.name for contender in contenders]
    start_workers(_work, (runs * repeats, names * repeats), num_workers=runs[0].layout.workers)
    return 0


def check_runs(command: str, runs: Sequence[Settings]) -> None:
    """Raise if the runs cannot share processes, or if one of them could not start.

    Raises:
        ValueError: names the flag, its rule, its value and what to set.
    """
    first = runs[0].layout
    for settings in runs:
        layout, output = settings.layout, settings.output
        require(
            (layout.device, layout.workers) == (first.device, first.workers),
            "--device and --workers",
            f"{layout.device}, {layout.workers} and {first.device}, {first.workers}",
            "be the same for all contenders",
            f"give them before the first {SEPARATOR}",
        )
        for name in ("run_dir", "trace"):
            folder = getattr(output, name)
            require(
                folder is None,
                flag(name),
                str(folder),
                f"be left out of {command}, whose runs would overwrite each other's files",
                "keep figures with --out",
            )
        check(settings)


def in_turn(runs: Sequence[Settings], device: torch.device) -> Iterator[Settings]:
    """Yield each run inside Megatron's process groups of its layout; free its memory afterwards.

    Consecutive runs with the same layout share the groups. All ranks must iterate to the end.
    """
    for layout, same in itertools.groupby(runs, key=lambda settings: settings.layout):
        with model_parallel(layout):
            for settings in same:
                yield settings
                free_memory(device)


def _work(runs: list[Settings], names: list[str]) -> None:
    """Run a worker from start to end."""
    with world(runs[0].layout.device) as device:
        for index, settings in enumerate(in_turn(runs, device)):
            if dist.get_rank() == 0 and not settings.output.json:
                sys.stdout.write(f"{index + 1}/{len(runs)} {names[index]}\n")
            train_in_groups(settings, device)
