"""Symmetric memory: the same buffers on every rank of a group, which all its ranks can write to.

It uses the CUDA backend of torch's symmetric memory. It needs GPUs of one host that can access each
other (NVLink), and neither NVSHMEM nor multicast. Allocating is a collective call of the group
and never happens during a capture: the first eager call with a shape allocates, after the ranks
have compared that shape. Before that, the bytes are logged, and a layer that does not fit raises.

Owners. `DirectBuffers`, one per layer and shape, has a `ReceiveBuffer` for each microbatch in
flight and uses them in turn. The experts save received rows for backward without a copy, so a
buffer must not be used again before that backward is done: turns are right if microbatches end in
the order in which they began, as in all of Megatron's schedules. All layers of a shape share one
`Workspace`: the counts, the slots that rows return to, and a receive buffer for gradients, whose
contents last until the next layer's backward. Buffers are freed with their owners; tensors that an
exchange returned must not outlive it. Elements per rank: N * D per layer and microbatch in flight,
and (N + Q) * D shared by all layers of the same shape; everything else is small.

The driver allocates this memory, so torch's allocator does not count it. `allocated_gib` and
`reserved_gib` add what is held now to torch's peaks.

Letters: T tokens, K experts per token, E experts, L local experts, R ranks and S = R sources, D
hidden size, N the most rows that a rank's experts can receive, Q slots of a source. `..._R`: int64
[R], the addresses of a buffer on every rank.
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

from padded_dispatch.config import require
from padded_dispatch.exchange.collectives import group_name

# How long a barrier waits for a peer, which may be compiling kernels, reading data or writing a
# checkpoint: NCCL's default. A captured barrier keeps the value of its capture.
TIMEOUT_MS = 600_000
_ALIGNMENT = 256

_log = logging.getLogger("padded_dispatch")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes that decide the buffers: E, Q, N, D, the dtype of rows, and R * T * K places."""

    num_experts: int
    num_slots: int
    num_rows: int
    width: int
    dtype: torch.dtype
    num_places: int


