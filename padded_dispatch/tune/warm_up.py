"""Find where the warm-up of a trace ends, so that it can be left out.

An untrained router drops far more rows than a trained one, for some hundred steps. A factor that
fits them is too large for the rest of the run.

`num_warm_up` leaves out as many first steps as make the mean of the rest most certain: the d for
which the sum of squares around the mean of the last n - d steps, divided by (n - d)², is smallest
(marginal standard error rule: White, "An effective truncation heuristic for bias reduction in
simulation output", 1997). At most half of the steps are left out, and only if they dropped more
than 95 % of the rest. What the rest promises is decided from the rest alone.
"""

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.trace import Trace
from padded_dispatch.tune.replay import replay

_FEWEST_STEPS = 10  # fewer show no end of a warm-up
_ROUNDING = 1e-12
_FACTOR = 1.0  # at which balance decides how much is dropped


def settled_since(trace: Trace) -> int:
    """Return the first step after the warm-up; the first step of the trace if it has none."""
    found = replay(trace, (_FACTOR,), policy="position").by_layer_and_step()
    demand = found.demand.sum(0)
    asked = demand > 0
    dropped = found.dropped[0].sum(0)[asked] / demand[asked]
    return int(found.steps[asked][num_warm_up(dropped)]) if asked.any() else int(found.steps[0])


def num_warm_up(dropped: NDArray[np.floating]) -> int:
    """Return how many first steps belong to the warm-up.

    Args:
        dropped: share of its rows that each step drops, at one factor.

    Example: of shares .5 .3 .1 .1 .1 .1 .1 .1 .1 .1, the first 2.
    """
    num_steps = len(dropped)
    if num_steps < _FEWEST_STEPS:
        return 0
    # Sums over the last n - d steps, for each d.
    rest = np.arange(num_steps, 0, -1)
    sums, squares = (np.cumsum(x[::-1])[::-1] for x in (dropped, dropped**2))
    around_mean = squares - sums**2 / rest
    around_mean[around_mean < _ROUNDING * squares] = 0.0
    at = int((around_mean / rest**2)[: num_steps // 2 + 1].argmin())
    return at if at and dropped[:at].mean() > np.quantile(dropped[at:], 0.95) else 0
