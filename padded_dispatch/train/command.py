"""`padded-dispatch train` and `compare`: from a command line to an exit code.

    padded-dispatch compare --preset qwen3-30b-a3b --steps 40 --out runs/graphs.json \\
        --vs --dispatcher alltoall \\
        --vs --graph layer --capacity-factor 1 1.25 2

`compare` trains its contenders one after another in the same processes, and ends with a table.
Mistakes in the flags are found before any worker starts. If a contender fails, new processes train
those after it.
"""

import argparse
import contextlib
import gc
import itertools
import multiprocessing
import pickle
import shlex
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from padded_dispatch.config import require
from padded_dispatch.megatron.options import padded_flags
from padded_dispatch.train.arguments import resolve
from padded_dispatch.train.settings import Settings
from padded_dispatch.utils import launch
from padded_dispatch.utils.logs import aligned, show


def train(given: argparse.Namespace) -> int:
    """Train; return 0 if the loss fell or there was one step only, 1 if it did not fall.

    Raises:
        ValueError: a mistake in the flags, found before any worker starts.
        SystemExit: see `start_workers`.
    """
    settings = resolve(given)
    (summary,) = _start([(_header(settings), settings)])
    if summary is None or summary.loss is None:  # Under torchrun only rank 0 has one.
        return 0
    show(f"\n{summary.sentence()}\n{_next(settings)}")
    return 0 if summary.loss < summary.first_loss else 1


def _next(settings: Settings) -> str:
    """Return what to do after a run, a command for each."""
    on_gpu, folder = settings.layout.device == "cuda", settings.dispatch.padded.trace
    stock = "--dispatcher alltoall --graph partial" if on_gpu else "--dispatcher allgather"
    graph = " --graph layer" if on_gpu and settings.output.graph == "none" else ""
    steps = {
        "compare with Megatron's own": f"padded-dispatch compare --vs{graph} --vs {stock}",
        "choose a capacity factor": f"padded-dispatch tune {shlex.quote(folder)}"
        if folder
        else "padded-dispatch train --trace traces && padded-dispatch tune traces",
        "use it in Megatron": "two flags: see the README, 'Use it in Megatron'",
    }
    width = max(map(len, steps))
    return "\n".join(["Next:", *(f"  {what:<{width}}  {how}" for what, how in steps.items())])


def compare(contenders: list[tuple[str, argparse.Namespace]]) -> int:
    """Train every contender, see `read_compare`, and print a table; return 0 when all finished.

    Raises:
        ValueError: a mistake in any contender's flags, found before any worker starts.
        SystemExit: see `start_workers`; with code 1 once all others have finished.
    """
    runs, names = [], []
    for number, (name, flags) in enumerate(contenders, start=1):
        settings = resolve(flags)
        names.append(name := name or settings.dispatch.dispatcher)
        if (folder := settings.output.tensorboard) is not None:  # A curve for each contender.
            own = folder / f"{number} {name}".replace("/", "_")
            settings = replace(settings, output=replace(settings.output, tensorboard=own))
        runs.append((f"{number}/{len(contenders)} {name}", settings))
    first = runs[0][1].layout
    for _, settings in runs:
        layout, fix = settings.layout, "give them before the first --vs"
        found = f"{layout.device}, {layout.workers} and {first.device}, {first.workers}"
        same = (layout.device, layout.workers) == (first.device, first.workers)
        require(same, "--device and --workers", found, "be the same for all contenders", fix)
        rule = "be left out of compare, whose runs would write to one folder"
        trace = settings.dispatch.padded.trace
        require(trace is None, "--trace", trace, rule, "keep figures with --out")
    with TemporaryDirectory() as folder:
        try:
            _start(runs, Path(folder))
        finally:
            summaries = [_read(Path(folder), number) for number in range(len(runs))]
            if any(summaries):
                show(f"\n{table(names, summaries)}")
            if any(summaries) and first.device == "cpu":
                show("Times on a CPU say nothing about GPUs.")
    return 0


