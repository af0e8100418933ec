"""Collectives on the host for a layer's ranks, with a time limit, and names of absent ranks.

A `Mirror` is a gloo group of its own over all ranks that a layer's groups connect, whatever their
backend is. A layer's own gloo group would not do: if one rank skipped a call, the user's next
collective would meet ours in it with another size, and gloo would abort the process.

In `gather` the first rank gathers a row of each rank and broadcasts all rows: N - 1 messages that
it receives, and then log2(N) in sequence, for N ranks. If the time limit expires, or a process ends
while the first rank is in the call, gloo closes the connections, so all waiting ranks fail within
milliseconds. Each of them then posts in the store of the job that it waits. Ranks that have not
posted `_GRACE_S` later are absent; if the layer spans several hosts, the error names the hosts of
absent ranks, too. The first rank that finds absent ranks writes the error into the store. All ranks
raise this error, also a rank that makes the call later. A call that succeeds posts nothing.

If a process has ended, a collective of the user also fails, mostly before our next call. Gloo's
error names no rank, and other ranks may still wait for a rank that has seen it. So
`absent_ranks_named` waits for no call; it looks for closed connections, since the connection to a
process stays open while the process lives.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import blake2b
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import BroadcastOptions, GatherOptions, PrefixStore

_GRACE_S = 2.0  # for all waiting ranks to post, after the first of them has failed
_STORE_S = 5.0  # more, for the store to answer; its process may have ended, or be stopped
_CLOSING_S = 0.5  # for a process that ends to close all its sockets
_PROBE = 1  # a tag of messages that no rank sends
_SIGNALS = timedelta(seconds=1)  # between two looks for Ctrl-C

_CLOSED = ", got a closed connection and"
_NO_STORE = "some (the store of the job, which has their numbers, does not answer)"
_FIX = (
    "look for the first error in the output of each; if they were only busy, give the process "
    "groups a longer timeout"
)


class AbsentRanksError(RuntimeError):
    """Ranks did not make a call in which others wait; the error is the same on all that wait."""


class Mirror:
    """A gloo group of all ranks that some groups connect.

    Creating one is a collective call of these ranks: groups {0, 1} and {0, 2} of rank 0 connect
    rank 3 as well, if its groups are {2, 3} and {1, 3}.

    Args:
        groups: this rank's groups.
        limit_s: seconds that a rank waits for another one, before `AbsentRanksError` names that.

    Attributes:
        ranks: the numbers of the ranks in the job, ascending.
        num_agreements: how many agreements use this mirror.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], limit_s: float) -> None:
        self._limit_s, self.num_agreements = limit_s, 0
        self._failure = ""
        self._last = "none"
        self._me = dist.get_rank()
        name, self._hosts = _connected(groups, limit_s)
        self.ranks = sorted(self._hosts)
        # Not `dist.new_group`. It either needs every rank of the world, or (with
        # use_local_synchronization) names the group by the number of groups in this process: ranks
        # that are members of different numbers of groups would wait under different names.
        self._store = PrefixStore(name, job_store())
        group_rank = self.ranks.index(self._me)
        limit = timedelta(seconds=limit_s)
        try:
            gloo = dist.ProcessGroupGloo(self._store, group_rank, len(self.ranks), limit)
        except RuntimeError as error:
            raise AbsentRanksError(
                f"ranks {self.ranks} must connect, got {error}; {_FIX}"
            ) from None
        self._gloo: Any = gloo

    def gather(self, row: Tensor, where: str) -> Tensor:
        """Return the row of each rank, in the order of `ranks`.

        Args:
            row: on the host, of the same shape on all ranks.
            where: description of the call, for errors.

        Raises:
            AbsentRanksError: on all waiting ranks, if one does not make the call; on a rank that
                makes it too late; and in each later call.
        """
        if not self._failure:
            rows, problem = self._attempt(row)
            if not problem:
                self._last = where
                return rows
            # Close the other connections, too, so that ranks that wait for this one fail as well.
            self._gloo = None
            self._failure = _in_time(lambda: self._verdict(where, problem))
            self._failure = self._failure or self._absent_message(where, problem, _NO_STORE)
        raise AbsentRanksError(self._failure)

    def _attempt(self, row: Tensor) -> tuple[Tensor, str]:
        """Return the row of each rank, and what went wrong, "" if nothing did.

        The problem is not raised, because an exception holds frames, and these the connections.
        """
        start, rows = time.monotonic(), row.new_empty(len(self.ranks), *row.shape)
        gathers, broadcasts = GatherOptions(), BroadcastOptions()  # The root is the first rank.
        gathers.timeout = broadcasts.timeout = timedelta(seconds=self._limit_s)
        is_first = self._me == self.ranks[0]
        try:
            gathering = self._gloo.gather([list(rows)] if is_first else [], [row], gathers)
            if is_first:
                _wait(gathering)
            _wait(self._gloo.broadcast([rows], broadcasts))
            return rows, ""
        except RuntimeError:
            timed_out = time.monotonic() - start >= self._limit_s
            return rows, f" within {self._limit_s:g} s, got" if timed_out else _CLOSED

    def require_all_alive(self) -> None:
        """Raise `AbsentRanksError` if a process has ended, with the same text on all ranks."""
        if self._failure or not self._ended():
            return
        message = _in_time(self._verdict_of_ended) or self._ended_message(self._ended())
        raise AbsentRanksError(message)

    def _verdict_of_ended(self) -> str:
        self._store.set(f"waits/{self._me}", _CLOSED)
        time.sleep(_GRACE_S)  # Processes of a host end one after the other.
        ended = self._ended()
        # A rank that raised in `gather` has closed its connections, too, but posted that it waits.
        ended = [rank for rank in ended if not self._store.check([f"waits/{rank}"])] or ended
        return self._store.compare_set("verdict", "", self._ended_message(ended)).decode()

    def _ended_message(self, ended: list[int]) -> str:
        return (
            f"all {len(self.ranks)} ranks of the layer must stay until the job ends, got no answer "
            f"from the process{'es' if len(ended) > 1 else ''} of {self._ranks_and_hosts(ended)}; "
            f"the last call that all made: {self._last}; look for the first error in the output of "
            "each"
        )

    def _ended(self) -> list[int]:
        """Return the ranks whose connections are closed: gloo then refuses to receive."""
        ended = []
        for group_rank, rank in enumerate(self.ranks):
            try:
                if rank != self._me:
                    self._gloo.recv([torch.empty(1, device="cpu")], group_rank, _PROBE)
            except RuntimeError:
                ended.append(rank)
        return ended

    def _verdict(self, where: str, problem: str) -> str:
        """Return the error in the store, and write it first if no rank has."""
        self._store.set(f"waits/{self._me}", problem)
        end = time.monotonic() + _GRACE_S
        while True:
            if self._store.check(["verdict"]):
                return self._store.get("verdict").decode()
            absent = [r for r in self.ranks if not self._store.check([f"waits/{r}"])]
            if not absent or time.monotonic() >= end:
                break
            time.sleep(0.1)
        # One rank's expired time limit closes the connections of others: the limit is the problem.
        waiting = [r for r in self.ranks if r not in absent]
        problems = [self._store.get(f"waits/{r}").decode() for r in waiting]
        problem = next((p for p in problems if p != _CLOSED), problem)
        names = self._ranks_and_hosts(absent) if absent else "none of them in time"
        message = self._absent_message(where, problem, names)
        return self._store.compare_set("verdict", "", message).decode()

    def _ranks_and_hosts(self, ranks: list[int]) -> str:
        """Return numbers of ranks, and their hosts if the layer spans several."""
        if len(set(self._hosts.values())) == 1:
            return _format_ranks(ranks)
        hosts = list(dict.fromkeys(self._hosts[rank] for rank in ranks))
        return f"{_format_ranks(ranks)} on host{'s' if len(hosts) > 1 else ''} {', '.join(hosts)}"

    def _absent_message(self, where: str, problem: str, absent: str) -> str:
        return (
            f"all {len(self.ranks)} ranks of the layer must come to {where}{problem} no call "
            f"from {absent}; the last call that all made: {self._last}; {_FIX}"
        )


