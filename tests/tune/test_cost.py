"""Bytes of a factor by hand; the balanced drop by exact arithmetic and a table."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from padded_dispatch.config import NO_DROP, DispatchConfig
from padded_dispatch.tune.cost import LayerSizes, balanced_drop, cost

QWEN3 = LayerSizes(hidden_size=2048, ffn_size=768)


def qwen3(factor, **changes):
    sizes = {"num_experts": 128, "top_k": 8, "num_ranks": 8, "capacity_factor": factor}
    return DispatchConfig(**(sizes | changes))


def test_the_documented_example():
    config = qwen3(1.25)
    found = cost(config, 4096, QWEN3)
    assert config.capacity(4096) == 320
    # Seven eighths of: rows four times, probabilities and a count per expert twice.
    assert found.wire_bytes == (4 * 40960 * 2048 * 2 + 2 * 128 * 321 * 4) * 7 // 8 == 587_490_176
    buffers = config.buffer_bytes(4096, 2048, 2)
    saved = 40960 * ((2048 + 3 * 768) * 2 + 4) + buffers.plan
    assert found.memory_bytes == buffers.total + saved
    pool = cost(qwen3(1.25, capacity_pool="rank"), 4096, QWEN3)
    assert pool.wire_bytes == found.wire_bytes
    assert cost(qwen3(2.0, num_ranks=1), 4096, QWEN3).wire_bytes == 0
    # Without drops each expert has a slot for each token.
    sent = 4 * 128 * 4096 * 2048 * 2 + 2 * 128 * 4097 * 4
    assert cost(qwen3(NO_DROP), 4096, QWEN3).wire_bytes == sent * 7 // 8


def test_layers_share_buffers_and_keep_activations_for_themselves():
    many = LayerSizes(hidden_size=2048, ffn_size=768, num_layers=3, in_flight=2)
    one, six = (cost(qwen3(1.0), 4096, sizes) for sizes in (QWEN3, many))
    buffers = qwen3(1.0).buffer_bytes(4096, 2048, 2).total
    assert six.memory_bytes == buffers + 6 * (one.memory_bytes - buffers)
    assert six.wire_bytes == one.wire_bytes


def test_ranks_that_split_experts_gather_rows():
    split = cost(qwen3(1.0, etp_size=2), 4096, QWEN3)
    one_trip = 4 * 32768 * 2048 * 2 + 2 * 128 * 257 * 4
    assert split.wire_bytes == one_trip * 7 // 8 + one_trip
    config = qwen3(1.0, etp_size=2)
    buffers = config.buffer_bytes(4096, 2048, 2)
    saved = 65536 * ((2048 + 3 * 384) * 2 + 4) + buffers.plan  # twice the rows, half the ffn
    assert split.memory_bytes == buffers.total + saved


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
    ("mean", "capacity", "percent"),
    [(32, 32, 7.03), (32, 40, 0.73), (128, 128, 3.52)],
)
def test_balanced_drop_of_many_experts_is_that_of_poisson(mean, capacity, percent):
    sizes = dict(num_tokens=mean * 2**12, top_k=1, num_experts=2**12)
    assert round(100 * balanced_drop(**sizes, capacity=capacity), 2) == percent
