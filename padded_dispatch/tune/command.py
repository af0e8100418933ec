"""Run `padded-dispatch tune`: from traces to a recommendation, tables, plots and a report."""

import argparse
import dataclasses
import json
import math
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from padded_dispatch.config import require
from padded_dispatch.trace import Trace, load_traces
from padded_dispatch.tune import plots, report, settings, time_model
from padded_dispatch.tune.arguments import SYNTHETIC, read
from padded_dispatch.tune.cost import LayerSizes
from padded_dispatch.tune.hosts import Links
from padded_dispatch.tune.megatron_trace import load_megatron_traces
from padded_dispatch.tune.screen import SETTINGS, summary
from padded_dispatch.tune.study import Layer, Question, Study, study
from padded_dispatch.tune.synthetic import TraceSizes, synthetic_trace
from padded_dispatch.tune.target import Target
from padded_dispatch.utils.flags import errors_name_flags
from padded_dispatch.utils.results import require_folder


def main(argv: list[str]) -> int:
    """Tune, and return the exit code: 0, or 3 if a required promise cannot be made.

    Raises:
        ValueError: a wrong flag or a broken trace; names it and what to change.
        SystemExit: for `--help` and for errors that argparse finds.
    """
    given = read(argv)
    with errors_name_flags(given):
        return _tune(given)


def _tune(given: argparse.Namespace) -> int:
    # All that can be checked before the work is checked here.
    question = _question(given)
    _check_flags(given)
    require_folder("--run-dir", given.run_dir)
    model = time_model.load(given.calibration) if given.calibration else time_model.shipped()
    _links(given, model)
    if given.plots:
        plots.require_matplotlib()
    with_plots = plots.has_matplotlib() if given.plots is None else given.plots
    if given.synthetic is not None:
        _check_memory(_synthetic_sizes(given), given.max_gib)

    with _progress("reading" if given.traces else "making a trace") as done:
        trace, name = _trace(given)
        eval_trace = _load(given.eval_traces, given) if given.eval_traces else None
        done(f"{(trace.ids_NTK >= 0).sum():,} rows, {trace.num_records:,} records")
    if not question.policy_given and trace.probs_NTK is None:
        # The number of dropped rows is the same under every policy.
        question = dataclasses.replace(question, policy="position")
    with _progress("replaying it") as done:
        found = study(
            trace,
            question,
            name=name,
            layer=_layer(given, trace, model),
            eval_trace=eval_trace,
            layers_of_model=not (given.traces and _are_megatrons(given.traces)),
        )
        done(f"at {len(found.options)} factors")
    sys.stdout.write(f"\n{_shown(found, given.run_dir)}\n\n")
    with _progress("writing") as done:
        done(str(write(found, given.run_dir, with_plots=with_plots)))
    if not (with_plots or given.plots is False):
        sys.stdout.write(f"The report has no figures; for them, {plots.REMEDY}.\n")
    return 3 if given.require_promise and not found.training.overall.promised else 0


def _shown(found: Study, folder: Path) -> str:
    """Return the summary, on a terminal what fits above the last line and the next prompt."""
    if not sys.stdout.isatty():
        return summary(found, folder)
    columns, lines = shutil.get_terminal_size()
    return summary(found, folder, columns=columns, lines=lines - 3)


