"""Megatron's experts with one parameter per linear, over packed rows or padded ones.

`PaddedOptions(experts="packed")` computes real rows only, `experts="batched"` every slot, in one
product per linear. The layer builds the experts module of its spec, so that initialization, random
states and attributes of parameters are Megatron's own; one of ours then copies the weights and
takes its place. For that moment a layer holds its experts twice.
`padded_dispatch.megatron.experts` says what becomes of parameters and checkpoints.

Gradients arrive in the parameters' dtype and Megatron's DDP adds them to `main_grad` in fp32; the
fused accumulation of Transformer Engine (`gradient_accumulation_fusion`), which adds before it
rounds, is not used for them. So every micro-batch's gradient is rounded to bf16 once, by at most
2**-8 of itself, as in every linear without the fusion. Over 1 and over 8 micro-batches of random
gradients `main_grad` was off by 0.17 % in the root mean square (tests/test_grouped.py).

`experts="auto"` takes what was faster on H200s where the config allows it and training is in bf16.
Forward and backward of a layer in a graph, 4,096 tokens per rank, as shares of stock drop-and-pad's
time (Qwen3-30B-A3B and GPT-OSS-20B; notebooks/results/layer_bench.json):

                          packed             batched
    EP 4, factor 1.0      .82 and .85        .88 and .85
                1.25      .78     .76        .89     .84
                2.0       .67     .57        .91     .83
    EP 1, factor 1.0      .57     .89        .51     .83
                1.25      .58     .82        .53     .80
                2.0       .51     .59        .61     .80

With one rank neither moves its rows again, so the GEMM decides, and per row `torch.bmm` is the
faster one: the more so the fewer tokens (Qwen3, 1.25: 1.30 ms beside 1.65 with 512), no longer with
16,384 (8.76 beside 8.45). What decides is the config's factor, not those of single layers or steps,
so that all layers keep their parameters alike.

The parameters of all experts of a rank in one, and the names that checkpoints have for them.

The GEMMs need one weight `[L, out, in]` per linear. (Views of TEGroupedMLP's separate parameters
would not do: Megatron's DDP lays them out in a buffer of its own, in reverse order.) Biases are one
parameter of one dimension, `[L * out]`, because Megatron's optimizers tell by the dimension what
does not decay (0.16.1 to 0.19.0, `optimizer/__init__.py`) and what Muon orthogonalizes.

Checkpoints speak of single experts, as TEGroupedMLP's do, and either module loads the other's:

- `state_dict`: `weight0`, `bias0`, ... of each linear, as TEGroupedLinear has them.
- `sharded_state_dict`: a `ShardedTensorFactory` per parameter, which makes the shards of
  `TEGroupedLinear._sharded_state_dict_grouped` and `apply_swiglu_sharded_factory`: the same keys,
  global shapes, offsets and replicas, with `singleton_local_shards` or without. SequentialMLP has
  the same ones.

What an optimizer keeps goes through the same factory, so a distributed checkpoint in the format
`fully_reshardable` of the distributed optimizer, and one of the optimizer that is not distributed,
have a state for each expert, which the other module finds as its own. `dp_reshardable` holds the
gradient buffers as they lie in memory: only the module that wrote it may read it. Formats of
flattened parameters (`fully_sharded_model_space`) are refused, as Megatron's own shards refuse
them. Torch's own format (`--ckpt-format torch`) keeps an optimizer's state by parameter number:
resume with the module that wrote it, or with `--no-load-optim`.
"""

import functools
import logging
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import activations
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.fusions import fused_bias_geglu
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor, nn

from padded_dispatch.experts import ExpertWeights, Linear, grouped_mlp
from padded_dispatch.megatron.config import padded_options, refusals
from padded_dispatch.megatron.fields import ConfigField
from padded_dispatch.ops.activation import Activation, Function
from padded_dispatch.ops.grouped import batched_linear, grouped_linear
from padded_dispatch.utils.nvtx import nvtx_range

# Transformer Engine's place for scales of fp8, which a strict load asks for. Empty means none.
_NO_SCALES = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """Where a rank's experts lie in a distributed checkpoint.

    `prefix`: of the experts' keys, with the dot. `offsets`: (axis, place, pieces) of the axes in
    front, such as the layers'. `first`: the id of the first expert here. `num_experts`: E.
    `replica`: (pipeline, tensor, data parallel) coordinates among equals; only zeros are written.
    `one_by_one`: every expert has keys of its own, instead of a place on a common axis.
    """

    prefix: str
    offsets: tuple[tuple[int, int, int], ...]
    first: int
    num_experts: int
    replica: tuple[int, int, int]
    one_by_one: bool

    def expert(self, local: int) -> tuple[str, tuple[tuple[int, int, int], ...]]:
        """The prefix and the offsets of one expert's tensors."""
        number = self.first + local
        if self.one_by_one:
            return f"{self.prefix}{number}.", self.offsets
        return self.prefix, (*self.offsets, (len(self.offsets), number, self.num_experts))


