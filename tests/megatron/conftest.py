"""Megatron in this process alone, for modules that ask for it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from padded_dispatch.megatron.compat import forget_moe_state
from tests.support import tiny
from tests.support.pool import end_groups
from tests.support.training import Model, world


@pytest.fixture(autouse=True)
def fresh_moe_state() -> None:
    """Start each test without the losses' scale that another left: its shape depends on the way."""
    forget_moe_state()


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """Set up Megatron in this process alone."""
    with tiny.one_process():
        yield


@contextmanager
def default_group() -> Iterator[None]:
    """Make a default group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        end_groups()


@pytest.fixture
def alone() -> Iterator[None]:
    """Provide a default group of this process alone, without Megatron's groups."""
    with default_group():
        yield


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """Set up Megatron in this process alone, with the stand-in for CUDA graphs."""
    with default_group(), world(Model(graph="layer")):
        yield
