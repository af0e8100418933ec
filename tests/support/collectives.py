"""Records of the collectives that the ranks of `run_on_threads` start.

Nothing is asked of the code that runs: the record is made where torch hands a collective to the
process group, so it holds those of forward and backward passes, of Megatron and of ours.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.support.threads import ThreadGroup

# What a rank started: the collective, its group, and the dtype and shape of each tensor.
Started = tuple[str, tuple[int, ...], tuple[tuple[torch.dtype, torch.Size], ...]]


class Records:
    """The collectives of each rank, in the order in which it started them."""

    def __init__(self, num_ranks: int) -> None:
        self.of_rank: list[list[Started]] = [[] for _ in range(num_ranks)]
        self._known: dict[Started, Started] = {}

    def add(self, rank: int, started: Started) -> None:
        """Note what a rank started. Equal ones are one object: millions take little room."""
        self.of_rank[rank].append(self._known.setdefault(started, started))

    def differing(self) -> list[str]:
        """Return which ranks started other collectives in a group than its first rank did."""
        of_group: dict[tuple[int, ...], dict[int, list[Started]]] = {}
        for rank, started in enumerate(self.of_rank):
            for one in started:
                of_group.setdefault(one[1], {}).setdefault(rank, []).append(one)
        lines = []
        for group, of_rank in of_group.items():
            first = of_rank.get(group[0], [])
            for rank in group:
                own = of_rank.get(rank, [])
                if own != first:
                    pairs = enumerate(zip(own, first, strict=False))
                    n = next((n for n, (a, b) in pairs if a != b), min(len(own), len(first)))
                    lines.append(
                        f"collective {n} in group of {len(group)}: rank {rank} started "
                        f"{own[n : n + 1]}, rank {group[0]} {first[n : n + 1]}"
                    )
        return lines

    def differing_orders(self, ranks: list[int]) -> list[int]:
        """Return the ranks whose whole sequence, over all groups, is another than the first's."""

        def places(rank: int) -> list[tuple[Any, ...]]:
            return [(name, len(group), shapes) for name, group, shapes in self.of_rank[rank]]

        first = places(ranks[0])
        return [rank for rank in ranks if places(rank) != first]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


@contextmanager
def recorded(num_ranks: int) -> Iterator[Records]:
    """Record the collectives of `run_on_threads` inside the block."""
    records = Records(num_ranks)

    start = ThreadGroup.start

    def recording(group: ThreadGroup, name: str, copy: Callable[..., None], *data: Any) -> Any:
        shapes = tuple((tensor.dtype, tensor.shape) for tensor in _tensors(data))
        records.add(group.own_rank, (name, group.ranks, shapes))
        return start(group, name, copy, *data)

    with patch.object(ThreadGroup, "start", recording):
        yield records
