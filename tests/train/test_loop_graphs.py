"""When a run captures, and that replays equal eager steps."""

import contextlib
import io
import os
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from padded_dispatch.megatron.compat import training_stream
from padded_dispatch.train import loop
from padded_dispatch.train.arguments import parse
from padded_dispatch.train.model import EAGER_STEPS
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


def losses_on_gpus(graph: str, more: str) -> list[float]:
    """Return the loss of every step of a tiny run on the workers' GPUs."""
    ranks = dist.get_world_size()
    flags = (
        f"--device cuda --workers {ranks} --steps {EAGER_STEPS + 51} --deterministic "
        f"--seq-length 128 --micro-batch 2 --capacity-factor 1.0 --graph {graph} {more}"
    )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.cuda.set_stream(training_stream())
    with contextlib.redirect_stdout(io.StringIO()):
        outcome = loop.train(parse(flags.split()), device)
    return [row.loss for row in outcome.rows]


GRAPHS = pytest.mark.parametrize("graph", ["partial", "layer", "full-iteration"])


@pytest.mark.gpu
@GRAPHS
def test_fifty_replays_on_one_gpu_equal_eager_steps(gpu_pools, graph):
    replayed, eager = (gpu_pools[1].run(losses_on_gpus, which, "") for which in (graph, "none"))
    assert replayed == eager


@pytest.mark.multi_gpu
@pytest.mark.parametrize("more", ["", "--global-batch 8", "--balancing expert-bias"])
@GRAPHS
def test_fifty_replays_on_two_gpus_equal_eager_steps(gpu_pools, graph, more):
    replayed, eager = (gpu_pools[2].run(losses_on_gpus, which, more) for which in (graph, "none"))
    assert replayed == eager
