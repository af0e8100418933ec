"""Run many ranks as threads of this process, which take turns from one collective to the next.

Collectives are real: each rank passes its tensors, and the last of a group to come copies them for
all. Everything else runs as in a separate process, since torch keeps its world and its registry of
groups per thread.

One thread runs at a time, in an order that depends on nothing but the code that runs: hundreds of
threads that all want Python's lock spend most of their time in getting it. A rank that waits in a
collective wakes the next one; so ranks may wait for each other in collectives only. If all wait,
no collective can ever be whole, and a rank raises an error that says who waits where.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import multi_threaded_pg
from torch.testing._internal.distributed.multi_threaded_pg import AllGather, AllReduce, ret_work
from torch.utils._pytree import tree_leaves

from padded_dispatch.exchange import agreement, direct, hosts, symmetric_memory
from padded_dispatch.exchange.hosts import Hosts, groups_of
from padded_dispatch.utils.phases import unseen

_DONE = ret_work(None)


class _Turns:
    """The threads that are ready to run, and collectives for which others wait."""

    def __init__(self, num_ranks: int) -> None:
        self.errors: list[BaseException] = []
        self._ready = deque(range(num_ranks))
        self._waiting: dict[str, tuple[str, dict[int, Any]]] = {}
        self._wakes = [threading.Lock() for _ in range(num_ranks)]
        for wake in self._wakes:
            wake.acquire()

    def begin(self, rank: int) -> None:
        self._wakes[rank].acquire()
        if self.errors:
            raise SystemExit("another rank failed")

    def pass_on(self) -> None:
        if self._waiting and not self._ready:
            where = [f"{sorted(data)} in {name}" for name, data in self._waiting.values()]
            self.fail(RuntimeError(f"no rank is left that could join those that wait: {where}"))
        if self._ready:
            self._wakes[self._ready.popleft()].release()

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)
        for _, data in self._waiting.values():
            self._ready.extend(data)
        self._waiting.clear()

    def meet(self, group: "ThreadGroup", name: str, data: Any, copy: Callable[..., None]) -> None:
        """Wait for the other ranks of `group`; the last one calls `copy` with the data of all."""
        rank = group.own_rank
        started, of_rank = self._waiting.setdefault(group.group_name, (name, {}))
        assert started == name, f"rank {rank} started {name}, ranks {list(of_rank)} {started}"
        of_rank[rank] = data
        if len(of_rank) < len(group.ranks):
            self.pass_on()
            self.begin(rank)
        else:
            del self._waiting[group.group_name]
            self._ready.extend(other for other in of_rank if other != rank)
            with torch.no_grad(), unseen():
                copy([of_rank[member] for member in group.ranks])


class ThreadGroup(dist.ProcessGroup):
    """A process group of threads; `ranks` and `own_rank` are those in the default group."""

    turns: _Turns

    def __init__(self, options: Any, unused: object) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self.own_rank = self.ranks[options.group_rank]
        self._name = options.group_id

    group_name = property(lambda self: self._name)

    def getBackendName(self) -> str:  # noqa: N802
        return "threads"

    def start(self, name: str, copy: Callable[..., None], *data: Any) -> Any:
        """Start a collective; all do it here, with tensors of the same dtypes and shapes."""
        shapes = [(str(tensor.dtype), *tensor.shape) for tensor in tree_leaves(data)]
        assert all(tensor.is_contiguous() for tensor in tree_leaves(data))  # As NCCL needs them.
        self.turns.meet(self, f"{name} of {shapes}", data, copy)
        return _DONE

    def allgather(self, gathered: list[list[Tensor]], given: list[Tensor], opts: Any = None) -> Any:
        return self.start("allgather", AllGather().work, gathered, given)

    def all_gather_single(self, gathered: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.start("all_gather_single", _all_gather, gathered, given)

    def all_to_all_single(
        self, received: Tensor, given: Tensor, there: list[int], back: list[int], opts: Any = None
    ) -> Any:
        assert not there and not back, "parts of other sizes are not implemented"
        return self.start("all_to_all_single", _all_to_all, received, given)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        return self.start("allreduce", AllReduce(opts.reduceOp).work, *tensors)

    def barrier(self, opts: Any = None) -> Any:
        return self.start("barrier", lambda data: None)

    def reduce_scatter_single(self, received: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.start("reduce_scatter_single", _reduce_scatter, received, given)

    # The names in torch 2.8.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _all_gather(data: list[tuple[Tensor, Tensor]]) -> None:
    whole = torch.cat([given for _, given in data])
    for gathered, _ in data:
        gathered.copy_(whole.view(gathered.shape))


def _all_to_all(data: list[tuple[Tensor, Tensor]]) -> None:
    blocks = torch.stack([given for _, given in data])
    of_target = blocks.view(len(data), len(data), -1).transpose(0, 1)
    for (received, _), rows in zip(data, of_target, strict=True):
        received.view(rows.shape).copy_(rows)


def _reduce_scatter(data: list[tuple[Tensor, Tensor]]) -> None:
    summed = functools.reduce(torch.add, [given for _, given in data])  # Each time rounded.
    for (received, _), block in zip(data, summed.chunk(len(data)), strict=True):
        received.copy_(block.view(received.shape))


dist.Backend.register_backend("threads", ThreadGroup, extended_api=True, devices=["cpu", "cuda"])


class ThreadedMirror:
    """A `Mirror` of threads, which gather in their own groups: sockets would be one per pair."""

    def __init__(self, groups: Sequence[ThreadGroup]) -> None:
        self.num_agreements = 0
        self._groups = groups
        own = torch.tensor([dist.get_rank()])
        self.ranks = self.gather(own, "its creation").flatten().tolist()

    def gather(self, row: torch.Tensor, where: str) -> torch.Tensor:
        rows = row[None]
        for group in self._groups:
            gathered = rows.new_empty(group.size() * len(rows), *row.shape)
            group.start("allgather", _all_gather, gathered, rows)
            rows = gathered
        return rows


def _join(group: ThreadGroup, ranks: list[int], device: torch.device) -> ThreadGroup:
    """Return a group of some ranks of a group, as `hosts.join`."""
    members = [group.ranks[rank] for rank in ranks]
    options = SimpleNamespace(
        group_rank=ranks.index(group.rank()),
        group_size=len(ranks),
        global_ranks_in_group=members,
        group_id=f"{group.group_name}/{members}",
    )
    return ThreadGroup(options, None)


def run_on_threads(num_ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `fn(*args)` on every rank of a default group and return the results by rank.

    The first error of a rank is raised after all other ranks have ended.
    """
    results: list[Any] = [None] * num_ranks
    turns, store = _Turns(num_ranks), dist.HashStore()

    def work(rank: int) -> None:
        try:
            turns.begin(rank)
            with torch.autograd.set_multithreading_enabled(False):
                dist.init_process_group("threads", rank=rank, world_size=num_ranks, store=store)
                results[rank] = fn(*args)
        except BaseException as error:
            turns.fail(error)
        finally:
            turns.pass_on()

    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    multi_threaded_pg._install_threaded_pg()
    isolate(True)
    try:
        with (
            patch.object(agreement, "mirror_of", ThreadedMirror),
            patch.object(hosts, "join", _join),
            patch.object(ThreadGroup, "turns", turns, create=True),
        ):
            threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
            for thread in threads:
                thread.start()
            turns.pass_on()
            for thread in threads:
                thread.join()
    finally:
        isolate(False)
        multi_threaded_pg._uninstall_threaded_pg()
    if turns.errors:
        raise RuntimeError("a rank failed") from turns.errors[0]
    return results


