"""Results files: rows are appended, never lost."""

import errno
import json
import math
from pathlib import Path

import pytest
import torch

from padded_dispatch.utils import results


def test_runs_are_added(tmp_path):
    path = tmp_path / "new" / ("r" * 255)  # The longest name.
    results.append_run(path, {"commit": "a"}, [{"ms": 1.5}])
    results.append_run(path, {"commit": "b"}, [{"loss": [1.5, math.nan, -math.inf]}])
    results.append_run(path, {"commit": "a"}, [{"ms": 3}])  # It joins the run with its metadata.
    assert json.loads(path.read_text()) == {
        "runs": [
            {"about": {"commit": "a"}, "rows": [{"ms": 1.5}, {"ms": 3}]},
            {"about": {"commit": "b"}, "rows": [{"loss": [1.5, None, None]}]},
        ]
    }
    assert [*path.parent.iterdir()] == [path]


NO_RUNS = r"it has no list of runs with about and rows\); name another file"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}', NO_RUNS),
        ('{"runs": [{"rows": []}]}', NO_RUNS),
        ("[]", NO_RUNS),
        ('{"runs": [', r"it is not JSON\); name another file"),
        (None, r".*Is a directory.*\); name another file"),
    ],
)
def test_a_file_without_runs_is_refused_and_not_changed(tmp_path, text, message):
    path = tmp_path / "r.json"
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)
    expected = rf"^out must be a results file, got {path} \({message}$"
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
        message = (
            rf"^trace must be a path in a writable folder, got '{folder}'; "
            rf"{tmp_path}/file is not a writable folder: name another$"
        )
        with pytest.raises(ValueError, match=message):
            results.require_folder("trace", folder)
    with pytest.raises(ValueError, match=rf"^out must be a path .*, got '{tmp_path}/file'"):
        results.require_results("out", tmp_path / "file" / "r.json")
    with pytest.raises(ValueError, match=r"; /proc is not a writable folder: name another$"):
        results.require_folder("trace", Path("/proc/x/y"))
    monkeypatch.setenv("RANK", "1")  # Without torchrun.
    with pytest.raises(ValueError, match=r"^out must be a path"):
        results.require_results("out", tmp_path / "file" / "r.json")
    monkeypatch.setenv("WORLD_SIZE", "2")  # Rank 1 writes nothing.
    results.require_results("out", tmp_path / "file" / "r.json")


def test_about_has_the_metadata_of_a_run():
    about = results.about(num_gpus=0, command="a command", commit=None)
    assert about["command"] == "a command" and about["commit"] is None
    # The version of a wheel may lack "+cu130".
    assert torch.__version__.startswith(about["versions"]["torch"])
    assert "CPU cores" in about["machine"]
    assert set(about) == {"machine", "versions", "command", "commit", "kernels", "date"}


def test_lines_of_code_are_neither_docstrings_nor_comments_nor_blanks():
    source = (
        '"""One.\n\nTwo."""\n\n# Three.\ndef f():\n    """Four."""\n    return """five\nsix"""\n'
    )
    assert results.code_lines(source) == ["def f():", '    return """five', 'six"""']


def test_a_disk_that_is_full_leaves_the_old_rows(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    results.append_run(path, {"commit": "a"}, [{"ms": 1}])
    before = path.read_text()

    def full(self, text) -> None:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patches:
        patches.setattr(type(path), "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            results.append_run(path, {"commit": "b"}, [{"ms": 2}])
    assert path.read_text() == before
    assert [found.name for found in tmp_path.iterdir()] == ["r.json"]