class StackedLinear(nn.Module):
    """L linears in one parameter, two with biases.

    `weight`: [L, out, in]. `bias`: [L * out], or None.

    Args:
        weights: [out, in] each; copied, with the attributes that Megatron gave them.
        biases: [out] each, likewise; none where there is no bias.
    """

    def __init__(self, weights: list[Tensor], biases: list[Tensor]) -> None:
        super().__init__()
        self.num_experts = len(weights)
        self.weight = nn.Parameter(torch.stack([weight.detach() for weight in weights]))
        for name, value in vars(weights[0]).items():
            setattr(self.weight, name, value + 1 if name == "partition_dim" else value)
        self.bias: nn.Parameter | None = None
        if biases:
            self.bias = nn.Parameter(torch.cat([bias.detach() for bias in biases]))
            for name, value in vars(biases[0]).items():
                setattr(self.bias, name, value)
        self.register_state_dict_post_hook(_split)
        self.register_load_state_dict_pre_hook(_stack)

    def biases(self) -> Tensor | None:
        """The bias of each expert, [L, out]."""
        return None if self.bias is None else self.bias.view(self.num_experts, -1)

    def sharded(self, name: str, shelf: Shelf, num_parts: int) -> dict[str, Any]:
        """Entries of a sharded state dict.

        Args:
            name: of this linear.
            num_parts: 2 where gate and up are on shards of their own.
        """
        found: dict[str, Any] = {
            kind: _factory(f"{name}.{kind}", parameter, shelf, self.num_experts, num_parts)
            for kind, parameter in self.named_parameters()
        }
        for local in range(self.num_experts):
            prefix, offsets = shelf.expert(local)
            found[f"_extra_state{local or ''}"] = make_sharded_object_for_checkpoint(
                _NO_SCALES, f"{prefix}{name}._extra_state", offsets, replica_id=shelf.replica
            )
        return found


def _factory(
    name: str, parameter: nn.Parameter, shelf: Shelf, num_experts: int, num_parts: int
) -> ShardedTensorFactory:
    def build(key: str, data: Tensor, replica_id: Any, flattened_range: Any) -> Any:
        if flattened_range is not None:
            raise ValueError(
                "a checkpoint of flattened parameters is not possible: set the distributed "
                "optimizer's format to fully_reshardable or dp_reshardable"
            )
        owner = key.removesuffix(f"{shelf.prefix}{name}")  # Empty, or an optimizer's state.
        shards = []
        for local, expert in enumerate(data.detach().view(num_experts, -1, *parameter.shape[2:])):
            prefix, offsets = shelf.expert(local)
            for number, part in enumerate(expert.chunk(num_parts)):
                part_key, place = f"{owner}{prefix}{name}", (len(offsets), number, num_parts)
                if shelf.one_by_one and num_parts > 1:
                    part_key, place = f"{part_key}_{'wv'[number]}", (len(offsets), 0, 1)
                shards.append(
                    ShardedTensor.from_rank_offsets(
                        part_key,
                        part,
                        *offsets,
                        place,
                        replica_id=replica_id,
                        prepend_axis_num=len(offsets),
                    )
                )
        return shards

    def merge(loaded: Any) -> Tensor:
        return torch.cat(loaded).view_as(parameter)

    return ShardedTensorFactory(
        f"{shelf.prefix}{name}", parameter, build, merge, replica_id=shelf.replica
    )


