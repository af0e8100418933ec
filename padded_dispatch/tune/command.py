"""`padded-dispatch tune`: from traces to a recommendation, tables, plots and a report."""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from padded_dispatch.config import POLICIES, require
from padded_dispatch.tune import plots, report
from padded_dispatch.tune import report as settings
from padded_dispatch.tune import time_model as calibrations
from padded_dispatch.tune.cost import LayerSizes
from padded_dispatch.tune.megatron_trace import load_megatron_traces
from padded_dispatch.tune.recommend import Target
from padded_dispatch.tune.report import factor_table, layer_table
from padded_dispatch.tune.study import Layer, Question, Study, study
from padded_dispatch.tune.synthetic import KINDS, Sizes, synthetic_trace
from padded_dispatch.tune.trace import Trace, load_traces

_MADE = {"steps": 400, "layers": 2, "ranks": 4, "tokens": 256, "experts": 32, "top-k": 4, "seed": 0}


def main(argv: list[str]) -> int:
    """Tune; 0 where the target is promised, 3 where it is not.

    Raises:
        ValueError: the user's mistakes and broken traces: what, where, and what to change.
        SystemExit: for `--help` and for what argparse itself refuses.
    """
    given = _parser().parse_args(argv)
    if given.plots:
        plots.require_matplotlib()
    target, eval_target = _target(given, given.drop), _target(given, given.eval_drop)
    with _stage("reading" if given.traces else "making a trace") as say:
        trace, name = _trace(given)
        trace = _later(trace, given.from_step)
        evaluation = _load(given.eval_traces, given) if given.eval_traces else None
        say(f"{(trace.ids_NTK >= 0).sum():,} rows, {trace.num_records:,} passes")
    layer = _layer(given, trace)
    # How many rows are dropped is the same under every policy; whose they are is not.
    policy = given.policy or ("position" if trace.probs_NTK is None else "probs")
    question = Question(
        target=target,
        eval_target=eval_target,
        policy=policy,
        min_capacity=given.min_capacity,
        alignment=given.alignment,
        etp=given.etp,
        policy_given=given.policy is not None,
        factors=tuple(given.factors) if given.factors else None,
        hold_out=given.hold_out,
    )
    _make_folder(given.out)  # Before the work: a name that cannot be costs no time.
    with _stage("replaying it") as say:
        found = study(
            trace,
            question,
            name=name,
            layer=layer,
            eval_trace=evaluation,
            layers_of_model=not (given.traces and _are_megatrons(given.traces)),
        )
        say(f"at {len(found.options)} factors")
    sys.stdout.write(f"\n{summary(found)}\n")
    with _stage("writing") as say:
        say(str(write(found, given.out, with_plots=given.plots)))
    return 0 if found.training.overall.promised else 3


def summary(found: Study) -> str:
    """What the terminal shows."""
    parts = [found.training.sentence(), str(factor_table(found))]
    if len(found.training.layers) > 1:
        parts.append(f"One factor per layer:\n{layer_table(found)}")
    evaluation = found.evaluation.overall
    promised = "" if evaluation.promised else ", without a promise"
    parts.append(f"In evaluation: {evaluation.factor:g}, for {found.evaluation.target}{promised}.")
    if found.held_out is not None:
        parts.append(found.held_out_sentence())
    others = found.training.overall.caveats[1:]
    parts += [f"Also: {caveat}." for caveat in others]
    if found.layer is not None:
        parts.append(found.layer.calibration.describe())
    if not found.layers_of_model:
        parts.append(settings.NO_LAYERS)
    parts.append(" \\\n".join(settings.flags(found, per_layer=False)))
    return "\n\n".join(parts) + "\n"


