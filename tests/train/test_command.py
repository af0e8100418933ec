"""The commands: several contenders in the same processes, and what a run comes to."""

import json
import os
import re
import signal
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from megatron.core import parallel_state
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from padded_dispatch.train import command
from padded_dispatch.train.arguments import read, read_compare
from padded_dispatch.train.loop import Trainer
from padded_dispatch.train.metrics import Step, Summary
from tests.support.tiny import only_worker

SMALL = "--steps 2 --log-every 1 --seq-length 24 --micro-batch 3"


def compare(flags: str) -> int:
    return command.compare(read_compare(flags.split()))


def test_contenders_run_in_turn_and_are_rows_of_one_run(tmp_path, capfd):
    path = tmp_path / "results.json"
    flags = f"{SMALL} --out {path} --commit abc --padded-capacity-pool cells"
    make_groups = parallel_state.initialize_model_parallel
    with (
        only_worker(),
        patch.object(sys, "argv", ["...", "compare", "--out", "my results.json"]),
        patch.object(parallel_state, "initialize_model_parallel", wraps=make_groups) as groups,
    ):
        every = "--vs --capacity-factor 2 0.5 --vs --deterministic"
        assert compare(f"{flags} {every} {every}") == 0
    assert groups.call_count == 1
    (run,) = json.loads(path.read_text())["runs"]
    assert run["about"]["command"] == "padded-dispatch compare --out 'my results.json'"
    rows = run["rows"]
    assert [row["capacity_factor"] for row in rows] == [2.0, 0.5, 1.25] * 2
    assert [row["flags"]["recipe"]["deterministic"] for row in rows] == [False, False, True] * 2
    # A run's numbers do not depend on the runs before it.
    losses = [row["loss"] for row in rows]
    assert losses[:3] == losses[3:] and losses[0] != losses[1]
    # 72 tokens, 2 of 8 experts each: 9 of the 18 slots of perfect balance.
    assert all(share >= 0.5 for share in rows[1]["dropped"])
    assert all(row["host_ms"] > 0 for row in rows)
    out = capfd.readouterr().out
    # The table has a line for each, beside the first one.
    lines = out[out.index("\ncontender ") :].splitlines()[1:-1]
    head, *shown = (re.split("  +", line) for line in lines)
    assert head == ["contender", "loss", "ms", "tokens/s", "dropped", "loss - first", "ms / first"]
    assert shown[1][0] == "--capacity-factor 0.5" and float(shown[1][4][:-1]) >= 50
    for words in shown[1:]:
        gap = float(words[1]) - float(shown[0][1])
        assert float(words[5]) == pytest.approx(gap, abs=0.0011)
    lines = out.splitlines()
    assert [line for line in lines if line[1:3] == "/6"] == [
        f"{number}/6 {name}"
        for number, name in enumerate(
            ["--capacity-factor 2", "--capacity-factor 0.5", "--deterministic"] * 2, 1
        )
    ]


def test_a_contender_that_fails_leaves_the_rows_of_all(tmp_path, capfd):
    path = tmp_path / "results.json"
    fails = "--vs --padded-on-overflow error --padded-capacity-pool cells --capacity-factor 0.5"
    flags = f"{SMALL} --device cpu --workers 1 --out {path} {fails} --vs --seed 1 2 {fails}"
    with pytest.raises(SystemExit, match="1"):
        compare(flags)
    (run,) = json.loads(path.read_text())["runs"]
    assert [row["seed"] for row in run["rows"]] == [1234, 1, 2, 1234]
    assert [row.get("ended_early") for row in run["rows"]] == [True, None, None, True]
    found = capfd.readouterr()
    words = fails.removeprefix("--vs ")
    assert found.err.splitlines()[-1] == f"2 of 4 failed: 1/4 {words}; 4/4 {words}"
    assert found.out.count("starting 1 process: 10 to 30 seconds\n") == 2
    # Also those that fail print the line of their last step, with what it dropped.
    lines = [line for line in found.out.splitlines() if line.startswith("step ")]
    assert lines and all(" | dropped " in line for line in lines)
    assert found.out.count("  failed\n") == 2


@pytest.mark.parametrize(("ended", "line"), [((1, 3), "1 of 3 failed: 2/3 --seed 1\n"), ((3,), "")])
def test_processes_that_die_after_the_last_run_are_a_failure(monkeypatch, capsys, ended, line):
    """`ended`: runs that have ended, whether well or not, when the processes die."""
    ends = iter(ended)

    def die(work: Any, args: Any, **given: Any) -> None:
        args[1].value = next(ends)
        raise SystemExit(1)

    monkeypatch.setattr("padded_dispatch.utils.launch.start_workers", die)
    with pytest.raises(SystemExit, match="1"):
        compare(f"{SMALL} --device cpu --vs --seed 0 1 2")
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_stopped_leaves_what_it_had(tmp_path, capfd, number):
    path, whole = tmp_path / "results.json", Trainer.step

    def step(trainer: Trainer, at: int) -> Step:
        if at == 4:
            os.kill(os.getpid(), number)
        return whole(trainer, at)

    handler = signal.getsignal(number)
    flags = f"{SMALL} --steps 9 --log-every 2 --eval-every 2 --out {path} --vs"
    ends = pytest.raises(SystemExit, match=str(128 + number))
    with only_worker(), patch.object(Trainer, "step", step), ends:
        compare(flags)
    assert signal.getsignal(number) is handler
    ((row,),) = (run["rows"] for run in json.loads(path.read_text())["runs"])
    assert row["ended_early"] and (row["step"], row["held_out"]["step"]) == ([1, 2], [2])
    assert len(row["loss"]) == 2 and len(row["samples_ms"]) == 1 and row["pool"] == "store"
    assert capfd.readouterr().out.endswith(f"\nended early: 2 of 9 steps are in {path}\n")


