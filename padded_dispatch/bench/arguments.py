"""The command lines of `padded-dispatch bench`, `parts` and `calibrate`.

`--help` and a typo import no torch, so defaults that depend on the machine come later:
`with_defaults`.
"""

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from padded_dispatch.bench.cases import CONTENDERS, MODELS, SKEWS, MainGrad
from padded_dispatch.utils.flags import Parser

PARTS = ("copy", "router", "selection", "rows", "direct", "products", "experts")
EXCHANGES = ("alltoall", "direct")  # what a contender can fix; "auto" is a contender of its own


def read_bench(argv: list[str]) -> argparse.Namespace:
    """Return the flags of `padded-dispatch bench`."""
    return _bench_parser().parse_args(argv)


def read_parts(argv: list[str]) -> argparse.Namespace:
    """Return the flags of `padded-dispatch parts`."""
    return _parts_parser().parse_args(argv)


def read_calibrate(argv: list[str]) -> argparse.Namespace:
    """Return the flags of `padded-dispatch calibrate`."""
    return _calibrate_parser().parse_args(argv)


def with_defaults(given: argparse.Namespace) -> argparse.Namespace:
    """Return the flags of `bench` or `parts` with the machine's defaults; this imports torch."""
    import torch

    on_gpu = torch.cuda.is_available()
    defaults = {
        "device": "cuda" if on_gpu else "cpu",
        "models": ["qwen3-30b-a3b", "gpt-oss-20b"] if on_gpu else ["tiny"],
        "tokens": [4096 if on_gpu else 64],
    }
    known = {name: value for name, value in vars(given).items() if value is not None}
    return argparse.Namespace(**vars(given) | defaults | known)


def _names(choices: Iterable[str]) -> str:
    return ", ".join(choices)


def _bench_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="padded-dispatch bench",
        usage="padded-dispatch bench [FLAGS]",
        description="Measure forward and backward of one MoE layer, ours beside Megatron-Core's.",
    )
    sweeps = parser.add_argument_group("what to measure (every combination)")
    sweeps.add_argument(
        "--ep", nargs="+", type=int, help="expert-parallel sizes (default: workers)"
    )
    sweeps.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        metavar="NAME",
        help=f"{_names(MODELS)} (default: qwen3-30b-a3b and gpt-oss-20b; without a GPU tiny)",
    )
    sweeps.add_argument(
        "--tokens", nargs="+", type=int, help="per rank (default: 4096; without a GPU 64)"
    )
    sweeps.add_argument(
        "--skews",
        nargs="+",
        choices=SKEWS,
        metavar="NAME",
        default=["uniform"],
        help=f"how uneven the routing is: {_names(SKEWS)}",
    )
    sweeps.add_argument(
        "--capacity-factors",
        nargs="+",
        type=float,
        default=[1.0, 1.25, 2.0],
        help="slots per (source rank, expert) relative to perfect balance",
    )
    sweeps.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        metavar="NAME",
        help="dropless, allgather and drop-pad are Megatron's dispatchers, the others are ours; "
        f"-graphed: in a CUDA graph: {_names(CONTENDERS)} (default: all that the device runs)",
    )
    sweeps.add_argument(
        "--main-grad",
        nargs="+",
        choices=get_args(MainGrad),
        metavar="NAME",
        default=["none"],
        help="parameter gradients: none: left where they are; separate: added to fp32 buffers "
        "after each pass, as by Megatron's DDP; fused: the experts' products add them",
    )
    sweeps.add_argument(
        "--exchange",
        nargs="+",
        choices=EXCHANGES,
        metavar="NAME",
        help=f"only contenders of ours that use it: {_names(EXCHANGES)} (default: both)",
    )
    how = parser.add_argument_group("how to measure")
    how.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="device to run on (default: cuda if there is a GPU)",
    )
    workers = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None
    how.add_argument(
        "--workers", type=int, default=workers, help="processes (default: one per GPU, or 2)"
    )
    how.add_argument("--iterations", type=int, default=20, help="passes per repeat")
    how.add_argument("--repeats", type=int, default=5, help="samples; their median counts")
    how.add_argument("--minutes", type=float, help="start no case after so many minutes")
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


def _parts_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="padded-dispatch parts",
        usage="padded-dispatch parts [FLAGS]",
        description="Time kernels and experts by themselves, on one device.",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        metavar="NAME",
        help=f"{_names(MODELS)} (default: qwen3-30b-a3b and gpt-oss-20b; without a GPU tiny)",
    )
    parser.add_argument(
        "--tokens", nargs="+", type=int, help="per rank (default: 4096; without a GPU 64)"
    )
    parser.add_argument(
        "--capacity-factors", nargs="+", type=float, default=[1.25], help="slots of an expert"
    )
    parser.add_argument("--ep", type=int, default=8, help="ranks that send rows to each expert")
    parser.add_argument("--repeats", type=int, default=9, help="samples; their median counts")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        metavar="NAME",
        default=PARTS,
        help=f"groups of parts to time: {_names(PARTS)} (default: all)",
    )
    parser.add_argument(
        "--select-experts",
        nargs="+",
        type=int,
        default=[],
        help="time selection alone, with these numbers of experts instead of models",
    )
    parser.add_argument("--out", type=Path, help="results file to write")
    parser.add_argument("--commit", help="commit of the code, for the results")
    return parser


def _calibrate_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="padded-dispatch calibrate",
        usage="padded-dispatch calibrate --out PATH [FLAGS]",
        description="Measure layers on this machine and fit the time model of `tune` to them.",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="calibration to write, for `tune --calibration`"
    )
    parser.add_argument(
        "--from",
        dest="results",
        type=Path,
        metavar="PATH",
        help="fit this results file of `padded-dispatch bench`, measure nothing",
    )
    parser.add_argument(
        "--check",
        type=Path,
        metavar="PATH",
        help="results file of `padded-dispatch bench` to compare the fit with",
    )
    parser.add_argument(
        "--workers",
        type=int,
        help="processes (default: as many GPUs as divide the models' experts)",
    )
    parser.add_argument(
        "--minutes", type=float, default=2.0, help="start no case after so many minutes"
    )
    parser.add_argument("--commit", help="commit of the code, for the results")
    return parser
