"""`padded-dispatch bench`: from a command line to an exit code."""

import argparse
import os
from pathlib import Path
from typing import get_args

import torch

from padded_dispatch.bench.cases import CONTENDERS, MODELS, SKEWS, sweep
from padded_dispatch.bench.work import Settings, work
from padded_dispatch.dispatcher import ExchangeKind
from padded_dispatch.launch import start_workers


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
    workers = given.workers or (torch.cuda.device_count() if given.device == "cuda" else 2)
    possible = given.contenders or [
        key for key, contender in CONTENDERS.items() if given.device == "cuda" or contender.on_cpu
    ]
    exchanges = (None, *given.exchange)
    contenders = [key for key in possible if CONTENDERS[key].exchange in exchanges]
    _check(given, workers, contenders)
    return Settings(
        cases=tuple(
            sweep(
                models=given.models,
                eps=given.ep or [workers],
                tokens=given.tokens,
                skews=given.skews,
                capacity_factors=given.capacity_factors,
                contenders=contenders,
            )
        ),
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
    if not contenders:
        raise ValueError(
            f"exchange={given.exchange[0]} is not possible with contenders="
            f"{','.join(given.contenders)}: none of them uses it; give others, or no --exchange"
        )
    for name in ("iterations", "repeats"):
        if getattr(given, name) < 1:
            raise ValueError(f"{name}={getattr(given, name)} is not possible: give at least 1")


def _parser() -> argparse.ArgumentParser:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="padded-dispatch bench",
        description="Measure one MoE layer, forward and backward, ours beside Megatron-Core's own.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    sweeps = parser.add_argument_group("what to measure: every combination of")
    sweeps.add_argument("--ep", nargs="+", type=int, help="expert-parallel sizes (None: workers)")
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
        "--contenders", nargs="+", choices=CONTENDERS, help="(None: all that the device can run)"
    )
    exchanges = get_args(ExchangeKind)
    sweeps.add_argument(
        "--exchange", nargs="+", choices=exchanges, default=exchanges, help="of our contenders"
    )
    how = parser.add_argument_group("how to measure")
    how.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    workers = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None
    how.add_argument("--workers", type=int, default=workers, help="processes (None: all GPUs or 2)")
    how.add_argument("--iterations", type=int, default=20, help="passes per repeat")
    how.add_argument("--repeats", type=int, default=5, help="the median of them counts")
    how.add_argument("--minutes", type=float, help="begin no case later than this")
    fusion = {"action": argparse.BooleanOptionalAction, "default": False}
    how.add_argument("--router-fusion", **fusion, help="moe_router_fusion, for all contenders")
    phases = {"action": argparse.BooleanOptionalAction, "default": True}
    how.add_argument("--phases", **phases, help="profile kernels, on GPUs")
    kept = parser.add_argument_group("results")
    kept.add_argument("--out", type=Path, help="results file; rows as they come beside it (.jsonl)")
    kept.add_argument("--commit", help="of the code, for the results")
    kept.add_argument("--command", help="as it was typed, if not as this process sees it")
    return parser
