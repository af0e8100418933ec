"""Processes of need: how a router's need of capacity may change from step to step.

Each kind draws a series of needs from a seed: the capacity factors that steps would need. Most
lie around 1.2, a tenth apart. A series is one run; what a tuner sees is its first part. Phases and
moments of change are drawn anew for each run, so that a change falls before, into, or after the
part that is seen.

`KINDS` maps a name to a function of (random, num_seen, length) that returns `length` needs.
`num_seen` sets the scale of kinds whose time scale is that of the trace: "sine, 2 traces long".
Kinds with a number of steps in their name keep it for every length.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Needs = NDArray[np.float64]
Kind = Callable[[Generator, int, int], Needs]

USUAL, SPREAD = 1.2, 0.1


def _filtered(noise: Needs, weights: Needs) -> Needs:
    """Return the sums of `weights` times the noise up to each step; the first ones are left out."""
    size = len(noise) + len(weights)
    product = np.fft.rfft(noise, size) * np.fft.rfft(weights, size)
    return np.fft.irfft(product, size)[len(weights) - 1 : len(noise)]


def autoregressive(random: Generator, length: int, correlation: float, tail: float = 0.0) -> Needs:
    """Return a stationary AR(1) series of variance 1; Student's t shocks where `tail` is given."""
    memory = max(2, int(np.ceil(16 / -np.log(abs(correlation)))))
    size = length + memory - 1
    noise = random.standard_t(tail, size) if tail else random.normal(size=size)
    return _filtered(noise, correlation ** np.arange(memory)) * np.sqrt(1 - correlation**2)


def _normal(random: Generator, length: int) -> Needs:
    return random.normal(size=length)


def _need(standard: Needs) -> Needs:
    """Return needs from standard deviations around the usual one."""
    return USUAL + SPREAD * standard


def _independent(draw: Callable[[Generator, int], Needs]) -> Kind:
    return lambda random, _seen, length: draw(random, length)


def _ar(correlation: float, tail: float = 0.0) -> Kind:
    return lambda random, _seen, length: _need(autoregressive(random, length, correlation, tail))


def _steps_of(period: float, seen: int) -> float:
    """Return a period in steps: a float is in traces, an int in steps."""
    return period * seen if isinstance(period, float) else period


def _wave(random: Generator, seen: int, length: int, *, period: float, shape: str) -> Needs:
    """Return a wave with a random phase, two standard deviations high, and noise."""
    phase = (np.arange(length) / _steps_of(period, seen) + random.random()) % 1
    wave = {
        "sine": np.sin(2 * np.pi * phase),
        "sawtooth": 2 * phase - 1,
        "falling": 1 - 2 * phase,
        "square": np.where(phase < 0.5, 1.0, -1.0),
        "pulse": np.where(phase < 0.05, 2.0, 0.0),
    }[shape]
    return _need(2 * wave + 0.5 * _normal(random, length))


def _lengths(random: Generator, mean: float, length: int, tail: float = 0.0) -> NDArray[np.int64]:
    """Return lengths of stays that fill `length` steps, from a random moment of the first on."""
    num = int(4 * length / mean) + 20
    stays = mean * (random.pareto(tail, num) * (tail - 1) if tail else random.exponential(1, num))
    stays = np.maximum(1, np.ceil(stays)).astype(np.int64)
    if tail:  # the stay that a random moment falls in is longer than the mean
        stays[0] = random.choice(stays, p=stays / stays.sum())
        stays[0] = max(1, int(stays[0] * random.random()))
    return stays


def _regimes(
    random: Generator,
    seen: int,
    length: int,
    *,
    mean: float,
    levels: tuple[float, ...] = (-1.5, 1.5),
    widths: tuple[float, ...] = (1.0,),
    tail: float = 0.0,
) -> Needs:
    """Return stays at random levels, or of random widths, of exponential or heavy-tailed length."""
    stays = _lengths(random, _steps_of(mean, seen), length, tail)
    which = np.repeat(random.integers(len(levels), size=len(stays)), stays)
    width = np.repeat(random.integers(len(widths), size=len(stays)), stays)
    which, width = (np.resize(index, length) for index in (which, width))
    return _need(np.array(levels)[which] + np.array(widths)[width] * _normal(random, length))


