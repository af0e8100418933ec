"""Work that need not wait for everything that its stream has to do.

In backward, a linear computes two gradients, one behind the other: its input's, which goes home to
the tokens, and its weight's, which nobody needs soon. Both are on one stream, so what sends the
first home would wait for the second. `complete` notes the moment when a tensor is whole, and
`beside` lets work that needs this tensor alone start there, on a stream of its own.

The same kernels run, so no bit changes, and a CUDA graph captures the fork and the join. Nothing is
allocated on the other stream: memory that is free for the current one is not yet free there.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, kw_only=True)
class _Moment:
    """When a tensor was whole. `version` tells whether it was changed in place since."""

    storage: StorageWeakRef
    version: int
    event: torch.cuda.Event

    def is_of(self, tensor: Tensor) -> bool:
        same = StorageWeakRef(tensor.untyped_storage()) == self.storage
        return same and tensor._version == self.version


class _Last(threading.local):  # Autograd has threads of its own.
    moment: _Moment | None = None


_last = _Last()


def complete(tensor: Tensor) -> None:
    """Note that `tensor`, on a GPU, is whole once the current stream comes here."""
    if tensor.is_inference():
        return  # It has no version, and nothing comes behind it.
    event = torch.cuda.Event()
    event.record()
    storage = StorageWeakRef(tensor.untyped_storage())
    _last.moment = _Moment(storage=storage, version=tensor._version, event=event)


@contextmanager
def beside(tensor: Tensor) -> Iterator[None]:
    """Start the kernels of the block when `tensor` is whole; what follows waits for them.

    Only if `tensor` is what this thread noted last; else they start where the current stream is.
    They allocate nothing and read nothing that the current stream wrote since.
    """
    moment = forget()
    if moment is None or not moment.is_of(tensor):
        yield
        return
    current, other = torch.cuda.current_stream(), _other_stream(tensor.device)
    other.wait_event(moment.event)
    with torch.cuda.stream(other):
        yield
    current.wait_stream(other)


def forget() -> _Moment | None:
    """What was noted; now nothing is. For whoever has to be in order with all such blocks."""
    moment, _last.moment = _last.moment, None
    return moment


@functools.cache
def _other_stream(device: torch.device) -> torch.cuda.Stream:
    # Before the current one's in line: the current one waits for it in the end.
    return torch.cuda.Stream(device, priority=-1)
