"""The cases of a sweep, their cells, and their routing."""

from argparse import Namespace

import numpy as np

from padded_dispatch.bench.cases import SKEWS, read_bench, routing_scores, sweep
from tests.support.routings import routing_map


def test_a_sweep_is_every_combination_and_those_that_do_not_drop_once():
    sizes = {"tokens": [64], "skews": ["uniform"], "capacity_factors": [1.0, 2.0]}
    models, contenders = ["tiny", "qwen3-30b-a3b"], ["dropless", "module", "packed"]
    given = {"models": models, "ep": [2, 1], "contenders": contenders, "main_grad": ["none"]}
    cases = list(sweep(Namespace(**given, **sizes)))
    assert [case.dispatch_config().capacity(64) for case in cases[:2]] == [64, 16]
    found = [(c.ep, c.model, c.contender, c.capacity_factor) for c in cases]
    assert found == [
        (ep, model, contender, factor)
        for ep in (2, 1)
        for model in models
        for contender, factor in [
            ("dropless", None),
            *((name, factor) for factor in (1.0, 2.0) for name in contenders[1:]),
        ]
    ]


def test_the_command_in_the_results_can_be_run_again():
    flags = ["--out", "my results.json", "--ep", "2"]
    assert read_bench(flags).command == "padded-dispatch bench --out 'my results.json' --ep 2"


def test_demand_follows_the_skew():
    demand = {skew: routing_map(999, 16, 2, skew=skew).sum(0) for skew in (*SKEWS, "same")}
    mean = 999 * 2 / 16
    assert demand["uniform"].min() > mean / 2
    assert demand["uniform"].max() < mean * 2
    assert demand["lognormal-1.0"].max() > 3 * mean
    assert demand["hot"][0] == 999
    assert demand["hot"][1:].sum() == 999
    assert demand["same"].tolist() == [999, 999, *[0] * 14]
    ranks = [routing_map(999, 16, 2, skew="lognormal-1.0", seed=seed) for seed in range(4)]
    assert len({map_TE.sum(0).argmax() for map_TE in ranks}) == 1  # They like the same expert.


def test_a_skew_is_the_spread_of_log_popularity():
    def popularity(skew):
        scores_TE = routing_scores(9, 16, skew=skew, seed=0)
        return scores_TE - routing_scores(9, 16, skew="uniform", seed=0)

    # Adding and taking away noise below 32 rounds by at most 2**-48 each time.
    wanted_TE = 0.6 * popularity("lognormal-1.0")
    np.testing.assert_allclose(popularity("lognormal-0.6"), wanted_TE, rtol=0, atol=2**-46)
