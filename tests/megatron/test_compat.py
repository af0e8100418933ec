"""What is wrapped of Megatron is what the page says; what a gone symbol disables.

Megatron-LM's loop, Megatron-Bridge and its saved configs are stand-ins.
"""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

import padded_dispatch
from padded_dispatch.megatron import PaddedOptions, install, uninstall
from padded_dispatch.megatron.compat import iteration_graph, layer_graphs
from padded_dispatch.megatron.graphs import guard
from padded_dispatch.utils.patches import PATCHED
from tests.support import tiny

PACKAGE = Path(padded_dispatch.__file__).parent
FIELD: Any = TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"]

# Without these there is no MoE layer, no config and no training loop.
REQUIRED = {
    "num_microbatches_calculator.get_num_microbatches",
    "parallel_state",
    "transformer.module.MegatronModule",
    "transformer.moe.moe_layer.MoELayer",
    "transformer.moe.moe_utils",
    "transformer.moe.moe_utils.get_default_pg_collection",
    "transformer.moe.router.TopKRouter",
    "transformer.moe.token_dispatcher.MoETokenDispatcher",
    "transformer.spec_utils.ModuleSpec",
    "transformer.transformer_config.TransformerConfig",
    "transformer.transformer_layer.TransformerLayer",
    "utils.get_model_config",
}

# `cuda_graph_impl`, `overlap_moe_expert_parallel_comm` and scopes of configs that need a guard.
NONE = {"cuda_graph_impl": "none", "overlap_moe_expert_parallel_comm": False}
WAYS = (
    NONE | layer_graphs("moe"),
    NONE | layer_graphs() | {"cuda_graph_impl": "local"},
    NONE | iteration_graph(),
    NONE | {"overlap_moe_expert_parallel_comm": True},
)


@pytest.fixture(autouse=True)
def megatron(one_process: None) -> Iterator[None]:
    yield
    uninstall()


def wrapped() -> set[str]:
    """Return every function of Megatron's that is ours, as module, class and name."""
    found = set()
    for module in [one for name, one in sys.modules.items() if name.startswith("megatron.")]:
        kinds = [one for one in vars(module).values() if isinstance(one, type)]
        for owner in [module, *(one for one in kinds if one.__module__ == module.__name__)]:
            for name, value in vars(owner).items():
                code = getattr(getattr(value, "__func__", value), "__code__", None)
                path = Path("" if code is None else code.co_filename)
                if path.is_relative_to(PACKAGE) and path.name != "cpu.py":
                    found.add(f"{owner.__name__.rpartition('.')[2]}.{name}")
    named = "padded_alltoall" in get_args(FIELD.type)
    return found | ({"TransformerConfig.moe_token_dispatcher_type"} if named else set())


@pytest.fixture
def others(monkeypatch) -> None:
    """Put stand-ins for Megatron-LM and Megatron-Bridge into `sys.modules`."""

    def function(self: Any, megatron_model: Any = None) -> None: ...

    def add(module: str, owner: str = "", *names: str) -> None:
        made: Any = ModuleType(module)
        functions: dict[str, Any] = dict.fromkeys(names, function)
        if owner == "ConfigContainerBase":
            functions = {"_convert_value_to_dict": classmethod(function)}
        kind = type(owner or "none", (), functions | {"__module__": module})
        vars(made).update({owner: kind} if owner else functions)
        monkeypatch.setitem(sys.modules, module, made)

    add("megatron.bridge")
    listing = "build_conversion_tasks", "_megatron_global_adapters_info_all_pp_ranks"
    add("megatron.bridge.models.conversion.model_bridge", "MegatronModelBridge", *listing)
    add("megatron.training.config.container", "ConfigContainerBase")
    loop = "train_step", "training_log", "checkpoint_and_decide_exit"
    add("megatron.training.training", "", *loop)


def test_what_is_wrapped_is_in_the_table_and_uninstall_undoes_all_of_it(others):
    assert wrapped() == set()
    install()
    tiny.layer(tiny.config())  # It makes a config, and packs experts.
    tiny.padded_layer(PaddedOptions(experts="packed"))
    for way in WAYS:
        guard.install(SimpleNamespace(**way))
    found = wrapped()
    page = (PACKAGE / "megatron/README.md").read_text()
    table = page[page.index("## What is patched") :].split("\n\n## ")[0]
    assert found == set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE))
    uninstall()
    assert wrapped() == set()


