"""`LayerGraphs` and `IterationGraph`: capture, self-test and guard, over the stand-in."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from padded_dispatch.megatron.graphs import guard, selftest
from padded_dispatch.megatron.graphs.capture import (
    IterationGraph,
    LayerGraphs,
    check_random_states,
)
from padded_dispatch.megatron.graphs.selftest import SelfTest
from tests.megatron.graphs.test_capture import (
    BATCH,
    MICROBATCHES,
    PARTIAL,
    SEQUENCE,
    STOCK_DROP_AND_PAD,
    Training,
    differences,
    graphs,
    unreachable,
)
from tests.support import parity
from tests.support.graph_protocol import GraphedLayer
from tests.support.pool import WorkerPool


def layer_graphs(training: Training) -> LayerGraphs:
    return LayerGraphs([training.model], seq_length=SEQUENCE, micro_batch=BATCH)


def captured(scope: tuple[str, ...], **settings: Any) -> tuple[Training, LayerGraphs]:
    training = Training(scope, **settings)
    made = layer_graphs(training)
    made.capture()
    return training, made


@pytest.mark.parametrize("scope", [(), PARTIAL[2]], ids=["layer", "parts"])
def test_a_loop_with_graphs_equals_one_without(megatron, monkeypatch, scope):
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    eager = Training(None, moe_expert_capacity_factor=1.0)
    graphed = Training(scope, moe_expert_capacity_factor=1.0)
    made = layer_graphs(graphed)
    report = made.capture()  # Without an eager step before; it does its own warm-up.
    assert report is not None and report.unreproducible == () and report.other_kernels == ()
    assert MoEAuxLossAutoScaler.main_loss_backward_scale.shape == (1,)
    # Per layer: output, gradient of the input, and one gradient per parameter.
    num_params = len(list(graphed.model.module.module.decoder.layers.parameters()))
    assert report.num_tensors == num_params + 2 * 2
    steps = [graphed.step(0), graphed.step(1)]
    made.delete()
    steps.append(graphed.step(2))
    assert differences([eager.step(number) for number in range(3)], steps) == []


def state_of(training: Training) -> dict[str, Tensor]:
    model = training.model
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    kept |= {f"{name}.main_grad": p.main_grad.clone() for name, p in model.named_parameters()}
    for index, layer in enumerate(training.moe_layers):
        for number, tensor in enumerate(layer.token_dispatcher.counters.tensors()):
            kept[f"counter {number} of layer {index}"] = tensor.clone()
    kept["cpu"] = torch.get_rng_state()
    states: dict[str, Tensor] = get_cuda_rng_tracker().get_states()
    return kept | {f"random state {name}": state.clone() for name, state in states.items()}


@pytest.mark.parametrize("settings", [{}, {"hidden_dropout": 0.1}], ids=["plain", "dropout"])
def test_capture_and_self_test_restore_state(megatron, settings):
    bias = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    training = Training(("attn", "moe"), **bias, **settings)
    training.forward(BATCH, SEQUENCE, seed=3)  # Counts are not all zero.
    before = state_of(training)
    assert any(before[f"counter 0 of layer {index}"].any() for index in range(2))
    layer_graphs(training).capture()
    after = state_of(training)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert all(param.grad is None for param in training.model.parameters())


@pytest.mark.parametrize(
    ("what", "index"), [("its output", 0), ("the gradient of its input", 1)], ids=str
)
def test_self_test_names_what_differs(megatron, what, index):
    def replay(graphed: GraphedLayer, given: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        results = originals[index](graphed, given)
        if graphed._layer.layer_number == 2:
            results[0][0, 0, 0] += 1
        return results

    names = ("replay_forward", "replay_backward")
    originals = [getattr(GraphedLayer, name) for name in names]
    with (
        patch.object(GraphedLayer, names[index], replay),
        pytest.raises(RuntimeError, match=f"rank 0: layer 2: {what} differs from eager") as error,
    ):
        captured(("moe",))
    assert "layer 1" not in str(error.value)


def test_self_test_reports_tensors_that_differ_between_eager_runs(megatron):
    training = Training(("moe",))
    experts, forward = training.moe_layers[0].experts, training.moe_layers[0].experts.forward
    calls = iter(range(100))

    def forward_with_noise(*args: Any) -> Any:
        output, bias = forward(*args)
        return output + next(calls), bias

    with patch.object(experts, "forward", forward_with_noise):
        report = layer_graphs(training).capture()
    assert isinstance(report, SelfTest)
    assert "layer 1: its output" in report.unreproducible
    assert not any(name.startswith("layer 2") for name in report.unreproducible)


def test_self_test_reports_kernels_that_only_a_capture_chooses(megatron, caplog):
    training = Training(("moe",))
    experts, forward = training.moe_layers[1].experts, training.moe_layers[1].experts.forward
    chosen_as_captured = [False]

    def forward_by_choice(*args: Any) -> Any:
        output, bias = forward(*args)
        # The stand-in's capture pretends that there are GPUs.
        return output + float(chosen_as_captured[0] or torch.cuda.is_available()), bias

    def choose(as_captured: bool) -> Callable[[], None]:
        return lambda: chosen_as_captured.__setitem__(0, as_captured)

    with (
        patch.object(experts, "forward", forward_by_choice),
        patch.object(selftest, "set_capture_start", choose(True)),
        patch.object(selftest, "set_capture_end", choose(False)),
    ):
        report = layer_graphs(training).capture()
    assert report is not None and report.other_kernels == ("layer 2",)
    assert "layer 2: graphs compute with other kernels than eager training" in caplog.text


def error_on_two_ranks() -> str:
    """Return the error that this rank raises when replays are wrong on rank 1 only."""
    original = GraphedLayer.replay_forward

    def replay(graphed: GraphedLayer, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        results = original(graphed, given)
        results[0][0, 0, 0] += dist.get_rank()
        return results

    try:
        with (
            parity.megatron("cpu", expert_model_parallel_size=2),
            graphs(),
            patch.object(GraphedLayer, "replay_forward", replay),
        ):
            captured(("moe",))
    except RuntimeError as error:
        return str(error)
    return "nothing raised"


def test_a_failed_self_test_raises_on_all_ranks(pool2: WorkerPool):
    first, second = pool2.run(error_on_two_ranks)
    assert first == second
    assert "rank 1: layer 1: its output differs from eager" in first
    assert "rank 0" not in first


def set_factor(configs: Any, factor: float) -> None:
    configs.training = dataclasses.replace(configs.training, capacity_factor=factor)


CHANGES: dict[str, Callable[[Training], object]] = {
    "hidden_states.shape": lambda t: t.forward(BATCH + 1, SEQUENCE, seed=0),
    "training": lambda t: t.moe_layers[0].experts.eval(),
    "dispatch_config": lambda t: set_factor(t.moe_layers[0].token_dispatcher.configs, 2.0),
    "moe_aux_loss_coeff": lambda t: setattr(t.config, "moe_aux_loss_coeff", 0.5),
    "moe_expert_capacity_factor": lambda t: setattr(t.config, "moe_expert_capacity_factor", 9.0),
    "fp8": lambda t: setattr(t.config, "fp8", "e4m3"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_raises_before_the_replay(megatron, change):
    training, _ = captured(("attn", "moe"))
    training.forward(BATCH, SEQUENCE, seed=0)
    with (
        patch.object(GraphedLayer, "replay_forward", unreachable),
        pytest.raises(ValueError, match=rf"{re.escape(change)} must stay .*, got .*capture again"),
    ):
        CHANGES[change](training)
        training.forward(BATCH, SEQUENCE, seed=0)


def test_number_of_microbatches_counts_where_each_has_a_graph(megatron):
    training, _ = captured(("attn", "moe"))
    other = patch.object(guard, "get_num_microbatches", lambda: MICROBATCHES + 1)
    with other:
        training.forward(BATCH, SEQUENCE, seed=0)  # One graph serves any number.
    for layer in training.model.module.module.decoder.layers:
        layer.cuda_graphs *= 2
    training.forward(BATCH, SEQUENCE, seed=0)
    with other, pytest.raises(ValueError, match="num_microbatches must stay 2, got 3"):
        training.forward(BATCH, SEQUENCE, seed=0)


def test_stock_layers_are_captured_and_not_compared(megatron):
    training = Training(("attn", "moe"), **STOCK_DROP_AND_PAD)
    training.forward(BATCH, SEQUENCE, seed=0)
    assert layer_graphs(training).capture() is None
    training.config.moe_aux_loss_coeff = 0.5  # Not ours to guard.
    training.forward(BATCH, SEQUENCE, seed=0)


def test_a_scope_without_layers_is_refused(megatron):
    training = Training(("mamba",))
    with pytest.raises(
        ValueError, match=r"cuda_graph_modules .*must name a part .*, got \['mamba'\]"
    ):
        layer_graphs(training)


def test_other_ways_to_capture_are_refused(megatron):
    with pytest.raises(
        ValueError, match=r"cuda_graph_impl must be 'transformer_engine' .*, got 'none'"
    ):
        layer_graphs(Training(None))


def test_after_a_failed_capture_layers_are_eager(megatron):
    training = Training(("moe",))
    with (
        patch.object(GraphedLayer, "capture_forward", unreachable),
        pytest.raises(AssertionError, match="replay ran Python"),
    ):
        layer_graphs(training).capture()
    assert not cuda_graphs.is_graph_capturing()
    training.step(0)


def iteration_of(training: Training, **changes: Any) -> dict[str, Any]:
    """Return arguments for a schedule: one microbatch of tokens."""
    tokens = torch.arange(SEQUENCE).expand(BATCH, -1)

    def forward(batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
        batch = next(batches)["tokens"]
        future = torch.ones(BATCH, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
        losses = model(batch, batch, future, labels=batch)
        return losses, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    arguments = {
        "forward_step_func": forward,
        "data_iterator": [iter([{"tokens": tokens}])],
        "model": [training.model],
        "num_microbatches": 1,
        "seq_length": SEQUENCE,
        "micro_batch_size": BATCH,
        "forward_only": False,
    }
    return arguments | changes


def test_an_iteration_must_not_change_after_its_first_call(megatron, monkeypatch):
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    training = Training(None)
    training.config.cuda_graph_warmup_steps = 100  # It never captures.
    graph = IterationGraph(training.config)
    first = graph(**iteration_of(training))[0]["loss"]
    assert torch.equal(graph(**iteration_of(training))[0]["loss"], first)
    for name, value in {"num_microbatches": 2, "seq_length": 8, "micro_batch_size": 3}.items():
        with pytest.raises(ValueError, match=rf"{name} must stay \d, got {value}: a captured"):
            graph(**iteration_of(training, **{name: value}))
    training.config.moe_aux_loss_coeff = 0.5
    with pytest.raises(
        ValueError, match=r"moe_aux_loss_coeff in layer 2 must stay 0\.01, got 0\.5"
    ):
        graph(**iteration_of(training))
    graph.delete()
    assert graph._wrapped.curr_iter("training") == 0


def test_states_in_host_memory_are_refused_on_a_gpu(megatron, monkeypatch):
    check_random_states(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"te_rng_tracker must be True .*, got False; call model"):
        check_random_states(torch.device("cuda"))
    generators = {"model-parallel-rng": torch.Generator()}
    monkeypatch.setattr(get_cuda_rng_tracker(), "get_states", lambda: generators)
    check_random_states(torch.device("cuda"))


def test_one_graph_of_a_step_rejects_them_in_its_first_call(megatron):
    training = Training(None)
    training.config.cuda_graph_warmup_steps = 100
    training.model.ddp_config.check_for_nan_in_grad = True
    with pytest.raises(ValueError, match=r"check_for_nan_in_grad must .*, got True"):
        IterationGraph(training.config)(**iteration_of(training))
    # Graphs of layers allow it, because the host reads gradients between steps.
    training = Training(("moe",))
    training.model.ddp_config.check_for_nan_in_grad = True
    LayerGraphs([training.model], seq_length=7, micro_batch=2)
