"""Direct stores between processes without GPUs: ranks map each other's files.

For whole trainings, in which Triton's interpreter would take minutes: torch stands in for the
kernels, which `tests/exchange/test_direct.py` runs. Ops, gradients, buffers, turns and barriers are
real.

Letters as in `padded_dispatch.exchange.direct`.
"""

import ctypes
import mmap
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.exchange import direct, symmetric_memory
from padded_dispatch.kernels import direct as kernels
from padded_dispatch.kernels import rows
from padded_dispatch.utils.patches import Patches
from tests.support.stream_order import StreamOrder


class ProcessMemory:
    """`PeerMemory` of processes. Its tensors cannot be resized, as on GPUs."""

    order: StreamOrder

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        self._group, self._rank = group, group.rank()
        with tempfile.NamedTemporaryFile(prefix="padded_dispatch-") as own:
            own.write(b"\xff" * num_bytes)  # NaN in all dtypes
            own.flush()
            paths = symmetric_memory.gather_objects(group, own.name)
            self._parts = [_mapped(path) for path in paths]
            dist.barrier(group)  # All have mapped the file, which goes with its last mapping.

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return this rank's memory from byte `offset` on."""
        size = int(np.prod(shape)) * dtype.itemsize
        part = self._parts[self._rank][offset : offset + size]
        self.order.watch(part.ctypes.data)
        return torch.from_numpy(part).view(dtype).view(shape)

    def addresses(self, offset: int) -> Tensor:
        """Return the addresses of byte `offset` on all ranks."""
        return torch.tensor([part.ctypes.data + offset for part in self._parts])

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.order.barrier()
        dist.barrier(self._group)


def _mapped(path: str) -> np.ndarray:
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


@contextmanager
def direct_between_processes() -> Iterator[StreamOrder]:
    """Give direct stores this memory, and follow what orders its uses."""
    ProcessMemory.order = StreamOrder()
    with Patches() as patches, ProcessMemory.order.followed():
        patches.set(symmetric_memory, "PeerMemory", ProcessMemory)
        patches.set(symmetric_memory, "_free_bytes", lambda device: 2**40)
        patches.set(direct, "check_group", lambda group: group)
        patches.set(direct, "_check", lambda tokens_TD, probs_TE: None)
        for module, functions in (
            (kernels, (push_counts, place_rows, push_tokens, copy_rows, return_rows)),
            (rows, (sum_rows, scatter_meta)),
        ):
            for function in functions:
                patches.set(module, function.__name__, function)
        yield ProcessMemory.order


