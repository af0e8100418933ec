"""Cells of the tables, the same for terminal and report."""

import dataclasses

import pytest

from padded_dispatch.tune.cost import LayerSizes
from padded_dispatch.tune.recommend import Target
from padded_dispatch.tune.report import factor_table, layer_table
from padded_dispatch.tune.study import Layer, Question, study
from padded_dispatch.tune.synthetic import TraceSizes, synthetic_trace
from padded_dispatch.tune.time_model import shipped

QUESTION = Question(target=Target(drop=0.02, steps_share=0.9), eval_target=Target(drop=0.0))
SIZES = TraceSizes(num_steps=50, num_layers=3, num_ranks=2, num_tokens=40, num_experts=6, top_k=2)


@pytest.fixture(scope="module")
def found():
    sizes = LayerSizes(num_tokens=40, hidden_size=64, ffn_size=48)
    layer = Layer(sizes=sizes, time_model=shipped())
    return study(synthetic_trace("zipf", SIZES, seed=1), QUESTION, name="zipf", layer=layer)


def test_factors_among_them_the_recommended_one(found):
    table = factor_table(found)
    chosen = found.option(found.training.overall.factor)
    assert table.marked is not None
    row = dict(zip(table.headers, table.rows[table.marked], strict=True))
    assert row["factor"] == f"{chosen.factor:g}"
    assert row["slots"] == str(chosen.capacity)
    assert row["ms padded"] == f"{chosen.padded_ms:.2f}"
    assert row["wire MB"] == f"{chosen.cost.wire_bytes / 1e6:.1f}"
    padded, packed = (float(part) for part in row["TFLOP"].split(" / "))
    assert padded == float(f"{chosen.cost.padded_flops / 1e12:.3g}")
    assert packed == float(f"{chosen.cost.packed_flops / 1e12:.3g}")
    factors = [float(cells[0]) for cells in table.rows]
    assert factors == sorted(factors)
    assert factors[-1] == found.options[-1].factor
    assert len(factors) < len(found.options)


def test_without_sizes_there_are_no_costs(found):
    cheap = dataclasses.replace(
        found,
        layer=None,
        options=tuple(dataclasses.replace(option, cost=None) for option in found.options),
    )
    assert factor_table(cheap).headers[-1] == "fill"


def test_layers(found):
    table = layer_table(found)
    assert len(table.rows) == 3
    for row, (layer, advice) in zip(table.rows, found.training.layers.items(), strict=True):
        cells = dict(zip(table.headers, row, strict=True))
        assert cells["layer"] == str(layer)
        assert cells["factor"] == f"{advice.factor:g}"
        assert cells["promised"] == ("yes" if advice.promised else "no")
        assert cells["eval"] == f"{found.evaluation.layers[layer].factor:g}"
