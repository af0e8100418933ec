"""Megatron in this process alone, for modules that ask for it."""

from collections.abc import Iterator

import pytest

from padded_dispatch.megatron import drops, uninstall
from padded_dispatch.megatron.compat import forget_moe_state
from padded_dispatch.utils.logs import log_once
from tests.support import tiny
from tests.support.training import Model, world


@pytest.fixture(autouse=True)
def fresh_state() -> None:
    """Start with nothing said, and without what earlier layers left.

    That is the scale of auxiliary losses, whose shape depends on the way, and a group of layers
    whose first round has not ended, which this test's layers would join.
    """
    forget_moe_state()
    drops._joining = None
    log_once.cache_clear()


@pytest.fixture
def uninstalled(one_process: None, monkeypatch: object) -> Iterator[None]:
    """Set up Megatron as it is; what a test installs ends with it, before its other patches."""
    uninstall()  # Tests of another module may have left wraps.
    yield
    uninstall()


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