def _split(linear: StackedLinear, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, parameter in linear.named_parameters():
        stacked = state.pop(f"{prefix}{name}")
        shape = linear.num_experts, -1, *parameter.shape[2:]
        for number, value in enumerate(stacked.view(shape)):
            state[f"{prefix}{name}{number}"] = value
    state[f"{prefix}_extra_state"] = _NO_SCALES


def _stack(linear: StackedLinear, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in linear.named_parameters():
        keys = [f"{prefix}{name}{number}" for number in range(linear.num_experts)]
        if all(key in state for key in keys):
            stacked = torch.cat([state.pop(key) for key in keys])
            state[f"{prefix}{name}"] = stacked.view(parameter.shape)
    for number in range(linear.num_experts):
        state.pop(f"{prefix}_extra_state{number or ''}", None)


_log = logging.getLogger("padded_dispatch")

_BATCHED_BELOW = 1.3  # with one rank; see above
_NAMES = Literal["module", "packed", "batched"]
_REMEDY = 'PaddedOptions(experts="module")'

_FUNCTIONS: dict[Function, tuple[Any, ...]] = {
    "silu": (F.silu,),
    "gelu": (F.gelu,),
    "quick_gelu": (fused_bias_geglu.quick_gelu, activations.quick_gelu),
    "squared_relu": (activations.squared_relu,),
}


def chosen_experts(config: Any) -> _NAMES:
    """What `PaddedOptions.experts` comes to for a config; for `auto` the reason is logged once."""
    chosen = padded_options(config).experts
    if chosen != "auto":
        return chosen
    against = _against_ours(config)
    factor = config.moe_expert_capacity_factor
    alone = config.expert_model_parallel_size == 1
    full = alone and factor is not None and 0 <= factor < _BATCHED_BELOW
    best: _NAMES = "module" if against else "batched" if full else "packed"
    reason = f", since EP is 1 and the factor below {_BATCHED_BELOW}" if full else ""
    _say(f'experts="auto" takes {best}{against or reason}')
    return best


def _against_ours(config: Any) -> str:
    sizes = config.hidden_size, config.moe_ffn_hidden_size
    if refused := _refused(config):
        return "\n".join([", since packed and batched experts do not support", *refused])
    if not config.bf16:
        return ", since bf16 is not set"
    if any(size % 8 for size in sizes):
        return f", since {sizes[0]} and {sizes[1]} are not multiples of 8"
    return ""


@functools.cache
def _say(message: str) -> None:
    _log.info(message)


class _StackedExperts(MegatronModule):
    """What both kinds of experts have in common: parameters and checkpoints.

    Args:
        config: the layer's TransformerConfig.
        experts: the TEGroupedMLP or SequentialMLP that it replaces.
        pg_collection: `ep` and `expt_dp` are used, for distributed checkpoints.

    Raises:
        ValueError: names every setting that they do not support.
    """

    option: _NAMES

    def __init__(self, config: Any, experts: Any, pg_collection: Any) -> None:
        super().__init__(config=config)
        if refused := _refused(config):
            complaint = f'PaddedOptions(experts="{self.option}") does not support'
            raise ValueError("\n".join([complaint, *refused]))
        self.activation = _activation(config)
        self.recompute = config.recompute_granularity == "selective" and _has_moe_act(
            config.recompute_modules
        )
        self.linear_fc1 = StackedLinear(*_parameters(experts, "linear_fc1"))
        self.linear_fc2 = StackedLinear(*_parameters(experts, "linear_fc2"))
        self._ep_group, self._dp_group = pg_collection.ep, pg_collection.expt_dp

    def _computed(
        self, rows_ND: Tensor, offsets_L: Tensor, probs_N: Tensor, linear: Linear
    ) -> Tensor:
        weights = ExpertWeights(
            fc1_LGD=self.linear_fc1.weight,
            fc2_LDF=self.linear_fc2.weight,
            fc1_bias_LG=self.linear_fc1.biases(),
            fc2_bias_LD=self.linear_fc2.biases(),
        )
        return grouped_mlp(
            rows_ND,
            probs_N,
            offsets_L,
            weights,
            self.activation,
            linear=linear,
            recompute=self.recompute,
        )

    def backward_dw(self) -> None:
        """Nothing: without `delay_wgrad_compute`, which is refused, weights have their gradient."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """For distributed checkpoints: the keys, shapes and places of TEGroupedMLP.

        Args:
            prefix: of this module.
            sharded_offsets: (axis, place, pieces) of the axes in front, such as the layers'.
            metadata: Megatron's; `singleton_local_shards` gives every expert keys of its own.
        """
        linears = {"linear_fc1": self.linear_fc1, "linear_fc2": self.linear_fc2}
        num_local_experts = self.linear_fc1.num_experts
        shelf = Shelf(
            prefix=f"{prefix}experts.",
            offsets=tuple(sharded_offsets),
            first=self._ep_group.rank() * num_local_experts,
            num_experts=self._ep_group.size() * num_local_experts,
            replica=(0, 0, self._dp_group.rank()),
            one_by_one=bool((metadata or {}).get("singleton_local_shards", False)),
        )
        halves = {"linear_fc1": 2 if self.activation.gated else 1, "linear_fc2": 1}
        return {
            f"{prefix}{name}.{key}": value
            for name, linear in linears.items()
            for key, value in linear.sharded(name, shelf, halves[name]).items()
        }


class PackedExperts(_StackedExperts):
    """Experts that compute real rows only."""

    option = "packed"

    @nvtx_range("experts")
    def forward(self, rows_ND: Tensor, offsets_L: Tensor, probs_N: Tensor) -> tuple[Tensor, None]:
        """Packed rows to packed rows, weighted with `probs_N`.

        Args:
            rows_ND: [N, D]; rows from `offsets_L[-1]` on are not read, those of the result are
                unspecified.
            offsets_L: int32 on the device: the running count of rows, where other modules of Megatron
                take the count of each expert on the host.
            probs_N: at least fp32.

        Returns:
            [N, D], and None for the bias that Megatron may add: it is in there already.
        """
        return self._computed(rows_ND, offsets_L, probs_N, grouped_linear), None


class BatchedExperts(_StackedExperts):
    """The same experts over padded rows, all slots of a linear in one product."""

    option = "batched"

    @nvtx_range("experts")
    def forward(
        self, rows_ND: Tensor, rows_per_expert: Tensor, probs_N: Tensor
    ) -> tuple[Tensor, None]:
        """Padded rows to padded rows, weighted with `probs_N`; padded rows stay zero.

        Args:
            rows_ND: [N, D], N / L for every expert.
            rows_per_expert: not read, as it lies on the host.
            probs_N: at least fp32, 0 in padded rows.

        Returns:
            [N, D], and None for the bias that Megatron may add: it is in there already.
        """
        num_rows, num_each = rows_ND.shape[0], rows_ND.shape[0] // self.linear_fc1.num_experts
        offsets_L = torch.arange(
            num_each, num_rows + 1, num_each, dtype=torch.int32, device=rows_ND.device
        )
        return self._computed(rows_ND, offsets_L, probs_N, batched_linear), None


def _activation(config: Any) -> Activation:
    function = _function(config.activation_func)
    assert function is not None
    if not config.gated_linear_unit:
        return Activation(function=function, gated=False)
    clamp = config.activation_func_clamp_value
    return Activation(
        function=function,
        clamp=math.inf if clamp is None else clamp,
        offset=config.glu_linear_offset,
    )


def _function(function: Any) -> Function | None:
    for name, functions in _FUNCTIONS.items():
        if function in functions:
            return name
    return None


def _parameters(experts: Any, linear: str) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and biases of each expert; no biases where there are none."""
    if hasattr(experts, "local_experts"):  # SequentialMLP
        linears = [
            dict(getattr(expert, linear).named_parameters()) for expert in experts.local_experts
        ]
        found = [(one["weight"], one.get("bias")) for one in linears]
    else:
        one = dict(getattr(experts, linear).named_parameters())
        numbers = range(experts.num_local_experts)
        found = [(one[f"weight{number}"], one.get(f"bias{number}")) for number in numbers]
    return [weight for weight, _ in found], [bias for _, bias in found if bias is not None]


def _refused(config: Any) -> list[str]:
    """What packed experts do not compute, a line each."""
    found = refusals(config, _FIELDS)
    clamp, fused = config.activation_func_clamp_value, config.bias_activation_fusion
    if clamp is not None and fused and config.activation_func is F.silu:
        found.append(
            f"  activation_func_clamp_value={clamp!r}: Megatron's fused SwiGLU leaves it out. "
            "Remedy: bias_activation_fusion=False, or None."
        )
    return found


def _field(name: str, note: str, refuses: Any) -> ConfigField:
    return ConfigField(name=name, status="refused", note=note, refuses=refuses, remedy=_REMEDY)


def _given(value: Any) -> bool:
    return value is not None


def _has_moe_act(modules: Any) -> bool:
    return "moe_act" in (modules or ())


_FIELDS = (
    _field(
        "activation_func",
        f"known are {', '.join(_FUNCTIONS)}",
        lambda function: _function(function) is None,
    ),
    _field("activation_func_fp8_input_store", "the activation keeps its input as it is", bool),
    _field("use_te_activation_func", "the activation is a kernel of ours", bool),
    _field("moe_mlp_glu_interleave_size", "gate and up are not interleaved", _given),
    _field("moe_single_grouped_bias", "biases are read one by one", bool),
    _field("moe_apply_probs_on_input", "probabilities weigh the activation", bool),
    _field("moe_latent_size", "not shown yet", _given),
    _field("expert_tensor_parallel_size", "not shown yet", lambda size: (size or 1) > 1),
    _field("fp16", "they compute in bf16, on CPUs in any other dtype, too", bool),
    _field("fp8", "they compute in bf16", _given),
    _field("fp4", "they compute in bf16", _given),
    _field("delay_wgrad_compute", "weights have their gradient right after backward", bool),
    _field(
        "overlap_dispatch_backward_with_experts_wgrad",
        "weights have their gradient right after backward",
        bool,
    ),
    _field("offload_modules", "they do not offload moe_act", _has_moe_act),
)
