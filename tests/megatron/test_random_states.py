"""Random states come back, each generator's, and differences are seen."""

import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from padded_dispatch.megatron import retry as random_states
from padded_dispatch.megatron.cpu import megatron_on_cpu
from padded_dispatch.megatron.retry import GeneratorStates, RandomStates

DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "python, the second of a pair": lambda: random.gauss(0, 1),
    "numpy": lambda: np.random.rand(),
    "numpy, the second of a pair": lambda: np.random.randn(),
    "torch": lambda: torch.rand(()).item(),
}


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with megatron_on_cpu():
        yield


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_seen_and_repeats(name):
    draw = DRAWS[name]
    before = GeneratorStates.now()
    assert not before.changed_since(GeneratorStates.now()).states
    values = [draw() for _ in range(3)]
    assert before.changed_since(GeneratorStates.now()).states
    before.restore()
    assert not before.changed_since(GeneratorStates.now()).states
    assert [draw() for _ in range(3)] == values


class Tracker:
    """Megatron's tracker, with the methods that are used."""

    def __init__(self, states: dict[str, Any]) -> None:
        self.states = states

    def get_states(self) -> dict[str, Any]:
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states


def test_states_of_the_tracker_come_back():
    """Tensors are replaced, generators are set in place, for graphs that refer to them."""
    generator = torch.Generator().manual_seed(4)
    tensor = torch.tensor([1, 2])
    tracker = Tracker({"as tensor": tensor, "as generator": generator})
    with patch.object(random_states, "get_cuda_rng_tracker", lambda: tracker):
        before = RandomStates.now()
        drawn: Tensor = torch.rand(3, generator=generator)
        tracker.states["as tensor"] = torch.tensor([5, 6])
        tracker.states["new"] = torch.tensor([7])
        before.restore()
    assert tracker.states.keys() == {"as tensor", "as generator"}
    assert tracker.states["as tensor"].tolist() == [1, 2]
    assert tracker.states["as generator"] is generator
    assert torch.equal(torch.rand(3, generator=generator), drawn)
