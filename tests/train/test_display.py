"""Progress on a terminal and on a pipe, and the files of a run."""

import io
import json
from typing import Any

import pytest

from padded_dispatch.train.display import Log, Pace, block, progress_line
from padded_dispatch.train.metrics import Row
from padded_dispatch.train.settings import Output


class Terminal(io.StringIO):
    def isatty(self):
        return True


def row(step, **given) -> Row:
    values: dict[str, Any] = {
        "step": step,
        "loss": 3.25,
        "lr": 1e-3,
        "grad_norm": None,
        "step_ms": 100.0,
        "tokens_per_s": 12345.6,
        "tflops_per_gpu": 0.0215,
        "fill": 0.625,
        "dropped": 0.125,
        "unplaced": 0,
        "retried": None,
        "allocated_gib": None,
        "reserved_gib": None,
    }
    return Row(**values | given)


FIGURES = "12,346 tokens/s  21.5 GFLOP/s per process  fill 62.5%  dropped 12.5%"
LINE = f"loss 3.2500  {FIGURES}"


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


def test_a_line_on_a_cpu_and_on_a_gpu():
    assert progress_line(row(7), 200, 61.0) == f"step   7/200  {LINE}  1:01 left"
    gpu = row(10, tflops_per_gpu=321.4, fill=None, dropped=None, allocated_gib=17.25)
    assert progress_line(gpu, 10, None) == (
        "step 10/10  loss 3.2500  12,346 tokens/s  321 TFLOP/s per GPU  17.2 GiB"
    )


def test_repeated_steps_are_in_the_line():
    assert progress_line(row(7, retried=0), 200, None) == f"step   7/200  {LINE}  retried 0"
    gpu = row(10, fill=None, dropped=None, allocated_gib=17.25, retried=3)
    assert progress_line(gpu, 10, None).endswith("per GPU  retried 3  17.2 GiB")


def test_a_block_has_a_bar_with_the_curve_of_the_loss_below_it():
    assert block(row(100), 200, [5.0, 4.0, 3.25], 61.0, False) == [
        f"step 100/200  {'█' * 23}{'░' * 23}  50%  1:01 left",
        f"loss 3.2500   {'█' * 7}▆{'▄' * 7}▃{'▁' * 7}",
        FIGURES,
    ]
    assert block(row(4, loss=2.0), 4, [3.0, 2.0], None, True) == [
        f"step 4/4     {'#' * 47} 100%",
        f"loss 2.0000  {'@' * 23}+{'.' * 23}",
        FIGURES,
    ]


