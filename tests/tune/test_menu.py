"""The menu: which rows it has, which is marked, and what it cites."""

import json
from pathlib import Path

import numpy as np
import pytest

from padded_dispatch.tune.cost import LayerSizes
from padded_dispatch.tune.menu import FINDINGS, SOURCES, choices, finding, menu, notes
from padded_dispatch.tune.recommend import Target, percent
from padded_dispatch.tune.study import Layer, Question, study
from padded_dispatch.tune.synthetic import TraceSizes, synthetic_trace
from padded_dispatch.tune.time_model import shipped

SIZES = TraceSizes(num_steps=60, num_layers=2, num_ranks=2, num_tokens=64, num_experts=8, top_k=2)
QUALITY = Path(__file__).parents[2] / "notebooks" / "results" / "quality.json"


def study_of(kind="lognormal", layer=None, **target):
    question = Question(target=Target(**target), eval_target=Target(drop=0.0))
    return study(synthetic_trace(kind, SIZES), question, name="x", layer=layer)


def test_each_row_cites_a_study_that_dropped_as_much():
    assert [finding(share).dropped for share in (0.0, 0.008, 0.009, 0.05, 0.2)] == [
        0.008,
        0.008,
        0.031,
        0.074,
        0.283,
    ]
    assert finding(0.6) is None
    shares = [found.dropped for found in FINDINGS]
    assert shares == sorted(shares)
    assert {found.source for found in FINDINGS} == set(SOURCES)


def test_our_own_findings_are_those_of_the_results_file():
    """Differences of the held-out loss to no dropping, mean over seeds, and the share dropped."""
    runs = json.loads(QUALITY.read_text())["runs"]
    (run,) = (run for run in runs if "H200" in run["about"]["machine"])
    losses: dict = {}
    for row in run["rows"]:
        losses[row["capacity_factor"], row["seed"]] = row["held_out"]["loss"][-1]
    ours = {found.effect[:6] for found in FINDINGS if found.source == "a"}
    factors = (0.5, 0.75, 1.0, 1.25)
    means = [np.mean([losses[f, s] - losses[None, s] for s in range(3)]) for f in factors]
    assert ours == {f"{mean:+.3f}" for mean in means}


def test_rows_are_the_smallest_factors_for_some_shares():
    found = study_of(drop=0.02)
    shown = choices(found)
    assert found.option(found.training.overall.factor) in shown
    assert shown[-1].dropped == 0
    for share in (0.1, 0.05, 0.01, 0.001):
        enough = [option for option in found.options if option.dropped <= share]
        assert enough[0] in shown
    assert len(shown) <= 8


def test_cells():
    found = study_of(drop=0.02)
    table = menu(found)
    assert table.headers == ("factor", "slots", "dropped", "99 % steps", "in studies")
    assert table.marked is not None
    advice = found.training.overall
    marked = table.rows[table.marked]
    assert marked[:3] == (f"{advice.factor:g}", str(advice.capacity), percent(advice.dropped))
    assert marked[3] == f"<= {percent(advice.worst)}"  # of 60 steps the worst is within 99 %
    assert marked[4] == str(finding(advice.dropped))
    assert table.rows[-1][2:] == ("0 %", "<= 0 %", "nothing dropped")


def test_costs_where_the_sizes_are_known():
    sizes = LayerSizes(num_tokens=64, hidden_size=64, ffn_size=32, num_layers=2)
    found = study_of(layer=Layer(sizes=sizes, time_model=shipped()))
    table = menu(found)
    assert table.headers[4:] == ("ms", "GiB", "in studies")
    option = choices(found)[0]
    assert table.rows[0][4] == f"{option.packed_ms:.2f}"
    assert table.rows[0][5] == f"{option.cost.memory_bytes / 2**30:.3g}"
    assert any("modelled" in note for note in notes(found))


def test_sources_are_those_that_are_cited():
    found = study_of()
    last = [row[-1] for row in menu(found).rows]
    text = "\n".join(notes(found))
    cited = [letter for letter in SOURCES if any(cell.endswith(f"[{letter}]") for cell in last)]
    assert [letter for letter in SOURCES if f"[{letter}] {SOURCES[letter]}." in text] == cited
    assert cited


@pytest.mark.parametrize("kind", ["balanced", "zipf"])
def test_one_screen(kind):
    found = study_of(kind)
    lines = str(menu(found)).splitlines()
    assert len(lines) + len(notes(found)) <= 14
    assert max(len(line) for line in lines) <= 100
