"""Translation of Megatron's config, and everything that is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core import package_info
from megatron.core.fp4_utils import get_fp4_align_size
from megatron.core.transformer.moe import experts as megatron_experts
from megatron.core.transformer.transformer_config import TransformerConfig

from padded_dispatch.config import NO_DROP, DispatchConfig
from padded_dispatch.megatron.compat import iteration_graph, layer_graphs
from padded_dispatch.megatron.config import (
    KEPT,
    REFUSED,
    REPLACED,
    check_config,
    check_experts,
    dispatch_config,
    take_over,
)
from tests.support import tiny

FIELDS = TransformerConfig.__dataclass_fields__
INSTALLED = f"{package_info.MAJOR}.{package_info.MINOR}"

# A value that is refused, where it is not simply True.
VALUES = {
    "offload_modules": ["core_attn", "fused_group_mlp"],
    "transformer_impl": "inference_optimized",
}
# Fields `moe_...` that have been read, by version: another number asks for another reading.
NUM_READ = {"0.16": 41, "0.17": 44, "0.18": 53, "0.19": 60, "0.20": 62}


def megatron_config(**later: object) -> Any:
    assert later.keys() <= FIELDS.keys()
    return tiny.config("allgather", num_moe_experts=6, later=later)


def test_a_plain_config_passes_and_no_field_is_new():
    check_config(megatron_config())
    check_config(SimpleNamespace(cuda_graph_impl="none"))  # A version may lack others.
    fields = [name for name in FIELDS if name.startswith("moe_")]
    assert len(fields) == NUM_READ[INSTALLED]
    names = [*(row.name for row in REFUSED), *REPLACED]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "row", [row for row in REFUSED if row.name in FIELDS], ids=lambda row: row.name
)
def test_a_refused_value_is_named_with_reason_and_remedy(row):
    value = VALUES.get(row.name, True)
    with pytest.raises(ValueError) as error:
        check_config(megatron_config(**{row.name: value}))
    assert str(error.value).splitlines() == [
        "the padded dispatcher does not support",
        f"  {row.name}={value!r}: {row.note}. Remedy: {row.remedy}.",
    ]


def test_all_refused_settings_are_named_at_once():
    config = megatron_config(
        batch_invariant_mode=True, variable_seq_lengths=True, moe_expert_capacity_factor=0.0
    )
    with pytest.raises(ValueError) as error:
        check_config(config)
    lines = str(error.value).splitlines()[1:]
    assert [line.split("=")[0].strip() for line in lines] == [
        "moe_expert_capacity_factor",
        "batch_invariant_mode",
        "variable_seq_lengths",
    ]


@pytest.mark.parametrize("factor", [-1.0, "1.25", float("nan"), True])
def test_factors_that_are_no_positive_number_are_refused(factor):
    """Stock takes a negative one for None, so that it would drop nothing."""
    words = rf"moe_expert_capacity_factor={factor!r}: .*above 0\. Remedy: set a number above 0"
    with pytest.raises(ValueError, match=words):
        check_config(megatron_config(moe_expert_capacity_factor=factor))


def test_options_as_saved_configs_hold_them_are_refused():
    config = megatron_config()
    config.padded_dispatch = {"experts": "packed"}
    words = r"^padded_dispatch must be PaddedOptions, got .*; write PaddedOptions\(\*\*"
    with pytest.raises(ValueError, match=words):
        check_config(config)


NO_EXPERTS = ("attn",), ("moe_router",), ("attn", "moe_router", "moe_preprocess")


def test_graphs_that_would_keep_quantized_weights_are_refused():
    own = tiny.own_recipe("fp8", "tensorwise")
    for graphs in (layer_graphs(), layer_graphs("moe"), layer_graphs("attn", "moe") | LOCAL):
        with pytest.raises(ValueError, match=r"  quant_recipe with experts in .*, without fp8 or"):
            check_config(megatron_config(**own, **graphs))
        for name in ("fp8", "fp4", "disable_parameter_transpose_cache"):
            check_config(megatron_config(**own, **graphs, **{name: True}))
    for graphs in ({}, iteration_graph(), *(layer_graphs(*scopes) for scopes in NO_EXPERTS)):
        check_config(megatron_config(**own, **graphs))


LOCAL = {"cuda_graph_impl": "local"}
OTHER_VALUES = {
    "moe_flex_dispatcher_backend": "hybridep",
    "moe_expert_rank_capacity_factor": 1.5,
    "moe_combine_bwd_dtype": "mxfp8",
    "moe_dispatch_fwd_dtype": "mxfp8",
}


@pytest.mark.parametrize("name", [name for name in REPLACED if name in FIELDS])
def test_what_is_set_for_another_dispatcher_is_logged_once_and_reset(name, caplog):
    default = getattr(megatron_config(), name)
    value = OTHER_VALUES.get(name, 7 if "num" in name else True)
    config = megatron_config(**{name: value})
    line = f"{name}={value!r} is for another dispatcher; here: {REPLACED[name]}"
    assert value != default
    with caplog.at_level("INFO"):
        for made in (config, config, megatron_config(**{name: value})):
            take_over(made)
            assert getattr(made, name) == (value if name in KEPT else default)
    assert caplog.messages == [line]
    check_config(config)


def test_every_setting_of_a_megatron_user_is_translated():
    config = megatron_config(moe_expert_capacity_factor=1.5, moe_token_drop_policy="position")
    sizes = {"capacity_pool": "store", "num_ranks": 3, "etp_size": 2}
    assert dispatch_config(config, **sizes) == DispatchConfig(
        num_experts=6,
        top_k=2,
        capacity_factor=1.5,
        policy="position",
        capacity_pool="store",
        num_ranks=3,
        etp_size=2,
    )


def test_no_factor_drops_nothing():
    config = megatron_config(moe_expert_capacity_factor=None)
    translated = dispatch_config(config, num_ranks=1, etp_size=1)
    assert translated.capacity_factor == NO_DROP
    assert translated.capacity(37) == 37


NVFP4 = get_fp4_align_size("nvfp4")


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({}, 1),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, 16),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, 16),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 32),
        ({"fp4": "e2m1", "fp4_recipe": "nvfp4"}, NVFP4),
        (tiny.own_recipe("fp8", "tensorwise"), 16),
        ({"fp8": "hybrid", "fp8_recipe": "delayed", **tiny.own_recipe("fp4", "nvfp4")}, NVFP4),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8", **tiny.own_recipe("fp8", "blockwise")}, 32),
        ({"quant_recipe": object()}, 1),
    ],
)
def test_alignment_follows_the_recipe(settings, rows):
    config = megatron_config(**settings)
    translated = dispatch_config(config, num_ranks=1, etp_size=1)
    assert translated.alignment == rows


def test_experts_that_take_padded_rows_are_accepted():
    local = megatron_experts.SequentialMLP
    for cls in (megatron_experts.TEGroupedMLP, local, type("OwnExperts", (local,), {})):
        check_experts(cls.__new__(cls))


@pytest.mark.parametrize(
    "cls",
    [
        type("InferenceGroupedMLP", (megatron_experts.TEGroupedMLP,), {}),
        getattr(megatron_experts, "GroupedMLP", type("GroupedMLP", (), {})),  # Gone in 0.17.
        type("UnknownExperts", (), {}),
    ],
)
def test_other_experts_are_refused_by_name(cls):
    with pytest.raises(
        ValueError, match=rf"^experts must be .*, got '{cls.__name__}'; set moe_grouped"
    ):
        check_experts(cls.__new__(cls))