@pytest.mark.parametrize("way", [NONE, *WAYS], ids=str)
def test_padded_spec_wraps_nothing_where_no_graph_replays(way):
    fields = {name: value for name, value in way.items() if name != "cuda_graph_impl"}
    overlap = fields.pop("overlap_moe_expert_parallel_comm")
    if way is NONE:
        tiny.padded_layer()
    else:
        guard.install(SimpleNamespace(**way))
    graphs = {
        "transformer_engine": {"TransformerLayer.__call__"},
        "local": {"TransformerLayer.__call__", "_CudaGraphRunner.create_fwd_graph"},
        "full_iteration": {"TransformerLayer.__call__"},
        "none": set(),
    }[way["cuda_graph_impl"]]
    if way == WAYS[2]:
        graphs = graphs | {"StaticBufferLoader.__call__"}
    if overlap:
        graphs = graphs | {"TransformerLayerSchedulePlan._build_callable_nodes"}
    assert wrapped() == graphs


def symbols() -> set[str]:
    """Return what `padded_dispatch.megatron` takes from Megatron-Core, by import or by name."""
    found = set()
    for path in (PACKAGE / "megatron").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.core"):
                module = f"{node.module}.".removeprefix("megatron.core.")
                found |= {f"{module}{name.name}" for name in node.names}
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = (
                    r"(activations|distributed|full_cuda_graph|fusions|models|transformer)(\.\w+)+"
                )
                found |= {node.value} if re.fullmatch(named, node.value) else set()
    return {name for name in found if not name.endswith(".cuda_graphs")}


def resolve(name: str) -> Any:
    owner, _, attribute = f"megatron.core.{name}".rpartition(".")
    return importlib.import_module(owner), attribute


def without(monkeypatch: Any, *names: str) -> Any:
    """Remove symbols of Megatron-Core, and import `padded_dispatch.megatron` anew."""
    for name in names:
        monkeypatch.delattr(*resolve(name), raising=False)
        if f"megatron.core.{name}" in sys.modules:
            monkeypatch.setitem(sys.modules, f"megatron.core.{name}", None)
    monkeypatch.setattr(padded_dispatch, "megatron", padded_dispatch.megatron)
    for name in [name for name in sys.modules if name.startswith("padded_dispatch.megatron")]:
        if name != "padded_dispatch.megatron.cpu":  # The block of this test is its own.
            monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("padded_dispatch.megatron")


@pytest.mark.parametrize("name", sorted(symbols() - REQUIRED))
def test_without_an_optional_symbol_a_layer_trains(monkeypatch, name):
    anew = without(monkeypatch, name)
    anew.install(anew.PaddedOptions(experts="packed"))
    layer = tiny.layer(tiny.config())
    assert type(layer.experts).__name__ == "StackedExperts"
    hidden = torch.randn(6, 1, tiny.HIDDEN, requires_grad=True)
    layer(hidden)[0].sum().backward()
    assert hidden.grad is not None and hidden.grad.any()
    anew.uninstall()
    assert not PATCHED._saved


@pytest.mark.parametrize(
    ("name", "field", "way"),
    [
        ("transformer.cuda_graphs.is_graph_capturing", "cuda_graph_impl", WAYS[0]),
        ("transformer.cuda_graphs._CudaGraphRunner", "cuda_graph_impl", WAYS[1]),
        ("full_cuda_graph.StaticBufferLoader", "cuda_graph_impl", WAYS[2]),
        (guard._PLAN, "overlap_moe_expert_parallel_comm", WAYS[3]),
    ],
)
def test_what_needs_a_symbol_that_is_gone_is_refused_by_name(monkeypatch, name, field, way):
    monkeypatch.delattr(*resolve(name))
    off = "False" if way is WAYS[3] else "'none'"
    gone = rf"with .* which has no megatron\.core\.{re.escape(name)}.*"
    words = rf"^{field} must be {off} {gone}; set {field}={off}$"
    with pytest.raises(ValueError, match=words):
        guard.install(SimpleNamespace(**way))
    guard.install(SimpleNamespace(**NONE))


def test_names_of_the_package_need_their_own_symbols_alone(monkeypatch):
    anew = without(monkeypatch, "tensor_parallel.random.get_cuda_rng_tracker")
    with pytest.raises(ImportError, match="cannot import name 'get_cuda_rng_tracker'"):
        anew.Retry
    assert anew.Telemetry.__module__ == "padded_dispatch.megatron.telemetry"
