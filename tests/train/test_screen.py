"""Lines, blocks and clocks on a terminal; on anything else only the lines."""

import io
import math
import threading

import pytest

from padded_dispatch.train import screen
from padded_dispatch.train.screen import Screen, Waiting, bar, curve, duration, needs_ascii


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "12")


def test_a_block_is_replaced_and_lines_stay_above_it():
    stream = Terminal()
    shown = Screen(stream)
    shown.block(["one", "two"])
    shown.block(["three is cut here"])
    shown.line("stays, at any width")
    shown.close()
    shown.line("after it")
    up = "\r\x1b[{}A\x1b[J"
    assert stream.getvalue() == (
        f"one\ntwo\n{up.format(2)}three is cu\n{up.format(1)}stays, at any width\nthree is cu\n"
        "after it\n"
    )


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_no_block_without_a_terminal(stream, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    shown = Screen(stream)
    assert not shown.is_live
    shown.block(["one"])
    shown.line("stays")
    shown.close()
    waiting = Waiting("importing", stream)
    waiting.stop()
    assert stream.getvalue() == "stays\n"


def test_a_clock_runs_until_it_is_stopped(monkeypatch):
    now = iter((100.0, 100.4, 103.9))
    monkeypatch.setattr(screen.time, "monotonic", lambda: next(now))
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    before = threading.active_count()
    waiting = Waiting("importing", stream)
    waiting._write()
    assert threading.active_count() == before + 1
    waiting.stop()
    waiting.stop()
    assert threading.active_count() == before
    erase = "\r\x1b[K"
    assert stream.getvalue() == f"{erase}importing ... 0 s{erase}importing ... 3 s{erase}"


def test_one_wait_replaces_the_other(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    screen.stop_waiting()
    screen.wait_for("first", stream)
    screen.wait_for("second", stream)
    screen.stop_waiting()
    screen.stop_waiting()
    erase = "\r\x1b[K"
    assert stream.getvalue() == f"{erase}first ... 0 s{erase}{erase}second ... 0 s{erase}"


@pytest.mark.parametrize(
    ("values", "columns", "shown"),
    [
        ([], 4, ""),
        ([5.0], 3, "▁▁▁"),
        ([1, 2, 3], 3, "▁▅█"),
        ([3, 1], 5, "██▅▁▁"),  # The column in the middle is of both.
        ([9, 7, 1, 1], 2, "█▁"),
        ([1, math.nan, 8], 3, "▁x█"),
        ([math.inf, math.inf], 2, "xx"),
        ([4, 4, 4], 3, "▁▁▁"),
    ],
)
def test_curve(values, columns, shown):
    assert curve(values, columns) == shown


def test_curve_and_bar_in_ascii():
    assert curve([1, 8], 2, ascii_only=True) == ".@"
    assert bar(0.5, 4, ascii_only=True) == "##.."
    assert [bar(share, 4) for share in (0, 0.24, 0.5, 1)] == ["░░░░", "░░░░", "██░░", "████"]


def test_what_an_encoding_lacks():
    assert not needs_ascii(io.StringIO())
    assert not needs_ascii(io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert needs_ascii(io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))


def test_duration():
    assert [duration(s) for s in (0, 0.4, 59.6, 61, 3723)] == [
        *("0:00", "0:00", "1:00", "1:01"),
        "1:02:03",
    ]
