"""Compare, before each call, the values that decide every shape, so that no rank is left waiting.

An equal-split collective hangs, or silently returns wrong rows, if two ranks call it with different
shapes. So every eager call first compares its invariants (T, C, dtype and the like) over the group
on the host, through a gloo mirror of the group. A mismatch raises the same error on every rank,
before any device collective. Comparing new shapes only would hang: a rank that meets a shape for
the first time would wait in the comparison for peers that are already in the device collective.
Measured with two processes on two cores: 0.6 ms a call.

Replaying a CUDA graph runs no Python, and its shapes cannot change. Inside a capture, invariants
that no eager call has compared before raise.
"""

from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    distributed_c10d,
)

from padded_dispatch.exchange.alltoall import group_name

_TIMEOUT = timedelta(minutes=10)  # of one comparison; NCCL's default

# Encode dtypes as ints, so that a mismatch is reported like any other.
_DTYPES = tuple(
    dict.fromkeys(value for value in vars(torch).values() if isinstance(value, torch.dtype))
)


class Agreement:
    """A comparison of named integers over process groups before each call.

    Creating one is a collective call of each group's members.

    Args:
        groups: the groups whose ranks must pass equal values. None and groups of one rank cost
            nothing.
    """

    def __init__(self, *groups: dist.ProcessGroup | None) -> None:
        wide = [group for group in groups if group is not None and group.size() > 1]
        self._mirrors = [_mirror(group) for group in wide]
        self._num_calls = 0
        self._compared: set[tuple[tuple[str, int], ...]] = set()

    def check(self, *, dtype: torch.dtype | None = None, **invariants: int) -> None:
        """Raise on every rank if the invariants of one rank differ.

        Args:
            dtype: dtype of the rows, if the call moves rows.
            **invariants: integers under free names; the error shows the names. All ranks must pass
                the same names.

        Raises:
            ValueError: on every rank of all groups if a value, or the number of calls so far,
                differs between two ranks; it lists the value of each rank. Inside a capture: if no
                eager call has compared these invariants.
        """
        if torch.compiler.is_compiling():
            return  # Dynamo guards shapes itself, and a traced program cannot run collectives here.
        key = tuple(sorted(invariants.items()))
        if dtype is not None:
            key += (("dtype", _DTYPES.index(dtype)),)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            if self._mirrors and key not in self._compared:
                shown = ", ".join(f"{name}={_show(name, value)}" for name, value in key)
                raise ValueError(
                    "shapes inside a CUDA graph capture must be those of an earlier eager step, "
                    f"got {shown}; run one eager step with the same shapes before capturing"
                )
            return
        self._num_calls += 1
        if self._mirrors:
            self._compare(key)
        self._compared.add(key)

    def _compare(self, key: tuple[tuple[str, int], ...]) -> None:
        rows = torch.tensor([[dist.get_rank(), self._num_calls, *(value for _, value in key)]])
        # Each group gathers what the previous group gathered, so that a mismatch anywhere in the
        # grid of groups raises on the whole grid: a rank that did not see it would wait for others.
        for mirror in self._mirrors:
            gathered = [torch.empty_like(rows) for _ in range(mirror.size())]
            mirror.allgather([gathered], [rows]).wait()
            rows = torch.cat(gathered)
        ranks, *columns = rows.T.tolist()
        _raise_if_different(("call number", *(name for name, _ in key)), ranks, columns)


# Keyed weakly by the mirrored group: a mirror ends when its group's world is destroyed.
_mirrors: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()


def _mirror(group: dist.ProcessGroup) -> Any:
    """Return a gloo group over the same ranks, the same one for all layers: each costs sockets."""
    if dist.get_backend(group) == "gloo":
        return group
    if group not in _mirrors:
        _mirrors[group] = _new_mirror(group)
    return _mirrors[group]


def _new_mirror(group: dist.ProcessGroup) -> Any:
    # Not `dist.new_group`. It either needs every rank of the world, or (with
    # use_local_synchronization) names the group by the number of groups in this process: ranks of
    # one group that are members of different numbers of others would wait for each other for ever.
    name = f"padded_dispatch/{group_name(group)}"
    store = PrefixStore(name, distributed_c10d._get_default_store())
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), _TIMEOUT)


def _raise_if_different(names: tuple[str, ...], ranks: list[int], columns: list[list[int]]) -> None:
    differing = []
    for name, column in zip(names, columns, strict=True):
        if len(set(column)) > 1:
            shown = (f"{_show(name, v)} on rank {r}" for v, r in zip(column, ranks, strict=True))
            differing.append(f"{name} is {', '.join(shown)}")
    if differing:
        raise ValueError(
            "ranks disagree about a padded dispatch: "
            + "; ".join(differing)
            + ". Give every rank the same config and batches of the same shape."
        )


def _show(name: str, value: int) -> str:
    return str(_DTYPES[value]) if name == "dtype" else str(value)
