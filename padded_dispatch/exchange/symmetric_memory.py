"""Memory of all ranks of a group, alike, that each of them can store to.

It is torch's symmetric memory on its CUDA backend: needed are GPUs of one host that reach each
other (NVLink), and neither NVSHMEM nor multicast. Allocating is a collective call of the group and
never happens during a capture: it belongs to the first eager call with a shape, which the ranks
have agreed on. What is needed is logged, and refused where it does not fit, before it is allocated.

Who owns what. A `ReceiveBuffer` is where the rows for this rank's experts arrive. `DirectBuffers`, one
per layer and shape, has one for each microbatch in flight, in turns: they are what the experts save
for backward, so no copy of them exists, and one must not be used again before that backward is
done. (Turns are right where microbatches end in the order in which they began, as in all of
Megatron's schedules; too few are noticed by the tensors of the last turn, which are still alive.)
`Workspace` is used by all layers of the same shape, one after another: the counts, the slots that
rows come home to, and a receive_buffer for gradients, which live until the next layer's. Everything is
freed with its owners; what an exchange has returned must not outlive it.

Elements per rank, with N = E * C rows: N * D per layer and microbatch in flight, and 2 * N * D
shared by all layers of the same shape; everything else is small.

The most device memory that this process has held since `torch.cuda.reset_peak_memory_stats()`.

Memory that peers store to comes from the driver, and torch's allocator does not count it. It stays
for as long as a layer does, so what is held now is added to torch's peak.
"""

import ctypes
import gc
import itertools
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from padded_dispatch.exchange.alltoall import group_name

# With a peer that never comes. In eager all have just agreed on the host, but one may have kernels
# to compile: as long as NCCL's default. A replay has nothing of that kind to wait for.
_TIMEOUT_MS = 600_000
_REPLAY_TIMEOUT_MS = 45_000
_ALIGNMENT = 256

_log = logging.getLogger("padded_dispatch")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What decides the buffers: E, C, D, and the dtype of rows."""

    num_experts: int
    capacity: int
    width: int
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        """N, the most rows that a rank's experts can get."""
        return self.num_experts * self.capacity


