"""`padded-dispatch train`: from a command line to an exit code.

A mistake in a flag is found before torch is imported, and most others before Megatron is. What
takes seconds shows on a terminal what it is.
"""

import os
import sys
from typing import TYPE_CHECKING

from padded_dispatch.train.arguments import read, resolve
from padded_dispatch.train.screen import is_live, stop_waiting, wait_for, width
from padded_dispatch.train.settings import Settings
from padded_dispatch.train.summary import header, how_to_resume, next_steps

if TYPE_CHECKING:
    from padded_dispatch.train.loop import Outcome


def main(argv: list[str]) -> int:
    """Train; return 0 if the loss fell or there was one step only, 1 if it did not fall.

    Raises:
        ValueError: a mistake in the flags, found before any worker starts.
        SystemExit: see `start_workers`.
    """
    given = read(argv)
    shown = not vars(given).get("json") and _is_first()
    try:
        if shown:
            wait_for("importing PyTorch", sys.stdout)
        settings = resolve(given)
        stop_waiting()
        if shown:
            _write(header(settings, width()))
            wait_for("importing Megatron-Core, to check the settings", sys.stdout)
        # Imported late, since it brings Megatron: --help and a typo need it not.
        from padded_dispatch.train.check import check, held_folders

        with held_folders(settings):
            check(settings)
            stop_waiting()
            outcome = _train(settings, argv, shown=shown)
    finally:
        stop_waiting()
    if shown and is_live(sys.stdout):
        _write("\nNext:")
        for purpose, command in next_steps(settings, argv):
            _write(f"  {purpose}:\n    {command}")
    return 1 if outcome.fell is False else 0


def _train(settings: Settings, argv: list[str], *, shown: bool) -> "Outcome":
    """Run the workers; if they end early, show how to go on."""
    from padded_dispatch.utils.launch import start_workers

    if shown:
        _write(f"starting {settings.layout.workers} processes: 10 to 30 seconds")
    try:
        return start_workers(work, (settings,), num_workers=settings.layout.workers)
    except SystemExit:
        if words := how_to_resume(settings, argv):
            sys.stderr.write(f"{words}\n")
        raise


def work(settings: Settings) -> "Outcome":
    """Import Megatron and run a worker, from start to end."""
    if _is_first() and not settings.output.json:
        wait_for("importing Megatron-Core", sys.stdout)
    from padded_dispatch.train import loop

    stop_waiting()
    if _is_first() and not settings.output.json:
        wait_for("building the model and taking the first step", sys.stdout)
    return loop.work(settings)


def _is_first() -> bool:
    """Return whether this is rank 0, or a process that starts workers."""
    return os.environ.get("RANK", "0") == "0"


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
