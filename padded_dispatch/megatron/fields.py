"""Fields of Megatron's TransformerConfig that the padded path refuses, or that it replaces.

Each row is based on all uses of its field in Megatron-Core 0.16.1 to 0.20; a version may lack the
field. Fields without a row act as in stock Megatron, or have no effect on padded layers.

`REFUSED`: the value would be ignored, or give wrong or untested results.
`REPLACED`: recipes set the field for another dispatcher. It is accepted, logged once with what
replaces it, and reset to its default.
`KEPT`: fields of `REPLACED` that are not reset.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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

REFUSED = (
    Refused(
        "moe_expert_capacity_factor",
        "sets the capacity; None drops nothing (C = T); a factor must be finite and above 0",
        "set a number above 0, such as 1.25, or None",
        lambda factor: factor is True or not (factor is None or 0 < abs(factor) < math.inf),
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
    Refused(
        "offload_modules",
        "fused_group_mlp belongs to the op fuser's experts, which are not used here",
        "offload expert_fc1 and moe_act instead",
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

_FLEX = "rows travel by direct stores or the all-to-all, see PaddedOptions(exchange=...)"
_SMS = "direct stores and the all-to-all choose their SMs themselves"
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
    "moe_permute_fusion_into_hybridep": "direct stores put rows in place",
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
