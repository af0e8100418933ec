"""Bytes and FLOPs of a factor, by hand."""

import pytest

from padded_dispatch.config import DispatchConfig
from padded_dispatch.tune.cost import LayerSizes, cost

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
        num_tokens=4096, hidden_size=2048, ffn_size=768, num_layers=3, num_in_flight=2
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
    assert cost(qwen3(None), QWEN3, busiest_rows=32768).num_slots == 128 * 4096


def test_sizes_below_one():
    with pytest.raises(ValueError, match="ffn_size=0 is not possible: give at least 1"):
        LayerSizes(num_tokens=1, hidden_size=1, ffn_size=0)
