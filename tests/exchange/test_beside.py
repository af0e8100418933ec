"""The way home beside a product: the order of work on two streams, and what is asked of fc1."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from padded_dispatch.exchange import beside
from padded_dispatch.exchange.beside import Beside, Room, pays
from padded_dispatch.utils.shapes import SHAPES

GPU = torch.device("cuda")


class Streams:
    """Stands in for CUDA's streams; `events` is what happens on them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.current = "main"

    def note(self, what: str) -> str:
        self.events.append(f"{what} on {self.current}")
        return what

    @contextmanager
    def using(self, stream: "Stream") -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


class Stream:
    """One of `Streams`."""

    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_stream(self, other: "Stream") -> None:
        self.streams.events.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: Stream(streams, streams.current)
    )
    monkeypatch.setattr(torch.cuda, "stream", streams.using)
    monkeypatch.setattr(beside, "side_stream", lambda device: Stream(streams, "side"))
    return streams


def _gradient(streams: Streams, given: list[int]):
    """Return a gradient that waits, and notes when it is computed and with how many spared."""

    def compute(*, spare: int) -> torch.Tensor:
        streams.note("product")
        given.append(spare)
        return torch.tensor(7.0)

    return compute


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_both_begin_behind_the_fork_and_end_before_the_join(streams, device):
    spared: list[int] = []
    delayed = deque([_gradient(streams, spared)])
    given = Beside(weight=torch.zeros(1), delayed=delayed, room=Room(stores=5, spare=3))
    rows, gradient = given.run(lambda: streams.note("rows"), torch.device(device))
    assert (rows, gradient.item(), spared, len(delayed)) == ("rows", 7.0, [3], 0)
    if device == "cpu":
        assert streams.events == ["rows on main", "product on main"]
    else:
        assert streams.events == [
            "side waits for main",
            "product on main",
            "rows on side",
            "main waits for side",
        ]


@pytest.mark.parametrize(
    ("model", "num_ranks", "tokens", "returned", "added"),
    [
        ("qwen3-30b-a3b", 2, 4096, True, True),
        ("qwen3-30b-a3b", 8, 4096, True, True),
        ("qwen3-30b-a3b", 2, 512, True, False),
        ("qwen3-30b-a3b", 1, 4096, False, False),
        ("gpt-oss-20b", 2, 4096, True, False),
        ("gpt-oss-20b", 8, 4096, True, True),
    ],
)
def test_it_pays_where_rows_travel_longer_than_the_product_loses(
    model, num_ranks, tokens, returned, added
):
    shape = SHAPES[model]
    sizes = dict(
        num_rows=tokens * shape.top_k,
        width=shape.hidden_size,
        out=2 * shape.ffn_size,
        num_experts=shape.num_experts // num_ranks,
        num_ranks=num_ranks,
    )
    assert pays(**sizes, added=False) == returned
    assert pays(**sizes, added=True) == added


@pytest.mark.parametrize("num_waiting", [0, 2])
def test_a_pass_leaves_one_gradient(streams, num_waiting):
    """None: the experts did not take the queue, and autograd would lack the gradient."""
    delayed = deque([_gradient(streams, [])] * num_waiting)
    given = Beside(weight=torch.zeros(1), delayed=delayed, room=Room())
    with pytest.raises(AssertionError, match="fc1's backward pass"):
        given.run(lambda: streams.note("rows"), GPU)
    assert streams.events == []
