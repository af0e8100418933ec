"""Recorded microbatches are read again as they were, whatever happened to them in between."""

import random
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from padded_dispatch.megatron.cpu import megatron_on_cpu
from padded_dispatch.megatron.retry import GeneratorStates, record, replay

Pair = namedtuple("Pair", "ids mask")


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with megatron_on_cpu():
        yield


def test_every_form_that_schedules_take_is_recorded_as_far_as_it_is_read():
    assert record(None) is None and replay(None) is None
    first, second, absent = recorded = record([iter("abc"), iter("xyz"), None])
    assert (next(second), next(first), next(second)) == ("x", "a", "y")
    assert absent is None
    assert [list(one) for one in replay(recorded)[:2]] == [["a"], ["x", "y"]]
    assert replay(recorded)[2] is None
    # The sources are where reading left them.
    assert (next(first), next(second)) == ("b", "z")


def test_one_iterator_for_two_chunks_keeps_its_order():
    source = iter(range(4))
    first, second = recorded = record((source, source))
    assert [next(first), next(second), next(first)] == [0, 1, 2]
    assert [list(one) for one in replay(recorded)] == [[0, 2], [1]]


def test_an_exhausted_iterator_ends_and_other_attributes_show():
    class Loader:
        epoch = 3

        def __next__(self) -> int:
            raise StopIteration

    recorded = record(Loader())
    assert iter(recorded) is recorded and recorded.epoch == 3
    with pytest.raises(StopIteration):
        next(recorded)
    with pytest.raises(AttributeError):
        _ = recorded.absent
    assert list(replay(recorded)) == []


@pytest.mark.parametrize("reuses", [True, False], ids=["loader", "forward step"])
def test_memory_that_is_written_later_does_not_matter(reuses):
    """Either the loader fills the same memory again, or the forward step changes its batch."""

    def batch(value: int) -> dict[str, Any]:
        ids = torch.tensor([value, value])
        other = object()
        array = np.full(2, value)
        return {"ids": ids, "more": [Pair(ids + 1, None), (array, other)], "other": other}

    batches = [batch(0)] * 3 if reuses else [batch(number) for number in range(3)]

    def loader() -> Iterator[dict[str, Any]]:
        for number, one in enumerate(batches):
            if reuses:
                one["ids"].fill_(number)
                one["more"][0].ids.fill_(number + 1)
                one["more"][1][0].fill(number)
            yield one

    recorded = record(loader())
    for one in recorded:
        if not reuses:
            one["ids"] += 100
            one["more"][0].ids.zero_()
            one["more"][1][0].fill(-1)
            one["more"].append("changed")
            del one["other"]
    again = list(replay(recorded))
    assert len(again) == 3
    for number, one in enumerate(again):
        assert one["ids"].tolist() == [number, number]
        pair, (array, other) = one["more"]
        assert isinstance(pair, Pair) and pair.ids.tolist() == [number + 1] * 2
        assert pair.mask is None
        assert array.tolist() == [number, number] and other is one["other"]


def test_reading_that_draws_leaves_the_generators_alike_the_second_time():
    def loader() -> Iterator[float]:
        while True:
            yield random.random() + float(np.random.rand()) + torch.rand(()).item()

    def run(batches: Iterator[float]) -> list[float]:
        """Read two microbatches; the 'model' draws after each."""
        return [number for _ in range(2) for number in (next(batches), torch.rand(()).item())]

    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    before = GeneratorStates.now()
    recorded = record(loader())
    values = run(recorded)
    after = GeneratorStates.now()
    assert len(set(values)) == 4
    before.restore()
    assert run(replay(recorded)) == values
    assert not GeneratorStates.now().changed_since(after).states