def _clusters(
    random: Generator, seen: int, length: int, *, gap: float, size: float, height: float = 6.0
) -> Needs:
    """Return noise with clusters of `size` steps on average, half of whose steps are high."""
    gap = _steps_of(gap, seen)
    start = random.random(length) < 1 / gap
    high = np.zeros(length, bool)
    for first in np.flatnonzero(start):
        high[first : first + random.geometric(1 / size)] = True
    high &= random.random(length) < 0.5
    return _need(_normal(random, length) + height * high)


def _hawkes(random: Generator, _seen: int, length: int) -> Needs:
    """Return noise with spikes, each of which makes further spikes likely."""
    high, rate = np.zeros(length, bool), 0.0
    draws = random.random(length)
    for step in range(length):
        rate *= 0.95
        high[step] = draws[step] < 0.001 + rate
        rate += 0.045 * high[step]
    return _need(_normal(random, length) + 6 * high)


def _recovering(random: Generator, seen: int, length: int, *, gap: float) -> Needs:
    """Return noise with rare jumps that decay over 50 steps, as after a spike of the loss."""
    jumps = (random.random(length + 400) < 1 / _steps_of(gap, seen)) * random.exponential(
        6, length + 400
    )
    return _need(_normal(random, length) + _filtered(jumps, np.exp(-np.arange(401) / 50.0)))


def _trend(random: Generator, seen: int, length: int, *, rise: float, until: float) -> Needs:
    """Return a line that rises by `rise` standard deviations per trace, then stays."""
    line = np.minimum(np.arange(length) / seen, until) * rise
    return _need(line + _normal(random, length))


def _trend_after(random: Generator, seen: int, length: int, *, rise: float) -> Needs:
    """Return noise that begins to rise at a moment within the first two traces, and then stays."""
    since = np.clip(np.arange(length) / seen - 2 * random.random(), 0, 3)
    return _need(rise * since + _normal(random, length))


def _jump(random: Generator, seen: int, length: int, *, height: float, mean: float) -> Needs:
    """Return noise whose level changes once, at a random moment, for good."""
    moment = random.exponential(mean * seen)
    return _need(height * (np.arange(length) >= moment) + _normal(random, length))


def _stairs(random: Generator, seen: int, length: int, *, length_of: float) -> Needs:
    """Return noise whose level rises by the clock."""
    stairs = np.floor(np.arange(length) / (length_of * seen) + random.random())
    return _need(4 * stairs + _normal(random, length))


def _warm_up(random: Generator, seen: int, length: int, *, scale: float) -> Needs:
    """Return noise that starts high and falls exponentially, as a router that begins to balance."""
    fall = 10 * np.exp(-np.arange(length) / (scale * seen))
    return _need(fall + _normal(random, length))


def _log_growth(random: Generator, seen: int, length: int) -> Needs:
    return _need(1.5 * np.log1p(np.arange(length) * 10 / seen) + _normal(random, length))


def _random_walk(random: Generator, _seen: int, length: int) -> Needs:
    return _need(0.05 * np.cumsum(_normal(random, length)) + 0.5 * _normal(random, length))


def _fractional(random: Generator, _seen: int, length: int, *, order: float) -> Needs:
    """Return long memory: fractionally integrated noise of variance about 1."""
    lags = np.arange(1, 20_000)
    weights = np.concatenate([[1.0], np.cumprod((lags - 1 + order) / lags)])
    series = _filtered(random.normal(size=length + len(weights) - 1), weights)
    return _need(series / np.sqrt((weights**2).sum()))


def _volatility(random: Generator, _seen: int, length: int, *, correlation: float) -> Needs:
    """Return noise whose width itself changes slowly."""
    width = np.exp(0.7 * autoregressive(random, length, correlation))
    return _need(width * _normal(random, length))


def _garch(random: Generator, _seen: int, length: int) -> Needs:
    draws, values, variance = _normal(random, length), np.empty(length), 1.0
    for step, draw in enumerate(draws):
        values[step] = np.sqrt(variance) * draw
        variance = 0.05 + 0.15 * values[step] ** 2 + 0.8 * variance
    return _need(values)


