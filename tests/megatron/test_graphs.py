"""`LayerGraphs` and `IterationGraph`: capture and guard, over the stand-in.

That replays equal eager training is for the rows of `tests.gpu.table`.
"""

import dataclasses
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.inference import utils as inference_utils
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from padded_dispatch.megatron import Passes, StepHooks, guard
from padded_dispatch.megatron.dispatcher import _PLAN_TENSORS
from padded_dispatch.megatron.graphs import IterationGraph, LayerGraphs, check_random_states
from padded_dispatch.trace import load_traces
from tests.support import tiny
from tests.support.graph_protocol import GraphedLayer
from tests.support.training import (
    Model,
    Training,
    differing_names,
    layers_of,
    with_changes,
    world,
)

STOCK_DROP_AND_PAD: dict[str, Any] = {
    "moe_token_dispatcher_type": "alltoall",
    "moe_pad_expert_input_to_capacity": True,
}


def training_of(*scopes: str, graph: Any = "layer", **changes: Any) -> Training:
    model = Model(graph=graph, scopes=scopes, options={"experts": "module"})
    return Training(with_changes(model, changes))


def captured(*scopes: str) -> Training:
    training = training_of(*scopes)
    training.capture()
    return training


def unreachable(*args: object, **kwargs: object) -> None:
    raise AssertionError("a replay ran Python of the layer")


@pytest.mark.parametrize("scopes", [(), ("attn", "moe_router", "moe_preprocess")], ids=str)
def test_a_loop_with_graphs_equals_one_without(megatron, scopes):
    eager, graphed = training_of(graph="none"), training_of(*scopes)
    graphed.capture()  # Without an eager step before; it does its own warm-up.
    assert MoEAuxLossAutoScaler.main_loss_backward_scale.shape == (1,)
    for number in range(4):
        if number == 2:
            graphed.end()
            assert graphed.num_graphs() == 0
        if number == 3:
            graphed.capture()
        assert differing_names(eager.step(number), graphed.step(number)) == []
        # Nothing on a dispatcher keeps memory of a graph.
        dispatchers = [layer.token_dispatcher for _, layer in graphed.moe]
        assert not [n for n in _PLAN_TENSORS for d in dispatchers if getattr(d, n) is not None]


def state_of(training: Training) -> dict[str, Tensor]:
    (chunk,) = training.chunks
    kept = {name: buffer.clone() for name, buffer in chunk.named_buffers()}
    kept |= {f"{name}.main_grad": p.main_grad.clone() for name, p in chunk.named_parameters()}
    for index, layer in training.moe:
        for number, tensor in enumerate(layer.token_dispatcher.counters.tensors()):
            kept[f"counter {number} of layer {index}"] = tensor.clone()
    kept["cpu"] = torch.get_rng_state()
    states: dict[str, Tensor] = get_cuda_rng_tracker().get_states()
    return kept | {f"random state {name}": state.clone() for name, state in states.items()}


@pytest.mark.parametrize(("graph", "dropout"), [("layer", 0.1), ("helper", 0.0)])
def test_a_capture_restores_state(megatron, graph, dropout):
    fields = tiny.EXPERT_BIAS | {"hidden_dropout": dropout}
    training = training_of("attn", "moe", graph=graph, fields=fields)
    training.losses_of(3)  # Counts are not all zero.
    before = state_of(training)
    assert before["counter 0 of layer 1"].any() and before["counter 0 of layer 2"].any()
    training.capture()
    assert differing_names(before, state_of(training)) == []
    assert all(param.grad is None for param in training.chunks[0].parameters())


def test_a_trace_has_no_pass_of_a_capture(megatron, tmp_path):
    """Those would follow the micro-batches of a step with fewer than others."""
    training = training_of("attn", "moe", options={"trace": str(tmp_path)})
    sizes = {"num_microbatches": 5, "num_tokens": training.model.batch * training.model.seq}
    hooks = StepHooks(training.chunks, passes=Passes(**sizes, num_steps=2))
    for number in range(2):
        training.step(number)
        hooks.after_step()
        if number == 0:
            training.capture()
    hooks.recorder.close()
    num_records = training.model.microbatches * len(training.moe)
    assert load_traces([tmp_path]).steps.tolist() == [1] * num_records + [2] * num_records
    training.end()


def set_factor(configs: Any, factor: float) -> None:
    configs.training = dataclasses.replace(configs.training, capacity_factor=factor)


CHANGES: dict[str, Callable[[Training], object]] = {
    "hidden_states.shape": lambda t: t.losses_of(0, batch=3),
    "training": lambda t: t.moe[0][1].experts.eval(),
    "dispatch_config": lambda t: set_factor(t.moe[0][1].token_dispatcher.configs, 2.0),
    "moe_aux_loss_coeff": lambda t: setattr(t.config, "moe_aux_loss_coeff", 0.5),
    "moe_layer_freq": lambda t: t.config.moe_layer_freq.append(1),
    "frozen parameters": lambda t: t.moe[0][1].experts.requires_grad_(False),
    "fp8": lambda t: setattr(t.config, "fp8", "e4m3"),
}


