"""The command from its flags to the page that it writes, and its mistakes."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from padded_dispatch import cli
from padded_dispatch.tune import command, plots, report
from padded_dispatch.tune.demand import demand_of
from padded_dispatch.tune.recommend import study
from tests.support.processes import ENVIRONMENT
from tests.support.traces import of_run, save, synthetic_trace

TRACE = synthetic_trace("lognormal", num_steps=20, num_tokens=40, num_experts=6, seed=5)
DEMAND = demand_of(TRACE)


@pytest.fixture
def tune(tmp_path, monkeypatch, capsys):
    """Run the command in a folder of its own; return what it prints and its page."""
    monkeypatch.chdir(tmp_path)

    def run(flags: str) -> tuple[str, str]:
        assert command.main(command.read(flags.split())) == 0
        return capsys.readouterr().out, (tmp_path / "tune.html").read_text()

    return run


def test_from_a_folder_of_traces_to_the_answer(tune, tmp_path):
    (tmp_path / "run").mkdir()
    for rank in (0, 1):
        save(TRACE.where(TRACE.ranks == rank), tmp_path / "run" / f"rank-{rank}.npy")
    printed, page = tune("run --drop 2%")
    found = study(DEMAND, 0.02, name="run")
    assert printed == report.summary(found, Path("tune.html")) + "\n"
    svgs = {name: plots.svg(figure) for name, figure in plots.figures(found).items()}
    assert page == report.html(found, svgs)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "tune.html"}
    _, again = tune("run/rank-1.npy run/rank-0.npy --pool expert --report t/x")
    assert again == page  # The other report is elsewhere.
    alone = study(DEMAND, name="rank-1.npy, rank-0.npy", pools=("cells",))
    words = (tmp_path / "t" / "x").read_text()
    assert alone.chosen.sentence() in words


def test_split_experts_and_the_first_step(tune, tmp_path):
    trace = of_run(TRACE, etp_size=2)
    save(trace, tmp_path / "trace.npy")
    printed, page = tune("trace.npy --from-step 15 --store-layers 1")
    last = trace.where(trace.steps >= 15)
    found = study(demand_of(last), name="trace.npy", store_layers=1)
    assert "of the 5 steps traced" in found.chosen.sentence()
    where = "6 experts, 2 per token, 2 layers; 2 ranks of 40 tokens in each micro-batch; 5 steps"
    assert where in " ".join(page.split())
    assert " ".join(printed.split()).startswith(found.chosen.sentence())


def test_layers_of_a_pipeline_stage_share_a_store(tune, tmp_path):
    """Each rank of a stage has a file of its own layers, and sources of one number."""
    (tmp_path / "run").mkdir()
    for layer in (1, 2):
        of_stage = TRACE.where(TRACE.layers == layer)
        for rank in (0, 1):
            save(of_stage.where(of_stage.ranks == rank), tmp_path / "run" / f"{layer}-{rank}.npy")
    printed, page = tune("run --pool store")
    found = study(DEMAND, name="run", pools=("store",), store_layers=1)
    assert found.chosen.sentence() != study(DEMAND, name="run", pools=("store",)).chosen.sentence()
    assert found.chosen.sentence() in page
    words = " ".join(printed.split())
    said = "A store is shared by 1 of 2 layers, as in a pipeline stage; for several chunks of a st"
    assert words.startswith(f"{found.chosen.sentence()} {said}")
    for flags in ("--pool store --store-layers 2", "--pool cells"):
        assert "A store is shared" not in tune(f"run {flags}")[0]


def test_without_matplotlib_the_page_has_no_figures(tune, monkeypatch, tmp_path):
    """As after the first block of the README's Quick start."""
    save(TRACE, tmp_path / "trace.npy")
    monkeypatch.setattr("padded_dispatch.tune.command.find_spec", lambda name: None)
    printed, page = tune("trace.npy")
    last = "tune.html has no figures; for them, run pip install 'matplotlib>=3.9,<4'."
    assert printed.splitlines()[-1] == last
    assert "<svg" not in page
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    (package,) = extras["project"]["optional-dependencies"]["tune"]
    assert f"run pip install '{package}'" == plots.REMEDY


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_the_page_is_utf_8_in_any_locale_with_any_name_of_a_trace(tmp_path, locale):
    name = "r\u00fc".encode() + b"\xff.npy"
    save(TRACE, tmp_path / "trace.npy")
    os.rename(tmp_path / "trace.npy", os.fsencode(tmp_path) + b"/" + name)
    plain = {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-m", "padded_dispatch.cli", "tune", name]
    subprocess.run(words, cwd=tmp_path, env=ENVIRONMENT | plain, check=True, capture_output=True)
    assert name in (tmp_path / "tune.html").read_bytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("good.npy --report /proc/x/y", "--report must be a path in a writable folder"),
        ("good.npy --report /dev/full", "--report must be a writable file, got /dev/full (No "),
        ("good.npy --report .", "--report must be a file for the page, no folder and no trace"),
        ("--report good.npy good.npy", "--report must be a file for the page, no folder and no"),
        ("--report trace trace", "--report must be a file for the page, no folder and no trace"),
        ("--report ./../here/trace trace", "--report must be a file for the page, no folder and "),
        ("x" * 300, f"{'x' * 300} must be a readable trace, got File name too long; give another"),
        ("nowhere.npy", "TRACE must exist, got 'nowhere.npy'; record it with padded-dispatch "),
        ("broken.npy", "broken.npy: must be a trace, got "),
        ("good.npy --from-step 20", "--from-step must be from 0 to the last, 19, got 20"),
        ("good.npy --from-step -1", "--from-step must be from 0 to the last, 19, got -1"),
        (
            "good.npy --store-layers 3",
            "--store-layers must be from 1 to the trace's 2 layers, got 3",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, monkeypatch, tmp_path, flags, message):
    tmp_path = tmp_path / "here"
    tmp_path.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONWARNINGS", "")
    (tmp_path / "broken.npy").write_bytes(b"\x93NUMPY nothing more")
    for name in ("good.npy", "trace"):
        save(TRACE, tmp_path / name)
    before = (tmp_path / "good.npy").read_bytes()
    assert cli.main(["tune", *flags.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"padded-dispatch tune: {message}")
    assert (tmp_path / "good.npy").read_bytes() == (tmp_path / "trace").read_bytes() == before


def test_the_page_is_written_although_the_reader_of_the_text_has_gone(tmp_path):
    save(TRACE, tmp_path / "trace.npy")
    command = [sys.executable, "-m", "padded_dispatch.cli", "tune"]
    reader, pipe = os.pipe()
    os.close(reader)
    how = {
        "cwd": tmp_path,
        "env": ENVIRONMENT | {"PYTHONUNBUFFERED": ""},
        "stdout": pipe,
        "stderr": subprocess.PIPE,
    }
    for flags in ("trace.npy", "--help"):
        done = subprocess.run([*command, flags], **how)
        assert (done.returncode, done.stderr) == (0, b"")
    os.close(pipe)
    assert (tmp_path / "tune.html").read_text().endswith("</html>\n")