def write(found: Study, folder: Path, *, with_plots: bool) -> Path:
    """Write report.html, settings.md, recommendation.json and .yaml, and figures as PNG and SVG.

    Returns:
        The report's path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    svgs = {}
    if with_plots:
        for name, figure in plots.figures(found).items():
            figure.savefig(folder / f"{name}.png")
            svgs[name] = plots.svg(figure)
            (folder / f"{name}.svg").write_text(svgs[name])
    (folder / "recommendation.json").write_text(json.dumps(as_json(found), indent=1) + "\n")
    (folder / "recommendation.yaml").write_text(_commented_yaml(found))
    (folder / SETTINGS).write_text(settings.markdown(found))
    path = folder / "report.html"
    path.write_text(report.html(found, svgs))
    return path


def _commented_yaml(found: Study) -> str:
    sentence = textwrap.wrap(
        found.training.sentence(), 80, initial_indent="# ", subsequent_indent="# "
    )
    return "\n".join([*sentence, settings.yaml(found, per_layer=False), ""])


def as_json(found: Study) -> dict[str, Any]:
    """Return the recommendation and all of its evidence in plain types."""
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
        "pool": found.pool,
        "pools": {
            answer.pool: {
                "factor": answer.training.overall.factor,
                "promised": answer.training.overall.promised,
                "dropped": answer.dropped,
                "retried": answer.retried,
                "needed_factor": answer.needed,
            }
            for answer in found.pools
        },
        "training": dataclasses.asdict(found.training),
        "evaluation": dataclasses.asdict(found.evaluation),
        "settings": _settings_json(found, per_layer=False),
        "settings_per_layer": _settings_json(found, per_layer=True)
        if found.layers_of_model
        else None,
        "elsewhere": report.elsewhere(found),
        "warm_up": None if found.warm_up is None else dataclasses.asdict(found.warm_up),
        "held_out": None if found.held_out is None else dataclasses.asdict(found.held_out),
        "options": [dataclasses.asdict(option) for option in found.options],
        "layer": None if layer is None else dataclasses.asdict(layer),
        "hosts": [dataclasses.asdict(one) for one in found.hosts],
    }


def _settings_json(found: Study, *, per_layer: bool) -> dict[str, str]:
    return {block.target: block.text for block in settings.blocks(found, per_layer=per_layer)}


def _question(given: argparse.Namespace) -> Question:
    shares = {"steps_share": given.steps_share, "confidence": given.confidence}
    target = Target(drop=given.drop, **shares)
    require(0 <= given.eval_drop < 1, "eval_drop", given.eval_drop, "be a share from 0 to below 1")
    return Question(
        target=target,
        eval_target=Target(drop=given.eval_drop, **shares),
        policy=given.policy or "probs",
        min_capacity=given.min_capacity,
        alignment=given.alignment,
        pools=tuple(given.pools) if given.pools else None,
        etp=given.etp,
        ranks_per_host=given.ranks_per_host,
        policy_given=given.policy is not None,
        factors=tuple(given.factors) if given.factors else None,
        hold_out=given.hold_out,
        leave_out_warm_up=given.from_step is None,
    )


def _check_flags(given: argparse.Namespace) -> None:
    """Raise for flags that are wrong by themselves or do not go together."""
    if bool(given.traces) == (given.synthetic is not None):
        both = "both" if given.traces else "none"
        raise ValueError(f"TRACE or --synthetic must be given, got {both}; give one of them")
    for paths in (given.traces, given.eval_traces or ()):
        for path in paths:
            if not path.exists():
                raise ValueError(
                    f"TRACE must be a trace or a folder of traces, got {str(path)!r}, which does "
                    "not exist; record one with padded-dispatch train --trace, or correct the path"
                )
        if paths and _are_megatrons(paths) and None in (given.experts, given.ranks):
            raise ValueError(
                "--experts and --ranks must be given for Megatron's traces, which do not hold "
                "them; give the model's experts and the ranks of its expert-parallel group"
            )
    if (given.hidden_size is None) != (given.ffn_size is None):
        raise ValueError("--hidden-size and --ffn-size must be given together, got one; give both")
    for field in ("hidden_size", "ffn_size", "layers_per_rank", "in_flight"):
        value = getattr(given, field)
        require(value is None or value >= 1, field, value, "be at least 1")
    require(math.isfinite(given.max_gib), "max_gib", given.max_gib, "be a finite number")
    if given.synthetic is not None:
        _synthetic_sizes(given)


def _check_memory(sizes: TraceSizes, max_gib: float) -> None:
    """Raise if making a synthetic trace takes more memory than `--max-gib`."""
    num_records = sizes.num_steps * sizes.num_layers * sizes.num_ranks
    choices = num_records * sizes.num_tokens * sizes.top_k
    # An int16 expert and an fp32 probability each; one record has fp64 scores [T, E] beside them.
    gib = (6 * choices + 8 * sizes.num_tokens * sizes.num_experts) / 2**30
    require(
        gib <= max_gib,
        "max_gib",
        max_gib,
        f"be at least {gib:,.1f}, which this trace takes",
        "lower --steps, --layers or --tokens, or raise it",
    )


def _trace(given: argparse.Namespace) -> tuple[Trace, str]:
    """Return the trace of training from `--from-step` on, and its name."""
    if given.traces:
        trace, name = _load(given.traces, given), ", ".join(path.name for path in given.traces)
    else:
        name = f"a synthetic trace ({given.synthetic})"
        sizes = _synthetic_sizes(given)
        trace = synthetic_trace(given.synthetic, sizes, strength=given.strength, seed=given.seed)
        trace = _from_layer_1(trace)
    if given.from_step is None:
        return trace, name
    last = int(trace.steps.max())
    require(given.from_step <= last, "from_step", given.from_step, f"be at most the last, {last}")
    return trace.where(trace.steps >= given.from_step), name


def _synthetic_sizes(given: argparse.Namespace) -> TraceSizes:
    return TraceSizes(
        num_steps=given.steps,
        num_layers=given.layers,
        num_ranks=SYNTHETIC["ranks"] if given.ranks is None else given.ranks,
        num_tokens=given.tokens,
        num_experts=SYNTHETIC["experts"] if given.experts is None else given.experts,
        top_k=given.top_k,
    )


def _load(paths: Sequence[Path], given: argparse.Namespace) -> Trace:
    """Read files or folders of `train --trace` or of Megatron's tracer."""
    max_bytes = int(given.max_gib * 2**30)
    try:
        if _are_megatrons(paths):
            trace = load_megatron_traces(
                paths, num_experts=given.experts, num_ranks=given.ranks, max_bytes=max_bytes
            )
            return _from_layer_1(trace)
        return load_traces(paths, max_bytes=max_bytes)
    except OSError as error:
        raise ValueError(
            f"{error.filename} must be a readable trace, got {error.strerror}; give another"
        ) from error


