"""`--graph`: refused combinations, fields of the config, and when a run captures."""

import contextlib
import dataclasses
import io
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig

from padded_dispatch.megatron.compat import training_stream
from padded_dispatch.train import loop
from padded_dispatch.train.arguments import parse
from padded_dispatch.train.graphs import EAGER_STEPS, TrainingGraphs, graph_fields
from padded_dispatch.train.settings import Settings
from tests.megatron.graphs.test_capture import BATCH, SEQUENCE, Training, differences, graphs
from tests.support import tiny
from tests.support.pool import WorkerPool

SCOPES = (
    "cuda_graph_modules"
    if "cuda_graph_modules" in TransformerConfig.__dataclass_fields__
    else "cuda_graph_scope"
)


def on_a_gpu(graph: str, dispatcher: str = "padded_alltoall") -> Settings:
    """Return settings as on a machine with GPUs."""
    factor = 1.25 if dispatcher in ("padded_alltoall", "alltoall-drop-pad") else None
    settings = parse(["--seq-length", str(SEQUENCE), "--micro-batch", str(BATCH)])
    replace: Any = dataclasses.replace
    return replace(
        settings,
        dispatch=replace(settings.dispatch, dispatcher=dispatcher, capacity_factor=factor),
        layout=replace(settings.layout, device="cuda"),
        output=replace(settings.output, graph=graph),
    )


@pytest.mark.parametrize("graph", ["partial", "layer", "full-iteration"])
def test_a_cpu_has_no_graphs(graph):
    with pytest.raises(
        ValueError, match=f"^--graph must be none on a CPU, got {graph!r}; add --device cuda"
    ):
        parse(["--graph", graph])


@pytest.mark.parametrize(
    ("dispatcher", "graph", "possible"),
    [
        ("allgather", "partial", "none"),
        ("alltoall", "layer", "none or partial"),
        ("alltoall", "full-iteration", "none or partial"),
        ("alltoall-drop-pad", "full-iteration", "none or partial or layer"),
    ],
)
def test_stock_dispatchers_refuse_what_they_cannot(dispatcher, graph, possible):
    message = f"^--graph must be {possible} with --dispatcher {dispatcher}, got {graph!r}$"
    with pytest.raises(ValueError, match=message):
        on_a_gpu(graph, dispatcher)


@pytest.mark.parametrize(
    ("dispatcher", "graph"),
    [
        ("alltoall", "partial"),
        ("alltoall-drop-pad", "layer"),
        ("padded_alltoall", "partial"),
        ("padded_alltoall", "layer"),
        ("padded_alltoall", "full-iteration"),
    ],
)
def test_everything_else_is_accepted(dispatcher, graph):
    assert on_a_gpu(graph, dispatcher).output.graph == graph


def test_fields_of_the_config():
    assert graph_fields(on_a_gpu("none")) == {}
    common = {"cuda_graph_impl": "transformer_engine", "cuda_graph_warmup_steps": 3}
    partial = ["attn", "moe_router", "moe_preprocess"]
    assert graph_fields(on_a_gpu("partial")) == {**common, SCOPES: partial}
    assert graph_fields(on_a_gpu("layer")) == {**common, SCOPES: ["attn", "moe"]}
    whole = graph_fields(on_a_gpu("full-iteration"))
    if SCOPES == "cuda_graph_modules":
        assert (whole["cuda_graph_impl"], whole[SCOPES]) == ("full_iteration", [])
    else:
        assert (whole["cuda_graph_impl"], whole[SCOPES]) == ("local", ["full_iteration"])


@pytest.fixture
def megatron() -> Iterator[None]:
    with tiny.one_process(), graphs():
        yield


class _Adam:
    """The part of `MegatronAdam` that a capture uses to clear gradients."""

    def __init__(self, adam: torch.optim.Optimizer) -> None:
        self.adam = adam