def test_training_goes_on_after_text_generation(megatron):
    """Which pads experts to a capacity of its own, and leaves none behind."""
    training = captured("attn", "moe")
    before = training.losses_of(0)
    model = training.chunks[0].module
    with patch.object(inference_utils, "moe_layer_cache", None):
        inference_utils.set_decode_expert_padding(model, True, capacity_factor=2)
        inference_utils.set_decode_expert_padding(model, False)
    assert training.config.moe_expert_capacity_factor is None
    assert torch.equal(training.losses_of(0), before)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_raises_before_the_replay(megatron, change):
    training = training_of("attn", "moe", fields={"moe_layer_freq": [1, 1]})
    training.capture()
    training.losses_of(0)
    with (
        patch.object(GraphedLayer, "replay_forward", unreachable),
        pytest.raises(ValueError, match=rf"{re.escape(change)} must stay .*, got .*capture again"),
    ):
        CHANGES[change](training)
        training.losses_of(0)


def test_a_factor_set_after_the_model_was_built_raises_before_the_replay(megatron):
    training = captured("attn", "moe")
    training.config.moe_expert_capacity_factor = 2.0
    with (
        patch.object(GraphedLayer, "replay_forward", unreachable),
        pytest.raises(ValueError, match=r"^moe_expert_capacity_factor must stay .*, got 2\.0"),
    ):
        training.losses_of(0)


def test_a_replay_needs_the_hooks_that_follow_its_drops(megatron):
    training = training_of("attn", "moe", options={"on_overflow": "error"})
    hooks = StepHooks(training.chunks)
    training.losses_of(0)
    training.capture()
    training.losses_of(0)
    del hooks
    with (
        patch.object(GraphedLayer, "replay_forward", unreachable),
        pytest.raises(ValueError, match="must have StepHooks to follow on_overflow='error'"),
    ):
        training.losses_of(0)


def test_number_of_microbatches_counts_where_each_has_a_graph(megatron):
    training = captured("attn", "moe")
    other = patch.object(guard, "get_num_microbatches", lambda: 3)
    with other:
        training.losses_of(0)  # One graph serves any number.
    for layer in layers_of(training):
        layer.cuda_graphs *= 2
    training.losses_of(0)
    with other, pytest.raises(ValueError, match="num_microbatches must stay 2, got 3"):
        training.losses_of(0)


def test_stock_layers_are_captured_and_not_guarded(megatron):
    training = training_of("attn", "moe", fields=STOCK_DROP_AND_PAD)
    training.losses_of(0)
    training.capture()
    training.config.moe_aux_loss_coeff = 0.5
    training.losses_of(0)


def test_a_scope_without_layers_is_refused(megatron):
    with pytest.raises(
        ValueError, match=r"cuda_graph_modules .*must name a part .*, got \['mamba'\]"
    ):
        training_of("mamba")


def _captured_twice(model: Model) -> list[int]:
    found = []
    with world(model):
        training = Training(model)
        for number in range(2):
            training.capture()
            training.step(number)
            found.append(training.num_graphs())
            training.end()
    return found


def test_a_stage_of_a_pipeline_may_have_nothing_to_capture(pool2):
    """Here one of dense layers, which takes part in what all ranks do."""
    of_layers: dict[str, Any] = {"fields": {"moe_layer_freq": [0, 1]}, "num_layers": 2}
    of_layers |= {"graph": "layer", "scopes": ("moe",), "options": {"experts": "module"}}
    found = pool2.run(_captured_twice, Model(pp=2, ranks=2, **of_layers))
    assert found == [[0, 0], [2, 2]]  # One for each microbatch.


def test_other_ways_to_capture_are_refused(megatron):
    eager = training_of(graph="none")
    with pytest.raises(
        ValueError, match=r"cuda_graph_impl must be 'transformer_engine' .*, got 'none'"
    ):
        LayerGraphs(eager.chunks, seq_length=10, micro_batch=2)
    words = "^config must be the model's TransformerConfig, got 'list'; give that, not the model$"
    with pytest.raises(ValueError, match=words):
        IterationGraph(eager.chunks)


