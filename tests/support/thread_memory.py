"""Threads as ranks with direct stores: they share the memory of one process.

Everything but the memory and its barriers is real: the ops, their gradients, the dispatcher, and
the kernels, in Triton's interpreter.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.exchange import direct, symmetric_memory

NUM_RANKS = 2


class ThreadMemory:
    """`PeerMemory` of threads; the n-th objects of all threads belong together."""

    num_barriers = [0] * NUM_RANKS
    parts: list[np.ndarray | None] = [None] * NUM_RANKS

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        self._group, self._rank = group, group.rank()
        self.parts[self._rank] = np.full(num_bytes, 255, np.uint8)
        self.barrier()
        self._parts = list(self.parts)
        self.barrier()

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        part = self._parts[self._rank]
        size = int(np.prod(shape)) * dtype.itemsize
        return torch.from_numpy(part[offset : offset + size]).view(dtype).view(shape)

    def addresses(self, offset: int) -> Tensor:
        return torch.tensor([part.ctypes.data + offset for part in self._parts])

    def barrier(self) -> None:
        self.num_barriers[self._rank] += 1
        self._group.barrier().wait()


@contextmanager
def threads_as_ranks() -> Iterator[None]:
    """Let threads be ranks, with shared memory instead of symmetric memory."""
    with (
        patch.object(symmetric_memory, "PeerMemory", ThreadMemory),
        patch.object(symmetric_memory, "_free_bytes", lambda device: 2**40),
        patch.object(direct, "check_group", lambda group: group),
        patch.object(direct, "_check", lambda tokens_TD, probs_TE: None),
        patch.object(
            symmetric_memory, "gather_objects", lambda group, value: [value] * group.size()
        ),
    ):
        yield
