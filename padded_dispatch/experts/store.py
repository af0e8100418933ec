"""One store for the rows of all layers of a model chunk, and what passes have that keep nothing.

Demand of a single layer varies widely, that of all layers together little. So the layers of a chunk
share one store for each micro-batch in flight, used as a stack, for what backward needs:

    M      sum of `DispatchConfig.rows(T)` over calls that keep rows, at least `store_rows(T, 1)`
    top    rows in use, on the device
    forward of call i     base = top (0 for the first), rows from base on, top = base + n
    backward of call i    behind its last use of the rows, top is what it was, if no call behind it
                          still has rows

A call that finds the store full writes over the last rows of the calls before it. Backward computes
those again from the tokens, which such calls keep, so nothing is lost. What one call has beyond M
is cut by a water level (`kernels.layout`), which needs more than five ranks.

Base and top never reach the host. It mirrors which calls have rows in which stack: a call takes the
stack that an earlier call of its pass used last, else one without rows, whose first call starts at
0. A pass that broke off gives its stacks back when its autograd nodes are gone. What a CUDA graph
has captured stays with the store, and eager passes keep out of it: replays leave no mark here.

Passes that keep nothing (evaluation, the first pass of recompute) and recompute inside of backward
have memory of their own: `scratch`, alike in both passes of a recomputed layer, or `fitting`.
"""

import dataclasses
import functools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, call
from typing import Any

import torch
from torch import Tensor

from padded_dispatch.config import DispatchConfig
from padded_dispatch.utils.phases import in_backward, is_capturing, trains

RUN_ONCE = (
    "backward must run once per forward pass of packed experts, which overwrites what the pass "
    "kept, got a second run; leave out retain_graph, or set experts='module'"
)


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """The needs of backward of each row, `row_bytes` in all. Row n of each belongs together.

    Attributes:
        fc1_MG: fc1's result; backward overwrites it with its gradient.
        prob_M: fp32.
        home_M: int64, where each row goes home, an address; not read where sums go home.
    """

    fc1_MG: Tensor
    prob_M: Tensor
    home_M: Tensor


@dataclass(kw_only=True, eq=False)
class Entry:
    """The host's mark of a pass that has rows in a stack, held by its autograd node."""

    number: int


@dataclass(kw_only=True, eq=False)
class _Stack:
    """Rows of one micro-batch.

    Attributes:
        num_rows: M, or more.
        top: see `Room.top`.
        captured: whether a CUDA graph uses it.
        entries: marks of passes, those of the last calls last.
        buffers: memory of rows of some width and dtype.
        num_tokens: T of the pass that uses it.
        rooms: those of all its calls.
    """

    num_rows: int
    top: Tensor
    num_tokens: int = 0
    rooms: "tuple[Room, ...]" = ()
    captured: bool = False
    entries: list[weakref.ref[Entry]] = field(default_factory=list)
    buffers: dict[tuple[int, torch.dtype], Buffers] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """Number of the last call with rows here; -1 if there is none.

        Where it did not give them back no call may follow: its rows would lie behind rows of the
        dead.
        """
        if not any(entry() for entry in self.entries):
            self.entries.clear()
            return -1
        last = self.entries[-1]()
        return len(self.rooms) if last is None else last.number


@dataclass(frozen=True, kw_only=True)
class Room:
    """The room of one pass of one layer.

    Attributes:
        top, first, limit: see `kernels.layout.lay_out`.
        most: N.
        overwritten: whether calls that follow may overwrite rows.
        share: rows of this pass in perfect balance.
        stack: whose rows they are; None where nothing stays.
        entry: the mark on it, which lives until backward is done.
    """

    limit: int
    most: int
    share: int
    top: Tensor | None = None
    first: bool = True
    overwritten: bool = False
    stack: _Stack | None = None
    entry: Entry | None = field(default=None, repr=False)

    def buffers(self, num_rows: int, fc1_width: int, like: Tensor) -> Buffers:
        """Return memory of `num_rows`; that of a stack, new at the first call with such a width."""
        known, key = {}, (fc1_width, like.dtype)
        if self.stack is not None:
            known, num_rows = self.stack.buffers, self.stack.num_rows
        if key not in known:
            known[key] = Buffers(
                fc1_MG=like.new_empty(num_rows, fc1_width),
                prob_M=like.new_empty(num_rows, dtype=torch.float32),
                home_M=like.new_empty(num_rows, dtype=torch.int64),
            )
        return known[key]

    def gives_back(self) -> bool:
        """Return whether backward, which begins, may write to the stack and lower `top`.

        Not where calls behind it have rows: it leaves these alone, and computes rows that were
        overwritten again in memory of its own.
        """
        if self.stack is None or self.entry is None:
            return False
        entries = self.stack.entries
        behind = entries[entries.index(weakref.ref(self.entry)) + 1 :]
        return not any(mark() for mark in behind)

    def close(self) -> None:
        """Take the mark off the stack, as backward lowers `top`; else it dies with the pass."""
        assert self.stack is not None and self.entry is not None
        self.stack.entries.remove(weakref.ref(self.entry))


# Returns the room of the pass that begins, whose sources send `count_SL` rows: see `room_of_pass`.
TakeRoom = Callable[[Tensor], Room]


