"""The time model: its formula, its fit, and the coefficients that rows do not decide."""

import dataclasses
import json
import math

import pytest

from padded_dispatch.tune.time_model import (
    NAMES,
    START,
    Coefficients,
    Measured,
    TimeModel,
    Work,
    fit,
    load,
    save,
    shipped,
)

TRUE = Coefficients(
    fixed_ms=0.5,
    per_expert_ms=0.01,
    wire_gb_per_s=200.0,
    padded_tflop_per_s=500.0,
    packed_tflop_per_s=400.0,
)
ABOUT = {"machine": "1 x Abacus", "versions": {}, "command": "count", "commit": "f00", "date": "d"}


def model(coefficients):
    return TimeModel(
        coefficients=coefficients,
        determined=NAMES,
        sources=(ABOUT,),
        num_rows=9,
        num_ranks=(1,),
        num_tokens=(4096,),
        errors={},
    )


def works(packed, wire=(0.0, 3e8)):
    return [
        Work(
            packed=packed,
            num_launched=0 if packed else experts,
            wire_bytes=sent,
            flops=flops,
        )
        for experts, sent, flops in [
            (4, wire[0], 1e12),
            (4, wire[1], 2e12),
            (16, wire[0], 2e12),
            (128, wire[1], 3e12),
        ]
    ]


def row_of(work, ms, num_ranks=1):
    return Measured(work=work, ms=ms, name="ours", num_ranks=num_ranks, num_tokens=4096)


def measured(items):
    return [row_of(work, model(TRUE).ms(work)) for work in items]


def test_milliseconds_by_hand():
    padded = Work(packed=False, num_launched=16, wire_bytes=4e8, flops=1e12)
    packed = Work(packed=True, num_launched=0, wire_bytes=4e8, flops=1e12)
    assert math.isclose(model(TRUE).ms(padded), 0.5 + 0.16 + 2.0 + 2.0, rel_tol=1e-12)
    assert math.isclose(model(TRUE).ms(packed), 0.5 + 2.0 + 2.5, rel_tol=1e-12)


def test_a_fit_finds_what_made_the_rows():
    found = fit(measured(works(False) + works(True)), [ABOUT])
    assert found.determined == NAMES
    assert found.num_rows == 8
    for name in NAMES:
        value, true = getattr(found.coefficients, name), getattr(TRUE, name)
        assert math.isclose(value, true, rel_tol=1e-9), name
    assert found.errors["ours"] < 1e-9


def test_what_rows_do_not_decide_stays_where_it_started():
    found = fit(measured(works(False, wire=(0.0, 0.0))), [ABOUT])
    assert found.determined == ("fixed_ms", "per_expert_ms", "padded_tflop_per_s")
    assert math.isclose(found.coefficients.wire_gb_per_s, START.wire_gb_per_s, rel_tol=1e-12)
    assert (
        "The rows do not decide wire_gb_per_s, packed_tflop_per_s, taken from" in found.describe()
    )


def test_one_row_is_met_but_decides_nothing():
    (row, *_) = measured(works(False))
    found = fit([row], [ABOUT])
    assert found.determined == ()
    assert math.isclose(found.ms(row.work), row.ms, rel_tol=1e-12)
    assert "a small error on the fitted ones is weak evidence" in found.describe()


def test_other_rows_are_compared_and_not_fitted():
    rows = measured(works(False) + works(True))
    other = dataclasses.replace(rows[0], ms=rows[0].ms * 2, name="stock", fits=False)
    found = fit([*rows, other], [ABOUT])
    assert found.coefficients == fit(rows, [ABOUT]).coefficients
    assert math.isclose(found.errors["stock"], 0.5, rel_tol=1e-9)
    with pytest.raises(ValueError, match="rows must hold a measured layer of ours, got 0"):
        fit([other], [ABOUT])


def test_the_description_names_the_ranks():
    (row, *_) = measured(works(False))
    found = fit([dataclasses.replace(row, num_ranks=ranks) for ranks in (4, 1, 4, 2)], [ABOUT])
    assert found.num_ranks == (1, 2, 4)
    assert "rows of EP 1, 2, 4 with 4,096 tokens per rank, measured on" in found.describe()


def test_rows_that_contradict_the_model():
    few, many = works(False)[2:]
    rows = [row_of(few, 9.0), row_of(many, 0.1), row_of(dataclasses.replace(few, flops=4e12), 2.0)]
    with pytest.raises(
        ValueError, match=r"rows must agree with the model, got .* below 0; measure"
    ):
        fit(rows, [ABOUT])


def test_json_there_and_back(tmp_path):
    found = fit(measured(works(False)), [ABOUT])
    save(found, tmp_path / "c.json")
    assert load(tmp_path / "c.json") == found


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.pop("sources"),
        lambda raw: raw.pop("num_ranks"),
        lambda raw: raw.pop("num_tokens"),
        lambda raw: raw["coefficients"].pop("fixed_ms"),
        lambda raw: raw["coefficients"].update(fixed_ms=-1.0),
        lambda raw: raw["coefficients"].update(fixed_ms="fast"),
        lambda raw: raw.update(surprise=1),
        lambda raw: raw["sources"][0].pop("machine"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, change):
    path = tmp_path / "c.json"
    save(fit(measured(works(False)), [ABOUT]), path)
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"calibration must be a file of .*c\.json.*; give"):
        load(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "{"])
def test_a_file_that_is_no_time_model(tmp_path, text):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"calibration must be .*c\.json.*; give"):
        load(path)
    with pytest.raises(ValueError, match=r"calibration must be .*none\.json.*; give"):
        load(tmp_path / "none.json")


def test_the_shipped_one_is_marked():
    assert "measured on" in shipped().describe()
    assert "NVIDIA H200" in shipped().describe()
