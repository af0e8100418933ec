"""Routers get the padding mask in Megatron's combined schedule, too."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from padded_dispatch.megatron.compat import layer_graphs
from padded_dispatch.megatron.schedule import adapted
from tests.support import tiny
from tests.support.overlapped_training import OverlapCase, overlapped_equals_plain
from tests.support.packed_sequences import packed

PADDED = OverlapCase(name="padded", padded=True, factor=0.5, expert_bias=True)
MASK_BS = torch.tensor([[False, False, True], [False, True, True]])


@pytest.mark.parametrize("scopes", [(), ("attn", "moe_router", "moe_preprocess")], ids=str)
def test_bits_are_those_of_the_plain_schedule_with_the_same_mask(pool2, scopes):
    """Two steps are eager, two replay graphs; each microbatch has a mask of its own."""
    case = dataclasses.replace(PADDED, scopes=scopes, steps=4 if scopes else 2)
    found = pool2.run(overlapped_equals_plain, case)
    assert [findings.failures() for findings in found] == [[], []]
    # A layer has a graph for each microbatch.
    graphs = case.num_layers * case.microbatches if scopes else 0
    assert [findings.facts["graphs"] for findings in found] == [graphs, graphs]


def route(layer: Any, hidden: Tensor) -> Any:
    return layer.mlp.route(hidden)


def node_of(layer: Any, mask_BS: Any, run: Any = route, packed: Any = None) -> Any:
    """Return the first piece of a layer, which routes its input, or runs something else."""
    node = SimpleNamespace(
        chunk_state=SimpleNamespace(padding_mask=mask_BS, packed_seq_params=packed),
        submodule=lambda node, hidden: run(layer, hidden),
    )
    plan = SimpleNamespace(layer=layer)
    adapted(lambda plan: vars(plan).update(attn=node))(plan)
    return node


class Layer:
    """A layer for the schedule."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def layer_of(moe: Any, **fields: Any) -> Any:
    return Layer(mlp=moe, config=moe.config, **fields)


@pytest.mark.usefixtures("one_process")
def test_the_mask_reaches_the_router_and_stays_out_of_other_calls():
    moe, hidden = tiny.padded_layer(), torch.randn(3, 2, tiny.HIDDEN)
    node = node_of(layer_of(moe), MASK_BS)
    probs, kept = node.submodule(node, hidden)
    expected = moe.route(hidden, padding_mask=MASK_BS.T)
    assert torch.equal(probs, expected[0]) and torch.equal(kept, expected[1])
    assert torch.equal(kept.any(1), ~MASK_BS.T.flatten())
    assert moe.route(hidden)[1].any(1).all()
    node = node_of(layer_of(moe), None)
    assert node.submodule(node, hidden)[1].any(1).all()

    def bridge(layer: Any, hidden: Tensor) -> Any:
        return layer.mlp.route(hidden, MASK_BS)

    node = node_of(layer_of(moe), MASK_BS, bridge)
    assert torch.equal(node.submodule(node, hidden)[1], kept)


@pytest.mark.usefixtures("one_process")
def test_a_replay_gets_the_mask():
    moe, hidden = tiny.padded_layer(), torch.randn(3, 2, tiny.HIDDEN)

    def replay(hidden_states: Tensor, padding_mask: Tensor | None) -> Any:
        return hidden_states, padding_mask

    def run(layer: Any, hidden: Tensor) -> Any:
        return layer._te_cuda_graph_replay(hidden_states=hidden)

    config = SimpleNamespace(**layer_graphs("attn", "moe_router"))
    layer = Layer(mlp=moe, config=config, cuda_graphs=[object()], _te_cuda_graph_replay=replay)
    for mask_BS in (MASK_BS, None):
        node = node_of(layer, mask_BS, run)
        assert node.submodule(node, hidden) == (hidden, mask_BS)
    assert layer._te_cuda_graph_replay is replay and "route" not in vars(moe)


@pytest.mark.usefixtures("one_process")
def test_packed_sequences_with_captured_attention_are_refused():
    moe, hidden = tiny.padded_layer(), torch.randn(3, 2, tiny.HIDDEN)
    for scopes in (("attn",), ("moe_router",)):
        config = SimpleNamespace(**layer_graphs(*scopes))
        node = node_of(Layer(mlp=moe, config=config), MASK_BS, packed=packed([2, 1]))
        if scopes == ("moe_router",):
            assert torch.equal(node.submodule(node, hidden)[1].any(1), ~MASK_BS.T.flatten())
            continue
        with pytest.raises(ValueError, match="packed_seq_params must be None where a CUDA graph"):
            node.submodule(node, hidden)


def test_layers_of_others_are_left_alone():
    layer = SimpleNamespace(mlp=torch.nn.Linear(2, 2))
    node = node_of(layer, None)
    assert node.submodule.__name__ == "<lambda>"
