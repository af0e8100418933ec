"""The script behind the page of Bridge's recipes; Bridge itself is not needed."""

from typing import Any

import pytest

from padded_dispatch.megatron import install, uninstall
from padded_dispatch.megatron.compat import layer_graphs
from tests import bridge_recipes
from tests.bridge_recipes import check
from tests.support import tiny


class Model:
    """A config as a recipe has it, before Megatron's checks."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(vars(tiny.config("alltoall")), bf16=True, **fields)

    def finalize(self) -> None:
        made = tiny.config(**{k: v for k, v in vars(self).items() if k in self.asked})
        vars(self).update(vars(made))

    asked = "fp8", "variable_seq_lengths", "moe_enable_deepep", "moe_expert_capacity_factor"


@pytest.fixture
def outcome_of(monkeypatch, request) -> Any:
    monkeypatch.setattr(bridge_recipes, "_prepared", lambda config: config)
    request.addfinalizer(uninstall)
    with tiny.one_process():
        install()
        yield lambda name, recipe: check("library", name, recipe)


def test_a_recipe_is_accepted_noted_or_refused(outcome_of):
    plain = outcome_of("glm_config", Model)
    assert (plain.state, plain.notes, plain.refusals) == ("accepted", (), ())
    assert plain.precision == "bf16"
    noted = outcome_of("glm_config", lambda: Model(moe_enable_deepep=True))
    assert noted.state == "accepted, noted"
    assert [line.partition("=")[0] for line in noted.notes] == ["moe_enable_deepep"]
    refused = outcome_of("glm_config", lambda: Model(variable_seq_lengths=True))
    assert refused.state == "refused" and refused.refusals[0].startswith(
        "variable_seq_lengths=True"
    )


def test_where_megatron_wants_other_sizes_our_checks_still_run(outcome_of):
    class Odd(Model):
        def finalize(self) -> None:
            raise AssertionError("num_layers must be divisible")

    assert outcome_of("glm_config", Odd).state == "accepted"
    (name,) = [name for name in layer_graphs() if name != "cuda_graph_impl"]
    for scopes, state in (("attn,moe_router", "accepted"), ("full", "refused")):
        fields = {"cuda_graph_impl": "transformer_engine", name: scopes, "quant_recipe": "own"}
        assert outcome_of("glm_config", lambda fields=fields: Odd(**fields)).state == state
