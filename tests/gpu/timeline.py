"""Measure what EP overlap hides, where the GPU and not the host is the limit; write results rows.

    python -m tests.gpu.timeline --out notebooks/results/recipes.json --commit SHA --figure FILE

Two GPUs, layers of Qwen3's shape with 32,768 tokens in a microbatch: a layer takes the GPU longer
than the slowest host needs to start its kernels. Megatron's combined schedule
(`overlap_moe_expert_parallel_comm`) runs beside its plain one, each without graphs, with graphs of
what Megatron lets the combined schedule capture, and in a graph of the whole iteration; then the
plain one with graphs of whole layers; and both with direct stores.
A row has the milliseconds of a step and of the exchange, those of the exchange that ran beside
other kernels, and when each exchange and each matrix product of one step ran, on which stream.
Exchange kernels wait for the other rank, so their time has such waits in it.

A case that Megatron or torch refuses is a failed row; the others run. `--figure` draws the rows.
`--only TEXT` runs the cases whose names contain the text. `--cpu N` tries the program on N
processes over gloo, without kernels to show.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gpu.overlap import BEFORE_EXPERTS, HAS_PRIORITY, PRIORITY
from tests.support.gpu_cases import ENVIRONMENT, run_cases
from tests.support.gpu_rows import parsed
from tests.support.timeline import TimelineCase, draw, timeline

CHECK = "timeline of a step"

_GPU: dict[str, Any] = {
    "device": "cuda",
    "microbatches": 4,
    "batch": 8,
    "seq": 4096,
    "num_layers": 2,
    "hidden": 2048,
    "heads": 16,
    "ffn": 768,
    "num_experts": 128,
    "top_k": 8,
    "vocab": 512,
}


def cases() -> Iterator[TimelineCase]:
    """Yield all cases: those that cannot fail first."""
    packed: dict[str, Any] = {"experts": "packed", **_GPU}
    for overlaps in (False, True):
        name = "overlap" if overlaps else "plain"
        how = packed | {"overlaps": overlaps}
        yield TimelineCase(name=f"{name}, eager", **how)
        yield TimelineCase(name=f"{name}, graphs of pieces", scopes=BEFORE_EXPERTS, **how)
    yield TimelineCase(name="plain, graphs of layers", scopes=("attn", "moe"), **packed)
    direct = packed | {"exchange": "direct"}
    yield TimelineCase(name="plain, graphs of layers, direct", scopes=("attn", "moe"), **direct)
    yield TimelineCase(name="plain, eager, direct", **direct)
    overlap = direct | {"overlaps": True}
    yield TimelineCase(name="overlap, eager, direct", **overlap)
    yield TimelineCase(name="overlap, delayed, direct", delay_wgrad=True, **overlap)
    yield TimelineCase(name="overlap, graphs of pieces, direct", scopes=BEFORE_EXPERTS, **overlap)
    if HAS_PRIORITY:
        yield TimelineCase(name="overlap, priority, direct", fields=PRIORITY, **overlap)
    for overlaps in (False, True):
        name = "overlap" if overlaps else "plain"
        how = packed | {"overlaps": overlaps, "graph": "full-iteration"}
        yield TimelineCase(name=f"{name}, graph of the iteration", **how)
    iteration = overlap | {"graph": "full-iteration"}
    yield TimelineCase(name="overlap, graph of the iteration, direct", **iteration)


def on_cpu(case: TimelineCase) -> TimelineCase | None:
    """Return a small version of a case for the CPU; None if it needs a GPU.

    The stand-in for graphs holds received rows, whose buffers then never become free.
    """
    if case.graph != "none" or (case.exchange == "direct" and "moe" in case.scopes):
        return None
    default = {field.name: field.default for field in dataclasses.fields(TimelineCase)}
    return dataclasses.replace(case, **{name: default[name] for name in _GPU}, timed=1)


def main() -> int:
    """Run all cases; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--figure", type=Path, help="a picture of the timelines")
    arguments = parsed(parser)
    wanted = (on_cpu(case) if arguments.cpu else case for case in cases())
    rows: list[dict[str, Any]] = []
    code = run_cases(
        arguments, ENVIRONMENT, ((CHECK, timeline, case) for case in wanted), seen=rows.append
    )
    if arguments.figure and (shown := [row for row in rows if row["facts"]]):
        draw(shown, arguments.figure)
    return code


if __name__ == "__main__":
    sys.exit(main())
