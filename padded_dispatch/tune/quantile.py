"""What a finite number of steps says about all steps: bounds on a quantile, changes, bursts.

**The bound.** Of n independent steps, the number below the true q-quantile is binomial whatever the
distribution, so an order statistic bounds that quantile with a known confidence: no model, no
normality, no bootstrap, which cannot look beyond the largest value it has seen. For q = 0.99 and
95 % confidence the largest of n values is a bound from n = 299 on; fewer steps cannot promise it.

**Steps are not independent.** High values come in runs, and runs come close together. The number of
steps above a level then varies more than a binomial number would; n steps are worth n divided by
that inflation. It is taken from the autocorrelation of "is above the level", summed as far as it
stays positive (Geyer's initial positive sequence), or from the number of runs, whichever says less,
at every level from the highest down to the first that four times as many steps exceed as the
quantile leaves above it; the level that says least decides.

Both ends are needed. Bursts stay together longest at high levels: they are few long runs, and count
as that many bursts, not as that many steps. A slowly varying need stays together longest at low
levels: "above the quantile" is a rare event, of which a trace may hold one run or none, and then
nothing at that level or above shows how slow it is; a lower level, crossed often, bounds it. Values
may be coarse: the first level low enough to say something counts, however many steps exceed it.

Simulated: stationary Gaussian series of 300, 500, 1,000 and 2,000 steps, share 0.99, confidence
95 %, levels .1, .5, 1 and 2 standard deviations apart, at up to four offsets; 1,000 series of each
of these 44 for every correlation from step to step. The worst of each row:

    correlation   untrue promises   promises with 300, 500, 1,000, 2,000 steps
    0             at most 1.4 %     from 23, 94, 100, 100 % of the series
    .5            at most 0.2 %     from 0, 2, 95, 100 %
    .9            at most 0.5 %     0, 0, up to 1, up to 33 %
    .97, .99      at most 0.6 %     next to none: so few independent steps promise nothing

With levels that up to four times as many steps exceed, and no others, coarse values were taken for
independent: 68 % untrue at .99, 21 % at .9. No rule sees what a trace does not hold: where the need
is constant but for long, rare bursts, a trace without one says nothing about them.

Values here are ordered, not measured: the index of the smallest factor that satisfies a step.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class QuantileBound:
    """A quantile, estimated, and its bounds.

    `estimate`: of the values seen. `lower`, `upper`: the true quantile is not below, not above,
    each with the confidence asked for; `upper` is the largest value where `promised` is False.
    `num_independent`: what the steps are worth. `promised_share`: the largest share of steps for
    which the largest value is a bound.
    """

    estimate: int
    lower: int
    upper: int
    promised: bool
    num_independent: float
    promised_share: float


def quantile_bound(values_S: NDArray[np.integer], share: float, confidence: float) -> QuantileBound:
    """Bounds on the value that a `share` of all steps does not exceed.

    Example: 300 independent steps, share 0.99, confidence 0.95: the estimate is the 297th value in
    order, the upper bound the last; of 298 steps none is.
    """
    ordered_S = np.sort(values_S)
    num_steps = len(ordered_S)
    independent = num_independent(values_S, share)
    worth = max(1, math.floor(independent))
    below = binomial_cdf(worth, share)
    # The k-th smallest is not below the quantile if fewer than k values are below it.
    upper = int(np.searchsorted(below, confidence)) + 1
    lower = int(np.searchsorted(below, 1.0 - confidence, side="right"))
    position = math.ceil(share * num_steps)

    def at(k: int) -> int:
        """The k-th of `worth`, among the steps that there are."""
        return int(ordered_S[min(num_steps, max(1, math.ceil(k / worth * num_steps))) - 1])

    return QuantileBound(
        estimate=int(ordered_S[max(position, 1) - 1]),
        lower=at(lower),
        upper=at(min(upper, worth)),
        promised=upper <= worth,
        num_independent=independent,
        promised_share=(1.0 - confidence) ** (1.0 / worth),
    )


_LEVELS = 4.0  # the lowest level has so many times the steps above it that the quantile has
_DRIFT_STEPS = 20  # fewer say nothing about change


def num_independent(values_S: NDArray[np.integer], share: float) -> float:
    """How many independent steps these are worth for a quantile: at most as many as there are."""
    num_steps = len(values_S)
    worth = float(num_steps)
    enough = min(0.5, _LEVELS * (1.0 - share)) * num_steps
    for level in np.unique(values_S)[-2::-1]:
        above_S = values_S > level
        worth = min(worth, num_steps / _inflation(above_S))
        if above_S.sum() >= enough:
            break
    return worth


def _inflation(above_S: NDArray[np.bool_]) -> float:
    """Variance of the number of True, relative to independent steps: at least 1."""
    num_steps, num_above = len(above_S), int(above_S.sum())
    by_runs = num_above * (1.0 - num_above / num_steps) / num_runs(above_S)
    return max(by_runs, _correlation_time(above_S - num_above / num_steps))


def _correlation_time(centred_S: NDArray[np.floating]) -> float:
    """Variance of a sum, relative to independent steps, from the autocorrelation: at least 1."""
    num_steps = len(centred_S)
    spectrum = np.fft.rfft(centred_S, 2 * num_steps)
    covariance_S = np.fft.irfft(np.abs(spectrum) ** 2)[:num_steps]
    if covariance_S[0] <= 0:
        return 1.0
    pairs = covariance_S[: num_steps // 2 * 2].reshape(-1, 2).sum(1) / covariance_S[0]
    end = int((pairs <= 0).argmax()) if (pairs <= 0).any() else len(pairs)
    return max(1.0, 2.0 * float(pairs[:end].sum()) - 1.0)


def num_runs(chosen_S: NDArray[np.bool_]) -> int:
    """Maximal stretches of True: 0 1 1 0 1 has two."""
    return int(chosen_S[0]) + int((chosen_S[1:] & ~chosen_S[:-1]).sum())


def steps_to_promise(share: float, confidence: float) -> int:
    """Independent steps from which on the largest value is a bound: 299 for 0.99 and 0.95."""
    return math.ceil(math.log(1.0 - confidence) / math.log(share))


def has_drifted(values_S: NDArray[np.integer]) -> bool:
    """Whether the second half of the steps needs other values than the first.

    A rank-sum test between the halves, at three standard errors. Each half's error comes from what
    is left of its ranks without their own trend, so that a steady trend does not hide as noise.
    """
    num_steps = len(values_S)
    if num_steps < _DRIFT_STEPS:
        return False
    _, tied_S = np.unique(values_S, return_inverse=True)
    order_S = np.argsort(np.argsort(values_S, kind="stable"))
    ranks_S = (np.bincount(tied_S, order_S) / np.bincount(tied_S))[tied_S]  # ties share a rank
    halves = ranks_S[: num_steps // 2], ranks_S[num_steps // 2 :]
    variance = 0.0
    for half_S in halves:
        position_S = np.arange(len(half_S))
        trend = np.polynomial.Polynomial.fit(position_S, half_S, 1)
        rest_S = half_S - trend(position_S)
        variance += rest_S.var() * _correlation_time(rest_S) / len(half_S)
    change = abs(float(halves[1].mean() - halves[0].mean()))
    return change > max(3.0 * math.sqrt(variance), 1e-9 * num_steps)


def binomial_cdf(num: int, share: float) -> NDArray[np.float64]:
    """P(at most k of `num` draws) for k = 0 ... num, [num + 1]."""
    k = np.arange(1, num + 1)
    log_choose = np.concatenate([[0.0], np.cumsum(np.log((num - k + 1) / k))])
    hits = np.arange(num + 1)
    log_share = log_choose + hits * math.log(share) + (num - hits) * math.log1p(-share)
    return np.minimum(np.cumsum(np.exp(log_share)), 1.0)
