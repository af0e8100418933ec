"""Hosts: which ranks of an expert-parallel group share memory, and groups to cross hosts by.

A host is a machine, or an NVLink domain of several machines. If one rank of the group cannot share
memory in its domain, machines are the hosts of all.

All hosts of a group have as many ranks (G), so that H * G = R. Where machines have different
numbers of its ranks, G is their greatest common divisor, and a machine with more ranks counts as
several hosts. Hosts are numbered by the first rank of their machine, the ranks of a host ascend,
wherever a launcher has put them. A rail is the H ranks that have one number on their hosts.

    ranks 0, 1, 4, 5 on one machine, 2, 3 on another: hosts [[0, 1], [4, 5], [2, 3]], rails
    [[0, 4, 2], [1, 5, 3]]

The groups of a host and of a rail are made by the ranks of the expert-parallel group alone: not by
`new_group`, for the reason in `exchange.mirror`. All layers share them, and they live as long as
the expert-parallel group. `destroy_process_group()` closes them before any other group.
"""

import math
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from padded_dispatch.exchange import nvlink
from padded_dispatch.exchange.mirror import job_store, time_limit

_T = TypeVar("_T")
_MOST_RANKS = 72  # that torch's symmetric memory has signals for
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # Linux has it.


def machine() -> str:
    """Return what all ranks of this machine have in common, and ranks of others have not."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of an expert-parallel group.

    Attributes:
        ranks_HG: for each host its ranks, by their numbers in the group.
        own: the numbers of this rank's host, and of this rank on it.
        num_away: ranks on other machines, or in other domains.
        kind: "host" for machines, else "NVLink domain".
        obstacle: why the machines of a domain are hosts of their own; "" if they are not.
    """

    ranks_HG: list[list[int]]
    own: tuple[int, int]
    num_away: int
    kind: str = "host"
    obstacle: str = ""

    @property
    def num_hosts(self) -> int:
        """Hosts of the group (H)."""
        return len(self.ranks_HG)

    @property
    def num_inside(self) -> int:
        """Ranks of the group on each host (G)."""
        return len(self.ranks_HG[0])

    def __str__(self) -> str:
        ranks = "rank" if self.num_inside == 1 else "ranks"
        words = f"{self.num_hosts} {self.kind}s of {self.num_inside} {ranks}"
        return words + (f" (no NVLink domain, since {self.obstacle})" if self.obstacle else "")


def arranged(machines: Sequence[str], rank: int, **words: str) -> Hosts:
    """Return the hosts of ranks with these machines, as `rank` sees them; `words` describe them."""
    ranks_of: dict[str, list[int]] = {}
    for number, name in enumerate(machines):
        ranks_of.setdefault(name, []).append(number)
    size = math.gcd(*map(len, ranks_of.values()))
    parts = [ranks[i : i + size] for ranks in ranks_of.values() for i in range(0, len(ranks), size)]
    host = next(number for number, ranks in enumerate(parts) if rank in ranks)
    num_away = len(machines) - len(ranks_of[machines[rank]])
    own = host, parts[host].index(rank)
    return Hosts(ranks_HG=parts, own=own, num_away=num_away, **words)


# By the kind of device.
_hosts: WeakKeyDictionary[dist.ProcessGroup, dict[str, Hosts]] = WeakKeyDictionary()
# The groups of this rank's host and rail, by the kind of device.
_Groups = dict[str, tuple[dist.ProcessGroup, dist.ProcessGroup]]
_groups: WeakKeyDictionary[dist.ProcessGroup, _Groups] = WeakKeyDictionary()


def hosts_of(group: dist.ProcessGroup, device: torch.device) -> Hosts:
    """Return the hosts of a group for tensors on `device`.

    The first call is a collective call of the group.
    """
    known = _hosts.setdefault(group, {})
    if device.type not in known:
        known[device.type] = _find_hosts(group, device)
    return known[device.type]


