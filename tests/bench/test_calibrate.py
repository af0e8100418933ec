"""The calibration that `tune` uses, fitted to measured rows."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from padded_dispatch.bench.calibrate import _measured, calibrate, compare, main
from padded_dispatch.bench.cases import CONTENDERS, MODELS
from padded_dispatch.bench.command import parse
from padded_dispatch.tune.time_model import NAMES, load, shipped

RESULTS = Path(__file__).parents[2] / "notebooks" / "results" / "layer_bench.json"


def test_the_shipped_calibration_is_what_the_results_file_gives():
    # If this fails after a new measurement:
    # padded-dispatch calibrate --out padded_dispatch/tune/h200.json --from RESULTS
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
    errors, seen = {}, set()
    for run in reversed(json.loads(RESULTS.read_text())["runs"]):
        for row in run["rows"]:
            if row["graph"] != "layer" or row["skew"] != "uniform" or row["error"] is not None:
                continue
            case = [row[n] for n in ("model", "ep", "tokens", "contender", "variant")]
            case = (*case, row["capacity_factor"])
            # The last one measured counts. The model has no direct stores, which auto chooses.
            modelled = row["variant"] in (None, "module", "packed", "batched")
            if not modelled or row.get("main_grad", "none") != "none" or case in seen:
                continue
            seen.add(case)
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
            if row["tokens"] != 4096:
                name += f" with {row['tokens']:,} tokens"
            errors[name] = max(abs(ms / row["ms"] - 1), errors.get(name, 0.0))
    assert set(errors) == set(kept.errors)
    for name, error in errors.items():
        assert math.isclose(error, kept.errors[name], abs_tol=1e-6), name  # shares of a byte


def test_a_fit_of_existing_results(tmp_path, capsys):
    out = tmp_path / "mine.json"
    assert main(["--out", str(out), "--from", str(RESULTS)]) == 0
    assert load(out).coefficients == calibrate(json.loads(RESULTS.read_text())).coefficients
    printed = capsys.readouterr().out
    assert all(name in printed for name in NAMES)
    assert load(out).describe() in printed


def test_results_of_two_kinds_of_machine(tmp_path):
    (run, *_) = json.loads(RESULTS.read_text())["runs"]
    other = {"about": run["about"] | {"machine": "8 x NVIDIA B200"}, "rows": run["rows"]}
    with pytest.raises(
        ValueError, match=r"results must be of one kind .*, got 'NVIDIA B200 and NVIDIA H200'; fit"
    ):
        calibrate({"runs": [run, other]})


def results(rows, machine="1 x NVIDIA H200"):
    about = {"machine": machine, "commit": "f00", "date": "2026-11-21"}
    return {"runs": [{"about": about, "rows": rows}]}


def row(contender="packed-graphed", **changes):
    """Return a results row with half-full slots whose time is the shipped model's."""
    case = {"model": "qwen3-30b-a3b", "ep": 4, "tokens": 4096, "capacity_factor": 2.0} | changes
    who = CONTENDERS[contender]
    made = {"skew": "uniform", "contender": who.name, "variant": who.variant, "graph": who.graph}
    made |= case | {"fill": 0.5, "error": None, "ms": 1.0}
    return made | {"ms": shipped().ms(_measured(made, 4096).work)}


def test_other_numbers_of_tokens_are_compared():
    """`fixed_ms` holds for 4,096 tokens; here 512 take half the modelled time."""
    rows = [
        row(contender, model=model, ep=ep)
        for contender in ("packed-graphed", "module-graphed")
        for model in ("qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite")
        for ep in (1, 4)
    ]
    short = row(tokens=512)
    short["ms"] /= 2
    found = calibrate(results([short, *rows]))
    assert (found.num_rows, found.num_tokens, found.determined) == (12, (4096,), NAMES)
    assert math.isclose(found.errors.pop("ours packed with 512 tokens"), 1.0, rel_tol=1e-9)
    assert set(found.errors) == {"ours packed", "ours module"}
    assert max(found.errors.values()) < 1e-9


def test_the_last_row_of_a_case_counts():
    slow, now = row(), row()
    slow["ms"] *= 2
    first, second = (results([row("module-graphed"), r])["runs"][0] for r in (slow, now))
    second["about"] = second["about"] | {"commit": "f01"}
    found = calibrate({"runs": [first, second]})
    assert (found.num_rows, [about["commit"] for about in found.sources]) == (2, ["f01"])
    assert max(found.errors.values()) < 1e-9