class PeerMemory:
    """Bytes of every rank. Creating it is a collective call of the group, outside of captures."""

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory

        # Not `_symmetric_memory.empty`: its pool keeps what is freed, and may hand out the middle
        # of a larger allocation, of which a handle would give the beginning.
        self._bytes = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        _held[self] = num_bytes
        _print_at_once()
        name: Any = group_name(group)  # The type of a name differs between releases.
        self._handle: Any = _symmetric_memory.rendezvous(self._bytes, name)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """This rank's part at `offset` bytes, with a storage of its own."""
        return self._handle.get_buffer(self._handle.rank, shape, dtype, offset // dtype.itemsize)

    def addresses(self, offset: int) -> Tensor:
        """Where every rank's part at `offset` bytes lies, int64 [R], for kernels of this rank."""
        pointers = [base + offset for base in self._handle.buffer_ptrs]
        return torch.tensor(pointers, dtype=torch.int64, device=self._bytes.device)

    def barrier(self) -> None:
        """Let the current stream wait for the streams of all ranks; what they did is visible.

        Its signals go back to zero, so that it can be captured. A rank that waits for too long
        prints for whom, in ranks of the group, and its device fails.
        """
        captured = torch.cuda.is_current_stream_capturing()
        timeout_ms = _REPLAY_TIMEOUT_MS if captured else _TIMEOUT_MS
        self._handle.barrier(channel=0, timeout_ms=timeout_ms)


_held: WeakKeyDictionary[PeerMemory, int] = WeakKeyDictionary()


def held_bytes() -> int:
    """Of this rank, in all that is alive. Torch's allocator does not know of it."""
    return sum(_held.values())


def _print_at_once() -> None:
    """Let C's stdout, where the words of kernels go, write every line: a process whose device has
    failed is likely to abort, and that would lose them."""
    libc = ctypes.CDLL(None)
    libc.setlinebuf(ctypes.c_void_p.in_dll(libc, "stdout"))


class _Layout:
    """Pieces one after another, each aligned."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def add(self, num_elements: int, dtype: torch.dtype) -> int:
        """Make room; the offset of the piece in bytes."""
        offset = self.num_bytes
        size = num_elements * dtype.itemsize
        self.num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT
        return offset


class ReceiveBuffer:
    """Rows [N, D], and beside them fp32 [N + E]: a number for each row, then counts [S, L].

    `rows_R`, `meta_R`: where those of all ranks lie.
    """

    def __init__(self, group: dist.ProcessGroup, shape: Shape, device: torch.device) -> None:
        layout = _Layout()
        self._shape = shape
        self._rows = layout.add(shape.num_rows * shape.width, shape.dtype)
        self._side = layout.add(shape.num_rows + shape.num_experts, torch.float32)
        self._memory = PeerMemory(group, layout.num_bytes, device)
        self._given: list[StorageWeakRef] = []
        self.rows_R = self._memory.addresses(self._rows)
        self.meta_R = self._memory.addresses(self._side)

    @staticmethod
    def num_bytes(shape: Shape) -> int:
        """Per rank."""
        meta = 4 * (shape.num_rows + shape.num_experts)
        return shape.num_rows * shape.width * shape.dtype.itemsize + meta

    def is_free(self) -> bool:
        """Whether tensors of its last use are gone."""
        if self._is_expired():
            return True
        # The traceback of an import that failed somewhere inside the first call, and was caught
        # there, keeps that call's frames with all that they hold until cycles are collected.
        gc.collect()
        return self._is_expired()

    def _is_expired(self) -> bool:
        return all(storage.expired() for storage in self._given)

    def take(self) -> tuple[Tensor, Tensor]:
        """Rows and side, for one use."""
        shape = self._shape
        rows_ND = self._memory.tensor(self._rows, (shape.num_rows, shape.width), shape.dtype)
        num_numbers = shape.num_rows + shape.num_experts
        meta = self._memory.tensor(self._side, (num_numbers,), torch.float32)
        self._given = [StorageWeakRef(given.untyped_storage()) for given in (rows_ND, meta)]
        return rows_ND, meta


class Workspace:
    """What all layers of one shape use in turn.

    `table_RE`: int32, the counts of all sources. `slots_ECD`, `meta_EC1`: rows, and fp32 numbers
    beside them, that came home. `..._R`: where those of all ranks lie. `gradients`: a receive_buffer.
    """

    def __init__(self, group: dist.ProcessGroup, shape: Shape, device: torch.device) -> None:
        layout = _Layout()
        slots = shape.num_experts, shape.capacity, shape.width
        meta = shape.num_experts, shape.capacity + 1
        table_at = layout.add(group.size() * shape.num_experts, torch.int32)
        slots_at = layout.add(shape.num_rows * shape.width, shape.dtype)
        meta_at = layout.add(meta[0] * meta[1], torch.float32)
        memory = PeerMemory(group, layout.num_bytes, device)
        self.barrier = memory.barrier
        self.table_RE = memory.tensor(table_at, (group.size(), shape.num_experts), torch.int32)
        self.table_R = memory.addresses(table_at)
        self.slots_ECD = memory.tensor(slots_at, slots, shape.dtype)
        self.slots_R = memory.addresses(slots_at)
        self.meta_EC1 = memory.tensor(meta_at, meta, torch.float32)
        self.meta_R = memory.addresses(meta_at)
        self.gradients = ReceiveBuffer(group, shape, device)

    @staticmethod
    def num_bytes(shape: Shape, num_ranks: int) -> int:
        """Per rank."""
        return 2 * ReceiveBuffer.num_bytes(shape) + 4 * num_ranks * shape.num_experts


class DirectBuffers:
    """The buffers of one layer for one shape; a collective call of the group.

    `key`: by which custom ops find it with `find`. `rank`: in the group.

    Args:
        microbatches_in_flight: microbatches whose forward is done and whose backward is not, at most.

    Raises:
        ValueError: on all ranks, when the memory of one does not hold it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        shape: Shape,
        device: torch.device,
        *,
        microbatches_in_flight: int,
    ) -> None:
        assert not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing()
        self.rank = group.rank()
        self.key = f"{group_name(group)}/{next(_numbers)}"
        own = microbatches_in_flight * ReceiveBuffer.num_bytes(shape)
        self.workspace = _workspace(group, shape, device, own)
        self._receive_buffers = [
            ReceiveBuffer(group, shape, device) for _ in range(microbatches_in_flight)
        ]
        self._turn = 0
        _buffers[self.key] = self

    def next_receive_buffer(self) -> ReceiveBuffer:
        """The receive_buffer of the next microbatch.

        Raises:
            ValueError: when it is still in use.
        """
        receive_buffer = self._receive_buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._receive_buffers)
        if not receive_buffer.is_free():
            raise ValueError(
                f"microbatches_in_flight={len(self._receive_buffers)} is not possible: what an earlier "
                "forward pass received is still in use; raise it to the most passes that wait for "
                "their backward pass, such as the number of pipeline stages"
            )
        return receive_buffer


