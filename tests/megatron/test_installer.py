"""After install() the config value alone is enough; uninstall() restores stock Megatron."""

import typing
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from padded_dispatch.megatron import PaddedOptions, install, uninstall
from padded_dispatch.megatron.compat import graph_scopes, layer_graphs
from padded_dispatch.megatron.config import check_config
from padded_dispatch.megatron.dispatcher import PaddedAlltoAllTokenDispatcher
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("uninstalled")


def test_without_install_megatron_names_the_word():
    with pytest.raises(ValueError, match="Unsupported token dispatcher type: padded_alltoall"):
        tiny.layer(tiny.config())
    assert type(tiny.layer(tiny.config("allgather"))) is MoELayer


def test_layer_is_megatrons_own_with_our_dispatcher():
    install()
    layer = tiny.layer(tiny.config(moe_expert_capacity_factor=1.25))
    assert type(layer) is MoELayer
    assert isinstance(layer.token_dispatcher, PaddedAlltoAllTokenDispatcher)
    assert layer.token_dispatcher.configs.current.capacity_factor == 1.25
    assert layer.config.moe_token_dispatcher_type == "padded_alltoall"
    field = TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"]
    assert typing.get_args(field.type) == ("allgather", "alltoall", "flex", "padded_alltoall")


def test_options_that_no_layer_follows_are_named_once(caplog):
    install()
    tiny.layer(tiny.config("allgather"))
    install(PaddedOptions(eval_factor=3.0))
    tiny.layer(tiny.config())
    assert caplog.messages == []
    for _ in range(2):
        tiny.layer(tiny.config("allgather"))
    (message,) = caplog.messages
    assert message.endswith("moe_token_dispatcher_type must be 'padded_alltoall', got 'allgather'")


def test_options_reach_the_dispatcher():
    uninstall()
    earlier = tiny.config()
    install(PaddedOptions(eval_factor=3.0))
    config = tiny.config()
    assert tiny.layer(earlier).token_dispatcher.configs.evaluation.capacity_factor == 3.0
    assert tiny.layer(config).token_dispatcher.configs.evaluation.capacity_factor == 3.0
    config.padded_dispatch = PaddedOptions(eval_factor=5.0)
    assert tiny.layer(config).token_dispatcher.configs.evaluation.capacity_factor == 5.0


@pytest.mark.parametrize("given", [{"experts": "packed"}, "experts=packed", 0])
def test_options_of_another_type_are_rejected_at_once(given):
    """Also if they are false: an empty dict must not become the defaults."""
    fix = r"write PaddedOptions\(\*\*\.\.\.\)" if isinstance(given, dict) else "make one"
    with pytest.raises(ValueError, match=f"^options must be PaddedOptions, got .*; {fix}$"):
        install(given)
    install()
    config = tiny.config()
    config.padded_dispatch = given
    with pytest.raises(ValueError, match=f"^padded_dispatch must be PaddedOptions, got .*; {fix}"):
        tiny.layer(config)


@pytest.mark.parametrize(
    ("options", "fields", "words"),
    [
        (
            {"layer_factors": {1: 2.0, 9: 1.5, 7: 1.5}},
            {"num_layers": 2},
            "^layer_factors must name layers with experts, from 1 to 2, as moe_layer_freq=1 has "
            "them, got .*; leave out layer 9, layer 7$",
        ),
        (
            {"layer_factors": {2: 1.5}},
            {"num_layers": 2, "moe_layer_freq": [1, 0]},
            r"^layer_factors must .* as moe_layer_freq=\[1, 0\] has them, .*; leave out layer 2$",
        ),
        (
            {"layer_factors": {1: 2.0, 3: 1.5, 4: 1.5}},
            {"num_layers": 5, "moe_layer_freq": 2},
            "^layer_factors must name layers with experts, .*; leave out layer 4$",
        ),
        (  # Multi-token prediction is as the last layer, which is dense.
            {"layer_factors": {3: 1.5}},
            {"num_layers": 2, "moe_layer_freq": [1, 0], "mtp_num_layers": 1},
            "^layer_factors must name layers with experts, .*; leave out layer 3$",
        ),
        (
            {},
            {"moe_router_topk": 5},
            "^moe_router_topk must be at most num_moe_experts=4, got 5; lower moe_router_topk$",
        ),
        (
            {},
            {"moe_token_drop_policy": "prob"},
            "^moe_token_drop_policy must be one of probs, position, got 'prob'$",
        ),
        (
            {},
            {"expert_model_parallel_size": 3},
            "^num_moe_experts must be a multiple of expert_model_parallel_size=3, got 4; change",
        ),
    ],
)
def test_what_the_model_does_not_have_is_found_when_the_config_is_made(options, fields, words):
    install(PaddedOptions(**options))
    with pytest.raises(ValueError, match=words):
        tiny.config(**fields)


