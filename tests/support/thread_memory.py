"""Threads as ranks with direct stores: they share the memory of one process.

Everything but the memory and its barriers is real: the wire, its collective calls, and the kernels,
in Triton's interpreter. Memory is NaN, or -1, before it is written.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.exchange import direct, symmetric_memory


class ThreadMemory:
    """`PeerMemory` of threads; `num_barriers` is how often each rank came to a barrier."""

    num_barriers: ClassVar[dict[int, int]] = {}

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._group, self._rank = group, group.rank()
        own = torch.full((num_bytes,), 255, dtype=torch.uint8)
        addresses = symmetric_memory.gather_objects(group, own.data_ptr())
        self._own, self._addresses = own.numpy(), torch.tensor(addresses)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return this rank's memory from byte `offset` on."""
        size = int(np.prod(shape)) * dtype.itemsize
        return torch.from_numpy(self._own[offset : offset + size]).view(dtype).view(shape)

    def addresses(self, offset: int) -> Tensor:
        """Return the addresses of byte `offset` on all ranks."""
        return self._addresses + offset

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.num_barriers[self._rank] = self.num_barriers.get(self._rank, 0) + 1
        self._group.barrier().wait()


def _gather_objects(group: dist.ProcessGroup, value: int) -> list[int]:
    gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(gathered, torch.tensor([value]), group=group)
    return [int(one) for one in gathered]


@contextmanager
def threads_as_ranks(free_bytes: int = 2**40) -> Iterator[None]:
    """Let threads be ranks, with shared memory instead of symmetric memory."""
    with (
        patch.object(symmetric_memory, "PeerMemory", ThreadMemory),
        patch.object(symmetric_memory, "_free_bytes", lambda device: free_bytes),
        patch.object(symmetric_memory, "gather_objects", _gather_objects),
        patch.object(direct, "check_group", lambda group, *, over_nvlink: over_nvlink or group),
        patch.object(direct, "DEVICE", "cpu"),
        patch.object(ThreadMemory, "num_barriers", {}),
    ):
        yield
