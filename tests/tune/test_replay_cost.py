"""The balanced drop by exact arithmetic and a table."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from padded_dispatch.tune.replay import balanced_drop


@given(st.data())
def test_balanced_drop_in_fractions(data):
    num_tokens = data.draw(st.integers(1, 40))
    num_experts = data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, num_experts))
    capacity = data.draw(st.integers(1, num_tokens + 2))
    p = Fraction(top_k, num_experts)
    dropped = sum(
        (rows - capacity) * math.comb(num_tokens, rows) * p**rows * (1 - p) ** (num_tokens - rows)
        for rows in range(capacity + 1, num_tokens + 1)
    )
    found = balanced_drop(
        num_tokens=num_tokens, top_k=top_k, num_experts=num_experts, capacity=capacity
    )
    # The logarithms that are summed are exact to 2**-53 of their size.
    assert found == pytest.approx(float(dropped / (num_tokens * p)), rel=1e-11)


@pytest.mark.parametrize(
    ("mean", "capacity", "percent"), [(32, 32, 7.03), (32, 40, 0.73), (128, 128, 3.52)]
)
def test_balanced_drop_of_many_experts_is_that_of_poisson(mean, capacity, percent):
    sizes = dict(num_tokens=mean * 2**12, top_k=1, num_experts=2**12)
    assert round(100 * balanced_drop(**sizes, capacity=capacity), 2) == percent


def test_balanced_drop_of_its_example():
    """Of T and E that are not many, it is less than that of Poisson."""
    sizes = dict(num_tokens=4096, top_k=8, num_experts=1024)
    assert round(100 * balanced_drop(**sizes, capacity=40), 2) == 0.72
