"""Experts with one parameter per linear, which compute real rows only.

`StackedExperts` stands in for the experts module of a layer's spec. The layer first builds the
module of its spec, so that initialization, random states and attributes of parameters are
Megatron's own; `StackedExperts` then copies the weights into linears of `stacked_linear`.

The module does the whole exchange (`padded_dispatch.experts`): Megatron calls it with tokens, and
gets the weighted sum of each token's experts. What the host has decided about the pass is no
tensor, so the dispatcher stores it in `StackedExperts.call`.

In training with Megatron's DDP, backward adds weight gradients to `main_grad`, as Megatron's own
linears do with `gradient_accumulation_fusion`; autograd gets unspecified memory. A step's first
gradient is stored instead of added, since DDP has just zeroed the buffer
(`stacked_linear.following_zeros`). If `adds_gradients` is False, DDP adds the gradients, in the
parameters' dtype: bf16 rounds the gradient of each micro-batch by at most 2**-8 of its value.

In fp8 (`padded_dispatch.experts.scaled`) weights stay in bf16 and are quantized once per step. A
step of any torch optimizer marks them as stale, on the device; so does `set_is_first_microbatch`.

Letters: T tokens, L experts on this rank, D hidden size, F ffn size, G columns of fc1.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from megatron.core import activations
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.fusions import fused_bias_geglu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from padded_dispatch.config import CapacityPool, require
from padded_dispatch.experts import Activation, Call, ExpertWeights, Function, run
from padded_dispatch.experts.scaled import ScaledWeights
from padded_dispatch.megatron.compat import (
    FUSED_SWIGLU_CLAMPS,
    captures,
    captures_iteration,
)
from padded_dispatch.megatron.config import Refused, padded_options, refusals
from padded_dispatch.megatron.stacked_linear import Offsets, StackedLinear
from padded_dispatch.utils.phases import is_capturing, unseen

_REMEDY = 'PaddedOptions(experts="module")'

# These recipes have a scale per tensor. That of packed experts, one per row, is finer.
_FP8_RECIPES = "tensorwise", "delayed"


@dataclass(frozen=True, kw_only=True)
class ChosenExperts:
    """The meaning of `PaddedOptions.experts` and `PaddedOptions.capacity_pool` for a config.

    Attributes:
        packed: whether experts are `StackedExperts`; else they are the module of the layer's spec.
        pool: which rows share room.
        reason: why experts are packed or not, for the log.
    """

    packed: bool
    pool: CapacityPool
    reason: str


def chosen_experts(config: TransformerConfig) -> ChosenExperts:
    """Return the experts that the options of a config mean, and which rows share room.

    "auto" keeps the spec's module if the config has a setting that `StackedExperts` does not
    compute, such as some fp8 recipes, if GPUs do not train in bf16, and on GPUs before Hopper. Rows
    of packed experts share a store, unless the options choose cells; a store needs packed experts.

    Raises:
        ValueError: if a store was asked for, and packed experts do not support the config.
    """
    options = padded_options(config)
    pool, packed = options.capacity_pool, options.experts == "packed"
    reason = f"experts={options.experts!r} was asked for"
    if options.experts == "auto":
        obstacle = _obstacle_to_packed(config)
        rule = "be cells or auto, because a store needs packed experts"
        require(not obstacle or pool != "store", "capacity_pool", pool, rule, obstacle)
        packed, reason = not obstacle, obstacle or "experts='auto'"
    if packed and config.fp8:
        reason += "; in e4m3 with a scale per row"
    if pool == "auto":
        pool = "store" if packed else "cells"
    return ChosenExperts(packed=packed, pool=pool, reason=reason)


def require_weights_stay(experts: nn.Module, config: TransformerConfig) -> None:
    """Raise if graphs of layers hold experts whose weights Megatron-FSDP gathers for each pass.

    Its hooks of the layer gather them, into memory that it allocates and frees for each pass.
    """
    gathered = any(hasattr(parameter, "__fsdp_param__") for parameter in experts.parameters())
    require(
        not gathered or captures_iteration(config) or not captures(config, "moe"),
        "cuda_graph_impl",
        config.cuda_graph_impl,
        "capture no experts of layers with Megatron-FSDP, whose hooks a replay does not run: it "
        "would read weights where they lay at the capture",
        "capture attn, moe_router and moe_preprocess only, or whole steps by full_iteration, or "
        "train with Megatron's DDP",
    )


def _obstacle_to_packed(config: Any) -> str:
    """Return why "auto" keeps the module of the layer's spec; empty if experts are packed."""
    if refused := _refused(config):  # "auto" is their remedy.
        return " ".join(refused.replace(f" Remedy: {_REMEDY}.", "").split())
    # Megatron-Bridge's training adds adapters by such a hook, after the model is built.
    hooks = getattr(config, "_pre_wrap_hooks", ())
    if any(getattr(hook, "__name__", "") == "peft_pre_wrap_hook" for hook in hooks):
        return "Megatron-Bridge adds adapters, which wrap Megatron's own linears"
    if not config.bf16 and torch.cuda.is_available():
        return "bf16 is not set"
    part = config.moe_ffn_hidden_size // (config.expert_tensor_parallel_size or 1)
    sizes = config.moe_latent_size or config.hidden_size, part
    multiple = 16 if config.fp8 else 8
    if any(size % multiple for size in sizes):
        return f"the sizes {sizes[0]} and {sizes[1]} are not multiples of {multiple}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        return "packed experts need a Hopper GPU or a later one"
    return ""


