"""Captured layers run eagerly inside the block, by either of Megatron's ways, and replay after."""

from typing import Any

import torch
from megatron.core.transformer.module import GraphableMegatronModule
from torch import nn

from padded_dispatch.megatron.retry import without_graphs
from tests.support import tiny


class Layer(GraphableMegatronModule):
    """A layer that adds 1; its graph adds 10."""

    def forward(self, hidden_states: Any) -> Any:
        return hidden_states + 1

    def create_mcore_cudagraph_manager(self, config: Any) -> None:
        self.cudagraph_manager = lambda layer, args, kwargs: args[0] + 10


def layer(impl: str) -> Layer:
    config = tiny.config("alltoall")
    config.cuda_graph_impl = impl
    return Layer(config)


def test_graphs_by_transformer_engine():
    graphed, bare = layer("transformer_engine"), layer("transformer_engine")
    graphed.cuda_graphs = graphs = [lambda hidden, **kwargs: hidden + 10]
    chunk = nn.Sequential(graphed, bare)
    zero = torch.zeros(())
    assert chunk(zero) == 11
    with without_graphs([nn.Linear(1, 1), chunk]):
        assert chunk(zero) == 2
    assert graphed.cuda_graphs is graphs and bare.cuda_graphs == []
    assert chunk(zero) == 11


def test_megatrons_local_graphs():
    chunk = nn.Sequential(layer("local"), layer("none"))
    zero = torch.zeros(())
    assert chunk(zero) == 11
    with without_graphs([chunk]):
        assert chunk(zero) == 2
    assert "_should_call_local_cudagraph" not in vars(chunk[0])
    assert chunk(zero) == 11
