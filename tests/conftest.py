"""Worker pools for the whole session, since starting processes costs more than most tests."""

import gc
import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from padded_dispatch.utils.launch import WorkerPool
from tests.support.ahead import Ahead
from tests.support.forks import fork_workers

if not torch.cuda.is_available():
    torch.set_num_threads(1)  # Tensors are small, and other cores have tests of their own.
    # Before any test imports a kernel: without a GPU, Triton's interpreter runs them.
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.support.interpreter import patch_once

    patch_once()
    # Here already: workers import while this process collects, and pytest captures what they say.
    fork_workers()

# The same examples in every run, and no limit on the time of one.
settings.register_profile("padded_dispatch", derandomize=True, deadline=None)
settings.load_profile("padded_dispatch")


def pytest_configure(config: pytest.Config) -> None:
    """Make room for tests that run beside the others."""
    config.pluginmanager.register(Ahead())


def pytest_collection_finish() -> None:
    """Let garbage collection pass over what importing and collecting have made for good."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter clean up as ever."""
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def stock_megatron() -> Iterator[None]:
    """What one module installs, if only to look at settings, does not reach the next."""
    yield
    if installed := sys.modules.get("padded_dispatch.megatron.install"):
        installed.uninstall()


@pytest.fixture(scope="session")
def pool2() -> Iterator[WorkerPool]:
    """Two workers with a gloo default group; they start at their first use."""
    with WorkerPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool4() -> Iterator[WorkerPool]:
    """Four workers with a gloo default group; they start at their first use."""
    with WorkerPool(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def gpu_pools(request) -> Iterator[dict[int, WorkerPool]]:
    """Workers with a GPU each, under the module's `ENVIRONMENT`; they start at their first use."""
    pools = {ranks: WorkerPool(ranks, backend="nccl") for ranks in (1, 2, 4, 8)}
    with pytest.MonkeyPatch.context() as environment:
        for name, value in getattr(request.module, "ENVIRONMENT", {}).items():
            environment.setenv(name, value)
        yield pools
        for pool in pools.values():
            pool.close()


@pytest.fixture
def cuda() -> torch.device:
    """The GPU of tests that need one in this process."""
    assert torch.cuda.is_available(), "tests marked gpu were asked for, and there is no GPU"
    return torch.device("cuda")