def _find_hosts(group: dist.ProcessGroup, device: torch.device) -> Hosts:
    machines, rank = gather_objects(group, machine()), group.rank()
    if device.type != "cuda" or len(set(machines)) == 1:
        return arranged(machines, rank)
    # Each rank has the answers of all, so all decide alike.
    domains, obstacles = zip(*gather_objects(group, nvlink.domain()), strict=True)
    if not any(domains):
        return arranged(machines, rank)
    numbers = dist.get_process_group_ranks(group)
    found = zip(numbers, obstacles, strict=True)
    reasons = [f"rank {number} has {obstacle}" for number, obstacle in found if obstacle]
    if (most := max(Counter(domains).values())) > _MOST_RANKS:
        reasons.append(f"{most} ranks are in one, of at most {_MOST_RANKS}")
    if reasons:
        return arranged(machines, rank, obstacle=reasons[0])
    return arranged(domains, rank, kind="NVLink domain")


def groups_of(
    group: dist.ProcessGroup, device: torch.device
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the groups of this rank's host and rail, for tensors on `device`.

    The first call is a collective call of the group.
    """
    known, hosts = _groups.setdefault(group, {}), hosts_of(group, device)
    if device.type not in known:
        host, number = hosts.own
        rail = [ranks[number] for ranks in hosts.ranks_HG]
        inside = join(group, hosts.ranks_HG[host], device)
        known[device.type] = inside, join(group, rail, device)
    return known[device.type]


def join(group: dist.ProcessGroup, ranks: list[int], device: torch.device) -> dist.ProcessGroup:
    """Return a process group of some ranks of `group`, numbered in this order.

    It has the back end and the time limit of `group`, and symmetric memory takes it. Creating it is
    a collective call of these ranks.
    """
    members, me = dist.get_process_group_ranks(group), ranks.index(group.rank())
    members = [members[rank] for rank in ranks]
    name = f"padded_dispatch/{group.group_name}/{device.type}/{'-'.join(map(str, members))}"
    store, limit = PrefixStore(name, job_store()), timedelta(seconds=time_limit(group))
    kinds = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    made: Any = dist.ProcessGroup(store, me, len(ranks))
    if kinds[device.type] == "nccl":
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout, options.group_name = limit, name
        options.global_ranks_in_group = members
        kind: Any = dist.ProcessGroup.BackendType.NCCL
        backend: Any = dist.ProcessGroupNCCL(store, me, len(ranks), options)
    else:
        kind = dist.ProcessGroup.BackendType.GLOO
        backend = dist.ProcessGroupGloo(store, me, len(ranks), limit)
    backend._set_sequence_number_for_group()
    made._set_default_backend(kind)
    made._register_backend(device, kind, backend)
    made._set_group_name(name)
    _list_in_torch(made, kinds[device.type], store, members, group)
    if device.type == "cuda":
        _make_known(name, made, store)
    return made


def _list_in_torch(
    made: dist.ProcessGroup, kind: str, store: Any, members: list[int], group: dist.ProcessGroup
) -> None:
    """List a group of ranks of `group` among torch's own, until `group` ends.

    Then torch can describe an error of its collectives, and `destroy_process_group()` closes it: of
    all listed groups the last name first, since closing may be a collective call. Torch's own names
    are numbers, which follow.
    """
    world, number_of = distributed_c10d._world, {rank: i for i, rank in enumerate(members)}
    entries: Any = (
        (world.pg_names, made.group_name),
        (world.pg_map, (kind, store)),
        (world.pg_group_ranks, number_of),
        (world.pg_backend_config, kind),
    )
    for of_group, value in entries:
        of_group[made] = value
        finalize(group, of_group.pop, made, None).atexit = False


def _make_known(name: str, made: dist.ProcessGroup, store: Any) -> None:
    """Let symmetric memory find a group, as `new_group` and the first rendezvous would."""
    from torch._C import _distributed_c10d as torch_c
    from torch.distributed import _symmetric_memory

    known: Any = _symmetric_memory._group_name_to_store
    if name not in known:
        known[name] = PrefixStore("symmetric_memory", store)
        torch_c._SymmetricMemory.set_group_info(name, made.rank(), made.size(), known[name])
    # A rendezvous looks it up. An earlier group of this name has ended, with its world or alone.
    group_name: Any = name
    torch_c._unregister_process_group(group_name)
    torch_c._register_process_group(group_name, made)


def gather_objects(group: dist.ProcessGroup, value: _T) -> list[_T]:
    """Return the values of all ranks, by rank, on the host; a collective call."""
    gather: Callable[..., None] = dist.all_gather_object
    values: list[Any] = [None] * group.size()
    gather(values, value, group=group)
    return values
