"""Check that the replay of a run's trace equals the run's own counters.

    python -m tests.gpu.traces --out notebooks/results/traces.json --commit SHA

Trains a small model with CUDA graphs of whole layers and a trace of every step, and reads every
layer's counters after every step. The replay of the trace at the run's own factor must equal the
counters, step by step and bit by bit.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from padded_dispatch.megatron.compat import training_stream
from padded_dispatch.megatron.cpu import megatron_on_cpu
from tests.support.gpu_rows import Rows, add_results
from tests.support.pool import WorkerPool
from tests.support.traced_run import Counted, assert_trace_says_the_same, counted_run

LIMIT_S = 500.0


def run(flags: str, device: str) -> Counted:
    """Train on this rank; return its counters after every step."""
    if device == "cpu":
        with megatron_on_cpu():
            return counted_run(flags, torch.device("cpu"))
    gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(gpu)
    torch.cuda.set_stream(training_stream())
    return counted_run(flags, gpu)


def compared(pool: WorkerPool, folder: Path, flags: str, device: str) -> dict[str, Any]:
    """Train, and compare the trace with the counters; return a row."""
    counted: Counted = {}
    for of_rank in pool.run(
        run, f"--trace {folder} --trace-every 1 {flags}", device, timeout_s=LIMIT_S
    ):
        counted |= of_rank
    failure = None
    try:
        assert_trace_says_the_same(folder, counted, factor=1.0)
    except AssertionError as error:
        failure = str(error)[:1000]
    demand = sum(int(figures["demand_E"].sum()) for figures in counted.values())
    kept = sum(int(figures["kept_E"].sum()) for figures in counted.values())
    return {
        "check": "what-if equals the run's counters",
        "passed": failure is None,
        "failure": failure,
        "compared": len(counted),  # (step, layer, rank)
        "demand": demand,
        "dropped": 1 - kept / demand,
    }


def main() -> int:
    """Run all parts; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_results(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("flags", nargs="*", help="more of `padded-dispatch train`, after --")
    given = parser.parse_args()
    graph = "layer" if given.device == "cuda" else "none"
    flags = (
        f"--device {given.device} --workers {given.workers} --graph {graph} --steps {given.steps} "
        f"--capacity-factor 1 --log-every 100 {' '.join(given.flags)}"
    )
    backend = "nccl" if given.device == "cuda" else "gloo"
    rows = Rows(given, given.workers if given.device == "cuda" else 0, {})
    run_was = {"train": flags, "graph": graph, "ranks": given.workers}
    with tempfile.TemporaryDirectory() as name, WorkerPool(given.workers, backend=backend) as pool:
        traces = Path(name, "traces")
        rows.add(compared(pool, traces, flags, given.device) | run_was)
    return rows.exit_code()


if __name__ == "__main__":
    sys.exit(main())
