"""The facts about Megatron-Core that the package relies on, tested on the installed version.

Each section names the file of ours that relies on its facts, and each docstring the versions that
differ. Facts are here that no other test would notice.
"""

import ast
import inspect
from pathlib import Path

import megatron.core
import pytest
import torch
from megatron.core import package_info
from megatron.core.transformer.moe import moe_utils, router
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoETokenDispatcher,
)

from padded_dispatch.megatron.dispatcher import CellTokenDispatcher, PackedTokenDispatcher
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("one_process")

CORE = Path(megatron.core.__path__[0])
INSTALLED = (package_info.MAJOR, package_info.MINOR)


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


# The dispatcher: padded_dispatch/megatron/dispatcher.py


def test_dispatcher_methods_take_the_arguments_of_the_stock_ones():
    """All versions call them by position; names show a changed order. Our layer makes ours."""
    stock = {name: value for name, value in vars(MoETokenDispatcher).items() if name != "__init__"}
    methods = {name: value for name, value in stock.items() if inspect.isfunction(value)}
    assert {"dispatch_preprocess", "token_combine", "set_shared_experts"} < methods.keys()
    for name, method in methods.items():
        for ours in (PackedTokenDispatcher, CellTokenDispatcher):
            assert parameters(getattr(ours, name)) == parameters(method), name


def test_no_training_code_asks_for_a_dispatcher_class():
    """0.16 and 0.17 never test it; 0.18 and later test for the NVLS inference dispatcher only."""
    asked = set()
    for path in CORE.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "Dispatcher" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                names = ast.unparse(node.args[1])
                if "Dispatcher" in names:
                    asked.add(names)
    assert asked == ({"NVLSAllGatherVDispatcher"} if INSTALLED >= (0, 18) else set())


# The layer: padded_dispatch/megatron/layer.py


def test_the_all_gather_dispatcher_owns_nothing_and_the_all_to_all_one_a_stream(monkeypatch):
    """All versions; hence `build` takes the all-gather one while the constructor runs."""
    streams = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda: streams.append("created"))
    # One for all dispatchers of the process.
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", None)
    groups = moe_utils.get_default_pg_collection()
    arguments = {"config": tiny.config("allgather"), "pg_collection": groups}
    all_gather = MoEAllGatherTokenDispatcher(4, [0, 1, 2, 3], **arguments)
    assert not streams and not isinstance(all_gather, torch.nn.Module)
    MoEAlltoAllTokenDispatcher(4, [0, 1, 2, 3], **arguments)
    assert streams == ["created"]


# The router: padded_dispatch/megatron/router.py


def test_the_router_reads_its_factor_in_routing_only():
    """All versions; hence hiding the factor from the router changes nothing else."""
    name = "moe_expert_capacity_factor"
    in_routing = inspect.getsource(TopKRouter.routing).count(name)
    assert in_routing == inspect.getsource(router).count(name) > 0
