"""Capacity: Megatron's formula digit for digit, clamped and aligned."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.moe.moe_utils import get_capacity

from padded_dispatch.config import (
    CAPACITY_POOLS,
    FIT,
    NO_DROP,
    DispatchConfig,
    StoreSizes,
    in_hundredths,
)

GOOD = dict(num_experts=8, top_k=2, capacity_factor=1.25)
POOLS = pytest.mark.parametrize("capacity_pool", CAPACITY_POOLS)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int, float]:
    """T, E, K and a factor; the factor E / K is the documented way to drop nothing."""
    num_experts = draw(st.integers(1, 300))
    top_k = draw(st.integers(1, min(num_experts, 16)))
    factor = draw(st.floats(1e-3, 64) | st.just(num_experts / top_k))
    return draw(st.integers(1, 40_000)), num_experts, top_k, factor


@given(sizes=sizes())
def test_capacity_is_megatron_s_clamped_to_the_tokens(sizes):
    """`get_capacity` of Megatron-Core 0.16.1 to 0.20, as its router calls it."""
    num_tokens, num_experts, top_k, factor = sizes
    config = DispatchConfig(num_experts=num_experts, top_k=top_k, capacity_factor=factor)
    theirs = get_capacity(num_tokens * top_k, num_experts, factor)
    assert config.capacity(num_tokens) == min(theirs, num_tokens)


@pytest.mark.parametrize("factor", [2, np.float64(2)], ids=repr)
def test_equal_factors_have_one_text(factor):
    """It travels between ranks, of which one may read 2 and another 2.0."""
    config = DispatchConfig(**{**GOOD, "capacity_factor": factor})
    assert str(config.capacity_factor) == repr(config.capacity_factor) == "2.0"
    assert DispatchConfig(num_experts=2, top_k=1, capacity_factor=FIT).capacity_factor == FIT


@pytest.mark.parametrize(
    ("num_tokens", "changes", "capacity"),
    [
        (100, {}, 32),  # ceil(100 * 2 / 8 * 1.25) = ceil(31.25)
        (100, {"capacity_factor": 1e-9}, 1),
        (1, {"capacity_factor": 1e-9}, 1),
        # In Megatron's order of operations; in another one it is 250.
        (1000, {"num_experts": 60, "capacity_factor": 7.5}, 251),
        # `get_capacity` rounds to T + 1, which crashes the stock path.
        (448, {"num_experts": 160, "top_k": 6, "capacity_factor": 160 / 6}, 448),
        (100, {"alignment": 16}, 32),
        (100, {"alignment": 3}, 33),
        (100, {"alignment": 16, "num_ranks": 8, "num_experts": 16}, 16),  # 15.6, and 8 * 16 rows
        (5, {"alignment": 16, "capacity_factor": 100.0}, 16),  # Aligned after the clamp, past T.
        (5, {"alignment": 16, "capacity_factor": NO_DROP, "num_ranks": 4, "etp_size": 2}, 6),
    ],
)
def test_capacity_by_hand(num_tokens, changes, capacity):
    assert DispatchConfig(**{**GOOD, **changes}).capacity(num_tokens) == capacity


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_experts": 0},
            "num_experts must be an int of at least 1, below 2..31, got 0$",
        ),
        ({"num_experts": 10**20}, "num_experts must be .* below 2..31, got 1000"),
        (
            {"num_experts": 8.0},
            r"num_experts must be an int of at least 1, below 2..31, got 8\.0$",
        ),
        ({"num_experts": 9, "num_ranks": 2}, "num_experts must be a multiple of .*=2, got 9"),
        ({"top_k": 0}, "top_k must be an int of at least 1, below 2..31, got 0$"),
        ({"top_k": True}, "top_k must be an int of at least 1, below 2..31, got True$"),
        ({"top_k": 9}, "top_k must be at most num_experts=8, got 9; lower top_k$"),
        ({"capacity_factor": 0.0}, r"capacity_factor must be a number above 0 or FIT, got 0\.0;"),
        ({"capacity_factor": -1.0}, r"capacity_factor must be .* got -1\.0;"),
        ({"capacity_factor": math.nan}, "capacity_factor must be .* got nan;"),
        ({"capacity_factor": True}, "capacity_factor must be .* got True;"),
        ({"capacity_factor": None}, "capacity_factor must be .* got None;"),
        (
            {"alignment": -16},
            "alignment must be an int of at least 1, below 2..31, got -16$",
        ),
        ({"policy": "rand"}, "policy must be one of probs, position, got 'rand'$"),
        ({"capacity_pool": "node"}, "capacity_pool must be one of store, cells, got 'node'$"),
        ({"num_ranks": 0}, "num_ranks must be an int of at least 1, below 2..31, got 0$"),
        ({"etp_size": "2"}, "etp_size must be an int of at least 1, below 2..31, got '2'$"),
    ],
)
def test_a_wrong_value_is_named(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        DispatchConfig(**{**GOOD, **changes})


@POOLS
@pytest.mark.parametrize("num_tokens", [0, -1, 10**20, 1.5, True, math.nan, np.int64(4), "4", None])
def test_what_is_no_number_of_tokens_is_refused(num_tokens, capacity_pool):
    config = DispatchConfig(**GOOD, capacity_pool=capacity_pool)
    for size in (config.capacity, config.rows, config.wire_slots, config.share, config.max_rows):
        with pytest.raises(ValueError, match=r"^num_tokens must be .*, got ") as error:
            size(num_tokens)
        assert f", got {num_tokens!r}" in str(error.value)


@POOLS
@pytest.mark.parametrize(
    ("changes", "rows", "slots"),
    [
        # share = 100 * 2; most = 4 * 100 * 2; C = 32, and 2 local experts.
        ({}, {"store": 250, "cells": 256}, 64),
        ({"capacity_factor": 3.9}, {"store": 780, "cells": 784}, 100),
        # C = T from here on.
        ({"capacity_factor": 4.0}, {"store": 800, "cells": 800}, 100),
        ({"capacity_factor": NO_DROP}, {"store": 250, "cells": 800}, 100),
        ({"capacity_factor": 1e308}, {"store": 800, "cells": 800}, 100),
        ({"etp_size": 3}, {"store": 750, "cells": 768}, 64),
        ({"num_experts": 4}, {"store": 250, "cells": 252}, 63),  # One expert a rank.
        ({"num_experts": 4, "capacity_factor": 2.0}, {"store": 400, "cells": 400}, 100),
        ({"etp_size": 3, "capacity_factor": NO_DROP}, {"store": 750, "cells": 2400}, 100),
        # C = 150, past T.
        ({"alignment": 300, "capacity_factor": NO_DROP}, {"store": 250, "cells": 800}, 100),
        ({"capacity_factor": 1e-9}, {"store": 1, "cells": 8}, 2),
    ],
)
def test_rows_by_hand(capacity_pool, changes, rows, slots):
    given = {**GOOD, "num_ranks": 4, **changes}
    config = DispatchConfig(**given, capacity_pool=capacity_pool)
    assert config.share(100) == 200 * config.etp_size
    assert config.rows(100) == rows[capacity_pool]
    assert config.wire_slots(100) == (100 if capacity_pool == "store" else slots)


@pytest.mark.parametrize(("etp_size", "rows"), [(1, 1000), (2, 2000)])
def test_a_store_of_one_layer_has_five_shares(etp_size, rows):
    """Ranks that split experts get the rows of each other's tokens, too."""
    given = {**GOOD, "num_ranks": 8, "etp_size": etp_size, "capacity_pool": "store"}
    config = DispatchConfig(**given)
    assert config.share(100) == rows / 5
    assert config.max_rows(100) == 4 * rows / 5  # One expert a rank.
    assert StoreSizes.of([config], 100).num_rows == 4 * rows / 5
    config = DispatchConfig(**{**given, "num_experts": 16})
    assert config.max_rows(100) == 8 * rows / 5
    assert StoreSizes.of([config], 100).num_rows == rows
    assert StoreSizes.of([config] * 5, 100).num_rows == 1.25 * rows


