"""One store for the rows of all layers of a model chunk, and room for passes that keep no rows.

Demand of a single layer varies widely, that of all layers together little. So the layers of a chunk
share a store. It has a stack for each micro-batch in flight, for what backward needs of each row. A
call is one run of one layer in a pass; it has n rows:

    M      sum of `DispatchConfig.rows(T)` over calls that keep rows, see `config.StoreSizes`
    top    rows in use, a number on the device
    forward of a call     base = min(top, M - n), 0 for the first; rows from base on, top = base + n
    backward of a call    after the last use of its rows top is what it was before its forward,
                          unless a later call still has rows

A call that finds the stack full overwrites the last rows of earlier calls. Backward recomputes
these from the tokens, which the earlier calls keep or send again, so nothing is lost. If a single
call has more than M rows, a water level drops some (`kernels.layout`); that takes more than five
ranks.

The host never reads base and top. It tracks which calls have rows in which stack: a call takes the
stack that an earlier call of its pass used last, else a stack without rows. A pass that breaks off
frees its stacks when its autograd nodes are gone. Stacks that a CUDA graph has captured stay with
the store. Eager passes do not use them, since the host cannot track the calls of a replay.

Passes that keep nothing (evaluation, the first pass of recompute) and recompute inside of backward
have other memory: `scratch`, of one size for both passes of a recomputed layer, or `fitting`.
"""

import dataclasses
import functools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, call
from typing import Any

import torch
from torch import Tensor

from padded_dispatch.config import DispatchConfig, StoreSizes
from padded_dispatch.utils.phases import in_backward, is_capturing, trains

RUN_ONCE = (
    "backward must run once per forward pass of packed experts, which overwrites what the pass "
    "kept, got a second run; leave out retain_graph, or set experts='module'"
)


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """The memory of rows for backward, `memory.row_bytes` for each row.

    Attributes:
        fc1_MG: fc1's result; backward overwrites it with its gradient.
        prob_M: fp32, the row's probability.
        home_M: int64, the row's address at home; not read over collectives.
    """

    fc1_MG: Tensor
    prob_M: Tensor
    home_M: Tensor


BUFFERS = tuple(part.name for part in dataclasses.fields(Buffers))


@dataclass(kw_only=True, eq=False)
class _Stack:
    """Rows of one micro-batch.

    Attributes:
        num_rows: M, or more.
        top: see `Room.top`.
        captured: whether a CUDA graph uses it.
        entries: the rooms of the calls that have rows here, in their order; autograd nodes hold
            them.
        buffers: memory of rows, by fc1's width and dtype.
        num_tokens: T of the pass that uses it.
        rooms: the room of each call of that pass, by number.
    """

    num_rows: int
    top: Tensor
    num_tokens: int = 0
    rooms: "tuple[Room, ...]" = ()
    captured: bool = False
    entries: "list[weakref.ref[Room]]" = field(default_factory=list)
    buffers: dict[tuple[int, torch.dtype], Buffers] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """Number of the last call with rows here; -1 if there is none.

        If the last call has ended without backward, while an earlier one has not, it is the number
        of calls, so no call follows: the rows of the ended call are still below `top`.
        """
        if not any(entry() for entry in self.entries):
            self.entries.clear()
            return -1
        last = self.entries[-1]()
        return len(self.rooms) if last is None else last.number


@dataclass(frozen=True, kw_only=True, eq=False)
class Room:
    """The room of one pass of one layer.

    Attributes:
        number: of the call in the store; -1 outside of one.
        top, first, limit: see `kernels.layout.lay_out`.
        max_rows: the most rows of the pass (N).
        overwritten: whether later calls may overwrite rows.
        share: rows of this pass in perfect balance.
        stack: the stack that has the rows; None if they are not kept.
    """

    number: int = -1
    limit: int
    max_rows: int
    share: int
    top: Tensor | None = None
    first: bool = True
    overwritten: bool = False
    stack: _Stack | None = None

    def buffers(self, num_rows: int, fc1_width: int, like: Tensor) -> Buffers:
        """Return memory of `num_rows` rows, or the stack's, new at its first use with a width."""
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
        """Return whether the backward that begins may refill overwritten rows and lower `top`.

        It may not if later calls have rows in the stack. It then recomputes overwritten rows in
        memory of its own.
        """
        if self.stack is None:
            return False
        entries = self.stack.entries
        later_entries = entries[entries.index(weakref.ref(self)) + 1 :]
        return not any(entry() for entry in later_entries)

    def close(self) -> None:
        """End the call when backward lowers `top`; otherwise it ends with the autograd node."""
        assert self.stack is not None
        self.stack.entries.remove(weakref.ref(self))


# A function that returns the room of a pass from its `count_SL`: see `room_of_pass`.
TakeRoom = Callable[[Tensor], Room]


