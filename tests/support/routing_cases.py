"""Routings for property tests: small, of odd sizes, full of ties, easy to shrink."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RoutingCase:
    """A router's output and sizes to cut it to. C may exceed T, a token's rows may exceed K."""

    map_TE: np.ndarray
    probs_TE: np.ndarray
    mask_T: np.ndarray | None
    top_k: int
    capacity: int

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return map, probabilities and mask for the code under test."""
        mask_T = None if self.mask_T is None else torch.from_numpy(self.mask_T)
        return torch.from_numpy(self.map_TE), torch.from_numpy(self.probs_TE), mask_T


@st.composite
def routing_cases(draw: st.DrawFn) -> RoutingCase:
    """Draw cases from one token and one expert up, with any number of experts per token."""
    num_tokens = draw(st.integers(1, 6))
    num_experts = draw(st.integers(1, 5))
    shape = num_tokens, num_experts
    # Few values: ties are the rule. Zeros of both signs: a routed token may have probability 0.
    probs = st.sampled_from([0.5, 0.25, 1.0, 0.0, -0.0])
    return RoutingCase(
        map_TE=draw(arrays(bool, shape)),
        probs_TE=draw(arrays(np.float64, shape, elements=probs)),
        mask_T=draw(st.none() | arrays(bool, num_tokens)),
        top_k=draw(st.integers(1, num_experts)),
        capacity=draw(st.integers(1, num_tokens + 2)),
    )


def assert_same(actual: Tensor, expected: np.ndarray) -> None:
    """Assert equal values, shape and dtype; NaN equals nothing."""
    torch.testing.assert_close(
        actual.detach(), torch.from_numpy(np.asarray(expected)), rtol=0, atol=0
    )
