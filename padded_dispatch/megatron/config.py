"""Translate Megatron's config into ours, and refuse what cannot work before training starts.

`REFUSED`: fields of TransformerConfig with values that would be ignored, or give wrong or untested
results. `REPLACED`: fields that recipes set for another dispatcher. They are accepted, logged once
with what replaces them, and reset to their defaults, except those in `KEPT`.

Each row is based on all uses of its field in Megatron-Core 0.16.1 to 0.20; a version may lack the
field. Fields without a row act as in stock Megatron, or have no effect on padded layers.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.fp4_utils import get_fp4_align_size
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.transformer.transformer_config import TransformerConfig

from padded_dispatch.config import (
    NO_DROP,
    CapacityPool,
    DispatchConfig,
    is_positive,
    require,
)
from padded_dispatch.megatron.compat import captures, captures_iteration
from padded_dispatch.megatron.options import PaddedOptions, require_options
from padded_dispatch.utils.logs import log_once

# The value of `moe_token_dispatcher_type` for this dispatcher.
NAME = "padded_alltoall"

_FIELDS = TransformerConfig.__dataclass_fields__
MOE_FIELDS = tuple(name for name in _FIELDS if name.startswith("moe_"))

# Fields of `DispatchConfig`, and the fields of Megatron's config that set them.
_NAMES = {
    "num_experts": "num_moe_experts",
    "top_k": "moe_router_topk",
    "capacity_factor": "moe_expert_capacity_factor",
    "policy": "moe_token_drop_policy",
    "num_ranks": "expert_model_parallel_size",
    "etp_size": "expert_tensor_parallel_size",
}
_MEGATRONS = re.compile(rf"\b({'|'.join(_NAMES)})\b")


@dataclass(frozen=True)
class Refused:
    """A field of Megatron's config, with the values that are refused.

    `note`: the reason.
    `remedy`: the change that a user with such a value should make.
    `refuses`: returns true for a value that is refused.
    """

    name: str
    note: str
    remedy: str
    refuses: Callable[[Any], bool] = bool


_ONE_LENGTH = "leave it False and pad sequences to one length"
_NO_GAIN = "within a host it gained nothing: packed experts and exchange are on one stream"

REFUSED = (
    Refused(
        "moe_expert_capacity_factor",
        "sets the capacity; None drops nothing (C = T); a factor must be finite and above 0",
        "set a number above 0, such as 1.25, or None",
        lambda factor: factor is not None and not (is_positive(factor) and factor < math.inf),
    ),
    Refused(
        "moe_use_legacy_grouped_gemm",  # 0.16 only.
        "GroupedMLP needs the grouped_gemm package and is gone in 0.17; untested",
        "leave it False, which gives TEGroupedMLP",
    ),
    Refused(
        "batch_invariant_mode",
        "which tokens are dropped depends on the rest of the batch",
        "leave it False",
    ),
    Refused(
        "hybrid_context_parallel", "gives every microbatch another number of tokens", _ONE_LENGTH
    ),
    Refused("overlap_moe_expert_parallel_comm", _NO_GAIN, "leave it False"),
    Refused("delay_wgrad_compute", _NO_GAIN, "leave it False"),
    Refused("overlap_dispatch_backward_with_experts_wgrad", _NO_GAIN, "leave it False"),
    Refused(
        "offload_modules",
        "fused_group_mlp belongs to the op fuser's experts, which are not used here",
        "leave it out, or offload expert_fc1 and moe_act, which takes Megatron's experts in cells",
        lambda modules: "fused_group_mlp" in (modules or ()),
    ),
    Refused(
        "transformer_impl",
        "local and transformer_engine work; inference_optimized replaces the dispatcher",
        "set transformer_engine",
        lambda impl: impl == "inference_optimized",
    ),
    Refused(
        "variable_seq_lengths", "changes T, and so every shape, from step to step", _ONE_LENGTH
    ),
)

_FLEX = "rows travel by direct writes or the all-to-all, see PaddedOptions(exchange=...)"
_SMS = "direct writes and the all-to-all choose their SMs themselves"
_BF16 = "rows travel in the dtype of the hidden states"
_SEPARATE = "TEGroupedMLP has one parameter per expert; packed experts have one for all"
_ALIGNED = "C is rounded up to what the fp8 or fp4 recipe needs, and no token is lost"

REPLACED = {
    "moe_combine_bwd_dtype": _BF16,
    "moe_deepep_num_sms": _SMS,
    "moe_dispatch_fwd_dtype": _BF16,
    "moe_enable_deepep": _FLEX,
    "moe_expert_rank_capacity_factor": "moe_expert_capacity_factor sets the capacity; "
    "packed experts, and their layers, share it",
    "moe_flex_dispatcher_backend": _FLEX,
    "moe_flex_dispatcher_num_sms": _SMS,
    "moe_hybridep_num_blocks_permute": _SMS,
    "moe_hybridep_num_blocks_unpermute": _SMS,
    "moe_hybridep_num_sms": _SMS,
    "moe_hybridep_num_sms_preprocessing": _SMS,
    "moe_hybridep_pad_uneven_dispatch_inputs": "all ranks must have the same number of tokens; "
    "else each raises the same error",
    "moe_ncclep_static_shape": "shapes are always static",
    "moe_ncclep_zero_copy": _FLEX,
    "moe_pad_experts_for_cuda_graph_inference": "a captured pass of text generation drops "
    "nothing, unless PaddedOptions(eval_factor=...) is a number",
    "moe_paged_stash": "buffers have the size of the capacity factor, and packed experts keep real "
    "rows only",
    "moe_permute_fusion_into_hybridep": "direct writes put rows in place",
    "moe_router_padding_for_fp8": _ALIGNED,
    "moe_router_padding_for_quantization": _ALIGNED,
    "moe_single_grouped_bias": _SEPARATE,
    "moe_single_grouped_weight": _SEPARATE,
    "moe_use_grouped_tensor": "rows per expert never change, so TEGroupedMLP needs no counts on "
    "the device",
    "use_transformer_engine_op_fuser": "it fuses dense layers; MoE layers keep TEGroupedMLP "
    "without it, or packed experts",
}
# Megatron's text generation reads the first field, and dense layers the second.
KEPT = ("moe_pad_experts_for_cuda_graph_inference", "use_transformer_engine_op_fuser")


def check_config(config: TransformerConfig) -> None:
    """Raise one error for everything in `config` that the padded path does not support.

    Options and sizes are checked as well, as far as they follow from the config alone.

    Raises:
        ValueError: one line per refused setting, with field, value, reason and remedy; see also
            `dispatch_config` and `padded_options`.
    """
    refused = refusals(config, REFUSED)
    options = padded_options(config)
    refused += _refused_graphs(config)
    if refused:
        raise ValueError("\n".join(["the padded dispatcher does not support", *refused]))
    if _read(config, "num_moe_experts"):
        _check_layers(config, options)
        dispatch_config(
            config,
            num_ranks=_read(config, "expert_model_parallel_size") or 1,
            etp_size=_read(config, "expert_tensor_parallel_size") or 1,
        )


def _refused_graphs(config: TransformerConfig) -> list[str]:
    """Return one line per setting that the config's CUDA graphs of layers do not support."""
    if not _read(config, "quant_recipe") or captures_iteration(config):
        return []
    if not captures(config, "moe"):
        return []
    if any(_read(config, name) for name in ("fp8", "fp4", "disable_parameter_transpose_cache")):
        return []  # Megatron then captures the quantization of weights.
    return [
        f"  quant_recipe with experts in a CUDA graph (cuda_graph_impl={config.cuda_graph_impl!r}),"
        " without fp8 or fp4: Megatron then captures no quantization of weights, so replays would "
        "go on with those of the capture. Remedy: set fp8 or fp4, or "
        "disable_parameter_transpose_cache=True."
    ]


