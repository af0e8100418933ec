"""The configs of a layer follow its router's mode and captures."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import cuda_graphs

from padded_dispatch.config import FIT, NO_DROP
from padded_dispatch.megatron.compat import iteration_graph
from padded_dispatch.megatron.config import check_config
from padded_dispatch.megatron.layer_configs import LayerConfigs, settings_of
from tests.support import tiny


def layer_configs(number: int, **given: Any) -> LayerConfigs:
    config = tiny.config(num_moe_experts=6, moe_expert_capacity_factor=1.5, **given)
    configs = LayerConfigs(config, capacity_pool="store", num_ranks=3, etp_size=1)
    configs.router = SimpleNamespace(training=True)
    configs.find_factors(number)
    return configs


# By `eval_factor`: of evaluation, eager and in a capture; of text generation, likewise.
FACTORS = {
    None: (FIT, 1.5, FIT, NO_DROP),
    FIT: (FIT, FIT, FIT, NO_DROP),
    NO_DROP: (NO_DROP, NO_DROP, NO_DROP, NO_DROP),
    2.0: (2.0, 2.0, 2.0, 2.0),
}


@pytest.mark.parametrize("capture", ["_IS_GRAPH_CAPTURING", "_IS_GRAPH_WARMUP"])
@pytest.mark.parametrize("eval_factor", FACTORS, ids=str)
def test_factors_follow_mode_capture_and_text_generation(monkeypatch, eval_factor, capture):
    """Text is generated with a context, or in torch's inference mode, as in Megatron's engines."""
    options = {"eval_factor": eval_factor, "layer_factors": {4: 3.0}}
    other, configs = (layer_configs(number, **options) for number in (4, 3))
    assert (other.current.capacity_factor, configs.current.capacity_factor) == (3.0, 1.5)
    assert (configs.current.num_ranks, configs.current.capacity_pool) == (3, "store")
    configs.router.training = False
    found = []
    for generates, captures in itertools.product((False, True), (False, True)):
        monkeypatch.setattr(cuda_graphs, capture, captures)
        configs.has_context = generates
        found.append(configs.current.capacity_factor)
        configs.has_context = False
        with torch.inference_mode(generates):
            assert configs.current.capacity_factor == found[-1]
    assert tuple(found) == FACTORS[eval_factor]


@pytest.mark.parametrize(
    ("pattern", "with_experts"),
    [(1, {1, 2, 3, 4, 5}), (2, {1, 3}), (3, {1, 4, 5}), ([0, 1, 1, 0], {2, 3})],
    ids=str,
)
def test_factors_of_layers_without_experts_are_refused(pattern, with_experts):
    """Multi-token prediction, layer 5, is like the last of the 4 layers."""
    for number in range(1, 7):
        given = {"moe_layer_freq": pattern, "layer_factors": {number: 2.0}}
        config = tiny.config("allgather", num_layers=4, mtp_num_layers=1, **given)
        refused = pytest.raises(ValueError, match=rf"^layer_factors .*; leave out layer {number}$")
        with nullcontext() if number in with_experts else refused:
            check_config(config)


def test_evaluation_that_a_graph_of_iterations_captures_is_as_training():
    for eval_factor, evaluation in ((None, 3.0), (FIT, FIT)):
        options = {"eval_factor": eval_factor, "layer_factors": {1: 3.0}}
        configs = layer_configs(1, **options, **iteration_graph())
        configs.router.training = False
        assert configs.current.capacity_factor == evaluation
        with torch.inference_mode():
            assert configs.current.capacity_factor == FIT


def test_equal_recipes_of_matchers_without_a_text_are_equal():
    made = []
    for name in ("fc1", "fc1", "fc2"):
        (matcher := type("Matcher", (), {})()).name = name
        made.append(SimpleNamespace(configs={}, matchers=[matcher]))
    first, same, other = (
        settings_of(tiny.config(later={"quant_recipe": recipe})) for recipe in made
    )
    assert first == same != other