@POOLS
def test_sizes_of_a_pass_that_fits_are_not_known_before(capacity_pool):
    config = DispatchConfig(
        num_experts=8, top_k=2, capacity_factor=FIT, capacity_pool=capacity_pool
    )
    assert config.fits and not DispatchConfig(**GOOD).fits
    for size in (config.capacity, config.rows):
        with pytest.raises(ValueError, match=r"^capacity_factor must be a number .* got 'fit'"):
            size(7)
    assert config.wire_slots(7) == 7
    assert config.max_rows(7) == 14


def test_a_needed_factor_is_rounded_up_to_hundredths_but_not_for_an_error_of_floats():
    assert [in_hundredths(need) for need in (0.0, 1.1, 1.101, 2.3)] == [0.0, 1.1, 1.11, 2.3]


@pytest.mark.parametrize(
    ("num_ranks", "num_hosts", "again"),
    # 1.5 * 2 * 1.25 is 3.75.
    [(1, 1, False), (4, 1, False), (5, 1, True), (4, 2, True), (6, 3, True)],
)
def test_tokens_of_many_ranks_or_behind_a_rail_are_sent_again(num_ranks, num_hosts, again):
    for factor in (1.25, NO_DROP):
        sizes: Any = {"num_experts": 120, "top_k": 2, "capacity_factor": factor}
        config = DispatchConfig(num_ranks=num_ranks, capacity_pool="store", **sizes)
        assert config.sends_again(num_hosts) == again
