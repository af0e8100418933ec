"""From Megatron's config to ours, and what we refuse before training starts.

The rows of `padded_dispatch.megatron.fields` decide; this file only asks them.
"""

from typing import Any

from padded_dispatch.config import DispatchConfig
from padded_dispatch.megatron.fields import MOE_FIELDS, OTHER_FIELDS, ConfigField
from padded_dispatch.megatron.options import PaddedOptions

_EXPERTS = ("TEGroupedMLP", "SequentialMLP")

# Checked first: InferenceGroupedMLP is a subclass of TEGroupedMLP.
_REFUSED_EXPERTS = {
    "GroupedMLP": "it needs the grouped_gemm package and is gone in Megatron-Core 0.17",
    "InferenceGroupedMLP": "it takes a routing map from an inference dispatcher",
}


def check_config(config: Any) -> None:
    """Refuse what the padded path does not support, all of it at once.

    Args:
        config: a TransformerConfig of any supported version.

    Raises:
        ValueError: one line per refused setting: field, value, reason, remedy.
    """
    refuse(config, (*MOE_FIELDS, *OTHER_FIELDS), "the padded dispatcher does not support")


def refuse(config: Any, rows: tuple[ConfigField, ...], complaint: str) -> None:
    """Check a config against rows of fields.

    Raises:
        ValueError: the complaint, then one line per refused setting.
    """
    refused = [
        f"  {row.name}={value!r}: {row.note}. Remedy: {row.remedy}."
        for row in rows
        if row.refuses(value := _read(config, row.name))
    ]
    if refused:
        raise ValueError("\n".join([complaint, *refused]))


def padded_options(config: Any) -> PaddedOptions:
    """The options of a config; the defaults where nobody set any."""
    return getattr(config, "padded_dispatch", PaddedOptions())


def check_experts(experts: Any) -> None:
    """Refuse experts modules that were not written for rows padded on the host's count.

    Args:
        experts: the module that a MoE layer built. TEGroupedMLP, SequentialMLP and subclasses pass.

    Raises:
        ValueError: names the class, the reason and the remedy.
    """
    names = [cls.__name__ for cls in type(experts).__mro__]
    reasons = [reason for name, reason in _REFUSED_EXPERTS.items() if name in names]
    if not reasons and not any(name in names for name in _EXPERTS):
        reasons = ["it is unknown here"]
    if reasons:
        raise ValueError(
            f"experts={names[0]} is not possible with the padded dispatcher: {reasons[0]}. Remedy: "
            "TEGroupedMLP (moe_grouped_gemm=True with Transformer Engine) or SequentialMLP "
            "(moe_grouped_gemm=False)."
        )


def dispatch_config(
    config: Any, options: PaddedOptions, *, num_ranks: int, tp_size: int
) -> DispatchConfig:
    """What decides our shapes, from what a Megatron user has set.

    Args:
        config: a TransformerConfig that `check_config` has passed.
        options: what Megatron has no field for.
        num_ranks: ranks in the expert-parallel group (R).
        tp_size: ranks that split every expert.

    Raises:
        ValueError: see `DispatchConfig`.
    """
    factor = config.moe_expert_capacity_factor
    return DispatchConfig(
        num_experts=config.num_moe_experts,
        top_k=config.moe_router_topk,
        # Megatron takes a negative factor for None, but only in `__post_init__`.
        capacity_factor=None if factor is None or factor < 0 else factor,
        min_capacity=options.min_capacity,
        alignment=options.alignment,
        policy=config.moe_token_drop_policy,
        num_ranks=num_ranks,
        tp_size=tp_size,
    )


def _read(config: Any, name: str) -> Any:
    """The field's value; None, which nothing refuses, where this version has no such field."""
    return getattr(config, name, None)
