"""Notice that a trace does not resemble itself, and bound what no trace can show.

A bound on a quantile holds for steps like those seen. Two tests look for signs that later steps
will differ; either one ends the promise.

**Slow waves** (`changes_slowly`). The series is split into cosine waves of half a period, one, one
and a half, ... up to 24 over the trace. Where steps forget each other within the trace, all of
these waves are equally strong on average. A drift, regimes, a wave as long as the trace or warm-up
put their strength into the first few. The test compares a weighted mean, 1 / (9 + j²) for wave j,
with the plain mean, or with the variance of the steps if that is more: 2.7 times as much has a
chance of 0.33 %. It looks at three views: ranks of
the steps (the level), their distance from the middle rank (the width), and which steps lie among
the highest, twice as many as the target allows (the tail). So it ends 1 % of the promises on
independent steps.

**The end** (`end_differs`). A change in the last steps makes no wave. So the last tenth is taken
for the future: the bound from the steps before it must hold there, too.

**What no trace shows.** A change that has not begun leaves no sign. But it is rare: of a stationary
process, at most one stretch of h steps in every n + h can hold something that the n steps before it
lack, as the next such stretch begins n steps later. So the chance that the next h steps bring it is
at most h / (n + h), for any process. `num_covered` takes h = 0.02 n at 95 % confidence: at most
2 % for what no trace shows, the rest of 5 % for chance. After these h steps the promise assumes
that routing stays as it was.

Measured with `python -m tests.tune.promises`: 81 kinds of processes, 200 runs each of 500 and 1,000
steps (with h = 0.03 n) and of 2,000 steps, 0.1 % of the rows in 99 % of the steps, 95 % confidence.
Percent of the runs, for broken promises those of the worst kind:

    kinds                              promised        broken in these h    within ten more traces
    11 of independent steps            94, 99, 100     0.5                  4
    23 that forget within the trace    12, 32, 49      1                    5.5
    26 as slow as the trace            12, 12, 10      1                    90, above 5 in 6 kinds
    21 that most traces do not show    58, 61, 61      4                    79, above 5 in 20 kinds
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.tune.quantile import binomial_cdf, quantile_bound

_MOST_WAVES, _STEPS_PER_WAVE = 48, 4
_FALSE_ALARMS = 0.01 / 3  # of each of three views
_DRAWS = 50_000
_LAST = 0.1  # share of the steps taken for the future
_UNSHOWN = 0.4  # share of the doubt for what no trace shows; the rest is for chance
_CHANCE = 0.01  # of so many high steps where the target is kept


def changes_slowly(values: NDArray[np.integer], share: float) -> bool:
    """Return whether level, width or tail of the values changes slowly.

    Args:
        values: of the steps, in order; only their order by size counts.
        share: of the steps that the target is about; 0.99 takes the highest 2 % for the tail.
    """
    _, tied, num_tied = np.unique(values, return_inverse=True, return_counts=True)
    num_steps, highest = len(values), np.cumsum(num_tied)
    num_waves = min(_MOST_WAVES, num_steps // _STEPS_PER_WAVE)
    if num_waves < 2:
        return False
    middle = (highest - num_tied / 2) / num_steps - 0.5
    tail = np.clip((highest - (2 * share - 1) * num_steps) / num_tied, 0, 1)
    most = _strongest(num_waves)
    return any(_slow_waves(view[tied], num_waves) > most for view in (middle, abs(middle), tail))


def _slow_waves(series: NDArray[np.floating], num_waves: int) -> float:
    """Return the strength of the slow waves relative to all: about 1 for independent steps."""
    num_steps = len(series)
    series = series - series.mean()
    if abs(series).max() < 1e-9:
        return 0.0
    mirrored = np.fft.rfft(np.concatenate([series, series[::-1]]))[1 : num_waves + 1]
    turned = mirrored * np.exp(-0.5j * np.pi * np.arange(1, num_waves + 1) / num_steps)
    power = turned.real**2 / (2 * num_steps)  # the variance on average, if steps are independent
    return float((_weights(num_waves) * power).mean() / max(power.mean(), series.var()))


def _weights(num_waves: int) -> NDArray[np.float64]:
    """Return weights that fall from the slowest wave on, with mean 1."""
    weights = 1.0 / (np.arange(1, num_waves + 1) ** 2 + 9.0)
    return weights / weights.mean()


@lru_cache
def _strongest(num_waves: int) -> float:
    """Return the strength of slow waves that equally strong ones reach by chance, rarely."""
    power = np.random.default_rng(0).normal(size=(_DRAWS, num_waves)) ** 2
    strength = power @ _weights(num_waves) / power.sum(1)
    return float(np.quantile(strength, 1.0 - _FALSE_ALARMS))


def end_differs(values: NDArray[np.integer], share: float, confidence: float) -> bool:
    """Return whether the last tenth of the steps breaks what the steps before it promise."""
    num_last = max(1, int(_LAST * len(values)))
    if num_last == len(values):
        return False
    level = quantile_bound(values[:-num_last], share, confidence).upper
    return int((values[-num_last:] > level).sum()) > num_allowed(num_last, share)


def num_covered(num_steps: int, confidence: float) -> int:
    """Return how many steps after the trace are covered whatever comes.

    Example: 20 after 1,000 steps, with 95 % confidence.
    """
    return int(_UNSHOWN * (1.0 - confidence) * num_steps + 1e-9)


def num_allowed(num_next: int, share: float) -> int:
    """Return how many of the next steps may exceed a level that a `share` of all steps keeps.

    More than these have a chance of at most 1 % where the share is kept. Example: 2 of 40 for 0.99.
    """
    below = binomial_cdf(num_next, 1.0 - share)
    return int(np.searchsorted(below, 1.0 - _CHANCE))
