"""Whole training runs on two ranks: learning, dropping, repeated steps, traces, results."""

import contextlib
import gc
import io
import itertools
import json
import math
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed import distributed_c10d

from padded_dispatch.megatron import uninstall
from padded_dispatch.megatron.cpu import megatron_on_cpu
from padded_dispatch.trace import load_traces
from padded_dispatch.train import loop
from padded_dispatch.train.arguments import parse
from padded_dispatch.train.loop import Outcome
from tests.support.traced_run import Counted, assert_trace_says_the_same, counted_run

SMALL = "--seq-length 24 --micro-batch 3 --device cpu --workers 2"
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
                outcomes += [loop.train_in_groups(settings, CPU) for settings in same]
    uninstall()
    return outcomes


def train(pool: Any, *runs: str) -> list[Outcome]:
    first, second = pool.run(_train, *runs)
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
    assert outcome.last_loss == pytest.approx(mean, rel=1e-12)
    assert outcome.rows[2].loss < mean < outcome.rows[0].loss
    assert Outcome(rows=outcome.rows[:1], evaluations={}).last_loss is None


def test_rows_are_dropped_and_evaluation_drops_none(pool2):
    flags = "--steps 2 --capacity-factor"
    no_drop, small, forced = train(
        pool2,
        f"{flags} none",
        f"{flags} 0.25 --eval-every 2",
        f"{flags} 2 --balancing forced --seq-length 256 --micro-batch 2",
    )
    # 72 tokens, 2 of 8 experts each, 72 slots for each expert.
    assert [(row.dropped, row.fill) for row in no_drop.rows] == [(0, 2 / 8)] * 2
    # ceil(72 * 2 / 8 * 0.25) = 5 slots, so at most 40 of 144 rows.
    for row in small.rows:
        assert row.fill is not None and row.dropped is not None
        assert row.dropped == pytest.approx(1 - row.fill * 40 / 144)
        assert row.dropped >= 1 - 40 / 144
    assert list(small.evaluations) == [2]
    assert abs(small.evaluations[2] - small.rows[1].loss) < 0.5
    assert [(row.dropped, row.fill) for row in forced.rows] == [(0, 1 / 2)] * 2


def test_repeated_steps_are_those_of_a_run_that_never_drops(pool2):
    """On a CPU products depend on the number of padded rows, in the last bits."""
    flags, retry = "--global-batch 18", "--capacity-factor 0.75 --padded-on-overflow retry"
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
    (outcome,) = train(pool2, flags)
    (kept,) = json.loads(path.read_text())["runs"]
    assert kept["about"]["commit"] == "abc-dirty"
    (row,) = kept["rows"]
    assert (row["model"], row["contender"], row["graph"]) == ("tiny", "ours", "none")
    assert (row["ep"], row["tokens"], row["capacity_factor"]) == (2, 72, 1.25)
    assert (row["seed"], row["policy"], row["pool"]) == (1234, "probs", "expert")
    assert row["flags"]["recipe"]["seq_length"] == 24
    assert row["flags"]["dispatch"]["padded"]["on_overflow"] == "warn"
    # A loss for each step; a line covers the steps since the line before.
    assert row["step"] == [1, 2, 4, 5] == [line.step for line in outcome.rows]
    assert len(row["loss"]) == 5 and row["loss"][1] == outcome.rows[1].loss
    assert sum(row["loss"][2:4]) / 2 == pytest.approx(outcome.rows[2].loss, rel=1e-12)
    assert row["dropped"] == [line.dropped for line in outcome.rows]
    assert row["fill"] == [line.fill for line in outcome.rows]
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
    with megatron_on_cpu():
        return counted_run(f"{SMALL} {flags}", CPU)


@pytest.mark.parametrize(
    ("flags", "given"),
    [
        ("--eval-every 2 --global-batch 18 --drop-policy position", {"strikes": "position"}),
        ("--pp 2 --num-layers 4 --balancing expert-bias", {}),
        ("--experts packed --num-layers 3 --global-batch 18", {}),
        ("--experts packed --num-layers 4 --pp 2 --global-batch 9", {"store_layers": 2}),
    ],
)
def test_what_a_trace_replays_is_what_the_run_counted(pool2, tmp_path, flags, given):
    run = f"--steps 2 --capacity-factor 0.5 --trace {tmp_path} {flags}"
    counted = pool2.run(_counted, run)
    assert_trace_says_the_same(tmp_path, counted, factor=0.5, **given)
    trace = load_traces([tmp_path])
    assert (trace.num_experts, trace.top_k, trace.num_tokens) == (8, 2, 72)
    assert set(trace.steps.tolist()) == {1, 2} and len(list(tmp_path.iterdir())) == 2
