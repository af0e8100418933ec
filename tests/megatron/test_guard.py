"""The guard: its rules, on stand-ins."""

import inspect
import sys
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
from torch import nn

from padded_dispatch.megatron import PaddedOptions, compat, guard, install, padded_spec, uninstall
from tests.support import tiny

IS_OLD = (package_info.MAJOR, package_info.MINOR) < (0, 18)
LENGTH = 5


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
@pytest.mark.parametrize("scopes", [("moe",), ()], ids=str)
def test_local_graphs_are_refused_in_training(uninstalled, scopes, way):
    layer = padded_gpt(way, *scopes).decoder.layers[0]
    given = {"hidden_states": torch.ones(LENGTH, 1, tiny.HIDDEN), "attention_mask": None}
    with pytest.raises(
        ValueError, match=r"^cuda_graph_impl must be 'none', .* 'local' generates text.*, got 'loc"
    ):
        layer(**given)
    layer.config.cuda_graph_impl = "none"  # As Megatron's RL does while it trains.
    vars(layer).pop("cudagraph_manager", None)
    assert layer(**given)[0].shape == (LENGTH, 1, tiny.HIDDEN)


def test_a_layer_learns_whether_it_generates_text(uninstalled):
    install()
    layer = gpt(**settings()).eval().decoder.layers[0]
    configs, given = layer.mlp.token_dispatcher.configs, {"attention_mask": None}
    context = SimpleNamespace(is_static_batching=lambda: True, is_decode_only=lambda: False)
    layer.forward = layer.cudagraph_manager = lambda *_, **__: None
    for one in (context, None, context):
        layer(torch.ones(LENGTH, 1, tiny.HIDDEN), inference_context=one, **given)
        assert configs.has_context == (one is not None)
    layer.train()
    assert configs.current is configs.training


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
    given = {"data_iterator": None, "num_microbatches": 2, "seq_length": 4}
    given |= {"model": [nn.Identity()]}
    for expected in (["eager"], ["replay", "step"]):
        wrapper(**given, forward_only=False)
        assert seen == expected
        seen.clear()
        graphs["training"] = graph
    wrapper(**given, forward_only=True)
    given["model"] = [tiny.padded_layer(on_overflow="error")]
    with pytest.raises(ValueError, match="must have StepHooks"):
        wrapper(**given, forward_only=False)
    assert seen == ["replay"]
    uninstall()


@pytest.mark.parametrize("forward_only", [False, True])
def test_a_change_raises_before_the_replay_of_megatrons_graph_of_a_step(
    uninstalled, monkeypatch, forward_only
):
    """Such as micro-batches that a ramp-up adds, which a replay would leave out."""
    replays = []
    graphs: dict[str, Any] = {"training": None, "validation": None}
    stage = "validation" if forward_only else "training"

    def schedule(**given: Any) -> None:
        graphs[stage] = SimpleNamespace(replay=lambda: replays.append(stage))

    monkeypatch.setattr(FullCudaGraphWrapper, "cuda_graph", graphs)
    for name in ("curr_iteration", "result"):
        monkeypatch.setattr(FullCudaGraphWrapper, name, {"training": 0, "validation": 0})
    guard.install(tiny.config("alltoall", **compat.iteration_graph()))
    model = gpt(padded_spec(tiny.layer_spec()), dispatcher="alltoall")
    wrapper = FullCudaGraphWrapper(schedule, cuda_graph_warmup_steps=-1)
    given = {"model": model, "data_iterator": None, "forward_only": forward_only}
    given |= {"num_microbatches": 2, "seq_length": LENGTH, "micro_batch_size": 1}
    for _ in range(2):
        wrapper(**given)
    assert replays == [stage]
    with pytest.raises(ValueError, match=r"^num_microbatches must stay 2, got 3: a captured"):
        wrapper(**given | {"num_microbatches": 3})
    model.config.moe_aux_loss_coeff = 0.5
    with pytest.raises(ValueError, match=r"^moe_aux_loss_coeff in layer 1 must stay 0\.0, got 0"):
        wrapper(**given)
    assert replays == [stage]
    guard.forget_iterations()
    wrapper(**given)  # It captures again.
    wrapper(**given)
    assert replays == [stage] * 2
    uninstall()


@pytest.mark.parametrize(
    ("length", "cp", "version", "fused", "multiple"),
    [
        (128, 1, (9, 14, 0), "1", 0),
        (384, 1, (9, 14, 0), None, 0),
        (64, 1, (9, 14, 0), None, 128),
        (192, 1, (9, 15, 0), "1", 128),
        (192, 1, (9, 15, 1), None, 0),
        (192, 1, (9, 14, 0), "0", 0),
        (256, 2, (9, 14, 0), None, 512),
        (512, 2, (9, 14, 0), None, 0),
    ],
)
def test_a_graph_of_a_step_refuses_lengths_with_wrong_gradients_of_attention(
    uninstalled, monkeypatch, length, cp, version, fused, multiple
):
    attention, seen = type("DotProductAttention", (nn.Module,), {}), []
    engine = SimpleNamespace(
        DotProductAttention=attention, utils=SimpleNamespace(get_cudnn_version=lambda: version)
    )
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    if fused is None:
        monkeypatch.delenv("NVTE_FUSED_ATTN", raising=False)
    else:
        monkeypatch.setenv("NVTE_FUSED_ATTN", fused)
    for name, value in (("cuda_graph", None), ("curr_iteration", 0), ("result", None)):
        values = {"training": value, "validation": value}
        monkeypatch.setattr(FullCudaGraphWrapper, name, values)
    guard.install(tiny.config("alltoall", **compat.iteration_graph()))
    schedule = lambda **given: seen.append(given["seq_length"])  # noqa: E731
    run = FullCudaGraphWrapper(schedule, cuda_graph_warmup_steps=-1)
    plain: Any = nn.Linear(1, 1)
    deep: Any = nn.Sequential(nn.Linear(1, 1), nn.Sequential(attention()))
    plain.config = deep.config = SimpleNamespace(context_parallel_size=cp)
    given: dict[str, Any] = {"num_microbatches": 1, "seq_length": length}
    number = ".".join(map(str, version))
    words = f"^seq_length must be a multiple of {multiple} in .* cuDNN {number}, got {length}; set "
    words += (
        "one, or graphs of moe, or" if cp > 1 else "one, or graphs of layers, or NVTE_FUSED_ATTN=0"
    )
    for model, data in ((deep, None), ([plain, deep], [None, None])):
        given |= {"model": model, "data_iterator": data}
        run(**given, forward_only=True)  # Evaluation has no backward.
        with pytest.raises(ValueError, match=words) if multiple else nullcontext():
            run(**given, forward_only=False)
    assert seen == [length] * (2 if multiple else 4)
    run(**given | {"model": [plain, plain]}, forward_only=False)  # They have other attention.
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