SUMMARY = Summary(
    num_steps=400,
    first_loss=5.0,
    loss=4.0,
    held_out=None,
    ms=100.0,
    tokens_per_s=10_240.0,
    dropped=0.0,
    recomputed=0.00034,
    gib=None,
    seconds=58.4,
)


@pytest.mark.parametrize(("loss", "code"), [(4.0, 0), (5.5, 1), (None, 0)])
def test_train_ends_with_what_it_found_and_the_next_commands(monkeypatch, capsys, loss, code):
    summary = replace(SUMMARY, loss=loss)
    monkeypatch.setattr(command, "_start", lambda runs: [summary])
    assert command.train(read(["--device", "cpu"])) == code
    if loss is None:
        assert capsys.readouterr().out == ""
        return
    verb = ("fell from 5.00 to 4.00", "did not fall: it went from 5.00 to 5.50")[code]
    _, found, _, *steps = capsys.readouterr().out.splitlines()
    assert found == (
        f"Loss {verb} (mean of the last ten steps) in 400 steps and 58 seconds; 10,240 tokens/s; "
        "0 % of the rows dropped; 0.03 % recomputed in backward."
    )
    assert [re.split("  +", step)[2] for step in steps] == [
        "padded-dispatch compare --vs --vs --dispatcher allgather",
        "padded-dispatch train --trace traces && padded-dispatch tune traces",
        "two flags: see the README, 'Use it in Megatron'",
    ]
    for words in (step.split("padded-dispatch ")[1].split() for step in steps[:2]):
        assert words[0] != "compare" or read_compare(words[1:])


def test_a_short_run_names_the_steps_of_its_mean():
    found = replace(SUMMARY, num_steps=6).sentence()
    assert found.startswith("Loss fell from 5.00 to 4.00 (mean of all later steps) in 6 steps and")


def test_the_next_command_names_a_folder_with_a_space(monkeypatch, capsys):
    monkeypatch.setattr(command, "_start", lambda runs: [SUMMARY])
    command.train(read(["--device", "cpu", "--trace", "my traces"]))
    assert "padded-dispatch tune 'my traces'\n" in capsys.readouterr().out


def test_compare_gives_each_contender_a_curve(tmp_path):
    board = tmp_path / "board"
    with only_worker():
        flags = f"{SMALL} --eval-every 2 --tensorboard {board} --vs --vs --dispatcher allgather"
        assert compare(flags) == 0
    assert [path.name for path in sorted(board.iterdir())] == [
        "1 padded_alltoall",
        "2 --dispatcher allgather",
    ]
    events = EventAccumulator(str(board / "1 padded_alltoall")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2]
    assert events.Scalars("loss")[0].value == pytest.approx(5.6, abs=0.2)
    assert {"dropped", "recomputed", "held-out loss"} <= set(events.Tags()["scalars"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--vs --workers 1 --vs",
            "^--device and --workers must be the same for all contenders, got 'cpu, 2 and cpu, 1'; "
            "give them before the first --vs$",
        ),
        (
            "--trace traces --vs",
            "^--trace must be left out of compare, .*, got 'traces'; keep figures with --out$",
        ),
        (
            "--vs --padded-layer-factors 1:2,5:2",
            # A HybridModel counts attention, too.
            "^--padded-layer-factors must name .* from 1 to [24], .*leave out layer 5$",
        ),
        (
            "--text SHORT --vs",
            "^--seq-length must be less than the 7 bytes to train on, or to evaluate on, got 24$",
        ),
        (
            "--vs --dispatcher alltoall-drop-pad --capacity-factor 4.1",
            "^--capacity-factor must be at most 4, which drops nothing, with --dispatcher "
            "alltoall-drop-pad, got 4.1$",
        ),
        ("--vs --out /dev/null/r.json", "^--out must .*/dev/null"),
        ("--vs --vs --graph layer", "^--graph must be none on a CPU, got 'layer'; run on a GPU$"),
    ],
)
def test_mistakes_are_found_before_there_are_workers(tmp_path, flags, message):
    (tmp_path / "short.py").write_text("x = 12")
    (tmp_path / "long.md").write_text("x" * 99)
    flags = flags.replace("SHORT", str(tmp_path))
    with (
        patch("padded_dispatch.utils.launch.start_workers", None),
        pytest.raises(ValueError, match=message),
    ):
        compare(f"{SMALL} {flags}")
