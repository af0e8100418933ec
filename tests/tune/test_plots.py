"""Figures hold the right numbers and labels with units, and no two runs differ."""

import numpy as np
import pytest

from padded_dispatch.tune import plots
from padded_dispatch.tune.demand import demand_of
from padded_dispatch.tune.recommend import study
from tests.support.traces import synthetic_trace


def studied(*, drop=0.02, **given):
    return study(demand_of(synthetic_trace("lognormal", num_layers=3)), drop, name="x", **given)


@pytest.fixture(scope="module")
def found():
    return studied()


def lines(figure):
    return {str(line.get_label()): line for line in figure.axes[0].lines}


def test_dropped_shows_pools_layers_and_the_share_asked_for(found):
    figure = plots.figures(found)["dropped"]
    drawn = lines(figure)
    for answer in found.answers:
        x, y = drawn[plots._LABELS[answer.replay.pool]].get_data()
        shares = answer.replay.dropped_share
        assert list(x) == answer.replay.factors.tolist()
        np.testing.assert_array_equal(y[shares >= 1e-6], shares[shares >= 1e-6])
        assert np.isnan(y[shares < 1e-6]).all()
    replay = found.chosen.replay
    # A layer whose rows always fit has no line.
    i = int(np.argmax(replay.dropped.sum((0, 2)) > 0))
    first = replay.dropped[:, i].sum(1) / replay.asked[i].sum()
    shown = np.where(first >= 1e-6, first, np.nan)
    np.testing.assert_array_equal(drawn["single layers"].get_ydata()[:3], shown[:3])
    assert not any(label.startswith("at most") for label in drawn)  # It is the limit of drops.
    factor = found.chosen.overall.factor
    assert drawn[f"recommended: {factor:g}"].get_xdata()[0] == factor
    limited = lines(plots.figures(studied(pools=("cells",)))["dropped"])
    assert limited["at most: 2 %"].get_ydata()[0] == 0.02
    alone = studied(pools=("cells",), drop=0.0)
    drawn = lines(plots.figures(alone)["dropped"])
    assert drawn["perfectly balanced router"].get_ydata()[0] == alone.chosen.replay.balanced[0]
    assert "store: recomputed" not in drawn
    assert not any(label.startswith("at most") for label in drawn)


def test_svg_is_text_without_a_prolog_and_always_the_same(found):
    first, second = (plots.svg(plots.figures(found)["dropped"]) for _ in range(2))
    assert first == second
    assert first.startswith("<svg ") and first.rstrip().endswith("</svg>")
    assert ">rows that do not fit</text>" in first
