"""Symmetric memory: the same buffers on every rank of a group, which all its ranks can write to.

It uses the CUDA backend of torch's symmetric memory, and neither NVSHMEM nor multicast. The first
eager pass with a shape allocates, after the ranks have compared that shape: a collective call.

All layers of a group share two allocations, whatever their shapes: one that tokens arrive in, and
one that rows come home to (`memory.DirectBuffers`). There are two, because a rank may send the
tokens of the next layer while another rank still sums the rows of this layer. A shape that needs
more memory gets larger allocations; earlier ones stay, since captured graphs hold their addresses.
All live as long as the process group, and as long as an autograd node of a pass.

The driver allocates this memory, so torch's allocator does not count it. `allocated_gib` adds the
memory in use to torch's peak.
"""

import ctypes
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.exchange.hosts import Hosts, gather_objects, groups_of, machine
from padded_dispatch.exchange.mirror import time_limit
from padded_dispatch.exchange.nvlink import has_links, linked
from padded_dispatch.memory import DirectBuffers, aligned
from padded_dispatch.utils.phases import is_capturing, unseen

_TRIAL_BYTES = 4096

_log = logging.getLogger("padded_dispatch")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes that decide the buffers: P, K, L, D, the dtype of rows; and a second landing."""

    num_slots: int
    top_k: int
    num_local_experts: int
    width: int
    dtype: torch.dtype
    sends_again: bool = False

    def sizes(self, num_ranks: int) -> DirectBuffers:
        """Return the bytes of the buffers."""
        return DirectBuffers(
            num_sources=num_ranks,
            num_slots=self.num_slots,
            top_k=self.top_k,
            num_local_experts=self.num_local_experts,
            token_bytes=self.width * self.dtype.itemsize,
            sends_again=self.sends_again,
        )


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

    @cached_property
    def address_R(self) -> Tensor:  # noqa: N802
        """The address of the first byte on all ranks, int64, as this rank can use it."""
        return torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=self._bytes.device)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return this rank's memory from byte `offset` on, as a tensor with its own storage."""
        return self._handle.get_buffer(self._handle.rank, shape, dtype, offset // dtype.itemsize)


# Bytes in use since `reset_peaks`: memory outlives the layers that it was allocated for.
_used: WeakKeyDictionary[PeerMemory, int] = WeakKeyDictionary()


def _line_buffer_stdout() -> None:
    """Line-buffer C's stdout, so that what kernels print survives an abort.

    A process whose device has failed is likely to abort, which loses unwritten output.
    """
    libc = ctypes.CDLL(None)
    libc.setlinebuf(ctypes.c_void_p.in_dll(libc, "stdout"))


@dataclass(kw_only=True, eq=False)
class SharedMemory:
    """Memory that the layers of a group share.

    Attributes:
        arriving: allocations in which tokens arrive; the last one is the largest.
        coming: allocations in which rows come home, likewise.
        buffers: views of them, by shape; they take no memory of the device.
        is_open: whether an eager pass has pushed and not returned.
    """

    arriving: list[PeerMemory] = field(default_factory=list)
    coming: list[PeerMemory] = field(default_factory=list)
    buffers: "dict[Shape, Buffers]" = field(default_factory=dict)
    is_open: bool = False

    def note(self, *, is_open: bool) -> None:
        """Note that an eager pass has pushed, or returned; a capture does neither."""
        if not is_capturing():
            self.is_open = is_open


@dataclass(frozen=True, kw_only=True, eq=False)
class Buffers:
    """Buffers of one shape, which the next pass of any layer overwrites.

    Attributes:
        shared: the memory that they are views of.
        memories: the allocations, which live as long as these buffers, and `sizes`, the bytes that
            the shape needs of each.
        rank: this rank's number in the group.
        barrier: see `PeerMemory`.
        rows_SPD: rows that arrive from the other ranks, in order, [S - 1, P, D].
        again_SPD: tokens that arrive again beside their gradients; None if they are kept.
        expert_SPK, place_SPK, prob_SPK, count_SL: their plan, see `exchange.collectives.Arrived`.
        arriving_R: addresses of `rows_SPD` on every rank.
        again_at, plan_at: bytes from there to `again_SPD` and to `expert_SPK`, behind which the
            rest of the plan lies.
        home_QD: rows that come home, [P * K, D].
        beside_PK: fp32 numbers that come home with these rows.
        coming_R: addresses of `home_QD` on every rank.
        beside_at: bytes from there to `beside_PK`.
    """

    shared: SharedMemory
    memories: tuple[PeerMemory, ...]
    sizes: tuple[int, ...]
    rank: int
    barrier: Callable[[], None]
    rows_SPD: Tensor
    again_SPD: Tensor | None
    expert_SPK: Tensor
    place_SPK: Tensor
    prob_SPK: Tensor
    count_SL: Tensor
    arriving_R: Tensor
    again_at: int
    plan_at: int
    home_QD: Tensor
    beside_PK: Tensor
    coming_R: Tensor
    beside_at: int


_shared: WeakKeyDictionary[dist.ProcessGroup, SharedMemory] = WeakKeyDictionary()


def shared_memory(group: dist.ProcessGroup) -> SharedMemory:
    """Return the memory that the layers of a group share."""
    return _shared.setdefault(group, SharedMemory())


@unseen()
def buffers_for(
    group: dist.ProcessGroup,
    shape: Shape,
    device: torch.device,
    whole: dist.ProcessGroup | None = None,
) -> Buffers:
    """Return buffers of a shape; the first call with it is one of the group, and may allocate.

    Raise on all ranks of `whole`, the groups of all hosts together, if they do not fit on one of
    them, and in a capture.
    """
    shared = shared_memory(group)
    if shape not in shared.buffers:
        if is_capturing():
            raise ValueError(
                "buffers of exchange='direct' must exist before a CUDA graph is captured, got the "
                f"new {shape}; run one eager step with the same shapes before capturing"
            )
        shared.buffers[shape] = _make_buffers(group, shared, shape, device, whole or group)
    buffers = shared.buffers[shape]
    for memory, size in zip(buffers.memories, buffers.sizes, strict=True):
        _used[memory] = max(size, _used.get(memory, 0))
    return buffers


def _make_buffers(
    group: dist.ProcessGroup,
    shared: SharedMemory,
    shape: Shape,
    device: torch.device,
    whole: dist.ProcessGroup,
) -> Buffers:
    num_ranks, num_slots, top_k = group.size(), shape.num_slots, shape.top_k
    sizes = shape.sizes(num_ranks)
    needed = sizes.arriving, sizes.coming
    again_at, kind = sizes.landing, sizes.plan_part
    plan_at, beside_at = again_at + sizes.second_landing, sizes.home_rows
    # Earlier allocations stay, so each is at least half as large again: growing shapes need few.
    new = [
        (memories, aligned(max(size, memories[-1].num_bytes * 3 // 2 if memories else 0)))
        for memories, size in zip((shared.arriving, shared.coming), needed, strict=True)
        if not memories or memories[-1].num_bytes < size
    ]
    if new:
        _require_room(whole, shape, sum(size for _, size in new), device)
    for memories, size in new:
        memories.append(PeerMemory(group, size, device))
    arriving, coming = shared.arriving[-1], shared.coming[-1]
    landing, by_choice = (num_ranks - 1, num_slots, shape.width), (num_ranks, num_slots, top_k)
    counts = num_ranks, shape.num_local_experts
    again_SPD = arriving.tensor(again_at, landing, shape.dtype) if shape.sends_again else None
    return Buffers(
        shared=shared,
        memories=(arriving, coming),
        sizes=needed,
        rank=group.rank(),
        barrier=arriving.barrier,
        rows_SPD=arriving.tensor(0, landing, shape.dtype),
        again_SPD=again_SPD,
        expert_SPK=arriving.tensor(plan_at, by_choice, torch.int32),
        place_SPK=arriving.tensor(plan_at + kind, by_choice, torch.int32),
        prob_SPK=arriving.tensor(plan_at + 2 * kind, by_choice, torch.float32),
        count_SL=arriving.tensor(plan_at + 3 * kind, counts, torch.int32),
        arriving_R=arriving.address_R,
        again_at=again_at,
        plan_at=plan_at,
        home_QD=coming.tensor(0, (num_slots * top_k, shape.width), shape.dtype),
        beside_PK=coming.tensor(beside_at, (num_slots, top_k), torch.float32),
        coming_R=coming.address_R,
        beside_at=beside_at,
    )


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


def check_group(
    group: dist.ProcessGroup | None, *, over_nvlink: bool, hosts: Hosts | None = None
) -> dist.ProcessGroup:
    """Return a group whose ranks can write to each other's memory, else raise on all ranks.

    It is `group`, or with `hosts` that of this rank's host; then all hosts must have such groups. A
    process may not see the GPUs of other ranks, so in the end all ranks try to allocate and map a
    little memory. `over_nvlink` requires NVLink, since over PCIe collectives are faster.
    """
    if group is None or group.size() == 1:
        raise ValueError(_refusal("an expert-parallel group of one rank"))
    seats = gather_objects(group, _Seat(uuid=_uuid()))
    if blind := [seat.host for seat in seats if not seat.uuid]:
        raise ValueError(_refusal(f"no CUDA device on {blind[0]}"))
    device, inside = torch.device("cuda", torch.cuda.current_device()), group
    if hosts is not None:
        inside, _ = groups_of(group, device)
        seats = [seats[rank] for rank in hosts.ranks_HG[hosts.own[0]]]
    _require_none(group, hosts, _obstacle(seats, over_nvlink=over_nvlink))
    _require_none(group, hosts, _trial(inside))
    shared_memory(inside)  # Known once all have mapped memory: see `_trial`.
    return inside


def _require_none(group: dist.ProcessGroup, hosts: Hosts | None, obstacle: str) -> None:
    """Raise on all ranks if one has an obstacle."""
    if obstacle and hosts is not None:
        obstacle += f" on {socket.gethostname()}"
    for found in gather_objects(group, obstacle):
        if found:
            raise ValueError(_refusal(found))


def _refusal(obstacle: str) -> str:
    return (
        "the ranks of exchange='direct' must have GPUs of one host that can access each other, "
        f"got {obstacle}; set exchange='alltoall'"
    )


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
    return f"{machine()}, {found.st_dev}, {found.st_ino}"


@dataclass(frozen=True, kw_only=True)
class _Seat:
    """The place of a rank: its machine, host name, `_folder`, process and GPU."""

    machine: str = field(default_factory=machine)
    host: str = field(default_factory=socket.gethostname)
    folder: str = field(default_factory=_folder)
    pid: int = field(default_factory=os.getpid)
    uuid: str


def _uuid() -> str:
    """Return the identifier of this rank's GPU; "" if it has none."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _obstacle(seats: list[_Seat], *, over_nvlink: bool) -> str:
    """Return why this rank cannot write to the memory of all `seats`; "" if it can.

    It raises nothing, since other ranks wait for the answer.
    """
    try:
        return _find_obstacle(seats, over_nvlink=over_nvlink)
    except (OSError, RuntimeError, AttributeError) as error:
        return f"{error!r:.200} from a question about its GPUs"


def _find_obstacle(seats: list[_Seat], *, over_nvlink: bool) -> str:
    if (backend := _backend()) != "CUDA":
        return f"the backend {backend} of torch's symmetric memory, which has no barrier on streams"
    # Several machines are one host in an NVLink domain alone, where handles go through a store.
    if len({seat.machine for seat in seats}) == 1:
        if len({seat.folder for seat in seats}) > 1:
            hosts = ", ".join(sorted({seat.host for seat in seats}))
            return f"an expert-parallel group on {hosts} without a common TMPDIR (or /tmp)"
        if len({seat.pid for seat in seats}) < len(seats):
            return "ranks of containers that share TMPDIR (or /tmp), and PIDs"
    here = torch.cuda.current_device()
    peers = {seat.uuid for seat in seats}
    not_visible = set(peers)
    for number in range(torch.cuda.device_count()):
        uuid = str(torch.cuda.get_device_properties(number).uuid)
        not_visible.discard(uuid)
        accessible = number == here or torch.cuda.can_device_access_peer(here, number)
        if uuid in peers and not accessible:
            return f"GPU {here}, which cannot access GPU {number}"
        if uuid in peers and number != here and over_nvlink and not linked(here, number):
            return f"GPU {here}, which has no NVLink to GPU {number}"
    if not_visible and over_nvlink and not has_links():
        return f"GPU {here}, which has no NVLink"
    return ""


def _backend() -> str:
    """Return the backend that torch's symmetric memory uses; a process can have one only.

    Megatron-FSDP may choose NCCL's, and TORCH_SYMMMEM any.
    """
    from torch.distributed import _symmetric_memory

    device = torch.device("cuda", torch.cuda.current_device())
    ask: Callable[..., str | None] = getattr(_symmetric_memory, "get_backend", lambda device: None)
    return ask(device) or "CUDA"  # Torch 2.8 and earlier have no other.


def _trial(group: dist.ProcessGroup) -> str:
    """Return why memory cannot be mapped by all ranks of the group; "" if it can."""
    if group in _shared:
        return ""
    try:
        PeerMemory(group, _TRIAL_BYTES, torch.device("cuda", torch.cuda.current_device()))
    except RuntimeError as error:
        return f"{str(error).splitlines()[0]!r} from an attempt to map memory"
    return ""


def reset_peaks() -> None:
    """Reset what `allocated_gib` counts: torch's peak, and the symmetric memory in use."""
    torch.cuda.reset_peak_memory_stats()
    _used.clear()


def allocated_gib() -> float:
    """Return torch's peak since `reset_peaks`, and symmetric memory of layers built since, GiB."""
    return (torch.cuda.max_memory_allocated() + sum(_used.values())) / 2**30
