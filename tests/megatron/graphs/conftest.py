"""Megatron in this process alone, with the stand-in for CUDA graphs."""

from collections.abc import Iterator

import pytest

from tests.megatron.graphs.test_capture import graphs
from tests.support import tiny


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """Set up Megatron in this process alone, with `graphs()`."""
    with tiny.one_process(), graphs():
        yield
