"""Results files: runs are added, never lost."""

import json
import os

import pytest
import torch

from padded_dispatch.utils import results


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}', "it holds no runs; name a results file"),
        ("[]", "it holds no runs; name a results file"),
        ('{"runs": [', r"Expecting value: .*; name a results file"),
        (None, r".*Is a directory.*; name a results file"),
    ],
)
def test_what_holds_no_runs_is_named_and_left_alone(tmp_path, text, message):
    path = tmp_path / "r.json"
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)
    expected = rf"^out={path} is not possible: {message}$"
    for refuse in (results.read_runs, results.require_results):
        with pytest.raises(ValueError, match=expected):
            refuse("out", path)
    with pytest.raises(ValueError, match=message):
        results.append_run(path, {}, [{"ms": 1}])
    assert text is None or path.read_text() == text


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    results.require_folder("trace", tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists()
    for folder in (tmp_path / "file", tmp_path / "file" / "deep"):
        message = rf"^trace='{folder}' is not possible: {tmp_path}/file is no folder that can be wr"
        with pytest.raises(ValueError, match=message):
            results.require_folder("trace", folder)
    with pytest.raises(ValueError, match=rf"^out='{tmp_path}/file' is not possible"):
        results.require_results("out", tmp_path / "file" / "r.json")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=rf"{tmp_path} is no folder .*; name another$"):
        results.require_results("results", tmp_path / "r.json")


def test_about_says_where_and_with_what():
    about = results.about(num_gpus=0, command="a command", commit=None)
    assert about["command"] == "a command" and about["commit"] is None
    # What a wheel says of itself may leave out "+cu130".
    assert torch.__version__.startswith(about["versions"]["torch"])
    assert "CPU cores" in about["machine"]
    assert set(about) == {"machine", "versions", "command", "commit", "date"}


def test_rows_join_the_run_that_is_about_the_same(tmp_path):
    path = tmp_path / "r.json"
    for about, ms in (("a", 1), ("b", 2), ("a", 3)):
        results.append_run(path, {"command": about}, [{"ms": ms}])
    assert [[row["ms"] for row in run["rows"]] for run in results.read_runs("out", path)] == [
        [1, 3],
        [2],
    ]


def test_only_the_rank_that_writes_needs_the_folder(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RANK", "1")
    results.require_results("out", tmp_path / "file" / "r.json")
