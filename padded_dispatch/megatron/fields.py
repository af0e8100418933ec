"""The meaning of every `moe_*` field of Megatron's TransformerConfig on the padded path.

These rows alone decide which settings are refused: `padded_dispatch.megatron.config` checks configs
with them, FIELDS.md shows them, and a test compares them with the installed Megatron. Each row
follows from reading the uses of its field in Megatron-Core 0.16.1, 0.17.1, 0.18.0 and 0.19.0.

`used`: our code reads the field, or its effect is the same here as in stock Megatron.
`harmless`: the field acts where we change nothing, or nowhere.
`refused`: the field would be ignored, or give wrong or untested results; all values except the
default are refused.
A used or harmless field may have single values that are refused; `refuses` tests for them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["used", "harmless", "refused"]

VERSIONS = ("0.16", "0.17", "0.18", "0.19")


def given(value: Any) -> bool:
    """Return whether a field is set."""
    return value is not None


@dataclass(frozen=True, kw_only=True)
class ConfigField:
    """One field of TransformerConfig.

    `note`: its effect on the padded path, or the reason for refusing it.
    `versions`: the minor versions of Megatron-Core that have it.
    `refuses`: returns true for a value that is refused.
    `remedy`: the change that a user with such a value should make.
    """

    name: str
    status: Status
    note: str
    versions: tuple[str, ...] = VERSIONS
    refuses: Callable[[Any], bool] = lambda value: False
    remedy: str = ""


_SINCE_17, _SINCE_18, _SINCE_19, _ONLY_16 = VERSIONS[1:], VERSIONS[2:], VERSIONS[3:], VERSIONS[:1]


def _used(name: str, note: str, versions: tuple[str, ...] = VERSIONS) -> ConfigField:
    return ConfigField(name=name, status="used", note=note, versions=versions)


def _harmless(name: str, note: str, versions: tuple[str, ...] = VERSIONS) -> ConfigField:
    return ConfigField(name=name, status="harmless", note=note, versions=versions)


def _refused(
    name: str,
    note: str,
    remedy: str,
    versions: tuple[str, ...] = VERSIONS,
    refuses: Callable[[Any], bool] = bool,
) -> ConfigField:
    return ConfigField(
        name=name, status="refused", note=note, versions=versions, refuses=refuses, remedy=remedy
    )


_FLEX = "read by the flex dispatcher only"
_STASH = "read with moe_paged_stash only, which is refused"

MOE_FIELDS: tuple[ConfigField, ...] = (
    _used("moe_apply_probs_on_input", "in the experts; bias in padded rows is never read back"),
    _used("moe_aux_loss_coeff", "in the router, on the map before dropping"),
    _harmless("moe_deepep_num_sms", _FLEX),
    _refused(
        "moe_enable_deepep",
        "DeepEP is a back end of the flex dispatcher",
        "leave it False",
    ),
    _used("moe_enable_routing_replay", "in the router; selection cuts the replayed map"),
    ConfigField(
        name="moe_expert_capacity_factor",
        status="used",
        note="sets the capacity; None drops nothing (C = T); a factor must be finite and above 0",
        refuses=lambda factor: factor is not None and (factor == 0 or not math.isfinite(factor)),
        remedy="set a number above 0, such as 1.25, or None",
    ),
    _refused(
        "moe_expert_rank_capacity_factor",
        "sets a capacity per rank, for HybridEP and NCCL EP; ours is per (source rank, expert)",
        "set moe_expert_capacity_factor instead",
        _SINCE_18,
        given,
    ),
    _harmless("moe_extended_tp", "read nowhere; deprecated", _ONLY_16),
    _used("moe_ffn_hidden_size", "width of the routed experts"),
    _harmless("moe_flex_dispatcher_backend", _FLEX),
    _harmless("moe_flex_dispatcher_num_sms", _FLEX, _SINCE_19),
    _harmless("moe_grad_scale_func", "scales the auxiliary losses, in the schedules", _SINCE_19),
    _used("moe_grouped_gemm", "chooses the experts: TEGroupedMLP or SequentialMLP"),
    _harmless("moe_hybridep_num_blocks_permute", _FLEX, _SINCE_17),
    _harmless("moe_hybridep_num_blocks_unpermute", _FLEX, _SINCE_17),
    _harmless("moe_hybridep_num_sms", _FLEX),
    _harmless("moe_hybridep_num_sms_preprocessing", _FLEX, _SINCE_18),
    _harmless("moe_hybridep_pad_uneven_dispatch_inputs", _FLEX, _SINCE_19),
    _used("moe_input_jitter_eps", "in the router, on its input"),
    _used("moe_latent_size", "the layer projects before dispatch; D is the latent size"),
    _harmless("moe_layer_freq", "read by the layer specs: which layers are MoE"),
    _used("moe_layer_recompute", "deprecated; becomes recompute_modules=['moe']"),
    _harmless("moe_mlp_glu_interleave_size", "order of columns inside TEGroupedMLP", _SINCE_18),
    _harmless("moe_ncclep_static_shape", _FLEX, _SINCE_19),
    _harmless("moe_ncclep_zero_copy", _FLEX, _SINCE_19),
    _harmless("moe_pad_expert_input_to_capacity", "no effect: the padded path always pads"),
    _refused(
        "moe_pad_experts_for_cuda_graph_inference",
        "changes the capacity of a built layer for decoding; ours is fixed at construction",
        "leave it False; shapes are static in decoding, too",
        _SINCE_17,
    ),
    _refused(
        "moe_paged_stash",
        "stashes the rows of the flex dispatcher's back ends",
        "leave it False",
        _SINCE_18,
    ),
    _harmless("moe_paged_stash_buffer_size_factor_cpu", _STASH, _SINCE_18),
    _harmless("moe_paged_stash_buffer_size_factor_cuda", _STASH, _SINCE_18),
    _harmless("moe_paged_stash_page_size", _STASH, _SINCE_18),
    _harmless("moe_per_layer_logging", "read by the training script, for its log of the losses"),
    _harmless("moe_permute_fusion", "the padded path has no permutation to fuse"),
    _harmless("moe_permute_fusion_into_hybridep", _FLEX, _SINCE_17),
    _used("moe_router_bias_update_rate", "rate at which the expert bias follows the true counts"),
    _used("moe_router_dtype", "dtype of the router's arithmetic and of its probabilities"),
    _used("moe_router_enable_expert_bias", "the bias follows the counts before dropping"),
    _used("moe_router_force_biased", "in the router, on the logits", _SINCE_17),
    _used("moe_router_force_load_balancing", "in the router, on the logits"),
    _used("moe_router_fusion", "in the router; selection cuts its map and probabilities"),
    _used("moe_router_group_topk", "in the router, before selection"),
    _used("moe_router_load_balancing_type", "in the router, before selection"),
    _used("moe_router_num_groups", "in the router, before selection"),
    _refused(
        "moe_router_padding_for_fp8",
        "old name of moe_router_padding_for_quantization",
        "leave it False; PaddedOptions(alignment=...) aligns the experts' rows",
    ),
    _refused(
        "moe_router_padding_for_quantization",
        "aligns counts by adding tokens to the map; stock drop-and-pad then loses real tokens",
        "leave it False; PaddedOptions(alignment=...) aligns the experts' rows",
    ),
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
    _harmless("moe_single_grouped_bias", "how TEGroupedMLP stores its biases", _SINCE_18),
    _refused(
        "moe_single_grouped_weight",
        "needs fp8 (0.18) or the op fuser (0.19), which are refused",
        "leave it False",
        _SINCE_18,
    ),
    _used("moe_token_dispatcher_type", "'padded_alltoall' selects the padded dispatcher"),
    _used(
        "moe_token_drop_policy", "which rows keep a slot, unless PaddedOptions(policy=...) is set"
    ),
    _harmless("moe_token_dropping", "read nowhere"),
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
    _refused("cpu_offloading", "untested with the plan among the saved tensors", "unset it"),
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
    _refused("fp4", "untested", "train in bf16", refuses=given),
    _used("fp8", "TEGroupedMLP quantizes padded, aligned rows; not with CUDA graphs"),
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
        note="expert_fc1 and fused_group_mlp force the experts' input to be freed; untested",
        refuses=lambda modules: not {"expert_fc1", "fused_group_mlp"}.isdisjoint(modules or ()),
        remedy="remove these two",
    ),
    _used(
        "overlap_dispatch_backward_with_experts_wgrad",
        "weight gradients of experts are computed while gradients of rows travel",
        _SINCE_18,
    ),
    _used(
        "overlap_moe_expert_parallel_comm",
        "rows of a microbatch travel while another computes, by the all-to-all",
    ),
    _refused("quant_recipe", "quantizes experts; untested", "unset it", refuses=given),
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
    _refused(
        "use_transformer_engine_op_fuser",
        "its experts take packed rows and counts on the device; untested",
        "unset it",
        _SINCE_18,
    ),
    _refused(
        "variable_seq_lengths",
        "changes T, and so every shape, from step to step",
        "leave it False and pad sequences to one length",
    ),
)


def markdown_table(rows: tuple[ConfigField, ...]) -> str:
    """Return the rows as a Markdown table: field, versions that have it, status and note."""
    head = ["field", *VERSIONS, "status", "on the padded path"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        ticks = ["x" if version in row.versions else "" for version in VERSIONS]
        note = f"{row.note}: {row.remedy}" if row.remedy else row.note
        lines.append([f"`{row.name}`", *ticks, row.status, note])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
