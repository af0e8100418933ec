"""`padded-dispatch bench`: from a command line to an exit code."""

import argparse
import os
from pathlib import Path

import torch

from padded_dispatch.bench.cases import CONTENDERS, MODELS, SKEWS, sweep
from padded_dispatch.bench.work import Settings, work
from padded_dispatch.config import require
from padded_dispatch.utils.flags import errors_name_flags
from padded_dispatch.utils.launch import start_workers
from padded_dispatch.utils.results import require_results

_EXCHANGES = ("alltoall", "direct")  # what a contender can fix; "auto" is a contender of its own


def main(argv: list[str]) -> int:
    """Run the benchmark; return 0 when every case was measured, 1 when one failed.

    Raises:
        ValueError: for mistakes in `argv`, before any worker starts.
        SystemExit: see `start_workers`.
    """
    settings = parse(argv)
    succeeded = start_workers(work, (settings,), num_workers=settings.workers)
    return 0 if succeeded else 1


def parse(argv: list[str]) -> Settings:
    """Build settings from a command line.

    Raises:
        ValueError: names the option, its rule, its value and the fix.
        SystemExit: for `--help` and for mistakes that argparse finds.
    """
    given = _parser().parse_args(argv)
    flags = {"skew": "--skews", "capacity_factor": "--capacity-factors"}
    with errors_name_flags(given, **flags):
        return _settings(given, argv)


def _settings(given: argparse.Namespace, argv: list[str]) -> Settings:
    """Build settings from flags that the parser has read."""
    workers = given.workers
    if workers is None:
        workers = torch.cuda.device_count() if given.device == "cuda" else 2
    named = given.contenders or [
        key for key, contender in CONTENDERS.items() if given.device == "cuda" or contender.on_cpu
    ]
    wanted = given.exchange or _EXCHANGES
    contenders = [key for key in named if CONTENDERS[key].exchange in (None, *wanted)]
    _check(given, workers, contenders)
    cases = tuple(
        sweep(
            models=given.models,
            eps=given.ep or [workers],
            tokens=given.tokens,
            skews=given.skews,
            capacity_factors=given.capacity_factors,
            contenders=contenders,
        )
    )
    used = {CONTENDERS[case.contender].exchange for case in cases}
    for exchange in given.exchange or ():
        require(
            exchange in used,
            "exchange",
            exchange,
            f"be one that a contender uses on device={given.device} with these --ep",
            "add such contenders, or leave --exchange out",
        )
    require(cases, "contenders", contenders, "run with the given --ep", "give an --ep of 2 or more")
    return Settings(
        cases=cases,
        device=given.device,
        workers=workers,
        iterations=given.iterations,
        repeats=given.repeats,
        router_fusion=given.router_fusion,
        phases=given.phases,
        minutes=given.minutes,
        out=given.out,
        command=given.command or " ".join(["padded-dispatch bench", *argv]),
        commit=given.commit,
    )


def _check(given: argparse.Namespace, workers: int, contenders: list[str]) -> None:
    if given.out is not None:
        require_results("out", given.out)
    for name in ("iterations", "repeats"):
        value = getattr(given, name)
        require(value >= 1, name, value, "be at least 1")
    require(workers >= 1, "workers", workers, "be at least 1")
    if given.device == "cuda":
        num_gpus = torch.cuda.device_count()
        require(workers <= num_gpus, "workers", workers, f"be at most {num_gpus}, the GPUs here")
    for ep in given.ep or ():
        require(ep >= 1 and workers % ep == 0, "ep", ep, f"divide workers={workers}")
    for key in contenders:
        on_device = given.device == "cuda" or CONTENDERS[key].on_cpu
        require(on_device, "contenders", key, "run on a CPU", "use --device cuda, or leave it out")
    minutes = given.minutes
    require(minutes is None or minutes >= 0, "minutes", minutes, "be 0 or more")


def _parser() -> argparse.ArgumentParser:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="padded-dispatch bench",
        description="Measure forward and backward of one MoE layer, ours beside Megatron-Core's.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    sweeps = parser.add_argument_group("what to measure (every combination)")
    sweeps.add_argument("--ep", nargs="+", type=int, help="expert-parallel sizes; None: workers")
    sweeps.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=["qwen3-30b-a3b", "gpt-oss-20b"] if on_gpu else ["tiny"],
    )
    sweeps.add_argument(
        "--tokens", nargs="+", type=int, default=[4096 if on_gpu else 64], help="per rank"
    )
    sweeps.add_argument("--skews", nargs="+", choices=SKEWS, default=["uniform"])
    sweeps.add_argument("--capacity-factors", nargs="+", type=float, default=[1.0, 1.25, 2.0])
    sweeps.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, help="None: all that the device runs"
    )
    sweeps.add_argument(
        "--exchange",
        nargs="+",
        choices=_EXCHANGES,
        help="only contenders of ours that use it; None: both",
    )
    how = parser.add_argument_group("how to measure")
    how.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    workers = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None
    how.add_argument("--workers", type=int, default=workers, help="processes; None: all GPUs, or 2")
    how.add_argument("--iterations", type=int, default=20, help="passes per repeat")
    how.add_argument("--repeats", type=int, default=5, help="samples; their median counts")
    how.add_argument("--minutes", type=float, help="start no case after this time")
    fusion = {"action": argparse.BooleanOptionalAction, "default": False}
    how.add_argument("--router-fusion", **fusion, help="moe_router_fusion, for all contenders")
    phases = {"action": argparse.BooleanOptionalAction, "default": True}
    how.add_argument("--phases", **phases, help="profile kernels (GPUs only)")
    kept = parser.add_argument_group("results")
    kept.add_argument(
        "--out", type=Path, help="results file to write; each row is added when measured"
    )
    kept.add_argument("--commit", help="commit of the code, for the results")
    kept.add_argument("--command", help="command line for the results, if not this one")
    return parser