def write(found: Study, folder: Path, *, with_plots: bool) -> Path:
    """Everything into a folder: report.html, recommendation.json and .yaml, figures as PNG and SVG.

    Returns:
        The report's path.
    """
    _make_folder(folder)
    svgs = {}
    if with_plots:
        for name, figure in plots.figures(found).items():
            figure.savefig(folder / f"{name}.png")
            svgs[name] = plots.svg(figure)
            (folder / f"{name}.svg").write_text(svgs[name])
    (folder / "recommendation.json").write_text(json.dumps(as_json(found), indent=1) + "\n")
    (folder / "recommendation.yaml").write_text(settings.yaml(found, per_layer=False))
    path = folder / "report.html"
    path.write_text(report.html(found, svgs))
    return path


def as_json(found: Study) -> dict[str, Any]:
    """The recommendation with everything that it rests on, in plain types."""
    layer = found.layer
    return {
        "trace": {
            "name": found.name,
            "num_experts": found.num_experts,
            "top_k": found.top_k,
            "num_ranks": found.num_ranks,
            "num_tokens": found.num_tokens,
        },
        "question": dataclasses.asdict(found.question),
        "sentence": found.training.sentence(),
        "training": dataclasses.asdict(found.training),
        "evaluation": dataclasses.asdict(found.evaluation),
        "flags": settings.flags(found, per_layer=False),
        "flags_per_layer": settings.flags(found, per_layer=True) if found.layers_of_model else None,
        "elsewhere": settings.elsewhere(found),
        "held_out": None if found.held_out is None else dataclasses.asdict(found.held_out),
        "options": [dataclasses.asdict(option) for option in found.options],
        "layer": None if layer is None else dataclasses.asdict(layer),
    }


def _target(given: argparse.Namespace, drop: float) -> Target:
    return Target(drop=drop, steps_share=given.steps_share, confidence=given.confidence)


def _trace(given: argparse.Namespace) -> tuple[Trace, str]:
    if bool(given.traces) == (given.synthetic is not None):
        raise ValueError("TRACE is not possible so: give traces, or --synthetic KIND, not both")
    if given.traces:
        return _load(given.traces, given), ", ".join(path.name for path in given.traces)
    sizes = Sizes(
        num_steps=given.steps,
        num_layers=given.layers,
        num_ranks=given.ranks or _MADE["ranks"],
        num_tokens=given.tokens,
        num_experts=given.experts or _MADE["experts"],
        top_k=given.top_k,
    )
    trace = synthetic_trace(given.synthetic, sizes, strength=given.strength, seed=given.seed)
    return _from_layer_1(trace), f"a synthetic trace ({given.synthetic})"


def _later(trace: Trace, from_step: int) -> Trace:
    seen_N = trace.steps >= from_step
    if not seen_N.any():
        raise ValueError(
            f"from_step={from_step} is not possible: the trace ends with step {trace.steps.max()}"
        )
    return trace.where(seen_N)


def _load(paths: Sequence[Path], given: argparse.Namespace) -> Trace:
    """Ours or Megatron's, from files or folders of them."""
    require(math.isfinite(given.max_gib), "max_gib", given.max_gib, "give a finite number")
    max_bytes = int(given.max_gib * 2**30)
    try:
        if _are_megatrons(paths):
            if given.experts is None or given.ranks is None:
                raise ValueError(
                    "experts=None is not possible: Megatron's traces do not say how many experts "
                    "and ranks there are; give --experts and --ranks"
                )
            trace = load_megatron_traces(
                paths, num_experts=given.experts, num_ranks=given.ranks, max_bytes=max_bytes
            )
            return _from_layer_1(trace)
        return load_traces(paths, max_bytes=max_bytes)
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}") from error


def _are_megatrons(paths: Sequence[Path]) -> bool:
    return all(path.suffix == ".jsonl" or any(path.glob("*.jsonl")) for path in paths)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out={path} is not possible ({error.strerror}): give a folder") from error


def _from_layer_1(trace: Trace) -> Trace:
    """Layers by Megatron's layer number, which settings take."""
    return dataclasses.replace(trace, layers=trace.layers + np.int32(1))


