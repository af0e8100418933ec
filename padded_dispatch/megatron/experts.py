"""Megatron's experts over packed rows: `PaddedOptions(experts="packed")`.

The layer builds the experts module of its spec, so that initialization, random states and
attributes of parameters are Megatron's own; `PackedExperts` then copies the weights and takes its
place. For that moment a layer holds its experts twice.

The GEMMs need one parameter `[L, out, in]` per linear. (Views of TEGroupedMLP's separate parameters
would not do: Megatron's DDP lays them out in a buffer of its own, in reverse order.) State dicts
hold them as TEGroupedMLP does, one tensor per expert, and either module loads the other's. What an
optimizer keeps beside the parameters is not translated: resume with the module that wrote it.

Gradients arrive in the parameters' dtype and Megatron's DDP adds them to `main_grad`; the fused
accumulation of Transformer Engine (`gradient_accumulation_fusion`) is not used for them.
"""

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from padded_dispatch.activation import Activation
from padded_dispatch.experts import ExpertWeights, grouped_mlp
from padded_dispatch.megatron.config import refuse
from padded_dispatch.megatron.fields import ConfigField
from padded_dispatch.stages import stage


class PackedExperts(MegatronModule):
    """SwiGLU experts without bias that compute real rows only.

    Args:
        config: the layer's TransformerConfig.
        experts: the TEGroupedMLP or SequentialMLP that it replaces.

    Raises:
        ValueError: names every setting that packed experts do not support.
    """

    def __init__(self, config: Any, experts: Any) -> None:
        super().__init__(config=config)
        refuse(config, _FIELDS, 'PaddedOptions(experts="packed") does not support')
        self.linear_fc1 = StackedLinear(_weights(experts, "linear_fc1"))
        self.linear_fc2 = StackedLinear(_weights(experts, "linear_fc2"))

    @stage("experts")
    def forward(self, rows_ND: Tensor, ends_L: Tensor, probs_N: Tensor) -> tuple[Tensor, None]:
        """Packed rows to packed rows, weighted with `probs_N`.

        Args:
            rows_ND: [N, D]; rows from `ends_L[-1]` on are not read, those of the result are
                unspecified.
            ends_L: int32 on the device: the running count of rows, where other modules of Megatron
                take the count of each expert on the host.
            probs_N: at least fp32.

        Returns:
            [N, D], and None for the bias that Megatron may add.
        """
        weights = ExpertWeights(fc1_LGD=self.linear_fc1.weight, fc2_LDF=self.linear_fc2.weight)
        return grouped_mlp(rows_ND, probs_N, ends_L, weights, Activation()), None

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse distributed checkpoints, which would have to cut parameters into experts.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            'PaddedOptions(experts="packed") is not possible with distributed checkpoints: save '
            'with --ckpt-format torch, or take PaddedOptions(experts="module")'
        )


class StackedLinear(nn.Module):
    """L linears without bias in one parameter; a state dict holds them as TEGroupedLinear does.

    `weight`: [L, out, in].

    Args:
        weights: [out, in] each; copied, with the attributes that Megatron gave them.
    """

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack([weight.detach() for weight in weights]))
        for name, value in vars(weights[0]).items():
            setattr(self.weight, name, value + 1 if name == "partition_dim" else value)
        self.register_state_dict_post_hook(_split)
        self.register_load_state_dict_pre_hook(_stack)


def _split(linear: StackedLinear, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for number, weight in enumerate(state.pop(f"{prefix}weight")):
        state[f"{prefix}weight{number}"] = weight
    # Transformer Engine's place for scales of fp8, which a strict load asks for. Empty means none.
    state[f"{prefix}_extra_state"] = torch.empty(0, dtype=torch.uint8)


def _stack(linear: StackedLinear, state: dict[str, Any], prefix: str, *_: Any) -> None:
    keys = [f"{prefix}weight{number}" for number in range(linear.weight.shape[0])]
    if all(key in state for key in keys):
        state[f"{prefix}weight"] = torch.stack([state.pop(key) for key in keys])
    state.pop(f"{prefix}_extra_state", None)


def _weights(experts: Any, linear: str) -> list[Tensor]:
    if hasattr(experts, "local_experts"):  # SequentialMLP
        return [getattr(expert, linear).weight for expert in experts.local_experts]
    grouped = getattr(experts, linear)
    return [getattr(grouped, f"weight{number}") for number in range(experts.num_local_experts)]


def _field(name: str, note: str, refuses: Any) -> ConfigField:
    remedy = 'PaddedOptions(experts="module")'
    return ConfigField(name=name, status="refused", note=note, refuses=refuses, remedy=remedy)


def _given(value: Any) -> bool:
    return value is not None


def _has_moe_act(modules: Any) -> bool:
    return "moe_act" in (modules or ())


_FIELDS = (
    _field("add_bias_linear", "packed experts have no bias", bool),
    _field("gated_linear_unit", "the activation is SwiGLU", lambda gated: not gated),
    _field("activation_func", "the activation is SwiGLU", lambda function: function is not F.silu),
    _field("activation_func_clamp_value", "the activation is not clamped", _given),
    _field("activation_func_fp8_input_store", "the activation keeps its input as it is", bool),
    _field("glu_linear_offset", "the activation has no offset", bool),
    _field("use_te_activation_func", "the activation is a kernel of ours", bool),
    _field("moe_mlp_glu_interleave_size", "gate and up are not interleaved", _given),
    _field("moe_apply_probs_on_input", "probabilities weigh the activation", bool),
    _field("moe_latent_size", "not shown yet", _given),
    _field("expert_tensor_parallel_size", "not shown yet", lambda size: (size or 1) > 1),
    _field("fp16", "they compute in bf16, on CPUs in any other dtype, too", bool),
    _field("recompute_modules", "they do not recompute moe_act", _has_moe_act),
    _field("offload_modules", "they do not offload moe_act", _has_moe_act),
)
