"""The parameters of all experts of a rank in one, and the names that checkpoints have for them.

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

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor, nn

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
