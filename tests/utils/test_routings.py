"""Each skew has its distribution, and sizes and seed determine the rest."""

import numpy as np
import pytest

from padded_dispatch.utils.routings import routing_scores
from tests.support.routings import SKEWS, routing_map, thin_out


@pytest.mark.parametrize("skew", SKEWS)
def test_every_token_has_k_distinct_experts_except_for_none(skew):
    map_TE = routing_map(97, 12, 5, skew=skew, seed=3)
    assert map_TE.dtype == bool
    assert map_TE.shape == (97, 12)
    assert map_TE.sum(1).tolist() == [0 if skew == "none" else 5] * 97
    np.testing.assert_array_equal(map_TE, routing_map(97, 12, 5, skew=skew, seed=3))


def test_another_seed_gives_another_map():
    assert (routing_map(97, 12, 5, seed=0) != routing_map(97, 12, 5, seed=1)).any()


def test_demand_follows_the_skew():
    demand = {skew: routing_map(999, 16, 2, skew=skew).sum(0) for skew in SKEWS}
    mean = 999 * 2 / 16
    assert demand["uniform"].min() > mean / 2
    assert demand["uniform"].max() < mean * 2
    assert demand["lognormal"].max() > 3 * mean
    assert demand["hot"][0] == 999
    assert demand["hot"][1:].sum() == 999
    assert demand["same"].tolist() == [999, 999, *[0] * 14]


def test_popular_experts_are_the_same_on_all_ranks():
    favourites = [routing_map(999, 16, 2, skew="lognormal", seed=r).sum(0).argmax() for r in (0, 1)]
    assert favourites[0] == favourites[1]


def test_every_rank_has_topics_of_its_own():
    favourites = [routing_map(999, 16, 2, skew="topics", seed=r).sum(0).argmax() for r in range(4)]
    assert len(set(favourites)) > 1


def test_any_expert_can_be_the_hot_one():
    scores_TE = routing_scores(99, 16, 2, skew="hot", hot_expert=5)
    assert (scores_TE.argmax(1) == 5).all()


@pytest.mark.parametrize("skew", ["uniform", "lognormal", "topics", "hot", "same"])
def test_the_largest_scores_are_the_map(skew):
    scores_TE = routing_scores(97, 12, 5, skew=skew, seed=3)
    fifth_T = np.sort(scores_TE, axis=1)[:, -5]
    expected_TE = routing_map(97, 12, 5, skew=skew, seed=3)
    np.testing.assert_array_equal(scores_TE >= fifth_T[:, None], expected_TE)


def test_idle_experts_have_the_lowest_scores():
    scores_TE = routing_scores(97, 12, 5, num_idle=7)
    assert scores_TE[:, 5:].max() < scores_TE[:, :5].min()


def test_sigma_is_the_spread_of_log_popularity():
    def popularity(sigma):
        scores_TE = routing_scores(9, 16, 2, skew="lognormal", sigma=sigma)
        return scores_TE - routing_scores(9, 16, 2)

    # Adding and taking away noise below 32 rounds by at most 2**-48 each time.
    np.testing.assert_allclose(popularity(0.3), 0.3 * popularity(1.0), rtol=0, atol=2**-46)


def test_thin_out_only_takes_away():
    map_TE = routing_map(999, 8, 4)
    thin_TE = thin_out(map_TE, share=0.25)
    assert not (thin_TE & ~map_TE).any()
    assert set(thin_TE.sum(1).tolist()) == {0, 1, 2, 3, 4}
    # 3996 draws of a coin with p = 3/4: 2997 rows stay on average, and six deviations are 164.
    assert abs(thin_TE.sum() - 2997) < 164
