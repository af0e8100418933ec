"""Bound a quantile of all steps from finitely many steps that depend on each other; detect drift.

**The bound.** Of n independent steps, the number below the true q-quantile is binomial whatever the
distribution, so an order statistic bounds that quantile with a known confidence: no model, no
normality, no bootstrap, which cannot look beyond the largest value it has seen. For q = 0.99 and
95 % confidence the largest of n values is a bound from n = 299 on; fewer steps cannot promise it.

**Steps are not independent.** High values come in runs, and runs come close together. The number of
steps above a level then varies more than a binomial number would; n steps are worth n divided by
that inflation. The inflation is taken from the autocorrelation of "is above the level", summed
while it stays positive (Geyer's initial positive sequence), or from the number of runs, whichever
gives fewer independent steps. It is computed at every level from the highest down to the first that
four times as many steps exceed as the quantile leaves above it; the worst level decides.

Both ends are needed. Bursts stay together longest at high levels: they are few long runs, and count
as that many bursts, not as that many steps. A slowly varying need stays together longest at low
levels: "above the quantile" is a rare event, of which a trace may hold one run or none, and then
nothing at that level or above shows how slow it is; a lower level, crossed often, bounds it. Values
may be coarse: the first level low enough counts, however many steps exceed it.

Simulated: stationary Gaussian series of 300, 500, 1,000 and 2,000 steps, share 0.99, confidence
95 %, levels .1, .5, 1 and 2 standard deviations apart, at up to four offsets; 1,000 series of each
of these 44 for every correlation from step to step. The worst of each row:

    correlation   untrue promises   promises with 300, 500, 1,000, 2,000 steps
    0             at most 1.4 %     from 23, 94, 100, 100 % of the series
    .5            at most 0.2 %     from 0, 2, 95, 100 %
    .9            at most 0.5 %     0, 0, up to 1, up to 33 %
    .97, .99      at most 0.6 %     next to none: so few independent steps promise nothing

With only the levels that up to four times as many steps exceed, coarse values were taken for
independent: 68 % untrue at .99, 21 % at .9. No rule can detect long, rare bursts from a trace that
holds none.

Values here are ordered, not measured: each is the index of the smallest factor that suffices for a
step.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_LEVELS = 4.0  # the lowest level has so many times the steps above it that the quantile has
_DRIFT_STEPS = 20  # fewer steps cannot show a drift


@dataclass(frozen=True, kw_only=True)
class QuantileBound:
    """An estimated quantile and its bounds.

    `estimate`: the quantile of the values seen. `lower`, `upper`: the true quantile is not below,
    not above, each with the given confidence; `upper` is the largest value where `promised` is
    False. `num_independent`: the number of independent steps that these are worth.
    `promised_share`: the largest share of steps for which the largest value is a bound.
    """

    estimate: int
    lower: int
    upper: int
    promised: bool
    num_independent: float
    promised_share: float


def quantile_bound(values: NDArray[np.integer], share: float, confidence: float) -> QuantileBound:
    """Bound the value that a `share` of all steps does not exceed.

    Example: 300 independent steps, share 0.99, confidence 0.95: the estimate is the 297th value in
    order, the upper bound the last; of 298 steps none is.
    """
    ordered = np.sort(values)
    num_steps = len(ordered)
    independent = num_independent(values, share)
    worth = max(1, math.floor(independent))
    below = binomial_cdf(worth, share)
    # The k-th smallest is not below the quantile if fewer than k values are below it.
    upper = int(np.searchsorted(below, confidence)) + 1
    lower = int(np.searchsorted(below, 1.0 - confidence, side="right"))
    position = math.ceil(share * num_steps)

    def at(k: int) -> int:
        """Return the k-th of `worth` values, scaled to all `num_steps`."""
        return int(ordered[min(num_steps, max(1, math.ceil(k / worth * num_steps))) - 1])

    return QuantileBound(
        estimate=int(ordered[max(position, 1) - 1]),
        lower=at(lower),
        upper=at(min(upper, worth)),
        promised=upper <= worth,
        num_independent=independent,
        promised_share=(1.0 - confidence) ** (1.0 / worth),
    )


def num_independent(values: NDArray[np.integer], share: float) -> float:
    """Return how many independent steps these are worth for a quantile, at most all of them."""
    num_steps = len(values)
    worth = float(num_steps)
    enough = min(0.5, _LEVELS * (1.0 - share)) * num_steps
    for level in np.unique(values)[-2::-1]:
        above = values > level
        worth = min(worth, num_steps / _inflation(above))
        if above.sum() >= enough:
            break
    return worth


def _inflation(above: NDArray[np.bool_]) -> float:
    """Return the variance of the number of True, relative to independent steps: at least 1."""
    num_steps, num_above = len(above), int(above.sum())
    by_runs = num_above * (1.0 - num_above / num_steps) / num_runs(above)
    return max(by_runs, _correlation_time(above - num_above / num_steps))


def _correlation_time(centred: NDArray[np.floating]) -> float:
    """Return the variance of a sum, relative to independent steps, from the autocorrelation.

    It is at least 1.
    """
    num_steps = len(centred)
    spectrum = np.fft.rfft(centred, 2 * num_steps)
    covariance = np.fft.irfft(np.abs(spectrum) ** 2)[:num_steps]
    if covariance[0] <= 0:
        return 1.0
    pairs = covariance[: num_steps // 2 * 2].reshape(-1, 2).sum(1) / covariance[0]
    end = int((pairs <= 0).argmax()) if (pairs <= 0).any() else len(pairs)
    return max(1.0, 2.0 * float(pairs[:end].sum()) - 1.0)


def num_runs(chosen: NDArray[np.bool_]) -> int:
    """Count the maximal stretches of True: 0 1 1 0 1 has two."""
    return int(chosen[0]) + int((chosen[1:] & ~chosen[:-1]).sum())


def steps_to_promise(share: float, confidence: float) -> int:
    """Return the independent steps for which the largest value is a bound.

    Example: 299 for share 0.99 and confidence 0.95.
    """
    return math.ceil(math.log(1.0 - confidence) / math.log(share))


def has_drifted(values: NDArray[np.integer]) -> bool:
    """Return whether the second half of the steps needs other values than the first.

    This is a rank-sum test between the halves, at three standard errors. Each half's error comes
    from the residuals of its ranks around their own trend, so that a steady trend does not count as
    noise.
    """
    num_steps = len(values)
    if num_steps < _DRIFT_STEPS:
        return False
    _, tied = np.unique(values, return_inverse=True)
    order = np.argsort(np.argsort(values, kind="stable"))
    ranks = (np.bincount(tied, order) / np.bincount(tied))[tied]  # ties share a rank
    halves = ranks[: num_steps // 2], ranks[num_steps // 2 :]
    variance = 0.0
    for half in halves:
        position = np.arange(len(half))
        trend = np.polynomial.Polynomial.fit(position, half, 1)
        rest = half - trend(position)
        variance += rest.var() * _correlation_time(rest) / len(half)
    change = abs(float(halves[1].mean() - halves[0].mean()))
    return change > max(3.0 * math.sqrt(variance), 1e-9 * num_steps)


def binomial_cdf(num: int, share: float) -> NDArray[np.float64]:
    """Return P(at most k of `num` draws) for k = 0 ... num, [num + 1]."""
    k = np.arange(1, num + 1)
    log_choose = np.concatenate([[0.0], np.cumsum(np.log((num - k + 1) / k))])
    hits = np.arange(num + 1)
    log_share = log_choose + hits * math.log(share) + (num - hits) * math.log1p(-share)
    return np.minimum(np.cumsum(np.exp(log_share)), 1.0)
