"""Run `padded-dispatch tune`: from traces to a recommendation on the terminal, and an HTML page."""

import argparse
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from padded_dispatch.config import pool_named, require
from padded_dispatch.trace import Trace, load_traces
from padded_dispatch.tune import plan, plots, report
from padded_dispatch.tune.demand import CountedTrace, counted, demand_of
from padded_dispatch.tune.recommend import DROP, Study, study
from padded_dispatch.tune.replay import POOLS
from padded_dispatch.utils.flags import Parser, errors_name_flags
from padded_dispatch.utils.logs import show
from padded_dispatch.utils.results import require_folder


def share(text: str) -> float:
    """Parse a share: `0.01` or `1%`."""
    return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)


def read(argv: list[str]) -> argparse.Namespace:
    """Return the flags of `padded-dispatch tune`; no torch is imported for it."""
    if any(word.partition("=")[0] == "--plan" for word in argv):
        return plan.read(argv)
    parser = Parser(
        prog="padded-dispatch tune",
        usage="padded-dispatch tune TRACE ... [FLAGS]",
        description="Choose a capacity factor from traces of a router.",
        epilog="padded-dispatch tune --plan MODEL --ep N counts the memory of a rank, without a "
        "trace; --plan MODEL --help lists its flags.",
    )
    add = parser.add_argument
    about = "files or folders of `train --trace` or `--padded-trace`"
    add("traces", nargs="+", type=Path, metavar="TRACE", help=about)
    add("--report", type=Path, default=Path("tune.html"), help="page for the results")
    about = "largest share of rows that may be dropped, such as 0.01 or 1%%"
    add("--drop", type=share, default=DROP, metavar="X", help=about)
    about = "leave out earlier steps, such as the warm-up of the router"
    add("--from-step", type=int, default=0, help=about)
    about = (
        "which rows share room; cells: the rows of one (source rank, expert); store: the rows of "
        "all layers (default: as in the traced run, else the one with the smaller factor)"
    )
    add("--pool", type=pool_named, choices=POOLS, metavar="NAME", help=about)
    about = (
        "MoE layers of a pipeline stage's chunk, which share a store (default: as many as a file "
        "has, those of a stage)"
    )
    add("--store-layers", type=int, metavar="N", help=about)
    return parser.parse_args(argv)


def main(given: argparse.Namespace) -> int:
    """Tune as the flags say, and return the exit code.

    Raises:
        ValueError: a wrong flag or a broken trace; names it and what to change.
    """
    if "plan" in given:
        return plan.main(given)
    with errors_name_flags(vars(given)):
        found = _study(given)
    text = report.summary(found, given.report)
    svgs = {}
    if find_spec("matplotlib"):
        svgs = {name: plots.svg(figure) for name, figure in plots.figures(found).items()}
    else:
        text += f"\n\n{given.report} has no figures; for them, {plots.REMEDY}."
    try:
        given.report.parent.mkdir(parents=True, exist_ok=True)
        # The page says utf-8, whatever the locale; a file's name may have bytes of no encoding.
        page = report.html(found, svgs)
        given.report.write_text(page, encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise ValueError(
            f"--report must be a writable file, got {given.report} ({error.strerror}); name another"
        ) from error
    show(text)
    return 0


def _study(given: argparse.Namespace) -> Study:
    """Read files or folders, from `--from-step` on, and study them."""
    # All that can be checked before the work is checked here.
    drop = given.drop
    fix = f"for {drop:g} % set {drop / 100:g}" if 1 <= drop < 100 else ""
    require(0 <= drop < 1, "drop", drop, "be a share from 0 to below 1", fix)
    page = given.report
    rule = "be a file for the page, no folder and no trace"
    traces = {path.resolve() for path in given.traces}
    is_free = not page.is_dir() and page.suffix != ".npy" and page.resolve() not in traces
    require(is_free, "--report", str(page), rule, "name another")
    require_folder("--report", page.parent)
    rule, fix = "exist", "record it with padded-dispatch train --trace, or correct the path"
    num_layers: list[int] = []

    def reduced(trace: Trace) -> CountedTrace:
        num_layers.append(len(np.unique(trace.layers)))
        return counted(trace)

    try:
        for path in given.traces:
            require(path.exists(), "TRACE", str(path), rule, fix)
        trace = load_traces(given.traces, reduced)
    except OSError as error:
        raise ValueError(
            f"{error.filename} must be a readable trace, got {error.strerror}; give another"
        ) from error
    last = int(trace.steps.max())
    rule = f"be from 0 to the last, {last}"
    require(0 <= given.from_step <= last, "from_step", given.from_step, rule)
    demand = demand_of(trace.where(trace.steps >= given.from_step))
    store_layers = given.store_layers
    if store_layers is None:  # Each rank records the layers of its own pipeline stage.
        store_layers = min(max(num_layers), len(demand.layers))
    return study(
        demand,
        drop,
        name=", ".join(path.name for path in given.traces),
        pools=(given.pool,) if given.pool else POOLS,
        store_layers=store_layers,
    )