@pytest.mark.parametrize(("columns", "longest"), [(40, 39), (80, 79), (120, 95)])
def test_no_line_of_a_block_reaches_the_width(monkeypatch, columns, longest):
    """The bar is as long as the terminal has room for, up to 60 columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    with Log(Output(steps=2000), 0, stream, clock=iter((0.0, 3600.0)).__next__) as log:
        log.row(row(1))
        log.row(row(1000))
    lines = stream.getvalue().split("\x1b[J")[-1].splitlines()
    assert len(lines) == 3 and max(map(len, lines)) == longest


def test_the_time_left_counts_from_the_first_row():
    """The first step compiles, captures and warms up."""
    now = iter((1000.0, 1010.0, 1030.0, 1031.0))
    pace = Pace(40, now.__next__)
    assert [pace.left_s(step) for step in (1, 11, 21, 40)] == [None, 29.0, 28.5, None]


def show(stream, **given) -> str:
    clock = iter((0.0, 2.0, 4.0, 6.0)).__next__
    with Log(Output(steps=12, **given), 0, stream, clock) as log:
        log.row(row(9))
        log.row(row(10))
        log.evaluation(10, 2.5)
        log.row(row(11))
        log.message("the end")
        log.row(row(12))
        log.message("after it")
    return stream.getvalue()


def test_on_a_pipe_every_row_is_a_line():
    assert show(io.StringIO()).splitlines() == [
        f"step  9/12  {LINE}",
        f"step 10/12  {LINE}  0:04 left",
        "step 10  held-out loss 2.5000",
        f"step 11/12  {LINE}  0:02 left",
        "the end",
        f"step 12/12  {LINE}",
        "after it",
    ]


def test_on_a_terminal_the_block_is_redrawn_below_everything_else():
    parts = show(Terminal()).split("\r\x1b[3A\x1b[J")
    assert [part[:10].rstrip() for part in parts] == [
        "step  9/12",
        "step 10/12",
        "step 10  h",
        "step 11/12",
        "the end\nst",
        "step 12/12",
    ]
    assert [len(part.splitlines()) for part in parts] == [3, 3, 4, 3, 4, 4]
    assert parts[2].splitlines()[1:] == parts[1].splitlines()
    assert parts[-1].endswith("\nafter it\n")


def test_json_lines_on_stdout_and_in_the_file_are_the_same(tmp_path):
    shown = show(Terminal(), json=True, run_dir=tmp_path / "new")
    kept = (tmp_path / "new" / "metrics.jsonl").read_text()
    assert shown == kept
    rows = [json.loads(line) for line in kept.splitlines()]
    assert [(r["kind"], r["step"]) for r in rows] == [
        ("train", 9),
        ("train", 10),
        ("held-out", 10),
        ("train", 11),
        ("train", 12),
    ]
    assert rows[0]["fill"] == 0.625 and rows[0]["grad_norm"] is None
    assert rows[2] == {"kind": "held-out", "step": 10, "loss": 2.5}


def test_a_resumed_run_drops_the_rows_past_its_checkpoint(tmp_path):
    show(io.StringIO(), run_dir=tmp_path)
    stream = io.StringIO()
    with Log(Output(steps=20, run_dir=tmp_path, resume=True), 10, stream) as log:
        log.row(row(11, loss=1.0))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["loss"]) for r in rows] == [(9, 3.25), (10, 3.25), (10, 2.5), (11, 1.0)]
    assert stream.getvalue().splitlines()[0] == "resuming at step 10 of 20"


def test_a_resumed_run_continues_the_curve(tmp_path):
    show(io.StringIO(), run_dir=tmp_path)
    stream = Terminal()
    with Log(Output(steps=22, run_dir=tmp_path, resume=True), 10, stream) as log:
        log.row(row(11, loss=1.0))
    assert stream.getvalue().splitlines()[2] == f"loss 1.0000  {'█' * 15}▅{'▁' * 7}"


def test_a_resumed_run_drops_a_last_row_that_is_not_whole(tmp_path):
    show(io.StringIO(), run_dir=tmp_path)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text()
    for torn in ('{"kind": "train", "st', '{"kind": "train", "step": 13}'):
        path.write_text(whole + torn)
        with Log(Output(steps=20, run_dir=tmp_path, resume=True), 12, io.StringIO()):
            pass
        assert path.read_text() == whole


def test_tensorboard_gets_every_figure(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    show(io.StringIO(), run_dir=tmp_path, tensorboard=True)
    events = EventAccumulator(str(tmp_path)).Reload()
    steps = [(e.step, e.value) for e in events.Scalars("train/fill")]
    assert steps == [(9, 0.625), (10, 0.625), (11, 0.625), (12, 0.625)]
    assert [(e.step, e.value) for e in events.Scalars("held-out/loss")] == [(10, 2.5)]
    assert "train/grad_norm" not in events.Tags()["scalars"]


def test_a_kill_loses_no_tensorboard_figure(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Log(Output(steps=20, run_dir=tmp_path, tensorboard=True), 0, io.StringIO()) as log:
        log.row(row(9))
        log.row(row(10))
        events = EventAccumulator(str(tmp_path)).Reload()
        assert [e.step for e in events.Scalars("train/loss")] == [9, 10]