class PeerMemory:
    """The same number of bytes on every rank, mapped by all ranks of the group.

    Creating it is a collective call of the group, outside of captures.
    """

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory

        # Not `_symmetric_memory.empty`. Its pool keeps freed memory, and may return the middle of a
        # larger allocation, while a handle gives the address of the allocation's beginning.
        self._bytes = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        _held[self] = num_bytes
        _line_buffer_stdout()
        name: Any = group_name(group)  # The type of a name differs between releases.
        self._handle: Any = _symmetric_memory.rendezvous(self._bytes, name)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return this rank's memory from byte `offset` on, as a tensor with its own storage."""
        return self._handle.get_buffer(self._handle.rank, shape, dtype, offset // dtype.itemsize)

    def addresses(self, offset: int) -> Tensor:
        """Return the addresses of byte `offset` on all ranks, int64 [R]; this rank can use them."""
        pointers = [base + offset for base in self._handle.buffer_ptrs]
        return torch.tensor(pointers, dtype=torch.int64, device=self._bytes.device)

    def barrier(self) -> None:
        """Make the current stream wait for those of all ranks, and their writes visible to it.

        The barrier resets its signals, so it can be captured. After the time limit, the kernel of a
        waiting rank prints the missing rank (its number in the group), and its device fails.
        """
        self._handle.barrier(channel=0, timeout_ms=TIMEOUT_MS)


# Bytes of symmetric memory on this rank; torch's allocator does not count them.
_held: WeakKeyDictionary[PeerMemory, int] = WeakKeyDictionary()


def _line_buffer_stdout() -> None:
    """Line-buffer C's stdout, so that what kernels print survives an abort.

    A process whose device has failed is likely to abort, which loses unwritten output.
    """
    libc = ctypes.CDLL(None)
    libc.setlinebuf(ctypes.c_void_p.in_dll(libc, "stdout"))


class _Layout:
    """Aligned parts of one allocation, one after another."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def add(self, num_elements: int, dtype: torch.dtype) -> int:
        """Append a part; return its offset in bytes."""
        offset = self.num_bytes
        size = num_elements * dtype.itemsize
        self.num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT
        return offset


class ReceiveBuffer:
    """Rows [N, D], meta, fp32 [N + E], and places, int32 [R, T, K].

    Meta are a number for each row, then counts [S, L]; places are the rows of every (source, token)
    here. `rows_R`, `meta_R`, `places_R`: their addresses on every rank.
    """

    def __init__(self, group: dist.ProcessGroup, shape: Shape, device: torch.device) -> None:
        layout = _Layout()
        self._shape = shape
        self._rows = layout.add(shape.num_rows * shape.width, shape.dtype)
        self._meta = layout.add(shape.num_rows + shape.num_experts, torch.float32)
        self._places = layout.add(shape.num_places, torch.int32)
        self._memory = PeerMemory(group, layout.num_bytes, device)
        self._taken: list[StorageWeakRef] = []
        self.rows_R = self._memory.addresses(self._rows)
        self.meta_R = self._memory.addresses(self._meta)
        self.places_R = self._memory.addresses(self._places)

    @staticmethod
    def num_bytes(shape: Shape) -> int:
        """Return the bytes on each rank."""
        meta = 4 * (shape.num_rows + shape.num_experts + shape.num_places)
        return shape.num_rows * shape.width * shape.dtype.itemsize + meta

    def places(self, num_ranks: int, num_tokens: int, top_k: int) -> Tensor:
        """Return this rank's places [R, T, K]."""
        assert num_ranks * num_tokens * top_k == self._shape.num_places
        return self._memory.tensor(self._places, (num_ranks, num_tokens, top_k), torch.int32)

    def is_free(self) -> bool:
        """Return True if all tensors of the last `take` are gone."""
        # If an import failed inside the first call and was caught there, its traceback keeps the
        # frames of that call, and with them these tensors, until cycles are collected.
        if not all(storage.expired() for storage in self._taken):
            gc.collect()
        return all(storage.expired() for storage in self._taken)

    def take(self) -> tuple[Tensor, Tensor]:
        """Return rows and meta as new tensors, for one use."""
        shape = self._shape
        rows_ND = self._memory.tensor(self._rows, (shape.num_rows, shape.width), shape.dtype)
        num_numbers = shape.num_rows + shape.num_experts
        meta = self._memory.tensor(self._meta, (num_numbers,), torch.float32)
        self._taken = [StorageWeakRef(taken.untyped_storage()) for taken in (rows_ND, meta)]
        return rows_ND, meta


class Workspace:
    """Buffers that all layers of one shape use in turn.

    `table_RE`: int32, the counts of all sources. `slots_QD`, `meta_Q`: rows, and one fp32 number
    for each, that came back to this rank. `table_R`, `slots_R`, `meta_R`: their addresses on every
    rank. `gradients`: the receive buffer of backward passes.
    """

    def __init__(self, group: dist.ProcessGroup, shape: Shape, device: torch.device) -> None:
        layout = _Layout()
        table = group.size(), shape.num_experts
        table_at = layout.add(table[0] * table[1], torch.int32)
        slots_at = layout.add(shape.num_slots * shape.width, shape.dtype)
        meta_at = layout.add(shape.num_slots, torch.float32)
        memory = PeerMemory(group, layout.num_bytes, device)
        self.barrier = memory.barrier
        self.table_RE = memory.tensor(table_at, table, torch.int32)
        self.table_R = memory.addresses(table_at)
        self.slots_QD = memory.tensor(slots_at, (shape.num_slots, shape.width), shape.dtype)
        self.slots_R = memory.addresses(slots_at)
        self.meta_Q = memory.tensor(meta_at, (shape.num_slots,), torch.float32)
        self.meta_R = memory.addresses(meta_at)
        self.gradients = ReceiveBuffer(group, shape, device)

    @staticmethod
    def num_bytes(shape: Shape, num_ranks: int) -> int:
        """Return the bytes on each rank."""
        slots = shape.num_slots * (shape.width * shape.dtype.itemsize + 4)
        return slots + 4 * num_ranks * shape.num_experts + ReceiveBuffer.num_bytes(shape)


class DirectBuffers:
    """The buffers of one layer for one shape; a collective call of the group.

    `key`: the argument with which custom ops `find` it. `rank`: this rank's number in the group.
    `microbatches_in_flight`: the most whose forward pass is done and whose backward pass is not.

    Raises:
        ValueError: on all ranks, if the buffers do not fit in the memory of one.
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
        layer_bytes = microbatches_in_flight * ReceiveBuffer.num_bytes(shape)
        self.workspace = _workspace(group, shape, device, layer_bytes)
        self._receive_buffers = [
            ReceiveBuffer(group, shape, device) for _ in range(microbatches_in_flight)
        ]
        self._turn = 0
        _buffers[self.key] = self

    def next_receive_buffer(self) -> ReceiveBuffer:
        """Return the receive buffer of the next microbatch.

        Raises:
            ValueError: if tensors of its last use are still alive.
        """
        receive_buffer = self._receive_buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._receive_buffers)
        require(
            receive_buffer.is_free(),
            "microbatches_in_flight",
            len(self._receive_buffers),
            "be at least the number of forward passes that wait for their backward pass",
            "rows that an earlier pass received are still in use: raise it, for instance to the "
            "number of pipeline stages",
        )
        return receive_buffer


def find(key: str) -> DirectBuffers:
    """Return the buffers with this key."""
    return _buffers[key]


_numbers = itertools.count()
_buffers: WeakValueDictionary[str, DirectBuffers] = WeakValueDictionary()
_workspaces: WeakKeyDictionary[dist.ProcessGroup, WeakValueDictionary[Shape, Workspace]] = (
    WeakKeyDictionary()
)


def _workspace(
    group: dist.ProcessGroup, shape: Shape, device: torch.device, layer_bytes: int
) -> Workspace:
    """Return the workspace of this shape, new if no layer has one.

    Raises:
        ValueError: on all ranks, if a new one and `layer_bytes` do not fit on one rank.
    """
    of_group = _workspaces.setdefault(group, WeakValueDictionary())
    workspace = of_group.get(shape)
    # Ranks may free a layer at different times, and all must take the same branch.
    exists = all(gather_objects(group, workspace is not None))
    shared_bytes = 0 if exists else Workspace.num_bytes(shape, group.size())
    _log.info(
        "direct exchange, %s: %.2f GiB for one layer and %.2f GiB more for all of this shape",
        shape,
        layer_bytes / 2**30,
        shared_bytes / 2**30,
    )
    needed_gib = (layer_bytes + shared_bytes) / 2**30
    free_gib = free_bytes(group, device) / 2**30
    if needed_gib > free_gib:
        raise ValueError(
            f"the buffers of exchange='direct' must fit on every rank, got {needed_gib:.2f} GiB "
            f"for {shape} and a rank with {free_gib:.2f} GiB free; lower the capacity factor or "
            "microbatches_in_flight, or set exchange='alltoall'"
        )
    if workspace is None or not exists:
        workspace = of_group[shape] = Workspace(group, shape, device)
    return workspace


def _free_bytes(device: torch.device) -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def shares_workspace(group: dist.ProcessGroup, shape: Shape) -> bool:
    """Return whether a layer of the same shape has buffers on every rank; a collective call."""
    return all(gather_objects(group, shape in _workspaces.get(group, {})))


def direct_bytes(shape: Shape, *, num_ranks: int, num_buffers: int) -> int:
    """Return the bytes per rank of `num_buffers` receive buffers and the workspace they share."""
    return num_buffers * ReceiveBuffer.num_bytes(shape) + Workspace.num_bytes(shape, num_ranks)


def free_bytes(group: dist.ProcessGroup, device: torch.device) -> int:
    """Return the free memory of the rank that has least; a collective call."""
    return min(gather_objects(group, _free_bytes(device)))


def check_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group` if all its ranks can write to each other's memory; a collective call.

    Raises:
        ValueError: on all ranks, if one of them cannot.
    """
    if not torch.cuda.is_available():
        obstacles = ["no CUDA device"]
    elif group is None or group.size() == 1:
        obstacles = ["an expert-parallel group of one rank"]
    else:
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpus = gather_objects(group, (socket.gethostname(), str(device.uuid)))
        obstacles = gather_objects(group, _obstacle(gpus))
    for obstacle in obstacles:
        if obstacle:
            raise ValueError(
                "the ranks of exchange='direct' must have GPUs of one host that can access each "
                f"other, got {obstacle}; set exchange='alltoall'"
            )
    assert group is not None
    return group


def _obstacle(gpus: list[tuple[str, str]]) -> str:
    """Return why this rank cannot write to all `gpus`, (host, UUID) by rank; "" if it can."""
    hosts = sorted({host for host, _ in gpus})
    if len(hosts) > 1:
        return f"an expert-parallel group that spans the hosts {', '.join(hosts)}"
    here = torch.cuda.current_device()
    peers = {uuid for _, uuid in gpus}
    for number in range(torch.cuda.device_count()):
        uuid = str(torch.cuda.get_device_properties(number).uuid)
        accessible = number == here or torch.cuda.can_device_access_peer(here, number)
        if uuid in peers and not accessible:
            return f"GPU {here}, which cannot access GPU {number}"
    return ""


def gather_objects(group: dist.ProcessGroup, value: _T) -> list[_T]:
    """Return the values of all ranks, by rank, on the host; a collective call."""
    gather: Callable[..., None] = dist.all_gather_object
    values: list[Any] = [None] * group.size()
    gather(values, value, group=group)
    return values


def allocated_gib() -> float:
    """Return the peak GiB of tensors, symmetric memory included, since torch's peak was reset."""
    return (torch.cuda.max_memory_allocated() + sum(_held.values())) / 2**30


def reserved_gib() -> float:
    """Return the peak GiB of torch's allocator, graph pools included, likewise."""
    return (torch.cuda.max_memory_reserved() + sum(_held.values())) / 2**30
