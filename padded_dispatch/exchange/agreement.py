"""Ranks agree before they talk.

An equal-split collective between ranks that disagree about a shape hangs, or worse, succeeds. So
every eager call first compares its facts over the group on the host, through a gloo mirror of the
group, and a mismatch raises the same error on every rank before any device collective. Comparing
only shapes that are new would hang: the rank that alone sees a new one would wait for peers that
are already in the collective. Measured with two processes on two cores: 0.6 ms a call.

A captured graph runs no Python, and cannot change either: inside a capture a fact that was not
agreed on in an eager call before raises.
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

_TIMEOUT = timedelta(minutes=10)  # with a peer that never comes, as long as NCCL's default

# Every dtype has a number, so that a rank with an odd one is told of as well.
_DTYPES = tuple(
    dict.fromkeys(value for value in vars(torch).values() if isinstance(value, torch.dtype))
)


class Agreement:
    """Compares named whole numbers over a process group before each call.

    Args:
        groups: those whose ranks must agree; groups of one rank cost nothing. Creating the object
            is a collective call of each group's members.
    """

    def __init__(self, *groups: dist.ProcessGroup | None) -> None:
        wide = [group for group in groups if group is not None and group.size() > 1]
        self._mirrors = [_mirror(group) for group in wide]
        self._num_calls = 0
        self._agreed: set[tuple[tuple[str, int], ...]] = set()

    def check(self, *, dtype: torch.dtype, **facts: int) -> None:
        """Compare `facts` with every other rank's.

        Args:
            dtype: of the rows.
            facts: whole numbers; their names appear in the error.

        Raises:
            ValueError: on every rank of all groups if one differs, with all values.
        """
        if torch.compiler.is_compiling():
            return  # Dynamo guards shapes itself, and a traced program has no host to ask.
        key = (*sorted(facts.items()), ("dtype", _DTYPES.index(dtype)))
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            if self._mirrors and key not in self._agreed:
                raise ValueError(
                    f"{_words(key)} is first seen inside a CUDA graph capture: run one eager step "
                    "with the same shapes before capturing"
                )
            return
        self._num_calls += 1
        if self._mirrors:
            self._compare(key)
        self._agreed.add(key)

    def _compare(self, key: tuple[tuple[str, int], ...]) -> None:
        rows = torch.tensor([[dist.get_rank(), self._num_calls, *(value for _, value in key)]])
        # Each group passes on what the last one heard, so that a mismatch anywhere in the grid of
        # groups reaches all of it: a rank that does not know would wait for those that raised.
        for mirror in self._mirrors:
            everyone = [torch.empty_like(rows) for _ in range(mirror.size())]
            mirror.allgather([everyone], [rows]).wait()
            rows = torch.cat(everyone)
        ranks, *columns = rows.T.tolist()
        _raise_if_different(("call number", *(name for name, _ in key)), ranks, columns)


# By the group, which ends with its process group; mirrors of a world that is gone are gone, too.
_mirrors: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()


def _mirror(group: dist.ProcessGroup) -> Any:
    """A gloo group over the same ranks: one for all layers, since each costs sockets."""
    if dist.get_backend(group) == "gloo":
        return group
    if group not in _mirrors:
        _mirrors[group] = _new_mirror(group)
    return _mirrors[group]


def _new_mirror(group: dist.ProcessGroup) -> Any:
    # Not `dist.new_group`, which either needs every rank of the world, or (with
    # use_local_synchronization) names the group by how many groups this process has: ranks of one
    # group that are in different numbers of others would wait for each other for ever.
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


def _words(key: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name}={_show(name, value)}" for name, value in key)
