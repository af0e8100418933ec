"""Checkpoints of stacked parameters: the shards of TEGroupedMLP and of SequentialMLP, both ways."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import mapping, optimizer
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from padded_dispatch.megatron import PaddedOptions
from tests.support import parity, tiny
from tests.support.pool import WorkerPool

BIASED = pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
ONE_BY_ONE = pytest.mark.parametrize("one_by_one", [False, True], ids=["one axis", "one by one"])
LAYERS = ((0, 1, 3),)  # The second of three layers.


@pytest.fixture
def megatron() -> Iterator[None]:
    with tiny.one_process():
        yield


def experts(kind: str, **settings: Any) -> Any:
    made = tiny.padded_layer(PaddedOptions(experts=kind), **settings).experts
    if made.config.add_bias_linear:  # Megatron begins with zeros.
        for name in ("linear_fc1", "linear_fc2"):
            for number, bias in enumerate(biases_of(made, name)):
                bias.copy_(torch.arange(len(bias)) + 100 * number)
    return made


def biases_of(made: Any, name: str) -> list[Tensor]:
    if hasattr(made, "local_experts"):
        return [getattr(expert, name).bias.data for expert in made.local_experts]
    return list(getattr(made, name).bias.data.view(made.linear_fc1.num_experts, -1))


class GroupedLinear(nn.Module):
    """Transformer Engine is not here: what a checkpoint sees of Megatron's TEGroupedLinear.

    After `_sharded_state_dict_grouped` and the `sharded_state_dict` of its two subclasses in
    Megatron-Core 0.16.1 to 0.19.0, `extensions/transformer_engine.py`.
    """

    def __init__(self, weights: Tensor, biases: Tensor | None, tp_axis: int) -> None:
        super().__init__()
        self.num_gemms, self.tp_axis = len(weights), tp_axis
        for i, weight in enumerate(weights.detach()):
            self.register_parameter(f"weight{i}", nn.Parameter(weight.clone()))
        self.use_bias = biases is not None
        if biases is not None:
            for i, bias in enumerate(biases.detach()):
                self.register_parameter(f"bias{i}", nn.Parameter(bias.clone()))

    def sharded_state_dict(self, prefix: str, sharded_offsets: Any, metadata: Any) -> Any:
        one_by_one = metadata.get("singleton_local_shards", False)
        groups: Any = parallel_state
        ep_group = groups.get_expert_model_parallel_group()
        axes = {f"{i}.weight": self.tp_axis for i in range(self.num_gemms)}
        if self.tp_axis == 0:
            axes |= {f"{i}.bias": 0 for i in range(self.num_gemms)}
        found: dict[str, Any] = {}
        for i in range(self.num_gemms):
            number = ep_group.rank() * self.num_gemms + i
            state = {
                f"{i}.weight": getattr(self, f"weight{i}"),
                f"{i}._extra_state": torch.empty(0, dtype=torch.uint8),
            }
            if self.use_bias:
                state[f"{i}.bias"] = getattr(self, f"bias{i}")
            place = (len(sharded_offsets), number, ep_group.size() * self.num_gemms)
            shards = make_sharded_tensors_for_checkpoint(
                state,
                "",
                axes,
                sharded_offsets if one_by_one else (*sharded_offsets, place),
                tp_group=groups.get_expert_tensor_parallel_group(),
                dp_cp_group=metadata["dp_cp_group"],
            )
            owner = f"{number}.{prefix}" if one_by_one else prefix
            replace_prefix_for_sharding(shards, f"{i}.", owner)
            found[f"{prefix}weight{i}"] = shards[f"{i}.weight"]
            found[f"{prefix}_extra_state{i or ''}"] = shards[f"{i}._extra_state"]
            if self.use_bias:
                found[f"{prefix}bias{i}"] = shards[f"{i}.bias"]
        for shard in found.values():
            shard.replica_id = (*shard.replica_id[:2], groups.get_expert_data_parallel_rank())
        return found


class GroupedMLP(nn.Module):
    """TEGroupedMLP's own `sharded_state_dict` over two of these, with the weights of ours."""

    sharded_state_dict = TEGroupedMLP.sharded_state_dict

    def __init__(self, packed: Any) -> None:
        super().__init__()
        self.config, self.num_local_experts = packed.config, packed.linear_fc1.num_experts
        self.ep_group = parallel_state.get_expert_model_parallel_group()
        self.tp_group = parallel_state.get_expert_tensor_parallel_group()
        for axis, name in enumerate(("linear_fc1", "linear_fc2")):
            linear = getattr(packed, name)
            setattr(self, name, GroupedLinear(linear.weight, linear.biases(), axis))


