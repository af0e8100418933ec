"""The floor against exact arithmetic, a printed table, and draws."""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from padded_dispatch.tune.cost import binomial_floor, poisson_floor

# Percent of rows dropped at m rows per slot group, with C = ceil(m * factor) slots.
FACTORS = (1.0, 1.05, 1.1, 1.25, 1.5)
TABLE = {
    32: (7.03, 4.41, 2.59, 0.73, 0.02),
    64: (4.98, 2.51, 1.37, 0.13, 0.00),
    128: (3.52, 1.47, 0.58, 0.01, 0.00),
    256: (2.49, 0.75, 0.15, 0.00, 0.00),
    512: (1.76, 0.28, 0.02, 0.00, 0.00),
    1024: (1.25, 0.07, 0.00, 0.00, 0.00),
    2048: (0.88, 0.01, 0.00, 0.00, 0.00),
}

# The logarithms that are summed grow to about 15000, and are exact to 2**-53 of that.
CLOSE = dict(rel=1e-11)


@pytest.mark.parametrize("mean", TABLE)
def test_a_table_to_its_last_digit(mean):
    capacities = [math.ceil(mean * factor) for factor in FACTORS]
    floor = [100 * poisson_floor(mean_rows=mean, capacity=capacity) for capacity in capacities]
    assert tuple(round(share, 2) for share in floor) == TABLE[mean]


@pytest.mark.parametrize(
    ("mean", "capacity"), [(1, 1), (32, 34), (32, 48), (2048, 100), (2048, 2151), (2048, 3072)]
)
def test_poisson_in_sixty_digits(mean, capacity):
    with localcontext(prec=60):
        probability, dropped = Decimal(-mean).exp(), Decimal(0)
        for rows in range(1, 6 * mean + 200):
            probability *= Decimal(mean) / rows
            dropped += probability * max(0, rows - capacity)
        expected = float(dropped / mean)
    assert poisson_floor(mean_rows=mean, capacity=capacity) == pytest.approx(expected, **CLOSE)


@given(st.data())
def test_binomial_in_fractions(data):
    num_tokens = data.draw(st.integers(1, 40))
    num_experts = data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, num_experts))
    capacity = data.draw(st.integers(1, num_tokens + 2))
    p = Fraction(top_k, num_experts)
    dropped = sum(
        (rows - capacity) * math.comb(num_tokens, rows) * p**rows * (1 - p) ** (num_tokens - rows)
        for rows in range(capacity + 1, num_tokens + 1)
    )
    found = binomial_floor(
        num_tokens=num_tokens, top_k=top_k, num_experts=num_experts, capacity=capacity
    )
    assert found == pytest.approx(float(dropped / (num_tokens * p)), **CLOSE)


def test_poisson_is_the_limit_of_many_experts():
    # For p = 1 / E the two differ by less than p, relatively, this close to the mean.
    many = binomial_floor(num_tokens=2**18, top_k=1, num_experts=2**13, capacity=32)
    assert many == pytest.approx(poisson_floor(mean_rows=32, capacity=32), rel=2**-13)


def test_draws_drop_as_much():
    random = np.random.default_rng(0)
    rows = random.binomial(256, 8 / 64, size=100_000)
    drawn = np.maximum(rows - 34, 0) / 32
    expected = binomial_floor(num_tokens=256, top_k=8, num_experts=64, capacity=34)
    assert abs(drawn.mean() - expected) < 6 * drawn.std() / math.sqrt(len(rows))