def grid(num_ranks: int, etp_size: int) -> tuple[Any, Any, int]:
    """Return this rank's two groups, and i; rank r of the i-th expert-parallel group is i * R + r.

    One rank alone needs no default group.
    """
    if num_ranks * etp_size == 1:
        return None, None, 0
    i, r = divmod(dist.get_rank(), num_ranks)
    rows = [[j * num_ranks + q for q in range(num_ranks)] for j in range(etp_size)]
    # All ranks must create all groups, in the same order.
    groups = [dist.new_group(row) for row in rows]
    etp_groups = [dist.new_group(list(column)) for column in zip(*rows, strict=True)]
    return groups[i] if num_ranks > 1 else None, etp_groups[r] if etp_size > 1 else None, i


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Use deterministic algorithms and fill fresh memory with NaN (or the largest integer)."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class ThreadMemory:
    """`PeerMemory` of threads; `num_barriers` is how often each rank came to a barrier."""

    num_barriers: ClassVar[dict[int, int]] = {}

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._group, self._rank = group, dist.get_rank()
        own = torch.full((num_bytes,), 255, dtype=torch.uint8)
        self._own = own.numpy()
        self.address_R = torch.tensor(symmetric_memory.gather_objects(group, own.data_ptr()))

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = int(np.prod(shape)) * dtype.itemsize
        return torch.from_numpy(self._own[offset : offset + size]).view(dtype).view(shape)

    def barrier(self) -> None:
        self.num_barriers[self._rank] = self.num_barriers.get(self._rank, 0) + 1
        self._group.barrier().wait()


def _gather_objects(group: dist.ProcessGroup, value: int) -> list[int]:
    gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(gathered, torch.tensor([value]), group=group)
    return [int(one) for one in gathered]


def _check_group(group: Any, *, over_nvlink: bool, hosts: Hosts | None = None) -> Any:
    return group if hosts is None else groups_of(group, torch.device("cpu"))[0]


@contextmanager
def threads_as_ranks() -> Iterator[None]:
    with (
        patch.object(symmetric_memory, "PeerMemory", ThreadMemory),
        patch.object(symmetric_memory, "_free_bytes", lambda device: 2**40),
        patch.object(symmetric_memory, "gather_objects", _gather_objects),
        patch.object(direct, "check_group", _check_group),
        patch.object(ThreadMemory, "num_barriers", {}),
    ):
        yield
