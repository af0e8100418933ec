"""Changed factors are found again at the step of a checkpoint."""

import json
import logging

import pytest

from padded_dispatch.config import FIT, NO_DROP
from padded_dispatch.megatron.factor_file import NAME, FactorFile
from tests.support import tiny


def kept(folder) -> dict:
    return json.loads((folder / NAME).read_text())["factors"]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, {}),
        (9, {}),
        (10, {1: 1.5, 2: 1.25}),
        (29, {1: 1.5, 2: 1.25}),
        (30, {1: NO_DROP, 2: FIT}),
        (99, {1: NO_DROP, 2: FIT}),
    ],
)
def test_the_last_change_up_to_a_step_holds_and_later_ones_are_forgotten(tmp_path, step, expected):
    with tiny.one_process():
        folder = tmp_path / "new"
        first = FactorFile(None, str(folder), step=0)
        assert first.factors == {} and not folder.exists()
        first.add(10, {1: 1.5, 2: 1.25})
        first.add(30, {1: NO_DROP, 2: FIT})
        resumed = FactorFile(str(folder), str(folder), step=step)
        assert resumed.factors == expected
        assert list(kept(folder)) == [after for after in ("10", "30") if int(after) <= step]
        resumed.add(100, {1: 2.0, 2: 2.0})
        assert kept(folder)["100"] == {"1": "2", "2": "2"}


def test_a_run_may_go_on_in_another_folder(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    with tiny.one_process():
        FactorFile(None, str(old), step=0).add(10, {1: 1.5})
        FactorFile(str(old), str(new), step=20)
        assert kept(new) == kept(old) == {"10": {"1": "1.5"}}
        assert FactorFile(str(new), None, step=20).factors == {1: 1.5}
        # A run from the start leaves nothing of an earlier one.
        FactorFile(None, str(old), step=0)
        assert kept(old) == {}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"factors": {"x": 1}}', '{"factors": {"1": {"1": "-2"}}}']
)
def test_a_broken_file_is_named(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    with tiny.one_process(), pytest.raises(ValueError, match=rf"{NAME} must hold .*; delete it to"):
        FactorFile(str(tmp_path), None, step=5)


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "file").touch()
    with tiny.one_process(), caplog.at_level(logging.WARNING):
        FactorFile(None, str(tmp_path / "file"), step=0).add(1, {1: 2.0})
    assert caplog.messages == [
        f"{tmp_path / 'file' / NAME}: File exists; a resumed run will not know it"
    ]


def _of_ranks(folder: str) -> dict:
    return FactorFile(folder, None, step=5).factors


def test_all_ranks_know_what_the_first_one_reads(pool2, tmp_path):
    (tmp_path / NAME).write_text('{"factors": {"4": {"1": "1.5"}}}')
    assert pool2.run(_of_ranks, str(tmp_path)) == [{1: 1.5}] * 2
