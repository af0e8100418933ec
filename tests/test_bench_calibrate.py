"""From measured rows to the calibration that `tune` uses."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from padded_dispatch.bench.calibrate import _measured, calibrate, main
from padded_dispatch.bench.cases import CONTENDERS, MODELS
from padded_dispatch.bench.command import parse
from padded_dispatch.capacity.calibration import NAMES, fit, load, shipped

RESULTS = Path(__file__).parents[1] / "notebooks" / "results" / "layer_bench.json"


def test_the_shipped_calibration_is_what_the_results_file_gives():
    # If this fails after a new measurement:
    # padded-dispatch calibrate padded_dispatch/capacity/h200.json --from RESULTS
    again = calibrate(json.loads(RESULTS.read_text()))
    kept = shipped()
    for name in NAMES:
        now, then = (getattr(c.coefficients, name) for c in (again, kept))
        assert math.isclose(now, then, rel_tol=1e-9), name  # least squares, on another processor
    assert again.determined == kept.determined
    assert again.sources == kept.sources


def test_the_stated_error_covers_every_row_of_the_model():
    """Recomputed from the formula, not with the code that stated it."""
    kept = shipped()
    c = kept.coefficients
    errors = {}
    for run in json.loads(RESULTS.read_text())["runs"]:
        for row in run["rows"]:
            if row["graph"] != "layer" or row["skew"] != "uniform" or row["error"] is not None:
                continue
            if row["variant"] == "direct":
                continue
            shape = MODELS[row["model"]]
            slots_per_expert = math.ceil(
                row["tokens"] * shape.top_k / shape.num_experts * row["capacity_factor"]
            )
            slots = shape.num_experts * slots_per_expert
            packed = row["variant"] == "packed"
            rows = slots * row["fill"] if packed else slots
            sent = 4 * slots * shape.hidden_size * 2 + 2 * (slots + shape.num_experts) * 4
            sent *= (row["ep"] - 1) / row["ep"]
            rate = c.packed_tflop_per_s if packed else c.padded_tflop_per_s
            ms = c.fixed_ms + 18 * shape.hidden_size * shape.ffn_size * rows / rate / 1e9
            ms += sent / c.wire_gb_per_s / 1e6
            if row["variant"] in (None, "module"):
                ms += c.per_expert_ms * shape.num_experts / row["ep"]
            name = " ".join(part for part in (row["contender"], row["variant"]) if part)
            errors[name] = max(abs(ms / row["ms"] - 1), errors.get(name, 0.0))
    assert set(errors) == set(kept.errors)
    for name, error in errors.items():
        assert math.isclose(error, kept.errors[name], abs_tol=1e-6), name  # shares of a byte


def test_a_fit_of_results_that_are_there(tmp_path, capsys):
    out = tmp_path / "mine.json"
    assert main([str(out), "--from", str(RESULTS)]) == 0
    assert load(out).coefficients == calibrate(json.loads(RESULTS.read_text())).coefficients
    printed = capsys.readouterr().out
    assert all(name in printed for name in NAMES)
    assert load(out).describe() in printed


def test_results_of_two_kinds_of_machine(tmp_path):
    (run, *_) = json.loads(RESULTS.read_text())["runs"]
    other = {"about": run["about"] | {"machine": "8 x NVIDIA B200"}, "rows": run["rows"]}
    with pytest.raises(ValueError, match="NVIDIA B200 and NVIDIA H200 are not possible"):
        calibrate({"runs": [run, other]})


def test_mistakes(tmp_path):
    with pytest.raises(ValueError, match=r"from=.*nothing\.json is not possible"):
        main([str(tmp_path / "c.json"), "--from", str(tmp_path / "nothing.json")])
    (tmp_path / "c.rows.json").write_text("{}")
    with pytest.raises(ValueError, match=r"c\.rows\.json is there already"):
        main([str(tmp_path / "c.json")])
    with pytest.raises(ValueError, match="rows=0 is not possible"):
        calibrate({"runs": []})


def test_what_is_measured_tells_the_coefficients_apart(monkeypatch, tmp_path):
    """The run that it starts on eight GPUs, as `bench` understands it."""
    runs = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("padded_dispatch.bench.command.main", lambda flags: runs.append(flags) or 1)
    assert main([str(tmp_path / "c.json"), "--commit", "f00"]) == 1
    settings = parse(runs[0])
    assert (settings.workers, settings.minutes, settings.commit) == (8, 2.0, "f00")
    rows = []
    for case in settings.cases:
        contender = CONTENDERS[case.contender]
        rows.append(
            dataclasses.asdict(case)
            | {"contender": contender.name, "variant": contender.variant, "fill": 0.5}
            | {"graph": contender.graph, "error": None, "ms": 1.0}
        )
    works = [_measured(row) for row in rows]
    times = [dataclasses.replace(row, ms=shipped().ms(row.work)) for row in works]
    assert len(times) == 24
    assert fit(times, shipped().sources).determined == NAMES


def test_without_gpus_there_is_nothing_to_measure(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"workers=0 is not possible: .* sees no GPU"):
        main([str(tmp_path / "c.json")])
