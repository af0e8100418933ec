"""Run `padded-dispatch tune`: from traces to a recommendation on the terminal."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from padded_dispatch.config import require
from padded_dispatch.trace import load_trace
from padded_dispatch.tune import report
from padded_dispatch.tune.cost import LayerSizes
from padded_dispatch.tune.recommend import Target, study
from padded_dispatch.tune.replay import POOLS
from padded_dispatch.utils.flags import Parser, errors_name_flags


def read(argv: list[str]) -> argparse.Namespace:
    """Return the flags of `padded-dispatch tune`; no torch is imported for it."""
    made = Parser(
        prog="padded-dispatch tune",
        usage="padded-dispatch tune TRACE ... [FLAGS]",
        description="Choose a capacity factor from traces of a router.",
    )
    add = made.add_argument
    about = "files or folders of `train --trace` or `--padded-trace`"
    add("traces", nargs="+", type=Path, metavar="TRACE", help=about)
    about = "largest share of a step's rows that may be dropped; 0.05 is 5 %%"
    add("--drop", type=float, default=Target().drop, help=about)
    about = "share of the steps that drop no more"
    add("--steps-share", type=float, default=Target().steps_share, help=about)
    about = "leave out earlier steps, such as the warm-up of the router"
    add("--from-step", type=int, default=0, help=about)
    about = (
        "which rows share room; expert: those for one expert from one rank; store: those of all "
        "layers (default: as in the traced run)"
    )
    add("--pool", choices=POOLS, metavar="NAME", help=about)
    about = "ranks that split every expert, as in the traced run"
    add("--etp", type=int, default=1, help=about)
    about = "MoE layers of a pipeline stage's chunk, which share a store (default: all)"
    add("--store-layers", type=int, metavar="N", help=about)
    costs = made.add_argument_group("memory, where both sizes are given").add_argument
    costs("--hidden-size", type=int, help="hidden size of the model")
    costs("--ffn-size", type=int, help="ffn size of an expert")
    return made.parse_args(argv)


def main(argv: list[str]) -> int:
    """Tune, and return the exit code.

    Raises:
        ValueError: a wrong flag or a broken trace; names it and what to change.
        SystemExit: for `--help` and for errors that argparse finds.
    """
    given = read(argv)
    with errors_name_flags(given):
        return _tune(given)


def _tune(given: argparse.Namespace) -> int:
    target, sizes = Target(drop=given.drop, steps_share=given.steps_share), None
    if (given.hidden_size is None) != (given.ffn_size is None):
        raise ValueError("--hidden-size and --ffn-size must be given together, got one; give both")
    if given.hidden_size is not None:
        sizes = LayerSizes(hidden_size=given.hidden_size, ffn_size=given.ffn_size)
    try:
        demand = load_trace(given.traces)
    except OSError as error:
        raise ValueError(
            f"TRACE must be a readable trace or a folder of traces, got {error.filename!r} "
            f"({error.strerror}); record one with padded-dispatch train --trace"
        ) from error
    last = int(demand.steps.max())
    require(given.from_step <= last, "from_step", given.from_step, f"be at most the last, {last}")
    late = demand.steps >= given.from_step
    demand = replace(demand, steps=demand.steps[late], counts=demand.counts[late])
    if sizes is not None:
        sizes = replace(sizes, num_layers=given.store_layers or len(demand.layers))
    pools = (given.pool,) if given.pool else POOLS
    etp, store_layers = given.etp, given.store_layers
    found = study(demand, target, pools=pools, etp=etp, store_layers=store_layers)
    sys.stdout.write(f"{report.summary(found, sizes)}\n")
    return 0
