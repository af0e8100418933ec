"""Worker pools for the whole session, since starting processes costs more than most tests."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from padded_dispatch.launch import WorkerPool

# Before any test imports a kernel: without a GPU, Triton's interpreter runs them.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples in every run, and no limit on the time of one.
settings.register_profile("padded_dispatch", derandomize=True, deadline=None)
settings.load_profile("padded_dispatch")


def pytest_collection_finish() -> None:
    """Let garbage collection pass over what importing and collecting have made for good."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter clean up as ever."""
    gc.unfreeze()


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
