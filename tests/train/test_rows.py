"""A resumed run keeps every line up to its checkpoint, whatever happens meanwhile."""

import resource

import pytest

from padded_dispatch.train.display import Log
from padded_dispatch.train.rows import kept_rows, open_rows
from padded_dispatch.train.settings import Output

LINES = [f'{{"kind": "train", "step": {step}, "loss": 3.5}}\n' for step in range(1, 7)]


def write(path, lines):
    path.write_text("".join(lines))
    return path


def test_rows_up_to_the_checkpoint_are_kept_and_new_ones_appended(tmp_path):
    path = write(tmp_path / "metrics.jsonl", LINES)
    assert kept_rows(path, 4) == "".join(LINES[:4])
    assert path.read_text() == "".join(LINES)
    with open_rows(path, 4) as file:
        assert path.read_text() == "".join(LINES[:4])
        file.write("more\n")
    assert path.read_text() == "".join([*LINES[:4], "more\n"])
    assert [found.name for found in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", ["", '{"kind": "tr', '{"kind": "train", "step": 2}'])
def test_a_last_line_without_its_end_is_left_out(tmp_path, torn):
    path = write(tmp_path / "metrics.jsonl", [*LINES, torn])
    with open_rows(path, 6):
        assert path.read_text() == "".join(LINES)


def test_a_file_that_needs_no_change_is_not_written_again(tmp_path):
    path = write(tmp_path / "metrics.jsonl", LINES)
    before = path.stat().st_ino
    open_rows(path, 6).close()
    assert path.stat().st_ino == before
    open_rows(path, 5).close()
    assert path.stat().st_ino != before


def test_no_file_has_no_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert kept_rows(path, 3) == ""
    open_rows(path, 3).close()
    assert path.read_text() == ""


@pytest.mark.parametrize("wrong", ["\x00\x00\n", "[1]\n", '{"kind": "train"}\n', "3\n"])
def test_a_line_that_is_no_row_is_named(tmp_path, wrong):
    path = write(tmp_path / "metrics.jsonl", [LINES[0], wrong, LINES[1]])
    message = rf"^{path} must hold a JSON object with a step in each line, .* in line 2; delete the"
    with pytest.raises(ValueError, match=message):
        kept_rows(path, 3)


def _resume_without_room(run_dir) -> str:
    """Resume in this worker, which may not write a byte; return what became of the rows."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with Log(Output(steps=9, run_dir=run_dir, resume=True), 4):
            pass
    except OSError:
        pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return (run_dir / "metrics.jsonl").read_text()


def test_a_full_disk_takes_no_rows_away(pool2, tmp_path):
    write(tmp_path / "metrics.jsonl", LINES)
    assert pool2.run(_resume_without_room, tmp_path) == ["".join(LINES)] * 2
    assert [found.name for found in tmp_path.iterdir()] == ["metrics.jsonl"]
