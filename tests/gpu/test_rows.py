"""GPU programs write checks and measurements as rows of one file, in one format."""

import argparse
import json

from tests.gpu.direct import run_part
from tests.support.gpu_rows import Rows
from tests.support.inline_pool import InlinePool


def test_checks_and_measurements_are_rows_of_one_file(tmp_path, capsys):
    out = tmp_path / "results" / "direct.json"
    given = argparse.Namespace(out=out, commit="abc", command="python -m tests.gpu.direct")
    rows, pool = Rows(given, 0, {}), InlinePool(1, backend="gloo")
    parts = (
        ({"check": "equal"}, list),
        ({"check": "not equal"}, lambda: ["replay 3"]),
        ({"measure": "exchange", "capacity_factor": 1.0}, lambda: {"us": {"push": 7.5}}),
        ({"measure": "exchange", "capacity_factor": 2.0}, lambda: 1 / 0),
    )
    for row, fn in parts:
        rows.add(run_part(pool, row, fn, ()))
    assert rows.exit_code() == 1
    (run,) = json.loads(out.read_text())["runs"]
    *found, broken = [{**row, "seconds": None} for row in run["rows"]]
    every = {"ranks": 1, "seconds": None}
    right = {"passed": True, "failures": [], "num_failures": 0}
    wrong = {"passed": False, "failures": ["rank 0: replay 3"], "num_failures": 1}
    measured = {"passed": True, "failures": None, "us": {"push": 7.5}}
    assert found == [
        {**row, **result, **every}
        for (row, _), result in zip(parts, (right, wrong, measured), strict=False)
    ]
    assert not broken["passed"] and "ZeroDivisionError" in broken["failures"][0]
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "    rank 0: replay 3" and lines[3].startswith("passed exchange, 1.0, ")
    assert lines[-1] == "2 passed, 2 failed"
