"""Padding masks that change, in graphs of each scope over the stand-in for CUDA graphs."""

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from padded_dispatch.megatron import schedule
from padded_dispatch.megatron.compat import iteration_graph, layer_graphs
from padded_dispatch.megatron.graphs import LayerGraphs
from tests.megatron.graphs.test_capture import (
    BATCH,
    MICROBATCHES,
    NUM_TOKENS,
    PARTIAL,
    SEQUENCE,
    WHOLE,
    Results,
    Scope,
    Training,
    differences,
    graphs,
    no_python,
    unreachable,
)
from tests.support import parity, tiny
from tests.support.graph_protocol import GraphedLayer
from tests.support.pool import WorkerPool

SCOPES = [*WHOLE, *PARTIAL, ("attn",)]
ATTENTION_ALONE = ("attn",)
# With an auxiliary loss, a loss of the logits and an expert bias, which all count tokens.
SETTINGS: dict[str, Any] = {
    "moe_expert_capacity_factor": 1.0,
    "moe_z_loss_coeff": 0.01,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    with tiny.one_process(), graphs():
        yield


def mask_of(seed: int, batch: int = BATCH, sequence: int = SEQUENCE) -> Tensor:
    """Return a mask [B, S] for a microbatch: nothing, all but one token, or some of the tokens."""
    if seed % 5 == 4:
        return torch.zeros(batch, sequence, dtype=torch.bool)
    random = torch.Generator().manual_seed(seed)
    mask_BS = torch.rand(batch, sequence, generator=random) < (2 if seed % 5 == 3 else 0.4)
    mask_BS[0, 0] = False
    return mask_BS


class Masked(Training):
    """Training in which each microbatch has a mask of its own."""

    def forward(self, batch: int, sequence: int, seed: int, **inputs: Any) -> Tensor:
        given = {"padding_mask": mask_of(seed, batch, sequence)} | inputs
        return super().forward(batch, sequence, seed, **given)


@functools.cache
def eager_run(**settings: Any) -> list[Results]:
    training = Masked(None, **SETTINGS, **settings)
    return [training.step(number) for number in range(4)]


def graphed_run(scope: Scope, **settings: Any) -> list[Results]:
    training = Masked(scope, **SETTINGS, **settings)
    steps = [training.step(0)]
    made = LayerGraphs([training.model], seq_length=SEQUENCE, micro_batch=BATCH)
    report = made.capture()  # Its self-test compares replays with eager runs, with a mask.
    assert report is not None and report.unreproducible == ()
    for number in (1, 2):
        training.evaluate(number)
        if scope == ATTENTION_ALONE:
            steps.append(training.step(number))
        else:
            with no_python(training, scope):
                steps.append(training.step(number))
    made.delete()
    return [*steps, training.step(3)]


class Layer:
    """As much of a layer as a mask needs before a capture."""

    def __init__(self, **fields: Any) -> None:
        self.config = SimpleNamespace(**fields)


def test_a_layer_notes_the_shape_of_its_last_mask():
    layer = Layer(**layer_graphs("moe"))
    schedule.note_mask(layer, None)
    assert schedule.sample_mask(layer) == {}
    for shape, every_third in (
        ((2, 3), [[0, 1, 0], [0, 1, 0]]),
        ((2, 4), [[0, 1, 0, 0], [1, 0, 0, 1]]),
    ):
        schedule.note_mask(layer, torch.ones(shape, dtype=torch.bool))
        schedule.note_mask(layer, None)
        assert schedule.sample_mask(layer)["padding_mask"].int().tolist() == every_third


def test_other_graphs_need_no_mask():
    """Graphs of attention alone, Megatron's own, none, and those of whole iterations."""
    local = {**layer_graphs("moe"), "cuda_graph_impl": "local"}
    for fields in (layer_graphs("attn"), local, {"cuda_graph_impl": "none"}, iteration_graph()):
        layer = Layer(**fields)
        schedule.note_mask(layer, torch.ones(2, 3, dtype=torch.bool))
        assert schedule.sample_mask(layer) == {}


@pytest.mark.parametrize("scope", SCOPES, ids=lambda scope: "+".join(scope) or "layer")
def test_replays_follow_a_mask_that_changes(megatron, scope):
    eager = eager_run()
    assert differences(eager, graphed_run(scope)) == []
    # The cases differ: masks leave out tokens of each step, and another number of them.
    masked = [
        sum(int(mask_of(number * MICROBATCHES + m).sum()) for m in range(MICROBATCHES))
        for number in range(4)
    ]
    asked = [int(step["demand_E of layer 0"].sum()) // tiny.TOP_K for step in eager]
    assert asked == [MICROBATCHES * NUM_TOKENS - number for number in masked]
    assert len(set(masked)) == 4


def test_replays_follow_a_mask_with_recompute(megatron):
    """Up to 0.17, a backward graph recomputes the layer, with the mask of its own forward."""
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    training = Masked(("moe",), **SETTINGS, **recompute)
    results = [training.step(0)]
    training.capture()
    results += [training.step(number) for number in (1, 2, 3)]
    assert differences(eager_run(), results) == []


def two_ranks(scope: Scope) -> list[str]:
    with parity.megatron("cpu", expert_model_parallel_size=2), graphs():
        return differences(eager_run(), graphed_run(scope))


@pytest.mark.parametrize("scope", [WHOLE[1], PARTIAL[2]], ids="+".join)
def test_replays_follow_a_mask_on_two_ranks(pool2: WorkerPool, scope):
    assert pool2.run(two_ranks, scope) == [[], []]


def test_a_step_without_a_mask_masks_nothing(megatron):
    training = Masked(("attn", "moe"), **SETTINGS)
    training.step(0)
    training.capture()
    training.forward(BATCH, SEQUENCE, seed=1)
    for layer in training.moe_layers:
        layer.token_dispatcher.counters.demand_E.zero_()
    training.forward(BATCH, SEQUENCE, seed=1, padding_mask=None)
    for layer in training.moe_layers:
        assert layer.token_dispatcher.counters.demand_E.sum() == NUM_TOKENS * tiny.TOP_K


def test_a_mask_after_a_capture_without_one_is_refused(megatron):
    training = Training(("attn", "moe"))
    training.step(0)
    training.capture()
    mask_BS = mask_of(0)
    with (
        patch.object(GraphedLayer, "replay_forward", unreachable),
        pytest.raises(ValueError, match=r"padding_mask must be None in a replay .*got \[2, 7\]"),
    ):
        training.forward(BATCH, SEQUENCE, seed=0, padding_mask=mask_BS)
    # An eager step with a mask changes nothing for the graphs that are there.
    layers = training.model.module.module.decoder.layers
    kept = [layer.cuda_graphs for layer in layers]
    for layer in layers:
        layer.cuda_graphs = []
    training.forward(BATCH, SEQUENCE, seed=0, padding_mask=mask_BS)
    for layer, captured in zip(layers, kept, strict=True):
        layer.cuda_graphs = captured
    with pytest.raises(ValueError, match=r"padding_mask must be None .*before the capture"):
        training.forward(BATCH, SEQUENCE, seed=0, padding_mask=mask_BS)


def test_a_mask_of_another_shape_is_refused(megatron):
    training = Masked(("moe",), **SETTINGS)
    training.forward(BATCH + 1, SEQUENCE, seed=0)
    with pytest.raises(
        ValueError, match=r"padding_mask.shape must be \[2, 7\] as in .*, got \[3, 7\]"
    ):
        training.capture()
    training.forward(BATCH, SEQUENCE, seed=0)  # An eager step with the right one mends it.
    training.capture()
    layer = training.model.module.module.decoder.layers[0]
    with (
        pytest.raises(ValueError, match=r"padding_mask.shape must be \[2, 7\] .*, got \[1, 7\]"),
        schedule.replayed(layer, mask_of(0)[:1]),
    ):
        pass


def test_graphs_without_masks_have_none(megatron):
    training = Training(("moe",))
    training.step(0)
    training.capture()
    masked = Masked(("moe",))
    masked.step(0)
    masked.capture()
    ops = [
        len(run.model.module.module.decoder.layers[0].cuda_graphs[0]._forward._calls)
        for run in (training, masked)
    ]
    assert ops[0] < ops[1]
