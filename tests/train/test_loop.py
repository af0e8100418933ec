"""Whole training runs: learning, dropping, repeated steps, traces, results; graphs on GPUs."""

import contextlib
import gc
import io
import itertools
import json
import math
import os
import re
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
from torch.distributed import distributed_c10d

from padded_dispatch.megatron import uninstall
from padded_dispatch.megatron.compat import training_stream
from padded_dispatch.megatron.cpu import megatron_on_cpu
from padded_dispatch.megatron.telemetry import padded_moe_layers
from padded_dispatch.trace import load_traces
from padded_dispatch.train import loop
from padded_dispatch.train.loop import Outcome
from padded_dispatch.tune.demand import demand_of
from padded_dispatch.tune.replay import replay
from tests.support.pool import WorkerPool, shared_groups
from tests.support.tiny import parse
from tests.train.test_model import on_a_gpu

# By (step, layer): rows asked for at this rank's tokens, rows that this rank counts as kept, and
# the largest need of a pass.
Counted = dict[tuple[int, int], tuple[int, int, int]]


def counted_run(flags: str, device: torch.device) -> tuple[Counted, list[float]]:
    """Train as `padded-dispatch train FLAGS` does, on this rank; return counts and losses."""
    counted: Counted = {}
    step_of_run = loop.Trainer.step
    settings, quiet = parse(flags.split()), contextlib.redirect_stdout(io.StringIO())

    def step(trainer: loop.Trainer, number: int) -> loop.Step:
        layers = padded_moe_layers(trainer.chunks)
        counters = {layer: moe.token_dispatcher.counters for layer, moe in layers.items()}
        before = {layer: rows_of(c) for layer, c in counters.items()}
        for c in counters.values():
            c.max_need.zero_()
        done = step_of_run(trainer, number)
        for layer, c in counters.items():
            asked, kept = (now - was for now, was in zip(rows_of(c), before[layer], strict=True))
            counted[number, layer] = asked, kept, int(c.max_need)
        return done

    with patch.object(loop.Trainer, "step", step), quiet, loop.model_parallel(settings.layout):
        outcome = loop.train(settings, device)
    uninstall()
    return counted, losses(outcome)


def rows_of(counters) -> tuple[int, int]:
    return int(counters.demand_E.sum()), int(counters.kept_E.sum() - counters.num_again)


def assert_trace_says_the_same(folder: Path, counted: list[Counted], **given: int) -> None:
    """Check that a replay of the run's trace, at factor 0.5, equals the counters of all ranks."""
    demand = demand_of(load_traces([folder]))
    found = replay(demand, [0.5], pool=demand.run.capacity_pool, **given)
    assert found.dropped.sum() > 0  # Else the test would be weak.
    places = [
        (step, layer)
        for step in found.steps.tolist()
        for layer in demand.layers.tolist()
        if any((step, layer) in of_rank for of_rank in counted)
    ]
    assert {place for of_rank in counted for place in of_rank if place[0] in found.steps} == {
        *places
    }
    for step, layer in places:
        here = [of_rank[step, layer] for of_rank in counted if (step, layer) in of_rank]
        asked, kept = sum(rows for rows, _, _ in here), sum(rows for _, rows, _ in here)
        at = demand.layers.tolist().index(layer), found.steps.tolist().index(step)
        assert (asked, asked - kept) == (found.asked[at], found.dropped[0][at]), (step, layer)
    if demand.run.capacity_pool == "cells":
        most = max(need for of_rank in counted for _, _, need in of_rank.values())
        assert found.needed.max() * demand.mean_rows == most


SMALL = "--log-every 1 --seq-length 24 --micro-batch 3 --device cpu --workers 2"
CPU = torch.device("cpu")
RUNS = [
    "",
    "--capacity-factor none --balancing expert-bias",
    "--dispatcher allgather",
    "--dispatcher alltoall-drop-pad",
    "--ep 1 --etp 2",
    "--pp 2 --vpp 2 --num-layers 4 --experts packed",
]


