"""When a block starts and who waits for it, with streams and events that only take notes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from padded_dispatch import beside as module
from padded_dispatch.beside import beside, complete, forget


class Notes:
    """Stands in for `torch.cuda`: who did what, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.num_events = 0
        self.now = Stream(self, "main")

    def work(self, name: str) -> None:
        self.said.append(f"{self.now.name}: {name}")

    def event(self) -> "Event":
        self.num_events += 1
        return Event(self, f"event {self.num_events}")

    @contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


class Event:
    def __init__(self, notes: Notes, name: str) -> None:
        self.notes, self.name = notes, name

    def record(self) -> None:
        self.notes.work(self.name)


class Stream:
    def __init__(self, notes: Notes, name: str) -> None:
        self.notes, self.name = notes, name

    def wait_event(self, event: Event) -> None:
        self.notes.said.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, stream: "Stream") -> None:
        self.notes.said.append(f"{self.name} waits for {stream.name}")


@pytest.fixture
def notes(monkeypatch) -> Notes:
    taken = Notes()
    other = Stream(taken, "other")
    replaced: dict[str, Any] = {
        "Event": taken.event,
        "current_stream": lambda: taken.now,
        "stream": taken.on,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(module, "_other_stream", lambda device: other)
    forget()
    return taken


def test_a_block_starts_when_its_tensor_is_whole_and_the_stream_waits_for_it(notes):
    grad = torch.ones(6)
    complete(grad)
    notes.work("weight gradient")
    with beside(grad.view(2, 3)):
        notes.work("send home")
    notes.work("sum")
    assert notes.said == [
        "main: event 1",
        "main: weight gradient",
        "other waits for event 1",
        "other: send home",
        "main waits for other",
        "main: sum",
    ]


def changed_in_place(grad: torch.Tensor) -> torch.Tensor:
    return grad.add_(1)


def copied(grad: torch.Tensor) -> torch.Tensor:
    return grad.clone()


def not_the_last(grad: torch.Tensor) -> torch.Tensor:
    complete(torch.ones(2))
    return grad


def after_another_block(grad: torch.Tensor) -> torch.Tensor:
    with beside(grad):
        pass
    return grad


def after_a_push(grad: torch.Tensor) -> torch.Tensor:
    forget()
    return grad


@pytest.mark.parametrize(
    "what", [changed_in_place, copied, not_the_last, after_another_block, after_a_push]
)
def test_else_a_block_stays_in_line(notes, what):
    grad = torch.ones(6)
    complete(grad)
    grad = what(grad)
    notes.said.clear()
    with beside(grad):
        notes.work("send home")
    assert notes.said == ["main: send home"]


def test_a_freed_tensor_is_not_taken_for_one_at_its_address(notes):
    for _ in range(100):  # The allocator gives the same place again, sooner or later.
        complete(torch.ones(6))
        with beside(torch.ones(6)):
            notes.work("send home")
    assert "other: send home" not in notes.said


def test_inference_notes_nothing(notes):
    with torch.inference_mode():
        complete(torch.ones(2))
    assert notes.said == []
