"""Demands of all sources for property tests: small, often more than fits, easy to shrink."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays


@dataclass(frozen=True, kw_only=True)
class AcceptanceCase:
    """The demands of all sources, and rows that are kept in any case; None is the cells' shares."""

    demand_SE: np.ndarray
    kept_SE: np.ndarray | None
    num_ranks: int
    num_rows: int


@st.composite
def acceptance_cases(draw: st.DrawFn) -> AcceptanceCase:
    """Draw cases from one source, one expert, one receiver and one slot up."""
    num_ranks, num_local = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shape = draw(st.integers(1, 4)), num_ranks * num_local
    demand_SE = draw(arrays(np.int32, shape, elements=st.integers(0, 9)))
    num_rows = draw(st.integers(1, 40))
    kept_SE = None
    if draw(st.booleans()):
        kept_SE = np.minimum(demand_SE, num_rows // (shape[0] * num_local))
        if draw(st.booleans()):
            kept_SE = np.zeros_like(kept_SE)
    return AcceptanceCase(
        demand_SE=demand_SE, kept_SE=kept_SE, num_ranks=num_ranks, num_rows=num_rows
    )