class Store:
    """The rows of all layers of a model chunk, in a stack for each micro-batch in flight.

    Layers `add` their calls in the order of a pass. Stacks are created at their first use; a
    captured graph keeps the stacks that it uses.
    """

    def __init__(self) -> None:
        self._configs: list[Callable[[], DispatchConfig]] = []
        self._stacks: list[_Stack] = []  # The last one was used last.

    def __getstate__(self) -> dict[str, Any]:
        """Leave the stacks out of a copy, which creates its own when it runs."""
        return vars(self) | {"_stacks": []}

    def add(self, config: Callable[[], DispatchConfig]) -> int:
        """Add a call that keeps rows, and return its number.

        `config` returns the config of the call's passes, in training.
        """
        self._configs.append(config)
        return len(self._configs) - 1

    def sizes(self, num_tokens: int) -> StoreSizes:
        """Return the sizes for T tokens on this rank."""
        return StoreSizes.of([*map(call, self._configs)], num_tokens)

    def num_shares(self, num_tokens: int) -> int:
        """Return the rows of all calls in perfect balance, those of factor 1."""
        return sum(config().share(num_tokens) for config in self._configs)

    def take(self, numbers: Sequence[int], num_tokens: int, count_SL: Tensor) -> Room:
        """Return the room of a pass with gradients.

        Args:
            numbers: of the layer's calls, ascending; several if a pass runs the layer repeatedly.
            num_tokens: T.
            count_SL: its device is read.
        """
        captures, stack = is_capturing(), None
        for candidate in self._stacks:
            key = candidate.captured, candidate.num_tokens, candidate.top.device
            matches = key == (captures, num_tokens, count_SL.device)
            if matches and -1 < candidate.last < numbers[-1] < len(candidate.rooms):
                stack = candidate
        if stack is None:
            stack = self._begin(num_tokens, captures, count_SL.device)
        self._stacks = [*(other for other in self._stacks if other is not stack), stack]
        last = stack.last
        room = stack.rooms[numbers[bisect_right(numbers, last)]]
        room = dataclasses.replace(room, top=stack.top, first=last < 0, stack=stack)
        stack.entries.append(weakref.ref(room))
        return room

    def _begin(self, num_tokens: int, captures: bool, device: torch.device) -> _Stack:
        """Return a stack without rows for a pass that begins."""
        rooms = _rooms_of(tuple(map(call, self._configs)), num_tokens)
        num_rows, stack = rooms[0].limit, None
        # A capture may also take over a stack that eager passes have left.
        for candidate in sorted(self._stacks, key=attrgetter("captured")):
            if candidate.last < 0 and candidate.captured <= captures:
                if candidate.num_rows >= num_rows and candidate.top.device == device:
                    stack = candidate
                elif not candidate.captured:
                    self._stacks.remove(candidate)
        if stack is None:
            top = torch.empty(3, dtype=torch.int32, device=device)  # The first call sets it.
            stack = _Stack(num_rows=num_rows, top=top)
        stack.captured, stack.num_tokens, stack.rooms = captures, num_tokens, rooms
        return stack

    def release(self, *, captured: bool) -> None:
        """Free stacks without rows: those of graphs, all deleted by now, or of eager passes."""
        self._stacks = [s for s in self._stacks if s.captured != captured or s.last >= 0]


@functools.lru_cache
def _rooms_of(configs: tuple[DispatchConfig, ...], num_tokens: int) -> tuple[Room, ...]:
    """Return the room of each call of a store, as far as configs and T decide it."""
    sizes = StoreSizes.of(configs, num_tokens)
    of_calls = zip(configs, sizes.max_rows, sizes.overwritten, strict=True)
    return tuple(
        Room(
            number=number,
            limit=sizes.num_rows,
            max_rows=max_rows,
            share=config.share(num_tokens),
            overwritten=overwritten,
        )
        for number, (config, max_rows, overwritten) in enumerate(of_calls)
    )


def room_of_pass(
    config: DispatchConfig,
    num_tokens: int,
    store: Store | None,
    numbers: Sequence[int],
    inputs: Iterable[Tensor],
) -> TakeRoom:
    """Return the function that gives a pass its room: `Store.take` if backward needs its rows.

    `inputs`: the tensors that may need gradients.
    """
    if config.fits:
        return fitting
    needs = any(tensor.requires_grad for tensor in inputs)
    if store is None or not needs or in_backward() or not trains():
        return partial(scratch, config, num_tokens)
    return partial(store.take, numbers, num_tokens)


def scratch(config: DispatchConfig, num_tokens: int, count_SL: Tensor) -> Room:
    """Return a room that keeps nothing, of a size that follows from the config and T."""
    num_rows = StoreSizes.of([config], num_tokens).num_rows
    return Room(limit=num_rows, max_rows=num_rows, share=config.share(num_tokens))


def fitting(count_SL: Tensor) -> Room:
    """Return a room that keeps nothing, for all rows of an eager pass, counted on the host."""
    num_rows = max(1, int(count_SL.sum()))
    return Room(limit=num_rows, max_rows=num_rows, share=num_rows)