def take_over(config: TransformerConfig) -> None:
    """Reset fields that a recipe sets for another dispatcher; log once what replaces each.

    Call it before Megatron's own checks, which require the other dispatcher for such fields, and
    again after them, since they set one such field from another.
    """
    for name, note in REPLACED.items():
        if name not in _FIELDS or _read(config, name) in (None, _FIELDS[name].default):
            continue
        log_once(f"{name}={_read(config, name)!r} is for another dispatcher; here: {note}")
        if name not in KEPT:
            setattr(config, name, _FIELDS[name].default)


def last_layer(config: TransformerConfig) -> int:
    """Return the number of the model's last layer, layers of multi-token prediction included."""
    later = _read(config, "mtp_num_layers") or 0
    if _read(config, "mtp_use_repeated_layer"):  # One layer, run several times.
        later = min(later, 1)
    return config.num_layers + later


def _check_layers(config: TransformerConfig, options: PaddedOptions) -> None:
    """Raise if `layer_factors` names layers that the model does not have, or dense ones.

    The config of a hybrid stack does not show how many layers predict each further token, so there
    no number is too large.
    """
    hybrid = _read(config, "is_hybrid_model") and _read(config, "mtp_num_layers")
    last, factors = last_layer(config), options.layer_factors
    upwards = "on" if hybrid else f"to {last}"
    wrong = [n for n in factors if (n > last and not hybrid) or _is_dense(config, n)]
    require(
        not wrong,
        "layer_factors",
        factors,
        f"name layers with experts, from 1 {upwards}, as moe_layer_freq={config.moe_layer_freq} "
        "has them",
        f"leave out {', '.join(f'layer {number}' for number in wrong)}",
    )


