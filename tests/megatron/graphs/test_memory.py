"""The memory of graphs is estimated before a capture and named if it does not fit."""

import logging
import re
from unittest.mock import patch

import pytest
import torch
from megatron.core import package_info
from torch.multiprocessing.reductions import StorageWeakRef

from padded_dispatch.megatron.graphs import memory
from padded_dispatch.megatron.graphs.capture import (
    IterationGraph,
    LayerGraphs,
    _samples_and_order,
)
from padded_dispatch.megatron.graphs.memory import GraphMemory, estimate, saved_bytes
from padded_dispatch.megatron.graphs.selftest import Sample
from tests.megatron.graphs.test_capture import BATCH, SEQUENCE, Training
from tests.megatron.graphs.test_capture_helper import iteration_of
from tests.support import tiny
from tests.support.graph_protocol import GraphedLayer

WIDTH = 16


class Tower(torch.nn.Module):
    """A layer that saves its input and tanh's output, which its second linear reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, WIDTH)
        self.mlp = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(tokens).tanh())


def sample(num_tokens: int = 5) -> Sample:
    return Sample(layer=Tower(), args=(torch.ones(num_tokens, WIDTH),), kwargs={})


def test_kept_is_what_backward_reads_each_storage_once_and_no_parameters():
    # The input, and tanh's output, which is saved twice: 2 * 5 * 16 * 4 bytes.
    assert saved_bytes(sample()) == 2 * 5 * WIDTH * 4


def test_nothing_stays_alive():
    """tanh saves its own output, which is the shortest reference cycle."""
    seen, given = [], sample()

    def note(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.append(StorageWeakRef(args[0].untyped_storage()))

    given.layer.second.register_forward_pre_hook(note)
    saved_bytes(given)
    assert [storage.expired() for storage in seen] == [True]


def test_estimate_counts_microbatches_in_flight_at_once():
    kept = saved_bytes(sample())
    gradients = 2 * (WIDTH * WIDTH + WIDTH) * 4
    one, two = [sample()], [sample(), sample()]
    assert estimate([two], [1, -1]) == GraphMemory(kept=2 * kept, working=gradients)
    # Chunk 1 has one layer, chunk 2 has two: at most two passes of each are in flight.
    order = [1, 1, 2, 2, -2, -2, 1, -1, -1, -1, 2, -2]
    assert estimate([one, two], order).kept == (2 + 2 * 2) * kept
    assert estimate([one, two], [1, 2, -2, 1, 2, -2, -1, -1]).kept == (2 + 2) * kept


def test_an_estimate_in_words():
    words = str(GraphMemory(kept=3 * 2**30, working=2**29))
    assert words == "about 3.50 GiB: 3.00 kept for backward, 0.50 of working memory for one layer"


def capture(training: Training) -> None:
    LayerGraphs([training.model], seq_length=SEQUENCE, micro_batch=BATCH).capture()


def kept_bytes(training: Training) -> int:
    made = LayerGraphs([training.model], seq_length=SEQUENCE, micro_batch=BATCH)
    return estimate(*_samples_and_order(made._helper)).kept


def test_recomputed_and_uncaptured_parts_are_not_kept(megatron):
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    whole = kept_bytes(Training(("attn", "moe")))
    assert kept_bytes(Training(("moe",))) < whole
    assert kept_bytes(Training(("attn", "moe_router", "moe_preprocess"))) < whole
    recomputed = kept_bytes(Training(("attn", "moe"), **recompute))
    if package_info.MINOR < 18:
        assert recomputed < whole
    else:  # `tensor_parallel.checkpoint` does nothing in a capture.
        assert recomputed == whole


def test_working_memory_is_dispatch_and_gradients(megatron):
    training = Training(("moe",))
    made = LayerGraphs([training.model], seq_length=SEQUENCE, micro_batch=BATCH)
    (samples,), order = _samples_and_order(made._helper)
    layer = samples[0].layer
    gradients = sum(p.numel() * 2 for p in layer.parameters())
    config = layer.mlp.token_dispatcher.dispatch_config
    buffers = config.buffer_bytes(SEQUENCE * BATCH, tiny.HIDDEN, 2).total
    assert estimate([samples], order).working == gradients + buffers


def test_the_estimate_is_logged_before_the_capture(megatron, caplog):
    training = Training(("moe",))
    with (
        caplog.at_level(logging.INFO, logger="padded_dispatch"),
        patch.object(memory, "estimate", lambda *_: "about nothing"),
    ):
        capture(training)
    (message,) = [r.message for r in caplog.records if "will hold" in r.message]
    assert message == "CUDA graphs of 2 layers will hold about nothing"


def test_out_of_memory_in_a_capture_names_the_pools_and_a_fix(megatron):
    training = Training(("moe",))

    def full(graphed: GraphedLayer) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.54 GiB.")

    wanted = re.compile(
        r"memory pools of the CUDA graphs do not fit beside the 0.00 GiB.*They hold about .*kept "
        r"for backward.*moe_expert_capacity_factor.*Tried to allocate 1.54 GiB"
    )
    with (
        patch.object(GraphedLayer, "capture_forward", full),
        pytest.raises(torch.OutOfMemoryError, match=wanted),
    ):
        capture(training)
    training.step(0)


class _FullIteration:
    """A stand-in for Megatron's wrapper whose capture runs out of memory."""

    cuda_graph_warmup_steps = 3

    def curr_iter(self, stage: str) -> int:
        return 3

    def __call__(self, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_out_of_memory_in_the_capture_of_a_step_names_its_graph(megatron):
    training = Training(None)
    graph = IterationGraph(training.config)
    graph._wrapped = _FullIteration()
    with pytest.raises(
        torch.OutOfMemoryError, match="They hold about what an eager step allocates, "
    ):
        graph(**iteration_of(training))
