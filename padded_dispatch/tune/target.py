"""The target of a recommendation: which share of the rows may be dropped, and in which steps.

Command lines read its defaults, so nothing here imports torch.
"""

import math
from dataclasses import dataclass

from padded_dispatch.config import require

_LEAST_PERCENT = 1e-4


@dataclass(frozen=True, kw_only=True)
class Target:
    """A promise: at most `drop` of the rows dropped in `steps_share` of the steps.

    The default `drop` is 5 %: in studies (`tune.menu`), models that lost 7 to 10 % of their rows
    lost next to nothing in quality. `confidence`: the confidence that the factor is not too small.

    Raises:
        ValueError: names the field, its value and what to change.
    """

    drop: float = 0.05
    steps_share: float = 0.99
    confidence: float = 0.95

    def __post_init__(self) -> None:
        fix = f"for {self.drop:g} % set {self.drop / 100:g}" if 1 <= self.drop < 100 else ""
        require(0 <= self.drop < 1, "drop", self.drop, "be a share from 0 to below 1", fix)
        for name, least in (("steps_share", 0), ("confidence", 0.5)):
            value = getattr(self, name)
            require(least < value < 1, name, value, f"be a share above {least} and below 1")

    @property
    def rows(self) -> str:
        """The drop of one step, in words."""
        return f"at most {percent(self.drop)} of rows dropped" if self.drop else "no row dropped"

    def __str__(self) -> str:
        return f"{self.rows} in {percent(self.steps_share)} of steps"


def percent(share: float) -> str:
    """Format a share: 0.001 is 0.1 %, 0.99 is 99 %.

    Small shares keep two digits; none is rounded up to 100 %.
    """
    hundredths = share * 100
    if 0 < hundredths < _LEAST_PERCENT:
        return f"< {_LEAST_PERCENT:f}".rstrip("0") + " %"
    if hundredths > 99:
        hundredths = math.floor(hundredths * 100) / 100
    return f"{hundredths:.{2 if hundredths < 1 else 4}g} %"