def time_limit(group: dist.ProcessGroup) -> float:
    """Return the seconds that a collective of the group may take: its `timeout`."""
    for device in ("cuda", "cpu"):
        # Not every back end has options; a group without one for the device raises.
        with suppress(RuntimeError, AttributeError):
            backend: Any = cast(Any, group)._get_backend(torch.device(device))
            return backend.options._timeout.total_seconds()
    return distributed_c10d.default_pg_timeout.total_seconds()


def _wait(work: Any) -> None:
    """Wait for a collective, and look for Ctrl-C."""
    while True:
        try:
            work.wait(_SIGNALS)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # Raises if it has failed; it may have ended just after the look.
                return


# By one of the mirrored groups, weakly, so that destroying the group frees the mirror; then by the
# names of all mirrored groups.
_mirrors: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, ...], Mirror]] = WeakKeyDictionary()


def mirror_of(groups: Sequence[dist.ProcessGroup]) -> Mirror:
    """Return the mirror of `groups`, one for all layers, since each mirror costs sockets.

    Their order does not matter: all mirrors of the same groups would meet under one name. The first
    call with these groups is a collective call; see `Mirror`.
    """
    groups = sorted(groups, key=lambda group: group.group_name)
    of_group = _mirrors.setdefault(groups[0], {})
    names = tuple(group.group_name for group in groups)
    if names not in of_group:
        of_group[names] = Mirror(groups, max(map(time_limit, groups)))
    return of_group[names]


