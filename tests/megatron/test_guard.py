"""The guard: its rules on stand-ins, its corrections of `local` graphs, and these on GPUs."""

import dataclasses
import inspect
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core import package_info
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.cuda_graphs import _CudagraphGlobalRecord, _CudaGraphRunner

from padded_dispatch.megatron import PaddedOptions, compat, guard, install, padded_spec, uninstall
from tests.gpu.table import TRAINING
from tests.support import tiny
from tests.support.training import Model, ways_agree, with_changes

IS_OLD = (package_info.MAJOR, package_info.MINOR) < (0, 18)
LENGTH = 5
NOTHING_CAPTURED = (
    "cuda_graph_impl must be 'transformer_engine' for scopes of MoE layers, of which 'local' "
    "captures nothing, .*, got 'local'; set it, or leave"
)


def settings(*scopes: str, dispatcher: str = "padded_alltoall") -> dict[str, Any]:
    static = {"moe_expert_capacity_factor": 1.0}
    if dispatcher != "padded_alltoall":
        static["moe_pad_expert_input_to_capacity"] = True
    graphs = {**compat.layer_graphs(*scopes), "cuda_graph_impl": "local"}
    return {"dispatcher": dispatcher, **static, **graphs}


def gpt(spec: Any = None, **fields: Any) -> Any:
    """Build a GPT of one layer that Megatron would capture."""
    spec = spec or tiny.layer_spec()
    fields |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    model_parallel_cuda_manual_seed(1)
    with patch.object(cuda_graphs, "CudaGraphManager", lambda config: "a manager"):
        return GPTModel(tiny.config(**fields), spec, 32, max_sequence_length=LENGTH)


def padded_gpt(way: str, *scopes: str) -> Any:
    if way == "install":
        install()
        return gpt(**settings(*scopes))
    return gpt(padded_spec(tiny.layer_spec()), **settings(*scopes, dispatcher="alltoall"))


@pytest.mark.parametrize("way", ["install", "padded_spec"])
@pytest.mark.parametrize("scopes", [("moe",), ("moe_router",), (), ("attn",)], ids=str)
def test_scopes_that_capture_nothing_are_rejected_in_the_first_pass(uninstalled, scopes, way):
    layer = padded_gpt(way, *scopes).decoder.layers[0]
    captures = not scopes or scopes == ("attn",)
    assert hasattr(layer, "cudagraph_manager") == captures
    if not captures:
        with pytest.raises(ValueError, match=NOTHING_CAPTURED):
            layer(hidden_states=torch.ones(LENGTH, 1, tiny.HIDDEN), attention_mask=None)


def test_a_layer_learns_whether_it_generates_text(uninstalled):
    install()
    layer = gpt(**settings()).eval().decoder.layers[0]
    configs, given = layer.mlp.token_dispatcher.configs, {"attention_mask": None}
    context = SimpleNamespace(is_static_batching=lambda: True, is_decode_only=lambda: False)
    layer.forward = lambda *_, **__: None
    for one in (context, None, context):
        layer(torch.ones(LENGTH, 1, tiny.HIDDEN), inference_context=one, **given)
        assert configs.has_context == (one is not None)
    layer.train()
    assert configs.current is configs.training


def capture(runner: Any) -> None:
    """Stand in for `create_fwd_graph`: a pass over zeros, then a buffer goes to the pool."""
    hidden = torch.zeros(LENGTH, 1, tiny.HIDDEN)
    runner.base_module.mlp(hidden)
    _CudagraphGlobalRecord.tensor_reuse_pool.insert(hidden)


@pytest.mark.parametrize("captured", [True, False], ids=["mask captured", "no mask captured"])
def test_a_mask_in_some_steps_only_is_refused(uninstalled, captured):
    """A graph of `local` has the mask as an input, if the first step gave one."""
    install()
    layer = gpt(**settings()).decoder.layers[0].train()
    masks = [torch.zeros(1, LENGTH, dtype=torch.bool), None]
    first, other = masks if captured else masks[::-1]
    layer.cudagraph_manager = lambda *_: "graph"
    layer.forward = lambda *_, **__: "eager"

    def result(mask: Any) -> str:
        return layer(torch.ones(5, 1, 8), padding_mask=mask)

    assert result(first) == "graph"
    with patch.object(_CudagraphGlobalRecord, "cudagraph_created", True):
        assert result(first) == "graph"
        words = ["'given', got 'absent'", "'absent', got 'given'"][first is None]
        with pytest.raises(ValueError, match=f"^padding_mask must stay {words}: a captured"):
            result(other)
        layer.eval()
        assert result(other) == "eager"


