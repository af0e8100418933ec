"""A recording holds the choices of the routers, at the steps to be recorded."""

import math

import pytest
import torch

from padded_dispatch import recorder as module
from padded_dispatch.recorder import RoutingBuffer, TraceRecorder, steps_apart
from padded_dispatch.routing import select
from padded_dispatch.trace import HEADER_BYTES, load_traces, record_bytes
from padded_dispatch.utils.logs import log_once
from tests.support.graph_protocol import Tape
from tests.support.routings import routing_map, thin_out
from tests.support.traces import traced_run

RUN = traced_run(num_tokens=7, top_k=2, num_experts=5, num_ranks=1, capacity_pool="store")


def microbatch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    map_TE = torch.from_numpy(thin_out(routing_map(7, 5, 2, seed=number), share=0.2, seed=number))
    probs_TE = torch.rand(7, 5, generator=torch.Generator().manual_seed(number))
    return map_TE, torch.where(map_TE, probs_TE, 0)


def choices(number: int) -> tuple[list[list[int]], list[list[float]]]:
    """Experts and probabilities [7, 2] of one micro-batch, as a trace has them."""
    map_TE, probs_TE = (tensor.tolist() for tensor in microbatch(number))
    ids = [[e for e, asked in enumerate(row) if asked] for row in map_TE]
    probs = [[row[e] for e in mine] for row, mine in zip(probs_TE, ids, strict=True)]
    return [[(row + [none] * 2)[:2] for row in rows] for rows, none in ((ids, -1), (probs, 0.0))]


def observe(buffer: RoutingBuffer, map_TE: torch.Tensor, probs_TE: torch.Tensor) -> None:
    probs_TE = probs_TE.clone().requires_grad_()  # As a router's are; a buffer's have none.
    buffer.observe(map_TE, probs_TE, select(map_TE, probs_TE, capacity=2))


def buffer(num_microbatches: int = 2) -> RoutingBuffer:
    return RoutingBuffer(RUN, num_microbatches=num_microbatches, device="cpu")


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_recorded_steps_have_all_their_microbatches_in_order(tmp_path, num_microbatches):
    buffers = {4: buffer(num_microbatches), 9: buffer(num_microbatches)}
    observe(buffers[9], *microbatch(77))  # A micro-batch before the first step, as a capture makes.
    recorder = TraceRecorder(tmp_path / "trace.npy", RUN, buffers, rank=3, every=2)
    number = {layer: 1000 * layer for layer in buffers}
    expected = []
    for step in range(1, 7):
        for layer, of_layer in buffers.items():
            for place in range(num_microbatches):
                observe(of_layer, *microbatch(number[layer]))
                if step % 2 == 0:
                    expected.append((step, place, layer, number[layer]))
                number[layer] += 1
        recorder.step(step)
    recorder.close()

    expected.sort()
    trace = load_traces([tmp_path])
    assert trace.ranks.tolist() == [3] * len(expected)
    assert trace.run == RUN
    assert list(zip(trace.steps.tolist(), trace.layers.tolist(), strict=True)) == [
        (step, layer) for step, _, layer, _ in expected
    ]
    for n, (*_, seed) in enumerate(expected):
        assert [trace.ids_NTK[n].tolist(), trace.probs_NTK[n].tolist()] == choices(seed)


def test_a_step_with_fewer_microbatches_has_no_choices_of_an_earlier_one(tmp_path):
    """Nor has a step without any; steps between recorded ones do not count for the next."""
    buffers = {4: buffer(3), 9: buffer(3)}
    recorder = TraceRecorder(tmp_path / "trace.npy", RUN, buffers, rank=3, every=2)
    nums = {1: (3, 3), 2: (2, 2), 3: (1, 1), 4: (0, 0), 5: (3, 3), 6: (1, 0), 7: (3, 3), 8: (4, 4)}
    expected, seed = [], 0
    for step, of_layers in nums.items():
        for (layer, of_layer), num in zip(buffers.items(), of_layers, strict=True):
            for place in range(num):
                observe(of_layer, *microbatch(seed))
                if step % 2 == 0 and place >= num - 3:  # There is room for the last three.
                    expected.append((step, place, layer, seed))
                seed += 1
        recorder.step(step)
    recorder.close()
    trace = load_traces([tmp_path])
    found = zip(trace.steps.tolist(), trace.layers.tolist(), trace.ids_NTK.tolist(), strict=True)
    assert [*found] == [(step, layer, choices(n)[0]) for step, _, layer, n in sorted(expected)]


def test_a_replayed_microbatch_is_kept_like_an_eager_one():
    map_TE, probs_TE = microbatch(0)
    selection = select(map_TE, probs_TE, capacity=2)
    replayed, eager, tape = buffer(3), buffer(3), Tape()
    with tape:
        replayed.observe(map_TE, probs_TE, selection)
    observe(eager, *microbatch(0))
    for number in range(1, 6):
        for static, new in zip((map_TE, probs_TE), microbatch(number), strict=True):
            static.copy_(new)
        tape.replay()
        observe(eager, *microbatch(number))
    for ours, expected in zip(replayed.tensors(), eager.tensors(), strict=True):
        assert torch.equal(ours, expected)


