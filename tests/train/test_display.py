"""Progress on a terminal and on a pipe, and the files of a run."""

import io
import json
from typing import Any

from padded_dispatch.train.display import Log, progress_line
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
        "allocated_gib": None,
        "reserved_gib": None,
    }
    return Row(**values | given)


LINE = "loss 3.2500  12,346 tokens/s  21.5 GFLOP/s per process  fill 62.5%  dropped 12.5%"


def test_a_line_on_a_cpu_and_on_a_gpu():
    assert progress_line(row(7), 200) == f"step   7/200  {LINE}"
    gpu = row(10, tflops_per_gpu=321.4, fill=None, dropped=None, allocated_gib=17.25)
    assert progress_line(gpu, 10) == (
        "step 10/10  loss 3.2500  12,346 tokens/s  321 TFLOP/s per GPU  17.2 GiB"
    )


def show(stream, **given) -> str:
    with Log(Output(steps=20, **given), 0, stream) as log:
        log.row(row(9))
        log.row(row(10))
        log.evaluation(10, 2.5)
        log.row(row(11))
        log.message("the end")
        log.row(row(12))
    return stream.getvalue()


def test_on_a_pipe_every_row_is_a_line():
    assert show(io.StringIO()).splitlines() == [
        f"step  9/20  {LINE}",
        f"step 10/20  {LINE}",
        "step 10  held-out loss 2.5000",
        f"step 11/20  {LINE}",
        "the end",
        f"step 12/20  {LINE}",
    ]


def test_on_a_terminal_rows_overwrite_each_other_and_nothing_else():
    assert show(Terminal()) == (
        f"step  9/20  {LINE}\r\x1b[Kstep 10/20  {LINE}\n"
        "step 10  held-out loss 2.5000\n"
        f"step 11/20  {LINE}\n"
        "the end\n"
        f"step 12/20  {LINE}\n"
    )


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
    with Log(Output(steps=20, run_dir=tmp_path, resume=True), 10, io.StringIO()) as log:
        log.row(row(11, loss=1.0))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["loss"]) for r in rows] == [(9, 3.25), (10, 3.25), (10, 2.5), (11, 1.0)]


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
