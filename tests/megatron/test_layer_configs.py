"""The configs of a layer follow its router's mode and captures."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import cuda_graphs

from padded_dispatch.config import FIT, NO_DROP
from padded_dispatch.megatron.compat import iteration_graph
from padded_dispatch.megatron.layer_configs import LayerConfigs
from padded_dispatch.megatron.options import PaddedOptions
from tests.support import tiny


def layer_configs(config: Any, *, training: bool, number: int = 1, **options: Any) -> LayerConfigs:
    given = {"capacity_pool": "store", "num_ranks": 3, "etp_size": 1}
    config.padded_dispatch = PaddedOptions(**options)
    configs = LayerConfigs(config, **given)
    configs.router = SimpleNamespace(training=training)
    configs.find_factors(number)
    return configs


@pytest.mark.parametrize(
    ("eval_factor", "evaluation"), [(None, FIT), (NO_DROP, NO_DROP), (2.0, 2.0)]
)
def test_configs_follow_the_mode_of_their_router(eval_factor, evaluation):
    config = tiny.config(num_moe_experts=6, moe_expert_capacity_factor=1.5)
    options = {"eval_factor": eval_factor, "layer_factors": {4: 2.0}}
    for number, factor in ((3, 1.5), (4, 2.0)):
        configs = layer_configs(config, training=True, number=number, **options)
        assert configs.now.capacity_factor == factor
        assert (configs.now.num_ranks, configs.now.capacity_pool) == (3, "store")
        configs.router = SimpleNamespace(training=False)
        assert configs.now.capacity_factor == evaluation


def test_evaluation_that_a_graph_captures_is_as_training():
    config = tiny.config(num_moe_experts=6, moe_expert_capacity_factor=1.5, **iteration_graph())
    factors = {}
    for eval_factor in (None, FIT):
        options = {"eval_factor": eval_factor, "layer_factors": {1: 3.0}}
        configs = layer_configs(config, training=False, **options)
        factors[eval_factor] = configs.now.capacity_factor
    assert factors == {None: 3.0, FIT: FIT}


def test_evaluation_in_a_capture_is_as_training_and_text_generation_drops_nothing(monkeypatch):
    config = tiny.config(num_moe_experts=6, moe_expert_capacity_factor=1.5)
    factors = []
    for eval_factor in (None, FIT):
        configs = layer_configs(config, training=False, eval_factor=eval_factor)
        for mode in ("_IS_GRAPH_CAPTURING", "_IS_GRAPH_WARMUP"):
            for configs.given_context in (False, True):
                with monkeypatch.context() as patch:
                    patch.setattr(cuda_graphs, mode, True)
                    factors.append(configs.now.capacity_factor)
                assert configs.now.capacity_factor == FIT
    assert factors == [*[1.5, NO_DROP] * 2, *[FIT, NO_DROP] * 2]


@pytest.mark.parametrize("fields", [{}, iteration_graph()], ids=["no graph", "full iterations"])
def test_factors_in_text_generation(monkeypatch, fields):
    """In torch's inference mode, as in Megatron's engines; C = T where a pass is captured."""
    config, factors = tiny.config(num_moe_experts=6, moe_expert_capacity_factor=0.5, **fields), {}
    for option in (None, FIT, 2.0):
        configs, factors[option] = layer_configs(config, training=False, eval_factor=option), []
        for flag in (False, True):
            monkeypatch.setattr(cuda_graphs, "_IS_GRAPH_WARMUP", flag)
            with torch.inference_mode():
                factors[option].append(configs.now.capacity_factor)
    assert factors == {None: [FIT, NO_DROP], FIT: [FIT, NO_DROP], 2.0: [2.0, 2.0]}
