"""`padded-dispatch sweep`: what a capacity factor costs in quality, by training at several of them.

    padded-dispatch sweep --factors 0.5 1 none --policies probs position+reroute --seeds 0 1 2 \\
        --results runs/quality.json --steps 200 --eval-passes 32

Every factor with every policy and every seed is a run; all other flags are those of
`padded-dispatch train` and hold for all runs. Runs with the same seed start from the same weights
and read the same bytes in the same order: they differ by their factor and policy alone.

Processes are started once and train one run after another. `--jobs` such sets work side by side,
each in process groups of its own. A row is added to the file when its run ends, so an interrupted
sweep goes on where it was: runs that the file has, from this machine and these versions, are left
out.
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
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from padded_dispatch.config import require
from padded_dispatch.train.arguments import parse
from padded_dispatch.train.arguments import parser as train_parser
from padded_dispatch.train.command import check
from padded_dispatch.train.loop import Outcome, train_in_groups
from padded_dispatch.train.metrics import identity
from padded_dispatch.train.settings import Settings
from padded_dispatch.train.world import free_memory, model_parallel, world
from padded_dispatch.utils.launch import start_workers
from padded_dispatch.utils.results import about, append_run, read_runs, require_results

# Flags of `padded-dispatch train` that differ between runs, and the one here that gives them.
_VARIED = {
    "seed": "seeds",
    "capacity_factor": "factors",
    "drop_policy": "policies",
    "padded_policy": "policies",
    "padded_remedy": "policies",
}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What all workers know: the runs that are to be trained, and the file that takes their rows.

    `ports`: of one rendezvous store per job; empty for a single job, which needs no other than the
    launcher's.
    """

    runs: tuple[Settings, ...]
    path: Path
    about: dict[str, Any]
    ports: tuple[int, ...]

    @property
    def num_jobs(self) -> int:
        """Runs that are trained side by side."""
        return len(self.ports) or 1


def parser() -> argparse.ArgumentParser:
    """The parser of the flags that `padded-dispatch train` does not have."""
    made = argparse.ArgumentParser(
        prog="padded-dispatch sweep",
        usage="padded-dispatch sweep --results FILE [FLAGS] [FLAGS OF padded-dispatch train]",
        description="Train at several capacity factors, policies and seeds, and keep training "
        "loss, held-out loss, dropped rows and time of each run as a row of a results file. Runs "
        "that the file has already are left out.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--factors",
        nargs="+",
        default=["0.5", "0.75", "1", "1.25", "2", "none"],
        metavar="X",
        help="capacity factors; 'none' drops nothing (default: 0.5 0.75 1 1.25 2 none)",
    )
    made.add_argument(
        "--policies",
        nargs="+",
        default=["probs"],
        metavar="NAME",
        help="who keeps a slot, as --padded-policy of train has it, with a remedy for dropped rows "
        "behind a plus where there is one, such as priority or probs+reroute; of Megatron's own "
        "dispatchers as --drop-policy has it, without remedies (default: probs)",
    )
    made.add_argument(
        "--seeds",
        nargs="+",
        default=["0", "1", "2"],
        metavar="N",
        help="of weights and of the order of the data (default: 0 1 2)",
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
        "--results", type=Path, required=True, metavar="PATH", help="JSON file that takes the rows"
    )
    return made


def main(argv: list[str]) -> int:
    """Train every run that is missing; 0 when all have come to their end.

    Raises:
        ValueError: the user's mistakes, in any of the runs, before there are workers.
        SystemExit: see `start_workers`.
    """
    arguments, flags = parser().parse_known_args(argv)
    require_results("results", arguments.results)
    jobs: int = arguments.jobs
    if jobs < 1 or (jobs > 1 and "WORLD_SIZE" in os.environ):
        raise ValueError(f"jobs={jobs} is not possible: give at least 1, under torchrun 1")
    runs = planned(arguments.factors, arguments.policies, arguments.seeds, flags)
    for settings in runs:
        for name in ("out", "trace"):
            folder = getattr(settings.output, name)
            if folder is not None:  # One for all runs.
                raise ValueError(f"{name}={folder} is not possible: sweep keeps --results")
        check(settings)
    layout = runs[0].layout
    # No GPUs on a CPU; where jobs share GPUs, no more than there are.
    num_gpus = torch.cuda.device_count() if layout.device == "cuda" else 0
    run_about = about(
        num_gpus=min(layout.workers * jobs, num_gpus),
        command=" ".join(["padded-dispatch", "sweep", *argv]),
        commit=runs[0].output.commit,
    )
    done = finished(arguments.results, run_about)
    missing = tuple(settings for settings in runs if run_key(flags_of(settings)) not in done)
    sys.stdout.write(f"{len(runs)} runs, {len(runs) - len(missing)} of them done before\n")
    if not missing:
        return 0
    jobs = min(jobs, len(missing))
    stores = [_store() for _ in range(jobs)] if jobs > 1 else []
    sweep = Sweep(
        runs=missing,
        path=arguments.results,
        about=run_about,
        ports=tuple(store.port for store in stores),
    )
    start_workers(_work, (sweep,), num_workers=jobs * layout.workers)
    return 0