def test_factors_of_all_layers_with_experts_are_accepted():
    install(PaddedOptions(layer_factors={1: 2.0, 3: 1.5, 5: 1.5}))
    assert tiny.config(num_layers=5, moe_layer_freq=2).num_layers == 5
    install(PaddedOptions(layer_factors={2: 2.0}))
    assert tiny.config(num_layers=2, moe_layer_freq=[0, 1]).num_layers == 2
    # Layers of multi-token prediction come last.
    assert tiny.config(num_layers=1, mtp_num_layers=1).mtp_num_layers == 1
    repeated: Any = tiny.config(num_layers=1, mtp_num_layers=2)
    repeated.padded_dispatch = PaddedOptions(layer_factors={3: 2.0})
    check_config(repeated)
    repeated.mtp_use_repeated_layer = True  # Some versions lack it.
    with pytest.raises(ValueError, match=r"^layer_factors must name .* from 1 to 2, .* 3$"):
        check_config(repeated)
    repeated.is_hybrid_model = True  # In its pattern "E/*E/*E" the last E is layer 1 + 2.
    check_config(repeated)
    repeated.moe_layer_freq = [0]
    with pytest.raises(ValueError, match=r"^layer_factors must name .* from 1 on, .* 3$"):
        check_config(repeated)
    dense = tiny.config(num_moe_experts=None, moe_ffn_hidden_size=None)
    assert dense.num_moe_experts is None


def test_without_a_gpu_the_remedy_is_named(monkeypatch):
    install()
    config = tiny.config()
    monkeypatch.setattr("torch.cuda.Stream", object)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    remedy = (
        r"^PyTorch must see a GPU, got 'none'; to run .* inside `with megatron_on_cpu\(\):` from"
    )
    with pytest.raises(ValueError, match=remedy):
        tiny.layer(config)


@pytest.mark.parametrize("factor", [None, 1.25])
def test_scope_moe_needs_neither_factor_nor_pad_flag(factor):
    """Stock asserts both: 'moe cuda graph is only supported with drop-padding MoE.'"""
    graphs = {"moe_expert_capacity_factor": factor, **layer_graphs("moe")}
    with pytest.raises(AssertionError, match="drop-padding"):
        tiny.config("alltoall", **graphs)
    install()
    config = tiny.config(**graphs)
    assert config.moe_expert_capacity_factor == factor
    assert config.moe_pad_expert_input_to_capacity is False


def test_scope_moe_works_with_the_former_names_of_graphs():
    """`external_cuda_graph` means Transformer Engine's graphs, `enable_cuda_graph` local ones."""
    scopes = {name: value for name, value in layer_graphs("moe").items() if "impl" not in name}
    install()
    config = tiny.config(external_cuda_graph=True, **scopes)
    assert config.cuda_graph_impl == "transformer_engine" and graph_scopes(config) == {"moe"}
    config = tiny.config(enable_cuda_graph=True, **scopes)
    assert config.cuda_graph_impl == "local" and graph_scopes(config) == {"moe"}
    assert config.moe_expert_capacity_factor is None


# What recipes set for HybridEP and NCCL EP; a version takes the fields that it has.
FOR_OTHERS = {
    "moe_enable_deepep": True,
    "moe_flex_dispatcher_backend": "ncclep",
    "moe_expert_rank_capacity_factor": 1.5,
    "moe_paged_stash": True,
    "moe_pad_experts_for_cuda_graph_inference": True,
    "moe_router_padding_for_quantization": True,
    "moe_hybridep_num_sms": 32,
    "moe_ncclep_zero_copy": True,
    "moe_dispatch_fwd_dtype": "mxfp8",
    "moe_single_grouped_weight": True,
    "use_transformer_engine_op_fuser": True,
}


def test_a_recipe_for_another_dispatcher_is_accepted(caplog):
    """Megatron itself accepts most of these settings with the flex dispatcher only."""
    fields = TransformerConfig.__dataclass_fields__
    settings = {name: value for name, value in FOR_OTHERS.items() if name in fields}
    install()
    with caplog.at_level("INFO", "padded_dispatch"):
        config = tiny.config(**settings)
        config.__post_init__()
    kept = {"moe_pad_experts_for_cuda_graph_inference", "use_transformer_engine_op_fuser"}
    for name, value in settings.items():
        assert getattr(config, name) == (value if name in kept else fields[name].default), name
    logged = [message.partition("=")[0] for message in caplog.messages]
    assert sorted(logged) == sorted(settings)


def test_a_factor_goes_with_load_balancing_of_any_kind():
    """Stock's router would drop before it counts, which sinkhorn and others forbid."""
    sinkhorn = {"moe_router_load_balancing_type": "sinkhorn", "moe_expert_capacity_factor": 1.25}
    with pytest.raises(ValueError, match="moe_expert_capacity_factor only works with aux_loss"):
        tiny.config("alltoall", **sinkhorn)
    install()
    layer = tiny.layer(tiny.config(**sinkhorn, moe_pad_expert_input_to_capacity=True))
    assert layer.config.moe_pad_expert_input_to_capacity is True
    assert layer.token_dispatcher.configs.current.capacity_factor == 1.25
    assert layer(torch.randn(6, 1, tiny.HIDDEN))[0].isfinite().all()


def test_scopes_without_experts_need_no_factor_either():
    """They get no temporary factor either, with which Megatron would reject sinkhorn."""
    install()
    parts = layer_graphs("attn", "moe_router", "moe_preprocess")
    for graphs in (layer_graphs("attn"), parts, layer_graphs() | {"cuda_graph_impl": "local"}):
        config = tiny.config(moe_router_load_balancing_type="sinkhorn", **graphs)
        assert config.moe_expert_capacity_factor is None


def test_an_mla_config_is_checked_once_as_well():
    install()
    values = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_moe_experts": 4}
    config = MLATransformerConfig(
        **values, moe_token_dispatcher_type="padded_alltoall", moe_aux_loss_coeff=0.0
    )
    assert config.moe_token_dispatcher_type == "padded_alltoall"
    assert config.padded_dispatch == PaddedOptions()
