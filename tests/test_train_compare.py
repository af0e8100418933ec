"""Several contenders in the same processes."""

import json

import pytest

from padded_dispatch.train.compare import main

SMALL = "--steps 2 --seq-length 24 --micro-batch 3 --log-every 1"


def test_contenders_run_in_turn_and_are_rows_of_one_run(tmp_path, capfd):
    path = tmp_path / "results.json"
    flags = f"{SMALL} --results {path} --commit abc"
    assert main(f"{flags} --vs --dispatcher allgather --vs --vs --deterministic --vs".split()) == 0
    (run,) = json.loads(path.read_text())["runs"]
    assert [row["contender"] for row in run["rows"]] == ["stock-allgather", "ours", "ours", "ours"]
    # Whatever ran before, a run's numbers are its own.
    _, first, _, again = run["rows"]
    assert first["loss"] == again["loss"]
    assert "1/4 --dispatcher allgather\n" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "at least one --vs"),
        ("--vs --workers 1 --vs", "must be the same for all"),
        ("--vs --out somewhere", "out=somewhere is not possible"),
        ("--vs --vs --graph layer", "CUDA graphs need a GPU"),
    ],
)
def test_mistakes_are_found_before_there_are_workers(flags, message):
    with pytest.raises(ValueError, match=message):
        main(f"{SMALL} {flags}".split())
