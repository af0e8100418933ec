"""The end of a warm-up: by hand, on decays, and where there is none."""

import numpy as np

from padded_dispatch.tune.synthetic import TraceSizes, synthetic_trace
from padded_dispatch.tune.warm_up import num_warm_up, settled_since

SIZES = TraceSizes(num_steps=60, num_layers=2, num_ranks=2, num_tokens=64, num_experts=8, top_k=2)


def decay(num_steps, scale, seed):
    """A share that falls from .6 to .1, with noise."""
    noise = np.random.default_rng(seed).normal(0, 0.01, num_steps)
    return 0.1 + 0.5 * np.exp(-np.arange(num_steps) / scale) + noise


def test_by_hand():
    shares = np.array([0.5, 0.3] + [0.1] * 8)
    # Two left out: no spread is left. None: mean .16, squares .42 - 10 * .16² = .164, over 100.
    assert num_warm_up(shares) == 2
    assert num_warm_up(shares[::-1]) == 0
    assert num_warm_up(shares[1:]) == 0  # nine steps are too few


def test_shares_as_small_as_rounding_errors_of_large_ones():
    assert num_warm_up(np.array([0.5, 0.3] + [0.1] * 8) / 1000) == 2


def test_the_mean_of_the_rest_decides():
    shares = np.array([2, 1, 0, 0, 0, 0, 1, 0, 1, 0, 1, 0]) / 10
    # Squares around the mean: .0255 of eleven, over 121, is more than .021 of ten, over 100.
    assert num_warm_up(shares) == 2


def test_a_decay_is_left_out_until_it_is_noise():
    ends = [num_warm_up(decay(400, 20, seed)) for seed in range(20)]
    # .5 * exp(-d / 20) is within two deviations of the noise from step 64 on.
    assert min(ends) > 50
    assert max(ends) < 130


def test_at_most_half_is_left_out():
    assert num_warm_up(decay(100, 60, 0)) == 50


def test_steady_and_rising_shares_lose_next_to_nothing():
    lost = [num_warm_up(np.random.default_rng(seed).normal(0.1, 0.01, 500)) for seed in range(100)]
    assert max(lost) <= 5
    assert num_warm_up(decay(400, 100, 0)[::-1]) == 0
    assert num_warm_up(np.full(50, 0.1)) == 0


def test_a_trace_is_settled_once_its_routing_is():
    uneven = synthetic_trace("zipf", SIZES, strength=2.0, seed=1)
    even = synthetic_trace("balanced", SIZES, seed=1)
    rows = (even.steps >= 15)[:, None, None]
    both = even.where(even.steps >= 0)
    both.ids_NTK[:] = np.where(rows, even.ids_NTK, uneven.ids_NTK)
    assert settled_since(both) == 15
    assert settled_since(even) <= 1


def test_what_settles_is_the_share_of_the_rows_that_are_there():
    """At factor 1 an expert has 16 slots of a rank; factor 2 would drop nothing."""
    trace = synthetic_trace("balanced", SIZES)
    tokens = np.arange(64)
    late = np.stack([tokens % 8, (tokens + 1) % 8], axis=1)
    late[tokens % 8 == 7, 0] = 1  # 24 rows for expert 1: drops 8 of 128
    early = np.where(tokens[:, None] < 24, [[0, 1]], -1)  # drops 16 of 48
    trace.ids_NTK[:] = np.where((trace.steps < 15)[:, None, None], early, np.sort(late, axis=1))
    assert settled_since(trace) == 15
    trace.ids_NTK[trace.steps == 3] = -1  # a step without rows tells nothing
    assert settled_since(trace) == 15


def test_padding_alone_has_no_warm_up():
    trace = synthetic_trace("balanced", SIZES)
    trace.ids_NTK[:] = -1
    assert settled_since(trace) == 0
