"""Bytes and FLOPs of a factor by hand; the balanced drop by exact arithmetic, a table and draws."""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from padded_dispatch.config import NO_DROP, DispatchConfig
from padded_dispatch.tune.cost import LayerSizes, balanced_drop, balanced_drop_poisson, cost

QWEN3 = LayerSizes(num_tokens=4096, hidden_size=2048, ffn_size=768)


def qwen3(factor, **changes):
    return DispatchConfig(
        **({"num_experts": 128, "top_k": 8, "num_ranks": 8, "capacity_factor": factor} | changes)
    )


def test_the_documented_example():
    found = cost(qwen3(1.25), QWEN3, busiest_rows=32768)
    assert found.capacity == 320
    assert found.num_slots == 40960
    # Seven eighths of: rows four times, probabilities and a count per expert twice.
    assert found.wire_bytes == (4 * 40960 * 2048 * 2 + 2 * 128 * 321 * 4) * 7 // 8 == 587_490_176
    assert found.padded_flops == 18 * 2048 * 768 * 40960
    assert found.packed_flops == 18 * 2048 * 768 * 32768


def test_what_backward_needs():
    config = qwen3(1.25)
    found = cost(config, QWEN3, busiest_rows=0)
    plan = config.buffer_bytes(4096, 2048, 2).plan
    assert found.saved_bytes == 40960 * ((2048 + 3 * 768) * 2 + 4) + plan
    assert found.buffer_bytes == config.buffer_bytes(4096, 2048, 2).total
    assert found.memory_bytes == found.buffer_bytes + found.saved_bytes
    assert found.graph_pool_bytes == found.memory_bytes + 4 * 4096 * 2048 * 2


def test_layers_share_buffers_and_keep_activations_for_themselves():
    many = LayerSizes(
        num_tokens=4096, hidden_size=2048, ffn_size=768, num_layers=3, microbatches_in_flight=2
    )
    one, six = (cost(qwen3(1.0), sizes, busiest_rows=0) for sizes in (QWEN3, many))
    assert six.memory_bytes == one.buffer_bytes + 6 * one.saved_bytes
    assert six.graph_pool_bytes - six.memory_bytes == 6 * (one.graph_pool_bytes - one.memory_bytes)
    assert six.wire_bytes == one.wire_bytes


def test_one_rank_sends_nothing():
    assert cost(qwen3(2.0, num_ranks=1), QWEN3, busiest_rows=0).wire_bytes == 0


def test_ranks_that_split_experts_gather_rows_and_share_flops():
    whole = cost(qwen3(1.0), QWEN3, busiest_rows=32768)
    split = cost(qwen3(1.0, etp_size=2), QWEN3, busiest_rows=65536)
    assert split.num_slots == 2 * whole.num_slots
    assert split.padded_flops == whole.padded_flops  # twice the rows, half of each expert
    assert split.packed_flops == whole.packed_flops
    one_trip = 4 * 32768 * 2048 * 2 + 2 * 128 * 257 * 4
    assert split.wire_bytes == one_trip * 7 // 8 + one_trip


def test_dropping_nothing_costs_every_token_for_every_expert():
    assert cost(qwen3(NO_DROP), QWEN3, busiest_rows=32768).num_slots == 128 * 4096


def test_sizes_below_one():
    with pytest.raises(ValueError, match="ffn_size must be at least 1, got 0"):
        LayerSizes(num_tokens=1, hidden_size=1, ffn_size=0)


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
    shares = [
        100 * balanced_drop_poisson(mean_rows=mean, capacity=capacity) for capacity in capacities
    ]
    assert tuple(round(share, 2) for share in shares) == TABLE[mean]


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
    assert balanced_drop_poisson(mean_rows=mean, capacity=capacity) == pytest.approx(
        expected, **CLOSE
    )


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
    found = balanced_drop(
        num_tokens=num_tokens, top_k=top_k, num_experts=num_experts, capacity=capacity
    )
    assert found == pytest.approx(float(dropped / (num_tokens * p)), **CLOSE)


def test_poisson_is_the_limit_of_many_experts():
    # For p = 1 / E the two differ by less than p, relatively, this close to the mean.
    many = balanced_drop(num_tokens=2**18, top_k=1, num_experts=2**13, capacity=32)
    assert many == pytest.approx(balanced_drop_poisson(mean_rows=32, capacity=32), rel=2**-13)


def test_draws_drop_as_much():
    random = np.random.default_rng(0)
    rows = random.binomial(256, 8 / 64, size=100_000)
    drawn = np.maximum(rows - 34, 0) / 32
    expected = balanced_drop(num_tokens=256, top_k=8, num_experts=64, capacity=34)
    assert abs(drawn.mean() - expected) < 6 * drawn.std() / math.sqrt(len(rows))
