"""Megatron in this process alone, for modules that ask for it."""

from collections.abc import Iterator

import pytest

from padded_dispatch.megatron.compat import forget_moe_state
from tests.support import tiny
from tests.support.training import Model, world


@pytest.fixture(autouse=True)
def fresh_moe_state() -> None:
    """Start each test without the losses' scale that another left: its shape depends on the way."""
    forget_moe_state()


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    with tiny.one_process():
        yield


@pytest.fixture
def alone() -> Iterator[None]:
    with tiny.default_group():
        yield


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """Set up Megatron in this process alone, with the stand-in for CUDA graphs."""
    with tiny.default_group(), world(Model(graph="layer")):
        yield