def find(key: str) -> DirectBuffers:
    """The buffers with this key."""
    return _buffers[key]


_numbers = itertools.count()
_buffers: WeakValueDictionary[str, DirectBuffers] = WeakValueDictionary()
_workspaces: WeakKeyDictionary[dist.ProcessGroup, WeakValueDictionary[Shape, Workspace]] = (
    WeakKeyDictionary()
)


def _workspace(group: dist.ProcessGroup, shape: Shape, device: torch.device, own: int) -> Workspace:
    """The one that another layer has, or a new one; refused unless `own` bytes more fit as well."""
    of_group = _workspaces.setdefault(group, WeakValueDictionary())
    workspace = of_group.get(shape)
    # Ranks may free a layer at different times, and all have to decide alike.
    everyone_has = all(gather_objects(group, workspace is not None))
    shared = 0 if everyone_has else Workspace.num_bytes(shape, group.size())
    _log.info(
        "direct exchange, %s: %.2f GiB for one layer and %.2f GiB more for all of this shape",
        shape,
        own / 2**30,
        shared / 2**30,
    )
    free = min(gather_objects(group, _free_bytes(device)))
    if own + shared > free:
        raise ValueError(
            f"exchange='direct' is not possible: its buffers for {shape} take "
            f"{(own + shared) / 2**30:.2f} GiB, and a rank has {free / 2**30:.2f} GiB free; lower "
            "the capacity factor or microbatches_in_flight, or set exchange='alltoall'"
        )
    if workspace is None or not everyone_has:
        workspace = of_group[shape] = Workspace(group, shape, device)
    return workspace


def _free_bytes(device: torch.device) -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def check_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Refuse a group whose ranks cannot store to each other; a collective call.

    Raises:
        ValueError: on all ranks alike.
    """
    if not torch.cuda.is_available():
        reasons = ["there is no CUDA device"]
    elif group is None or group.size() == 1:
        reasons = ["the expert-parallel group has one rank"]
    else:
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        where = gather_objects(group, (socket.gethostname(), str(device.uuid)))
        reasons = gather_objects(group, _unreachable(where))
    for reason in reasons:
        if reason:
            raise ValueError(
                f"exchange='direct' is not possible: {reason}; set exchange='alltoall'"
            )
    assert group is not None
    return group


def _unreachable(where: list[tuple[str, str]]) -> str:
    hosts = sorted({host for host, _ in where})
    if len(hosts) > 1:
        return f"the expert-parallel group spans the hosts {', '.join(hosts)}"
    here = torch.cuda.current_device()
    peers = {uuid for _, uuid in where}
    for number in range(torch.cuda.device_count()):
        uuid = str(torch.cuda.get_device_properties(number).uuid)
        reachable = number == here or torch.cuda.can_device_access_peer(here, number)
        if uuid in peers and not reachable:
            return f"GPU {here} cannot access GPU {number}"
    return ""


def gather_objects(group: dist.ProcessGroup, value: _T) -> list[_T]:
    """Every rank's value, on the host."""
    gather: Callable[..., None] = dist.all_gather_object
    values: list[Any] = [None] * group.size()
    gather(values, value, group=group)
    return values


def allocated_gib() -> float:
    """By tensors, those of the direct exchange included."""
    return (torch.cuda.max_memory_allocated() + held_bytes()) / 2**30


def reserved_gib() -> float:
    """By the caching allocator, graph pools included, and by the direct exchange."""
    return (torch.cuda.max_memory_reserved() + held_bytes()) / 2**30