def _train(*runs: str) -> list[Outcome]:
    """Train one run after the other; those with the same layout share their groups."""
    every, outcomes = [parse(f"{SMALL} {flags}".split()) for flags in runs], []
    with megatron_on_cpu(), contextlib.redirect_stdout(io.StringIO()):
        for layout, same in itertools.groupby(every, key=lambda settings: settings.layout):
            with loop.model_parallel(layout):
                outcomes += [loop.train(settings, CPU) for settings in same]
    uninstall()
    return outcomes


def _train_in_shared_groups(*runs: str) -> list[Outcome]:
    with shared_groups():
        return _train(*runs)


def train(pool: Any, *runs: str) -> list[Outcome]:
    first, second = pool.run(_train_in_shared_groups, *runs)
    for one, other in zip(first, second, strict=True):
        assert [row.loss for row in one.rows] == [row.loss for row in other.rows]
    return first


def losses(outcome: Outcome) -> list[float]:
    return [row.loss for row in outcome.rows]


@pytest.fixture(scope="module")
def outcomes(pool2) -> dict[str, Outcome]:
    return dict(zip(RUNS, train(pool2, *[f"--steps 3 {flags}" for flags in RUNS]), strict=True))


@pytest.mark.parametrize("flags", RUNS)
def test_the_loss_falls(outcomes, flags):
    outcome = outcomes[flags]
    assert [row.step for row in outcome.rows] == [1, 2, 3]
    assert outcome.rows[0].loss == pytest.approx(math.log(256), rel=0.05)
    mean = sum(row.loss for row in outcome.rows[1:]) / 2
    assert (outcome.rows[0].dropped is None) == ("--dispatcher" in flags)  # Only ours counts.
    shares = [[getattr(row, name) for row in outcome.rows] for name in ("dropped", "recomputed")]
    assert all(0 <= (row.dropped or 0) < 0.1 for row in outcome.rows)
    assert outcome.rows[2].loss < mean < outcome.rows[0].loss
    found = outcome.summary
    assert (found.num_steps, found.first_loss) == (3, outcome.rows[0].loss)
    assert found.loss == pytest.approx(mean, rel=1e-12)
    assert (found.dropped, found.recomputed, found.held_out) == (
        *(None if values[0] is None else pytest.approx(sum(values) / 3) for values in shares),
        None,
    )


def test_rows_are_dropped_and_evaluation_drops_none(pool2):
    flags = "--experts module --steps 2 --capacity-factor"
    no_drop, small, forced = train(
        pool2,
        f"{flags} none",
        f"{flags} 0.25 --eval-every 2",
        f"{flags} 2 --balancing forced --seq-length 256 --micro-batch 2",
    )
    assert [row.dropped for row in no_drop.rows] == [0, 0]
    # 72 tokens, 2 of 8 experts each: ceil(72 * 2 / 8 * 0.25) = 5 slots, so at most 40 of 144 rows.
    assert all(row.dropped >= 1 - 40 / 144 for row in small.rows)
    assert list(small.evaluations) == [2]
    assert abs(small.evaluations[2] - small.rows[1].loss) < 0.5
    assert [row.dropped for row in forced.rows] == [0, 0]


@pytest.fixture
def schedule(monkeypatch) -> MagicMock:
    """Let trainers build nothing; return their schedule, which computes nothing."""
    for name in ("transformer_config", "build_optimizer"):
        monkeypatch.setattr(loop, name, MagicMock())
    monkeypatch.setattr(loop, "build_chunks", lambda *_: [])
    schedule = MagicMock(return_value=[])
    monkeypatch.setattr(loop, "get_forward_backward_func", lambda: schedule)
    return schedule


@pytest.mark.parametrize(
    ("flags", "passes"),
    [("", 32), ("--seq-length 100000", 2), ("--workers 3 --pp 3 --vpp 1 --num-layers 3", 33)],
)
def test_evaluation_is_whole_rounds_of_the_pipeline_over_a_text_at_most_once(
    monkeypatch, schedule, flags, passes
):
    """Of ten windows four sequences are read by two ranks in each pass: eight, then two."""
    settings = parse(f"{SMALL} --micro-batch 4 {flags}".split())
    monkeypatch.setattr(loop, "means_over_ranks", lambda losses, device: [0.0])
    text = np.zeros(1_000_001, np.uint8)
    monkeypatch.setattr(loop, "load_corpus", lambda text_folder: (text, text))
    loop.Trainer(settings, CPU).evaluate()
    assert schedule.call_args.kwargs["num_microbatches"] == passes


