"""Symmetric memory: the same buffers on every rank of a group, which all its ranks can write to.

It uses the CUDA backend of torch's symmetric memory, and neither NVSHMEM nor multicast. The first
eager pass with a shape allocates, after the ranks have compared that shape: a collective call.

All layers of a group share two allocations, whatever their shapes: one that tokens arrive in, and
one that rows come home to, (S - 1) * P * D and P * K * D elements per rank. There are two, because
a rank may send the tokens of the next layer while another rank still sums the rows of this layer. A
shape that needs more memory gets larger allocations; earlier ones stay, since captured graphs hold
their addresses. All live as long as the process group, and as long as an autograd node of a pass.

The driver allocates this memory, so torch's allocator does not count it. `allocated_gib` adds the
memory in use to torch's peak.
"""

import ctypes
import logging
import math
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.exchange.mirror import time_limit
from padded_dispatch.utils.phases import is_capturing

_ALIGNMENT = 256
_NATIVE_ATOMICS = 3  # the driver's attribute of two GPUs that is 1 only if NVLink connects them
_TRIAL_BYTES = 4096

_log = logging.getLogger("padded_dispatch")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes that decide the buffers: P, K, L, D, and the dtype of rows."""

    num_slots: int
    top_k: int
    num_local_experts: int
    width: int
    dtype: torch.dtype


class PeerMemory:
    """The same number of bytes on every rank, mapped by all ranks of the group.

    Creating it is a collective call of the group, outside of captures.

    Attributes:
        num_bytes: bytes on each rank.
        barrier: makes the current stream wait for the streams of all ranks, and their writes
            visible to it. It resets its signals, so it can be captured. Peers may be compiling
            kernels, reading data or writing a checkpoint, so it waits as long as a collective of
            the group could when this memory was created. Then its kernel prints the missing rank
            (its number in the group), and its device fails.
    """

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory

        # Not `_symmetric_memory.empty`. Its pool keeps freed memory, and may return the middle of a
        # larger allocation, while a handle gives the address of the allocation's beginning.
        self._bytes = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        _line_buffer_stdout()
        self.num_bytes = num_bytes
        self._handle: Any = _symmetric_memory.rendezvous(self._bytes, group.group_name)
        timeout_ms = int(1000 * time_limit(group))
        self.barrier = partial(self._handle.barrier, channel=0, timeout_ms=timeout_ms)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return this rank's memory from byte `offset` on, as a tensor with its own storage."""
        return self._handle.get_buffer(self._handle.rank, shape, dtype, offset // dtype.itemsize)

    def addresses(self, offset: int) -> Tensor:
        """Return the addresses of byte `offset` on all ranks, int64 [R]; this rank can use them."""
        pointers = [base + offset for base in self._handle.buffer_ptrs]
        return torch.tensor(pointers, dtype=torch.int64, device=self._bytes.device)


# Bytes in use since `reset_peaks`: memory outlives the layers that it was allocated for.
_used: WeakKeyDictionary[PeerMemory, int] = WeakKeyDictionary()


def _line_buffer_stdout() -> None:
    """Line-buffer C's stdout, so that what kernels print survives an abort.

    A process whose device has failed is likely to abort, which loses unwritten output.
    """
    libc = ctypes.CDLL(None)
    libc.setlinebuf(ctypes.c_void_p.in_dll(libc, "stdout"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Buffers:
    """Buffers of one shape, which the next pass of any layer overwrites.

    Attributes:
        rank: this rank's number in the group.
        barrier: see `PeerMemory`.
        rows_SPD: rows that arrive from the other ranks, in order, [S - 1, P, D].
        expert_SPK, place_SPK, prob_SPK, count_SL: their plan, see `exchange.collectives.Arrived`.
        rows_R: addresses of `rows_SPD` on every rank.
        plan_R: addresses of `expert_SPK` on every rank; the rest of the plan lies behind it.
        home_QD: rows that come home, [P * K, D].
        beside_PK: fp32 numbers that come home with these rows.
        homes_R, besides_R: addresses of `home_QD` and of `beside_PK` on every rank.
    """

    rank: int
    barrier: Callable[[], None]
    rows_SPD: Tensor
    expert_SPK: Tensor
    place_SPK: Tensor
    prob_SPK: Tensor
    count_SL: Tensor
    rows_R: Tensor
    plan_R: Tensor
    home_QD: Tensor
    beside_PK: Tensor
    homes_R: Tensor
    besides_R: Tensor


# Memory that the layers of a group share: allocations in which tokens arrive, and allocations in
# which rows come home. The last one of each list is the largest.
_Shared = tuple[list[PeerMemory], list[PeerMemory]]
_shared: WeakKeyDictionary[dist.ProcessGroup, _Shared] = WeakKeyDictionary()


def buffers_for(group: dist.ProcessGroup, shape: Shape, device: torch.device) -> Buffers:
    """Return buffers of a shape; a collective call of the group, which may allocate.

    Raise on all ranks if they do not fit on one of them, and in a capture.
    """
    if is_capturing():
        raise ValueError(
            "buffers of exchange='direct' must exist before a CUDA graph is captured, got the "
            f"new {shape}; run one eager step with the same shapes before capturing"
        )
    known = _shared.setdefault(group, ([], []))
    num_ranks, num_slots, top_k = group.size(), shape.num_slots, shape.top_k
    itemsize, choices = shape.dtype.itemsize, num_slots * top_k
    arriving_shape = num_ranks - 1, num_slots, shape.width
    plan_at = _aligned(math.prod(arriving_shape) * itemsize)
    beside_at = _aligned(choices * shape.width * itemsize)
    kind = num_ranks * choices * 4  # bytes of each of experts, places and probabilities
    needed = plan_at + 3 * kind + num_ranks * shape.num_local_experts * 4, beside_at + choices * 4
    # Earlier allocations stay, so each is at least half as large again: growing shapes need few.
    new = [
        (memories, _aligned(max(size, memories[-1].num_bytes * 3 // 2 if memories else 0)))
        for memories, size in zip(known, needed, strict=True)
        if not memories or memories[-1].num_bytes < size
    ]
    if new:
        _require_room(group, shape, sum(size for _, size in new), device)
    for memories, size in new:
        memories.append(PeerMemory(group, size, device))
    arriving, coming = (memories[-1] for memories in known)
    for memory, size in zip((arriving, coming), needed, strict=True):
        _used[memory] = max(size, _used.get(memory, 0))
    by_choice = num_ranks, num_slots, top_k
    counts = num_ranks, shape.num_local_experts
    return Buffers(
        rank=group.rank(),
        barrier=arriving.barrier,
        rows_SPD=arriving.tensor(0, arriving_shape, shape.dtype),
        expert_SPK=arriving.tensor(plan_at, by_choice, torch.int32),
        place_SPK=arriving.tensor(plan_at + kind, by_choice, torch.int32),
        prob_SPK=arriving.tensor(plan_at + 2 * kind, by_choice, torch.float32),
        count_SL=arriving.tensor(plan_at + 3 * kind, counts, torch.int32),
        rows_R=arriving.addresses(0),
        plan_R=arriving.addresses(plan_at),
        home_QD=coming.tensor(0, (choices, shape.width), shape.dtype),
        beside_PK=coming.tensor(beside_at, (num_slots, top_k), torch.float32),
        homes_R=coming.addresses(0),
        besides_R=coming.addresses(beside_at),
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _require_room(
    group: dist.ProcessGroup, shape: Shape, num_bytes: int, device: torch.device
) -> None:
    """Raise on all ranks if memory does not fit on one of them; else log its size."""
    free_gib = min(gather_objects(group, _free_bytes(device))) / 2**30
    needed_gib = num_bytes / 2**30
    if needed_gib > free_gib:
        raise ValueError(
            f"the buffers of exchange='direct' must fit on every rank, got "
            f"{needed_gib:.2f} GiB for {shape} and a rank with {free_gib:.2f} GiB free; "
            "lower the number of tokens per rank, or set exchange='alltoall'"
        )
    if dist.get_rank() == 0:
        _log.info(
            "direct exchange: %.2f GiB on each of %d ranks, shared by all layers, for %d tokens",
            needed_gib,
            group.size(),
            shape.num_slots,
        )


def _free_bytes(device: torch.device) -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def check_group(group: dist.ProcessGroup | None, *, over_nvlink: bool) -> dist.ProcessGroup:
    """Return `group` if all its ranks can write to each other's memory, else raise on all.

    A process may not see the GPUs of other ranks, so in the end all ranks try to allocate and map a
    little memory. `over_nvlink` requires NVLink, since over PCIe collectives are faster.
    """
    if not torch.cuda.is_available():
        obstacles = ["no CUDA device"]
    elif group is None or group.size() == 1:
        obstacles = ["an expert-parallel group of one rank"]
    else:
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        seats = gather_objects(group, _Seat(uuid=str(device.uuid)))
        obstacles = gather_objects(group, _obstacle(seats, over_nvlink=over_nvlink))
        if not any(obstacles):
            obstacles = gather_objects(group, _trial(group))
    for obstacle in obstacles:
        if obstacle:
            raise ValueError(
                "the ranks of exchange='direct' must have GPUs of one host that can access each "
                f"other, got {obstacle}; set exchange='alltoall'"
            )
    assert group is not None
    _shared.setdefault(group, ([], []))  # Known once all have mapped memory: see `_trial`.
    return group


def _folder() -> str:
    """Return an identifier of the folder through which torch sends memory handles to other ranks.

    Torch creates sockets there, named by PID. Containers of one host may share the folder, or have
    different folders at the same path, as hosts with the same name have.
    """
    names = "TMPDIR", "TMP", "TEMP", "TEMPDIR"  # As torch looks for it.
    path = Path(next((os.environ[name] for name in names if name in os.environ), "/tmp"))
    if not path.is_dir():
        return f"no {path}"  # `_trial` will then fail, on all ranks.
    found = path.stat()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}, {found.st_dev}, {found.st_ino}"


@dataclass(frozen=True, kw_only=True)
class _Seat:
    """The place of a rank: its host, `_folder`, process and GPU."""

    host: str = field(default_factory=socket.gethostname)
    folder: str = field(default_factory=_folder)
    pid: int = field(default_factory=os.getpid)
    uuid: str


def _obstacle(seats: list[_Seat], *, over_nvlink: bool) -> str:
    """Return why this rank cannot write to the memory of all `seats`; "" if it can."""
    if len({seat.folder for seat in seats}) > 1:
        hosts = ", ".join(sorted({seat.host for seat in seats}))
        return f"an expert-parallel group on {hosts} without a common TMPDIR (or /tmp)"
    if len({seat.pid for seat in seats}) < len(seats):
        return "ranks of containers that share TMPDIR (or /tmp), and PIDs"
    here = torch.cuda.current_device()
    peers = {seat.uuid for seat in seats}
    for number in range(torch.cuda.device_count()):
        uuid = str(torch.cuda.get_device_properties(number).uuid)
        accessible = number == here or torch.cuda.can_device_access_peer(here, number)
        if uuid in peers and not accessible:
            return f"GPU {here}, which cannot access GPU {number}"
        if uuid in peers and number != here and over_nvlink and not _linked(here, number):
            return f"GPU {here}, which has no NVLink to GPU {number}"
    return ""


def _linked(number: int, other: int) -> bool:
    """Return whether two GPUs that this process sees reach each other over NVLink."""
    found = ctypes.c_int(0)
    driver = ctypes.CDLL("libcuda.so.1")
    failed = driver.cuDeviceGetP2PAttribute(ctypes.byref(found), _NATIVE_ATOMICS, number, other)
    return failed == 0 and found.value == 1


def _trial(group: dist.ProcessGroup) -> str:
    """Return why memory cannot be mapped by all ranks of the group; "" if it can."""
    if group in _shared:
        return ""
    try:
        PeerMemory(group, _TRIAL_BYTES, torch.device("cuda", torch.cuda.current_device()))
    except RuntimeError as error:
        return f"{str(error).splitlines()[0]!r} from an attempt to map memory"
    return ""


def gather_objects(group: dist.ProcessGroup, value: _T) -> list[_T]:
    """Return the values of all ranks, by rank, on the host; a collective call."""
    gather: Callable[..., None] = dist.all_gather_object
    values: list[Any] = [None] * group.size()
    gather(values, value, group=group)
    return values


def reset_peaks() -> None:
    """Reset what `allocated_gib` counts: torch's peak, and the symmetric memory in use."""
    torch.cuda.reset_peak_memory_stats()
    _used.clear()


def allocated_gib() -> float:
    """Return torch's peak since `reset_peaks`, and symmetric memory of layers built since, GiB."""
    return (torch.cuda.max_memory_allocated() + sum(_used.values())) / 2**30