def _is_dense(config: TransformerConfig, number: int) -> bool:
    """Return whether `moe_layer_freq` makes layer `number`, from 1, a layer without experts."""
    pattern = _read(config, "moe_layer_freq") or 1
    number = min(number, config.num_layers)  # Multi-token prediction is like the last layer.
    if isinstance(pattern, int):
        return (number - 1) % pattern != 0
    return len(pattern) == config.num_layers and not pattern[number - 1]


def refusals(config: TransformerConfig, rows: tuple[Refused, ...]) -> list[str]:
    """Return one line per setting that the rows refuse: field, value, reason, remedy."""
    lines = []
    for row in rows:
        value = _read(config, row.name)
        if row.refuses(value):
            lines.append(f"  {row.name}={value!r}: {row.note}. Remedy: {row.remedy}.")
    return lines


def padded_options(config: object) -> PaddedOptions:
    """Return the options of a config, or the defaults if it has none.

    Raises:
        ValueError: `config.padded_dispatch` is no `PaddedOptions`.
    """
    options = getattr(config, "padded_dispatch", PaddedOptions())
    require_options("padded_dispatch", options)
    return options


def is_ours(config: object) -> bool:
    """Return whether a model of this config has padded layers, by `NAME` or by `padded_spec`."""
    word = getattr(config, "moe_token_dispatcher_type", None)
    return word == NAME or hasattr(config, "has_padded_layers")


def check_experts(experts: object) -> None:
    """Raise if a class of experts cannot take padded rows with row counts on the host.

    TEGroupedMLP, SequentialMLP and their subclasses can.

    Raises:
        ValueError: names the class and the remedy.
    """
    names = {cls.__name__ for cls in type(experts).__mro__}
    takes_rows = not names.isdisjoint(("TEGroupedMLP", "SequentialMLP"))
    require(
        takes_rows and "InferenceGroupedMLP" not in names,
        "experts",
        type(experts).__name__,
        "be TEGroupedMLP or SequentialMLP, which take padded rows",
        "set moe_grouped_gemm=True with Transformer Engine, or moe_grouped_gemm=False",
    )


def dispatch_config(
    config: Any,
    *,
    num_ranks: int,
    etp_size: int,
    capacity_pool: CapacityPool = "cells",
) -> DispatchConfig:
    """Return the settings that decide our shapes, read from Megatron's config.

    Args:
        config: a TransformerConfig that `check_config` has passed.
        num_ranks: ranks in the expert-parallel group (R).
        etp_size: ranks that split every expert.
        capacity_pool: see `chosen_experts`, which replaces "auto" of the options.

    Raises:
        ValueError: see `DispatchConfig`; it names Megatron's fields.
    """
    factor = config.moe_expert_capacity_factor
    factor = NO_DROP if factor is None else factor
    try:
        return DispatchConfig(
            num_experts=config.num_moe_experts,
            top_k=config.moe_router_topk,
            capacity_factor=factor,
            alignment=_alignment(config),
            capacity_pool=capacity_pool,
            policy=config.moe_token_drop_policy,
            num_ranks=num_ranks,
            etp_size=etp_size,
        )
    except ValueError as error:
        raise ValueError(_MEGATRONS.sub(lambda name: _NAMES[name[0]], str(error))) from None


def _alignment(config: TransformerConfig) -> int:
    """Return the largest alignment in rows that one of the config's fp8 and fp4 recipes needs.

    In Megatron-Core 0.16.1 to 0.20 it is 32 for the fp8 recipe mxfp8, 16 for the other fp8 recipes,
    and for fp4 it depends on the recipe. Megatron's own alignment leaves out the recipes of single
    modules in `quant_recipe`.
    """
    configs = getattr(_read(config, "quant_recipe"), "configs", None) or {}  # By module.
    kinds = "training_recipe", "evaluation_recipe"
    of_modules = [each.get(kind) or {} for each in configs.values() for kind in kinds]
    sizes = [1]
    for name, alignment in (("fp8", get_fp8_align_size), ("fp4", get_fp4_align_size)):
        recipes = [recipe.get(f"{name}_quantization_recipe") for recipe in of_modules]
        recipes += [getattr(config, f"{name}_recipe")] if getattr(config, name) else []
        sizes += [alignment(recipe) for recipe in recipes if recipe]
    return max(sizes)


def _read(config: TransformerConfig, name: str) -> Any:
    """Return the field's value; None, which no row refuses, if this version lacks the field."""
    return getattr(config, name, None)