def _at(address: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the memory at an address; no element of it is read before it is indexed."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = (ctypes.c_char * size).from_address(int(address))
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _written(addresses_R: Tensor) -> Tensor:
    """Return the addresses; peers write to this rank's own one, which is watched."""
    for address in addresses_R.tolist():
        ProcessMemory.order.write(address)
    return addresses_R


def _read(tensor: Tensor) -> Tensor:
    """Return a tensor that this rank reads; ops inside of ops are not followed."""
    ProcessMemory.order.use(tensor.untyped_storage().data_ptr())
    return tensor


def push_counts(kept_E: Tensor, table_R: Tensor, rank: int) -> None:
    """Stand in for the kernel of that name, as all below."""
    for address in _written(table_R):
        _at(address, (len(table_R), len(kept_E)), torch.int32)[rank] = kept_E


def place_rows(
    table_RE: Tensor,
    rank: int,
    shift_E: Tensor,
    offsets_LS: Tensor,
    count_SL: Tensor,
    pool_slots: int,
    experts_per_pool: int,
) -> None:
    num_local, num_ranks = offsets_LS.shape
    _read(table_RE)
    ends_RLS = table_RE.view(num_ranks, num_ranks, num_local).permute(1, 2, 0).flatten(1).cumsum(1)
    ends_RLS = ends_RLS.view(num_ranks, num_local, num_ranks).int()
    first_E = ends_RLS[:, :, rank].flatten() - table_RE[rank]
    shift_E.copy_(first_E - _first_slots(table_RE[rank], pool_slots, experts_per_pool))
    offsets_LS.copy_(ends_RLS[rank])
    count_SL.copy_(table_RE.view(num_ranks, num_ranks, num_local)[:, rank].flatten())


def _first_slots(kept_E: Tensor, pool_slots: int, experts_per_pool: int) -> Tensor:
    """Return the slot of each expert's first row at a source, int32 [E]."""
    kept_GX = kept_E.view(-1, experts_per_pool)
    first_G1 = torch.arange(len(kept_GX))[:, None] * pool_slots
    return (first_G1 + kept_GX.cumsum(1) - kept_GX).flatten().int()


def push_tokens(
    tokens_TD: Tensor,
    probs_TE: Tensor | None,
    slot_of_TK: Tensor,
    expert_of_TK: Tensor,
    shift_E: Tensor,
    rows_R: Tensor,
    probs_R: Tensor,
    places_R: Tensor,
    rank: int,
) -> None:
    """Let all rows of a token cross."""
    t, k = (slot_of_TK >= 0).nonzero(as_tuple=True)
    e = expert_of_TK[t, k].long()
    place = (slot_of_TK[t, k] + shift_E[e]).long()
    for to, (rows_at, probs_at) in enumerate(zip(_written(rows_R), _written(probs_R), strict=True)):
        here = e // (len(shift_E) // len(rows_R)) == to
        if not here.any():
            continue
        num_rows = int(place[here].max()) + 1
        rows_ND = _at(rows_at, (num_rows, tokens_TD.shape[1]), tokens_TD.dtype)
        rows_ND[place[here]] = tokens_TD[t[here]]
        if probs_TE is not None:
            probs_N = _at(probs_at, (num_rows,), torch.float32)
            probs_N[place[here]] = probs_TE[t[here], e[here]].float()


def copy_rows(rows_ND: Tensor, places_RTK: Tensor, rank: int) -> None:
    pass


def return_rows(
    packed_ND: Tensor,
    probs_N: Tensor | None,
    offsets_LS: Tensor,
    slots_R: Tensor,
    meta_R: Tensor,
    rank: int,
    pool_slots: int,
    experts_per_pool: int,
) -> None:
    num_local, num_ranks = offsets_LS.shape
    slots_R, meta_R = _written(slots_R), _written(meta_R)
    ends = offsets_LS.flatten().tolist()
    own = slice(rank * num_local, (rank + 1) * num_local)
    # Pools have experts of one rank each: the counts of others do not matter.
    kept_SE = offsets_LS.new_zeros(num_ranks, num_ranks * num_local)
    counts = torch.tensor(ends).diff(prepend=torch.tensor([0])).view(offsets_LS.shape)
    kept_SE[:, own] = counts.T.int()
    for source in range(num_ranks):
        first_E = _first_slots(kept_SE[source], pool_slots, experts_per_pool)
        for local, slot in enumerate(first_E[own].tolist()):
            run = local * num_ranks + source
            begin, end = ends[run - 1] if run else 0, ends[run]
            shape = slot + end - begin, packed_ND.shape[1]
            if end > begin:
                _at(slots_R[source], shape, packed_ND.dtype)[slot:] = packed_ND[begin:end]
            if end > begin and probs_N is not None:
                _at(meta_R[source], shape[:1], torch.float32)[slot:] = probs_N[begin:end]


def sum_rows(rows_ND: Tensor, slot_of_TK: Tensor) -> Tensor:
    real_TK1 = (slot_of_TK >= 0)[:, :, None]
    rows_TKD = torch.where(real_TK1, _read(rows_ND)[slot_of_TK.clamp(min=0).long()].float(), 0)
    return rows_TKD.sum(1).to(rows_ND.dtype)


def scatter_meta(
    meta_GP: Tensor, slot_of_TK: Tensor, expert_of_TK: Tensor, pool_slots: int, num_experts: int
) -> Tensor:
    values_TE = meta_GP.new_zeros(len(slot_of_TK), num_experts)
    t, k = (slot_of_TK >= 0).nonzero(as_tuple=True)
    values_TE[t, expert_of_TK[t, k].long()] = _read(meta_GP).flatten()[slot_of_TK[t, k].long()]
    return values_TE
