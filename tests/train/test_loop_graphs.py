"""When a run captures; `test_loop.py` has runs with graphs on GPUs."""

from typing import Any
from unittest.mock import MagicMock

import torch

from padded_dispatch.train import loop
from tests.train.test_model import on_a_gpu


class Layers:
    """`LayerGraphs` that note what is asked of them."""

    def __init__(self, chunks: list[Any], **given: Any) -> None:
        self.given, self.events = given, []

    def capture(self) -> None:
        self.events.append("capture")


def test_layers_are_captured_ahead_of_the_first_step_that_is_not_eager(monkeypatch):
    monkeypatch.setattr(loop, "LayerGraphs", Layers)
    monkeypatch.setattr(loop, "run_passes", lambda *_, **given: [given["schedule"]])
    settings, optimizer = on_a_gpu("layer"), MagicMock()
    made: Any = loop._graphs(settings, None, [], optimizer.adam)
    assert made.given == {"seq_length": 64, "micro_batch": 8, "optimizers": (optimizer.adam,)}
    given: Any = dict.fromkeys(("text", "held_out", "retry"))
    trainer = loop.Trainer(
        settings=settings,
        device=torch.device("cpu"),
        chunks=[],
        optimizer=optimizer,
        graphs=made,
        **given,
    )
    for number in range(1, 6):
        assert trainer.step(number).losses == [None]  # Megatron's own schedule.
        made.events.append(number)
    assert made.events == [1, 2, 3, "capture", 4, 5]
