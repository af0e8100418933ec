"""Linears of all experts of a rank in one parameter, and what checkpoints hold of them.

The GEMMs need one weight `[L, out, in]` per linear. (Views of TEGroupedMLP's separate parameters do
not work: Megatron's DDP lays parameters out in its own buffer, in reverse order.) Biases have one
dimension, `[L * out]`, because Megatron's optimizers do not decay parameters of one dimension.

Checkpoints hold single experts, as TEGroupedMLP's do, and either module loads the other's:

- `state_dict`: `weight0`, `bias0`, ... of each linear, as TEGroupedLinear has them. In torch's
  FSDP, in which a rank holds parts of a parameter, it has the stacked parameters instead.
- `sharded_state_dict`: a `ShardedTensorFactory` per parameter, which makes the shards of
  `TEGroupedLinear._sharded_state_dict_grouped` and `apply_swiglu_sharded_factory`: the same keys,
  global shapes, offsets and replicas, with `singleton_local_shards` or without.

Optimizer states use the same factory if a checkpoint keeps parameters whole. Formats of flattened
parameters are refused, as Megatron's own shards refuse them. `padded_dispatch/megatron/README.md`
lists the formats that load.

L: experts on this rank.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from padded_dispatch.config import require
from padded_dispatch.experts import Sums
from padded_dispatch.utils.phases import is_capturing, unseen
from padded_dispatch.utils.tensors import is_dense, kind_of

# Results of `StackedLinear.spare` by shape, dtype and device; the linears keep them alive.
_spares: WeakValueDictionary[tuple[object, ...], Tensor] = WeakValueDictionary()

# The value of `_extra_state`, Transformer Engine's key for fp8 scales, which a strict load needs.
_NO_SCALES = torch.empty(0, dtype=torch.uint8, device="cpu")


# (axis, place, pieces) of the axes in front of a parameter's own, such as the layers'.
Offsets = tuple[tuple[int, int, int], ...]


class StackedLinear(nn.Module):
    """L linears in one parameter, two with biases.

    One expert's part of a parameter can be read under TEGroupedLinear's name, such as `weight3`,
    as Megatron-Bridge does.

    Attributes:
        weight: [L, out, in].
        bias: [L * out], or None.
        tensor_model_parallel: whether ranks split every expert. Megatron-Bridge reads it.
        partition_dim, split, num_parts: the arguments. Megatron-Bridge reads the first one.
        zeroed: int32 [2], whether DDP's buffer is zeroed: see `Sums`; `following_zeros` sets it.

    Args:
        weights: [out, in] each; copied, with the attributes that Megatron gave them.
        biases: [out] each; copied likewise. Empty without biases.
        partition_dim: the axis of [out, in] that ranks split, if they split experts.
        split: (place, pieces) of that axis.
        num_parts: 2 if gate and up have separate shards in checkpoints, else 1.
    """

    def __init__(
        self,
        weights: list[Tensor],
        biases: list[Tensor],
        *,
        partition_dim: int = 0,
        split: tuple[int, int] = (0, 1),
        num_parts: int = 1,
    ) -> None:
        super().__init__()
        self.partition_dim, self.split, self.num_parts = partition_dim, split, num_parts
        self.tensor_model_parallel = split[1] > 1
        self._spare: Tensor | None = None
        # No buffer, so that `Copies` of a model's buffers do not restore it: it follows the sums.
        self.zeroed = torch.zeros(2, dtype=torch.int32, device=weights[0].device)
        self.num_experts = len(weights)
        self.weight: Any = _like(weights[0], torch.stack([weight.detach() for weight in weights]))
        # Norms count a parameter on each rank if it has this mark, else on tensor rank 0 alone. Up
        # to 0.18 TEGroupedLinear sets none. Ranks that split experts share fc2's bias.
        self.weight.tensor_model_parallel = True
        self.weight.partition_dim = partition_dim + 1
        self.bias: Any = None
        if biases:
            self.bias = _like(biases[0], torch.cat([bias.detach() for bias in biases]))
            self.bias.tensor_model_parallel = partition_dim == 0 or split[1] == 1
        self.register_state_dict_post_hook(_split)
        self.register_load_state_dict_pre_hook(_stack)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.zeroed = fn(self.zeroed)
        marks = {name: dict(vars(parameter)) for name, parameter in self.named_parameters()}
        super()._apply(fn, recurse)
        # Two settings of torch make new parameters here. Without Megatron's marks DDP would average
        # the experts of ranks that have different ones.
        for name, parameter in self.named_parameters():
            vars(parameter).update(marks[name] | vars(parameter))
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name[-1].isdigit() and name in (singles := self.singles()):
                return singles[name]
            raise

    def singles(self) -> dict[str, Tensor]:
        """Return one expert's part of each parameter by name.

        They are views, so torch refuses to freeze one of them. Each is a view by itself, since
        those that come from one iteration may not be read once an optimizer has taken a step.
        """
        return {
            f"{kind}{number}": self.by_expert(parameter)[number]
            for kind, parameter in self.named_parameters()
            for number in range(self.num_experts)
        }

    def by_expert(self, stacked: Tensor) -> Tensor:
        """Return a parameter, or a tensor of its shape, as [L, ...], which shares its memory."""
        return stacked.view(self.num_experts, -1, *stacked.shape[2:])

    def forward(self) -> Tensor:
        """Return the weight; the hooks of this call wait until DDP has gathered the parameters."""
        return self.weight

    def biases(self) -> Tensor | None:
        """Return the bias of each expert, [L, out]."""
        return None if self.bias is None else self.by_expert(self.bias)

    @unseen()
    def sums(self, adds: bool) -> Sums | None:
        """Return DDP's buffer to which the backward of this pass adds the weight's gradient.

        That backward, and not this call, sets `grad_added_to_main_grad`, which DDP reads after it
        and resets before a step: a loop may zero gradients between forward and backward. None in
        evaluation, outside of DDP, with FSDP, for a frozen weight, for sums in a dtype that is
        neither fp32 nor the weight's, and without `adds`, see `adds_gradients`.
        """
        weight: Any = self.weight
        main_grad = getattr(weight, "main_grad", None)
        trains = torch.is_grad_enabled() and weight.requires_grad
        trains &= not hasattr(weight, "__fsdp_param__")
        if not trains or main_grad is None or main_grad.dtype not in (torch.float32, weight.dtype):
            return None
        if not adds:
            self.zeroed.zero_()
            weight.grad_added_to_main_grad = False  # Of an earlier pass, which added its own.
            return None
        # A replay of Transformer Engine's graphs copies the gradients that it returns, except those
        # of weights with this attribute at the capture. DDP has read it in its constructor.
        weight.skip_backward_post_hook = is_capturing()
        return Sums(
            sums_LOI=main_grad.view_as(weight),
            spare_LOI=self.spare(),
            zeroed=self.zeroed,
            told=functools.partial(setattr, weight, "grad_added_to_main_grad", True),
        )

    def spare(self) -> Tensor:
        """Return memory of the weight's shape for autograd to get as a gradient; never written.

        All weights of a shape share it, so that graphs of layers do not keep one each.
        """
        key = self.weight.shape, self.weight.dtype, self.weight.device
        self._spare = _spares.get(key)
        if self._spare is None:
            # Zeros, since torch's detection of anomalies looks for NaN in gradients.
            self._spare = _spares[key] = torch.zeros_like(self.weight, requires_grad=False)
        return self._spare

    def sharded(
        self, prefix: str, name: str, places: list[tuple[str, Offsets]], replica: int
    ) -> dict[str, Any]:
        """Return the entries of a sharded state dict.

        Args:
            prefix: the prefix of the experts' keys, with the dot.
            name: the name of this linear.
            places: for each expert, the part of its keys after the prefix, and its offsets.
            replica: this rank's place among the ranks with the same shards; only the first writes.
        """
        found: dict[str, Any] = {
            kind: self._factory(prefix, f"{name}.{kind}", parameter, places, replica)
            for kind, parameter in self.named_parameters()
        }
        for local, (expert_key, offsets) in enumerate(places):
            found[f"_extra_state{local or ''}"] = make_sharded_object_for_checkpoint(
                _NO_SCALES,
                f"{prefix}{expert_key}{name}._extra_state",
                offsets,
                replica_id=(0, self.split[0], replica),
            )
        return found

    def _factory(
        self,
        prefix: str,
        name: str,
        parameter: Tensor,
        places: list[tuple[str, Offsets]],
        replica: int,
    ) -> Any:
        axis = self.partition_dim if parameter.dim() == 3 else 0  # A bias has one axis.
        split, num_splits = self.split

        def build(key: str, data: Tensor, replica_id: ReplicaId, flattened_range: object) -> Any:
            if flattened_range is not None:
                raise ValueError(
                    "the distributed optimizer's checkpoint must keep parameters whole, got "
                    "flattened ones; set its format to fully_reshardable or dp_reshardable"
                )
            rule = "be torch_dcp for packed experts in torch's FSDP"
            fix = "set it, or PaddedOptions(experts='module')"
            require(not isinstance(data, DTensor), "ckpt_format", "torch_dist", rule, fix)
            # Not `prefix`: Megatron removes a layer's number from keys if all layers are equal, and
            # an optimizer puts the name of its state in front.
            experts, shards = key.removesuffix(name), []
            for single, (expert_key, offsets) in zip(
                self.by_expert(data.detach()), places, strict=True
            ):
                for number, part in enumerate(single.chunk(self.num_parts)):
                    part_key = f"{experts}{expert_key}{name}"
                    # All gates lie before all ups.
                    place, num_places = number * num_splits + split, self.num_parts * num_splits
                    if expert_key and self.num_parts > 1:
                        part_key = f"{part_key}_{'wv'[number]}"
                        place, num_places = self.split
                    shards.append(
                        ShardedTensor.from_rank_offsets(
                            part_key,
                            part,
                            *offsets,
                            (len(offsets) + axis, place, num_places),
                            replica_id=replica_id,
                            prepend_axis_num=len(offsets),
                        )
                    )
            return shards

        def merge(loaded: Any) -> Tensor:
            return torch.cat(loaded).view_as(parameter)

        return ShardedTensorFactory(
            f"{prefix}{name}", parameter, build, merge, replica_id=(0, 0, replica)
        )


def _like(single: Tensor, stacked: Tensor) -> nn.Parameter:
    """Return a parameter with the attributes that Megatron gave to a single expert's parameter."""
    made = nn.Parameter(stacked)
    vars(made).update(vars(single))
    return made


