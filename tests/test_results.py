"""Results files: runs are added, never lost."""

import json

import torch

from padded_dispatch import results


def test_runs_are_added(tmp_path):
    path = tmp_path / "new" / "r.json"
    results.append_run(path, {"commit": "a"}, [{"ms": 1.5}])
    results.append_run(path, {"commit": "b"}, [{"ms": None}, {"ms": 2}])
    assert json.loads(path.read_text()) == {
        "runs": [
            {"about": {"commit": "a"}, "rows": [{"ms": 1.5}]},
            {"about": {"commit": "b"}, "rows": [{"ms": None}, {"ms": 2}]},
        ]
    }
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]


def test_about_says_where_and_with_what():
    about = results.about(num_gpus=0, command="a command", commit=None)
    assert about["command"] == "a command" and about["commit"] is None
    # What a wheel says of itself may leave out "+cu130".
    assert torch.__version__.startswith(about["versions"]["torch"])
    assert "CPU cores" in about["machine"]
    assert set(about) == {"machine", "versions", "command", "commit", "date"}