def test_a_batch_that_gains_or_loses_its_mask_is_refused(uninstalled, monkeypatch):
    """Megatron's graph of an iteration would go on with the mask of an earlier step."""
    plain = {"tokens": torch.ones(2)}
    masked = plain | {"padding_mask": torch.zeros(2, dtype=torch.bool)}
    load = StaticBufferLoader.__call__
    assert "static_buffers[stage][microbatch], inputs" in inspect.getsource(load)
    loaded = []
    monkeypatch.setattr(StaticBufferLoader, "__call__", lambda self, *given: loaded.append(given))
    guard.install(tiny.config("alltoall", **compat.iteration_graph()))
    loader = object.__new__(StaticBufferLoader)
    for captured, other in ((plain, masked), (masked, plain), (masked, {"padding_mask": None})):
        monkeypatch.setattr(StaticBufferLoader, "static_buffers", {"training": [captured]})
        refused = pytest.raises(
            ValueError, match=r"^padding_mask must stay '\w+', got '\w+': a capt"
        )
        # Before the capture, too, the loader would leave an earlier mask where a batch has none.
        monkeypatch.setattr(FullCudaGraphWrapper, "cuda_graph", {"training": None})
        with refused if other is plain else nullcontext():
            loader(other, "training", 0)
        loader(plain, "training", 1)  # A microbatch that is new.
        monkeypatch.setattr(FullCudaGraphWrapper, "cuda_graph", {"training": object()})
        loader((captured, 1), "training", 0)
        with refused:
            loader(other, "training", 0)
    assert len(loaded) == 8
    uninstall()


def test_the_replay_of_a_step_is_seen_on_ranks_without_data(uninstalled, monkeypatch):
    """Of tensor-parallel ranks, the first alone may read the data."""
    seen = []
    graph = SimpleNamespace(replay=lambda: seen.append("replay"))
    graphs = {"training": None, "validation": graph}
    monkeypatch.setattr(guard.drops, "see_iteration", lambda model: seen.append("step"))
    monkeypatch.setattr(FullCudaGraphWrapper, "cuda_graph", graphs)
    for name in ("curr_iteration", "result"):
        monkeypatch.setattr(FullCudaGraphWrapper, name, {"training": 0, "validation": 0})
    guard.install(tiny.config("alltoall", **compat.iteration_graph()))
    wrapper = FullCudaGraphWrapper(lambda **given: seen.append("eager"), cuda_graph_warmup_steps=-1)
    given = {"model": [None], "data_iterator": None, "num_microbatches": 2, "seq_length": 4}
    for expected in (["eager"], ["replay", "step"]):
        wrapper(**given, forward_only=False)
        assert seen == expected
        seen.clear()
        graphs["training"] = graph
    wrapper(**given, forward_only=True)
    assert seen == ["replay"]
    uninstall()


def test_the_graph_of_a_step_ends_before_python_does(uninstalled, monkeypatch):
    at_exit = []
    monkeypatch.setattr(guard.atexit, "register", at_exit.append)
    monkeypatch.setattr(guard.atexit, "unregister", lambda _: at_exit.clear())
    guard.install(tiny.config("alltoall", **compat.layer_graphs("attn")))
    assert at_exit == []
    for _ in range(2):
        guard.install(tiny.config("alltoall", **compat.iteration_graph()))
    graph, step, stages = FullCudaGraphWrapper, object(), ("training", "validation")
    held = [(graph, name) for name in ("cuda_graph", "result", "curr_iteration")]
    for owner, name in [*held, (StaticBufferLoader, "static_buffers")]:
        monkeypatch.setattr(owner, name, dict.fromkeys(stages, step))
    monkeypatch.setattr(guard.gc, "collect", lambda: at_exit.append("collected"))
    (end,) = at_exit
    end()
    assert at_exit == [end, "collected"]
    assert graph.cuda_graph == graph.result == dict.fromkeys(stages)
    assert graph.curr_iteration == dict.fromkeys(stages, 0)
    assert StaticBufferLoader.static_buffers == {"training": [], "validation": []}


@pytest.mark.parametrize("dispatcher", ["padded_alltoall", "alltoall"])
def test_d15_a_capture_leaves_counts_and_inputs_alone_if_the_model_is_ours(
    uninstalled, monkeypatch, dispatcher
):
    free: list[Any] = []
    pool = SimpleNamespace(insert=free.append)
    monkeypatch.setattr(_CudaGraphRunner, "create_fwd_graph", capture)
    monkeypatch.setattr(_CudagraphGlobalRecord, "tensor_reuse_pool", pool, raising=False)
    install()
    losses = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    fields = settings(dispatcher=dispatcher) | tiny.EXPERT_BIAS | losses
    layer = gpt(**fields).decoder.layers[0].train()
    layer.mlp(torch.ones(LENGTH, 1, tiny.HIDDEN))
    guard.install(tiny.config(**settings()))  # As another model of this process, which is ours.
    layer.config.padded_dispatch = PaddedOptions()  # It alone makes no model ours.
    ours = dispatcher == "padded_alltoall"
    router = layer.mlp.router
    before = router.local_tokens_per_expert.clone()
    logged = {name: values.clone() for name, values in compat.logged_tensors().items()}
    assert all(values.any() for values in logged.values())
    demand_E = layer.mlp.token_dispatcher.counters.demand_E.clone() if ours else None
    _CudaGraphRunner.create_fwd_graph(SimpleNamespace(base_module=layer))
    assert torch.equal(router.local_tokens_per_expert, before) == ours
    for name, values in compat.logged_tensors().items():
        assert torch.equal(values, logged[name]) == ours
    if ours:
        assert demand_E.sum() == LENGTH * tiny.TOP_K
        assert torch.equal(layer.mlp.token_dispatcher.counters.demand_E, demand_E)
    assert len(free) == int(not (ours and IS_OLD))
    pool.insert("a gradient")  # The patch is undone.
    assert free[-1] == "a gradient"
    uninstall()
    assert _CudaGraphRunner.create_fwd_graph is capture