def test_times_beside_rows_that_were_not_fitted():
    slow, fast = row(), row(ep=2)
    slow["ms"] /= 1.1
    fast["ms"] /= 0.8
    assert compare(shipped(), results([slow, fast, row("module-graphed")])) == (
        "Modelled times beside 3 measured ones that were not fitted:\n"
        "  ours packed, 2 rows: median error 15.0%, largest -20.0% (qwen3-30b-a3b, EP 2, factor 2)"
        "\n  ours module, 1 rows: median error 0.0%, largest +0.0% (qwen3-30b-a3b, EP 4, factor 2)"
    )
    with pytest.raises(
        ValueError, match=r"check must .*, got '1 rows, machines NVIDIA B200 and NVIDIA H200'"
    ):
        compare(shipped(), results([row()], machine="8 x NVIDIA B200"))
    with pytest.raises(
        ValueError, match=r"check must hold rows .*, got '0 rows, machines NVIDIA H200'"
    ):
        compare(shipped(), results([]))


def test_mistakes(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"from must be an existing results file, got .*nothing\."):
        main(["--out", str(tmp_path / "c.json"), "--from", str(tmp_path / "nothing.json")])
    (tmp_path / "c.rows.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"out must .*c\.rows\.json exists, got .*c\.json'; fit that with --from"
    ):
        main(["--out", str(tmp_path / "c.json")])
    for name in ("from", "check"):
        with pytest.raises(ValueError, match=rf"{name}.*c\.rows\.json.*runs"):
            main(["--out", str(tmp_path / "d.json"), f"--{name}", str(tmp_path / "c.rows.json")])
    with pytest.raises(ValueError, match=r"rows.*0"):
        calibrate({"runs": []})
    with pytest.raises(ValueError, match=r"rows.*0"):  # of another command
        calibrate(results([{"check": "parity", "passed": True}]))
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ValueError, match=r"RANK must be unset, .*, got '3'; under torchrun"):
        main(["--out", str(tmp_path / "d.json")])
    with pytest.raises(SystemExit):
        main([])


def started_with(monkeypatch, num_gpus, answer):
    """Replace the benchmark on `num_gpus` by `answer(settings)`."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    monkeypatch.setattr("padded_dispatch.bench.command.main", lambda flags: answer(parse(flags)))


@pytest.mark.parametrize(
    ("num_gpus", "eps", "undecided"),
    [(8, (8, 1), set()), (6, (4, 1), set()), (1, (1,), {"wire_gb_per_s"})],
)
def test_what_is_measured_tells_the_coefficients_apart(
    monkeypatch, tmp_path, num_gpus, eps, undecided
):
    """The run that it starts, as parsed by `bench`; the fit does without a case that failed."""
    runs = []

    def answer(settings):
        runs.append(settings)
        rows = [row(**dataclasses.asdict(case)) for case in settings.cases]
        rows[-1]["error"] = "OutOfMemoryError: too large"
        settings.out.write_text(json.dumps(results(rows)))
        return 1

    started_with(monkeypatch, num_gpus, answer)
    out = tmp_path / "c.json"
    assert main(["--out", str(out), "--commit", "f00", "--check", str(RESULTS)]) == 1
    (settings,) = runs
    assert (settings.workers, settings.minutes, settings.commit) == (eps[0], 2.0, "f00")
    assert (
        settings.command == f"padded-dispatch calibrate --out {out} --commit f00 --check {RESULTS}"
    )
    assert tuple(dict.fromkeys(case.ep for case in settings.cases)) == eps
    found = load(out)
    assert found.num_rows == 12 * len(eps) - 1
    assert set(NAMES) - set(found.determined) == undecided
    for name in found.determined:
        value, expected = (getattr(c.coefficients, name) for c in (found, shipped()))
        assert math.isclose(value, expected, rel_tol=1e-9), name


def test_without_gpus_there_is_nothing_to_measure(monkeypatch, tmp_path):
    started_with(monkeypatch, 0, lambda settings: 0)
    with pytest.raises(ValueError, match=r"GPUs must be at least 1, .*CUDA graphs, got 0; fit"):
        main(["--out", str(tmp_path / "c.json")])