def test_repeated_steps_are_those_of_a_run_that_never_drops(pool2):
    """On a CPU products depend on the number of padded rows, in the last bits."""
    flags = "--global-batch 18 --padded-capacity-pool cells"
    retry = "--capacity-factor 0.75 --padded-on-overflow retry"
    never, retried = train(
        pool2, f"--steps 2 {flags} --capacity-factor none", f"--steps 2 {flags} {retry}"
    )
    assert losses(retried) == pytest.approx(losses(never), rel=1e-5)
    # The first runs have dropped rows, of which at most 0.75 of all that were asked for fit.
    assert all(row.retried == 1 and row.dropped >= 0.25 for row in retried.rows)
    assert [(row.retried, row.dropped) for row in never.rows] == [(None, 0)] * 2


def test_a_run_is_a_row_of_a_results_file(pool2, tmp_path):
    path = tmp_path / "results.json"
    flags = f"--steps 5 --log-every 2 --eval-every 5 --out {path} --commit abc-dirty"
    flags += " --padded-capacity-pool cells"
    (outcome,) = train(pool2, flags)
    (kept,) = json.loads(path.read_text())["runs"]
    assert kept["about"]["commit"] == "abc-dirty"
    (row,) = kept["rows"]
    assert (row["model"], row["contender"], row["graph"]) == ("tiny", "ours", "none")
    assert (row["ep"], row["tokens"], row["capacity_factor"]) == (2, 72, 1.25)
    assert (row["seed"], row["pool"]) == (1234, "cells")
    assert row["flags"]["recipe"]["seq_length"] == 24
    assert row["flags"]["dispatch"]["padded"]["on_overflow"] == "warn"
    # A loss for each step; a line covers the steps since the line before.
    assert row["step"] == [1, 2, 4, 5] == [line.step for line in outcome.rows]
    assert len(row["loss"]) == 5 and row["loss"][1] == outcome.rows[1].loss
    assert sum(row["loss"][2:4]) / 2 == pytest.approx(outcome.rows[2].loss, rel=1e-12)
    assert row["dropped"] == [line.dropped for line in outcome.rows]
    assert row["held_out"] == {"step": [5], "loss": [outcome.evaluations[5]]}
    assert len(row["samples_ms"]) == 3 and sorted(row["samples_ms"])[1] == row["ms"]
    assert 0 < row["host_ms"] < row["ms"]
    assert row["tokens_per_s"] == pytest.approx(144e3 / row["ms"])
    assert "retried" not in row


def _left_behind() -> tuple[list[bool], int]:
    """Return which chunks of a run's model are alive, and how many process groups are left."""
    build, models = loop.build_chunks, []

    def build_and_note(*args: Any) -> Any:
        chunks = build(*args)
        models.extend(weakref.ref(chunk) for chunk in chunks)
        return chunks

    before = len(distributed_c10d._world.pg_map)
    with patch.object(loop, "build_chunks", build_and_note):
        _train("--steps 1")
    gc.collect()
    alive = [model() is not None for model in models]
    return alive, len(distributed_c10d._world.pg_map) - before


def test_nothing_of_a_run_outlives_it(pool2):
    assert pool2.run(_left_behind) == [([False], 0)] * 2


def _counted(flags: str) -> Counted:
    with megatron_on_cpu(), shared_groups():
        return counted_run(f"{SMALL} {flags}", CPU)[0]