def test_what_a_capture_counts_and_keeps_goes_back(uninstalled, monkeypatch):
    """Transformer Engine warms a layer up eagerly, several times."""
    monkeypatch.setattr(guard, "get_num_microbatches", lambda: 1)
    fields = settings() | {"cuda_graph_impl": "transformer_engine"}
    install(PaddedOptions(experts="packed"))
    made = gpt(**fields).train()
    layer = made.decoder.layers[0]
    dispatcher = layer.mlp.token_dispatcher

    def capture(helper: Any) -> None:
        hidden = torch.ones(LENGTH, 1, tiny.HIDDEN)
        guard._capture(layer, lambda hidden: layer.mlp(hidden), hidden)
        assert dispatcher.counters.demand_E.any() and len(dispatcher.store._stacks) == 1

    guard._wrap_capture(capture)(SimpleNamespace(config=layer.config, model=[made]))
    assert not dispatcher.counters.demand_E.any() and dispatcher.store._stacks == []


class Manager:
    """A stand-in for a layer's manager: eager until graphs exist, then it counts replays."""

    def __init__(self) -> None:
        self.num_replays = 0

    def __call__(self, layer: Any, args: Any, kwargs: Any) -> Any:
        if _CudagraphGlobalRecord.cudagraph_created:
            self.num_replays += 1
            return kwargs["hidden_states"], None
        return layer.forward(*args, **kwargs)


@pytest.mark.parametrize("way", ["install", "padded_spec"])
def test_d23_an_evaluation_is_eager_and_a_change_raises_before_a_replay(
    uninstalled, monkeypatch, way
):
    layer, manager = padded_gpt(way).decoder.layers[0], Manager()
    layer.cudagraph_manager = manager
    given = {"hidden_states": torch.ones(LENGTH, 1, tiny.HIDDEN), "attention_mask": None}
    layer(**given)
    monkeypatch.setattr(_CudagraphGlobalRecord, "cudagraph_created", True)
    layer(**given)
    assert manager.num_replays == 1
    dispatcher = layer.mlp.token_dispatcher
    layer.eval()
    layer(**given)
    assert manager.num_replays == 1
    assert dispatcher.eval_counters.demand_E.sum() == LENGTH * tiny.TOP_K
    layer.train()
    configs = dispatcher.configs
    configs.training = dataclasses.replace(configs.training, capacity_factor=0.5)
    with pytest.raises(
        ValueError, match=r"dispatch_config must stay .*, got .*capacity_factor=0\.5.*capture again"
    ):
        layer(**given)
    assert manager.num_replays == 1


def test_d23_stock_replays_a_training_step_in_evaluation(uninstalled, monkeypatch):
    layer, manager = gpt(**settings(dispatcher="alltoall")).decoder.layers[0], Manager()
    layer.cudagraph_manager = manager
    monkeypatch.setattr(_CudagraphGlobalRecord, "cudagraph_created", True)
    layer.eval()
    layer(hidden_states=torch.ones(LENGTH, 1, tiny.HIDDEN), attention_mask=None)
    assert manager.num_replays == 1


def test_old_versions_give_buffers_of_inputs_away():
    """They do so right after the forward's capture; from 0.18 on, after the backward's."""
    source = inspect.getsource(_CudaGraphRunner.create_fwd_graph)
    assert ("tensor_reuse_pool.insert(buf)" in source) == IS_OLD == compat.FREES_GRAPH_INPUTS


DENSE = {"fields": {"moe_layer_freq": [0, 0]}}
STOCK = {"fields": {"moe_layer_freq": [0, 0], "moe_token_dispatcher_type": "alltoall"}}
WAYS: dict[str, Any] = {"eager": {}, "eager again": {}, "graphs": {"graph": "local"}}


def on_gpu(changes: dict[str, Any]) -> Model:
    return with_changes(with_changes(Model(evaluates=(3, 160)), TRAINING), changes)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, DENSE], ids=["MoE", "no experts"])
def test_replays_equal_eager_training(gpu_pools, changes):
    assert gpu_pools[1].run(ways_agree, on_gpu(changes), WAYS) == [[]]


@pytest.mark.gpu
def test_d22_old_versions_replay_other_gradients_without_experts_too(gpu_pools):
    # Stock's local graphs have no way back to eager passes of another size.
    trained = on_gpu(STOCK | {"evaluates": None})
    [failures] = gpu_pools[1].run(ways_agree, trained, WAYS)
    assert not any(text.startswith("eager again") for text in failures)
    norm = "the gradient of module.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    found = any(text.startswith(f"graphs: {norm} of chunk 0 differs") for text in failures)
    assert found == bool(failures) == IS_OLD