def test_a_recording_that_would_grow_too_large_has_fewer_steps(tmp_path, monkeypatch):
    """Also one that is resumed behind an odd number of steps."""
    of_step = 2 * record_bytes(7, 2) + HEADER_BYTES
    sizes = dict(num_records=2, num_tokens=7, top_k=2)
    for done, end, steps_that_fit, every in (
        *((0, 6, 3, 2), (0, 6, 2, 4), (0, 6, 1, 4)),
        *((3, 8, 3, 2), (3, 8, 2, 4), (3, 8, 1, 6)),
    ):
        limit = steps_that_fit * of_step + of_step // 2
        monkeypatch.setattr(module, "MAX_BYTES", limit)
        path, filled = tmp_path / "trace.npy", buffer()
        assert steps_apart(2, steps_done=done, num_steps=end, **sizes) == every
        recorder = TraceRecorder(path, RUN, {1: filled}, rank=3, every=every)
        for step in range(done + 1, end + 1):
            observe(filled, *microbatch(step))
            recorder.step(step)
        recorder.close()
        trace = load_traces([path])
        recorded = [step for step in range(done + 1, end + 1) if step % every == 0]
        assert sorted(set(trace.steps.tolist())) == recorded
        assert path.stat().st_size <= limit
    monkeypatch.setattr(module, "MAX_BYTES", of_step - 1)
    with pytest.raises(
        ValueError, match=rf"trace must have .*{of_step - 1} .*, got {of_step}; set"
    ):
        steps_apart(2, steps_done=0, num_steps=6, **sizes)


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path, monkeypatch, caplog):
    """What was written before stays readable, also if there is room again later."""
    filled = buffer()
    recorder = TraceRecorder(tmp_path / "trace.npy", RUN, {1: filled}, rank=3, every=1)

    def write(step, file):
        append(step, file)
        if step.steps[0] == 3:
            file.truncate(file.tell() - 100)
            raise OSError(28, "No space left on device")

    append = module.append
    monkeypatch.setattr(module, "append", write)
    for number in range(1, 6):
        observe(filled, *microbatch(number))
        recorder.step(number)
    recorder.close()
    assert sorted(set(load_traces([tmp_path]).steps.tolist())) == [1, 2]
    (line,) = caplog.messages
    assert line.startswith("the trace ends before step 3: ") and "No space left on device" in line


def test_probabilities_that_a_trace_cannot_hold():
    map_TE, probs_TE = microbatch(0)
    with pytest.raises(ValueError, match=r"probs_TE.dtype must .*; .* moe_router_dtype='fp32'"):
        observe(buffer(), map_TE, probs_TE.double())


def test_tokens_without_finite_probabilities_are_recorded_as_padding(tmp_path, caplog):
    """Such as those of a router whose input is NaN, in a step that the loop skips."""
    filled, (map_TE, probs_TE) = buffer(num_microbatches=1), microbatch(1)
    recorder = TraceRecorder(tmp_path / "trace.npy", RUN, {1: filled}, rank=3, every=1)
    log_once.cache_clear()
    ids_TK, probs_TK = choices(1)
    wrong = [token for token, ids in enumerate(ids_TK) if ids[0] >= 0][:3]
    for step, values in ((1, (math.nan, math.inf, -1.0)), (2, ())):
        given_TE = probs_TE.clone()
        for token, value in zip(wrong, values, strict=False):
            given_TE[token, ids_TK[token][0]] = value
        observe(filled, map_TE, given_TE)
        recorder.step(step)
    recorder.close()
    trace, kept = load_traces([tmp_path]), [token not in wrong for token in range(7)]
    assert len(wrong) == 3 and trace.steps.tolist() == [1, 2]
    assert trace.ids_NTK[1].tolist() == ids_TK and trace.probs_NTK[1].tolist() == probs_TK
    assert (trace.ids_NTK[0][wrong] == -1).all() and not trace.probs_NTK[0][wrong].any()
    assert (trace.ids_NTK[0][kept] == trace.ids_NTK[1][kept]).all()
    assert (trace.probs_NTK[0][kept] == trace.probs_NTK[1][kept]).all()
    (line,) = caplog.messages
    assert line == "the trace leaves out tokens whose probabilities are not finite, or negative"


def test_a_microbatch_of_another_size_is_recorded_as_padding(caplog):
    filled = buffer()
    assert filled.ids_MTK.eq(-1).all() and not filled.probs_MTK.any()  # Nor does a place count
    observe(filled, *microbatch(0))  # before it is filled.
    for size in (3, 9):
        map_TE = torch.ones(size, 5, dtype=torch.bool)
        observe(filled, map_TE, map_TE.float())
        assert filled.ids_MTK[1].eq(-1).all() and not filled.probs_MTK[1].any()
    observe(filled, *microbatch(1))
    assert filled.ids_MTK[1].tolist() == choices(1)[0]
    assert caplog.messages == ["the trace leaves out micro-batches that do not have 7 tokens"]
