"""Figures over all ranks: sums of losses and counts, and times."""

from typing import Any

import torch
import torch.distributed as dist

from padded_dispatch.train.metrics import Meter, Row, Step
from tests.support.threads import run_on_threads
from tests.support.tiny import parse

CPU = torch.device("cpu")
# 4 sequences of 25 bytes.
FLAGS = ["--device", "cpu", "--workers", "2", "--micro-batch", "2", "--seq-length", "25"]


class Event:
    """A CUDA event: it has no time before it, or one behind it, has been waited for."""

    def __init__(self, ms: float, before: Any) -> None:
        self.ms, self.before, self.ended = ms, before, False

    def synchronize(self) -> None:
        self.ended = True
        if self.before:
            self.before.synchronize()

    def elapsed_time(self, end: "Event") -> float:
        assert end.ended
        return self.ms


def step(
    losses: list[float],
    lr: float,
    ms: float,
    retried: bool | None = None,
    before: Step | None = None,
) -> Step:
    event: Any = Event(ms, before and before.done)
    tensors = [torch.tensor(loss) for loss in losses]
    return Step(losses=tensors, lr=lr, retried=retried, start=event, done=event, host_ms=0.0)


def _rows() -> list[Row]:
    """Return rows of two ranks; the second has no losses."""
    first = dist.get_rank() == 0
    meter = Meter(parse(FLAGS), CPU)
    meter.add(one := step([1.0, 2.0] if first else [], 0.1, 1000.0, True))
    meter.add(step([4.0, 5.0] if first else [], 0.5, 3000.0, False, one))
    rows = [meter.read()]
    meter.add(step([7.0] if first else [], 0.25, 1000.0))
    return [*rows, meter.read()]


def test_rows_sum_over_steps_and_ranks():
    first: Any = {"step": 2, "loss": 3.0, "lr": 0.5, "step_ms": 2000.0, "tokens_per_s": 50.0}
    first |= {"retried": 1}
    second: Any = {"step": 3, "loss": 7.0, "lr": 0.25, "step_ms": 1000.0, "tokens_per_s": 100.0}
    second |= {"retried": None}
    assert run_on_threads(2, _rows) == [[Row(**first), Row(**second)]] * 2


def test_a_row_as_text():
    given: Any = {"step": 20, "loss": 3.01234, "lr": 5e-3, "step_ms": 41.54, "tokens_per_s": 9876.5}
    row = Row(**given, dropped=0.041, retried=None)
    text = "step  20/200 | loss 3.0123 | lr 5.0e-03 | 41.5 ms | 9,876 tokens/s"
    assert row.line(200) == f"{text} | dropped 4.1%"
    uncounted = Row(**given, dropped=None, retried=2)
    assert uncounted.line(200) == f"{text} | retried 2"
