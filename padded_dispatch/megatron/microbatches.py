"""The microbatches of one step, recorded while Megatron's schedule reads them, to be read again.

    recorded = record(data_iterator)      # what Megatron takes: an iterator, a list of them, None
    run(data_iterator=recorded)           # reads the source, once
    run(data_iterator=replay(recorded))   # reads what was recorded, and leaves the source alone

Which ranks read, and how often, is the schedule's business: with pipeline stages only the first and
the last do, with tensor parallelism often only the first rank of a group, and virtual stages have
an iterator each. So nothing is read ahead, and every iterator records what is taken from it.

Copies are recorded, because a loader may fill the same memory again and a forward step may change
its batch. Reading may draw random numbers: a replay then sets the generators that reading drew from
to where it had left them.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from padded_dispatch.megatron.random_states import GeneratorStates


class RecordedMicrobatches:
    """An iterator that hands out another one's microbatches, and can hand them out once more.

    Attributes that it lacks are those of the other iterator.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._recorded: list[tuple[Any, GeneratorStates]] = []

    def __iter__(self) -> "RecordedMicrobatches":
        return self

    def __next__(self) -> Any:
        before = GeneratorStates.now()
        microbatch = next(self._source)
        drawn_from = GeneratorStates.now().changed_since(before)
        self._recorded.append((_copy(microbatch), drawn_from))
        return microbatch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def again(self) -> Iterator[Any]:
        """Yield the recorded microbatches."""
        for microbatch, drawn_from in self._recorded:
            drawn_from.restore()
            yield microbatch


def record(data_iterator: Any) -> Any:
    """Return `data_iterator` in a form that records what is read from it.

    Args:
        data_iterator: what Megatron's schedules take: an iterator, a list with one for each model
            chunk, or None on ranks that read no data.
    """
    if isinstance(data_iterator, list | tuple):
        return [record(one) for one in data_iterator]
    return None if data_iterator is None else RecordedMicrobatches(data_iterator)


def replay(recorded: Any) -> Any:
    """Return an iterator over what the result of `record` has recorded, in the same form."""
    if isinstance(recorded, list):
        return [replay(one) for one in recorded]
    return None if recorded is None else recorded.again()


def _copy(value: Any) -> Any:
    """Copy tensors and arrays inside plain containers; keep other objects as they are."""
    if isinstance(value, Tensor):
        with torch.no_grad():
            return value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {key: _copy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copy, value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_copy, value))
    return value
