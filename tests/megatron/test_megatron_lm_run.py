"""A training in Megatron-LM's loop: what is shown, how factors change, what a resumed run knows."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer import cuda_graphs

from padded_dispatch.config import NO_DROP
from padded_dispatch.megatron import PaddedOptions, install, uninstall
from padded_dispatch.megatron.telemetry import padded_moe_layers
from padded_dispatch.trace import load_traces
from tests.megatron.test_telemetry import HostCount
from tests.support.graph_protocol import make_graphed_callables
from tests.support.megatron_lm_loop import Writer, stand_in
from tests.support.retried_training import RetriedCase, Training, draws, forward, world

CASE = RetriedCase(name="Megatron-LM's loop", microbatches=2)
FIGURES = ["moe/dropped", "moe/fill", "moe/needed_factor", "moe/expert_overload"]
EVERY = {"telemetry_every": 2}


@pytest.fixture
def training_loop(monkeypatch) -> Iterator[Any]:
    """Provide a stand-in for Megatron-LM's module, which trains six steps, a line every two."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with world(CASE):
        yield stand_in(monkeypatch, CASE)
        uninstall()
    dist.destroy_process_group()


def train(loop: Any, training: Training | None = None, **options: Any) -> Training:
    install(PaddedOptions(**options))
    training = training or Training(CASE, **options)
    loop.train(forward, training.chunks, draws(CASE), training.config, training.schedule)
    return training


def factors(training: Training) -> dict[int, Any]:
    layers = padded_moe_layers(training.chunks)
    return {n: m.token_dispatcher.configs.training.capacity_factor for n, m in layers.items()}


def test_figures_of_a_line_are_those_of_the_steps_since_the_last_one(training_loop):
    training = Training(CASE, **EVERY)
    counts = {n: HostCount() for n in (1, 2)}
    for number, layer in padded_moe_layers(training.chunks).items():
        layer.router.selector.observers.append(counts[number])
    shares = []

    def before(step: int) -> None:
        if step and step % 2 == 0:
            note()

    def note() -> None:
        demand, kept = (
            sum(getattr(count, name).sum() for count in counts.values())
            for name in ("demand_E", "kept_E")
        )
        shares.append(1 - kept / demand)
        for count in counts.values():
            count.__init__()

    training_loop.before = before
    train(training_loop, training, **EVERY)
    note()
    steps, lines = zip(*training_loop.lines, strict=True)
    assert steps == (1, 2, 4, 6) and lines[0] == {}
    assert all(list(line) == FIGURES for line in lines[1:])
    assert [line["moe/dropped"] for line in lines[1:]] == pytest.approx(shares, rel=1e-12)
    assert len(set(shares)) == 3 and min(shares) > 0
    written = training_loop.tensorboard.scalars
    assert [step for step, _ in written["moe/dropped"]] == [2, 4, 6]
    assert [share for _, share in written["moe/dropped"]] == pytest.approx(shares, rel=1e-12)
    assert written == training_loop.wandb.scalars
    assert training_loop.tensorboard.flushed == 1
    assert not any("layer" in name or "held-out" in name for name in written)


def test_single_layers_are_written_where_megatrons_are(training_loop):
    training_loop.get_args().moe_per_layer_logging = True
    train(training_loop, telemetry_every=3)
    written = training_loop.tensorboard.scalars
    of_layers = {name for name in written if name.endswith(("_layer_0", "_layer_1"))}
    assert len(of_layers) == 2 * 2 * CASE.top_k
    assert {name.partition("_layer_")[0] for name in of_layers} == set(FIGURES)
    # A line takes a reading that has been started; the others come a step later.
    assert [step for step, _ in written["moe/dropped_layer_1"]] == [3, 6]


def test_a_line_divides_by_the_steps_that_count(training_loop):
    training_loop.skipped = (2, 3, 4)
    train(training_loop, **EVERY)
    for (step, line), (_, dropped) in zip(
        training_loop.lines[1:], training_loop.tensorboard.scalars["moe/dropped"], strict=True
    ):
        assert line["moe/dropped"] == pytest.approx(dropped, rel=1e-12), step


def test_evaluation_does_not_mix_with_training(training_loop):
    training = Training(CASE, **EVERY)

    def evaluate(step: int) -> None:
        if step == 3:
            batches = iter([{"ids": torch.zeros(CASE.batch, CASE.seq + 1, dtype=torch.int64)}])
            for chunk in training.chunks:
                chunk.eval()
            with torch.no_grad():
                forward(batches, training.chunks[0])
            for chunk in training.chunks:
                chunk.train()

    training_loop.before = evaluate
    train(training_loop, training, **EVERY)
    evaluated, training_loop.tensorboard = training_loop.tensorboard.scalars, Writer()
    training_loop.before = None
    train(training_loop, **EVERY)
    alone = training_loop.tensorboard.scalars
    assert {n: v for n, v in evaluated.items() if n in alone} == alone
    held_out = evaluated.keys() - alone.keys()
    assert held_out == {name.replace("moe/", "moe-held-out/") for name in alone}
    assert evaluated["moe-held-out/dropped"] == [(4, 0.0)]


