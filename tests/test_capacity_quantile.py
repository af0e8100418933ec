"""Bounds on quantiles: exact small cases, and coverage where the truth is known."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from padded_dispatch.capacity.quantile import (
    binomial_cdf,
    has_drifted,
    num_independent,
    num_runs,
    quantile_bound,
    steps_to_promise,
)

LEVELS = np.linspace(-4.0, 4.0, 81)


def correlated(num_steps, correlation, seed):
    """A stationary Gaussian series, as indices into `LEVELS`."""
    random = np.random.default_rng(seed)
    noise = random.normal(size=num_steps) * math.sqrt(1 - correlation**2)
    value, series = random.normal(), []
    for shock in noise:
        value = correlation * value + shock
        series.append(value)
    return np.digitize(series, LEVELS)


def test_binomial_cdf_by_hand():
    np.testing.assert_allclose(binomial_cdf(2, 0.9), [0.01, 0.19, 1.0], rtol=1e-12)
    big = binomial_cdf(100_000, 0.99)
    assert abs(big[99_000] - 0.5) < 0.01  # the mean; nothing over- or underflows
    assert math.isclose(big[-1], 1.0, rel_tol=1e-9)


def test_299_steps_are_what_the_largest_value_needs():
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


@pytest.mark.parametrize("share", [0.9, 0.99])
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_what_is_promised_is_kept_as_often_as_it_says(share, correlation):
    true = int(np.digitize(NormalDist().inv_cdf(share), LEVELS))
    bounds = [quantile_bound(correlated(2000, correlation, s), share, 0.95) for s in range(100)]
    promised = [bound for bound in bounds if bound.promised]
    assert len(promised) >= 40  # of 100 series of 2,000 steps, even at correlation 0.9
    kept = sum(bound.upper >= true for bound in promised)
    # Below 0.95 by three standard errors would be worse than chance.
    assert kept / len(promised) >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / len(promised))
    low = sum(bound.lower <= true for bound in bounds)
    assert low / len(bounds) >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / len(bounds))


def test_drift_is_seen_and_not_imagined():
    level = [has_drifted(correlated(500, 0.5, s)) for s in range(50)]
    assert sum(level) <= 2
    for shift in (np.linspace(0, 20, 500).astype(int), np.repeat([20, 0], 250)):
        assert all(has_drifted(correlated(500, 0.5, s) + shift) for s in range(20))
    assert not has_drifted(np.array([1, 2, 3]))
    assert not has_drifted(np.zeros(100, int))


def test_a_constant_series():
    bound = quantile_bound(np.full(400, 7), 0.99, 0.95)
    assert (bound.lower, bound.estimate, bound.upper) == (7, 7, 7)
    assert bound.promised
    assert not quantile_bound(np.array([7]), 0.99, 0.95).promised
