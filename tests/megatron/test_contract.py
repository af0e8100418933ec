"""The facts about Megatron-Core that the package relies on, tested on the installed version.

Each section names the file of ours that relies on its facts, and each docstring the versions that
differ.
"""

import ast
import dataclasses
import functools
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args, get_origin

import megatron.core
import pytest
import torch
from megatron.core import package_info, tensor_parallel
from megatron.core.models.gpt import gpt_layer_specs, moe_module_specs
from megatron.core.transformer import transformer_layer
from megatron.core.transformer.moe import experts, moe_layer, moe_utils, router
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoETokenDispatcher,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)

from padded_dispatch.config import DispatchConfig
from padded_dispatch.megatron.dispatcher import CellTokenDispatcher, PackedTokenDispatcher
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("one_process")

CORE = Path(megatron.core.__path__[0])
INSTALLED = (package_info.MAJOR, package_info.MINOR)


class Group:
    """A process group with a size and no processes."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


# The dispatcher: padded_dispatch/megatron/dispatcher.py


@pytest.mark.parametrize(
    "method",
    [
        "__init__",
        "dispatch_preprocess",
        "token_dispatch",
        "dispatch_postprocess",
        "combine_preprocess",
        "token_combine",
        "combine_postprocess",
        "set_shared_experts",
    ],
)
def test_dispatcher_methods_take_the_arguments_of_the_stock_ones(method):
    """All versions call them by position; the names make a changed order visible."""
    stock = MoEAllGatherTokenDispatcher if method == "__init__" else MoETokenDispatcher
    for ours in (PackedTokenDispatcher, CellTokenDispatcher):
        assert parameters(getattr(ours, method)) == parameters(getattr(stock, method))


def test_the_base_dispatcher_takes_ep_and_expt_tp_from_the_collection():
    """All versions: `ep_group`, `ep_size`, and `tp_group`, `tp_size` of the *expert* TP group."""
    groups = SimpleNamespace(ep=Group(3), expt_tp=Group(2), tp=None, tp_ep=None)
    base = MoETokenDispatcher(config=tiny.config("allgather"), pg_collection=groups)
    assert (base.ep_group, base.ep_size) == (groups.ep, 3)
    assert (base.tp_group, base.tp_size) == (groups.expt_tp, 2)
    assert (base.cudagraph_attrs, base.valid_cudagraph_attrs) == ([], None)


def test_no_zero_copy_buffers_unless_a_dispatcher_has_some():
    """0.19 asks every dispatcher for them; we inherit the base class's method, which has none."""
    asked = hasattr(MoETokenDispatcher, "get_expert_zero_copy_buffers")
    assert asked == (INSTALLED >= (0, 19))
    if asked:
        assert MoETokenDispatcher.get_expert_zero_copy_buffers(SimpleNamespace()) == (None, None)


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


def test_a_captured_preprocess_returns_the_tensors_among_the_named_attributes():
    """All versions skip names whose attribute is None, and resolve dotted names (TE graphs)."""
    x = torch.ones(2)
    dispatcher = SimpleNamespace(
        cudagraph_attrs=["plan", "nothing", "part.inner"],
        valid_cudagraph_attrs=None,
        plan=x,
        nothing=None,
        part=SimpleNamespace(inner=2 * x),
    )
    signal = moe_utils.MoECudaGraphPartialCaptureSignal(
        SimpleNamespace(token_dispatcher=dispatcher), "preprocess", hidden_states=3 * x, probs=4 * x
    )
    outputs = signal.get_early_return_outputs(x, shared_expert_output=None)
    assert [tensor[0].item() for tensor in outputs] == [3, 4, 1, 2]
    assert dispatcher.valid_cudagraph_attrs == ["plan", "part.inner"]


# The layer: padded_dispatch/megatron/layer.py


def test_moe_layer_takes_config_first_and_groups_by_keyword():
    """All versions; later ones add `is_mtp_layer` (0.17) and `name` (0.18) at the end."""
    names = parameters(moe_layer.MoELayer.__init__)
    expected = ["self", "config", "submodules", "layer_number", "pg_collection"]
    expected += ["is_mtp_layer"] if INSTALLED >= (0, 17) else []
    expected += ["name"] if INSTALLED >= (0, 18) else []
    assert names == expected


def test_moe_layer_raises_for_an_unknown_dispatcher():
    """All versions; hence `build` sets a stock name while the constructor runs."""
    config = tiny.config("other")
    with pytest.raises(ValueError, match="Unsupported token dispatcher type: other"):
        tiny.layer(config)


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


def test_transformer_layers_pass_groups_to_an_exact_class_in_old_versions():
    """0.16 and 0.17 compare a spec's module with `in (MoELayer, ...)`; 0.18 and later do not."""
    tree = ast.parse(inspect.getsource(transformer_layer))
    tests = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and isinstance(node.ops[0], ast.In)
        and "MoELayer," in ast.unparse(node.comparators[0])
    ]
    assert len(tests) == (1 if INSTALLED < (0, 18) else 0)
    assert all(test.startswith("submodules.mlp.module in (MoELayer,") for test in tests)


def test_the_spec_of_a_moe_layer():
    """A ModuleSpec in 0.16 and 0.17, a partial in 0.18 and later."""
    spec = moe_module_specs.get_moe_module_spec(use_te=False, num_experts=4)
    if INSTALLED < (0, 18):
        assert isinstance(spec, ModuleSpec) and spec.module is moe_layer.MoELayer
    else:
        assert isinstance(spec, functools.partial) and spec.func is moe_layer.MoELayer


