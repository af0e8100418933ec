"""Checkpoints of stacked parameters: the shards of SequentialMLP, both ways.

Those of TEGroupedMLP need Transformer Engine: `tests.gpu.test_experts`.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import mapping, optimizer
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor, nn

from padded_dispatch.megatron.stacked_linear import StackedLinear
from tests.support import parity, tiny

BIASED = pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
GATED = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
ONE_BY_ONE = pytest.mark.parametrize("one_by_one", [False, True], ids=["one axis", "one by one"])
LAYERS = ((0, 1, 3),)  # The second of three layers.

pytestmark = pytest.mark.usefixtures("one_process")


def experts(kind: str, **settings: Any) -> Any:
    made = tiny.padded_layer(experts=kind, **settings).experts
    if made.config.add_bias_linear:  # Megatron begins with zeros.
        for name in ("linear_fc1", "linear_fc2"):
            for number, bias in enumerate(biases_of(made, name)):
                bias.copy_(torch.arange(len(bias)) + 100 * number)
    return made


def biases_of(made: Any, name: str) -> list[Tensor]:
    if hasattr(made, "local_experts"):
        return [getattr(expert, name).bias.data for expert in made.local_experts]
    return list(getattr(made, name).bias.data.view(made.linear_fc1.num_experts, -1))


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


def _both(offsets: Any, one_by_one: bool, settings: dict[str, Any]) -> list[Any]:
    metadata = {"singleton_local_shards": one_by_one}
    found = []
    for kind in ("packed", "module"):
        which = experts(kind, **settings)
        sharded = which.sharded_state_dict("layers.1.mlp.experts.", offsets, dict(metadata))
        # As a block of layers does that are all alike: `offsets` tell them apart.
        replace_prefix_for_sharding(sharded, "layers.1.", "layers.")
        found.append(written(sharded))
        assert all(key.startswith("layers.mlp.experts.") for key, *_ in found[-1])
    return found


def _on_two_ranks(sizes: dict[str, int], gated: bool = True, one_by_one: bool = False) -> list[Any]:
    with parity.megatron("cpu", **sizes):
        return _both((), one_by_one, {**sizes, "gated_linear_unit": gated})


@pytest.mark.parametrize("offsets", [(), LAYERS], ids=["a layer", "of three layers"])
@GATED
@BIASED
@ONE_BY_ONE
def test_shards_are_those_of_the_module_it_replaces(offsets, gated, biased, one_by_one):
    settings = {"gated_linear_unit": gated, "add_bias_linear": biased}
    ours, theirs = _both(offsets, one_by_one, settings)
    parameters = 2 * (1 + biased) * tiny.NUM_EXPERTS + gated * (1 + biased) * tiny.NUM_EXPERTS
    assert len(ours) == parameters + 2 * tiny.NUM_EXPERTS  # and the extra states
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("ep", "experts_of_ranks", "replicas"),
    [(2, [{0, 1}, {2, 3}], [0, 0]), (1, [{0, 1, 2, 3}] * 2, [0, 1])],
)
def test_ranks_share_the_experts(pool2, ep, experts_of_ranks, replicas):
    sizes = {"expert_model_parallel_size": ep}
    for rank, (ours, theirs) in enumerate(pool2.run(_on_two_ranks, sizes)):
        assert_same(ours, theirs)
        assert {where[2][0] for where in ours} == experts_of_ranks[rank]
        assert {where[3] for where in ours} == {(0, 0, replicas[rank])}


@GATED
@ONE_BY_ONE
def test_ranks_share_each_expert(pool2, gated, one_by_one):
    sizes = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    found = pool2.run(_on_two_ranks, sizes, gated, one_by_one)
    shards = [where[:3] for ours, _ in found for where in ours if "weight" in where[0]]
    assert len(shards) == len(set(shards))
    for ours, theirs in found:
        assert_same(ours, theirs)


def _counted(sizes: dict[str, int]) -> list[list[bool]]:
    """Whether this rank counts parameters in norms: stock's, and the weights and biases of ours."""
    with parity.megatron("cpu", **sizes):
        single = torch.ones(6, 4)
        vars(single)["allreduce"] = False  # All that TEGroupedLinear sets up to 0.18.
        group = parallel_state.get_expert_tensor_parallel_group()
        split = group.rank(), group.size()
        tensors = [single] * 2, [single[:, 0]] * 2
        linears = [StackedLinear(*tensors, partition_dim=axis, split=split) for axis in (0, 1)]
        ours = [parameter for linear in linears for parameter in linear.parameters()]
        tp = parallel_state.get_tensor_model_parallel_group()
        return [
            [param_is_not_tensor_parallel_duplicate(parameter, tp) for parameter in parameters]
            for parameters in ([single], ours)
        ]


@pytest.mark.parametrize(("ep", "etp", "shared"), [(2, 1, False), (1, 2, True)])
def test_d26_norms_count_each_parameter_once(pool2, ep, etp, shared):
    """Stock leaves the experts of tensor ranks above 0 out of norms, up to 0.18."""
    sizes = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    first, second = pool2.run(_counted, {"tensor_model_parallel_size": 2, **sizes})
    assert (first[0], second[0]) == ([True], [False])
    assert (first[1], second[1]) == ([True] * 4, [True] * 3 + [not shared])  # Last: fc2's bias.


