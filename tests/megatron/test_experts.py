"""Packed experts in Megatron's layer: the same numbers, the same checkpoints, refusals by name."""

import gc
import logging
import re
import weakref
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch import Tensor

from padded_dispatch.megatron import PaddedOptions, stacked_linear
from padded_dispatch.megatron import experts as megatron_experts
from padded_dispatch.megatron.experts import (
    _FIELDS,
    StackedExperts,
    chosen_experts,
)
from tests.megatron.test_stacked_linear import biases_of
from tests.support import parity, tiny
from tests.support.direct_parity import differences
from tests.support.threads import poisoned_memory

pytestmark = pytest.mark.usefixtures("one_process")

SHAPES = {"fc1": (48, tiny.HIDDEN), "fc2": (tiny.HIDDEN, 24)}


def layer(experts: str = "packed", **given: Any) -> Any:
    made = tiny.padded_layer(experts=experts, **given)
    if made.config.add_bias_linear and not isinstance(made.experts, StackedExperts):
        for expert in made.experts.local_experts:
            # Megatron adds fc2's bias in place to a view that autograd wants whole.
            expert.linear_fc2.register_forward_hook(lambda *call: (call[2][0].clone(), call[2][1]))
    return made


def assert_alike(packed: Any, module: Any, tokens: Tensor) -> None:
    """Compare all results; those of single experts are parts of the packed ones."""
    ours, found = tiny.results(packed, tokens), defaultdict(list)
    for name, value in tiny.results(module, tokens).items():
        found[re.sub(r"local_experts\.\d+\.", "", name)].append(value)
    assert ours.keys() == found.keys()
    for name, parts in found.items():
        expected = torch.stack(parts).view_as(ours[name])
        assert expected.any()
        torch.testing.assert_close(ours[name], expected, rtol=1e-12, atol=1e-14, msg=name)


ACTIVATIONS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "swiglu, bias": {"add_bias_linear": True},
    "geglu": {"activation_func": F.gelu},
    "gpt-oss": {**tiny.gpt_oss(0.25), "add_bias_linear": True},
    "clamped swiglu": {"activation_func_clamp_value": 0.25},
    "gelu, bias": {"gated_linear_unit": False, "activation_func": F.gelu, "add_bias_linear": True},
    "silu": {"gated_linear_unit": False},
    "squared relu": {"gated_linear_unit": False, "activation_func": squared_relu},
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("factor", "shape"), [(None, (7, 3)), (0.3, (7, 3)), (0.3, (1, 1))])
def test_output_and_gradients_are_those_of_the_module_it_replaces(factor, shape, name):
    tokens = 3 * torch.randn(*shape, tiny.HIDDEN, dtype=torch.float64)
    settings = {"moe_expert_capacity_factor": factor, **ACTIVATIONS[name]}
    module = layer("module", **settings).double()
    packed = layer(capacity_pool="cells", **settings).double()
    if module.config.add_bias_linear:  # Which begins as zeros.
        for name in SHAPES:
            given = (biases_of(one.experts, f"linear_{name}") for one in (module, packed))
            for bias, same in zip(*given, strict=True):
                same.copy_(bias.normal_())
    assert type(packed.experts) is StackedExperts
    assert_alike(packed, module, tokens)


class Projection(torch.nn.Linear):
    """Stands in for Transformer Engine's TELinear, which Megatron asks for."""

    def __init__(self, inputs: int, outputs: int, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, rows: Tensor) -> Any:
        return super().forward(rows), None


@pytest.mark.parametrize("factor", [None, 0.3])
def test_latent_experts_are_those_of_the_module_they_replace(monkeypatch, factor):
    """The layer projects tokens before dispatch: D is the latent size, here 5 of 16."""
    monkeypatch.setattr(moe_layer, "HAVE_TE", True)
    monkeypatch.setattr(moe_layer, "TELinear", Projection, raising=False)
    tokens = torch.randn(7, 3, tiny.HIDDEN, dtype=torch.float64)
    settings = {"moe_latent_size": 5, "moe_expert_capacity_factor": factor}
    ours = layer(capacity_pool="cells", **settings).double()
    assert ours.experts.linear_fc1.weight.shape == (tiny.NUM_EXPERTS, 48, 5)
    assert ours.experts.linear_fc2.weight.shape == (tiny.NUM_EXPERTS, 5, 24)
    assert_alike(ours, layer("module", **settings).double(), tokens)


