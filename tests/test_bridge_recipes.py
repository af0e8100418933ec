"""The script behind the page of Bridge's recipes; Bridge itself is not needed."""

from types import SimpleNamespace
from typing import Any

import pytest

from padded_dispatch.megatron import install, uninstall
from padded_dispatch.megatron.compat import layer_graphs
from tests import bridge_recipes
from tests.bridge_recipes import Outcome, check, summary
from tests.support import tiny

NOTED = Outcome(
    kind="library",
    name="qwen_sft_8gpu_config",
    precision="fp8, mxfp8",
    notes=("moe_deepep_num_sms=3: SMs",),
)
REFUSED = Outcome(
    kind="performance", name="qwen_pretrain_config", refusals=("fp8='x': untested. Remedy: none.",)
)
BROKEN = Outcome(kind="library", name="glm_peft_config", error="OSError: offline")
PLAIN = Outcome(kind="library", name="qwen_pretrain_config")


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


def test_the_precision_of_a_recipe():
    for fields, precision in (
        ({"fp8": None}, "bf16"),
        ({"fp8": "e4m3", "fp8_recipe": SimpleNamespace(value="mxfp8")}, "fp8, mxfp8"),
        ({"fp4": "e2m1", "fp4_recipe": "nvfp4", "quant_recipe": 1}, "fp4, nvfp4, `quant_recipe`"),
    ):
        assert bridge_recipes._precision(SimpleNamespace(**fields)) == precision


def test_a_recipe_without_experts_is_left_out(outcome_of):
    assert outcome_of("llama3_8b_config", Model) is None
    assert outcome_of("some_config", lambda: Model(expert_model_parallel_size=2)) is not None
    for error in (OSError("offline\nmore"), NotImplementedError()):

        def recipe(error: Exception = error) -> Any:
            raise error

        assert outcome_of("llama3_8b_config", recipe) is None
        found = outcome_of("glm_config", recipe)
        assert found is None or found.error == "OSError: offline"
        assert (found is None) == isinstance(error, NotImplementedError)


def test_where_megatron_wants_other_sizes_our_checks_still_run(outcome_of):
    class Odd(Model):
        def finalize(self) -> None:
            raise AssertionError("num_layers must be divisible")

    assert outcome_of("glm_config", Odd).state == "accepted"
    (name,) = [name for name in layer_graphs() if name != "cuda_graph_impl"]
    for scopes, state in (("attn,moe_router", "accepted"), ("full", "refused")):
        fields = {"cuda_graph_impl": "transformer_engine", name: scopes, "quant_recipe": "own"}
        assert outcome_of("glm_config", lambda fields=fields: Odd(**fields)).state == state


def test_the_summary_counts_and_names():
    assert summary([NOTED, REFUSED, BROKEN, PLAIN]).splitlines() == [
        "library: 3 in all: 1 accepted, 1 accepted, noted, 0 refused, 1 not built",
        "performance: 1 in all: 0 accepted, 0 accepted, noted, 1 refused, 0 not built",
        "fp8, mxfp8: 1 in all: 0 accepted, 1 accepted, noted, 0 refused, 0 not built",
        "unknown: 3 in all: 1 accepted, 0 accepted, noted, 1 refused, 1 not built",
        "qwen_pretrain_config: fp8='x': untested. Remedy: none.",
        "glm_peft_config: OSError: offline",
        "1 note moe_deepep_num_sms",
    ]


def test_names_of_models_with_experts():
    for name in ("qwen3_30b_a3b_sft_config", "nemotron_3_nano_sft_config", "olmoe_7b_config"):
        assert bridge_recipes.MOE_MODELS.search(name)
    for name in ("llama3_8b_config", "qwen3_8b_pretrain_config", "gemma2_2b_sft_config"):
        assert not bridge_recipes.MOE_MODELS.search(name)
