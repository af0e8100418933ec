"""Bytes and times of exchanges over hosts, by hand and as in the field's public models."""

import pytest
from padded_dispatch.exchange.two_level import level_bytes

from padded_dispatch.config import NO_DROP, DispatchConfig
from padded_dispatch.tune.cost import LayerSizes, cost, members_per_host
from padded_dispatch.tune.hosts import (
    Links,
    OverHosts,
    by_ranks,
    exchange_table,
    over_hosts,
    sentence,
)

QWEN3 = dict(num_experts=128, top_k=8)
SIZES = LayerSizes(num_tokens=4096, hidden_size=2048, ffn_size=768)


def on(num_ranks: int, **changes) -> OverHosts:
    config = DispatchConfig(**QWEN3 | {"capacity_factor": 1.25} | changes, num_ranks=num_ranks)
    return over_hosts(config, SIZES, 8, Links())


@pytest.mark.parametrize(
    ("sizes", "width", "padded", "dropless"),
    [
        (dict(num_experts=128, top_k=8), 2048, 147, 117),  # Qwen3-30B-A3B
        (dict(num_experts=256, top_k=8), 7168, 514, 411),  # DeepSeek-V3
        (dict(num_experts=128, top_k=4), 2880, 103, 83),  # GPT-OSS-120B
    ],
)
def test_megabytes_that_a_gpu_sends_between_eight_hosts(sizes, width, padded, dropless):
    """One way, EP 64, 8 ranks per host, 4,096 tokens, bf16; `dropless`: real rows, all kept."""

    def back(factor: float) -> float:
        config = DispatchConfig(**sizes, capacity_factor=factor, num_ranks=64)
        two = level_bytes(config, 4096, width, 2, ranks_per_host=8, two_levels=True)
        one = level_bytes(config, 4096, width, 2, ranks_per_host=8, two_levels=False)
        assert two.back_between == one.back_between
        return two.back_between / 1e6

    assert round(back(1.25)) == padded
    assert round(back(1.0)) == dropless
    # The rail carries 7 hosts' tokens, whatever the top-k: equal to real rows where K is 8.
    config = DispatchConfig(**sizes, capacity_factor=1.25, num_ranks=64)
    rail = level_bytes(config, 4096, width, 2, ranks_per_host=8, two_levels=True).there_between
    numbers = 8 * 112 * config.capacity(4096) * sizes["num_experts"] // 128
    assert rail - numbers - 4 * sizes["num_experts"] * 7 // 8 == 7 * 4096 * width * 2


def test_two_hosts_by_hand():
    found = on(16)
    assert (found.num_ranks, found.num_hosts) == (16, 2)
    slots, row, meta = 128 * 320, 4096, 4 * 128 * 321
    plain, levels = found.exchanges["alltoall"], found.exchanges["two-level"]
    assert plain.between == 2 * ((slots * row + meta) // 2 + slots * row // 2)
    assert plain.ms == plain.between / 50e6
    tokens = 4096 * row + (4 * slots + meta) // 2
    assert levels.between == 2 * (tokens + slots * row // 2)
    assert levels.ms == levels.between / 50e6 + levels.within / 296e6
    assert (round(plain.ms, 1), round(levels.ms, 1)) == (6.7, 6.0)
    assert (round(plain.between / 1e6), round(levels.between / 1e6)) == (336, 202)


def test_one_host_sends_real_rows_directly():
    found = on(8)
    assert set(found.exchanges) == {"alltoall", "direct"}
    direct = found.exchanges["direct"]
    assert direct.between == found.exchanges["alltoall"].between == 0
    assert direct.within == 32768 * (4 * 4096 + 8) * 7 // 8
    assert direct.ms == direct.within / 296e6
    # A factor below 1 has fewer slots than rows.
    assert on(8, capacity_factor=0.5).exchanges["direct"].within == direct.within // 2


@pytest.mark.parametrize("pool", ["expert", "rank"])
@pytest.mark.parametrize("num_ranks", [2, 8, 16, 64])
@pytest.mark.parametrize("etp_size", [1, 2])
def test_levels_sum_to_the_bytes_of_the_cost(num_ranks, pool, etp_size):
    config = DispatchConfig(
        **QWEN3,
        capacity_factor=1.25,
        capacity_pool=pool,
        num_ranks=num_ranks,
        etp_size=etp_size,
    )
    plain = over_hosts(config, SIZES, 8, Links()).exchanges["alltoall"]
    found = cost(config, SIZES, busiest_rows=0, ranks_per_host=8)
    assert plain.between == found.network_bytes
    if etp_size == 1:
        assert plain.between + plain.within == found.wire_bytes


def test_which_is_fastest_from_which_number_of_ranks_on():
    config = DispatchConfig(**QWEN3, capacity_factor=1.25, num_ranks=32)
    found = by_ranks(config, SIZES, 8, Links())
    assert [one.num_ranks for one in found] == [8, 16, 32, 64, 128]
    assert [one.fastest for one in found] == ["direct", *["two-level"] * 2, *["alltoall"] * 2]
    assert sentence(found) == (
        "Fastest by this model: direct from EP 8, two-level from EP 16, alltoall from EP 64. None "
        "was measured between hosts."
    )
    table = exchange_table(found, 32)
    assert table.marked == 2
    assert table.rows[0] == ("8", "1", "0", "-", "1.59", "1.98", "-", "direct")
    assert table.rows[1] == ("16", "2", "336", "202", "-", "6.71", "6.02", "two-level")
    # A slow network decides for fewer bytes, a fast one for one level.
    slow, fast = (
        by_ranks(config, SIZES, 8, Links(network_gb_per_s=rate))[3].fastest for rate in (10, 200)
    )
    assert (slow, fast) == ("two-level", "alltoall")


def test_few_choices_make_two_levels_useless_early():
    config = DispatchConfig(num_experts=128, top_k=4, capacity_factor=1.25, num_ranks=32)
    sizes = LayerSizes(num_tokens=4096, hidden_size=2880, ffn_size=2880)
    assert "two-level from EP 16, alltoall from EP 32." in sentence(
        by_ranks(config, sizes, 8, Links())
    )


@pytest.mark.parametrize(
    ("num_ranks", "etp_size", "per_host", "members"),
    [(8, 1, 8, 8), (4, 1, 8, 4), (16, 1, 8, 8), (12, 1, 8, 6), (16, 2, 8, 4), (4, 8, 4, 1)],
)
def test_members_of_a_group_on_a_host(num_ranks, etp_size, per_host, members):
    config = DispatchConfig(num_experts=48, top_k=2, num_ranks=num_ranks, etp_size=etp_size)
    assert members_per_host(config, per_host) == members


def test_all_numbers_of_ranks_have_experts():
    config = DispatchConfig(num_experts=24, top_k=2, capacity_factor=NO_DROP, num_ranks=12)
    assert [one.num_ranks for one in by_ranks(config, SIZES, 4, Links())] == [4, 8, 12]
    assert [one.num_hosts for one in by_ranks(config, SIZES, 4, Links())] == [1, 2, 3]


def test_a_rate_of_nothing_is_refused():
    with pytest.raises(ValueError, match="network_gb_per_s must be above 0, got 0"):
        Links(network_gb_per_s=0)
