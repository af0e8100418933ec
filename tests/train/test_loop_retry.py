"""Training runs that repeat steps: the losses of runs that never drop, and what they show."""

import json
from pathlib import Path
from typing import Any

import pytest

from padded_dispatch.train.loop import Outcome
from tests.train.test_loop import run

LAYOUTS = [
    "--global-batch 18",
    "--ep 1 --global-batch 6",
    "--pp 2 --global-batch 6",
    "--pp 2 --vpp 2 --num-layers 4 --global-batch 6",
    "--balancing expert-bias --global-batch 12",
    "--router-skew 1",
]


def losses(outcome: Outcome) -> list[float]:
    return [row.loss for row in outcome.rows]


@pytest.mark.parametrize("flags", LAYOUTS)
def test_losses_are_those_of_a_run_that_never_drops(pool2, flags):
    """The run that never drops takes the same sizes: on a CPU products depend on padded rows."""
    flags = f"--steps 4 {flags}"
    never = run(pool2, f"{flags} --padded-schedule 0:fit")
    retried = run(pool2, f"{flags} --capacity-factor 0.75 --padded-on-overflow retry")
    assert losses(retried) == losses(never)
    assert [row.retried for row in retried.rows] == [1] * 4
    assert [row.retried for row in never.rows] == [None] * 4
    for row, wanted in zip(retried.rows, never.rows, strict=True):
        assert (row.dropped, row.fill, row.unplaced) == (0, wanted.fill, 0)


def results_row(out: Path) -> dict[str, Any]:
    [results] = json.loads(out.read_text())["runs"]
    [row] = results["rows"]
    return row


def test_repeated_steps_are_shown_and_stored(pool2, tmp_path):
    """The first step of two is repeated; in the second each expert has a slot for each token."""
    folder, ours, other = tmp_path / "run", tmp_path / "ours.json", tmp_path / "other.json"
    flags = "--steps 2 --router-skew 0.2 --commit abc"
    retried = f"--padded-schedule 0:0.75,1:4 --padded-on-overflow retry --run-dir {folder}"
    outcome = run(pool2, f"{flags} {retried} --out {ours}")
    assert [row.retried for row in outcome.rows] == [1, 0]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["retried"] for line in lines if line["kind"] == "train"] == [1, 0]
    row = results_row(ours)
    assert row["retried"] == 1
    # The skew's count of demand goes back, too: the first pass asked for other experts.
    run(pool2, f"{flags} --padded-schedule 0:fit --out {other}")
    never = results_row(other)
    assert row["overload"][0] == never["overload"][0]
    assert "retried" not in never