def following_zeros(zero_grad_buffer: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap this method of DDP to set `zeroed`, so that a step's first gradients read no zeros."""

    @functools.wraps(zero_grad_buffer)
    def zero(self: Any) -> None:
        zero_grad_buffer(self)
        if not hasattr(self, "_stacked_linears"):  # The walk takes a millisecond with 48 layers.
            found = [module for module in self.modules() if isinstance(module, StackedLinear)]
            self._stacked_linears = found
        if flags := [linear.zeroed for linear in self._stacked_linears]:
            torch._foreach_add_(flags, 1)  # pyright: ignore[reportPrivateImportUsage]

    return zero


def has_own_weights(chunks: list[Any], optimizer: object) -> bool:
    """Return whether a distributed optimizer holds the weights of the experts of MoE layers.

    A checkpoint in the format `dp_reshardable` holds the optimizer's buffers as they lie in memory.
    Megatron loads the buffers of another experts module without an error if they have as many
    elements. From the first step on, each expert would have the weights of another one. That is so
    from Megatron's own experts to packed ones, and back. A rank with one expert sees no difference.

    Args:
        chunks: the model's chunks on this rank.
        optimizer: Megatron's; others have nothing to compare.
    """
    modules: Any = (module for chunk in chunks for module in chunk.modules())
    layers = [module for module in modules if hasattr(module, "token_dispatcher")]
    of_experts = {id(weight) for layer in layers for weight in layer.experts.parameters()}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        names = "model_float16_groups", "shard_float16_groups", "shard_fp32_from_float16_groups"
        groups = (itertools.chain(*getattr(part, name, ())) for name in names)
        for weight, own, main in zip(*groups, strict=True):
            if id(weight) not in of_experts or type(weight) is not nn.Parameter:
                continue  # A parameter in fp8 is another class, and rounded.
            if main is None:  # A precision-aware optimizer has it in its state.
                main = part.optimizer.state.get(own, {}).get("master_param")
            if main is None or main.dtype != torch.float32:
                continue  # The lower half of the weight's bits, at most.
            if not torch.equal(own, main.to(own)):
                return False
    return True


def _split(linear: StackedLinear, state: dict[str, Any], prefix: str, metadata: object) -> None:
    for name, parameter in linear.named_parameters():
        if isinstance(parameter, DTensor) and not hasattr(parameter, "__fsdp_param__"):
            continue  # torch's FSDP: a rank holds some of the experts.
        if state[f"{prefix}{name}"] is parameter:
            continue  # `keep_vars`: Megatron's default shards, which those of `sharded` replace.
        for number, value in enumerate(linear.by_expert(state.pop(f"{prefix}{name}"))):
            state[f"{prefix}{name}{number}"] = value
    state[f"{prefix}_extra_state"] = _NO_SCALES


def _stack(linear: StackedLinear, state: dict[str, Any], prefix: str, *given: Any) -> None:
    """Stack single experts; report keys that are missing or of another shape, as torch does."""
    *_, missing, _, errors = given
    for name, parameter in linear.named_parameters():
        if f"{prefix}{name}" in state:  # From a distributed checkpoint, or torch's FSDP.
            continue
        parts = []
        for number, own in enumerate(linear.by_expert(parameter.detach())):
            key = f"{prefix}{name}{number}"
            part = state.pop(key, own)
            if part is own:
                missing.append(key)
            elif not is_dense(part) or part.is_meta:
                shown = "no data" if is_dense(part) else kind_of(part)
                errors.append(f"{key} must be a dense tensor with data, got {shown}")
                part = own
            elif part.shape != own.shape:
                found = f"{list(part.shape)}; the model has {list(own.shape)}"
                errors.append(f"size mismatch for {key}: the checkpoint has {found}")
                part = own
            parts.append(part)
        parts = [part.to(parts[0].device) for part in parts]  # Some may be the model's own.
        state[f"{prefix}{name}"] = torch.cat(parts).view(parameter.shape)
    for number in range(linear.num_experts):
        state.pop(f"{prefix}_extra_state{number or ''}", None)
