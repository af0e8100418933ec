"""`padded-dispatch train` and `compare`: from a command line to an exit code.

    padded-dispatch compare --preset qwen3-30b-a3b --steps 40 --out runs/graphs.json \\
        --vs --dispatcher alltoall \\
        --vs --graph layer --capacity-factor 1 1.25 2

`compare` trains its contenders one after another in the same processes. Mistakes in the flags are
found before any worker starts. If a contender fails, new processes train those after it.
"""

import argparse
import contextlib
import gc
import itertools
import multiprocessing
import sys
from typing import Any

from padded_dispatch.config import require
from padded_dispatch.megatron.options import padded_flags
from padded_dispatch.train.arguments import resolve
from padded_dispatch.train.settings import Settings
from padded_dispatch.utils import launch
from padded_dispatch.utils.logs import show


def train(given: argparse.Namespace) -> int:
    """Train; return 0 if the loss fell or there was one step only, 1 if it did not fall.

    Raises:
        ValueError: a mistake in the flags, found before any worker starts.
        SystemExit: see `start_workers`.
    """
    settings = resolve(given)
    outcome = _start([(_header(settings), settings)])
    first, last = outcome.rows[0].loss, outcome.last_loss
    if last is None:
        return 0
    verb = "fell" if last < first else "did not fall: it went"
    show(f"loss {verb} from {first:.2f} to {last:.2f} (mean of the last lines, at most ten)")
    return 0 if last < first else 1


def compare(contenders: list[tuple[str, argparse.Namespace]]) -> int:
    """Train every contender, see `read_compare`; return 0 when all have finished.

    Raises:
        ValueError: a mistake in any contender's flags, found before any worker starts.
        SystemExit: see `start_workers`; with code 1 once all others have finished.
    """
    runs = [
        (f"{number}/{len(contenders)} {name}".rstrip(), resolve(flags))
        for number, (name, flags) in enumerate(contenders, start=1)
    ]
    first = runs[0][1].layout
    for _, settings in runs:
        layout, fix = settings.layout, "give them before the first --vs"
        found = f"{layout.device}, {layout.workers} and {first.device}, {first.workers}"
        same = (layout.device, layout.workers) == (first.device, first.workers)
        require(same, "--device and --workers", found, "be the same for all contenders", fix)
        rule = "be left out of compare, whose runs would write to one folder"
        trace = settings.dispatch.padded.trace
        require(trace is None, "--trace", trace, rule, "keep figures with --out")
    _start(runs)
    return 0


def _start(runs: list[tuple[str, Settings]]) -> Any:
    """Check all runs and train them in the same workers; return the outcome of the last.

    `runs`: a title and settings of each.

    Raises:
        SystemExit: see `start_workers`. If a run failed, it is raised once all others have run.
    """
    for _, settings in runs:
        _check(settings)
    num_workers, outcome, failed = runs[0][1].layout.workers, None, []
    num_ended = multiprocessing.get_context("spawn").RawValue("i", 0)  # runs, written by rank 0
    while num_ended.value < len(runs):
        remaining = runs[num_ended.value :]
        show(f"starting {_processes(num_workers)}: 10 to 30 seconds")
        try:
            outcome = launch.start_workers(work, (remaining, num_ended), num_workers=num_workers)
            break
        except SystemExit as end:
            if end.code != 1:  # a signal
                raise
            if num_ended.value < len(runs):
                title, _ = runs[num_ended.value]
                failed.append(title)
            num_ended.value += 1
    if failed:
        sys.stderr.write(f"{len(failed)} of {len(runs)} failed: {'; '.join(failed)}\n")
    if failed or outcome is None:  # None: the processes died after the last run.
        raise SystemExit(1)
    return outcome


def work(runs: list[tuple[str, Settings]], num_ended: Any) -> Any:
    """Run a worker from start to end: one run after another; return the outcome of the last.

    Consecutive runs with the same layout share Megatron's process groups. `num_ended`: a counter
    of the runs that have ended, which rank 0 increments.
    """
    import torch
    import torch.distributed as dist

    from padded_dispatch.exchange.mirror import absent_ranks_named
    from padded_dispatch.megatron.world import world
    from padded_dispatch.train import loop

    outcome = None
    with world(runs[0][1].layout.device) as device, absent_ranks_named():
        for layout, group in itertools.groupby(runs, key=lambda run: run[1].layout):
            with loop.model_parallel(layout):
                for title, settings in group:
                    show(title)
                    outcome = loop.train(settings, device)
                    if dist.get_rank() == 0:
                        num_ended.value += 1
                    gc.collect()  # DDP's hooks and the model reference each other.
                    torch.cuda.empty_cache()
    return outcome


def _check(settings: Settings) -> None:
    """Raise if a run could not start, by Megatron's rules too."""
    from padded_dispatch.megatron.cpu import megatron_on_cpu
    from padded_dispatch.train.data import Windows, load_corpus
    from padded_dispatch.train.model import EAGER_STEPS, transformer_config
    from padded_dispatch.utils.results import require_results

    layout, recipe, output = settings.layout, settings.recipe, settings.output
    enough = output.graph == "none" or output.steps > EAGER_STEPS
    rule = f"be above {EAGER_STEPS}, the eager ones, with --graph"
    require(enough, "--steps", output.steps, rule)
    for text in load_corpus(recipe.text):
        Windows(text, recipe.seq_length, recipe.seed)
    if output.out is not None:
        require_results("--out", output.out)
    # As in the workers; without a GPU, `install` would warn outside of `megatron_on_cpu`.
    on_cpu = megatron_on_cpu() if layout.device == "cpu" else contextlib.nullcontext()
    with on_cpu, padded_flags():
        transformer_config(settings)


def _header(settings: Settings) -> str:
    """Return one line: the model, the dispatcher and the processes."""
    model, dispatch, layout = settings.model, settings.dispatch, settings.layout
    factor, sizes = dispatch.capacity_factor, ("ep", "etp", "tp", "pp")
    return (
        f"{settings.preset}, {settings.recipe.num_layers} layers, {model.top_k} of "
        f"{model.num_experts} experts per token; {dispatch.dispatcher}"
        + (", nothing dropped" if factor is None else f", capacity factor {factor:g}")
        + f"; {_processes(layout.workers)} ({layout.device})"
        + "".join(f", {n.upper()} {getattr(layout, n)}" for n in sizes if getattr(layout, n) > 1)
    )


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"