def test_a_run_captures_after_its_eager_steps(megatron):
    eager, graphed = Training(None), Training(("attn", "moe"))
    layers = graphed.model.module.module.decoder.layers
    optimizer: Any = _Adam(graphed.optimizer)
    made = TrainingGraphs(on_a_gpu("layer"), graphed.config, [graphed.model], optimizer)
    assert made.schedule is None
    steps, captured = [], []
    for number in range(EAGER_STEPS + 2):
        with made.step():
            captured.append(all(layer.cuda_graphs for layer in layers))
            steps.append(graphed.step(number))
    made.delete()
    assert captured == [False] * EAGER_STEPS + [True, True]
    assert not any(layer.cuda_graphs for layer in layers)
    assert differences([eager.step(number) for number in range(EAGER_STEPS + 2)], steps) == []
    assert sorted(made.memory_gib) == [
        "allocated after capture",
        "allocated before capture",
        "reserved after capture",
        "reserved before capture",
    ]


def test_a_larger_factor_is_captured_again_and_trained_with(megatron):
    """Without the second capture, the guard would raise at the replay."""
    eager, graphed = Training(None), Training(("attn", "moe"))
    optimizer: Any = _Adam(graphed.optimizer)
    made = TrainingGraphs(on_a_gpu("layer"), graphed.config, [graphed.model], optimizer)
    found, expected, captured = [], [], []
    for number in range(EAGER_STEPS + 4):
        if number == EAGER_STEPS + 2:
            for training in (eager, graphed):
                for layer in training.moe_layers:
                    layer.token_dispatcher.configs.set_factor(0.5)
            made.recapture()
            captured.append(any(layer.cuda_graphs for layer in layers_of(graphed)))
        with made.step():
            captured.append(all(layer.cuda_graphs for layer in layers_of(graphed)))
            found.append(graphed.step(number))
        expected.append(eager.step(number))
    made.delete()
    assert captured == [False] * EAGER_STEPS + [True, True, False, True, True]
    assert differences(expected, found) == []
    slots = [int(layer.token_dispatcher.counters.num_slots) for layer in graphed.moe_layers]
    assert slots == [int(layer.token_dispatcher.counters.num_slots) for layer in eager.moe_layers]


def layers_of(training: Training) -> Any:
    return training.model.module.module.decoder.layers


@contextlib.contextmanager
def no_synchronisation_in_replays() -> Iterator[list[int]]:
    """Raise if the passes of a replayed step wait for the device; count those steps."""
    run_passes, calls, replays = loop.run_passes, [], []

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) <= EAGER_STEPS + 1:
            return run_passes(*args, **kwargs)
        replays.append(1)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run_passes(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with patch.object(loop, "run_passes", watched):
        yield replays


def losses_on_gpus(graph: str, more: str) -> list[float]:
    """Return the loss of every step of a tiny run whose replays do not synchronise."""
    ranks = dist.get_world_size()
    steps = EAGER_STEPS + 1 + 50
    flags = (
        f"--device cuda --workers {ranks} --steps {steps} --log-every 1 --deterministic "
        f"--seq-length 128 --micro-batch 2 --capacity-factor 1.0 --graph {graph} {more}"
    )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.cuda.set_stream(training_stream())
    watch = contextlib.nullcontext([]) if graph == "none" else no_synchronisation_in_replays()
    with watch as replays, contextlib.redirect_stdout(io.StringIO()):
        outcome = loop.train(parse(flags.split()), device)
    assert len(replays) == (0 if graph == "none" else 50)
    return [row.loss for row in outcome.rows]


@pytest.fixture(scope="module")
def gpu() -> Iterator[WorkerPool]:
    with WorkerPool(1, backend="nccl") as pool:
        yield pool


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[WorkerPool]:
    with WorkerPool(2, backend="nccl") as pool:
        yield pool


def losses(pool: WorkerPool, graph: str, more: str = "") -> list[float]:
    return pool.run(losses_on_gpus, graph, more)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("graph", ["partial", "layer", "full-iteration"])
def test_fifty_replays_on_one_gpu_equal_eager_steps(gpu, graph):
    assert losses(gpu, graph) == losses(gpu, "none")


@pytest.mark.multi_gpu
@pytest.mark.parametrize("more", ["", "--global-batch 8", "--balancing expert-bias"])
@pytest.mark.parametrize("graph", ["partial", "layer", "full-iteration"])
def test_fifty_replays_on_two_gpus_equal_eager_steps(two_gpus, graph, more):
    assert losses(two_gpus, graph, more) == losses(two_gpus, "none", more)
