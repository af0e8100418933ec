"""Signals that end a job, and blocks that they may not interrupt."""

import os
import signal

import pytest

from padded_dispatch.utils.signals import ending_signals, held_back, write_line


@pytest.fixture
def handled():
    """Provide a list of the signals that reach a handler of this test."""
    seen = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.signal(n, lambda number, frame: seen.append(number)) for n in numbers}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_waits_for_the_end_of_the_block(handled, number):
    with held_back():
        os.kill(os.getpid(), number)
        assert handled == []
    assert handled == [number]


def test_only_the_first_of_several_signals_is_handled(handled):
    with held_back():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert handled == [signal.SIGTERM]


def test_a_signal_is_handled_after_an_error_as_well(handled):
    with pytest.raises(OSError, match="no more processes"), held_back():
        os.kill(os.getpid(), signal.SIGINT)
        raise OSError("no more processes")
    assert handled == [signal.SIGINT]


def test_a_hangup_that_nohup_ignores_stays_ignored(handled):
    assert ending_signals() == (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert ending_signals() == (signal.SIGINT, signal.SIGTERM)
    with held_back():
        os.kill(os.getpid(), signal.SIGHUP)
    assert handled == []


def test_a_line_names_the_signal(capfd):
    write_line(signal.SIGHUP, "stopping")
    assert capfd.readouterr().err == "SIGHUP: stopping\n"
