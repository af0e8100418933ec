"""Padding masks and packed sequences that change, over the stand-in for CUDA graphs.

Transformer Engine's packed attention needs a GPU; a mask of blocks stands in for it.
"""

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from padded_dispatch.megatron import PaddedOptions, install, schedule
from padded_dispatch.megatron.compat import iteration_graph, layer_graphs
from padded_dispatch.megatron.graphs import LayerGraphs
from padded_dispatch.megatron.schedule import adapted, check_packed
from tests.megatron.graphs.test_capture import (
    BATCH,
    MICROBATCHES,
    NUM_TOKENS,
    PARTIAL,
    SEQUENCE,
    WHOLE,
    Results,
    Scope,
    Training,
    differences,
    graphs,
    no_python,
    unreachable,
)
from tests.support import tiny
from tests.support.graph_protocol import GraphedLayer
from tests.support.packed_sequences import packed, packed_attention

SCOPES = [*WHOLE, *PARTIAL, ("attn",)]
ATTENTION_ALONE = ("attn",)
# With an auxiliary loss, a loss of the logits and an expert bias, which all count tokens.
SETTINGS: dict[str, Any] = {
    "moe_expert_capacity_factor": 1.0,
    "moe_z_loss_coeff": 0.01,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    with tiny.one_process(), graphs():
        yield


@pytest.fixture
def packs(megatron) -> Iterator[None]:
    with packed_attention():
        yield


def mask_of(seed: int, batch: int = BATCH, sequence: int = SEQUENCE) -> Tensor:
    """Return a mask [B, S] for a microbatch: nothing, all but one token, or some of the tokens."""
    if seed % 5 == 4:
        return torch.zeros(batch, sequence, dtype=torch.bool)
    random = torch.Generator().manual_seed(seed)
    mask_BS = torch.rand(batch, sequence, generator=random) < (2 if seed % 5 == 3 else 0.4)
    mask_BS[0, 0] = False
    return mask_BS


class Masked(Training):
    """Training in which each microbatch has a mask of its own."""

    def forward(self, batch: int, sequence: int, seed: int, **inputs: Any) -> Tensor:
        given = {"padding_mask": mask_of(seed, batch, sequence)} | inputs
        return super().forward(batch, sequence, seed, **given)


@functools.cache
def eager_run(**settings: Any) -> list[Results]:
    training = Masked(None, **SETTINGS, **settings)
    return [training.step(number) for number in range(4)]


def graphed_run(scope: Scope, **settings: Any) -> list[Results]:
    training = Masked(scope, **SETTINGS, **settings)
    steps = [training.step(0)]
    made = LayerGraphs([training.model], seq_length=SEQUENCE, micro_batch=BATCH)
    report = made.capture()  # Its self-test compares replays with eager runs, with a mask.
    assert report is not None and report.unreproducible == ()
    for number in (1, 2):
        training.evaluate(number)
        if scope == ATTENTION_ALONE:
            steps.append(training.step(number))
        else:
            with no_python(training, scope):
                steps.append(training.step(number))
    made.delete()
    return [*steps, training.step(3)]


class Layer:
    """As much of a layer as a mask needs before a capture."""

    def __init__(self, mlp: Any = None, **fields: Any) -> None:
        self.mlp, self.config = mlp, SimpleNamespace(**fields)


@pytest.mark.parametrize("scope", SCOPES, ids=lambda scope: "+".join(scope) or "layer")
def test_replays_follow_a_mask_that_changes(megatron, scope):
    eager = eager_run()
    assert differences(eager, graphed_run(scope)) == []
    # The cases differ: masks leave out tokens of each step, and another number of them.
    masked = [
        sum(int(mask_of(number * MICROBATCHES + m).sum()) for m in range(MICROBATCHES))
        for number in range(4)
    ]
    asked = [int(step["demand_E of layer 0"].sum()) // tiny.TOP_K for step in eager]
    assert asked == [MICROBATCHES * NUM_TOKENS - number for number in masked]
    assert len(set(masked)) == 4


def test_a_step_without_a_mask_masks_nothing(megatron):
    training = Masked(("attn", "moe"), **SETTINGS)
    training.step(0)
    training.capture()
    training.forward(BATCH, SEQUENCE, seed=1)
    for layer in training.moe_layers:
        layer.token_dispatcher.counters.demand_E.zero_()
    training.forward(BATCH, SEQUENCE, seed=1, padding_mask=None)
    for layer in training.moe_layers:
        assert layer.token_dispatcher.counters.demand_E.sum() == NUM_TOKENS * tiny.TOP_K


def test_a_mask_after_a_capture_without_one_is_refused(megatron):
    training = Training(("attn", "moe"))
    training.step(0)
    training.capture()
    mask_BS = mask_of(0)
    with (
        patch.object(GraphedLayer, "replay_forward", unreachable),
        pytest.raises(ValueError, match=r"padding_mask must be None in a replay .*got \[2, 7\]"),
    ):
        training.forward(BATCH, SEQUENCE, seed=0, padding_mask=mask_BS)


def test_a_mask_of_another_shape_is_refused(megatron):
    training = Masked(("moe",), **SETTINGS)
    training.forward(BATCH + 1, SEQUENCE, seed=0)
    with pytest.raises(
        ValueError, match=r"padding_mask.shape must be \[2, 7\] as in .*, got \[3, 7\]"
    ):
        training.capture()
    training.forward(BATCH, SEQUENCE, seed=0)  # An eager step with the right one mends it.
    training.capture()
    layer = training.model.module.module.decoder.layers[0]
    with (
        pytest.raises(ValueError, match=r"padding_mask.shape must be \[2, 7\] .*, got \[1, 7\]"),
        schedule.replayed(layer, mask_of(0)[:1]),
    ):
        pass


class Packed(Training):
    """Training on one row of tokens, cut elsewhere in each microbatch; with a padding mask."""

    def forward(self, batch: int, sequence: int, seed: int, **inputs: Any) -> Tensor:
        first = seed % (sequence - 1) + 1
        given = {
            "packed_seq_params": packed([first, sequence - first]),
            "padding_mask": torch.arange(sequence)[None] == first - 1,
        }
        return super().forward(1, sequence, seed, **(given | inputs))


@pytest.mark.parametrize("scope", [("moe",), *PARTIAL[:2]], ids="+".join)
def test_replays_follow_boundaries_that_change(packs, scope):
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
def test_captured_attention_is_refused_in_the_first_step(packs, scope: Scope):
    training = Packed(scope)
    with pytest.raises(ValueError, match=r"^packed_seq_params must be None .*got 'thd'; set cuda"):
        training.step(0)
    training.model.eval()
    training.forward(1, SEQUENCE, seed=0)  # Evaluation is eager.


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


@pytest.mark.parametrize("experts", ["module", "packed"])
def test_a_packed_row_computes_its_sequences(packs, experts):
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
def test_flattened_samples_are_routed_alike(packs):
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


MASK_BS = torch.tensor([[False, False, True], [False, True, True]])


def route(layer: Any, hidden: Tensor) -> Any:
    return layer.mlp.route(hidden)


def node_of(layer: Any, mask_BS: Any, run: Any = route, sequences: Any = None) -> Any:
    """Return the first piece of a layer, which routes its input, or runs something else."""
    node = SimpleNamespace(
        chunk_state=SimpleNamespace(padding_mask=mask_BS, packed_seq_params=sequences),
        submodule=lambda node, hidden: run(layer, hidden),
    )
    plan = SimpleNamespace(layer=layer)
    adapted(lambda plan: vars(plan).update(attn=node))(plan)
    return node


@pytest.mark.usefixtures("megatron")
def test_packed_sequences_with_captured_attention_are_refused():
    moe, hidden = tiny.padded_layer(), torch.randn(3, 2, tiny.HIDDEN)
    for scopes in (("attn",), ("moe_router",)):
        node = node_of(Layer(mlp=moe, **layer_graphs(*scopes)), MASK_BS, sequences=packed([2, 1]))
        if scopes == ("moe_router",):
            assert torch.equal(node.submodule(node, hidden)[1].any(1), ~MASK_BS.T.flatten())
            continue
        with pytest.raises(ValueError, match="packed_seq_params must be None where a CUDA graph"):
            node.submodule(node, hidden)
