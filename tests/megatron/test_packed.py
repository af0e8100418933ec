"""Packed sequences of one length in all: eager, and behind graphs that hold no attention.

Transformer Engine's packed attention needs a GPU; a mask of blocks stands in for it.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from padded_dispatch.megatron import PaddedOptions, install
from padded_dispatch.megatron.compat import iteration_graph, layer_graphs
from padded_dispatch.megatron.graphs import LayerGraphs
from padded_dispatch.megatron.schedule import check_packed
from tests.megatron.graphs.test_capture import (
    PARTIAL,
    SEQUENCE,
    Scope,
    Training,
    differences,
    graphs,
    no_python,
)
from tests.support import tiny
from tests.support.packed_sequences import packed, packed_attention

EAGER_ATTENTION = [("moe",), *PARTIAL[:2]]


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    with tiny.one_process(), graphs(), packed_attention():
        yield


class Packed(Training):
    """Training on one row of tokens, cut elsewhere in each microbatch; with a padding mask."""

    def forward(self, batch: int, sequence: int, seed: int, **inputs: Any) -> Tensor:
        first = seed % (sequence - 1) + 1
        given = {
            "packed_seq_params": packed([first, sequence - first]),
            "padding_mask": torch.arange(sequence)[None] == first - 1,
        }
        return super().forward(1, sequence, seed, **(given | inputs))


@pytest.mark.parametrize("scope", EAGER_ATTENTION, ids="+".join)
def test_replays_follow_boundaries_that_change(megatron, scope):
    eager, graphed = Packed(None), Packed(scope)
    steps = [graphed.step(0)]
    made = LayerGraphs([graphed.model], seq_length=SEQUENCE, micro_batch=1)
    made.capture()
    with no_python(graphed, scope):
        steps += [graphed.step(number) for number in (1, 2, 3)]
    made.delete()
    assert differences([eager.step(number) for number in range(4)], steps) == []
    whole = {"packed_seq_params": packed([SEQUENCE])}
    losses = [eager.forward(1, SEQUENCE, seed=3, **other).item() for other in ({}, whole)]
    assert losses[0] != losses[1]  # Boundaries matter.


@pytest.mark.parametrize(
    "scope", [("attn", "moe"), ("attn", "moe_router", "moe_preprocess"), ("attn",), ()], ids=str
)
def test_captured_attention_is_refused_in_the_first_step(megatron, scope: Scope):
    training = Packed(scope)
    with pytest.raises(ValueError, match=r"^packed_seq_params must be None .*got 'thd'; set cuda"):
        training.step(0)
    training.model.eval()
    training.forward(1, SEQUENCE, seed=0)  # Evaluation is eager.


def layer_with(fields: dict[str, Any]) -> Any:
    return SimpleNamespace(config=SimpleNamespace(**fields))


def test_all_ways_to_capture_attention_are_refused():
    local = {**layer_graphs(), "cuda_graph_impl": "local"}
    for fields in (layer_graphs(), layer_graphs("attn"), local, iteration_graph()):
        layer = layer_with(fields)
        check_packed(layer, None)
        with pytest.raises(ValueError, match="packed_seq_params must be None where a CUDA graph"):
            check_packed(layer, packed([3, 4]))
    router = {**layer_graphs("moe_router"), "cuda_graph_impl": "local"}
    for fields in (layer_graphs("moe"), layer_graphs("mlp"), router, {"cuda_graph_impl": "none"}):
        check_packed(layer_with(fields), packed([3, 4]))


def test_samples_that_a_capture_would_mix_are_refused():
    flattened = packed([3, 4])
    flattened.tokens_per_sample = 7
    for fields in ({"cuda_graph_impl": "none"}, layer_graphs("mlp")):
        check_packed(layer_with(fields), flattened)
    layer = layer_with(layer_graphs("moe_router"))
    with pytest.raises(ValueError, match=r"packed_seq_params.tokens_per_sample must be .*got 7;"):
        check_packed(layer, flattened)


@pytest.mark.parametrize("experts", ["module", "packed", "batched"])
def test_a_packed_row_computes_its_sequences(megatron, experts):
    """Nothing is dropped, so each sequence has the losses that it has alone."""
    install(PaddedOptions(experts=experts))
    training = Training(None, moe_expert_capacity_factor=2.0)
    install()
    tokens = torch.arange(SEQUENCE + 1)[None] * 3 % 32
    lengths, start = [3, 1, 3], 0
    positions = torch.cat([torch.arange(length) for length in lengths])[None]

    def losses(part: slice, params: PackedSeqParams) -> Tensor:
        given = tokens[:, :-1][:, part], positions[:, part], None
        labels = tokens[:, 1:][:, part]
        return training.model(*given, labels=labels, packed_seq_params=params)[0]

    with torch.no_grad():
        row = losses(slice(None), packed(lengths))
        for length in lengths:
            part = slice(start, start + length)
            torch.testing.assert_close(row[part], losses(part, packed([length])))
            start += length


@pytest.mark.skipif(
    not hasattr(PackedSeqParams, "tokens_per_sample"), reason="new in Megatron-Core 0.19"
)
def test_flattened_samples_are_routed_alike(megatron):
    """Megatron rearranges tokens and mask for the MoE part, and its output back."""
    training = Training(None, moe_expert_capacity_factor=None)
    mask_BS = torch.tensor([[False, True, False, False, False, True]])
    rows = []
    for length in (None, 3):
        params = packed([3, 3])
        params.tokens_per_sample = length
        given = {"packed_seq_params": params, "padding_mask": mask_BS}
        rows.append(training.forward(1, 6, seed=0, **given))
    asked = [int(layer.token_dispatcher.counters.demand_E.sum()) for layer in training.moe_layers]
    assert asked == [2 * 4 * tiny.TOP_K] * 2
    torch.testing.assert_close(*rows)
