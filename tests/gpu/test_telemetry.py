"""When capacity grows, graphs are captured again and training goes on, on one GPU and on all.

`tests.gpu.situations` compares telemetry with a count on the host.
"""

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from padded_dispatch.megatron.compat import training_stream
from padded_dispatch.megatron.graphs.capture import LayerGraphs
from padded_dispatch.train.arguments import parse
from padded_dispatch.train.loop import train
from tests.support.gpu_cases import ENVIRONMENT
from tests.support.pool import WorkerPool


def grown(graph: str) -> tuple[list[float], list[float | None], int]:
    """Train with two growths; return losses and fill of every step and the number of captures."""
    flags = (
        f"--device cuda --workers {dist.get_world_size()} --steps 24 --log-every 1 --deterministic "
        "--seq-length 128 --micro-batch 2 --capacity-factor 0.5 --padded-on-overflow grow "
        "--padded-grow-after 2 --padded-grow-factors 0.75,no-drop --padded-telemetry-every 2 "
        f"--graph {graph}"
    )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.cuda.set_stream(training_stream())
    capture, captures = LayerGraphs.capture, []

    def counted(graphs: LayerGraphs) -> Any:
        captures.append(1)
        return capture(graphs)

    with patch.object(LayerGraphs, "capture", counted), contextlib.redirect_stdout(io.StringIO()):
        outcome = train(parse(flags.split()), device)
    return [row.loss for row in outcome.rows], [row.fill for row in outcome.rows], len(captures)


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.gpu), pytest.param(8, marks=pytest.mark.multi_gpu)],
    ids=["one GPU", "all GPUs"],
)
def pool(request) -> Iterator[WorkerPool]:
    ranks = min(request.param, torch.cuda.device_count())
    assert ranks >= min(request.param, 2), "this test was selected, but there are too few GPUs"
    with pytest.MonkeyPatch.context() as environment, WorkerPool(ranks, backend="nccl") as made:
        for name, value in ENVIRONMENT.items():
            environment.setenv(name, value)
        yield made


@pytest.fixture(scope="module")
def eager(pool) -> list[tuple[list[float], list[float | None], int]]:
    return pool.run(grown, "none")


@pytest.mark.parametrize(
    ("graph", "captures"), [("partial", 3), ("layer", 3), ("full-iteration", 0)]
)
def test_growth_captures_again_and_trains_on_as_an_eager_run(pool, eager, graph, captures):
    """Reads are every 2 steps and end a step later: growth after step 5, C = T after step 11."""
    for of_rank, of_eager in zip(pool.run(grown, graph), eager, strict=True):
        losses, fills, num_captures = of_rank
        assert num_captures == captures
        assert (losses, fills) == of_eager[:2]
        # 2 of 8 experts and nothing dropped, from step 12 on.
        assert [fill == 2 / 8 for fill in fills] == [False] * 11 + [True] * 13
