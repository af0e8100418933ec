"""Test repeated steps on GPUs, and write results rows.

    python -m tests.gpu.retry --out notebooks/results/pools.json --commit SHA

Two trainings run in lockstep: one with little capacity, CUDA graphs and `on_overflow="retry"`, and
an eager one that fits its sizes to the routing and so never drops. All losses, gradients,
parameters, buffers, logged sums and random states are the same, bit by bit. Every step of the first
drops, so each is repeated. The cases `some steps` have so much capacity that only some steps drop;
their rows have the number. The results file is complete after every case. `--only TEXT` runs the
cases whose names contain the text. `--cpu N` tries the program on N processes over gloo, with a
stand-in for CUDA graphs.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from tests.support.gpu_cases import ENVIRONMENT, run_cases
from tests.support.gpu_rows import parsed
from tests.support.retried_training import RetriedCase, retried_equals_never_dropping

CHECK = "repeated steps equal training that never drops"

_GPU: dict[str, Any] = {
    "device": "cuda",
    "steps": 6,
    "batch": 1,
    "seq": 256,
    "hidden": 512,
    "heads": 8,
    "ffn": 512,
    "num_experts": 32,
    "top_k": 4,
    "vocab": 512,
}


def cases() -> Iterator[RetriedCase]:
    """Yield all cases, from one rank to two."""
    for ranks, graph in itertools.product((1, 2), ("none", "layer", "local", "full-iteration")):
        where: dict[str, Any] = {"ranks": ranks, "ep": ranks, "graph": graph, **_GPU}
        name = f"EP{ranks}, graph {graph}"
        yield RetriedCase(name=name, **where)
        yield RetriedCase(name=f"{name}, 3 microbatches, draws", microbatches=3, **where | _DRAWS)
    for graph in ("none", "layer", "full-iteration"):
        two: dict[str, Any] = {"ranks": 2, "graph": graph, "microbatches": 3, **_GPU}
        overlap: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
        yield RetriedCase(name=f"EP2, graph {graph}, all overlapped", ep=2, **overlap, **two)
        yield RetriedCase(name=f"two replicas, graph {graph}, all overlapped", **overlap, **two)
    deep: dict[str, Any] = {"ranks": 2, "pp": 2, "num_layers": 4, "microbatches": 4, **_GPU}
    for graph in ("none", "layer"):
        yield RetriedCase(name=f"PP2, graph {graph}", graph=graph, **deep)
        yield RetriedCase(name=f"PP2/VPP2, graph {graph}", graph=graph, vpp=2, **deep)
    tensor: dict[str, Any] = {"ranks": 2, "tp": 2, "ep": 2, "microbatches": 3, **_GPU}
    for graph in ("none", "layer"):
        yield RetriedCase(name=f"TP2/EP2, graph {graph}", graph=graph, **tensor)
    # With experts of the layer spec: packed ones compute in bf16.
    for ranks in (1, 2):
        where = {"ranks": ranks, "ep": ranks, "microbatches": 3, "fp16": True, **_GPU}
        yield RetriedCase(name=f"EP{ranks}, fp16", **where)
    yield RetriedCase(name="TP2/EP2, fp16", fp16=True, **tensor)
    for ranks, graph in itertools.product((1, 2), ("layer", "full-iteration")):
        where = {"ranks": ranks, "ep": ranks, "graph": graph, **_GPU, "steps": 12, "factor": 1.6}
        where |= {"dropout": 0.0}
        yield RetriedCase(name=f"some steps, EP{ranks}, graph {graph}", **where)


_DRAWS: dict[str, Any] = {"policy": "random", "expert_bias": True}


def on_cpu(case: RetriedCase) -> RetriedCase | None:
    """Return a small version of a case for the CPU; None if Megatron needs a GPU for it."""
    if case.graph in ("local", "full-iteration") or case.factor != 0.5:
        return None
    if case.tp > 1 and case.graph != "none":
        return None  # Not with the stand-in for graphs.
    default = {field.name: field.default for field in dataclasses.fields(RetriedCase)}
    small = {name: default[name] for name in _GPU}
    # The stand-in for graphs replays no draws.
    return dataclasses.replace(case, **small, dropout=0.0 if case.graph == "layer" else 0.1)


def main() -> int:
    """Run all cases; return 1 if one failed."""
    arguments = parsed(argparse.ArgumentParser(description=__doc__.split("\n")[0]))
    wanted = (on_cpu(case) if arguments.cpu else case for case in cases())
    checks = ((CHECK, retried_equals_never_dropping, case) for case in wanted)
    return run_cases(arguments, ENVIRONMENT, checks)


if __name__ == "__main__":
    sys.exit(main())