def adds_gradients(config: TransformerConfig) -> bool:
    """Return whether the backward of a pass that runs now may add gradients to `main_grad` itself.

    `grad_added_to_main_grad` keeps DDP from adding them again. A replay does not set this flag, and
    DDP resets it before each step (`zero_grad_buffer`). So a captured pass may add gradients only
    with `gradient_accumulation_fusion`, for which Megatron expects such gradients; in Transformer
    Engine's graphs, for which DDP does not reset it; in graphs of a whole iteration from 0.18 on,
    which hold DDP's own additions, too.
    """
    if config.gradient_accumulation_fusion:
        return True
    if config.cuda_graph_impl == "local":  # A graph of a whole iteration, up to 0.17.
        return False
    return config.cuda_graph_impl != "none" or not is_capturing()


def in_fp8(config: TransformerConfig, number: int) -> bool:
    """Return whether the experts of a layer compute in fp8, as Megatron's own would.

    `number`: the layer's number in the model, from 1. Layers of multi-token prediction, after the
    others, compute in fp8.
    """
    in_bf16 = number <= config.num_layers and is_first_last_bf16_layer(config, number - 1)
    return bool(config.fp8) and not in_bf16


class StackedExperts(MegatronModule):
    """Experts of one rank, with one parameter per linear.

    Args:
        config: the layer's TransformerConfig.
        experts: the TEGroupedMLP or SequentialMLP that it replaces.
        pg_collection: `ep`, `expt_tp` and `expt_dp` are used, for checkpoints.

    Attributes:
        call: the next pass, which the dispatcher sets; `forward` takes it and leaves None.
        in_fp8: whether passes compute in e4m3; the dispatcher sets it for the layer's number.

    Raises:
        ValueError: names every setting that it does not support.
    """

    def __init__(
        self, config: TransformerConfig, experts: nn.Module, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config=config)
        if refused := _refused(config):
            raise ValueError(refused)
        self.activation = _activation(config)
        self._groups = pg_collection
        split = pg_collection.expt_tp.rank(), pg_collection.expt_tp.size()
        self.linear_fc1 = StackedLinear(
            *_parameters(experts, "linear_fc1"),
            split=split,
            num_parts=2 if self.activation.gated else 1,
        )
        second = _parameters(experts, "linear_fc2")
        self.linear_fc2 = StackedLinear(*second, partition_dim=1, split=split)
        self.call: Call | None = None
        self.in_fp8 = bool(config.fp8)
        self._scaled: ScaledWeights | None = None
        self.register_load_state_dict_post_hook(_loaded)

    def mark_stale(self) -> None:
        """Make the next pass quantize the weights again, because they may have changed."""
        if self._scaled is not None:
            self._scaled.mark_stale()

    @property
    def is_first_microbatch(self) -> bool:
        """Always False; with fp8 Megatron sets it to True before each step's first micro-batch."""
        return False

    @is_first_microbatch.setter
    def is_first_microbatch(self, value: bool) -> None:
        if value:
            self.mark_stale()

    def train(self, mode: bool = True) -> "StackedExperts":
        """Set the mode; mark weights as stale, since evaluation may follow a step at once."""
        self.mark_stale()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = self.linear_fc1.weight
        kind = before.device, before.dtype
        applied = super()._apply(fn, recurse)
        if (self.linear_fc1.weight.device, self.linear_fc1.weight.dtype) != kind:
            self._scaled = None
        self.mark_stale()  # Kept, because CUDA graphs read it.
        return applied

    @unseen()
    def _refreshed(self) -> ScaledWeights:
        """Return the weights in e4m3 as they are now."""
        weights = self.linear_fc1.weight, self.linear_fc2.weight
        if self._scaled is None:
            self._scaled = ScaledWeights(*weights)
        self._scaled.refresh(*weights)
        return self._scaled

    def forward(self, tokens_TD: Tensor, rows_E: Tensor, prob_TK: Tensor) -> tuple[Tensor, None]:
        """Compute every token's experts, on the ranks that hold them.

        Args:
            tokens_TD: in the parameters' dtype.
            rows_E: not read; Megatron passes counts.
            prob_TK: at least fp32, of the choices in the plan of `call`.

        Returns:
            The weighted sum of every token's experts, [T, D]; and None for the bias that Megatron
            may add: it is part of the result.
        """
        call, self.call = self.call, None
        assert call is not None
        first, second, adds = self.linear_fc1, self.linear_fc2, adds_gradients(self.config)
        weights = ExpertWeights(
            fc1_LGD=first(),
            fc2_LDF=second(),
            fc1_bias_LG=first.biases(),
            fc2_bias_LD=second.biases(),
            fc1_sums=first.sums(adds),
            fc2_sums=second.sums(adds),
            scaled=self._refreshed() if self.in_fp8 else None,
        )
        return run(tokens_TD, prob_TK, weights, self.activation, call), None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Offsets = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the shards of a distributed checkpoint, as TEGroupedMLP has them.

        Args:
            prefix: the prefix of this module's keys.
            sharded_offsets: (axis, place, pieces) of the axes in front, such as the layers'.
            metadata: Megatron's; `singleton_local_shards` gives every expert its own keys.
        """
        ep, num_local = self._groups.ep, self.linear_fc1.num_experts
        numbers = range(ep.rank() * num_local, (ep.rank() + 1) * num_local)
        axis, num_experts = len(sharded_offsets), ep.size() * num_local
        if metadata and metadata.get("singleton_local_shards"):
            places = [(f"{number}.", tuple(sharded_offsets)) for number in numbers]
        else:
            places = [("", (*sharded_offsets, (axis, number, num_experts))) for number in numbers]
        replica, experts = self._groups.expt_dp.rank(), f"{prefix}experts."
        return {
            f"{prefix}{name}.{key}": value
            for name in ("linear_fc1", "linear_fc2")
            for key, value in getattr(self, name).sharded(experts, name, places, replica).items()
        }


def _loaded(experts: StackedExperts, keys: object) -> None:
    experts.mark_stale()


_FUNCTIONS: dict[Any, Function] = {
    F.silu: "silu",
    F.gelu: "gelu",
    fused_bias_geglu.quick_gelu: "quick_gelu",
    activations.quick_gelu: "quick_gelu",
    activations.squared_relu: "squared_relu",
}


def _activation(config: TransformerConfig) -> Activation:
    function = _FUNCTIONS[config.activation_func]
    if not config.gated_linear_unit:
        return Activation(function=function, gated=False)
    clamp = config.activation_func_clamp_value
    return Activation(
        function=function,
        clamp=math.inf if clamp is None else clamp,
        offset=config.glu_linear_offset,
    )


def _parameters(experts: Any, linear: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return weights and biases of each expert; no biases where there are none."""
    if hasattr(experts, "local_experts"):  # SequentialMLP
        linears = [
            dict(getattr(expert, linear).named_parameters()) for expert in experts.local_experts
        ]
        pairs = [(tensors["weight"], tensors.get("bias")) for tensors in linears]
    else:
        tensors = dict(getattr(experts, linear).named_parameters())
        numbers = range(experts.num_local_experts)
        pairs = [(tensors[f"weight{number}"], tensors.get(f"bias{number}")) for number in numbers]
    return [weight for weight, _ in pairs], [bias for _, bias in pairs if bias is not None]