def _two_scales(random: Generator, _seen: int, length: int) -> Needs:
    fast, slow = (autoregressive(random, length, correlation) for correlation in (0.5, 0.999))
    return _need(np.sqrt(0.5) * (fast + slow))


def _more_spikes(random: Generator, seen: int, length: int) -> Needs:
    """Return noise whose share of spikes grows from 0 to 4 % within two traces."""
    share = np.minimum(np.arange(length) / seen, 2) * 0.02
    return _need(_normal(random, length) + 6 * (random.random(length) < share))


def _seasonal_spikes(random: Generator, seen: int, length: int, *, period: float) -> Needs:
    """Return noise whose share of spikes goes up and down between 0 and 4 %."""
    phase = np.arange(length) / _steps_of(period, seen) + random.random()
    share = 0.02 * (1 + np.sin(2 * np.pi * phase))
    return _need(_normal(random, length) + 6 * (random.random(length) < share))


def _growing_width(random: Generator, seen: int, length: int) -> Needs:
    width = 1 + np.minimum(np.arange(length) / seen, 3)
    return _need(width * _normal(random, length))


def _moving_average(random: Generator, _seen: int, length: int) -> Needs:
    return _need(_filtered(_normal(random, length + 19), np.full(20, 20**-0.5)))


def _restarts(random: Generator, seen: int, length: int) -> Needs:
    """Return a need that grows and falls back at random moments, as after resets of a router."""
    stays = _lengths(random, 0.7 * seen, length)
    since = np.resize(np.concatenate([np.arange(stay) for stay in stays.tolist()]), length)
    return _need(3 * np.minimum(since / seen, 1.5) + _normal(random, length))


def _pareto(tail: float) -> Kind:
    return _independent(lambda random, length: 1 + 0.05 * random.pareto(tail, length))


def _spikes(share: float) -> Kind:
    return _independent(
        lambda random, length: _need(_normal(random, length) + 8 * (random.random(length) < share))
    )


# Steps do not depend on each other: a promise is to be had from 500 steps on.
INDEPENDENT: dict[str, Kind] = {
    "independent: normal": _independent(lambda random, length: _need(_normal(random, length))),
    "independent: uniform": _independent(lambda random, length: 1 + random.random(length)),
    "independent: lognormal": _independent(
        lambda random, length: 1 + 0.2 * np.exp(_normal(random, length))
    ),
    "independent: bimodal": _independent(
        lambda random, length: _need(
            0.5 * _normal(random, length) + 4 * (random.random(length) < 0.5)
        )
    ),
    "independent: coarse": _independent(
        lambda random, length: np.where(random.random(length) < 0.02, 1.5, 1.2)
    ),
    "independent: 0.5 % spikes": _spikes(0.005),
    "independent: 1.5 % spikes": _spikes(0.015),
    "independent: 3 % spikes": _spikes(0.03),
    "independent: Pareto tail 2": _pareto(2.0),
    "independent: Pareto tail 1": _pareto(1.0),
    "independent: Pareto tail 0.5": _pareto(0.5),
}

# Whatever differs from the trace shows in it, or comes so seldom that 1 % of the steps hold it.
# A trace long enough holds all that there is.
MIXING: dict[str, Kind] = {
    **{f"AR {c:g}": _ar(c) for c in (-0.8, 0.5, 0.7, 0.9, 0.97, 0.99)},
    "AR 0.5, heavy tails": _ar(0.5, tail=2.5),
    "AR 0.9, heavy tails": _ar(0.9, tail=2.5),
    "moving average of 20": _moving_average,
    "GARCH": _garch,
    "width AR 0.9": partial(_volatility, correlation=0.9),
    "width AR 0.99": partial(_volatility, correlation=0.99),
    "sine of 7 steps": partial(_wave, period=7, shape="sine"),
    "sine of 50 steps": partial(_wave, period=50, shape="sine"),
    "sine, a third of the trace": partial(_wave, period=1 / 3, shape="sine"),
    "sawtooth of 100 steps": partial(_wave, period=100, shape="sawtooth"),
    "pulse every 200 steps": partial(_wave, period=200, shape="pulse"),
    "regimes of 20 steps": partial(_regimes, mean=20),
    "regimes of a tenth of the trace": partial(_regimes, mean=0.1),
    "regimes of width, of a tenth": partial(_regimes, mean=0.1, widths=(0.5, 2.0)),
    "clusters of 5, 8 a trace": partial(_clusters, gap=1 / 8, size=5),
    "clusters of 20, 8 a trace": partial(_clusters, gap=1 / 8, size=20),
    "jumps that decay, 5 a trace": partial(_recovering, gap=0.2),
}

