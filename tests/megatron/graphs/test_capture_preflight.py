"""Settings of a plain loop that CUDA graphs cannot work with are named before a capture."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from padded_dispatch.megatron.graphs import capture
from padded_dispatch.megatron.graphs.capture import (
    IterationGraph,
    LayerGraphs,
    check_gradients_are_not_read,
    check_random_states,
)
from tests.megatron.graphs.test_capture import Training
from tests.megatron.graphs.test_capture_helper import iteration_of


def test_states_in_host_memory_are_refused_on_a_gpu(megatron):
    check_random_states(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"te_rng_tracker must be True .*, got False; call model"):
        check_random_states(torch.device("cuda"))


def test_generators_are_accepted_on_a_gpu(megatron, monkeypatch):
    generators = {"model-parallel-rng": torch.Generator()}
    monkeypatch.setattr(get_cuda_rng_tracker(), "get_states", lambda: generators)
    check_random_states(torch.device("cuda"))


@pytest.mark.parametrize("name", ["check_for_nan_in_grad", "check_for_large_grads"])
def test_gradients_that_are_read_are_refused_by_name(name):
    settings = {"check_for_nan_in_grad": False, "check_for_large_grads": False}
    quiet = SimpleNamespace(ddp_config=SimpleNamespace(**settings))
    reads = SimpleNamespace(ddp_config=SimpleNamespace(**settings | {name: True}))
    check_gradients_are_not_read([quiet])
    with pytest.raises(ValueError, match=f"{name} must be False .*, got True; set it to False"):
        check_gradients_are_not_read([quiet, reads])


def test_one_graph_of_a_step_rejects_them_in_its_first_call(megatron):
    training = Training(None)
    training.config.cuda_graph_warmup_steps = 100
    training.model.ddp_config.check_for_nan_in_grad = True
    with pytest.raises(ValueError, match=r"check_for_nan_in_grad must .*, got True"):
        IterationGraph(training.config)(**iteration_of(training))
    # Graphs of layers allow it, because the host reads gradients between steps.
    training = Training(("moe",))
    training.model.ddp_config.check_for_nan_in_grad = True
    LayerGraphs([training.model], seq_length=7, micro_batch=2)


def test_both_kinds_of_graphs_check_random_states(megatron, monkeypatch):
    def reject(device: torch.device) -> None:
        raise ValueError(f"checked {device}")

    monkeypatch.setattr(capture, "check_random_states", reject)
    layers, iteration = Training(("moe",)), Training(None)
    with pytest.raises(ValueError, match="checked cpu"):
        LayerGraphs([layers.model], seq_length=7, micro_batch=2)
    with pytest.raises(ValueError, match="checked cpu"):
        IterationGraph(iteration.config)(**iteration_of(iteration))