def test_a_schedule_is_followed_past_skipped_iterations(training_loop):
    training_loop.get_args().iteration = 3
    training = train(training_loop, schedule=((0, 0.5), (2, 1.0), (5, 2.0)))
    assert factors(training) == {1: 2.0, 2: 2.0}
    assert training_loop.printed == [
        "after step 5: capacity factor 2 by schedule: layers 1, 2",
    ]
    # Iterations 6 and 7 are skipped: `train_step` is next called for the ninth.
    changed = ((0, 0.5), (8, 1.0))
    install(PaddedOptions(schedule=changed))
    training = Training(CASE, schedule=changed)
    given = forward, draws(CASE), training.chunks, None, None, training.config, training.schedule
    for iteration in (5, 8):
        training_loop.train_step(*given, iteration=iteration)
    assert factors(training) == {1: 1.0, 2: 1.0}


def test_an_overflow_ends_the_run_at_the_line(training_loop):
    with pytest.raises(RuntimeError, match=r"^on_overflow='error': layer 1 dropped .* in steps 1 "):
        train(training_loop, on_overflow="error", **EVERY)
    assert len(training_loop.calls) == 2


def test_grown_factors_hold_from_the_next_step_and_after_a_resume(training_loop, tmp_path):
    args = training_loop.get_args()
    args.save = str(tmp_path)
    recaptured = []
    seen = {}
    options = {"on_overflow": "grow", "grow_after": 1, "grow_factors": (0.75, NO_DROP), **EVERY}
    training = Training(CASE, **options)
    training_loop.before = lambda step: seen.setdefault(step, factors(training))
    name = "padded_dispatch.megatron.megatron_lm_run.recapture"
    with patch(name, lambda chunks: recaptured.append(len(training_loop.calls))):
        train(training_loop, training, **options)
    assert [seen[step] for step in range(6)] == (
        [{1: 0.5, 2: 0.5}] * 2 + [{1: 0.75, 2: 0.75}] * 2 + [{1: NO_DROP, 2: NO_DROP}] * 2
    )
    assert recaptured == [2, 4]
    kept = json.loads((tmp_path / "padded_dispatch.json").read_text())
    assert kept == {
        "factors": {"2": {"1": "0.75", "2": "0.75"}, "4": {"1": "no-drop", "2": "no-drop"}}
    }
    # The checkpoint is older than the second change.
    args.load, args.iteration, args.train_iters = str(tmp_path), 3, 3
    resumed = train(training_loop, **options)
    assert factors(resumed) == {1: 0.75, 2: 0.75}
    assert training_loop.printed[-1] == f"capacity factors as {tmp_path} has them for step 3"


def losses(loop: Any, case: RetriedCase, *, graphed: bool) -> tuple[list[float], Training]:
    """Train a case; layers grow after the second step, and are captured after the first."""
    options = {"on_overflow": "grow", "grow_after": 1, "grow_factors": (1.0,), **EVERY}
    install(PaddedOptions(**options))
    training = Training(case, graphed=graphed, **options)
    found = []

    def passes(**given: Any) -> list[Any]:
        reports = training.schedule(**given)
        found.extend(report["loss"].item() for report in reports)
        return reports

    def before(step: int) -> None:
        if step > 0:
            training.update()
        if step == 1 and training.graphs is not None:
            training.graphs.capture()

    loop.before = before
    loop.train(forward, training.chunks, draws(case), training.config, passes)
    return found, training


def test_graphs_are_captured_again_before_the_next_step(monkeypatch):
    case = dataclasses.replace(CASE, graph="layer", dropout=0.0)
    captures = []

    def capture(*args: Any, **kwargs: Any) -> Any:
        captures.append(len(loop.calls))
        return make_graphed_callables(*args, **kwargs)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with world(case), patch.object(cuda_graphs, "make_graphed_callables", capture):
        loop = stand_in(monkeypatch, case)
        eager, _ = losses(loop, case, graphed=False)
        loop.calls.clear()
        graphed, training = losses(loop, case, graphed=True)
        training.end()
        uninstall()
    dist.destroy_process_group()
    assert factors(training) == {1: 1.0, 2: 1.0} and captures == [1, 2]
    assert graphed == eager and len(set(eager)) == len(eager) == 6 * case.microbatches


def test_a_trace_holds_all_steps_of_a_run_and_of_its_resumption(training_loop, tmp_path):
    args = training_loop.get_args()
    train(training_loop, trace=str(tmp_path))
    args.iteration, args.train_iters = 4, 7
    train(training_loop, trace=str(tmp_path))
    trace = load_traces([tmp_path], max_bytes=2**20)
    assert sorted(set(trace.steps.tolist())) == [1, 2, 3, 4, 5, 6, 7]
    assert trace.num_records == 7 * CASE.microbatches * 2
    assert trace.ids_NTK.shape[1:] == (CASE.batch * CASE.seq, CASE.top_k)
    assert (trace.num_experts, trace.num_ranks, set(trace.ranks.tolist())) == (4, 1, {0})


def test_a_run_that_fails_keeps_its_trace(training_loop, tmp_path):
    def fail(step: int) -> None:
        if step == 3:
            raise SystemExit("a signal")

    training_loop.before = fail
    with pytest.raises(SystemExit, match="a signal"):
        train(training_loop, trace=str(tmp_path))
    trace = load_traces([tmp_path], max_bytes=2**20)
    assert sorted(set(trace.steps.tolist())) == [1, 2, 3]
