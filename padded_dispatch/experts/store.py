"""One store for the rows of all layers of a model chunk, and what passes have that keep nothing.

Layers keep for backward the rows of their experts and fc1's results. Demand of a single layer
varies widely, that of all layers together little. So the layers of a chunk share one store for each
micro-batch in flight, used as a stack:

    M      sum of `DispatchConfig.rows(T)` over the calls that keep rows
    top    rows in use, on the device
    forward of call i     base = top (0 for the first), rows from base on, top = base + n
    backward of call i    behind its last use of the rows, top = base

A call may fill the store up to M less the rows that later calls are sure to have, min(share, rows)
of each, and at most N rows. What does not fit is cut by a water level: each (expert, source) keeps
at most w rows, the largest w that fits, so that none starves. With one rank nothing overflows at
factor 1.

Base and top never reach the host. It mirrors which calls have rows in which stack: a call takes the
stack that an earlier call of its pass used last, else one without rows, whose first call starts at
0. A pass that broke off gives its stacks back when its autograd nodes are gone. What a CUDA graph
has captured stays with the store, and eager passes keep out of it: replays leave no mark here.

Passes that keep nothing (evaluation, the first pass of recompute) and recompute inside of backward
have memory of their own: `scratch`, whose room is constant, so that both passes of a recomputed
layer keep the same rows; or `fitting`, which reads on the host what an eager pass needs.

Letters: T tokens, L local experts, S sources, D hidden size, G columns of fc1's result, M rows of
the store, N the most rows of a pass.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from padded_dispatch.config import DispatchConfig
from padded_dispatch.utils.phases import is_capturing


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """Rows that backward needs. Row n of each belongs together.

    Attributes:
        rows_MD: what fc1 reads.
        fc1_MG: its result; backward overwrites it with its gradient.
        prob_M: fp32.
        home_M: int64, see `exchange.Layout`.
    """

    rows_MD: Tensor
    fc1_MG: Tensor
    prob_M: Tensor
    home_M: Tensor

    @classmethod
    def empty(
        cls, num_rows: int, width: int, fc1_width: int, dtype: torch.dtype, device: torch.device
    ) -> "Buffers":
        """Return unspecified memory for `num_rows` rows."""
        return cls(
            rows_MD=torch.empty(num_rows, width, dtype=dtype, device=device),
            fc1_MG=torch.empty(num_rows, fc1_width, dtype=dtype, device=device),
            prob_M=torch.empty(num_rows, dtype=torch.float32, device=device),
            home_M=torch.empty(num_rows, dtype=torch.int64, device=device),
        )

    @staticmethod
    def num_bytes(num_rows: int, width: int, fc1_width: int, element_size: int) -> int:
        """Return the bytes of `empty`."""
        return num_rows * ((width + fc1_width) * element_size + 12)


class Entry:
    """The host's mark of a pass that has rows in a stack, held by its autograd node."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Stack:
    """Rows of one micro-batch.

    `captured`: whether a CUDA graph uses it. `top`: zeros, see `Room.top`.
    """

    def __init__(self, num_rows: int, top: Tensor) -> None:
        self.num_rows, self.top = num_rows, top
        self.captured = False
        self._entries: list[weakref.ref[Entry]] = []
        self._buffers: dict[tuple[int, int, torch.dtype], Buffers] = {}

    @property
    def last(self) -> int:
        """Number of the last call with rows here; -1 if there is none."""
        while self._entries:
            if (entry := self._entries[-1]()) is not None:
                return entry.number
            self._entries.pop()
        return -1

    def push(self, number: int) -> Entry:
        """Note that a call has rows from now on."""
        entry = Entry(number)
        self._entries.append(weakref.ref(entry))
        return entry

    def pop(self, entry: Entry) -> None:
        """Note that a call has no rows any more."""
        self._entries = [one for one in self._entries if one() is not entry]

    def buffers(self, width: int, fc1_width: int, dtype: torch.dtype) -> Buffers:
        """Return the memory of rows of such widths, new at the first call."""
        key = width, fc1_width, dtype
        if key not in self._buffers:
            self._buffers[key] = Buffers.empty(self.num_rows, *key, self.top.device)
        return self._buffers[key]


@dataclass(frozen=True, kw_only=True)
class Room:
    """The room of one pass of one layer.

    Attributes:
        top: int32 [2] on the device: rows in use, and rows that would be if all had found room;
            None where rows begin at 0 and nothing stays.
        first: whether rows begin at 0 whatever `top` says.
        limit: the row of the store that must not be reached.
        most: the most rows of this pass (N).
        share: rows of this pass in perfect balance.
        later: rows that the passes which follow are sure to have, for the figure of need.
        stack: whose rows they are; None where nothing stays.
        entry: the mark on it, which lives until backward is done.
    """

    limit: int
    most: int
    share: int
    top: Tensor | None = None
    first: bool = True
    later: int = 0
    stack: _Stack | None = None
    entry: Entry | None = field(default=None, repr=False)

    def buffers(
        self, width: int, fc1_width: int, dtype: torch.dtype, device: torch.device
    ) -> Buffers:
        """Return the memory of the rows."""
        if self.stack is None:
            return Buffers.empty(self.limit, width, fc1_width, dtype, device)
        return self.stack.buffers(width, fc1_width, dtype)

    def close(self) -> None:
        """Take the mark off the stack, once backward has issued its last use of the rows."""
        if self.stack is not None and self.entry is not None:
            self.stack.pop(self.entry)


