"""Megatron in this process alone, for modules that ask for it."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.support import tiny
from tests.support.training import Model, world


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """Set up Megatron in this process alone."""
    with tiny.one_process():
        yield


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """Set up Megatron in this process alone, with the stand-in for CUDA graphs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with world(Model(graph="layer")):
            yield
    finally:
        dist.destroy_process_group()