def _refused(config: TransformerConfig) -> str:
    """Return the settings that `StackedExperts` does not compute, one a line; empty if none."""
    found = refusals(config, _FIELDS)
    if config.fp8 and config.fp8_recipe not in _FP8_RECIPES:
        recipe = getattr(config.fp8_recipe, "value", config.fp8_recipe)
        found.append(
            f"  fp8_recipe={recipe!r}: their scale per row is coarser than this recipe's; they "
            f"support {' and '.join(_FP8_RECIPES)}. Remedy: {_REMEDY}."
        )
    clamp, fused = config.activation_func_clamp_value, config.bias_activation_fusion
    leaves_out = fused and config.activation_func is F.silu and not FUSED_SWIGLU_CLAMPS
    if clamp is not None and leaves_out:
        found.append(
            f"  activation_func_clamp_value={clamp!r}: Megatron's fused SwiGLU leaves it out. "
            "Remedy: bias_activation_fusion=False, or None."
        )
    return "\n".join(["packed experts do not support", *found]) if found else ""


_row = partial(Refused, remedy=_REMEDY)
_FIELDS = (
    _row(
        "activation_func",
        f"they support {', '.join(get_args(Function))}",
        refuses=lambda function: function not in _FUNCTIONS,
    ),
    _row("activation_func_fp8_input_store", "the activation keeps its input as it is"),
    _row("use_te_activation_func", "the activation is a kernel of ours"),
    _row("moe_mlp_glu_interleave_size", "gate and up are not interleaved"),
    _row("moe_apply_probs_on_input", "probabilities weigh the activation"),
    _row(
        "expert_gtp_weight_remat_size",
        "a rank has shards of its experts' weights, which Transformer Engine gathers",
        refuses=lambda size: (size or 1) > 1,
    ),
    _row("init_model_with_meta_device", "Megatron-FSDP cannot reset stacked weights"),
    _row("fp16", "they do not compute in fp16"),
    _row("fp4", "they compute in bf16 or e4m3"),
    _row("quant_recipe", "they compute in bf16 or e4m3"),
    _row(
        "offload_modules",
        "they offload neither expert_fc1 nor moe_act",
        refuses=lambda modules: not {"expert_fc1", "moe_act"}.isdisjoint(modules or ()),
    ),
)
