"""`compare`: several contenders in the same processes."""

import contextlib
import gc
import io
import json
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core import parallel_state
from torch.distributed import distributed_c10d

from padded_dispatch.megatron.cpu import megatron_on_cpu
from padded_dispatch.train import loop
from padded_dispatch.train.arguments import parse
from padded_dispatch.train.compare import main
from tests.support.inline_pool import only_worker
from tests.support.pool import WorkerPool

SMALL = "--steps 2 --seq-length 24 --micro-batch 3 --log-every 1"


def test_contenders_run_in_turn_and_are_rows_of_one_run(tmp_path, capfd):
    path = tmp_path / "results.json"
    flags = f"{SMALL} --out {path} --commit abc --repeats 2"
    make_groups = parallel_state.initialize_model_parallel
    with (
        only_worker(),
        patch.object(parallel_state, "initialize_model_parallel", wraps=make_groups) as groups,
    ):
        assert main(f"{flags} --vs --capacity-factor 2 --vs --deterministic".split()) == 0
    assert groups.call_count == 1
    (run,) = json.loads(path.read_text())["runs"]
    rows = run["rows"]
    assert [row["capacity_factor"] for row in rows] == [2.0, 1.25, 2.0, 1.25]
    assert [row["flags"]["recipe"]["deterministic"] for row in rows] == [False, True, False, True]
    # A run's numbers do not depend on the runs before it.
    losses = [row["loss"] for row in rows]
    assert losses[:2] == losses[2:] and losses[0] != losses[1]
    assert all(row["seconds"] > 0 and row["allocated_before_gib"] is None for row in rows)
    assert "2/4 --deterministic\n" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "^--vs must be given at least once, got 0; add one"),
        ("--repeats 0 --vs", "^--repeats must be at least 1, got 0$"),
        (
            "--vs --workers 1 --vs",
            "^--device and --workers must be the same for all contenders, got 'cpu, 2 and cpu, 1'; "
            "give them before the first --vs$",
        ),
        (
            "--vs --run-dir somewhere",
            "^--run-dir must be left out of compare, .*, got 'somewhere'; ",
        ),
        (
            "--trace traces --trace-every 1 --vs",
            "^--trace must be left out of compare, .*, got 'traces'; keep figures with --out$",
        ),
        (
            "--experts packed --vs --vs --dispatcher allgather",
            "^--padded-experts must be left out with --dispatcher allgather, got 'packed'; ",
        ),
        ("--vs --out /dev/null/r.json", "^--out must .*/dev/null"),
        (
            "--vs --vs --graph layer",
            "^--graph must be none on a CPU, got 'layer'; add --device cuda",
        ),
    ],
)
def test_mistakes_are_found_before_there_are_workers(flags, message):
    with pytest.raises(ValueError, match=message):
        main(f"{SMALL} {flags}".split())


def test_help_explains_vs(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--repeats N train all contenders in turn, N times over (default: 1)" in text
    assert "Each --vs starts a contender with flags of its own" in text


def left_behind(dispatcher: str) -> tuple[list[bool], int]:
    """Return which chunks of a run's model are alive, and how many process groups are left."""
    settings = parse(f"--device cpu --workers 2 {SMALL} --dispatcher {dispatcher}".split())
    build, models = loop.build_chunks, []

    def build_and_note(*args: Any) -> Any:
        chunks = build(*args)
        models.extend(weakref.ref(chunk) for chunk in chunks)
        return chunks

    before = len(distributed_c10d._world.pg_map)
    with (
        megatron_on_cpu(),
        patch.object(loop, "build_chunks", build_and_note),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        loop.train(settings, torch.device("cpu"))
    gc.collect()
    alive = [model() is not None for model in models]
    return alive, len(distributed_c10d._world.pg_map) - before


@pytest.mark.parametrize("dispatcher", ["padded_alltoall", "allgather", "alltoall-drop-pad"])
def test_nothing_of_a_run_outlives_it(pool2: WorkerPool, dispatcher):
    assert pool2.run(left_behind, dispatcher) == [([False], 0)] * 2
