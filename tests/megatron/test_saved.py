"""Saved run configs hold the options: of a stand-in for the classes that save, and of Bridge's."""

import copy
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from padded_dispatch.config import FIT, NO_DROP
from padded_dispatch.megatron import PaddedOptions, install, uninstall
from padded_dispatch.megatron.bridge import _CONTAINERS, KEY
from padded_dispatch.megatron.options import to_plain
from tests.megatron.test_bridge import needs_bridge
from tests.support.processes import ENVIRONMENT

OPTIONS = PaddedOptions(
    capacity_pool="rank",
    layer_factors={1: 1.5, 2: NO_DROP},
    schedule=((0, FIT), (200, 1.25)),
    eval_factor=2.0,
)
PLAIN = (str, int, float, bool, type(None))


def config(dispatcher: str = "padded_alltoall") -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=1,
        num_moe_experts=2,
        moe_router_topk=2,
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type=dispatcher,  # pyright: ignore[reportArgumentType]
    )


class Container:
    """Converts as the classes of Megatron-Bridge and Megatron-LM do."""

    @classmethod
    def _convert_value_to_dict(cls, value: Any) -> Any:
        if hasattr(value, "as_dict"):
            return value.as_dict()
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            return {name: cls._convert_value_to_dict(getattr(value, name)) for name in names}
        return value


@dataclass
class Model:
    """A model's config that holds Megatron's and converts it by itself."""

    transformer: TransformerConfig

    def as_dict(self) -> dict[str, Any]:
        return {"transformer": dict(vars(self.transformer))}


@pytest.fixture(params=_CONTAINERS, ids=lambda names: names[0])
def container(request, monkeypatch) -> Iterator[Any]:
    name, class_name = request.param
    module: Any = ModuleType(name)
    made = type(
        class_name, (), {"_convert_value_to_dict": vars(Container)["_convert_value_to_dict"]}
    )
    setattr(module, class_name, made)
    monkeypatch.setitem(sys.modules, name, module)
    yield made
    uninstall()


def is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, PLAIN) and is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return type(value) in PLAIN


@pytest.mark.parametrize("options", [PaddedOptions(), OPTIONS])
def test_plain_values_are_read_back(options):
    plain = to_plain(options)
    assert is_plain(plain)
    assert PaddedOptions(**copy.deepcopy(plain)) == options


def test_a_saved_config_has_the_options_and_an_installed_one_has_them_again(container):
    assert KEY not in container._convert_value_to_dict(config("allgather"))
    install(OPTIONS)
    made = config()
    saved = container._convert_value_to_dict(made)
    assert saved["moe_token_dispatcher_type"] == "padded_alltoall"
    assert PaddedOptions(**saved[KEY]) == OPTIONS
    # Nothing else has changed: a copy by its fields works, and a stock config has no such key.
    fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    assert saved.keys() - fields.keys() == {KEY}
    assert TransformerConfig(**fields).padded_dispatch == OPTIONS  # pyright: ignore
    assert KEY not in container._convert_value_to_dict(config("allgather"))


def test_a_config_inside_that_of_a_model(container):
    install(OPTIONS)
    model = Model(config())
    saved = container._convert_value_to_dict(model)
    assert PaddedOptions(**saved["transformer"][KEY]) == OPTIONS
    assert KEY not in saved
    stock = container._convert_value_to_dict(Model(config("allgather")))
    assert KEY not in stock["transformer"]


def test_the_class_is_changed_once_and_uninstall_restores_it(container):
    before = vars(container)["_convert_value_to_dict"]
    install(OPTIONS)
    config()
    changed = vars(container)["_convert_value_to_dict"]
    config()
    assert vars(container)["_convert_value_to_dict"] is changed is not before
    uninstall()
    assert vars(container)["_convert_value_to_dict"] is before


BRIDGE = """
import sys, types
from dataclasses import dataclass
import yaml
from padded_dispatch.config import FIT, NO_DROP
from padded_dispatch.megatron import PaddedOptions, install, megatron_on_cpu
from tests.support.bridge_model import StandIns

sys.meta_path.append(StandIns("transformer_engine", "transformer_engine_torch"))
options = {options!r}
with megatron_on_cpu():
    install(options)
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training.utils.config_utils import _ConfigContainerBase

    @dataclass(kw_only=True)
    class Run(_ConfigContainerBase):
        model: GPTModelProvider

    # Bridge loads classes of some packages only.
    Run.__module__ = "megatron.core.run"
    sys.modules["megatron.core.run"] = types.SimpleNamespace(Run=Run)
    model = GPTModelProvider(
        num_layers=2, hidden_size=8, num_attention_heads=1, num_moe_experts=2, moe_router_topk=2,
        moe_aux_loss_coeff=0.0, moe_token_dispatcher_type="padded_alltoall", vocab_size=32,
    )
    model.finalize()
    Run(model=model).to_yaml("run_config.yaml")
    with open("run_config.yaml") as file:
        saved = yaml.safe_load(file)
    assert PaddedOptions(**saved["model"]["padded_options"]) == options
    loaded = Run.from_yaml("run_config.yaml").model
    assert loaded.moe_token_dispatcher_type == "padded_alltoall"
"""


def test_bridge_saves_the_options_and_loads_what_it_saved(tmp_path):
    needs_bridge()
    script = BRIDGE.format(options=OPTIONS).replace("inf", "NO_DROP")
    folder = str(Path(__file__).parents[2])
    path = os.pathsep.join([ENVIRONMENT.get("PYTHONPATH", ""), folder])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=tmp_path,
        env=ENVIRONMENT | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
