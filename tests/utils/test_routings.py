"""Each skew has its distribution, and sizes and seed determine the rest."""

import numpy as np

from padded_dispatch.utils.routings import routing_scores
from tests.support.routings import SKEWS, routing_map


def test_demand_follows_the_skew():
    demand = {skew: routing_map(999, 16, 2, skew=skew).sum(0) for skew in SKEWS}
    mean = 999 * 2 / 16
    assert demand["uniform"].min() > mean / 2
    assert demand["uniform"].max() < mean * 2
    assert demand["lognormal"].max() > 3 * mean
    assert demand["hot"][0] == 999
    assert demand["hot"][1:].sum() == 999
    assert demand["same"].tolist() == [999, 999, *[0] * 14]


def test_popular_experts_are_those_of_all_ranks():
    ranks = [routing_map(999, 16, 2, skew="lognormal", seed=r).sum(0).argmax() for r in range(4)]
    assert len({*ranks}) == 1


def test_sigma_is_the_spread_of_log_popularity():
    def popularity(sigma):
        scores_TE = routing_scores(9, 16, 2, skew="lognormal", sigma=sigma)
        return scores_TE - routing_scores(9, 16, 2)

    # Adding and taking away noise below 32 rounds by at most 2**-48 each time.
    np.testing.assert_allclose(popularity(0.3), 0.3 * popularity(1.0), rtol=0, atol=2**-46)
