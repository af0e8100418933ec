"""Conversion between the five meanings of capacity factor, by hand-worked sizes."""

import math

import pytest

from padded_dispatch.config import DispatchConfig
from padded_dispatch.tune.convert import MEANINGS, RoutingSizes, from_source, to_source

QWEN3_EP8 = RoutingSizes(num_tokens=4096, num_experts=128, top_k=8, num_ranks=8, max_rows=49152)
ODD = RoutingSizes(num_tokens=37, num_experts=6, top_k=3, num_ranks=3)  # L = 2 < K


@pytest.mark.parametrize(
    ("meaning", "theirs", "ours"),
    [
        ("source", 1.25, 1.25),
        ("rank", 1.5, 1.5),
        ("worst-case", 0.25, 2.0),  # 8 ranks x min(16, 8) choices against 8 per token
        ("max-tokens", 4096, 16.0),  # E / K: what drops nothing
        ("stash", 1.1, 1.1),
        ("stash", -2.0, 3.0),  # twice 49,152 rows, against 32,768 in balance
    ],
)
def test_qwen3_on_eight_ranks(meaning, theirs, ours):
    assert to_source(theirs, meaning, QWEN3_EP8) == ours
    if theirs > 0:
        assert from_source(ours, meaning, QWEN3_EP8) == theirs


def test_fewer_local_experts_than_choices():
    assert ODD.worst_rows == 37 * 3 * 2
    assert to_source(0.5, "worst-case", ODD) == 1.0
    assert from_source(1.5, "worst-case", ODD) == 0.75


@pytest.mark.parametrize("sizes", [QWEN3_EP8, ODD])
@pytest.mark.parametrize("meaning", ["source", "rank", "worst-case", "stash"])
@pytest.mark.parametrize("factor", [0.3, 1.0, 1.7])
def test_there_and_back(sizes, meaning, factor):
    back = to_source(from_source(factor, meaning, sizes), meaning, sizes)
    assert math.isclose(back, factor, rel_tol=4e-16)  # two roundings


def test_rows_per_rank_are_what_stays_equal():
    config = DispatchConfig(num_experts=6, top_k=3, num_ranks=3, capacity_factor=1.5)
    theirs = from_source(1.5, "worst-case", ODD) * ODD.worst_rows
    slots = config.num_local_experts * config.num_sources * config.capacity(37)
    assert theirs == 166.5
    assert slots == 6 * math.ceil(166.5 / 6)


def test_beyond_the_worst_case_is_the_worst_case():
    assert from_source(9.0, "worst-case", QWEN3_EP8) == 1.0
    assert from_source(20.0, "max-tokens", QWEN3_EP8) == 4096


@pytest.mark.parametrize(
    ("value", "meaning", "message"),
    [
        (1.01, "worst-case", "worst-case must be at most 1, got 1.01"),
        (
            4095,
            "max-tokens",
            "max-tokens must .* at least num_tokens=4096, since DeepEP drops nothing, got 4095",
        ),
        (4096.5, "max-tokens", "max-tokens must be a whole number .*, got 4096.5"),
        (0.0, "rank", "rank must be a finite number above 0, got 0.0"),
        (-1.0, "source", "source must be a finite number above 0, got -1.0"),
        (0.0, "stash", "stash must be a finite number above 0, got 0.0"),
        (float("nan"), "stash", "stash must be a finite number above 0, got nan"),
        (1.0, "pooled", f"meaning must be one of {', '.join(MEANINGS)}, got 'pooled'"),
    ],
)
def test_values_without_a_meaning(value, meaning, message):
    with pytest.raises(ValueError, match=message):
        to_source(value, meaning, QWEN3_EP8)


def test_values_without_a_counterpart():
    with pytest.raises(
        ValueError,
        match=r"factor must be at least 16 for max-tokens, got 1\.25: DeepEP drops nothing",
    ):
        from_source(1.25, "max-tokens", QWEN3_EP8)
    with pytest.raises(ValueError, match=r"stash must be above 0 .*, got -2\.0; give max_rows"):
        to_source(-2.0, "stash", ODD)


def test_wrong_sizes():
    with pytest.raises(ValueError, match="num_ranks must divide num_experts=6, got 4"):
        RoutingSizes(num_tokens=4, num_experts=6, top_k=2, num_ranks=4)
    with pytest.raises(ValueError, match="num_tokens must be at least 1, got 0"):
        RoutingSizes(num_tokens=0, num_experts=6, top_k=2, num_ranks=2)
    assert RoutingSizes(num_tokens=1, num_experts=1, top_k=1, num_ranks=1).worst_rows == 1
