"""What crosses a link, counted over all sets of experts that a token can have."""

from itertools import combinations

import pytest

from padded_dispatch.exchange.links import crossing_share, num_places


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "top_k"),
    [(2, 4, 2), (2, 4, 1), (4, 8, 3), (4, 4, 2), (3, 9, 9), (2, 8, 5)],
)
def test_the_share_is_that_of_all_choices(num_ranks, num_experts, top_k):
    num_local = num_experts // num_ranks
    reached = [
        len({e // num_local for e in chosen}) for chosen in combinations(range(num_experts), top_k)
    ]
    expected = sum(reached) / len(reached) / top_k
    assert crossing_share(num_ranks, num_experts, top_k) == pytest.approx(expected, rel=1e-12)


def test_the_shares_of_the_table():
    shapes = {(128, 8): (0.25, 0.45, 0.67), (64, 6): (0.33, 0.56, 0.76)}
    shapes |= {(32, 4): (0.47, 0.70, 0.86), (8, 2): (0.79, 0.93, 1.00)}
    for (num_experts, top_k), shares in shapes.items():
        found = [crossing_share(ranks, num_experts, top_k) for ranks in (2, 4, 8)]
        assert [round(share, 2) for share in found] == list(shares)


@pytest.mark.parametrize(
    ("link_rows", "num_ranks", "expected"),
    [("auto", 2, 32), ("auto", 4, 0), ("each", 2, 0), ("once", 4, 64), ("summed", 4, 64)],
)
def test_places_of_a_layer_that_saves_a_tenth_or_not(link_rows, num_ranks, expected):
    sizes = dict(num_ranks=num_ranks, num_experts=8, top_k=2, num_tokens=8)
    assert num_places(link_rows, **sizes) == expected


def test_a_tenth_of_the_rows_is_saved_or_more():
    # Shares .86, exactly .9, and .93.
    for num_ranks, num_experts, top_k, is_once in ((8, 32, 4, 1), (18, 36, 8, 1), (4, 8, 2, 0)):
        sizes = dict(num_ranks=num_ranks, num_experts=num_experts, top_k=top_k, num_tokens=5)
        assert num_places("auto", **sizes) == num_ranks * 5 * top_k * is_once
