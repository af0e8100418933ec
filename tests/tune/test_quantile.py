"""Bounds on quantiles: exact small cases, and coverage where the quantile is known."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from padded_dispatch.tune.quantile import (
    _correlation_time,
    binomial_cdf,
    has_drifted,
    num_independent,
    num_runs,
    quantile_bound,
    steps_to_promise,
)

LEVELS = np.linspace(-4.0, 4.0, 81)


def gaussian(num_steps, correlation, seed):
    """A stationary Gaussian series."""
    random = np.random.default_rng(seed)
    noise = random.normal(size=num_steps) * math.sqrt(1 - correlation**2)
    value, series = random.normal(), []
    for shock in noise:
        value = correlation * value + shock
        series.append(value)
    return np.array(series)


def correlated(num_steps, correlation, seed):
    """The same as indices into `LEVELS`."""
    return np.digitize(gaussian(num_steps, correlation, seed), LEVELS)


def coarse(num_steps, correlation, seed, step):
    """The same in levels of `step` standard deviations."""
    return np.floor(gaussian(num_steps, correlation, seed) / step).astype(int)


def test_binomial_cdf_by_hand():
    np.testing.assert_allclose(binomial_cdf(2, 0.9), [0.01, 0.19, 1.0], rtol=1e-12)
    big = binomial_cdf(100_000, 0.99)
    assert abs(big[99_000] - 0.5) < 0.01  # the mean; nothing over- or underflows
    assert math.isclose(big[-1], 1.0, rel_tol=1e-9)
    # Rounded sums of 7 and 10 draws are more than 1.
    assert max(binomial_cdf(num, 0.9).max() for num in (7, 10, 100)) == 1.0


def test_299_steps_make_the_largest_value_a_bound():
    assert steps_to_promise(0.99, 0.95) == 299
    assert 0.99**299 <= 0.05 < 0.99**298
    alternating = np.tile([0, 1], 150)
    assert num_independent(alternating[:298], 0.99) == 298  # no run is too long
    assert quantile_bound(alternating[:299], 0.99, 0.95).promised
    too_few = quantile_bound(alternating[:298], 0.99, 0.95)
    assert not too_few.promised
    assert too_few.promised_share == 0.05 ** (1 / 298)


def test_order_statistics_of_independent_steps():
    values = np.arange(1000) * 619 % 1000  # a permutation without runs
    bound = quantile_bound(values, 0.9, 0.95)
    assert bound.num_independent == 1000
    assert bound.estimate == 899
    assert (bound.lower, bound.upper) == (883, 915)
    cdf = binomial_cdf(1000, 0.9)
    assert cdf[bound.upper] >= 0.95 > cdf[bound.upper - 1]
    assert cdf[bound.lower] <= 0.05 < cdf[bound.lower + 1]


def test_one_long_burst_is_one_event():
    burst = np.zeros(1000, int)
    burst[400:420] = 5
    assert num_runs(burst > 0) == 1
    assert num_independent(burst, 0.99) < 1000 / 19
    scattered = np.zeros(1000, int)
    scattered[::50] = 5
    assert num_independent(scattered, 0.99) > 900


def test_correlation_time_by_hand():
    assert _correlation_time(np.ones(10)) == pytest.approx(10)  # ten steps are worth one
    assert _correlation_time(np.zeros(10)) == 1
    series = np.repeat([1, -1, 1, 1, -1, -1, 1, -1], 5)
    lags = [(series[: 40 - k] * series[k:]).sum() / 40 for k in range(6)]
    assert lags == pytest.approx([1, 0.725, 0.45, 0.175, -0.1, -0.375])
    # Pairs of neighbours add up to 1.725, .625 and then less than 0.
    assert _correlation_time(series) == pytest.approx(2 * (1.725 + 0.625) - 1)


@pytest.mark.parametrize("share", [0.9, 0.99])
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_promises_hold_as_often_as_their_confidence(share, correlation):
    true = int(np.digitize(NormalDist().inv_cdf(share), LEVELS))
    bounds = [quantile_bound(correlated(2000, correlation, s), share, 0.95) for s in range(100)]
    promised = [bound for bound in bounds if bound.promised]
    if correlation < 0.9 or share < 0.99:
        assert len(promised) == 100  # 2,000 steps are worth 299, or here 29, all the same
    kept = sum(bound.upper >= true for bound in promised)
    # Below 0.95 by three standard errors would be worse than chance.
    assert kept / len(promised) >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / len(promised))
    low = sum(bound.lower <= true for bound in bounds)
    assert low / len(bounds) >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / len(bounds))


@pytest.mark.parametrize("num_steps", [300, 1000])
@pytest.mark.parametrize("correlation", [0.97, 0.99])
@pytest.mark.parametrize("step", [0.5, 1.0])
def test_slow_steps_count_as_few(num_steps, correlation, step):
    """Coarse values: hardly any level is exceeded by a few steps, as few as the quantile leaves."""
    true = math.floor(NormalDist().inv_cdf(0.99) / step)
    untrue = 0
    for seed in range(100):
        bound = quantile_bound(coarse(num_steps, correlation, seed, step), 0.99, 0.95)
        untrue += bound.promised and bound.upper < true
    assert untrue <= 5


@pytest.mark.parametrize("step", [0.5, 1.0])
def test_independent_steps_get_promises(step):
    def promises(num_steps):
        series = (coarse(num_steps, 0.0, seed, step) for seed in range(100))
        return sum(quantile_bound(values, 0.99, 0.95).promised for values in series)

    assert promises(500) >= 90
    assert promises(1000) == 100


def test_the_first_level_with_enough_steps_counts():
    """Values 0, 1, 2; the quantile leaves 4 of 400 steps above it, so a level needs 16 above it."""
    slow = np.repeat([0, 1, 0, 1], 100)
    slow[[50, 150, 250, 350]] = 2  # by themselves, 4 steps without any runs
    assert num_independent(slow, 0.99) < 10
    slow[::20] = 2  # 24 steps: enough, so nothing below is looked at
    assert num_independent(slow, 0.99) > 300


def test_drift():
    level = [has_drifted(correlated(500, 0.5, s)) for s in range(50)]
    assert sum(level) <= 2
    for shift in (np.linspace(0, 20, 500).astype(int), np.repeat([20, 0], 250)):
        assert all(has_drifted(correlated(500, 0.5, s) + shift) for s in range(20))
    assert not has_drifted(np.array([1, 2, 3]))
    assert not has_drifted(np.zeros(100, int))
    # Without any noise, halves one rank apart differ.
    assert has_drifted(np.array([*range(0, 20, 2), *range(1, 20, 2)]))


def test_a_constant_series():
    bound = quantile_bound(np.full(400, 7), 0.99, 0.95)
    assert (bound.lower, bound.estimate, bound.upper) == (7, 7, 7)
    assert bound.promised
    assert not quantile_bound(np.array([7]), 0.99, 0.95).promised
