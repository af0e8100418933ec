"""Worker pools, Triton's interpreter, and a count of threads at the end."""

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.support import rows  # as it is now
from tests.support.pool import WorkerPool, forget_models

MAX_THREADS = 60  # of a process at the end of a session

if not torch.cuda.is_available():
    torch.set_num_threads(1)  # Tensors are small, and other cores run other tests.
    # Set before any test imports a kernel: without a GPU, Triton's interpreter runs kernels.
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.support.interpreter import patch_interpreter

    patch_interpreter()

# The same examples in every run, and no time limit for an example.
settings.register_profile("padded_dispatch", derandomize=True, deadline=None)
settings.load_profile("padded_dispatch")


def pytest_collection_finish() -> None:
    """Leave out objects of imports and collection, and collect garbage seldom: a tenth faster."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run the tests of named files in this process, which starts at once, and those of GPUs.

    Others run in one more than there are cores, because many wait for processes.
    """
    files = all(".py" in argument for argument in config.args)
    return 0 if files or torch.cuda.is_available() else min((os.cpu_count() or 1) + 1, 8)


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> Iterator[None]:
    """Fail if this process has many threads at the end."""
    yield
    gc.unfreeze()  # for a normal interpreter shutdown
    assert len(os.listdir("/proc/self/task")) <= MAX_THREADS, "destroy the groups that a test makes"


@pytest.fixture(scope="module", autouse=True)
def stock_megatron() -> Iterator[None]:
    """Remove our patches of Megatron, and its models, after each test module."""
    yield
    if installed := sys.modules.get("padded_dispatch.megatron.installer"):
        installed.uninstall()
    forget_models()


def _pool(num_workers: int) -> Any:
    @pytest.fixture(scope="module")
    def pool() -> Iterator[WorkerPool]:
        """Provide workers with a gloo default group, which is new for each module."""
        with WorkerPool(num_workers) as pool:
            yield pool

    return pool


pool1, pool2, pool4 = map(_pool, (1, 2, 4))


@pytest.fixture(scope="session")
def gpu_pools() -> Iterator[dict[int, WorkerPool]]:
    """Provide pools with one GPU per worker, by size."""
    os.environ.update(rows.ENVIRONMENT)
    pools = {ranks: WorkerPool(ranks, backend="nccl") for ranks in (1, 2, 4, 8)}
    yield pools
    for pool in pools.values():
        pool.end()


@pytest.fixture
def cuda() -> torch.device:
    assert torch.cuda.is_available(), "tests marked gpu need a CUDA device"
    return torch.device("cuda")
