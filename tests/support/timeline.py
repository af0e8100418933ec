"""When exchange and compute kernels of one step ran, on which stream, and what of them overlapped.

Megatron's combined schedule (EP overlap) runs the exchange of a microbatch beside the computation
of another one. Its worth is the time of exchange kernels in which another kernel computed, and what
a step takes beside the best step without it.
"""

import dataclasses
import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from padded_dispatch.megatron import LayerGraphs
from padded_dispatch.megatron.compat import layer_graphs
from tests.support.graph_training import Findings
from tests.support.overlapped_training import OverlapCase, OverlapTraining, schedule_on
from tests.support.retried_training import EAGER_STEPS, world
from tests.support.spans import KINDS, Span, common, profiled, union


@dataclass(frozen=True, kw_only=True)
class TimelineCase(OverlapCase):
    """A model, its schedule and its graphs.

    `overlaps`: Megatron's combined schedule; else its plain one.
    `exchange`: the option.
    `timed`: steps that are timed.
    """

    overlaps: bool = False
    exchange: str = "alltoall"
    timed: int = 10


def figures(spans: list[Span]) -> dict[str, float]:
    """Return milliseconds of a step's kernels.

    `span_ms`: from the first to the last. `busy_ms`: any ran. `exchange_ms`: the exchange ran.
    `hidden_ms`: it ran beside another kernel. `gemm_ms`: matrix products ran.
    """

    def times(of_kind: Callable[[str], bool]) -> list[tuple[float, float]]:
        return union((span.start, span.end) for span in spans if of_kind(span.kind))

    exchange, gemm = times(lambda kind: kind == "exchange"), times(lambda kind: kind == "gemm")
    others, of_all = times(lambda kind: kind != "exchange"), times(lambda kind: True)
    length = of_all[-1][1] - of_all[0][0] if of_all else 0
    times = {
        "span_ms": length,
        "busy_ms": sum(end - start for start, end in of_all),
        "exchange_ms": sum(end - start for start, end in exchange),
        "hidden_ms": common(exchange, others),
        "gemm_ms": sum(end - start for start, end in gemm),
    }
    return {name: round(time / 1e6, 4) for name, time in times.items()}


def listed(spans: list[Span]) -> list[list[Any]]:
    """Return [stream, kind, start, end] of exchange and matrix products, in microseconds.

    Streams count from 0, the times from the step's first kernel.
    """
    first = min((span.start for span in spans), default=0)
    streams = sorted({span.stream for span in spans})
    return [
        [
            streams.index(span.stream),
            span.kind,
            round((span.start - first) / 1e3, 1),
            round((span.end - first) / 1e3, 1),
        ]
        for span in sorted(spans, key=lambda span: span.start)
        if span.kind in KINDS
    ]


def timeline(case: TimelineCase) -> Findings:
    """Train a few steps, time some, and record one. Runs on all ranks of the default group.

    `facts`: `ms`, the median of `samples_ms`; what `figures` and `listed` return for this rank.
    """
    fields: dict[str, Any] = dict(case.fields)
    if case.overlaps:
        fields |= {
            "overlap_moe_expert_parallel_comm": True,
            "delay_wgrad_compute": case.delay_wgrad,
        }
    if case.scopes:
        fields |= layer_graphs(*case.scopes)
    graph = "layer" if case.scopes else case.graph
    case = dataclasses.replace(case, fields=fields, graph=graph)
    with world(case), schedule_on(case):
        facts = _measured(case)
    gc.collect()  # Before the next case: a model and its graphs hold each other.
    if case.on_gpu:
        torch.cuda.empty_cache()
    return Findings(facts=facts)


def _measured(case: TimelineCase) -> dict[str, Any]:
    if case.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    options: dict[str, Any] = {"experts": case.experts, "exchange": case.exchange}
    training = OverlapTraining(case, graphed=not case.scopes, **options)
    if case.scopes:
        given = () if training.optimizer is None else (training.optimizer,)
        training.graphs = LayerGraphs(
            training.chunks, seq_length=case.seq, micro_batch=case.batch, optimizers=given
        )
    # Two steps after a capture: the first replay, and one that finds everything warm.
    for number in range(EAGER_STEPS + 2):
        if number == EAGER_STEPS and training.graphs is not None:
            training.graphs.capture()
        training.run(number)
    samples = [_milliseconds(training, number) for number in range(case.timed)]
    spans = profiled(lambda: training.run(0))
    facts = {
        "ms": round(statistics.median(samples), 3),
        "samples_ms": [round(sample, 3) for sample in samples],
        **figures(spans),
        "timeline": listed(spans),
    }
    if case.on_gpu:
        facts["allocated_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    training.end()
    return facts


def _milliseconds(training: OverlapTraining, number: int) -> float:
    """Return what a step's passes take on the device; on a CPU, 0."""
    if not training.case.on_gpu:
        training.run(number)
        return 0.0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    training.run(number)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def draw(rows: list[dict[str, Any]], path: Path, *, milliseconds: float = 40.0) -> None:
    """Draw the timelines of rows, one below the other, each with a lane for each stream.

    Args:
        rows: of `timeline`, with `name` and `facts`.
        path: the picture.
        milliseconds: of each step, from its middle: the whole has too many kernels.
    """
    import matplotlib.pyplot as plt

    colours = {"exchange": "#d9822b", "gemm": "#2a6fb0"}
    figure, all_axes = plt.subplots(
        len(rows), 1, figsize=(10, 1.6 * len(rows) + 0.6), squeeze=False, layout="constrained"
    )
    for row, axes in zip(rows, all_axes[:, 0], strict=True):
        facts = row["facts"]
        start = max(0.0, facts["span_ms"] / 2 - milliseconds / 2)
        shown = [
            (stream, kind, since / 1e3, until / 1e3)
            for stream, kind, since, until in facts["timeline"]
            if until / 1e3 > start and since / 1e3 < start + milliseconds
        ]
        lanes = sorted({stream for stream, *_ in shown})
        for kind, colour in colours.items():
            for lane, stream in enumerate(lanes):
                bars = [(s, e - s) for i, k, s, e in shown if (i, k) == (stream, kind)]
                axes.broken_barh(bars, (lane - 0.4, 0.8), color=colour, label=kind)
        axes.set_xlim(start, start + milliseconds)
        axes.set_yticks(range(len(lanes)), [f"stream {stream}" for stream in lanes])
        axes.set_title(
            f"{row['name']}: {facts['ms']:.1f} ms, exchange {facts['exchange_ms']:.1f} ms, "
            f"beside other kernels {facts['hidden_ms']:.1f} ms",
            loc="left",
            fontsize=9,
        )
    all_axes[-1, 0].set_xlabel("ms from the step's first kernel")
    handles, labels = all_axes[0, 0].get_legend_handles_labels()
    known = dict(zip(labels, handles, strict=True))
    figure.legend(known.values(), known.keys(), loc="outside lower right", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