@pytest.mark.parametrize("setting", ["swap", "overwrite"])
def test_a_conversion_that_makes_new_parameters_keeps_their_marks(setting):
    """Among them the one by which DDP knows experts, of which ranks have different ones."""
    linear = StackedLinear([torch.ones(6, 4)] * 2, [torch.ones(6)] * 2)
    for parameter in linear.parameters():
        vars(parameter)["allreduce"] = False
    before = [dict(vars(parameter)) for parameter in linear.parameters()]
    name = f"set_{setting}_module_params_on_conversion"
    getattr(torch.__future__, name)(True)
    try:
        linear.double()
    finally:
        getattr(torch.__future__, name)(False)
    assert linear.weight.dtype == linear.bias.dtype == torch.float64
    assert [vars(parameter) for parameter in linear.parameters()] == before


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
def test_distributed_checkpoints_load_both_ways(tmp_path: Path, biased, source):
    """With the states of an optimizer."""
    target = {"packed": "module", "module": "packed"}[source]
    one, other = (experts(kind, add_bias_linear=biased) for kind in (source, target))
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.normal_()
    adam, restored = _adam(one, 0.5), _adam(other, 3.0)

    def sharded(which: Any, state: torch.optim.Adam) -> dict[str, Any]:
        weights = which.sharded_state_dict("experts.")
        return {"weights": weights, "states": _sharded_states(which, state)}

    dist_checkpointing.save(sharded(one, adam), str(tmp_path))
    loaded: Any = dist_checkpointing.load(sharded(other, restored), str(tmp_path))
    weights = {key.removeprefix("experts."): value for key, value in loaded["weights"].items()}
    other.load_state_dict(weights)
    for state in loaded["states"].values():
        state["step"] = torch.tensor(1.0)  # Megatron keeps it in the parameter groups.
    restored.load_state_dict({**restored.state_dict(), "state": loaded["states"]})
    pairs = (one, adam), (other, restored)
    ours, theirs = pairs if source == "packed" else reversed(pairs)
    assert_same(written(sharded(*ours)), written(sharded(*theirs)))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "NoneType"),
        ([[1.0]], "list"),
        (torch.empty(24, 16, device="meta"), "no data"),
        (torch.eye(24, 16).to_sparse(), "torch.sparse_coo"),
    ],
    ids=["none", "list", "meta", "sparse"],
)
def test_what_is_no_tensor_with_data_is_named_by_its_key(value, shown):
    made = experts("packed")
    state = made.state_dict() | {"linear_fc1.weight1": value}
    words = rf"linear_fc1\.weight1 must be a dense tensor with data, got {shown}"
    with pytest.raises(RuntimeError, match=words):
        made.load_state_dict(state)


@BIASED
def test_shards_of_the_experts_replace_all_of_megatrons_default(biased):
    """Multi-token prediction of 0.16 takes those of a list of layers, then each layer's own."""
    made = experts("packed", add_bias_linear=biased)
    default = sharded_state_dict_default(nn.ModuleList([made]), "layers.")
    assert default and default.keys() <= made.sharded_state_dict("layers.0.").keys()


def test_flattened_parameters_are_refused():
    factory = experts("packed").sharded_state_dict()["linear_fc1.weight"]
    factory.flattened_range = slice(0, 8)
    with pytest.raises(ValueError, match="fully_reshardable"):
        factory.build()


@BIASED
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight0": lambda one: one.T}, ["size mismatch for linear_fc1.weight0"]),
        (
            {"weight0": lambda one: one[::2], "weight1": lambda one: torch.cat([one, one[::2]])},
            ["linear_fc1.weight0: ", "linear_fc1.weight1: "],
        ),
        ({"weight2": None}, [r"Missing key.* \"linear_fc1.weight2\"\."]),
    ],
    ids=["transposed", "rows of others", "missing"],
)
def test_single_experts_of_a_wrong_shape_or_missing_are_named(biased, changes, words):
    made = experts("packed", add_bias_linear=biased)
    state = made.state_dict()
    for name, change in changes.items():
        single = state.pop(key := f"linear_fc1.{name}")
        if change is not None:
            state[key] = change(single)
    before = [parameter.clone() for parameter in made.parameters()]
    with pytest.raises(RuntimeError) as caught:
        made.load_state_dict(state)
    message = str(caught.value)
    assert all(re.search(text, message) for text in words) and "Unexpected" not in message
    assert len(message.splitlines()) == 1 + len(words)
    for parameter, value in zip(made.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


@pytest.mark.filterwarnings("ignore:.* copying from a non-meta parameter")
def test_what_is_missing_on_another_device_is_named():
    """A model on a GPU loads a checkpoint on the CPU; here one of no memory stands for it."""
    made = experts("packed")
    state = made.state_dict()
    del state["linear_fc1.weight0"]
    missing, unexpected = made.to("meta").load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["linear_fc1.weight0"], [])
    assert made.linear_fc1.zeroed.is_meta  # It moves with the weights.