def test_a_model_outside_of_ddp_has_no_graphs(megatron):
    training = training_of(graph="none")
    bare = [training.chunks[0].module]
    words = r"^chunks must be in Megatron's DistributedDataParallel.*, got \['Float16Module'\]"
    with pytest.raises(ValueError, match=words):
        LayerGraphs(bare, seq_length=10, micro_batch=2)
    sizes = {"num_microbatches": 1, "seq_length": 10, "micro_batch_size": 2}
    with pytest.raises(ValueError, match=words):
        IterationGraph(training.config)(model=bare, **sizes)
    words = "^IterationGraph must get all arguments .* by name, got 'no model, seq_length'$"
    with pytest.raises(ValueError, match=words):
        IterationGraph(training.config)(num_microbatches=1, micro_batch_size=2)


def test_graphs_of_layers_need_transformer_engine(megatron, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "HAVE_TE_GRAPHS", False)
    with pytest.raises(ValueError, match=r"^LayerGraphs must have a GPU, and "):
        LayerGraphs(training_of("moe").chunks, seq_length=10, micro_batch=2)


def test_after_a_failed_capture_layers_are_eager(megatron):
    training = training_of("moe")
    with (
        patch.object(GraphedLayer, "capture_forward", unreachable),
        pytest.raises(AssertionError, match="replay ran Python"),
    ):
        training.capture()
    assert not cuda_graphs.is_graph_capturing()
    training.step(0)


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_that_wait_for_weights_are_off_during_a_capture(megatron, monkeypatch, fails):
    training, calls = training_of("moe"), []
    (chunk,) = training.chunks
    chunk.ddp_config.overlap_param_gather = True
    chunk.remove_forward_pre_hook_handles = {"a module": "a handle"}
    monkeypatch.setattr(chunk, "disable_forward_pre_hook", lambda param_sync: calls.append("off"))
    monkeypatch.setattr(chunk, "enable_forward_pre_hook", lambda: calls.append("on"))
    helper = cuda_graphs.TECudaGraphHelper
    monkeypatch.setattr(helper, "cuda_graph_set_manual_hooks", lambda self: calls.append("manual"))
    capture = GraphedLayer.capture_forward

    def capture_forward(graphed: GraphedLayer) -> None:
        calls.append("capture")
        assert not fails
        capture(graphed)

    monkeypatch.setattr(GraphedLayer, "capture_forward", capture_forward)
    with pytest.raises(AssertionError) if fails else nullcontext():
        training.capture()
    order = list(dict.fromkeys(calls))
    assert order == ["off", "capture", "on"] + ["manual"] * (not fails)


def iterating(**changes: Any) -> Training:
    """Return a training whose schedule is an iteration's graph, which never captures."""
    training = training_of(graph="none", **changes)
    training.config.cuda_graph_warmup_steps = 100
    training.schedule = IterationGraph(training.config)
    return training


def test_an_iteration_must_not_change_after_its_first_call(megatron):
    training = iterating()
    first, again = (training.passes()[0]["loss"] for _ in range(2))
    assert torch.equal(first, again)
    changes = {
        "microbatches": ("num_microbatches", 1),
        "seq": ("seq_length", 8),
        "batch": ("micro_batch_size", 3),
    }
    model = training.model
    for name, (said, value) in changes.items():
        training.model = dataclasses.replace(model, **{name: value})
        with pytest.raises(ValueError, match=rf"{said} must stay \d+, got {value}: a captured"):
            training.passes()
    training.model = model
    training.config.moe_aux_loss_coeff = 0.5
    with pytest.raises(
        ValueError, match=r"moe_aux_loss_coeff in layer 2 must stay 0\.01, got 0\.5"
    ):
        training.passes()
    training.schedule.delete()
    assert training.schedule.wrapped.curr_iter("training") == 0


def test_an_iteration_takes_one_module_as_megatrons_schedules_do(megatron):
    training = iterating()
    whole = training.passes()[0]["loss"]
    training.schedule.delete()
    graph = training.schedule
    training.schedule = lambda model, **given: graph(model=model[0], **given)
    assert torch.equal(training.passes()[0]["loss"], whole)
    training.config.moe_aux_loss_coeff = 0.5
    with pytest.raises(ValueError, match="moe_aux_loss_coeff in layer 1 must stay"):
        training.passes()


def test_states_in_host_memory_are_refused_on_a_gpu(megatron, monkeypatch):
    training_of(graph="none")
    check_random_states(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"te_rng_tracker must be True .*, got False; call model"):
        check_random_states(torch.device("cuda"))
    generators = {"model-parallel-rng": torch.Generator()}
    monkeypatch.setattr(get_cuda_rng_tracker(), "get_states", lambda: generators)
    check_random_states(torch.device("cuda"))


def test_one_graph_of_a_step_rejects_gradients_that_the_host_reads(megatron):
    check = {"check_for_nan_in_grad": True}
    with pytest.raises(ValueError, match=r"check_for_nan_in_grad must .*, got True"):
        iterating(ddp=check).passes()
    training_of("moe", ddp=check)  # Graphs of layers allow it: the host reads between steps.
