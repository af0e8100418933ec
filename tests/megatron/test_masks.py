"""Padding masks and packed sequences over the stand-in for CUDA graphs: what is refused.

That replays follow masks and boundaries that change is for the rows of `tests.gpu.table`.
Transformer Engine's packed attention needs a GPU; a mask of blocks stands in for it.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from padded_dispatch.megatron import masks
from padded_dispatch.megatron.compat import iteration_graph, layer_graphs
from padded_dispatch.megatron.masks import check_packed
from tests.megatron.test_graphs import training_of, unreachable
from tests.support.graph_protocol import GraphedLayer
from tests.support.packed_sequences import packed
from tests.support.training import Training, layers_of


def demand(training: Training) -> list[int]:
    return [int(layer.token_dispatcher.counters.demand_E.sum()) for _, layer in training.moe]


class Layer:
    """As much of a layer as a mask needs before a capture."""

    def __init__(self, mlp: Any = None, **fields: Any) -> None:
        self.mlp, self.config = mlp, SimpleNamespace(**fields)


def test_a_step_without_a_mask_masks_nothing(megatron):
    training = training_of("attn", "moe", masked=True)
    training.step(0)
    training.capture()
    training.losses_of(1)
    before = demand(training)
    training.losses_of(1, padding_mask=None)
    whole = training.model.batch * training.model.seq * training.model.top_k
    assert [after - one for after, one in zip(demand(training), before, strict=True)] == [whole] * 2


def test_a_mask_after_a_capture_without_one_is_refused(megatron):
    training = training_of("attn", "moe")
    training.step(0)
    training.capture()
    with (
        patch.object(GraphedLayer, "replay_forward", unreachable),
        pytest.raises(ValueError, match=r"padding_mask must be None in a replay .*got \[2, 10\]"),
    ):
        training.losses_of(0, padding_mask=torch.zeros(2, 10, dtype=torch.bool))


def test_a_mask_of_another_shape_is_refused(megatron):
    training = training_of("moe", masked=True, graph="helper")
    training.losses_of(0, batch=3)
    with pytest.raises(ValueError, match=r"padding_mask.shape must be \[2, 10\] .*, got \[3, 10\]"):
        training.capture()
    training.losses_of(0)  # An eager step with the right one mends it.
    training.capture()
    with (
        pytest.raises(ValueError, match=r"padding_mask.shape must be \[2, 10\] .*, got \[1, 10\]"),
        masks.replayed(layers_of(training)[0], torch.zeros(1, 10, dtype=torch.bool)),
    ):
        pass


@pytest.mark.parametrize(
    "scopes", [("attn", "moe"), ("attn", "moe_router", "moe_preprocess"), ("attn",), ()], ids=str
)
def test_captured_attention_is_refused_in_the_first_step(megatron, scopes):
    training = training_of(*scopes, packed=True, batch=1)
    with pytest.raises(ValueError, match=r"^packed_seq_params must be None .*got 'thd'; set cuda"):
        training.step(0)
    training.chunks[0].eval()
    training.losses_of(0)  # Evaluation is eager.


def test_graphs_of_attention_and_samples_that_a_capture_would_mix_are_refused():
    local, none = {"cuda_graph_impl": "local"}, {"cuda_graph_impl": "none"}
    flattened = packed([3, 4])
    flattened.tokens_per_sample = 7
    for fields in (layer_graphs(), layer_graphs("attn"), layer_graphs() | local, iteration_graph()):
        check_packed(Layer(**fields), None)
        with pytest.raises(ValueError, match="packed_seq_params must be None where a CUDA graph"):
            check_packed(Layer(**fields), packed([3, 4]))
    for fields in (layer_graphs("moe"), layer_graphs("moe_router") | local):
        check_packed(Layer(**fields), packed([3, 4]))
        with pytest.raises(ValueError, match=r"params.tokens_per_sample must be .*got 7;"):
            check_packed(Layer(**fields), flattened)
    for fields in (layer_graphs("mlp"), none):
        check_packed(Layer(**fields), flattened)


@pytest.mark.skipif(
    not hasattr(PackedSeqParams, "tokens_per_sample"), reason="new in Megatron-Core 0.19"
)
def test_flattened_samples_are_routed_alike(megatron):
    """Megatron rearranges tokens and mask for the MoE part, and its output back."""
    training = training_of(graph="none", factor=None, dtype=torch.float32)
    mask_BS = torch.tensor([[False, True, False, False, False, True]])
    rows = []
    for length in (None, 3):
        params = packed([3, 3])
        params.tokens_per_sample = length
        given = {"packed_seq_params": params, "padding_mask": mask_BS}
        rows.append(training.losses_of(0, batch=1, seq=6, **given))
    assert demand(training) == [2 * 4 * training.model.top_k] * 2
    torch.testing.assert_close(*rows)
