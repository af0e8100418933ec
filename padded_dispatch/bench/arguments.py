"""The flags of `padded-dispatch bench`.

This module does not import torch, so `--help` and a typo need not wait for it. `command.resolve`
adds the defaults that depend on the machine.
"""

import argparse
from pathlib import Path
from typing import get_args

from padded_dispatch.bench.cases import CONTENDERS, MODELS, SKEWS, MainGrad
from padded_dispatch.utils.flags import Parser


def read_bench(argv: list[str]) -> argparse.Namespace:
    """Return the flags of `padded-dispatch bench`, and the whole command line as `command`."""
    parser = Parser(
        prog="padded-dispatch bench",
        usage="padded-dispatch bench [FLAGS]",
        description="Measure forward and backward of one MoE layer, ours beside Megatron-Core's.",
    )
    sweeps = parser.add_argument_group("what to measure (every combination)")
    sweeps.add_argument(
        "--ep",
        nargs="+",
        type=int,
        help="expert-parallel sizes; the largest is the number of processes "
        "(default: the number of GPUs; without a GPU 2)",
    )
    sweeps.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        metavar="NAME",
        help=f"{', '.join(MODELS)} (default: qwen3-30b-a3b and gpt-oss-20b; without a GPU tiny)",
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
        help=f"how uneven the routing is: {', '.join(SKEWS)}",
    )
    sweeps.add_argument(
        "--capacity-factors",
        nargs="+",
        type=float,
        default=[1.0, 1.25, 2.0],
        help="slots relative to perfect balance",
    )
    sweeps.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        metavar="NAME",
        help="dropless and drop-pad are Megatron's, auto is ours by default options, the others "
        "are explicit choices; -graphed: in a CUDA graph: "
        f"{', '.join(CONTENDERS)} (default: all that the device runs in bf16)",
    )
    sweeps.add_argument(
        "--main-grad",
        nargs="+",
        choices=get_args(MainGrad),
        metavar="NAME",
        default=["none"],
        help="parameter gradients: none: left where they are; fused: added to fp32 buffers, as by "
        "Megatron's DDP with gradient_accumulation_fusion; first: likewise in a step's first "
        "micro-batch",
    )
    sweeps.add_argument(
        "--readme",
        action="store_true",
        help="measure the table of the README, whatever else the flags say but for --ep, print it, "
        "and what is different from the run there",
    )
    how = parser.add_argument_group("how to measure")
    how.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="device to run on (default: cuda if there is a GPU)",
    )
    how.add_argument(
        "--iterations", type=int, default=20, help="passes of a sample; the median of five counts"
    )
    how.add_argument("--phases", action="store_true", help="profile kernels (GPUs only)")
    kept = parser.add_argument_group("results")
    kept.add_argument(
        "--out", type=Path, help="results file to write; each row is added when measured"
    )
    kept.add_argument("--commit", help="commit of the code, for the results")
    given = parser.parse_args(argv)
    given.command = " ".join(["padded-dispatch bench", *argv])
    return given