def test_place_of_the_moe_layer_in_the_specs_of_a_layer_and_a_block():
    """All versions: `ModuleSpec.submodules.mlp`, and `layer_specs` of a block."""
    layer = gpt_layer_specs.get_gpt_layer_local_spec(num_experts=4)
    assert type(layer.submodules.mlp) is type(
        moe_module_specs.get_moe_module_spec(use_te=False, num_experts=4)
    )
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        tiny.config("allgather", num_layers=3, moe_layer_freq=[1, 0, 1]),
        use_transformer_engine=False,
    )
    kinds = [type(layer.submodules.mlp) for layer in block.layer_specs]
    assert kinds[0] is kinds[2] is type(layer.submodules.mlp)


# The router: padded_dispatch/megatron/router.py


@pytest.mark.parametrize("method", ["forward", "routing", "_apply_expert_bias"])
def test_router_methods_take_a_padding_mask(method):
    """All versions: one tensor and `padding_mask=None`."""
    assert parameters(getattr(TopKRouter, method))[2:] == ["padding_mask"]


class RecordingRouter(TopKRouter):
    """A router that records the arguments of `_apply_expert_bias`."""

    seen: tuple

    def _apply_expert_bias(self, routing_map, padding_mask=None):
        self.seen = (routing_map, padding_mask)


def recording_router(**changes) -> RecordingRouter:
    recording = tiny.layer(tiny.config("allgather", **changes)).router
    recording.__class__ = RecordingRouter
    return recording


@pytest.mark.parametrize("factor", [None, 1.0])
def test_routing_counts_the_map_that_it_returns(factor):
    """All versions: with a factor the map is cut before it is counted, so we hide the factor."""
    recording = recording_router(moe_expert_capacity_factor=factor)
    logits = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    logits[..., 0] += 5
    probs_TE, map_TE = recording.routing(logits)
    assert recording.seen[0] is map_TE and map_TE.dtype == torch.bool
    assert probs_TE.shape == map_TE.shape == (15, 4)
    # ceil(15 * 2 / 4) = 8 of the 15 tokens that ask for expert 0.
    assert map_TE[:, 0].sum() == (15 if factor is None else 8)


def test_the_router_reads_its_factor_in_routing_only():
    """All versions; hence hiding the factor from the router changes nothing else."""
    name = "moe_expert_capacity_factor"
    in_routing = inspect.getsource(TopKRouter.routing).count(name)
    assert in_routing == inspect.getsource(router).count(name) > 0


def test_recomputation_runs_first_without_gradients():
    """All versions; hence counters count only where gradients are enabled."""
    seen = []

    def forward(x):
        seen.append(torch.is_grad_enabled())
        return 2 * x

    x = torch.ones(1, requires_grad=True)
    tensor_parallel.checkpoint(forward, False, x).backward()
    assert seen == [False, True] and x.grad == 2


# Experts and shared experts: padded_dispatch/megatron/{config,compat}.py


def test_experts_take_rows_counts_and_probabilities():
    """All versions pass them by position; 0.19 may add buffers, of which we have none."""
    for cls in (experts.TEGroupedMLP, experts.SequentialMLP):
        assert parameters(cls.forward)[:4] == [
            "self",
            "permuted_local_hidden_states",
            "tokens_per_expert",
            "permuted_probs",
        ]


def test_inference_experts_are_a_subclass_of_the_accepted_ones():
    """From 0.17 on; 0.16 has GroupedMLP instead. So `check_experts` tests refused names first."""
    if INSTALLED < (0, 17):
        assert not hasattr(experts, "InferenceGroupedMLP") and hasattr(experts, "GroupedMLP")
    else:
        assert issubclass(experts.InferenceGroupedMLP, experts.TEGroupedMLP)
        assert not hasattr(experts, "GroupedMLP")


# The config: padded_dispatch/megatron/installer.py


def test_the_type_of_the_field_is_a_literal_of_three_names():
    """All versions: an object, not a string; subclasses share the field."""
    field = TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"]
    assert get_origin(field.type) is Literal
    assert get_args(field.type) == ("allgather", "alltoall", "flex")
    assert MLATransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"] is field


def test_post_init_is_looked_up_on_the_class(monkeypatch):
    """All versions: `dataclasses.replace` and subclasses, too, run the current one."""
    ran = []
    original = TransformerConfig.__post_init__

    def noting(self):
        ran.append(type(self).__name__)
        original(self)

    monkeypatch.setattr(TransformerConfig, "__post_init__", noting)
    config = tiny.config("allgather")
    dataclasses.replace(config, moe_router_topk=1, moe_router_pre_softmax=True)
    MLATransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    assert ran == ["TransformerConfig", "TransformerConfig", "MLATransformerConfig"]


def test_padding_alone_is_refused_and_a_negative_factor_means_none():
    """All versions."""
    with pytest.raises(ValueError, match="moe_expert_capacity_factor must be set"):
        tiny.config("allgather", moe_pad_expert_input_to_capacity=True)
    assert (
        tiny.config("allgather", moe_expert_capacity_factor=-1.0).moe_expert_capacity_factor is None
    )


# Capacity: padded_dispatch/config.py


@pytest.mark.parametrize(
    "num_tokens, top_k, num_experts, factor",
    [(1, 1, 1, 1.0), (13, 2, 4, 1.0), (4096, 8, 128, 1.25), (448, 6, 160, 160 / 6), (7, 3, 5, 0.1)],
)
def test_capacity_is_megatrons_up_to_the_number_of_tokens(num_tokens, top_k, num_experts, factor):
    """All versions: `get_capacity`, digit for digit; the fourth case rounds to T + 1 there."""
    theirs = moe_utils.get_capacity(num_tokens * top_k, num_experts, factor)
    ours = DispatchConfig(num_experts=num_experts, top_k=top_k, capacity_factor=factor)
    assert ours.capacity(num_tokens) == min(num_tokens, theirs)