def _layer(given: argparse.Namespace, trace: Trace) -> Layer | None:
    if given.hidden_size is None or given.ffn_size is None:
        if given.hidden_size is not None or given.ffn_size is not None:
            raise ValueError("hidden_size and ffn_size go together: give both, or none")
        return None
    sizes = LayerSizes(
        num_tokens=trace.num_tokens,
        hidden_size=given.hidden_size,
        ffn_size=given.ffn_size,
        num_layers=given.layers_per_rank or len(set(trace.layers.tolist())),
        num_in_flight=given.in_flight,
    )
    if given.calibration is None:
        return Layer(sizes=sizes, calibration=calibrations.shipped())
    return Layer(sizes=sizes, calibration=calibrations.load(given.calibration))


@contextmanager
def _stage(name: str) -> Iterator[Any]:
    """Say what begins, and when it is done what came of it and how long it took."""
    said = []
    started = time.monotonic()
    sys.stdout.write(f"{name} ... ")
    sys.stdout.flush()
    try:
        yield said.append
    except BaseException:
        sys.stdout.write("\n")
        raise
    sys.stdout.write(f"{' '.join(said)} ({time.monotonic() - started:.1f} s)\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="padded-dispatch tune",
        description="Choose a capacity factor from traces of a router. Exit code 3: nothing can be "
        "promised.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "traces",
        nargs="*",
        type=Path,
        metavar="TRACE",
        help="of training: files or folders, of `train --trace` or Megatron's tracer (.jsonl)",
    )
    parser.add_argument("--out", type=Path, default=Path("tune"), help="folder for the results")
    parser.add_argument(
        "--eval-traces",
        nargs="+",
        type=Path,
        metavar="TRACE",
        help="of evaluation (None: as TRACE)",
    )
    parser.add_argument(
        "--from-step", type=int, default=0, help="leave out what training looked like before it"
    )
    parser.add_argument("--max-gib", type=float, default=4.0, help="refuse larger traces")
    parser.add_argument("--plots", action=argparse.BooleanOptionalAction, default=True)
    promise = parser.add_argument_group("the promise")
    promise.add_argument("--drop", type=float, default=0.001, help="share of rows in a step")
    promise.add_argument("--eval-drop", type=float, default=0.0, help="the same in evaluation")
    promise.add_argument("--steps-share", type=float, default=0.99, help="of steps that keep it")
    promise.add_argument("--confidence", type=float, default=0.95, help="that it is kept")
    promise.add_argument(
        "--hold-out", type=float, default=0.0, help="share of steps, the last ones, to check it on"
    )
    slots = parser.add_argument_group("slots")
    slots.add_argument("--policy", choices=POLICIES, help="who keeps a slot (None: probs)")
    slots.add_argument("--min-capacity", type=int, default=1, help="least slots")
    slots.add_argument("--alignment", type=int, default=1, help="of an expert's buffer, in rows")
    slots.add_argument(
        "--etp", type=int, default=1, help="ranks that split every expert, as in the traced run"
    )
    slots.add_argument("--factors", nargs="+", type=float, help="to try (None: a grid)")
    costs = parser.add_argument_group("costs, where both sizes are given")
    costs.add_argument("--hidden-size", type=int, help="width of a row")
    costs.add_argument("--ffn-size", type=int, help="of an expert")
    costs.add_argument("--layers-per-rank", type=int, help="MoE layers (None: those of the trace)")
    costs.add_argument("--in-flight", type=int, default=1, help="micro-batches before backward")
    costs.add_argument(
        "--calibration", type=Path, help="of `padded-dispatch calibrate` (None: H200, as shipped)"
    )
    made = parser.add_argument_group("a made-up trace instead")
    made.add_argument("--synthetic", choices=KINDS, help="kind of routing")
    made.add_argument("--strength", type=float, default=1.0, help="how uneven it is")
    for name, default in _MADE.items():
        if name in ("experts", "ranks"):
            told = f"(None: {default}); Megatron's own traces need it, too"
            made.add_argument(f"--{name}", type=int, help=told)
        else:
            made.add_argument(f"--{name}", type=int, default=default)
    return parser
