"""Check on a CPU what streams order: uses of shared memory, and writes of peers to it.

CPU work is finished when a call returns, so results show no missing order. Here streams have vector
clocks, which events carry from one to another. Each op that reads or writes watched memory is noted
with its stream. Ranks run the same calls, so a rank's own calls say when peers write to its memory:
after the barriers that precede the call on its stream, and before the next one there.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from padded_dispatch.utils.patches import Patches

Clock = dict[Any, int]


class StreamOrder:
    """Streams, and the uses of watched memory by address.

    `barriers`: the stream of each barrier. `unordered`: uses and writes that nothing orders.
    """

    def __init__(self) -> None:
        self.barriers: list[Any] = []
        self.unordered: list[str] = []
        self._entered: list[Any] = [torch.cuda.Stream()]
        self._clocks: dict[Any, Clock] = defaultdict(lambda: defaultdict(int))
        self._at_barriers: dict[Any, list[Clock]] = defaultdict(list)
        self._uses: dict[int, list[tuple[Any, int]]] = {}
        self._written: dict[int, tuple[Any, int | None]] = {}

    @property
    def stream(self) -> Any:
        """The current stream."""
        return self._entered[-1]

    def watch(self, address: int) -> None:
        """Watch a tensor that begins at `address`."""
        self._uses.setdefault(address, [])

    def barrier(self) -> None:
        """Note a barrier of all ranks on the current stream."""
        self.barriers.append(self.stream)
        self._at_barriers[self.stream].append(dict(self._tick()))
        for address, (stream, when) in self._written.items():
            if stream is self.stream and when is None:
                self._written[address] = stream, self._clocks[stream][stream]

    def write(self, address: int) -> None:
        """Note that peers write, before the next barrier of the current stream."""
        if address not in self._uses:
            return
        now = self._clocks[self.stream]
        done: Clock = defaultdict(int)  # What all ranks have done before their writes.
        for stream, barriers in self._at_barriers.items():
            known = [clock for clock in barriers if clock[stream] <= now[stream]]
            for other, when in known[-1].items() if known else ():
                done[other] = max(done[other], when)
        if any(done[stream] < when for stream, when in self._uses[address]):
            self.unordered.append("memory is overwritten before its last use is done")
        self._uses[address] = []
        self._written[address] = self.stream, None

    def use(self, address: int) -> None:
        """Note a use on the current stream."""
        if address not in self._uses:
            return
        clock = self._tick()
        self._uses[address].append((self.stream, clock[self.stream]))
        if address in self._written:
            stream, when = self._written[address]
            if when is None or clock[stream] < when:
                self.unordered.append("memory is read before peers have written it")

    def _tick(self) -> Clock:
        clock = self._clocks[self.stream]
        clock[self.stream] += 1
        return clock

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow streams, events and ops inside the block."""
        order = self

        class Event:
            def __init__(self, *args: object, **kwargs: object) -> None:
                self._clock: Clock = {}

            def record(self, stream: Any = None) -> None:
                self._clock = dict(order._clocks[stream or order.stream])

            def wait(self, stream: Any = None) -> None:
                clock = order._clocks[stream or order.stream]
                for other, when in self._clock.items():
                    clock[other] = max(clock[other], when)

        class Ops(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if not func.is_view:
                    for leaf in tree_leaves((args, kwargs)):
                        if isinstance(leaf, Tensor) and leaf.numel():
                            order.use(leaf.untyped_storage().data_ptr())
                return func(*args, **(kwargs or {}))

        @contextmanager
        def stream(entered: Any) -> Iterator[None]:
            order._entered.append(entered)
            yield
            order._entered.pop()

        with Patches() as patches, Ops():
            patches.set(torch.cuda, "Event", Event)
            patches.set(torch.cuda, "stream", stream)
            patches.set(torch.cuda, "current_stream", lambda device=None: order.stream)
            yield