# As slow as the trace is long.
SLOW: dict[str, Kind] = {
    "AR 0.995": _ar(0.995),
    "AR 0.999": _ar(0.999),
    "AR 0.5 and 0.999": _two_scales,
    "AR 0.99, heavy tails": _ar(0.99, tail=2.5),
    "width AR 0.999": partial(_volatility, correlation=0.999),
    "long memory 0.2": partial(_fractional, order=0.2),
    "long memory 0.45": partial(_fractional, order=0.45),
    "random walk": _random_walk,
    "sine as long as the trace": partial(_wave, period=1.0, shape="sine"),
    "sine, 3 traces long": partial(_wave, period=3.0, shape="sine"),
    "sine, 10 traces long": partial(_wave, period=10.0, shape="sine"),
    "sawtooth, 1.5 traces long": partial(_wave, period=1.5, shape="sawtooth"),
    "falling sawtooth, 1.5 traces long": partial(_wave, period=1.5, shape="falling"),
    "sawtooth, 5 traces long": partial(_wave, period=5.0, shape="sawtooth"),
    "spikes that come and go in 2 traces": partial(_seasonal_spikes, period=2.0),
    "restarts": _restarts,
    "drift, 1 deviation a trace": partial(_trend, rise=1.0, until=np.inf),
    "drift, 5 deviations a trace": partial(_trend, rise=5.0, until=np.inf),
    "falling drift": partial(_trend, rise=-3.0, until=3.0),
    "trend, then plateau": partial(_trend, rise=4.0, until=0.5),
    "trend, plateau after the trace": partial(_trend, rise=4.0, until=1.5),
    "more and more spikes": _more_spikes,
    "growing width": _growing_width,
    "growth of a logarithm": _log_growth,
    "warm-up, a tenth of the trace": partial(_warm_up, scale=0.1),
    "warm-up, half of the trace": partial(_warm_up, scale=0.5),
}

# Most traces hold nothing of what will come: then they look like independent steps.
HIDDEN: dict[str, Kind] = {
    "regimes of half a trace": partial(_regimes, mean=0.5),
    "regimes of a trace": partial(_regimes, mean=1.0),
    "regimes of 3 traces": partial(_regimes, mean=3.0),
    "regimes of 10 traces": partial(_regimes, mean=10.0),
    "regimes of a trace, four levels": partial(_regimes, mean=1.0, levels=(-3, -1, 1, 3)),
    "regimes of a trace, a sixth is high": partial(_regimes, mean=1.0, levels=(0, 0, 0, 0, 0, 4)),
    "regimes of heavy-tailed length": partial(_regimes, mean=0.5, tail=1.3),
    "regimes of width, of a trace": partial(_regimes, mean=1.0, widths=(0.5, 2.0)),
    "square wave, 4 traces long": partial(_wave, period=4.0, shape="square"),
    "pulse every 1.1 traces": partial(_wave, period=1.1, shape="pulse"),
    "pulse every 3 traces": partial(_wave, period=3.0, shape="pulse"),
    "square wave, 2.2 traces long": partial(_wave, period=2.2, shape="square"),
    "clusters of 50, one a trace": partial(_clusters, gap=1.0, size=50),
    "clusters of 200, one in 3 traces": partial(_clusters, gap=3.0, size=200),
    "spikes that bring spikes": _hawkes,
    "jumps that decay, one in 2 traces": partial(_recovering, gap=2.0),
    "trend that begins some time": partial(_trend_after, rise=3.0),
    "one jump up within some 3 traces": partial(_jump, height=4, mean=3.0),
    "one jump up within a trace": partial(_jump, height=4, mean=1.0),
    "stairs up, 1.1 traces each": partial(_stairs, length_of=1.1),
    "one jump down": partial(_jump, height=-4, mean=1.0),
}

KINDS: dict[str, Kind] = INDEPENDENT | MIXING | SLOW | HIDDEN
