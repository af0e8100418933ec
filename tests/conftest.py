"""Worker pools for the whole session, since starting processes costs more than most tests."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from padded_dispatch.launch import WorkerPool

# The same examples in every run, and no limit on the time of one.
settings.register_profile("padded_dispatch", derandomize=True, deadline=None)
settings.load_profile("padded_dispatch")


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
