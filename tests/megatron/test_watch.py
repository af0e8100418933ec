"""A watch shows each reading once, and tells of changes when its loop can follow them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from padded_dispatch.megatron import watch as watch_module
from padded_dispatch.megatron.options import PaddedOptions
from padded_dispatch.megatron.watch import CapacityWatch
from tests.megatron.test_control import factors, snapshots
from tests.megatron.test_telemetry import model
from tests.support import tiny

GROW = dict(on_overflow="grow", grow_after=1, grow_factors=(1.0, 2.0), telemetry_every=5)
NO_STEPS = replace(snapshots(5, 0), num_steps=0)


class Readings:
    """Telemetry whose readings are written down."""

    pending: Any = None

    def __init__(self, chunks: list[Any], **given: int) -> None:
        self.given = given

    def step(self) -> Any:
        return self.pending

    finish = read = step


@pytest.fixture(autouse=True)
def one_process(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(watch_module, "Telemetry", Readings)
    with tiny.one_process():
        yield


class Watched:
    """A watch of layers 1 and 2, with factor 0.5, and what it has called."""

    def __init__(self, given: dict[str, Any], **options: Any) -> None:
        self.shown: list[Any] = []
        self.changes: list[tuple[int, str]] = []
        self.chunk: Any = model(1, 2)
        self.watch = CapacityWatch(
            [self.chunk],
            PaddedOptions(**options),
            show=self.shown.append,
            changed=lambda step, changes: self.changes.append((step, " ".join(changes)[:27])),
            **given,
        )

    def read(self, *dropped: int) -> Any:
        reading = self.watch._telemetry.pending = snapshots(*dropped) if dropped else None
        return reading


def test_steps():
    watched = Watched({"step": 7}, **GROW)
    assert watched.watch._telemetry.given == {"every": 5, "step": 7}
    watched.watch.after_step()
    assert (watched.watch.step, watched.shown, watched.changes) == (8, [], [])
    quiet = watched.read(0, 0)
    watched.watch.after_step()
    assert (watched.shown, watched.changes) == ([quiet], [])
    loud = watched.read(0, 5)
    watched.watch.after_step()
    assert watched.shown == [quiet, loud]
    assert watched.changes == [(10, "capacity factor 0.5 -> 1: l")]
    assert watched.watch.factors == {1: 0.5, 2: 1.0}
    assert factors(watched.chunk) == [0.5, 1.0]


def test_a_new_run_starts_at_step_0():
    watched = Watched({}, **GROW)
    assert (watched.watch.step, watched.watch._telemetry.given["step"]) == (0, 0)
    assert (watched.watch.factors, watched.watch.reads_above) == ({1: 0.5, 2: 0.5}, {1: 0, 2: 0})


def test_a_resumed_run_has_the_factors_of_its_layers():
    watched = Watched({"factors": {2: 3.0, 9: 4.0}, "reads_above": {1: 2}}, **GROW)
    assert (watched.watch.factors, watched.watch.reads_above) == ({1: 0.5, 2: 3.0}, {1: 2, 2: 0})
    assert factors(watched.chunk) == [0.5, 3.0]


def test_a_pending_reading_between_steps():
    watched = Watched({"step": 7}, **GROW)
    watched.watch.read_pending()
    assert watched.shown == []
    loud = watched.read(5, 0)
    watched.watch.read_pending()
    assert watched.shown == [loud]
    assert watched.changes == [(7, "capacity factor 0.5 -> 1: l")]


def test_a_checkpoint_has_the_factors_after_its_reading():
    watched = Watched({}, **GROW)
    loud = watched.read(5, 0)
    with watched.watch.checkpoint():
        assert watched.shown == [loud]
        assert watched.changes == [(0, "capacity factor 0.5 -> 1: l")]


def test_a_checkpoint_is_saved_before_an_error():
    watched, saved = Watched({}, on_overflow="error"), []
    watched.read(5, 0)
    with pytest.raises(RuntimeError, match="layer 1 dropped"), watched.watch.checkpoint():
        saved.append(True)
    assert saved


def test_the_end_shows_and_checks_what_is_left():
    watched = Watched({}, on_overflow="error")
    watched.watch._telemetry.pending = NO_STEPS
    watched.watch.finish()
    assert watched.shown == []
    loud = watched.read(5, 0)
    with pytest.raises(RuntimeError, match="layer 1 dropped"):
        watched.watch.finish()
    assert watched.shown == [loud]
