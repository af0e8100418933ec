"""Figures hold the right numbers and labels with units, and no two runs differ."""

import numpy as np

from padded_dispatch.tune import plots
from padded_dispatch.tune.cost import LayerSizes
from padded_dispatch.tune.recommend import Target
from padded_dispatch.tune.study import Layer, Question, study
from padded_dispatch.tune.synthetic import TraceSizes, synthetic_trace
from padded_dispatch.tune.time_model import shipped

SIZES = TraceSizes(num_steps=60, num_layers=3, num_ranks=2, num_tokens=40, num_experts=6, top_k=2)


def studied(kind, *, layer=True, **target):
    question = Question(
        target=Target(**({"steps_share": 0.9} | target)), eval_target=Target(drop=0.0)
    )
    sizes = LayerSizes(num_tokens=40, hidden_size=64, ffn_size=48, num_layers=3)
    costed = Layer(sizes=sizes, time_model=shipped()) if layer else None
    return study(synthetic_trace(kind, SIZES, seed=1), question, name=kind, layer=costed)


def lines(axes):
    return {str(line.get_label()): line for line in axes.lines}


def test_dropped_shows_all_rows_layers_a_balanced_router_and_the_target():
    found = studied("zipf", drop=0.001)
    (axes,) = plots.figures(found)["dropped"].axes
    drawn = lines(axes)
    x, y = drawn["all rows"].get_data()
    assert list(x) == [option.factor for option in found.options]
    shares = np.array([option.dropped for option in found.options])
    np.testing.assert_array_equal(y[shares >= 1e-6], shares[shares >= 1e-6])
    assert np.isnan(y[shares < 1e-6]).all()
    balanced = drawn["perfectly balanced router"].get_ydata()
    assert balanced[0] == found.options[0].balanced_drop
    assert drawn["target: 0.1 %"].get_ydata()[0] == 0.001
    factor = found.training.overall.factor
    assert drawn[f"recommended: {factor:g}"].get_xdata()[0] == factor
    assert axes.get_yscale() == "log"


def test_load_is_relative_to_balance():
    found = studied("hot-experts")
    axes = plots.figures(found)["load"].axes[0]
    (mesh,) = axes.collections
    values = np.asarray(mesh.get_array()).reshape(3, 6)
    np.testing.assert_allclose(values.mean(1), 1.0, rtol=1e-12)
    layer = found.replay.layers == found.replay.layers[0]
    demand_E = found.replay.demand_by_expert[layer].sum(0)
    np.testing.assert_allclose(values[0], demand_E / demand_E.mean(), rtol=1e-12)


def test_need_shows_steps_and_a_schedule_where_there_is_one():
    (steady,) = plots.figures(studied("zipf"))["need"].axes
    assert "schedule" not in lines(steady)
    assert len(lines(steady)["all layers together"].get_xdata()) == 60
    found = studied("drift")
    (axes,) = plots.figures(found)["need"].axes
    schedule = lines(axes)["schedule"]
    assert list(schedule.get_xdata())[:-1] == [p.first_step for p in found.training.overall.phases]


def test_need_where_nothing_may_be_dropped():
    (axes,) = plots.figures(studied("zipf", drop=0.0))["need"].axes
    assert axes.get_title("left") == "What each step needs to drop nothing"


def test_costs_against_what_is_dropped():
    found = studied("zipf")
    left, right = plots.figures(found)["cost"].axes
    padded = lines(left)["padded experts: every slot computed"]
    options = [option for option in found.options if option.factor >= 1]
    assert list(padded.get_xdata()) == [option.padded_ms for option in options]
    assert list(padded.get_ydata()) == [max(option.dropped, 1e-6) for option in options]
    assert "ms" in left.get_xlabel()
    assert "GiB" in right.get_xlabel()


def test_without_sizes_there_is_no_cost():
    assert set(plots.figures(studied("uniform", layer=False))) == {"dropped", "load", "need"}


def test_svg_is_text_without_a_prolog_and_always_the_same():
    first, second = (plots.svg(plots.figures(studied("zipf"))["cost"]) for _ in range(2))
    assert first == second
    assert first.startswith("<svg ")
    assert first.rstrip().endswith("</svg>")
    assert ">dropped rows</text>" in first
