"""Hugging Face weights, adapters and saved options: stand-ins for Megatron-Bridge see them."""

import dataclasses
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from padded_dispatch.config import NO_DROP
from padded_dispatch.megatron import PaddedOptions, bridge, install, uninstall
from padded_dispatch.megatron.bridge import _CONTAINERS, KEY, show_single_experts, single_experts
from tests.support import parity, tiny

pytestmark = pytest.mark.usefixtures("one_process")

STACKED = {"experts.linear_fc1.weight", "experts.linear_fc2.weight"}
SINGLE = {f"experts.linear_fc{fc}.weight{i}" for fc in (1, 2) for i in range(tiny.NUM_EXPERTS)}


def layer(experts: Any = "packed", **settings: Any) -> Any:
    return tiny.padded_layer(experts=experts, **settings)


def names(module: Any) -> set[str]:
    return {name for name, _ in module.named_parameters() if name.startswith("experts")}


def test_single_experts_are_listed_under_the_names_of_te_grouped_mlp():
    made, stock = layer(), layer("module")
    before = names(stock)
    assert names(made) == STACKED and before and before.isdisjoint(STACKED)
    with pytest.raises(KeyError), single_experts([made, stock]):
        assert (names(made), names(stock)) == (SINGLE, before)
        with single_experts([made]):
            assert names(made) == SINGLE
        assert names(made) == SINGLE
        raise KeyError
    assert names(made) == STACKED
    assert {name for name in made.state_dict() if "weight" in name} >= SINGLE


def test_what_is_copied_into_a_single_expert_arrives_and_nothing_else_changes():
    made = layer(add_bias_linear=True)
    linear = made.experts.linear_fc1
    before = linear.weight.detach().clone()
    with single_experts([made]):
        listed = dict(made.named_parameters())
    new = torch.randn(48, tiny.HIDDEN)
    listed["experts.linear_fc1.weight2"].data.copy_(new)
    listed["experts.linear_fc1.bias3"].data.fill_(7.0)
    assert torch.equal(linear.weight[2], new) and torch.equal(linear.weight3, before[3])
    assert torch.equal(linear.weight[[0, 1, 3]], before[[0, 1, 3]])
    assert linear.biases()[3].eq(7.0).all() and linear.biases()[:3].eq(0.0).all()


def test_a_single_expert_alone_cannot_be_frozen():
    linear = layer().experts.linear_fc1
    with pytest.raises(RuntimeError, match="leaf"):
        linear.weight3.requires_grad_(False)
    one = linear.weight3
    with torch.no_grad():
        linear.weight.add_(1.0)  # As an optimizer does.
    assert torch.equal(one, linear.weight[3])
    one.sum().backward()
    assert linear.weight.grad.sum((1, 2)).tolist() == [0, 0, 0, linear.weight[3].numel()]


class StandIn:
    """What `MegatronModelBridge` has: methods that list the parameters of `megatron_model`."""

    def build_conversion_tasks(self, hf_pretrained: Any, megatron_model: Any) -> list[set[str]]:
        return [names(chunk) for chunk in megatron_model]

    def _megatron_global_adapters_info_all_pp_ranks(self, megatron_model: Any) -> set[str]:
        return names(megatron_model)


@pytest.fixture
def conversion(monkeypatch) -> Iterator[Any]:
    stand_in: Any = type("MegatronModelBridge", (), dict(vars(StandIn)))
    module = SimpleNamespace(MegatronModelBridge=stand_in)
    monkeypatch.setitem(sys.modules, bridge._CONVERSION, module)
    monkeypatch.setitem(sys.modules, "megatron.bridge", SimpleNamespace())
    yield stand_in
    uninstall()


def test_bridge_sees_single_experts_once_a_layer_is_built(conversion):
    before = dict(vars(conversion))
    chunks = [layer(), layer("module")]
    once = dict(vars(conversion))
    assert conversion().build_conversion_tasks(None, chunks) == [SINGLE, names(chunks[1])]
    assert conversion().build_conversion_tasks(None, megatron_model=chunks)[0] == SINGLE
    assert conversion()._megatron_global_adapters_info_all_pp_ranks(chunks[0]) == SINGLE
    assert names(chunks[0]) == STACKED
    layer(), show_single_experts()
    assert dict(vars(conversion)) == once
    uninstall()
    assert conversion().build_conversion_tasks(None, chunks)[0] == STACKED
    assert dict(vars(conversion)) == before


def test_a_bridge_without_one_of_these_methods_is_named(conversion, caplog):
    del conversion.build_conversion_tasks
    chunk = layer()
    assert "Bridge cannot load or export packed experts, because it has no " in caplog.text
    assert "MegatronModelBridge.build_conversion_tasks; for that, set Padded" in caplog.text
    assert conversion()._megatron_global_adapters_info_all_pp_ranks(chunk) == SINGLE


def test_without_bridge_nothing_happens(monkeypatch):
    monkeypatch.delitem(sys.modules, bridge._CONVERSION, raising=False)
    show_single_experts()
    assert bridge._CONVERSION not in sys.modules
    # Bridge looks up the class's name in a table, and else reads an attribute of the module.
    made = layer()
    assert type(made.router).__name__ == "TopKRouter"
    assert made.experts.linear_fc1.tensor_model_parallel is False


def _how_ranks_split_experts() -> list[tuple[bool, int]]:
    sizes = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    with parity.megatron("cpu", **sizes):
        experts = layer(**sizes).experts
    linears = experts.linear_fc1, experts.linear_fc2
    return [(linear.tensor_model_parallel, linear.partition_dim) for linear in linears]


def test_bridge_finds_how_ranks_split_experts(pool2):
    assert pool2.run(_how_ranks_split_experts) == [[(True, 0), (True, 1)]] * 2


OPTIONS = PaddedOptions(capacity_pool="store", layer_factors={1: 1.5, 2: NO_DROP}, eval_factor=2.0)


def convert(cls: Any, value: Any) -> Any:
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: cls._convert_value_to_dict(getattr(value, name)) for name in names}
    return value


@pytest.fixture(params=_CONTAINERS, ids=lambda names: names[0])
def container(request, monkeypatch) -> Iterator[Any]:
    name, class_name = request.param
    made = type(class_name, (), {"_convert_value_to_dict": classmethod(convert)})
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**{class_name: made}))
    yield made
    uninstall()


def test_a_saved_config_has_the_options_and_an_installed_one_has_them_again(container):
    before = vars(container)["_convert_value_to_dict"]
    assert KEY not in container._convert_value_to_dict(tiny.config("allgather"))
    install(OPTIONS)
    made = tiny.config(num_layers=2)
    changed = vars(container)["_convert_value_to_dict"]
    saved = container._convert_value_to_dict(made)
    assert saved["moe_token_dispatcher_type"] == "padded_alltoall"
    assert PaddedOptions(**saved[KEY]) == OPTIONS
    # Nothing else has changed: a copy by its fields works, and a stock config has no such key.
    fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    assert saved.keys() - fields.keys() == {KEY}
    assert TransformerConfig(**fields).padded_dispatch == OPTIONS  # pyright: ignore
    assert KEY not in container._convert_value_to_dict(tiny.config("allgather"))
    # The class is changed once, and uninstall restores it.
    assert vars(container)["_convert_value_to_dict"] is changed is not before
    uninstall()
    assert vars(container)["_convert_value_to_dict"] is before
