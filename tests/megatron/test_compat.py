"""What is wrapped of Megatron is what the page says, and no more than a config needs.

Megatron-LM's loop, Megatron-Bridge and its saved configs are stand-ins.
"""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

import padded_dispatch
from padded_dispatch.megatron import guard, install, uninstall
from padded_dispatch.megatron.compat import BRIDGE, MEGATRON_LM, iteration_graph, layer_graphs
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("uninstalled")

PACKAGE = Path(padded_dispatch.__file__).parent
FIELD: Any = TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"]

# `cuda_graph_impl` and scopes of configs that need a guard.
NONE = {"cuda_graph_impl": "none"}
WAYS = (
    layer_graphs("moe"),
    layer_graphs() | {"cuda_graph_impl": "local"},
    iteration_graph(),
)


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
    for loop in (MEGATRON_LM, BRIDGE):
        add(loop, "", "train_step", "training_log")


def test_what_is_wrapped_is_in_the_table_and_uninstall_undoes_all_of_it(others):
    assert wrapped() == set()
    install()
    tiny.layer(tiny.config())  # It makes a config, and packs experts.
    tiny.padded_layer(experts="packed")
    for way in WAYS:
        guard.install(SimpleNamespace(**way))
    found = wrapped()
    page = (PACKAGE / "megatron/MAINTAINERS.md").read_text()
    table = page[page.index("## What is patched") :].split("\n\n## ")[0]
    assert found == set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE))
    uninstall()
    assert wrapped() == set()


@pytest.mark.parametrize("way", [NONE, *WAYS], ids=str)
def test_padded_spec_wraps_nothing_where_no_graph_replays(way):
    if way is NONE:
        tiny.padded_layer()
    else:
        guard.install(SimpleNamespace(**way))
    graphs = {
        "transformer_engine": {"TransformerLayer.__call__", "TECudaGraphHelper.create_cudagraphs"},
        "local": {"TransformerLayer.__call__"},
        "full_iteration": {"TransformerLayer.__call__"},
        "none": set(),
    }[way["cuda_graph_impl"]]
    if way == WAYS[2]:
        graphs = graphs | {"StaticBufferLoader.__call__", "FullCudaGraphWrapper.__call__"}
    assert wrapped() == graphs
