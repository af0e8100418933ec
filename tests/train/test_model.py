"""The learning rate, Adam over the gradients of Megatron's DDP, fields for graphs and fusions."""

import dataclasses
import importlib
from itertools import pairwise
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from padded_dispatch.megatron import padded_spec, uninstall
from padded_dispatch.megatron.compat import HYBRID_MODEL
from padded_dispatch.train.model import (
    build_optimizer,
    fp8_fields,
    fusions,
    graph_fields,
    hybrid_stack,
    layer_pattern,
    learning_rate,
    transformer_config,
)
from padded_dispatch.train.settings import PRESETS, Settings
from tests.support import tiny
from tests.support.tiny import parse

SCOPES = (
    "cuda_graph_modules"
    if "cuda_graph_modules" in TransformerConfig.__dataclass_fields__
    else "cuda_graph_scope"
)


def on_a_gpu(graph: str, dispatcher: str = "padded_alltoall", seq_length: int = 128) -> Settings:
    factor = 1.25 if dispatcher in ("padded_alltoall", "alltoall-drop-pad") else None
    settings, replace = parse(["--device", "cpu", "--workers", "2"]), dataclasses.replace
    changes: dict[str, Any] = {"dispatcher": dispatcher, "capacity_factor": factor}
    captured: Any = {"graph": graph}
    return replace(
        settings,
        recipe=replace(settings.recipe, seq_length=seq_length),
        dispatch=replace(settings.dispatch, **changes),
        layout=replace(settings.layout, device="cuda"),
        output=replace(settings.output, **captured),
    )


