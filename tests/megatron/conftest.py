"""Megatron in this process alone, for modules that ask for it."""

from collections.abc import Iterator

import pytest

from tests.support import tiny


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """Set up Megatron in this process alone."""
    with tiny.one_process():
        yield
