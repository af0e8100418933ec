"""A recording holds what the routers asked for, at the steps to be recorded."""

import pytest
import torch

from padded_dispatch import recorder
from padded_dispatch.recorder import RoutingBuffer, TraceRecorder
from padded_dispatch.routing.select import select
from padded_dispatch.trace import load_trace
from tests.support.graph_protocol import Tape
from tests.support.routings import routing_map, thin_out

SETTINGS = dict(num_tokens=7, top_k=2, num_ranks=1, rank=0, capacity_pool="store")


def microbatch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Map and probabilities [7, 5] of one micro-batch."""
    map_TE = torch.from_numpy(thin_out(routing_map(7, 5, 2, seed=number), share=0.2, seed=number))
    probs_TE = torch.rand(7, 5, generator=torch.Generator().manual_seed(number))
    return map_TE, torch.where(map_TE, probs_TE, 0)


def observe(buffer: RoutingBuffer, number: int) -> None:
    map_TE, probs_TE = microbatch(number)
    buffer.observe(map_TE, probs_TE, select(map_TE, probs_TE, capacity=2), True)


def buffer(num_microbatches: int = 2) -> RoutingBuffer:
    return RoutingBuffer(num_microbatches=num_microbatches, num_experts=5, device="cpu")


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_recorded_steps_have_all_their_microbatches_in_order(
    tmp_path, monkeypatch, num_microbatches
):
    """Of six steps each second one, as of more than a thousand."""
    monkeypatch.setattr(recorder, "_MOST_STEPS", 3)
    buffers = {4: buffer(num_microbatches), 9: buffer(num_microbatches)}
    observe(buffers[9], 77)  # A micro-batch before the first step, as a capture makes.
    recording = TraceRecorder(tmp_path / "trace.npy", buffers, num_steps=6, **SETTINGS)
    number = {layer: 1000 * layer for layer in buffers}
    expected = []
    for step in range(1, 7):
        asked: list[list[list[int]]] = [[] for _ in range(num_microbatches)]
        for layer, of_layer in buffers.items():
            for place in range(num_microbatches):
                observe(of_layer, number[layer])
                asked[place].append(microbatch(number[layer])[0].sum(0).tolist())
                number[layer] += 1
        if step % 2 == 0:
            expected += asked
        recording.step(step)
    recording.close()

    trace = load_trace([tmp_path])
    assert trace.steps.tolist() == [n for n in (2, 4, 6) for _ in range(num_microbatches)]
    assert (trace.num_tokens, trace.top_k, trace.pool) == (7, 2, "store")
    assert trace.layers.tolist() == [4, 9]
    assert trace.counts[:, :, 0].tolist() == expected


def test_a_replayed_microbatch_is_kept_like_an_eager_one():
    map_TE, probs_TE = microbatch(0)
    selection = select(map_TE, probs_TE, capacity=2)
    replayed, eager, tape = buffer(3), buffer(3), Tape()
    with tape:
        replayed.observe(map_TE, probs_TE, selection, True)
    observe(eager, 0)
    for number in range(1, 6):
        for static, new in zip((map_TE, probs_TE), microbatch(number), strict=True):
            static.copy_(new)
        tape.replay()
        observe(eager, number)
    assert torch.equal(replayed.rows_ME, eager.rows_ME)
