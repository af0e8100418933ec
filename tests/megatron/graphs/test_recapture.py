"""After a change of a factor, graphs that Megatron captured by itself are captured again."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
from megatron.core.transformer.cuda_graphs import CudaGraphManager, _CudagraphGlobalRecord
from torch import nn

from padded_dispatch.megatron.compat import iteration_graph
from padded_dispatch.megatron.graphs.recapture import recapture
from tests.megatron.graphs.test_capture import SEQUENCE, Results, Training, differences, no_python
from tests.support import tiny

WHOLE = ("attn", "moe")


def grow(training: Training, factor: float) -> None:
    for layer in training.moe_layers:
        layer.token_dispatcher.configs.set_factor(factor)


def four_steps(scope: tuple[str, ...] | None) -> list[Results]:
    """Train with factor 1, then with 2; capture before the second step and after the change."""
    training = Training(scope, moe_expert_capacity_factor=1.0)
    steps = [training.step(0)]
    if scope is not None:
        training.capture()
    steps.append(training.step(1))
    grow(training, 2.0)
    if scope is None:
        return [*steps, training.step(2), training.step(3)]
    with pytest.raises(ValueError, match="a captured CUDA graph would ignore the change"):
        training.forward(2, SEQUENCE, seed=9)
    helper = training.helper
    recapture([training.model])
    assert training.helper is helper and helper.graphs_created()
    with no_python(training, scope):
        steps += [training.step(2), training.step(3)]
    helper.delete_cuda_graphs()  # As Megatron-LM does at the end of training.
    return steps


def test_megatrons_helper_captures_again_and_replays_the_new_factor(megatron):
    eager, graphed = four_steps(None), four_steps(WHOLE)
    assert differences(eager, graphed) == []
    slots = [int(step["num_slots of layer 0"]) for step in graphed]
    assert slots[2] == slots[3] == 2 * slots[0] == 2 * slots[1]


def test_nothing_is_captured_early(megatron):
    training = Training(WHOLE)
    recapture([training.model])
    assert [layer.cuda_graphs for layer in layers(training)] == [[], []]


def layers(training: Training) -> list[Any]:
    return list(training.model.module.module.decoder.layers)


def chunk(config: Any, *modules: nn.Module) -> Any:
    made: Any = nn.Sequential(*modules)
    made.config = config
    return made


def test_graphs_of_iterations_start_again_for_evaluation_too(megatron):
    stages = ("training", "validation")
    for stage in stages:
        FullCudaGraphWrapper.cuda_graph[stage] = "a graph"
        FullCudaGraphWrapper.result[stage] = "results"
        FullCudaGraphWrapper.curr_iteration[stage] = 7
        StaticBufferLoader.static_buffers[stage] = ["a batch"]
    recapture([chunk(tiny.config(**iteration_graph()))])
    for stage in stages:
        assert FullCudaGraphWrapper.cuda_graph[stage] is FullCudaGraphWrapper.result[stage] is None
        assert FullCudaGraphWrapper.curr_iteration[stage] == 0
        assert StaticBufferLoader.static_buffers[stage] == []


class Manager(CudaGraphManager):
    """A manager that has captured; Megatron's own can only be made on a GPU."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.cudagraph_runners = ["a runner"]


@pytest.mark.parametrize("created", [True, False])
def test_the_next_step_records_local_graphs_again(megatron, monkeypatch, created):
    manager, streams = Manager(), []
    monkeypatch.setattr(_CudagraphGlobalRecord, "cudagraph_created", created)
    monkeypatch.setattr(CudaGraphManager, "global_mempool", "an old pool")
    on_gpu = {"graph_pool_handle": lambda: "a pool", "set_stream": streams.append}
    config = tiny.config(cuda_graph_impl="local")
    lasting: Any = torch.ones(1)  # As rotary embeddings, an input of all layers and steps.
    lasting.cg_buffer_metadata = "two uses"
    with patch.multiple(torch.cuda, **on_gpu), patch.object(torch.cuda, "empty_cache"):
        recapture([chunk(config, manager)])
    assert not _CudagraphGlobalRecord.cudagraph_created
    assert hasattr(lasting, "cg_buffer_metadata") is not created
    assert manager.cudagraph_runners == ([] if created else ["a runner"])
    # A capture must not follow work on the default stream.
    assert len(streams) == int(created)
    assert CudaGraphManager.global_mempool == ("a pool" if created else "an old pool")
