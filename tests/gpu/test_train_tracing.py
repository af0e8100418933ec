"""On GPUs, a run's trace replayed at the run's factor equals the run's counts: eager and graphs."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from padded_dispatch.megatron.compat import training_stream
from tests.support.pool import WorkerPool
from tests.support.traced_run import Counted, assert_trace_says_the_same, counted_run

GRAPHS = ["none", "partial", "layer", "full-iteration"]


def _run_on_gpus(flags: str) -> Counted:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.cuda.set_stream(training_stream())
    run = f"--device cuda --workers {dist.get_world_size()} --seq-length 128 --micro-batch 3"
    return counted_run(f"{run} --steps 12 --capacity-factor 0.5 {flags}", device)


def check(pool: WorkerPool, folder: Path, flags: str) -> None:
    counted = pool.run(_run_on_gpus, f"--trace {folder} {flags}", timeout_s=240.0)
    assert_trace_says_the_same(folder, counted, factor=0.5, strikes=None)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", GRAPHS)
def test_on_one_gpu(gpu_pools, tmp_path, graph):
    check(gpu_pools[1], tmp_path, f"--graph {graph}")


@pytest.mark.multi_gpu
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("graph", GRAPHS)
def test_on_all_gpus(gpu_pools, tmp_path, graph, passes):
    ranks = next(n for n in (8, 4, 2) if n <= torch.cuda.device_count())
    flags = f"--graph {graph} --global-batch {3 * passes * ranks}"
    check(gpu_pools[ranks], tmp_path, flags)