def _are_megatrons(paths: Sequence[Path]) -> bool:
    return all(path.suffix == ".jsonl" or any(path.glob("*.jsonl")) for path in paths)


def _from_layer_1(trace: Trace) -> Trace:
    """Renumber the layers from 1, as in Megatron and in the settings."""
    return dataclasses.replace(trace, layers=trace.layers + np.int32(1))


def _layer(given: argparse.Namespace, trace: Trace, model: time_model.TimeModel) -> Layer | None:
    if given.hidden_size is None:
        return None
    num_layers = given.layers_per_rank
    sizes = LayerSizes(
        num_tokens=trace.num_tokens,
        hidden_size=given.hidden_size,
        ffn_size=given.ffn_size,
        num_layers=len(np.unique(trace.layers)) if num_layers is None else num_layers,
        microbatches_in_flight=given.in_flight,
    )
    return Layer(sizes=sizes, time_model=model, links=_links(given, model))


def _links(given: argparse.Namespace, model: time_model.TimeModel) -> Links:
    nvlink = given.nvlink_gb_per_s
    return Links(
        nvlink_gb_per_s=model.coefficients.wire_gb_per_s if nvlink is None else nvlink,
        network_gb_per_s=given.network_gb_per_s,
    )


@contextmanager
def _progress(name: str) -> Iterator[Callable[[str], None]]:
    """Print the name of a part of the work; at its end, its result and its duration."""
    results: list[str] = []
    started = time.monotonic()
    sys.stdout.write(f"{name} ... ")
    sys.stdout.flush()
    try:
        yield results.append
    except BaseException:
        sys.stdout.write("\n")
        raise
    sys.stdout.write(f"{' '.join(results)} ({time.monotonic() - started:.1f} s)\n")
