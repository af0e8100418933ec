"""The command from its flags to what it prints, and its mistakes."""

import dataclasses

import pytest

from padded_dispatch import cli
from padded_dispatch.tune import report
from padded_dispatch.tune.cost import LayerSizes
from padded_dispatch.tune.recommend import Target, study
from tests.support.traces import made_up, save

ASKED = made_up(num_steps=20, num_layers=2, num_ranks=2, num_tokens=40, num_experts=6, top_k=2)


@pytest.fixture
def tune(tmp_path, monkeypatch, capsys):
    """Run the command beside a folder `run` with a trace; return what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONWARNINGS", "")
    save(ASKED, tmp_path / "run")

    def run(flags: str) -> tuple[int, str]:
        code = cli.main(["tune", *flags.split()])
        shown = capsys.readouterr()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
        return code, shown.err if code else shown.out

    return run


def test_from_a_folder_of_traces_to_the_answer(tune):
    sizes = LayerSizes(hidden_size=64, ffn_size=48, num_layers=2)
    of_run = dataclasses.replace(ASKED, pool="store")
    found = study(of_run, Target(drop=0.02, steps_share=0.9))
    flags = "run --drop 0.02 --steps-share 0.9 --hidden-size 64 --ffn-size 48"
    assert tune(flags) == (0, report.summary(found, sizes) + "\n")
    files = "run/rank-00001-step-00000000.npy run/rank-00000-step-00000000.npy"
    found = study(of_run, Target(), pools=("expert",))
    assert tune(f"{files} --pool expert") == (0, report.summary(found) + "\n")
    last = dataclasses.replace(of_run, steps=of_run.steps[15:], counts=of_run.counts[15:])
    found = study(last, Target(), etp=2, store_layers=1)
    assert found.chosen.overall.num_steps == 5
    sizes = dataclasses.replace(sizes, num_layers=1)
    flags = "run --etp 2 --from-step 15 --store-layers 1 --hidden-size 64 --ffn-size 48"
    assert tune(flags) == (0, report.summary(found, sizes) + "\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("nowhere.npy", "TRACE must be a readable trace or a folder of traces, got 'nowhere.npy'"),
        ("run --steps-share 2", "--steps-share must be a share above 0 and at most 1, got 2"),
        ("run --ffn-size 8", "--hidden-size and --ffn-size must be given together"),
        ("run --from-step 20", "--from-step must be at most the last, 19, got 20"),
        ("run --hidden-size 8 --ffn-size 0", "--ffn-size must be at least 1"),
        ("run --etp 3", "--etp must divide the 2 sources of the trace, got 3"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tune, flags, message):
    code, shown = tune(flags)
    (line,) = shown.splitlines()
    assert code == 2 and line.startswith(f"padded-dispatch tune: {message}")
