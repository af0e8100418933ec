"""From Megatron's config to ours, and what we refuse before training starts.

The rows of `padded_dispatch.megatron.fields` decide; this file only asks them.
"""

import dataclasses
import functools
from typing import Any

from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization

from padded_dispatch.config import DispatchConfig
from padded_dispatch.megatron.compat import number_in_model
from padded_dispatch.megatron.fields import MOE_FIELDS, OTHER_FIELDS, ConfigField
from padded_dispatch.megatron.options import Factor, PaddedOptions

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
    refused = refusals(config, (*MOE_FIELDS, *OTHER_FIELDS))
    fp8, graphs = _read(config, "fp8"), _read(config, "cuda_graph_impl")
    if fp8 and graphs not in (None, "none"):
        refused.append(
            f"  fp8={fp8!r} with cuda_graph_impl={graphs!r}: not shown yet. Remedy: train in bf16, "
            'or set cuda_graph_impl="none".'
        )
    if refused:
        raise ValueError("\n".join(["the padded dispatcher does not support", *refused]))


def refusals(config: Any, rows: tuple[ConfigField, ...]) -> list[str]:
    """One line per setting that the rows refuse: field, value, reason, remedy."""
    return [
        f"  {row.name}={value!r}: {row.note}. Remedy: {row.remedy}."
        for row in rows
        if row.refuses(value := _read(config, row.name))
    ]


def padded_options(config: Any) -> PaddedOptions:
    """The options of a config; the defaults where nobody set any."""
    return getattr(config, "padded_dispatch", PaddedOptions())


def is_ours(config: Any) -> bool:
    """Whether a model of this config has padded layers, by the config word or by `padded_spec`."""
    return hasattr(config, "padded_dispatch")


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
    config: Any,
    options: PaddedOptions,
    *,
    num_ranks: int,
    etp_size: int,
    layer_number: int | None = None,
    training: bool = True,
) -> DispatchConfig:
    """What decides our shapes, from what a Megatron user has set.

    Args:
        config: a TransformerConfig that `check_config` has passed.
        options: what Megatron has no field for.
        num_ranks: ranks in the expert-parallel group (R).
        etp_size: ranks that split every expert.
        layer_number: see `number_in_model`; None where the layer does not know it yet.
        training: in evaluation there can be another factor.

    Raises:
        ValueError: see `DispatchConfig`.
    """
    policy = options.policy
    return DispatchConfig(
        num_experts=config.num_moe_experts,
        top_k=config.moe_router_topk,
        capacity_factor=_factor(config, options, layer_number, training),
        min_capacity=options.min_capacity,
        alignment=_alignment(config, options),
        policy=config.moe_token_drop_policy if policy == "megatron" else policy,
        remedy=options.remedy,
        reroute_rounds=options.reroute_rounds,
        num_ranks=num_ranks,
        etp_size=etp_size,
    )


class LayerConfigs:
    """The `DispatchConfig`s of one layer: `training` and `evaluation`. Changes between steps only.

    Router and dispatcher share it; which of the two holds is the router's mode, which a layer that
    is replayed from a CUDA graph has, too.

    `controlled`: whether a `CapacityControl` looks after them.

    Args:
        config, options, num_ranks, etp_size: see `dispatch_config`.
    """

    def __init__(
        self, config: Any, options: PaddedOptions, *, num_ranks: int, etp_size: int
    ) -> None:
        self._translate = functools.partial(
            dispatch_config, config, options, num_ranks=num_ranks, etp_size=etp_size
        )
        self._eval_apart = bool(options.eval_factors)
        self._to_control = options.to_control
        self.controlled = False
        self._router: Any = None
        self.training = self._translate()
        self.evaluation = self._translate(training=False)

    @property
    def now(self) -> DispatchConfig:
        """That of the mode that the layer is in."""
        return self.training if self.in_training else self.evaluation

    @property
    def in_training(self) -> bool:
        """Whether the layer is in training mode; so it is while there is no router."""
        return self._router is None or self._router.training

    def check_controlled(self) -> None:
        """Refuse to train with options that nobody would follow.

        Raises:
            ValueError: names them.
        """
        if self._to_control and not self.controlled:
            given = ", ".join(f"{name}={value!r}" for name, value in self._to_control.items())
            raise ValueError(
                f"{given} is not possible in a training loop without capacity control: make a "
                "padded_dispatch.megatron.CapacityControl of the model before the first step, and "
                "call its step() after each one; or leave the options out"
            )

    def follow(self, router: Any) -> None:
        """From now on `router` says whether the layer is in training."""
        self._router = router
        if router.layer_number is not None:
            self.find_factors()

    def find_factors(self) -> None:
        """Take the factors that the options have for this layer, now that it has a number."""
        layer_number = number_in_model(self._router)
        self.training = self._translate(layer_number=layer_number)
        self.evaluation = self._translate(layer_number=layer_number, training=False)

    def set_factor(self, factor: Factor) -> None:
        """Change the factor; that of evaluation, too, unless it has one of its own.

        To be called between steps, on all ranks alike; CUDA graphs that were captured before
        refuse to be replayed.
        """
        self.training = dataclasses.replace(self.training, capacity_factor=factor)
        if not self._eval_apart:
            self.evaluation = self.training


def _factor(
    config: Any, options: PaddedOptions, layer_number: int | None, training: bool
) -> Factor:
    if not training and options.eval_factors:
        return options.eval_factors[0]
    own = options.factor_of_layer
    if layer_number in own:
        return own[layer_number]
    factor = options.factor_of_step.get(0, config.moe_expert_capacity_factor)
    # Megatron takes a negative factor for None, but only in `__post_init__`.
    return None if factor is None or factor < 0 else factor


def _alignment(config: Any, options: PaddedOptions) -> int:
    """In rows. Megatron-Core 0.16.1 to 0.19.0: 32 for fp8 in the recipe mxfp8, 16 in the others."""
    if options.alignment != "auto":
        return options.alignment
    return get_align_size_for_quantization(config) if config.fp8 or config.fp4 else 1


def _read(config: Any, name: str) -> Any:
    """The field's value; None, which nothing refuses, where this version has no such field."""
    return getattr(config, name, None)
