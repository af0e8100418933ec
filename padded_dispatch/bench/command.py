"""`padded-dispatch bench`: from a command line to an exit code."""

import argparse
import os
from pathlib import Path
from typing import get_args

import torch

from padded_dispatch.bench.cases import CONTENDERS, MODELS, SKEWS, sweep
from padded_dispatch.bench.work import Settings, work
from padded_dispatch.config import require
from padded_dispatch.exchange.choose import ExchangeKind
from padded_dispatch.utils.launch import start_workers
from padded_dispatch.utils.results import require_results


def main(argv: list[str]) -> int:
    """Measure; 0 when every case gave figures, 1 when one failed.

    Raises:
        ValueError: the user's mistakes, found before there are workers.
        SystemExit: see `start_workers`.
    """
    settings = parse(argv)
    succeeded = start_workers(work, (settings,), num_workers=settings.workers)
    return 0 if succeeded else 1


def parse(argv: list[str]) -> Settings:
    """Settings from a command line.

    Raises:
        ValueError: names what is not possible and what to change.
        SystemExit: for `--help` and for what argparse itself refuses.
    """
    given = _parser().parse_args(argv)
    workers = given.workers
    if workers is None:
        workers = torch.cuda.device_count() if given.device == "cuda" else 2
    possible = given.contenders or [
        key for key, contender in CONTENDERS.items() if given.device == "cuda" or contender.on_cpu
    ]
    exchanges = (None, *(given.exchange or get_args(ExchangeKind)))
    contenders = [key for key in possible if CONTENDERS[key].exchange in exchanges]
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
        if exchange not in used:
            raise ValueError(
                f"exchange={exchange} is not possible: of the contenders on device={given.device} "
                "with these --ep none uses it; give others, or no --exchange"
            )
    require(cases, "contenders", " ".join(contenders), "they need an --ep of at least 2")
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
    if given.device == "cuda" and not 1 <= workers <= torch.cuda.device_count():
        raise ValueError(
            f"workers={workers} is not possible: PyTorch sees {torch.cuda.device_count()} GPUs"
        )
    for ep in given.ep or ():
        if ep < 1 or workers % ep:
            raise ValueError(f"ep={ep} is not possible: it must divide workers={workers}")
    for contender in contenders:
        if given.device == "cpu" and not CONTENDERS[contender].on_cpu:
            raise ValueError(f"contenders={contender} is not possible on a CPU: it needs GPUs")
    for name, value in (
        ("workers", workers),
        ("iterations", given.iterations),
        ("repeats", given.repeats),
    ):
        require(value >= 1, name, value, "give at least 1")
    minutes = given.minutes
    require(minutes is None or minutes >= 0, "minutes", minutes, "give 0 or more")


def _parser() -> argparse.ArgumentParser:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="padded-dispatch bench",
        description="Measure one MoE layer, forward and backward, ours beside Megatron-Core's own.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    sweeps = parser.add_argument_group("what to measure: every combination of")
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
        "--contenders", nargs="+", choices=CONTENDERS, help="None: all that the device can run"
    )
    exchanges = get_args(ExchangeKind)
    sweeps.add_argument(
        "--exchange", nargs="+", choices=exchanges, help="of our contenders; None: every one"
    )
    how = parser.add_argument_group("how to measure")
    how.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    workers = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None
    how.add_argument("--workers", type=int, default=workers, help="processes; None: all GPUs or 2")
    how.add_argument("--iterations", type=int, default=20, help="passes per repeat")
    how.add_argument("--repeats", type=int, default=5, help="the median of them counts")
    how.add_argument("--minutes", type=float, help="begin no case later than this")
    fusion = {"action": argparse.BooleanOptionalAction, "default": False}
    how.add_argument("--router-fusion", **fusion, help="moe_router_fusion, for all contenders")
    phases = {"action": argparse.BooleanOptionalAction, "default": True}
    how.add_argument("--phases", **phases, help="profile kernels, on GPUs")
    kept = parser.add_argument_group("results")
    kept.add_argument("--out", type=Path, help="results file, gets rows as they come")
    kept.add_argument("--commit", help="of the code, for the results")
    kept.add_argument("--command", help="as it was typed, if not as this process sees it")
    return parser
