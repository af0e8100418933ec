"""Grids of ranks for tests inside worker pools, and fresh memory filled with NaN."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

GRIDS = pytest.mark.parametrize(("num_ranks", "etp_size"), [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2)])


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Place of a rank: rank r of the i-th expert-parallel group is rank i * R + r of the pool.

    `group` holds the R ranks with the same i, `etp_group` those with the same r.
    """

    r: int
    i: int
    group: dist.ProcessGroup | None
    etp_group: dist.ProcessGroup | None

    @property
    def source(self) -> int:
        """The index of this rank's rows in an expert's buffer."""
        return dist.get_rank() if dist.is_initialized() else 0


@functools.cache  # Groups cost sockets, and a pool serves a whole module.
def grid(num_ranks: int, etp_size: int) -> Grid:
    """Return the groups of a grid that spans the default group, or of one rank without one."""
    if num_ranks * etp_size == 1:
        return Grid(r=0, i=0, group=None, etp_group=None)
    i, r = divmod(dist.get_rank(), num_ranks)
    rows = [[j * num_ranks + q for q in range(num_ranks)] for j in range(etp_size)]
    # All ranks must create all groups, in the same order.
    groups = [dist.new_group(row) for row in rows]
    etp_groups = [dist.new_group(list(column)) for column in zip(*rows, strict=True)]
    return Grid(
        r=r,
        i=i,
        group=groups[i] if num_ranks > 1 else None,
        etp_group=etp_groups[r] if etp_size > 1 else None,
    )


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Use deterministic algorithms and fill fresh memory with NaN (or the largest integer)."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