@pytest.mark.parametrize(
    ("recipe", "fields"),
    [
        ("none", {}),
        ("tensorwise", {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
        ("blockwise", {"fp8": "e4m3", "fp8_recipe": "blockwise"}),
    ],
)
def test_fields_of_an_fp8_recipe(recipe, fields):
    settings = on_a_gpu("none")
    changed = dataclasses.replace(settings.recipe, fp8=recipe)
    assert fp8_fields(dataclasses.replace(settings, recipe=changed)) == fields
    with pytest.raises(ValueError, match="--fp8 must be none on a CPU, got 'delayed'"):
        parse(["--device", "cpu", "--fp8", "delayed"])


def test_the_learning_rate_rises_over_20_steps_and_falls_to_a_tenth():
    rates = [learning_rate(1.0, step, 40) for step in (1, 20, 30, 40)]
    assert rates == pytest.approx([0.05, 1.0, 0.55, 0.1], rel=1e-15)
    falling = [learning_rate(0.2, step, 40) for step in range(20, 41)]
    assert all(a > b for a, b in pairwise(falling))
    assert learning_rate(1.0, 8, 8) == 8 / 20  # A short run ends while it rises.


def test_adam_steps_along_main_grad():
    torch.manual_seed(0)
    ours, reference = nn.Linear(5, 3), nn.Linear(5, 3)
    reference.load_state_dict(ours.state_dict())
    adam = torch.optim.AdamW(reference.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = build_optimizer(parse(["--device", "cpu"]), [ours])
    for lr in (0.3, 0.02):
        for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
            mine.main_grad = torch.randn_like(mine)
            theirs.grad = mine.main_grad.clone()
        for one in (optimizer, adam):
            one.param_groups[0]["lr"] = lr
            one.step()
        for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("dispatcher", "possible"),
    [
        ("allgather", ["none"]),
        ("alltoall", ["none", "partial"]),
        ("alltoall-drop-pad", ["none", "partial", "layer"]),
        ("padded_alltoall", ["none", "partial", "layer", "full-iteration"]),
    ],
)
def test_stock_dispatchers_refuse_what_they_cannot_capture(dispatcher, possible):
    for graph in ("none", "partial", "layer", "full-iteration"):
        if graph in possible:
            assert on_a_gpu(graph, dispatcher).output.graph == graph
            continue
        words = f"{' or '.join(possible)} with --dispatcher {dispatcher}, got {graph!r}"
        with pytest.raises(ValueError, match=f"^--graph must be {words}$"):
            on_a_gpu(graph, dispatcher)


def test_graphs_set_fields_of_the_config():
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


def test_fusions_are_on_for_all_contenders_where_they_exist():
    """Megatron-Core has no extension for sums here; its fused activation of GPT-OSS no graph."""
    names = ("moe_router_fusion", "moe_permute_fusion", "gradient_accumulation_fusion")
    names += ("bias_activation_fusion", "bias_dropout_fusion")
    gpt_oss = PRESETS["gpt-oss-20b"].model
    for graph, dispatcher, model, expected in (
        ("layer", "alltoall-drop-pad", None, (True, True, False, True, True)),
        ("layer", "padded_alltoall", None, (True, False, False, True, True)),
        ("none", "allgather", gpt_oss, (True, False, False, True, False)),
        ("partial", "alltoall", gpt_oss, (True, True, False, True, False)),
        ("layer", "alltoall-drop-pad", gpt_oss, (True, True, False, False, False)),
        ("full-iteration", "padded_alltoall", gpt_oss, (True, False, False, False, False)),
    ):
        settings = on_a_gpu(graph, dispatcher)
        settings = dataclasses.replace(settings, model=model or settings.model)
        assert fusions(settings) == dict(zip(names, expected, strict=True))
    assert fusions(parse(["--device", "cpu", "--workers", "2"])) == {}


def test_a_layer_of_the_model_is_two_of_a_hybrid_model_on_each_device():
    times = 1 if HYBRID_MODEL is None else 2
    for settings in (parse(["--device", "cpu"]), on_a_gpu("none")):
        config = transformer_config(settings)
        uninstall()
        assert config.num_layers == times * settings.recipe.num_layers
        assert config.is_hybrid_model == (times == 2)


@pytest.mark.parametrize(
    ("sizes", "pattern"),
    [
        ([], "*E*E"),
        (["--pp", "2"], "*E|*E"),
        (["--pp", "2", "--vpp", "2", "--num-layers", "8"], "*E*E|*E*E|*E*E|*E*E"),
    ],
)
def test_a_pattern_has_a_bar_between_stages(sizes, pattern):
    assert layer_pattern(parse(["--device", "cpu", "--workers", "2", *sizes])) == pattern


def _model(kind: Any, experts: str, seed: int) -> Any:
    """Return a model of two GPT layers, whose weights depend on the seed."""
    torch.manual_seed(seed)
    fields: dict[str, Any] = {"num_layers": 2, "experts": experts}
    given: dict[str, Any] = {"vocab_size": 32, "max_sequence_length": 8}
    given["position_embedding_type"] = "rope"
    spec = padded_spec(tiny.layer_spec())
    if kind is GPTModel:
        return kind(tiny.config(**fields), spec, **given).eval()
    fields |= {"num_layers": 4, "is_hybrid_model": True}
    stack = hybrid_stack(spec)
    return kind(tiny.config(**fields), stack, hybrid_layer_pattern="*E*E", **given).eval()


def _logits(model: Any) -> Any:
    ids, future = torch.arange(8)[None], torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return model(ids, ids, future)


@pytest.mark.skipif(HYBRID_MODEL is None, reason="Megatron's GPTModel is not deprecated")
@pytest.mark.parametrize("experts", ["packed", "module"])
def test_a_checkpoint_of_a_gpt_model_goes_on_in_a_hybrid_model(tmp_path, experts):
    """By Megatron's own translation, and from there to the other kind of experts."""
    with tiny.one_process():
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        interop: Any = importlib.import_module(
            "megatron.core.dist_checkpointing.gpt_checkpoint_interop"
        )
        gpt, hybrid = _model(GPTModel, experts, 1), _model(HYBRID_MODEL, experts, 2)
        last = _model(HYBRID_MODEL, {"packed": "module", "module": "packed"}[experts], 3)
        wanted = _logits(gpt)
        assert not torch.equal(_logits(hybrid), wanted)
        for source, target, folder in (
            (gpt, hybrid, tmp_path / "1"),
            (hybrid, last, tmp_path / "2"),
        ):
            folder.mkdir()
            dist_checkpointing.save(source.sharded_state_dict(), str(folder))
            sharded = target.sharded_state_dict()
            if source is gpt:
                layers = interop.gpt_compatible_layer_maps("*E*E")
                interop.retarget_sharded_state_dict_to_gpt_checkpoint(sharded, layers)
            target.load_state_dict(dist_checkpointing.load(sharded, str(folder)))
        assert torch.equal(_logits(hybrid), wanted)
        torch.testing.assert_close(_logits(last), wanted, rtol=1e-5, atol=1e-5)