class Rooms(Protocol):
    """Room for the rows of a pass: a stack of a store, or memory of the pass itself."""

    def take(self, count_SL: Tensor) -> Room:
        """Return the room of the pass that begins, whose sources send `count_SL` rows."""
        ...


class Store:
    """The rows of all layers of a model chunk, in a stack for each micro-batch in flight.

    Layers `add` their calls in the order of a pass. Stacks are made when they are first needed; a
    graph that is captured keeps those it uses.
    """

    def __init__(self) -> None:
        self._configs: list[Callable[[], DispatchConfig]] = []
        self._stacks: list[_Stack] = []  # That used last comes last.
        self._tops: list[Tensor] = []

    def add(self, config: Callable[[], DispatchConfig]) -> int:
        """Add a call that keeps rows, and return its number.

        Args:
            config: returns the config of the call's passes, in training.
        """
        self._configs.append(config)
        return len(self._configs) - 1

    def num_rows(self, num_tokens: int) -> int:
        """Return M for T tokens on this rank."""
        return sum(config().rows(num_tokens) for config in self._configs)

    def num_shares(self, num_tokens: int) -> int:
        """Return the rows of all calls in perfect balance, relative to which a factor is."""
        return sum(config().share(num_tokens) for config in self._configs)

    def rooms(self, numbers: Sequence[int], num_tokens: int) -> Rooms:
        """Return the rooms of a pass with gradients.

        Args:
            numbers: those of the layer's calls, ascending; one, unless a pass runs it repeatedly.
            num_tokens: T.
        """
        return _Stacked(self, tuple(numbers), num_tokens)

    def stack(self, numbers: Sequence[int], num_rows: int, device: torch.device) -> _Stack:
        """Return the stack for the next call of a layer."""
        captures = is_capturing()
        mine = [stack for stack in self._stacks if stack.captured == captures]
        found = [stack for stack in mine if -1 < stack.last < numbers[-1]]
        if not found:
            # A capture may also take over what eager passes have left.
            mine = [stack for stack in self._stacks if captures or not stack.captured]
            mine.sort(key=lambda stack: stack.captured)
            found = [stack for stack in mine if stack.last < 0]
            for small in [one for one in found if one.num_rows < num_rows and not one.captured]:
                self._stacks.remove(small)
            found = [stack for stack in found if stack.num_rows >= num_rows]
        stack = found[-1] if found else _Stack(num_rows, self._top(device))
        if found:
            self._stacks.remove(stack)
        stack.captured = captures
        self._stacks.append(stack)
        return stack

    def _top(self, device: torch.device) -> Tensor:
        """Return two zeros, made before any capture: it would record that they are set."""
        if not self._tops:
            self._tops = list(torch.zeros(64, 2, dtype=torch.int32, device=device))
        return self._tops.pop()

    def release(self, *, captured: bool) -> None:
        """Free the stacks that have no rows: those of deleted graphs, or those of eager passes."""
        self._stacks = [s for s in self._stacks if s.captured != captured or s.last >= 0]


@dataclass(frozen=True)
class _Stacked:
    store: Store
    numbers: tuple[int, ...]
    num_tokens: int

    def take(self, count_SL: Tensor) -> Room:
        store, num_tokens = self.store, self.num_tokens
        configs = [config() for config in store._configs]
        rows = [config.rows(num_tokens) for config in configs]
        num_rows = sum(rows)
        stack = store.stack(self.numbers, num_rows, count_SL.device)
        last = stack.last
        number = next(number for number in self.numbers if number > last)
        behind = zip(configs[number + 1 :], rows[number + 1 :], strict=True)
        later = sum(min(config.share(num_tokens), room) for config, room in behind)
        share = configs[number].share(num_tokens)
        return Room(
            limit=num_rows - later,
            most=min(configs[number].most_rows(num_tokens), max(num_rows, 5 * share)),
            share=share,
            top=stack.top,
            first=last < 0,
            later=later,
            stack=stack,
            entry=stack.push(number),
        )


@dataclass(frozen=True, kw_only=True)
class _Scratch:
    num_rows: int
    share: int

    def take(self, count_SL: Tensor) -> Room:
        return Room(limit=self.num_rows, most=self.num_rows, share=self.share)


class _Fitting:
    def take(self, count_SL: Tensor) -> Room:
        num_rows = max(1, int(count_SL.sum()))
        return Room(limit=num_rows, most=num_rows, share=num_rows)


def scratch(config: DispatchConfig, num_tokens: int) -> Rooms:
    """Return rooms that keep nothing, of a size that follows from the config and T."""
    share = config.share(num_tokens)
    most = max(config.rows(num_tokens), 5 * share)
    return _Scratch(num_rows=min(config.most_rows(num_tokens), most), share=share)


def fitting() -> Rooms:
    """Return rooms that keep nothing and hold all rows of an eager pass, read on the host."""
    return _Fitting()
