"""Routers get the padding mask in Megatron's combined schedule, too."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from padded_dispatch.megatron.combined_schedule import with_masks
from padded_dispatch.megatron.compat import layer_graphs
from tests.support import tiny
from tests.support.overlapped_training import OverlapCase, overlapped_equals_plain

PADDED = OverlapCase(name="padded", padded=True, factor=0.5, expert_bias=True)
MASK_BS = torch.tensor([[False, False, True], [False, True, True]])


def test_bits_are_those_of_the_plain_schedule_with_the_same_mask(pool2):
    found = pool2.run(overlapped_equals_plain, PADDED)
    assert [findings.failures() for findings in found] == [[], []]


def node_of(layer: Any, mask_BS: Any) -> Any:
    """Return the first piece of a layer, which routes its input."""
    node = SimpleNamespace(
        chunk_state=SimpleNamespace(padding_mask=mask_BS),
        submodule=lambda node, hidden: layer.mlp.route(hidden),
    )
    plan = SimpleNamespace(layer=layer)
    with_masks(lambda plan: vars(plan).update(attn=node))(plan)
    return node


def layer_of(moe: Any, **fields: Any) -> Any:
    return SimpleNamespace(mlp=moe, config=moe.config, **fields)


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


@pytest.mark.usefixtures("one_process")
def test_a_captured_router_raises_since_it_would_ignore_the_mask():
    moe, hidden = tiny.padded_layer(), torch.randn(3, 2, tiny.HIDDEN)
    for scopes in (("attn",), ("attn", "moe_router")):
        config = SimpleNamespace(**layer_graphs(*scopes))
        layer = SimpleNamespace(mlp=moe, config=config, cuda_graphs=[object()])
        node = node_of(layer, MASK_BS)
        if scopes == ("attn",):
            assert torch.equal(node.submodule(node, hidden)[1].any(1), ~MASK_BS.T.flatten())
            continue
        with pytest.raises(ValueError, match="padding_mask must be None in a replay, got a mask"):
            node.submodule(node, hidden)
        assert "route" not in vars(moe)


def test_layers_of_others_are_left_alone():
    layer = SimpleNamespace(mlp=torch.nn.Linear(2, 2))
    node = node_of(layer, None)
    assert node.submodule.__name__ == "<lambda>"
