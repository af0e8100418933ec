"""Tests that notice a change: exact small cases, false alarms, and changes that must be seen."""

import json
from pathlib import Path

import numpy as np
import pytest

from padded_dispatch.tune import stationarity
from padded_dispatch.tune.stationarity import (
    _slow_waves,
    _strongest,
    _weights,
    changes_slowly,
    end_differs,
    num_allowed,
    num_covered,
)
from tests.tune.processes import KINDS

SHARE, CONFIDENCE = 0.99, 0.95
PROMISES = Path(__file__).parents[2] / "notebooks" / "results" / "promises.json"


def noise(num_steps, seed):
    """Independent steps at levels a quarter of a deviation apart."""
    return np.floor(4 * np.random.default_rng(seed).normal(size=num_steps)).astype(int)


def alarms(series_of, num_steps=1000, runs=50):
    return sum(changes_slowly(series_of(num_steps, seed), SHARE) for seed in range(runs))


def test_few_false_alarms():
    assert alarms(noise, runs=300) <= 9  # 1 % is 3
    assert alarms(noise, num_steps=60, runs=300) <= 9
    assert alarms(lambda n, seed: (noise(n, seed) > 8).astype(int), runs=300) <= 9


def test_series_without_any_change():
    assert not changes_slowly(np.full(500, 3), SHARE)
    for num_steps in (1, 2, 7, 8):
        assert not changes_slowly(np.arange(num_steps) % 2, SHARE)


def test_the_three_views_by_hand(monkeypatch):
    views = []
    monkeypatch.setattr(stationarity, "_slow_waves", lambda *given: views.append(given) or 0.0)
    assert not changes_slowly(np.array([7, 1, 2, 2, 1, 2, 2, 5]), 0.75)
    (level, width, tail), numbers = zip(*views, strict=True)
    # Ties share the middle of their places among the eight.
    assert (level * 8).tolist() == [3.5, -3, 0, 0, -3, 0, 0, 2.5]
    assert (width * 8).tolist() == [3.5, 3, 0, 0, 3, 0, 0, 2.5]
    # A quarter may exceed the target, so the highest half is the tail: 7, 5 and two of the four 2s.
    assert tail.tolist() == [1, 0, 0.5, 0.5, 0, 0.5, 0.5, 1]
    assert numbers == (2, 2, 2)
    changes_slowly(np.arange(100), SHARE)
    changes_slowly(np.arange(1000), SHARE)
    assert [num_waves for _, num_waves in views[3:]] == [25] * 3 + [48] * 3


def test_the_strength_of_waves_by_their_definition():
    series = np.random.default_rng(0).normal(size=30)
    centred = series - series.mean()
    middles = np.arange(30) + 0.5
    waves = [(centred * np.cos(np.pi * j * middles / 30)).sum() ** 2 / 15 for j in range(1, 8)]
    weights = np.array([1 / (j * j + 9) for j in range(1, 8)])
    expected = weights @ waves / weights.sum() / max(np.mean(waves), series.var())
    np.testing.assert_allclose(_slow_waves(series, 7), expected, rtol=1e-9)
    np.testing.assert_allclose(_weights(7), weights * 7 / weights.sum(), rtol=1e-12)
    assert _slow_waves(np.full(30, 0.1), 7) == 0
    assert abs(_strongest(48) - 2.7) < 0.05


def test_a_change_of_level_width_or_tail_is_seen():
    def level(n, seed):
        return noise(n, seed) + np.linspace(0, 5, n).astype(int)

    def width(n, seed):
        return np.floor(noise(n, seed) * np.linspace(1, 2, n)).astype(int)

    def tail(n, seed):
        late = np.arange(n) > n / 2
        return noise(n, seed) + 40 * late * (np.random.default_rng(seed).random(n) < 0.05)

    assert [alarms(level), alarms(width)] == [50, 50]
    assert alarms(tail) >= 45
    assert alarms(lambda n, seed: level(n, seed)[::-1]) == 50


@pytest.mark.parametrize("period", [0.4, 1, 3])
def test_waves_as_long_as_the_trace_are_seen(period):
    def wave(n, seed):
        return noise(n, seed) + np.floor(6 * np.cos(2 * np.pi * np.arange(n) / n / period + 1))

    assert alarms(wave) == 50


def test_short_memory_and_fast_waves_are_no_change():
    assert alarms(lambda n, seed: noise(n, seed) + noise(n + 1, seed)[1:]) <= 3
    assert alarms(lambda n, seed: noise(n, seed) + 8 * (np.arange(n) % 10 < 5)) == 0


def test_a_change_at_the_end():
    steps = np.arange(1000) * 619 % 1000  # a permutation; the highest two are not at the end
    assert not end_differs(steps, SHARE, CONFIDENCE)
    steps[-4:] = 2000
    assert not end_differs(steps, SHARE, CONFIDENCE)  # by chance, 1 % of the time
    steps[-5:] = 2000
    assert end_differs(steps, SHARE, CONFIDENCE)
    assert not end_differs(steps[::-1], SHARE, CONFIDENCE)
    assert not end_differs(np.full(1000, 3), SHARE, CONFIDENCE)  # as high as before is no more


def test_numbers_of_steps():
    assert [num_covered(n, 0.95) for n in (49, 50, 1000, 1024)] == [0, 1, 20, 20]
    assert num_covered(1000, 0.9) == 40
    # P(more than 2 of 40) is 0.7 %, P(more than 1 of 40) 6 %.
    assert [num_allowed(h, 0.99) for h in (1, 10, 40, 1000)] == [0, 1, 2, 18]


@pytest.mark.parametrize("num_steps", [500, 1000, 2000])
def test_measured_promises(num_steps):
    """The rows of `tests.tune.promises`: all kinds that it has, 200 runs of each."""
    runs = json.loads(PROMISES.read_text())["runs"]
    rows = [row for run in runs for row in run["rows"] if row["steps"] == num_steps]
    assert {row["kind"] for row in rows} == set(KINDS)
    assert len(rows) == len(KINDS) > 30
    assert {row["runs"] for row in rows} == {200}
    assert max(row["broken_next"] for row in rows) <= 10  # 5 %
    for row in rows:
        if row["group"] == "independent":
            assert row["promised"] >= 175
        if row["group"] in ("independent", "mixing"):
            assert row["broken_later"] <= 11
