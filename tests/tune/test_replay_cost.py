"""Bytes of a factor by hand; the balanced drop by exact arithmetic and a table."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from padded_dispatch.config import NO_DROP, DispatchConfig
from padded_dispatch.tune.replay import balanced_drop, kept_bytes

QWEN3 = dict(hidden_size=2048, fc1_width=2 * 768)


def qwen3(factor, **changes):
    sizes = {"num_experts": 128, "top_k": 8, "num_ranks": 8, "capacity_factor": factor}
    return DispatchConfig(**(sizes | changes))


def of_layers(config, num_layers=1, direct=True):
    return kept_bytes(config, 4096, **QWEN3, num_layers=num_layers, direct=direct)


def test_the_documented_example():
    """And twice the rows of half the ffn where two ranks split each expert."""
    of_row, choices, of_token = 2 * 768 * 2 + 12, 8 * 8 * 4096 * 8, 2048 * 2
    assert (of_row, choices) == (3084, 8 * 262_144)
    tokens = 7 * 4096 * of_token
    cells = qwen3(1.25, capacity_pool="expert")
    assert of_layers(cells) == 40960 * of_row + choices + tokens == 245_858_304
    split = qwen3(1.25, capacity_pool="expert", etp_size=2)
    of_two = 2 * (40960 * (of_row - 1536) + choices + 8 * 4096 * of_token)
    assert of_layers(split, direct=False) == of_two
    # A store has at least five shares.
    for num_layers, rows in ((1, 5 * 32768), (4, 5 * 32768), (12, 12 * 40960)):
        kept = num_layers * (choices + tokens) + rows * of_row
        assert of_layers(qwen3(1.25, capacity_pool="store"), num_layers) == kept
    # Collectives among 16 ranks: 8 experts of 320 slots.
    wide = of_layers(qwen3(1.25, num_ranks=16, capacity_pool="expert"), direct=False)
    assert wide == 40960 * of_row + 2 * choices + 16 * 2560 * of_token
    # Without drops each token may have all of its experts on one rank.
    assert of_layers(qwen3(NO_DROP)) == 8 * 4096 * 8 * of_row + choices + tokens
    alone = qwen3(1.0, num_ranks=1)
    assert of_layers(alone) == 32768 * of_row + choices // 8


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
