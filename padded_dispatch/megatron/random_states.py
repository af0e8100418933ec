"""Random states of this rank: taken at one moment, set again later.

A step that is repeated must draw what it drew the first time. Generators that a rank draws from:

- Python's, NumPy's and torch's own, on the CPU and on the GPU (`GeneratorStates`);
- those of Megatron's random state tracker, for dropout under tensor and expert parallelism.
  Transformer Engine's tracker holds generators, which CUDA graphs refer to, so their states are set
  in place; Megatron's holds states as tensors, which it replaces.

Nothing here waits for the GPU: torch keeps the states of CUDA generators on the host.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class GeneratorStates:
    """States of the generators that any code of this process may draw from."""

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: Tensor

    @classmethod
    def now(cls) -> "GeneratorStates":
        """Return the states as they are."""
        return cls(
            python=random.getstate(),
            numpy=np.random.get_state(),
            cpu=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state(),
        )

    def restore(self) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.cuda.set_rng_state(self.cuda)
        torch.set_rng_state(self.cpu)

    def same_as(self, other: "GeneratorStates") -> bool:
        """Return whether both have the same states."""
        (kind, words, *rest), (other_kind, other_words, *other_rest) = self.numpy, other.numpy
        return (
            self.python == other.python
            and (kind, rest) == (other_kind, other_rest)
            and np.array_equal(words, other_words)
            and torch.equal(self.cpu, other.cpu)
            and torch.equal(self.cuda, other.cuda)
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