class Store:
    """The rows of all layers of a model chunk, in a stack for each micro-batch in flight.

    Layers `add` their calls in the order of a pass. Stacks are made when they are first needed; a
    graph that is captured keeps those it uses.
    """

    def __init__(self) -> None:
        self._configs: list[Callable[[], DispatchConfig]] = []
        self._stacks: list[_Stack] = []  # That used last comes last.

    def __getstate__(self) -> dict[str, Any]:
        """Leave the stacks out of a copy, which makes its own when it runs."""
        return vars(self) | {"_stacks": []}

    def add(self, config: Callable[[], DispatchConfig]) -> int:
        """Add a call that keeps rows, and return its number.

        `config` returns the config of the call's passes, in training.
        """
        self._configs.append(config)
        return len(self._configs) - 1

    def num_rows(self, num_tokens: int) -> int:
        """Return M for T tokens on this rank."""
        return _rooms_of(tuple(map(call, self._configs)), num_tokens)[0].limit

    def num_shares(self, num_tokens: int) -> int:
        """Return the rows of all calls in perfect balance, relative to which a factor is."""
        return sum(config().share(num_tokens) for config in self._configs)

    def take(self, numbers: Sequence[int], num_tokens: int, count_SL: Tensor) -> Room:
        """Return the room of a pass with gradients.

        Args:
            numbers: those of the layer's calls, ascending; one, unless a pass runs it repeatedly.
            num_tokens: T.
            count_SL: its device is read.
        """
        captures, stack = is_capturing(), None
        for one in self._stacks:
            of_pass = one.captured, one.num_tokens, one.top.device
            goes_on = of_pass == (captures, num_tokens, count_SL.device)
            if goes_on and -1 < one.last < numbers[-1] < len(one.rooms):
                stack = one
        if stack is None:
            stack = self._begin(num_tokens, captures, count_SL.device)
        else:
            self._stacks.remove(stack)
        self._stacks.append(stack)
        last = stack.last
        number = numbers[bisect_right(numbers, last)]
        entry = Entry(number=number)
        stack.entries.append(weakref.ref(entry))
        mine = {"stack": stack, "entry": entry}
        return dataclasses.replace(stack.rooms[number], top=stack.top, first=last < 0, **mine)

    def _begin(self, num_tokens: int, captures: bool, device: torch.device) -> _Stack:
        """Return a stack without rows for a pass that begins, out of the list of all."""
        rooms = _rooms_of(tuple(map(call, self._configs)), num_tokens)
        num_rows, found = rooms[0].limit, None
        # A capture may also take over what eager passes have left.
        for stack in sorted(self._stacks, key=attrgetter("captured")):
            if stack.last < 0 and stack.captured <= captures:
                if stack.num_rows >= num_rows and stack.top.device == device:
                    found = stack
                elif not stack.captured:
                    self._stacks.remove(stack)
        if found is None:
            top = torch.empty(3, dtype=torch.int32, device=device)  # The first call sets it.
            found = _Stack(num_rows=num_rows, top=top)
        else:
            self._stacks.remove(found)
        found.captured, found.num_tokens, found.rooms = captures, num_tokens, rooms
        return found

    def release(self, *, captured: bool) -> None:
        """Free the stacks that have no rows: those of deleted graphs, or those of eager passes."""
        self._stacks = [s for s in self._stacks if s.captured != captured or s.last >= 0]


@functools.lru_cache
def _rooms_of(configs: tuple[DispatchConfig, ...], num_tokens: int) -> tuple[Room, ...]:
    """Return the rooms of all calls of a store: what follows from configs and T."""
    keep = [config for config in configs if not config.fits]  # The others keep no rows here.
    num_rows = sum(config.rows(num_tokens) for config in keep)
    limit = max([num_rows, *(config.store_rows(num_tokens, 1) for config in keep)])
    most = [0 if config.fits else min(config.most_rows(num_tokens), limit) for config in configs]
    rooms = []
    for i, config in enumerate(configs):
        # It ends there at most; a call behind it overwrites what lies beyond M less its own rows.
        end, share = sum(most[: i + 1]), config.share(num_tokens)
        overwritten = any(rows and end + rows > limit for rows in most[i + 1 :])
        rooms.append(Room(limit=limit, most=most[i], share=share, overwritten=overwritten))
    return tuple(rooms)


def room_of_pass(
    config: DispatchConfig, num_tokens: int, store: Store | None, numbers: Sequence[int]
) -> TakeRoom:
    """Return where a pass's rows lie: in a store, see `Store.take`, if backward will need them."""
    if config.fits:
        return fitting
    if store is None or in_backward() or not trains():
        return partial(scratch, config, num_tokens)
    return partial(store.take, numbers, num_tokens)


def scratch(config: DispatchConfig, num_tokens: int, count_SL: Tensor) -> Room:
    """Return a room that keeps nothing, of a size that follows from the config and T."""
    num_rows = config.store_rows(num_tokens, 1)
    return Room(limit=num_rows, most=num_rows, share=config.share(num_tokens))


def fitting(count_SL: Tensor) -> Room:
    """Return a room that keeps nothing and holds all rows of an eager pass, read on the host."""
    num_rows = max(1, int(count_SL.sum()))
    return Room(limit=num_rows, most=num_rows, share=num_rows)