def add_main_grads(packed: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Give the experts' weights what Megatron's DDP gives them; the sums are not zero."""
    found = {}
    for name in SHAPES:
        weight = getattr(packed.experts, f"linear_{name}").weight
        weight.main_grad = torch.full(weight.shape, 3.0, dtype=dtype)
        weight.grad_added_to_main_grad = False
        found[name] = weight
    return found


def test_weights_of_a_shape_share_what_autograd_gets():
    first, second = layer().experts, layer().experts
    with poisoned_memory():
        spare = first.linear_fc1.spare()
    assert not spare.any()
    assert spare.data_ptr() == second.linear_fc1.spare().data_ptr()
    assert (spare.shape, spare.requires_grad) == (first.linear_fc1.weight.shape, False)
    assert spare.data_ptr() != first.linear_fc2.spare().data_ptr()
    address = weakref.ref(spare)
    del spare, first, second
    gc.collect()
    assert address() is None


def test_a_replay_need_not_copy_gradients_that_nobody_reads(monkeypatch):
    """Transformer Engine looks at the end of a capture which parameters have the mark."""
    fused = layer()
    weights = add_main_grads(fused)
    for captures in (False, True, False):
        monkeypatch.setattr(stacked_linear, "is_capturing", lambda now=captures: now)
        monkeypatch.setattr(megatron_experts, "adds_gradients", lambda config: True)
        fused(torch.randn(7, 3, tiny.HIDDEN))
        for weight in weights.values():
            assert weight.skip_backward_post_hook == captures


@pytest.mark.parametrize("why", ["bf16", "frozen", "evaluation", "no DDP", "FSDP"])
def test_gradients_are_left_to_autograd_where_they_cannot_be_added(why):
    fused = layer()
    weights = add_main_grads(fused, torch.bfloat16 if why == "bf16" else torch.float32)
    for weight in weights.values():
        if why == "frozen":
            weight.requires_grad_(False)
        if why == "FSDP":
            weight.__fsdp_param__ = True
        if why == "no DDP":
            del weight.main_grad, weight.grad_added_to_main_grad
    with torch.set_grad_enabled(why != "evaluation"):
        output = fused(torch.randn(7, 3, tiny.HIDDEN))[0]
    if why != "evaluation":
        output.sum().backward()
    for weight in weights.values():
        assert (weight.grad is None) == (why in ("frozen", "evaluation"))
        if why != "no DDP":
            assert not weight.grad_added_to_main_grad
            assert (weight.main_grad == 3).all()


@pytest.mark.parametrize(
    ("impl", "fusion", "capturing", "expected"),
    [
        ("none", False, False, True),
        ("none", False, True, False),  # A graph that Megatron does not know.
        ("none", True, True, True),
        ("transformer_engine", False, True, True),
        ("full_iteration", False, True, True),
        ("local", True, True, True),
        ("local", False, True, False),
        ("local", False, False, False),
    ],
)
def test_graphs_decide_who_adds_gradients(monkeypatch, impl, fusion, capturing, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    config = SimpleNamespace(gradient_accumulation_fusion=fusion, cuda_graph_impl=impl)
    assert megatron_experts.adds_gradients(config) is expected


@pytest.mark.parametrize("biased", [False, True])
def test_checkpoints_have_the_keys_of_te_grouped_mlp(biased):
    settings = {"add_bias_linear": biased}
    module, packed = layer("module", **settings), layer(**settings)
    state = {key: value for key, value in packed.state_dict().items() if key.startswith("experts.")}
    expected = {f"experts.linear_{name}._extra_state": (0,) for name in SHAPES}
    for i, expert in enumerate(module.experts.local_experts):  # Built from the same seed.
        for name, shape in SHAPES.items():
            linear, key = getattr(expert, f"linear_{name}"), f"experts.linear_{name}"
            expected[f"{key}.weight{i}"] = shape
            assert torch.equal(state[f"{key}.weight{i}"], linear.weight)
            if biased:
                expected[f"{key}.bias{i}"] = shape[:1]
                assert torch.equal(state[f"{key}.bias{i}"], linear.bias)
    assert {key: tuple(value.shape) for key, value in state.items()} == expected
    other = {key: value + 1 for key, value in packed.state_dict().items()}
    packed.load_state_dict(other, strict=True)
    assert differences(packed.state_dict(), other) == []


REFUSED = {
    "activation_func": F.relu,
    "activation_func_fp8_input_store": True,
    "use_te_activation_func": True,
    "moe_mlp_glu_interleave_size": 32,
    "moe_single_grouped_bias": True,
    "moe_apply_probs_on_input": True,
    "expert_gtp_weight_remat_size": 2,
    "init_model_with_meta_device": True,
    "fp16": True,
    "fp4": "e2m1",
    "quant_recipe": object(),
    "offload_modules": ["moe_act"],
}


@pytest.mark.parametrize("row", _FIELDS, ids=lambda row: row.name)
def test_what_it_does_not_compute_is_refused_by_name(row):
    config = tiny.config()
    module = layer("module")
    groups = get_default_pg_collection()
    StackedExperts(config, module.experts, groups)
    setattr(config, row.name, REFUSED[row.name])  # Some versions lack some of the fields.
    with pytest.raises(ValueError) as error:
        StackedExperts(config, module.experts, groups)
    complaint, line = str(error.value).splitlines()
    assert complaint == "packed experts do not support"
    assert line.startswith(f"  {row.name}=")
    assert line.endswith('Remedy: PaddedOptions(experts="module").')


def test_a_clamp_that_megatron_would_leave_out_is_refused(monkeypatch):
    """From 0.20 on Megatron's fused SwiGLU clamps, too."""
    clamped = {"activation_func_clamp_value": 7.0}
    layer(**clamped)
    with monkeypatch.context() as since_20:
        since_20.setattr("padded_dispatch.megatron.experts.FUSED_SWIGLU_CLAMPS", True)
        layer(later={"bias_activation_fusion": True}, **clamped)
    monkeypatch.setattr("padded_dispatch.megatron.experts.FUSED_SWIGLU_CLAMPS", False)
    with pytest.raises(ValueError, match=r"activation_func_clamp_value=7\.0: Megatron's fused"):
        layer(later={"bias_activation_fusion": True}, **clamped)


E4M3 = {"fp8": "e4m3", "fp8_recipe": "tensorwise", "moe_ffn_hidden_size": 32}
NOT_BLOCKWISE = (
    "packed experts do not support fp8_recipe='blockwise': their scale per row is coarser than "
    "this recipe's; they support tensorwise and delayed."
)


@pytest.mark.parametrize(
    ("settings", "packed", "reason"),
    [
        ({}, True, "experts='auto'"),
        ({"moe_expert_capacity_factor": 1.0, "expert_model_parallel_size": 2}, True, "experts"),
        ({"bf16": False}, True, "experts='auto'"),
        ({"moe_ffn_hidden_size": 20}, False, "the sizes 16 and 20 are not multiples of 8"),
        ({"expert_tensor_parallel_size": 3}, True, "experts='auto'"),
        ({"expert_tensor_parallel_size": 2}, False, "the sizes 16 and 12 are not multiples of 8"),
        ({"moe_latent_size": 8}, True, "experts='auto'"),
        ({"moe_latent_size": 12}, False, "the sizes 12 and 24 are not multiples of 8"),
        ({"use_te_activation_func": True}, False, "packed experts do not support"),
        ({"offload_modules": ["expert_fc1"]}, False, "packed experts do not support"),
        ({"fp4": "e2m1"}, False, "packed experts do not support fp4='e2m1'"),
        (E4M3, True, "experts='auto'; in e4m3 with a scale per row"),
        ({**E4M3, "fp8_recipe": "delayed"}, True, "experts='auto'; in e4m3 with a scale per row"),
        ({**E4M3, "fp8_param": True}, True, "experts='auto'; in e4m3 with a scale per row"),
        ({**E4M3, "moe_ffn_hidden_size": 24}, False, "the sizes 16 and 24 are not multiples of 16"),
        ({**E4M3, "fp8_recipe": "blockwise"}, False, NOT_BLOCKWISE),
        ({**E4M3, "fp8_recipe": "custom"}, False, "packed experts do not support fp8_recipe="),
        # Megatron's default of a config without fp8.
        ({"fp8": None, "fp8_recipe": "blockwise"}, True, "experts='auto'"),
    ],
    ids=str,
)
def test_auto_takes_ours_where_they_can_compute_the_config(settings, packed, reason):
    given = {"bf16": True, "moe_expert_capacity_factor": None, **settings}
    chosen = chosen_experts(tiny.config(later=given))
    assert (chosen.packed, chosen.pool) == (packed, "store" if packed else "cells")
    assert chosen.reason.startswith(reason)


@pytest.mark.parametrize(("capability", "packed"), [((8, 9), False), ((9, 0), True)])
def test_auto_takes_ours_from_hopper_on_and_there_in_bf16(monkeypatch, capability, packed):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    config = tiny.config()
    assert chosen_experts(config).reason == "bf16 is not set"
    config.bf16 = True
    assert chosen_experts(config).packed is packed
    config.padded_dispatch = PaddedOptions(capacity_pool="store")
    with nullcontext() if packed else pytest.raises(ValueError, match="need a Hopper GPU or"):
        assert chosen_experts(config).packed
    config.bf16 = False
    with pytest.raises(ValueError, match="a store needs packed experts, got 'store'; bf16 is not"):
        chosen_experts(config)


def test_auto_leaves_experts_to_adapters():
    """Megatron-Bridge's training registers a hook of this name before it builds the model."""

    def peft_pre_wrap_hook(model: Any) -> Any:
        return model

    config: Any = tiny.config()
    config.bf16 = True
    for hooks, packed in (([], True), ([print], True), ([peft_pre_wrap_hook], False)):
        config._pre_wrap_hooks = hooks
        assert chosen_experts(config).packed is packed
    assert chosen_experts(config).reason.startswith("Megatron-Bridge adds adapters")
    config.padded_dispatch = PaddedOptions(experts="packed")
    assert chosen_experts(config).packed


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"experts": "auto"}, "experts=packed (experts='auto'), capacity_pool=store"),
        (
            {"capacity_pool": "cells"},
            "experts=packed (experts='packed' was asked for), capacity_pool=cells",
        ),
        (
            {"experts": "auto", "capacity_pool": "store"},
            "experts=packed (experts='auto'), capacity_pool=store",
        ),
    ],
    ids=str,
)
def test_what_was_chosen_is_logged_once(caplog, options, line):
    with caplog.at_level(logging.INFO, "padded_dispatch"):
        made = [layer(**options) for _ in range(2)]
    experts, pool = line.removeprefix("experts=").split()[0], line.rpartition("=")[2]
    chosen = {"experts": experts, "exchange": "none", "capacity_pool": pool}
    assert made[0].token_dispatcher.chosen == chosen
    assert caplog.messages == [f"padded dispatch: {line}, exchange=none (one rank)"]


def _attributes() -> list[dict[str, Any]]:
    with parity.megatron("cpu", expert_model_parallel_size=2):
        found = []
        for kind in ("module", "packed"):
            settings = {"expert_model_parallel_size": 2, "add_bias_linear": True}
            made = layer(kind, **settings).experts
            mlp = made if kind == "packed" else made.local_experts[0]
            for name in ("weight", "bias"):
                linears = mlp.linear_fc1, mlp.linear_fc2
                found += [vars(getattr(linear, name)) for linear in linears]
        return found


def test_parameters_keep_megatrons_attributes(pool2):
    """Above all which ranks reduce their gradients; a dimension in front moves the others."""
    for found in pool2.run(_attributes):
        (fc1, fc2, *biases), (packed_fc1, packed_fc2, *packed_biases) = found[:4], found[4:]
        assert fc1["allreduce"] is False and fc1["partition_dim"] == 0
        assert packed_fc1 == fc1 | {"partition_dim": 1}
        assert packed_fc2 == fc2 | {"partition_dim": 2}
        assert biases[0]["allreduce"] is False and packed_biases[0] == biases[0]
        assert packed_biases[1] == biases[1] | {"tensor_model_parallel": True}  # D26