def table(names: list[str], summaries: list[Any]) -> str:
    """Return what contenders came to, each beside the first one; None is one that failed."""
    head = ("contender", "loss", "held-out", "ms", "tokens/s", "dropped", "recomputed", "GiB")
    lines: list[tuple[str, ...]] = [(*head, "loss - first", "ms / first")]
    first = summaries[0]
    for name, found in zip(names, summaries, strict=True):
        if found is None:
            lines.append((name, "failed", *[""] * 8))
            continue
        losses = (found.loss or found.first_loss, found.held_out)
        beside = ("", "")
        if first is not None and found is not first:
            difference = losses[0] - (first.loss or first.first_loss)
            beside = (f"{difference:+.3f}", f"{found.ms / first.ms:.2f}")
        lines.append(
            (
                name,
                *("" if loss is None else f"{loss:.3f}" for loss in losses),
                f"{found.ms:,.1f}",
                f"{found.tokens_per_s:,.0f}",
                *("" if s is None else f"{s:.2%}" for s in (found.dropped, found.recomputed)),
                "" if found.gib is None else f"{found.gib:.1f}",
                *beside,
            )
        )
    # A column without a figure is left out.
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    return aligned(list(zip(*columns, strict=True)))


def _start(runs: list[tuple[str, Settings]], folder: Path | None = None) -> list[Any]:
    """Check all runs and train them in the same workers; return their summaries.

    `runs`: a title and settings of each. `folder`: where to keep the summary of each run that
    ends, also if a later one fails; None takes one of its own.

    Raises:
        SystemExit: see `start_workers`. If a run failed, it is raised once all others have run.
    """
    if folder is None:
        with TemporaryDirectory() as own:
            return _start(runs, Path(own))
    for _, settings in runs:
        _check(settings)
    num_workers, ended, failed = runs[0][1].layout.workers, False, []
    num_ended = multiprocessing.get_context("spawn").RawValue("i", 0)  # runs, written by rank 0
    while num_ended.value < len(runs):
        remaining = runs[num_ended.value :]
        show(f"starting {_processes(num_workers)}: 10 to 30 seconds")
        try:
            given = remaining, num_ended, folder
            launch.start_workers(work, given, num_workers=num_workers)
            ended = True
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
    if failed or not ended:  # The processes may have died after the last run.
        raise SystemExit(1)
    return [_read(folder, number) for number in range(len(runs))]


def _read(folder: Path, number: int) -> Any:
    """Return the summary of run `number`, None if it has not ended."""
    path = folder / str(number)
    return pickle.loads(path.read_bytes()) if path.exists() else None


def work(runs: list[tuple[str, Settings]], num_ended: Any, folder: Path) -> None:
    """Run a worker from start to end: one run after another; rank 0 writes their summaries.

    Consecutive runs with the same layout share Megatron's process groups. `num_ended`: a counter
    of the runs that have ended, which rank 0 increments; a summary's file has its run's number.
    """
    import torch
    import torch.distributed as dist

    from padded_dispatch.exchange.mirror import absent_ranks_named
    from padded_dispatch.megatron.world import world
    from padded_dispatch.train import loop

    with world(runs[0][1].layout.device) as device, absent_ranks_named():
        for layout, group in itertools.groupby(runs, key=lambda run: run[1].layout):
            with loop.model_parallel(layout):
                for title, settings in group:
                    show(title)
                    outcome = loop.train(settings, device)
                    if dist.get_rank() == 0:
                        (folder / str(num_ended.value)).write_bytes(pickle.dumps(outcome.summary))
                        num_ended.value += 1
                    gc.collect()  # DDP's hooks and the model reference each other.
                    torch.cuda.empty_cache()


def _check(settings: Settings) -> None:
    """Raise if a run could not start, by Megatron's rules too."""
    from padded_dispatch.megatron.cpu import megatron_on_cpu
    from padded_dispatch.train.data import Windows, load_corpus
    from padded_dispatch.train.model import EAGER_STEPS, transformer_config
    from padded_dispatch.utils.results import require_folder, require_results

    layout, recipe, output = settings.layout, settings.recipe, settings.output
    enough = output.graph == "none" or output.steps > EAGER_STEPS
    rule = f"be above {EAGER_STEPS}, the eager ones, with --graph"
    require(enough, "--steps", output.steps, rule)
    for text in load_corpus(recipe.text):
        Windows(text, recipe.seq_length, recipe.seed)
    if output.out is not None:
        require_results("--out", output.out)
    if output.tensorboard is not None:
        rule, fix = "be left out without the package tensorboard", "run pip install tensorboard"
        require(find_spec("tensorboard"), "--tensorboard", str(output.tensorboard), rule, fix)
        require_folder("--tensorboard", output.tensorboard)
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
