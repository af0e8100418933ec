"""The command line of `padded-dispatch tune`; `--help` and a typo import no torch."""

import argparse
from pathlib import Path

from padded_dispatch.config import CAPACITY_POOLS, POLICIES
from padded_dispatch.tune.synthetic import KINDS
from padded_dispatch.tune.target import Target
from padded_dispatch.utils.flags import Parser

# Flags of a synthetic trace, and their defaults.
SYNTHETIC = dict(steps=400, layers=2, ranks=4, tokens=256, experts=32, top_k=4, seed=0)
_OF_A_TRACE = {
    "steps": "training steps",
    "layers": "MoE layers",
    "tokens": "tokens of a rank and step",
    "top_k": "experts per token",
    "seed": "seed of the routing",
}


def read(argv: list[str]) -> argparse.Namespace:
    """Return the flags of `padded-dispatch tune`."""
    return _parser().parse_args(argv)


def _parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="padded-dispatch tune",
        usage="padded-dispatch tune (TRACE ... | --synthetic NAME) [FLAGS]",
        description="Choose a capacity factor from traces of a router.",
    )
    made.add_argument(
        "traces",
        nargs="*",
        type=Path,
        metavar="TRACE",
        help="training traces: files or folders of `train --trace` or Megatron's tracer (.jsonl)",
    )
    made.add_argument("--run-dir", type=Path, default=Path("tune"), help="folder for the results")
    made.add_argument(
        "--eval-traces",
        nargs="+",
        type=Path,
        metavar="TRACE",
        help="traces of evaluation (default: those of training)",
    )
    made.add_argument(
        "--from-step", type=int, help="leave out earlier steps (default: those of the warm-up)"
    )
    made.add_argument("--max-gib", type=float, default=4.0, help="refuse traces of more GiB")
    made.add_argument(
        "--plots",
        action=argparse.BooleanOptionalAction,
        help="figures in the report (default: if Matplotlib is installed)",
    )
    promise = made.add_argument_group("the promise")
    promise.add_argument(
        "--drop",
        type=float,
        default=Target().drop,
        help="largest share of a step's rows that may be dropped; 0.05 is 5 %%",
    )
    promise.add_argument(
        "--eval-drop",
        type=float,
        default=0.0,
        help="the same in evaluation that a CUDA graph captures",
    )
    promise.add_argument(
        "--steps-share", type=float, default=0.99, help="share of the steps that drop no more"
    )
    promise.add_argument("--confidence", type=float, default=0.95, help="confidence of the promise")
    promise.add_argument(
        "--hold-out",
        type=float,
        default=0.0,
        help="check the answer on this share of the steps, the last ones, unseen",
    )
    promise.add_argument(
        "--require-promise", action="store_true", help="exit with 3 if nothing can be promised"
    )
    slots = made.add_argument_group("slots")
    slots.add_argument(
        "--pools",
        nargs="+",
        choices=CAPACITY_POOLS,
        metavar="NAME",
        help="which rows share slots, kinds to compare: expert: those for one expert from one "
        "rank; rank: those from one rank to another (default: all "
        "that can serve the run)",
    )
    slots.add_argument("--policy", choices=POLICIES, help="which rows keep a slot (default: probs)")
    slots.add_argument("--min-capacity", type=int, default=1, help="least slots per expert")
    slots.add_argument("--alignment", type=int, default=1, help="rows of a buffer are a multiple")
    slots.add_argument(
        "--etp", type=int, default=1, help="ranks that split every expert, as in the traced run"
    )
    slots.add_argument("--factors", nargs="+", type=float, help="factors to try (default: a grid)")
    costs = made.add_argument_group("costs, where both sizes are given")
    costs.add_argument("--hidden-size", type=int, help="hidden size of the model")
    costs.add_argument("--ffn-size", type=int, help="ffn size of an expert")
    costs.add_argument(
        "--layers-per-rank", type=int, help="MoE layers (default: those of the trace)"
    )
    costs.add_argument(
        "--in-flight", type=int, default=1, help="microbatches before a backward pass"
    )
    costs.add_argument("--ranks-per-host", type=int, default=8, help="ranks on each host")
    costs.add_argument(
        "--nvlink-gb-per-s",
        type=float,
        help="rate from rank to rank inside a host (default: that of the time model)",
    )
    costs.add_argument(
        "--network-gb-per-s",
        type=float,
        default=50.0,
        help="rate of a rank to other hosts; 50 is one 400 Gb/s adapter per GPU, nominally",
    )
    costs.add_argument(
        "--calibration",
        type=Path,
        help="time model of `padded-dispatch calibrate` (default: H200, as shipped)",
    )
    routing = made.add_argument_group("a synthetic trace instead")
    routing.add_argument(
        "--synthetic",
        choices=KINDS,
        metavar="NAME",
        help=f"kind of routing: {', '.join(KINDS)}",
    )
    routing.add_argument("--strength", type=float, default=1.0, help="how uneven it is")
    for name, default in SYNTHETIC.items():
        flag = f"--{name.replace('_', '-')}"
        if name in ("experts", "ranks"):
            routing.add_argument(
                flag, type=int, help=f"Megatron's own traces need it, too (default: {default})"
            )
        else:
            routing.add_argument(flag, type=int, default=default, help=_OF_A_TRACE[name])
    return made
