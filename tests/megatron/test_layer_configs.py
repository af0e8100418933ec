"""The configs of a layer follow its router's mode and captures."""

from types import SimpleNamespace

import pytest
from megatron.core.transformer import cuda_graphs

from padded_dispatch.config import FIT, NO_DROP
from padded_dispatch.megatron.compat import iteration_graph
from padded_dispatch.megatron.layer_configs import LayerConfigs
from padded_dispatch.megatron.options import PaddedOptions
from tests.support import tiny


@pytest.mark.parametrize(
    ("eval_factor", "evaluation"), [(None, FIT), (NO_DROP, NO_DROP), (2.0, 2.0)]
)
def test_configs_follow_the_mode_of_their_router(eval_factor, evaluation):
    config = tiny.config(num_moe_experts=6, moe_expert_capacity_factor=1.5)
    options = PaddedOptions(eval_factor=eval_factor, layer_factors={4: 2.0})
    configs = LayerConfigs(config, options, num_ranks=3, etp_size=1)
    assert configs.now.capacity_factor == 1.5
    router = SimpleNamespace(training=True, layer_number=4, is_mtp_layer=False)
    configs.follow(router)
    assert configs.now.capacity_factor == 2.0
    assert configs.now.num_ranks == 3
    router.training = False
    assert configs.now.capacity_factor == evaluation


def test_evaluation_that_a_graph_captures_is_as_training():
    config = tiny.config(num_moe_experts=6, moe_expert_capacity_factor=1.5, **iteration_graph())
    router = SimpleNamespace(training=False, layer_number=1, is_mtp_layer=False)
    factors = []
    for eval_factor in (None, FIT):
        options = PaddedOptions(eval_factor=eval_factor, layer_factors={1: 3.0})
        configs = LayerConfigs(config, options, num_ranks=3, etp_size=1)
        configs.follow(router)
        factors.append(configs.now.capacity_factor)
    assert factors == [3.0, FIT]


def test_evaluation_in_a_capture_is_as_training_and_text_generation_drops_nothing(monkeypatch):
    config = tiny.config(num_moe_experts=6, moe_expert_capacity_factor=1.5)
    router = SimpleNamespace(training=False, layer_number=1, is_mtp_layer=False)
    factors = []
    for eval_factor in (None, FIT):
        options = PaddedOptions(eval_factor=eval_factor)
        configs = LayerConfigs(config, options, num_ranks=3, etp_size=1)
        configs.follow(router)
        for mode in ("_IS_GRAPH_CAPTURING", "_IS_GRAPH_WARMUP"):
            for configs.given_context in (False, True):
                with monkeypatch.context() as patch:
                    patch.setattr(cuda_graphs, mode, True)
                    factors.append(configs.now.capacity_factor)
                assert configs.now.capacity_factor == FIT
    assert factors == [*[1.5, NO_DROP] * 2, *[FIT, NO_DROP] * 2]


def test_layers_of_multi_token_prediction_follow_the_others():
    """From 0.17 on Megatron numbers them from 1 again."""
    config = tiny.config(num_moe_experts=6, moe_expert_capacity_factor=1.5, num_layers=3)
    options = PaddedOptions(layer_factors={1: 2.0, 4: 3.0})
    configs = LayerConfigs(config, options, num_ranks=3, etp_size=1)
    factors = []
    for is_mtp_layer in (False, True):
        configs.follow(
            SimpleNamespace(training=True, layer_number=1, is_mtp_layer=is_mtp_layer, config=config)
        )
        factors.append(configs.now.capacity_factor)
    assert factors == [2.0, 3.0]
