"""Collectives that the ranks of `run_on_threads` start: recorded, and fast for hundreds of ranks.

Nothing is asked of the code that runs: the record is made where torch hands a collective to the
process group, so it holds those of forward and backward passes, of Megatron and of ours.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import multi_threaded_pg
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

# What a rank started: the collective, its group, and the dtype and shape of each tensor.
Started = tuple[str, tuple[int, ...], tuple[str, ...]]

_COLLECTIVES = (
    "allgather",
    "all_gather_single",
    "allreduce",
    "all_to_all_single",
    "alltoall",
    "broadcast",
    "gather",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
)


class Records:
    """The collectives of each rank, in the order in which it started them."""

    def __init__(self, num_ranks: int) -> None:
        self.of_rank: list[list[Started]] = [[] for _ in range(num_ranks)]
        self._turn = threading.Lock()
        self._own = threading.local()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let one rank at a time run, from one collective to the next.

        Hundreds of threads that all want Python's lock spend most of their time in getting it.
        """
        with self._turn:
            self._own.held = True
            try:
                yield
            finally:
                self._own.held = False

    @contextmanager
    def others_turn(self) -> Iterator[None]:
        """Give the turn away, if this rank has it, and get it back at the end."""
        held = getattr(self._own, "held", False)
        if held:
            self._turn.release()
        try:
            yield
        finally:
            if held:
                self._turn.acquire()

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

        def places(rank: int) -> list[tuple[str, int, tuple[str, ...]]]:
            return [(name, len(group), shapes) for name, group, shapes in self.of_rank[rank]]

        first = places(ranks[0])
        return [rank for rank in ranks if places(rank) != first]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _shapes(args: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(f"{tensor.dtype} {list(tensor.shape)}" for tensor in _tensors(args))


class _AllToAllAtOnce:
    """Equal splits, in one copy for each rank instead of one for each pair of ranks."""

    @torch.no_grad()
    def work(self, data: list[Any]) -> None:
        assert not any(sizes for _, _, *splits in data for sizes in splits)
        blocks = torch.stack([given for _, given, *_ in data])
        by_target = blocks.view(len(data), len(data), -1).transpose(0, 1)
        for (received, *_), rows in zip(data, by_target, strict=True):
            received.detach().copy_(rows.reshape(received.shape))


class _AllGatherAtOnce:
    """One copy for each rank and tensor of a list, or for each rank where the list is one."""

    @torch.no_grad()
    def work(self, data: list[Any]) -> None:
        whole = torch.cat([given for _, given in data])
        for gathered, _ in data:
            gathered.detach().copy_(whole.reshape(gathered.shape))


class _ReduceScatterAtOnce:
    """One sum over all ranks."""

    @torch.no_grad()
    def work(self, data: list[Any]) -> None:
        summed = torch.stack([given for _, given in data]).sum(0)
        for (received, _), block in zip(data, summed.chunk(len(data)), strict=True):
            received.detach().copy_(block.reshape(received.shape))


def _joined(make: Callable[[], Any]) -> Callable[..., Any]:
    def run(group: Any, received: Tensor, given: Tensor, *args: Any) -> Any:
        splits = [value for value in args if isinstance(value, list)]
        collective = ProcessLocalGroup._start_coll(make(), group)
        result = collective.join(group._rank, (received, given, *splits))
        ProcessLocalGroup._end_coll(collective, group)
        return result

    return run


_FASTER = {
    "all_to_all_single": _joined(_AllToAllAtOnce),
    "all_gather_single": _joined(_AllGatherAtOnce),
    "reduce_scatter_single": _joined(_ReduceScatterAtOnce),
}


@contextmanager
def recorded(num_ranks: int) -> Iterator[Records]:
    """Record the collectives of `run_on_threads` inside the block."""
    records = Records(num_ranks)

    def recording(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def start(group: Any, *args: Any, **kwargs: Any) -> Any:
            ranks = tuple(dist.get_process_group_ranks(group))
            records.of_rank[dist.get_rank()].append((name, ranks, _shapes(args)))
            with records.others_turn():
                return run(group, *args, **kwargs)

        return start

    assert multi_threaded_pg
    with patch.multiple(
        ProcessLocalGroup,
        **{
            name: recording(name, _FASTER.get(name, getattr(ProcessLocalGroup, name)))
            for name in _COLLECTIVES
        },
    ):
        yield records
