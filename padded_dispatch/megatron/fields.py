"""The meaning of every `moe_*` field of Megatron's TransformerConfig on the padded path.

These rows alone decide which settings are refused: `padded_dispatch.megatron.config` checks configs
with them, FIELDS.md shows them, and a test compares them with the installed Megatron. Each row
follows from reading the uses of its field in Megatron-Core 0.16.1, 0.17.1, 0.18.0, 0.19.0 and the
development version of 0.20 of November 2026.

`used`: our code reads the field, or its effect is the same here as in stock Megatron.
`harmless`: the field acts where we change nothing, or nowhere.
`replaced`: recipes set the field for another dispatcher; it is accepted, the log says once what
stands in its place, and where Megatron would act on the value, the field goes back to its default.
`refused`: the field would be ignored, or give wrong or untested results; all values except the
default are refused.
A used or harmless field may have single values that are refused; `refuses` tests for them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["used", "harmless", "replaced", "refused"]

VERSIONS = ("0.16", "0.17", "0.18", "0.19", "0.20")


def given(value: Any) -> bool:
    """Return whether a field is set."""
    return value is not None


@dataclass(frozen=True, kw_only=True)
class ConfigField:
    """One field of TransformerConfig.

    `note`: its effect on the padded path, what stands in its place, or the reason for refusing it.
    `versions`: the minor versions of Megatron-Core that have it.
    `refuses`: returns true for a value that is refused.
    `remedy`: the change that a user with such a value should make.
    `resets`: the field of a config goes back to its default.
    """

    name: str
    status: Status
    note: str
    versions: tuple[str, ...] = VERSIONS
    refuses: Callable[[Any], bool] = lambda value: False
    remedy: str = ""
    resets: bool = False


_SINCE_17, _SINCE_18, _SINCE_19, _ONLY_16 = VERSIONS[1:], VERSIONS[2:], VERSIONS[3:], VERSIONS[:1]
_ONLY_19, _SINCE_20 = VERSIONS[3:4], VERSIONS[4:]


def _used(name: str, note: str, versions: tuple[str, ...] = VERSIONS) -> ConfigField:
    return ConfigField(name=name, status="used", note=note, versions=versions)


def _harmless(name: str, note: str, versions: tuple[str, ...] = VERSIONS) -> ConfigField:
    return ConfigField(name=name, status="harmless", note=note, versions=versions)


def _replaced(
    name: str, note: str, versions: tuple[str, ...] = VERSIONS, *, resets: bool = True
) -> ConfigField:
    return ConfigField(name=name, status="replaced", note=note, versions=versions, resets=resets)


def _refused(
    name: str, note: str, remedy: str, versions: tuple[str, ...] = VERSIONS
) -> ConfigField:
    return ConfigField(
        name=name, status="refused", note=note, versions=versions, refuses=bool, remedy=remedy
    )


_FLEX = "rows travel by direct stores or the all-to-all, see PaddedOptions(exchange=...)"
_SMS = "direct stores and the all-to-all choose their SMs themselves"
_BF16 = "rows travel in the dtype of the hidden states"
_STASH = "read with moe_paged_stash only"
_SEPARATE = "TEGroupedMLP has one parameter per expert; packed experts have one for all"
_ALIGNED = "the padded dispatcher rounds C up to what the recipe needs and loses no token"

MOE_FIELDS: tuple[ConfigField, ...] = (
    _used("moe_apply_probs_on_input", "in the experts; bias in padded rows is never read back"),
    _used("moe_aux_loss_coeff", "in the router, on the map before dropping"),
    _replaced("moe_combine_bwd_dtype", _BF16, _SINCE_20),
    _replaced("moe_deepep_num_sms", _SMS),
    _replaced("moe_dispatch_fwd_dtype", _BF16, _SINCE_20),
    _replaced("moe_enable_deepep", _FLEX),
    _used("moe_enable_routing_replay", "in the router; selection cuts the replayed map"),
    ConfigField(
        name="moe_expert_capacity_factor",
        status="used",
        note="sets the capacity; None drops nothing (C = T); a factor must be finite and above 0",
        refuses=lambda factor: factor is not None and (factor == 0 or not math.isfinite(factor)),
        remedy="set a number above 0, such as 1.25, or None",
    ),
    _replaced(
        "moe_expert_rank_capacity_factor",
        "moe_expert_capacity_factor sets the capacity; the same number there with "
        "PaddedOptions(capacity_pool='rank') gives a rank as many rows",
        _SINCE_18,
    ),
    _harmless("moe_extended_tp", "read nowhere; deprecated", _ONLY_16),
    _used("moe_ffn_hidden_size", "width of the routed experts"),
    _replaced("moe_flex_dispatcher_backend", _FLEX),
    _replaced("moe_flex_dispatcher_num_sms", _SMS, _SINCE_19),
    _harmless("moe_grad_scale_func", "scales the auxiliary losses, in the schedules", _SINCE_19),
    _used("moe_grouped_gemm", "chooses the experts: TEGroupedMLP or SequentialMLP"),
    _replaced("moe_hybridep_num_blocks_permute", _SMS, _SINCE_17),
    _replaced("moe_hybridep_num_blocks_unpermute", _SMS, _SINCE_17),
    _replaced("moe_hybridep_num_sms", _SMS),
    _replaced("moe_hybridep_num_sms_preprocessing", _SMS, _SINCE_18),
    _replaced(
        "moe_hybridep_pad_uneven_dispatch_inputs",
        "all ranks must have the same number of tokens; else each raises the same error",
        _SINCE_19,
    ),
    _used("moe_input_jitter_eps", "in the router, on its input"),
    _used("moe_latent_size", "the layer projects before dispatch; D is the latent size"),
    _harmless("moe_layer_freq", "read by the layer specs: which layers are MoE"),
    _used("moe_layer_recompute", "deprecated; becomes recompute_modules=['moe']"),
    _harmless("moe_mlp_glu_interleave_size", "order of columns inside TEGroupedMLP", _SINCE_18),
    _replaced("moe_ncclep_static_shape", "shapes are always static", _ONLY_19),
    _replaced("moe_ncclep_zero_copy", _FLEX, _SINCE_19),
    _harmless("moe_pad_expert_input_to_capacity", "no effect: the padded path always pads"),
    _replaced(
        "moe_pad_experts_for_cuda_graph_inference",
        "a captured pass of text generation has C = T and drops nothing, unless "
        "PaddedOptions(eval_factor=...) is a number",
        _SINCE_17,
        resets=False,  # Megatron's text generation asks for it.
    ),
    _replaced(
        "moe_paged_stash",
        "buffers have the size of the capacity factor, and packed experts keep real rows only",
        _SINCE_18,
    ),
    _harmless("moe_paged_stash_buffer_size_factor_cpu", _STASH, _SINCE_18),
    _harmless("moe_paged_stash_buffer_size_factor_cuda", _STASH, _SINCE_18),
    _harmless("moe_paged_stash_page_size", _STASH, _SINCE_18),
    _harmless("moe_per_layer_logging", "read by the training script, for its log of the losses"),
    _harmless("moe_permute_fusion", "the padded path has no permutation to fuse"),
    _replaced("moe_permute_fusion_into_hybridep", "direct stores put rows in place", _SINCE_17),
    _used("moe_router_bias_update_rate", "rate at which the expert bias follows the true counts"),
    _used("moe_router_dtype", "dtype of the router's arithmetic and of its probabilities"),
    _used("moe_router_enable_expert_bias", "the bias follows the counts before dropping"),
    _used("moe_router_force_biased", "in the router, on the logits", _SINCE_17),
    _used("moe_router_force_load_balancing", "in the router, on the logits"),
    _used("moe_router_fusion", "in the router; selection cuts its map and probabilities"),
    _used("moe_router_group_topk", "in the router, before selection"),
    _used("moe_router_load_balancing_type", "in the router, before selection"),
    _used("moe_router_num_groups", "in the router, before selection"),
    _replaced("moe_router_padding_for_fp8", _ALIGNED),
    _replaced("moe_router_padding_for_quantization", _ALIGNED),
    _used("moe_router_pre_softmax", "in the router, before selection"),
    _harmless(
        "moe_router_quantile_balancing_ema",
        "read by finalize_model_grads; the quantiles come from the logits",
        _SINCE_19,
    ),
    _used("moe_router_score_function", "in the router, before selection"),
    _used("moe_router_topk", "K, the experts per token"),
    _used("moe_router_topk_limited_devices", "deprecated; becomes moe_router_group_topk"),
    _used("moe_router_topk_scaling_factor", "in the router, before selection"),
    _used("moe_shared_expert_gate", "in the shared experts"),
    _harmless(
        "moe_shared_expert_glu_interleave_size", "order of columns in the shared experts", _SINCE_19
    ),
    _used("moe_shared_expert_intermediate_size", "width of the shared experts"),
    _used("moe_shared_expert_overlap", "shared experts run during our all-to-all"),
    _replaced("moe_single_grouped_bias", _SEPARATE, _SINCE_18),
    _replaced("moe_single_grouped_weight", _SEPARATE, _SINCE_18),
    _used("moe_token_dispatcher_type", "'padded_alltoall' selects the padded dispatcher"),
    _used("moe_token_drop_policy", "which rows keep a slot"),
    _harmless("moe_token_dropping", "read nowhere"),
    _replaced(
        "moe_use_grouped_tensor",
        "rows per expert never change, so TEGroupedMLP needs no counts on the device",
        _SINCE_20,
    ),
    _refused(
        "moe_use_legacy_grouped_gemm",
        "GroupedMLP needs the grouped_gemm package and is gone in 0.17; untested",
        "leave it False, which gives TEGroupedMLP",
        _ONLY_16,
    ),
    _used("moe_z_loss_coeff", "in the router, on the logits"),
)

OTHER_FIELDS: tuple[ConfigField, ...] = (
    _used("add_bias_linear", "in the experts; bias in padded rows is never read back"),
    _refused(
        "batch_invariant_mode",
        "which tokens are dropped depends on the rest of the batch",
        "leave it False",
    ),
    _harmless("cpu_offloading", "backward reads saved tensors only, the plan's among them"),
    _used("cuda_graph_impl", "nothing on the padded path reads a value on the host"),
    _used(
        "cuda_graph_modules",
        "scope `moe` needs no factor and no pad flag after install()",
        _SINCE_18,
    ),
    _used("cuda_graph_scope", "scope `moe` needs no factor and no pad flag after install()"),
    _used("delay_wgrad_compute", "experts compute weight gradients after those of their rows"),
    _used("expert_model_parallel_size", "R, the ranks of the exchange"),
    _used("expert_tensor_parallel_size", "ranks that split every expert; they share its sources"),
    _harmless(
        "fine_grained_activation_offloading", "in attention, norms and experts; see offload_modules"
    ),
    _used("fp4", "as fp8; runs on Blackwell only, and has not run with padded rows yet"),
    _used(
        "fp8",
        "TEGroupedMLP quantizes padded, aligned rows, in CUDA graphs, too; the recipe mxfp8 runs "
        "on Blackwell only, and has not run with padded rows yet",
    ),
    _refused(
        "hybrid_context_parallel",
        "gives every microbatch another number of tokens",
        "leave it False and pad sequences to one length",
    ),
    _used(
        "mlp_chunks_for_training",
        "every chunk is a call with its own T, and C for that T",
        _SINCE_18,
    ),
    _used("num_moe_experts", "E"),
    ConfigField(
        name="offload_modules",
        status="harmless",
        note="fused_group_mlp belongs to the op fuser's experts, which are not used here",
        refuses=lambda modules: "fused_group_mlp" in (modules or ()),
        remedy="offload expert_fc1 and moe_act instead",
    ),
    _used(
        "overlap_dispatch_backward_with_experts_wgrad",
        "weight gradients of experts are computed while gradients of rows travel",
        _SINCE_18,
    ),
    _used(
        "overlap_moe_expert_parallel_comm",
        "rows of a microbatch travel while another computes",
    ),
    _used(
        "quant_recipe",
        "TEGroupedMLP follows it; rows are aligned for all of its recipes; in CUDA graphs of "
        "layers with experts beside fp8 or fp4 only, or with disable_parameter_transpose_cache",
    ),
    _used("recompute_granularity", "recompute plans again, and counts once"),
    _used("recompute_modules", "recompute plans again, and counts once"),
    _used("sequence_parallel", "T is this rank's share of the tokens"),
    ConfigField(
        name="transformer_impl",
        status="used",
        note="local and transformer_engine work; inference_optimized replaces the dispatcher",
        refuses=lambda impl: impl == "inference_optimized",
        remedy="set transformer_engine",
    ),
    _replaced(
        "use_transformer_engine_op_fuser",
        "it fuses dense layers; MoE layers keep TEGroupedMLP without it, or packed experts",
        _SINCE_18,
        resets=False,
    ),
    _refused(
        "variable_seq_lengths",
        "changes T, and so every shape, from step to step",
        "leave it False and pad sequences to one length",
    ),
)
