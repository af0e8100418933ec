"""`padded-dispatch bench`: from a command line to an exit code."""

import argparse

import torch

from padded_dispatch.bench.arguments import EXCHANGES, read_bench, with_defaults
from padded_dispatch.bench.cases import CONTENDERS, sweep
from padded_dispatch.bench.work import Settings, work
from padded_dispatch.config import require
from padded_dispatch.utils.flags import errors_name_flags
from padded_dispatch.utils.launch import start_workers
from padded_dispatch.utils.results import require_results


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
    given = with_defaults(read_bench(argv))
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
    wanted = given.exchange or EXCHANGES
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
            main_grads=given.main_grad,
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
    num_gpus = torch.cuda.device_count()
    on_cpu = given.device == "cpu"
    require(on_cpu or num_gpus, "device", given.device, "be cpu where PyTorch sees no GPU")
    require(workers >= 1, "workers", workers, "be at least 1")
    if not on_cpu:
        require(workers <= num_gpus, "workers", workers, f"be at most {num_gpus}, the GPUs here")
    for ep in given.ep or ():
        require(ep >= 1 and workers % ep == 0, "ep", ep, f"divide workers={workers}")
    for key in contenders:
        on_device = given.device == "cuda" or CONTENDERS[key].on_cpu
        require(on_device, "contenders", key, "run on a CPU", "use --device cuda, or leave it out")
    for main_grad in given.main_grad:
        fused_on_cpu = main_grad == "fused" and given.device == "cpu"
        fix = "use --device cuda, or separate"
        require(not fused_on_cpu, "main_grad", main_grad, "be none or separate on a CPU", fix)
    minutes = given.minutes
    require(minutes is None or minutes >= 0, "minutes", minutes, "be 0 or more")
