"""Which factor: the smallest that keeps a promise, how sure that is, and when nothing is promised.

The promise is a quantile: in a share q of the steps at most a share x of the rows is dropped. For
every step there is a smallest factor of the what-if that drops no more than x; the recommended one
is the upper confidence bound of the q-quantile of these (`capacity.quantile`). "Rows" are those of
one layer for a layer's factor, of all layers for the one that is for all.

A bound holds for steps like the ones seen. Four things break that, and each is said: ranks that
nobody traced, too few steps, a need that changes over the trace (then there is a schedule, and
nothing is promised for steps after it), and bursts, of which the next run may have more. A change
that no part of the trace needs another factor for is none.

What a finite number of steps says about all steps: bounds on a quantile, changes, bursts.

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
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.tune.replay import WhatIf


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


# A burst needs so many times the factor of the median step, and lies so many standard deviations
# above it: those of a normal distribution that is as wide between median and upper quartile.
_BURST, _BURST_SIGMAS, _TO_SIGMA = 1.5, 6.0, 1.4826

_MOST_PHASES = 8
_PHASE_STEPS = 20  # fewer say nothing about a phase
_LEAST_PERCENT = 1e-4
_MOST_NAMED = 8  # missing ranks
_ALIKE = 1.1  # factors closer than this are one phase: every change captures graphs again


@dataclass(frozen=True, kw_only=True)
class Target:
    """The promise: at most `drop` of the rows dropped in `steps_share` of the steps.

    `confidence`: with which the factor is not too small.

    Raises:
        ValueError: names the field, its value and what to change.
    """

    drop: float = 0.001
    steps_share: float = 0.99
    confidence: float = 0.95

    def __post_init__(self) -> None:
        for name, least in (("drop", -1.0), ("steps_share", 0.0), ("confidence", 0.5)):
            value = getattr(self, name)
            if not (math.isfinite(value) and least < value < 1 and value >= 0):
                raise ValueError(
                    f"{name}={value:g} is not possible: give a share from {max(least, 0):g} to "
                    "below 1"
                )

    @property
    def rows(self) -> str:
        """What a step may drop, in words."""
        return f"at most {percent(self.drop)} of rows dropped" if self.drop else "no row dropped"

    def __str__(self) -> str:
        return f"{self.rows} in {percent(self.steps_share)} of steps"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """`factor`, once `first_step` steps are done, which is when `PaddedOptions.schedule` changes.

    A rise comes with the last step traced before it and a fall with the first one after it, so that
    neither a step in between nor the first of a phase gets too little, whether a trace numbers its
    steps from 0 (Megatron's) or from 1 (`train --trace`).
    """

    first_step: int
    factor: float


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A factor, and what is known about it.

    `factor`, `capacity`: recommended, and its slots per (source, expert). `likely`, `lowest`: the
    factor without allowance for chance, and the lower confidence bound: what more steps may lead
    to. `phases`: where the need changed; else none. `caveats`: why the promise cannot be given;
    none where it can. `num_steps`: seen; `num_independent`: what they are worth. `steps_over`: of
    those seen, how many dropped more than the target at this factor; `dropped`: the share of all
    rows seen that it drops; `worst`: of the rows of one step.
    """

    factor: float
    capacity: int
    likely: float
    lowest: float
    phases: tuple[Phase, ...]
    caveats: tuple[str, ...]
    num_steps: int
    num_independent: float
    steps_over: int
    dropped: float
    worst: float

    @property
    def promised(self) -> bool:
        """Whether the target is promised for steps like the ones seen."""
        return not self.caveats


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """`overall`: one factor for all layers. `layers`: one for each, by layer number."""

    target: Target
    overall: Advice
    layers: dict[int, Advice]

    def sentence(self) -> str:
        """For a person, for example: Set the capacity factor to 1.25 (320 slots per ...)."""
        advice, target = self.overall, self.target
        text = (
            f"Set the capacity factor to {advice.factor:g} ({advice.capacity} slots per source "
            "rank and expert)"
        )
        if not advice.promised:
            met = advice.num_steps - advice.steps_over
            return (
                f"{text}, without a promise: {target.rows} in {met:,} of the {advice.num_steps:,} "
                f"steps seen, but {advice.caveats[0]}."
            )
        text += f": {target}, with {percent(target.confidence)} confidence"
        if advice.likely < advice.factor:
            text += f"; more steps may show that {advice.likely:g} is enough"
        return f"{text}."


def recommend(what_if: WhatIf, target: Target) -> Recommendation:
    """The smallest factors of `what_if` that keep the target's promise.

    Args:
        what_if: of a trace, over a grid of factors up to one that suffices in every step.
        target: the promise.

    Raises:
        ValueError: when the largest factor is too small for some step, or no row was asked for.
    """
    order_F = np.argsort(what_if.factors_F, kind="stable")
    factors_F = what_if.factors_F[order_F]
    rows = what_if.by_layer_and_step()
    missing = _missing(what_if)
    dropped_FLS = rows.dropped_FLS[order_F]
    if not rows.demand_LS.any():
        raise ValueError("demand=0 is not possible: no token of this trace asks for an expert")

    def advice(demand_S: NDArray[np.int64], dropped_FS: NDArray[np.int64]) -> Advice:
        asked_S = demand_S > 0
        demand_S, dropped_FS = demand_S[asked_S], dropped_FS[:, asked_S]
        needed_S = smallest_sufficient(demand_S, dropped_FS, target.drop)
        if (needed_S == len(factors_F)).any():
            raise ValueError(
                f"factors up to {factors_F[-1]:g} are not possible: some step needs more; add "
                f"{what_if.needed_factor_N.max():g}"
            )
        return _advise(
            _Steps(
                steps_S=rows.steps_S[asked_S],
                demand_S=demand_S,
                dropped_FS=dropped_FS,
                needed_S=needed_S,
                factors_F=factors_F,
                capacities_F=what_if.capacities_F[order_F],
            ),
            target,
            missing,
        )

    return Recommendation(
        target=target,
        overall=advice(rows.demand_LS.sum(0), dropped_FLS.sum(1)),
        layers={
            int(layer): advice(rows.demand_LS[i], dropped_FLS[:, i])
            for i, layer in enumerate(rows.layers_L)
            if rows.demand_LS[i].any()
        },
    )


def smallest_sufficient(
    demand_S: NDArray[np.int64], dropped_FS: NDArray[np.int64], drop: float
) -> NDArray[np.int64]:
    """[S], the index of the first factor from which on no more than `drop` is dropped.

    F where even the last one drops more. Factors rise.

    Example: of 10 rows, three factors drop 4, 1 and 0: for 0.1 it is 1, for 0 it is 2.
    """
    enough_FS = dropped_FS <= drop * demand_S
    # Count from the last factor down, as long as all are enough.
    return len(enough_FS) - np.cumprod(enough_FS[::-1], axis=0).sum(0)


def _missing(what_if: WhatIf) -> tuple[str, ...]:
    """What is not known, where not all ranks of a group have traced a step of a layer."""
    num_ranks = what_if.num_ranks
    keys_3N = np.stack([what_if.steps_N, what_if.layers_N, what_if.ranks_N])
    steps_U, layers_U, ranks_U = np.unique(keys_3N, axis=1)
    groups_U = ranks_U // num_ranks
    groups_3U = np.stack([steps_U, layers_U, groups_U])
    _, num_traced_P = np.unique(groups_3U, axis=1, return_counts=True)
    num_partly = int((num_traced_P < num_ranks).sum())
    if not num_partly:
        return ()
    expected = (np.unique(groups_U)[:, None] * num_ranks + np.arange(num_ranks)).flatten()
    nowhere = [str(rank) for rank in np.setdiff1d(expected, ranks_U)]
    named = ", ".join([*nowhere[:_MOST_NAMED], *["..."] * (len(nowhere) > _MOST_NAMED)])
    what = (
        f"traces of {len(nowhere)} of {len(expected)} ranks are missing ({named})"
        if nowhere
        else f"{num_partly:,} of {len(num_traced_P):,} steps of a layer lack some of their "
        f"{num_ranks} ranks"
    )
    return (f"{what}: what they ask for is not known; give the traces of all ranks",)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Steps:
    """Rows per step and factor, of steps that asked for some; what each needs, as an index."""

    steps_S: NDArray[np.int64]
    demand_S: NDArray[np.int64]
    dropped_FS: NDArray[np.int64]
    needed_S: NDArray[np.int64]
    factors_F: NDArray[np.float64]
    capacities_F: NDArray[np.int64]


def _advise(steps: _Steps, target: Target, missing: tuple[str, ...]) -> Advice:
    bound = quantile_bound(steps.needed_S, target.steps_share, target.confidence)
    phases = _phases(steps, target) if has_drifted(steps.needed_S) else ()
    largest = max((phase.factor for phase in phases), default=0.0)
    index = max(bound.upper, int(np.searchsorted(steps.factors_F, largest)))
    dropped_S = steps.dropped_FS[index]
    return Advice(
        factor=float(steps.factors_F[index]),
        capacity=int(steps.capacities_F[index]),
        likely=float(steps.factors_F[bound.estimate]),
        lowest=float(steps.factors_F[bound.lower]),
        phases=phases,
        caveats=missing + _caveats(steps, target, bound, phases),
        num_steps=len(steps.steps_S),
        num_independent=bound.num_independent,
        steps_over=int((steps.needed_S > index).sum()),
        dropped=float(dropped_S.sum() / steps.demand_S.sum()),
        worst=float((dropped_S / steps.demand_S).max()),
    )


def _phases(steps: _Steps, target: Target) -> tuple[Phase, ...]:
    """Equal parts of the steps, each with its own bound; like neighbours are one phase.

    None where all parts are alike: what changed is not what the factor depends on.
    """
    num_parts = min(_MOST_PHASES, max(2, len(steps.steps_S) // _PHASE_STEPS))
    phases: list[Phase] = []
    lowest = math.inf
    for part in np.array_split(np.arange(len(steps.steps_S)), num_parts):
        bound = quantile_bound(steps.needed_S[part], target.steps_share, target.confidence)
        factor = float(steps.factors_F[bound.upper])
        lowest = min(lowest, factor)
        if phases and max(phases[-1].factor, factor) <= _ALIKE * lowest:
            last = phases.pop()
            phases.append(Phase(first_step=last.first_step, factor=max(last.factor, factor)))
        else:
            rises = bool(phases) and factor > phases[-1].factor
            first_step = int(steps.steps_S[part[0] - rises]) if phases else 0
            phases.append(Phase(first_step=first_step, factor=factor))
            lowest = factor
    return tuple(phases) if len(phases) > 1 else ()


def _caveats(
    steps: _Steps, target: Target, bound: QuantileBound, phases: Sequence[Phase]
) -> tuple[str, ...]:
    factors_S = steps.factors_F[steps.needed_S]
    found = []
    if phases:
        middle = len(factors_S) // 2
        halves = [np.quantile(half, 0.5) for half in (factors_S[:middle], factors_S[middle:])]
        found.append(
            "the need changes over the trace: the median step of its first half needs "
            f"{halves[0]:g}, of its second half {halves[1]:g}; what comes after it may differ again"
        )
    else:
        usual, upper_quartile = np.quantile(factors_S, [0.5, 0.75])
        spread = _TO_SIGMA * (upper_quartile - usual)
        burst_S = factors_S > max(_BURST * usual, usual + _BURST_SIGMAS * spread)
        if burst_S.any():
            runs = num_runs(burst_S)
            found.append(
                f"{burst_S.sum()} of {len(burst_S)} steps, in {runs} burst{'s' * (runs > 1)}, need "
                f"up to {factors_S.max():g} where the median step needs {usual:g}; a later burst "
                "may be longer or higher"
            )
    if not (phases or bound.promised):  # A change looks like one long run of high steps.
        needed = steps_to_promise(target.steps_share, target.confidence)
        needed = math.ceil(needed * len(factors_S) / bound.num_independent)
        found.append(
            f"{len(factors_S)} steps, worth {bound.num_independent:.0f} independent ones, promise "
            f"no more than {percent(bound.promised_share)} of steps; about {needed:,} would do"
        )
    return tuple(found)


def percent(share: float) -> str:
    """0.001 is 0.1 %, 0.99 is 99 %; small shares keep two digits, none is rounded up to 100 %."""
    hundredths = share * 100
    if 0 < hundredths < _LEAST_PERCENT:
        return f"< {_LEAST_PERCENT:f}".rstrip("0") + " %"
    if hundredths > 99:
        hundredths = math.floor(hundredths * 100) / 100
    return f"{hundredths:.{2 if hundredths < 1 else 4}g} %"
