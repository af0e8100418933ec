"""Random states of this rank: taken at one moment, set again later.

A step that is repeated must draw what it drew the first time. Generators that a rank draws from:

- Python's, NumPy's and torch's own, on the CPU and on the GPU (`GeneratorStates`);
- those of Megatron's random state tracker, for dropout under tensor and expert parallelism.
  Transformer Engine's tracker holds generators, which CUDA graphs refer to, so their states are set
  in place; Megatron's holds states as tensors, which it replaces.

Nothing here waits for the GPU: torch keeps the states of CUDA generators on the host.
"""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

# How to get and set the state of each generator that any code of this process may draw from.
# Torch's functions are looked up in every call, because `megatron_on_cpu` replaces them.
_GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "python": (random.getstate, random.setstate),
    "numpy": (np.random.get_state, np.random.set_state),
    "cuda": (lambda: torch.cuda.get_rng_state(), lambda state: torch.cuda.set_rng_state(state)),
    "cpu": (lambda: torch.get_rng_state(), lambda state: torch.set_rng_state(state)),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class GeneratorStates:
    """States of generators that any code of this process may draw from, by name."""

    states: dict[str, Any]

    @classmethod
    def now(cls) -> "GeneratorStates":
        """Return the states of all of them."""
        return cls(states={name: get() for name, (get, _) in _GENERATORS.items()})

    def restore(self) -> None:
        """Set the generators to these states."""
        for name, state in self.states.items():
            _, put = _GENERATORS[name]
            put(state)

    def changed_since(self, before: "GeneratorStates") -> "GeneratorStates":
        """Return those states that are others than `before`."""
        changed = {n: s for n, s in self.states.items() if not _same(s, before.states[n])}
        return GeneratorStates(states=changed)


def _same(one: Any, other: Any) -> bool:
    """Return whether two states of one generator are the same: tensors, or tuples."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return all(
        np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
        for a, b in zip(one, other, strict=True)
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class RandomStates:
    """States of all generators, those of Megatron's tracker included.

    `tracker`: its entries, which are tensors or generators. `positions`: the states of those that
    are generators.
    """

    generators: GeneratorStates
    tracker: dict[str, Any]
    positions: dict[str, Tensor]

    @classmethod
    def now(cls) -> "RandomStates":
        """Return the states as they are."""
        tracker: Any = get_cuda_rng_tracker()
        entries = tracker.get_states()
        positions = {n: e.get_state() for n, e in entries.items() if hasattr(e, "get_state")}
        return cls(generators=GeneratorStates.now(), tracker=entries, positions=positions)

    def restore(self) -> None:
        """Set all generators to these states."""
        tracker: Any = get_cuda_rng_tracker()
        for name, position in self.positions.items():
            self.tracker[name].set_state(position)
        tracker.set_states(self.tracker)
        self.generators.restore()


def draws_of_a_block(config: Any) -> AbstractContextManager[Any]:
    """Return the context in which Megatron's transformer block, and its capture, run a layer.

    Under sequence parallelism the ranks of a tensor-parallel group hold other tokens, so a layer
    draws from the generator of the tracker that differs between them.
    """
    tracker: Any = get_cuda_rng_tracker()
    return tracker.fork() if config.sequence_parallel else nullcontext()