@pytest.mark.parametrize(
    ("flags", "etp", "given"),
    [
        ("--eval-every 2 --global-batch 18", 1, {}),
        ("--experts module --pp 2 --num-layers 4 --balancing expert-bias", 1, {}),
        ("--experts packed --num-layers 3 --global-batch 18", 1, {}),
        ("--experts packed --num-layers 4 --pp 2 --global-batch 9", 1, {"store_layers": 2}),
        ("--experts packed --etp 2 --ep 1 --padded-capacity-pool cells", 2, {}),
    ],
)
def test_what_a_trace_replays_is_what_the_run_counted(pool2, tmp_path, flags, etp, given):
    run = f"--steps 2 --capacity-factor 0.5 --trace {tmp_path} {flags}"
    counted = pool2.run(_counted, run)
    assert_trace_says_the_same(tmp_path, counted, **given)
    trace = load_traces([tmp_path])
    assert (trace.run.num_experts, trace.run.top_k, trace.run.num_tokens) == (8, 2, 72)
    assert (trace.run.hidden_size, trace.run.fc1_width) == (128, 2 * 256)
    assert trace.run.etp_size == etp
    assert set(trace.steps.tolist()) == {1, 2} and len(list(tmp_path.iterdir())) == 2


def test_layers_are_captured_ahead_of_the_first_step_that_is_not_eager(monkeypatch, schedule):
    events: list[Any] = []
    for name in ("__init__", "capture"):
        note = lambda _, *chunks, name=name, **given: events.append((name, given))  # noqa: E731
        monkeypatch.setattr(loop.LayerGraphs, name, note)
    trainer = loop.Trainer(on_a_gpu("layer"), CPU)
    with megatron_on_cpu():
        for number in range(1, 6):
            trainer.step(number)
            events.append(number)
            assert schedule.call_count == number
    sizes = {"seq_length": 128, "micro_batch": 8, "optimizers": (trainer.optimizer,)}
    assert events == [("__init__", sizes), 1, 2, 3, ("capture", {}), 4, 5]


def _run_on_gpus(flags: str) -> tuple[Counted, list[float]]:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.cuda.set_stream(training_stream())
    run = f"--device cuda --workers {dist.get_world_size()} --seq-length 128 --micro-batch 3"
    return counted_run(f"{run} --steps 24 --capacity-factor 0.5 --deterministic {flags}", device)


def _fails(flags: str) -> tuple[str, str]:
    """Return the error that ends a run, and the line before it."""
    lines: list[str] = []
    with patch.object(loop, "show", lines.append), pytest.raises(RuntimeError) as caught:
        _train_in_shared_groups(flags)
    uninstall()
    with shared_groups():  # Else the end of the process ends what a failed run has set up.
        parallel_state.destroy_model_parallel()
    unset_num_microbatches_calculator()
    return str(caught.value), lines[-1]


def test_a_trace_and_a_line_have_the_step_that_ended_their_run(pool2, tmp_path):
    flags = "--steps 2 --capacity-factor 0.5 --padded-capacity-pool cells"
    ends = pool2.run(_fails, f"{flags} --padded-on-overflow error --trace {tmp_path}")
    for words, line in ends:
        found: Any = re.match(r"on_overflow='error': .* at step 1 \((.*)% of all rows\)", words)
        of_all = float(found[1])
        assert line.startswith("step 1/2 | loss ") and f" | dropped {of_all:.1f}%" in line
    assert load_traces([tmp_path]).steps.tolist() == [1] * 4  # Two layers, two ranks.


def check_on_gpus(pool: WorkerPool, folder: Path, flags: str) -> None:
    """Check traces of runs with graphs of each kind, and that all have the same losses."""
    losses: dict[str, list[list[float]]] = {}
    for graph in ("none", "partial", "layer", "full-iteration"):
        traced = f"--trace {folder / graph} --graph {graph} {flags}"
        found = pool.run(_run_on_gpus, traced, timeout_s=240.0)
        counted = [of_rank for of_rank, _ in found]
        assert_trace_says_the_same(folder / graph, counted)
        losses[graph] = [of_rank for _, of_rank in found]
        assert losses[graph] == losses["none"], graph


@pytest.mark.gpu
def test_traces_and_losses_with_graphs_on_one_gpu(gpu_pools, tmp_path):
    check_on_gpus(gpu_pools[1], tmp_path, "")


@pytest.mark.multi_gpu
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("more", ["", "--balancing expert-bias"])
def test_traces_and_losses_with_graphs_on_all_gpus(gpu_pools, tmp_path, more, passes):
    ranks = next(n for n in (8, 4, 2) if n <= torch.cuda.device_count())
    check_on_gpus(gpu_pools[ranks], tmp_path, f"--global-batch {3 * passes * ranks} {more}")
