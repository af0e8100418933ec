"""`padded-dispatch sweep`: train at several capacity factors, to see what each costs in quality.

    padded-dispatch sweep --factors 0.5 1 none --policies probs position+reroute --seeds 0 1 2 \\
        --out runs/quality.json --steps 200 --eval-passes 32

Every factor with every policy, pool (`--pools`) and seed is a run. All other flags are those of
`padded-dispatch train` and hold for all runs. Runs with the same seed start from the same weights
and read the same bytes in the same order: only their factor, policy and pool differ.

Processes start once and train one run after another. `--jobs N` runs N such sets side by side, each
with its own process groups. A row is added to the file when its run ends. An interrupted sweep
therefore continues where it stopped: runs that the file already has, from this machine and these
versions, are left out.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from padded_dispatch.megatron.world import world
from padded_dispatch.train.arguments import resolve
from padded_dispatch.train.compare import check_runs, in_turn
from padded_dispatch.train.loop import Outcome, train_in_groups
from padded_dispatch.train.metrics import about_run, identity
from padded_dispatch.train.runs import read_sweep
from padded_dispatch.train.settings import Settings
from padded_dispatch.utils.launch import start_workers
from padded_dispatch.utils.results import append_run, read_runs, require_results


def main(argv: list[str]) -> int:
    """Train every run that the results file lacks; return 0 when all have finished.

    Raises:
        ValueError: a mistake in any run's flags, found before any worker starts.
        SystemExit: see `start_workers`.
    """
    arguments, every = read_sweep(argv)
    require_results("--out", arguments.out)
    jobs: int = arguments.jobs
    runs = planned(every)
    check_runs("sweep", runs)
    about = about_run(runs[0], num_jobs=jobs)
    done = finished(arguments.out, about)
    missing = [settings for settings in runs if run_key(flags_of(settings)) not in done]
    sys.stdout.write(f"{len(runs)} runs, {len(runs) - len(missing)} of them done before\n")
    if not missing:
        return 0
    jobs = min(jobs, len(missing))
    # The ranks of a job meet at its store. Port 0 lets the system choose a free one.
    stores = [
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _ in range(jobs if jobs > 1 else 0)
    ]
    ports = [store.port for store in stores]
    num_workers = jobs * runs[0].layout.workers
    start_workers(_work, (missing, arguments.out, about, ports), num_workers=num_workers)
    return 0


def planned(every: Sequence[argparse.Namespace]) -> list[Settings]:
    """Return the settings of every run; without --eval-every a run evaluates once, at its end.

    Raises:
        ValueError: names the flag, its rule, its value and what to set.
    """
    runs = []
    for given in every:
        settings = resolve(given)
        if settings.output.eval_every is None:
            output = dataclasses.replace(settings.output, eval_every=settings.output.steps)
            settings = dataclasses.replace(settings, output=output)
        runs.append(settings)
    return runs


def flags_of(settings: Settings) -> dict[str, Any]:
    """Return everything that decides the figures of a row, as the row's `flags`."""
    output = ("steps", "graph", "log_every", "eval_every", "eval_passes")
    return {
        "preset": settings.preset,
        **settings.as_json("recipe", "dispatch", "layout"),
        "output": {name: getattr(settings.output, name) for name in output},
    }


def run_key(flags: dict[str, Any]) -> str:
    """Return a key that is equal for equal runs, from settings or from a file."""
    return json.dumps(flags, sort_keys=True)


def finished(path: Path, about: dict[str, Any]) -> set[str]:
    """Return the keys of the runs in the file from this machine with these versions."""
    here = about["machine"], about["versions"]
    return {
        run_key(row["flags"])
        for run in read_runs("--out", path)
        if (run["about"]["machine"], run["about"]["versions"]) == here
        for row in run["rows"]
    }


def row_of(
    settings: Settings, outcome: Outcome, *, num_jobs: int, seconds: float
) -> dict[str, Any]:
    """Return a run as a row of a results file.

    `loss`, `dropped` and `fill` are lists of means over the steps up to each entry of `step`. `ms`
    is the median step time over the second half of them; None if other runs ran beside this one.
    """
    rows, last, padded = outcome.rows, outcome.rows[-1], settings.dispatch.padded
    steady = [row.step_ms for row in rows[len(rows) // 2 :]]
    alone = num_jobs == 1
    return {
        **identity(settings),
        "variant": settings.dispatch.drop_policy,
        "pool": padded.capacity_pool,
        "flags": flags_of(settings),
        "seed": settings.recipe.seed,
        "jobs": num_jobs,
        "seconds": seconds,
        "ms": statistics.median(steady) if alone else None,
        "samples_ms": steady if alone else None,
        "phases_ms": None,
        "host_ms": None,
        "floor_ms": None,
        "tflops_per_gpu": last.tflops_per_gpu if alone else None,
        "allocated_gib": last.allocated_gib,
        "reserved_gib": last.reserved_gib,
        "step": [row.step for row in rows],
        "loss": [row.loss for row in rows],
        "dropped": [row.dropped for row in rows],
        "fill": [row.fill for row in rows],
        "held_out": {
            "step": [evaluation.step for evaluation in outcome.evaluations],
            "loss": [evaluation.loss for evaluation in outcome.evaluations],
        },
    }


def line(row: dict[str, Any]) -> str:
    """Return a row as text.

    Example: factor 1.25, probs, seed 0: loss 2.9012, held-out 2.9531, dropped 12%, 11 s.
    """
    factor = "none" if row["capacity_factor"] is None else f"{row['capacity_factor']:g}"
    dropped = "" if row["dropped"][-1] is None else f", dropped {row['dropped'][-1]:.0%}"
    pool = "" if row["pool"] == "expert" else f", pool {row['pool']}"
    return (
        f"factor {factor}, {row['variant']}{pool}, seed {row['seed']}: loss {row['loss'][-1]:.4f}, "
        f"held-out {row['held_out']['loss'][-1]:.4f}{dropped}, {row['seconds']:.0f} s"
    )


def _work(runs: list[Settings], path: Path, about: dict[str, Any], ports: list[int]) -> None:
    """Run a worker from start to end: train the runs of its job, one after another.

    Args:
        runs: the runs of all jobs.
        path: the results file.
        about: metadata of the rows.
        ports: ports of the jobs' rendezvous stores; empty for a single job, which uses the
            launcher's.
    """
    layout, job, num_jobs = runs[0].layout, 0, len(ports) or 1
    if ports:
        number = int(os.environ["RANK"])
        job, rank = divmod(number, layout.workers)
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(layout.workers)
        os.environ["LOCAL_RANK"] = str(number % max(1, torch.cuda.device_count()))
        os.environ["MASTER_PORT"] = str(ports[job])
    with world(layout.device) as device:
        for index, settings in enumerate(in_turn(runs[job::num_jobs], device)):
            start = time.monotonic()
            with contextlib.redirect_stdout(io.StringIO()):
                outcome = train_in_groups(settings, device)
            seconds = time.monotonic() - start
            if dist.get_rank() == 0:
                row = row_of(settings, outcome, num_jobs=num_jobs, seconds=seconds)
                append_run(path, about, [row])
                number = job + index * num_jobs + 1
                sys.stdout.write(f"{number}/{len(runs)} {line(row)}\n")
                sys.stdout.flush()