@contextmanager
def absent_ranks_named() -> Iterator[None]:
    """Replace the error of a collective that fails because peers have ended: name these peers.

    Enter it where the process groups exist, around all training.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistBackendError) or "gloo/transport" in str(error):
            time.sleep(_CLOSING_S)
            for of_group in _mirrors.values():
                for mirror in of_group.values():
                    mirror.require_all_alive()
        raise


def job_store() -> Any:
    """Return the store of the job, under a prefix of this package."""
    return PrefixStore("padded_dispatch", distributed_c10d._get_default_store())


def _connected(groups: Sequence[dist.ProcessGroup], limit_s: float) -> tuple[str, dict[int, str]]:
    """Return a name for all groups that `groups` connect, and the host of each of their ranks.

    All these ranks compute the same name. Each rank posts its own groups, under their number, since
    a group may have several mirrors: of this group alone, and together with others.
    """
    deadline = time.monotonic() + limit_s
    store, me = job_store(), dist.get_rank()
    own: dict[str, list[int]] = {g.group_name: dist.get_process_group_ranks(g) for g in groups}
    posted = json.dumps([socket.gethostname(), own])
    for name in own:
        store.set(f"{name}/{len(own)}/{me}", posted)
    connected: dict[str, list[int]] = {}
    hosts: dict[int, str] = {}
    unread = dict(own)
    while unread:
        name, members = unread.popitem()
        connected[name] = members
        keys = [f"{name}/{len(own)}/{rank}" for rank in members]
        left = max(0.001, deadline - time.monotonic())
        try:
            store.wait(keys, timedelta(seconds=left))  # One request, however many ranks.
        except RuntimeError:
            pairs = zip(members, keys, strict=True)
            if absent := [rank for rank, key in pairs if not store.check([key])]:
                raise AbsentRanksError(
                    f"all {len(members)} ranks of a group must create their dispatcher within "
                    f"{limit_s:g} s, got none from {_format_ranks(absent)}; {_FIX}"
                ) from None
        read = store.multi_get if store.has_extended_api() else lambda keys: map(store.get, keys)
        for rank, value in zip(members, read(keys), strict=True):
            hosts[rank], groups_there = json.loads(value)
            unread |= {n: r for n, r in groups_there.items() if n not in connected}
    name = blake2b(json.dumps(sorted(connected)).encode(), digest_size=8).hexdigest()
    return f"{name}/{len(own)}", hosts


def differing(value_of: dict[int, object]) -> str:
    """Return each value, and the ranks that have it, the keys in ascending order; "" if all agree.

    Example: {0: 8, 1: 9, 2: 9, 3: 9} gives "8 on rank 0, 9 on ranks 1-3". Texts are compared.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, value in value_of.items():
        ranks_of.setdefault(str(value), []).append(rank)
    if len(ranks_of) == 1:
        return ""
    return ", ".join(f"{value} on {_format_ranks(ranks)}" for value, ranks in ranks_of.items())


def _format_ranks(ranks: list[int]) -> str:
    """Return the numbers of ranks, in ascending order, with runs of three or more cut short.

    Example: [1, 2, 4, 5, 6] gives "ranks 1, 2, 4-6".
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if not runs or rank != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(rank)
    words = (f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return f"ranks {', '.join(words)}"


def _in_time(fn: Callable[[], str]) -> str:
    """Return `fn()`, which asks the store, or "" if it raises or takes too long."""
    results: list[str] = []

    def work() -> None:
        with suppress(RuntimeError):
            results.append(fn())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_GRACE_S + _STORE_S)
    return results[0] if results else ""