def written(sharded: dict[str, Any]) -> dict[Any, Any]:
    """Every shard and object that a checkpoint gets: where it lies, and what is in it."""
    mapping.apply_factories(sharded)
    found = {}
    for shard in nested_values(sharded):
        where = shard.key, shard.global_shape, shard.global_offset, shard.replica_id
        if isinstance(shard, mapping.ShardedTensor):
            where += shard.local_shape, shard.axis_fragmentations, shard.prepend_axis_num
        assert where not in found
        found[where] = shard.data
    return found


def assert_same(ours: dict[Any, Any], theirs: dict[Any, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for where, value in theirs.items():
        # The local linears of SequentialMLP have None where Transformer Engine has an empty tensor.
        assert value is None or torch.equal(ours[where], value), where


def _both(kind: str, offsets: Any, one_by_one: bool, settings: dict[str, Any]) -> list[Any]:
    packed = experts("packed", **settings)
    other = GroupedMLP(packed) if kind == "grouped" else experts("module", **settings)
    metadata = {"singleton_local_shards": one_by_one}
    found = []
    for which in (packed, other):
        sharded = which.sharded_state_dict("layers.1.mlp.experts.", offsets, dict(metadata))
        # As a block of layers does that are all alike: `offsets` tell them apart.
        replace_prefix_for_sharding(sharded, "layers.1.", "layers.")
        found.append(written(sharded))
        assert all(key.startswith("layers.mlp.experts.") for key, *_ in found[-1])
    return found


def _on_two_ranks(
    kind: str, sizes: dict[str, int], *, one_by_one: bool = False, **settings: Any
) -> list[Any]:
    with parity.megatron("cpu", **sizes):
        return _both(kind, (), one_by_one, {**sizes, **settings})


@pytest.mark.parametrize("kind", ["grouped", "sequential"])
@pytest.mark.parametrize("offsets", [(), LAYERS], ids=["a layer", "of three layers"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@BIASED
@ONE_BY_ONE
def test_shards_are_those_of_the_module_it_replaces(
    megatron, kind, offsets, gated, biased, one_by_one
):
    settings = {"gated_linear_unit": gated, "add_bias_linear": biased}
    ours, theirs = _both(kind, offsets, one_by_one, settings)
    parameters = 2 * (1 + biased) * tiny.NUM_EXPERTS + gated * (1 + biased) * tiny.NUM_EXPERTS
    assert len(ours) == parameters + 2 * tiny.NUM_EXPERTS  # and the extra states
    assert_same(ours, theirs)


@pytest.mark.parametrize("kind", ["grouped", "sequential"])
@pytest.mark.parametrize(
    ("ep", "experts_of_ranks", "replicas"),
    [(2, [{0, 1}, {2, 3}], [0, 0]), (1, [{0, 1, 2, 3}] * 2, [0, 1])],
)
def test_ranks_share_the_experts(pool2: WorkerPool, kind, ep, experts_of_ranks, replicas):
    sizes = {"expert_model_parallel_size": ep}
    for rank, (ours, theirs) in enumerate(pool2.run(_on_two_ranks, kind, sizes)):
        assert_same(ours, theirs)
        assert {where[2][0] for where in ours} == experts_of_ranks[rank]
        assert {where[3] for where in ours} == {(0, 0, replicas[rank])}


def _of_split_experts(kind: str) -> list[list[Any]]:
    sizes = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    return [
        _on_two_ranks(kind, sizes, gated_linear_unit=gated, one_by_one=one_by_one)
        for gated in (True, False)
        for one_by_one in (True, False)
    ]


@pytest.mark.parametrize("kind", ["grouped", "sequential"])
def test_ranks_share_each_expert(pool2: WorkerPool, kind):
    found = pool2.run(_of_split_experts, kind)
    for cases in zip(*found, strict=True):
        shards = [where[:3] for ours, _ in cases for where in ours if "weight" in where[0]]
        assert len(shards) == len(set(shards))
        for ours, theirs in cases:
            assert_same(ours, theirs)


def _adam(which: Any, share: float) -> torch.optim.Adam:
    """Return Adam after one step; the gradients are that share of the parameters."""
    adam = torch.optim.Adam(which.parameters())
    for parameter in which.parameters():
        parameter.grad = parameter.detach() * share
    adam.step()
    return adam


def _sharded_states(which: Any, adam: torch.optim.Adam) -> dict[str, Any]:
    sharded = which.sharded_state_dict("experts.", (), None)
    ids = optimizer.get_param_id_to_sharded_param_map(sharded, iter(which.parameters()))
    state = adam.state_dict()
    optimizer.optim_state_to_sharding_state(state, ids, ("step",))
    return state["state"]


@BIASED
@pytest.mark.parametrize("source", ["packed", "module"])
def test_distributed_checkpoints_load_both_ways(megatron, tmp_path: Path, biased, source):
    target = {"packed": "module", "module": "packed"}[source]
    one, other = (experts(kind, add_bias_linear=biased) for kind in (source, target))
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.normal_()
    dist_checkpointing.save(one.sharded_state_dict("experts."), str(tmp_path))
    loaded: Any = dist_checkpointing.load(other.sharded_state_dict("experts."), str(tmp_path))
    prefix = "experts."
    other.load_state_dict({key.removeprefix(prefix): value for key, value in loaded.items()})
    assert_same(
        *(
            written(which.sharded_state_dict(prefix))
            for which in sorted((one, other), key=is_module)
        )
    )


@BIASED
@pytest.mark.parametrize("source", ["packed", "module"])
def test_optimizer_states_load_both_ways(megatron, tmp_path: Path, biased, source):
    target = {"packed": "module", "module": "packed"}[source]
    one, other = (experts(kind, add_bias_linear=biased) for kind in (source, target))
    adam, restored = _adam(one, 0.5), _adam(other, 3.0)
    dist_checkpointing.save(_sharded_states(one, adam), str(tmp_path))
    before = {where: v.clone() for where, v in written(_sharded_states(other, restored)).items()}
    states: Any = dist_checkpointing.load(_sharded_states(other, restored), str(tmp_path))
    for state in states.values():
        state["step"] = torch.tensor(1.0)  # Megatron keeps it in the parameter groups.
    restored.load_state_dict({**restored.state_dict(), "state": states})
    ours, theirs = (
        written(_sharded_states(which, state)) for which, state in ((other, restored), (one, adam))
    )
    assert any(not torch.equal(before[where], value) for where, value in theirs.items())
    assert_same(ours, theirs)


def is_module(which: Any) -> bool:
    return hasattr(which, "local_experts")


def test_flattened_parameters_are_refused(megatron):
    factory = experts("packed").sharded_state_dict()["linear_fc1.weight"]
    factory.flattened_range = slice(0, 8)
    with pytest.raises(ValueError, match="fully_reshardable"):
        factory.build()


def test_biases_are_parameters_of_one_dimension(megatron):
    """Megatron's optimizers tell by it that they do not decay."""
    packed = experts("packed", add_bias_linear=True)
    shapes = {name: tuple(value.shape) for name, value in packed.named_parameters()}
    assert shapes == {
        "linear_fc1.weight": (4, 48, tiny.HIDDEN),
        "linear_fc1.bias": (4 * 48,),
        "linear_fc2.weight": (4, tiny.HIDDEN, 24),
        "linear_fc2.bias": (4 * tiny.HIDDEN,),
    }