def planned(
    factors: list[str], policies: list[str], seeds: list[str], flags: list[str]
) -> list[Settings]:
    """The settings of every run, seed by seed: an interrupted sweep is whole for some seeds.

    Without --eval-every a run evaluates once, at its end.

    Raises:
        ValueError: names what is not possible and what to change.
    """
    train = train_parser()
    train.set_defaults(padded_policy=argparse.SUPPRESS, padded_remedy=argparse.SUPPRESS)
    given = vars(train.parse_args(flags))
    for name, flag in _VARIED.items():
        value = given.get(name, argparse.SUPPRESS)
        require(value == argparse.SUPPRESS, name, value, f"give --{flag} in its place")
    stock = given.get("dispatcher", "padded_alltoall") != "padded_alltoall"
    policy_flag = "--drop-policy" if stock else "--padded-policy"
    runs = []
    for seed, policy, factor in product(seeds, policies, factors):
        keeps, _, remedy = policy.partition("+")
        own = ["--capacity-factor", factor, "--seed", seed, policy_flag, keeps]
        settings = parse([*flags, *own, "--padded-remedy", remedy or "none"])
        if settings.output.eval_every is None:
            output = dataclasses.replace(settings.output, eval_every=settings.output.steps)
            settings = dataclasses.replace(settings, output=output)
        runs.append(settings)
    return runs


def flags_of(settings: Settings) -> dict[str, Any]:
    """Everything that decides the figures of a row, as it is in the row."""
    groups = ("recipe", "dispatch", "layout")
    output = ("steps", "graph", "log_every", "eval_every", "eval_passes")
    return {
        "preset": settings.preset,
        **{group: dataclasses.asdict(getattr(settings, group)) for group in groups},
        "output": {name: getattr(settings.output, name) for name in output},
    }


def run_key(flags: dict[str, Any]) -> str:
    """Equal for equal runs, whether from settings or from a file."""
    return json.dumps(flags, sort_keys=True)


def finished(path: Path, run_about: dict[str, Any]) -> set[str]:
    """Keys of the runs that the file has from this machine with these versions."""
    here = run_about["machine"], run_about["versions"]
    return {
        run_key(row["flags"])
        for run in read_runs("results", path)
        if (run["about"]["machine"], run["about"]["versions"]) == here
        for row in run["rows"]
    }


def row_of(
    settings: Settings, outcome: Outcome, *, num_jobs: int, seconds: float
) -> dict[str, Any]:
    """A run as a row of a results file.

    Lists `loss`, `dropped` and `fill` are means since the step before in `step`. `ms` is a step's,
    the median over the second half of these; null where runs disturbed each other.
    """
    rows, last, dispatch = outcome.rows, outcome.rows[-1], settings.dispatch
    stock, remedy = dispatch.padded.policy == "megatron", dispatch.padded.remedy
    policy = dispatch.drop_policy if stock else dispatch.padded.policy
    steady = [row.step_ms for row in rows[len(rows) // 2 :]]
    alone = num_jobs == 1
    return {
        **identity(settings),
        "variant": policy if remedy == "none" else f"{policy}+{remedy}",
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


def _store() -> TCPStore:
    """Where the ranks of one job find each other, at a port that is free."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _work(sweep: Sweep) -> None:
    """A worker's whole life: the runs of its job, one after another."""
    layout, job = sweep.runs[0].layout, 0
    if sweep.ports:
        number = int(os.environ["RANK"])
        job, rank = divmod(number, layout.workers)
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(layout.workers)
        os.environ["LOCAL_RANK"] = str(number % max(1, torch.cuda.device_count()))
        os.environ["MASTER_PORT"] = str(sweep.ports[job])
    with world(layout) as device, model_parallel(layout):
        for number in range(job, len(sweep.runs), sweep.num_jobs):
            settings = sweep.runs[number]
            start = time.monotonic()
            with contextlib.redirect_stdout(io.StringIO()):
                outcome = train_in_groups(settings, device)
            seconds = time.monotonic() - start
            if dist.get_rank() == 0:
                row = row_of(settings, outcome, num_jobs=sweep.num_jobs, seconds=seconds)
                append_run(sweep.path, sweep.about, [row])
                sys.stdout.write(f"{number + 1}/{len(sweep.runs)} {line(row)}\n")
                sys.stdout.flush()
            free_memory(device)


def line(row: dict[str, Any]) -> str:
    """For example: factor 1.25, probs, seed 0: loss 2.9012, held-out 2.9531, dropped 12%, 11 s."""
    factor = "none" if row["capacity_factor"] is None else f"{row['capacity_factor']:g}"
    dropped = "" if row["dropped"][-1] is None else f", dropped {row['dropped'][-1]:.0%}"
    return (
        f"factor {factor}, {row['variant']}, seed {row['seed']}: loss {row['loss'][-1]:.4f}, "
        f"held-out {row['held_out']['loss'][-1]:.4f}{dropped}, {row['seconds']:.0f} s"
    )
