"""Megatron-Bridge's own `pretrain()` has our figures, traces, errors and repeated steps, on a CPU.

Cases are those of `notebooks/bridge_run.py`, with a tiny model.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

import pytest

from padded_dispatch.trace import load_traces

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"

pytestmark = pytest.mark.skipif(
    find_spec("megatron.bridge") is None, reason="Megatron-Bridge is not installed"
)


def train(name: str, folder: Path) -> tuple[str, int]:
    """Train a case; return its log and exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m"]
    command += ["tests.support.bridge", name, str(folder)]
    with Popen(command, stdout=PIPE, stderr=STDOUT, text=True, cwd=NOTEBOOKS.parent) as process:
        log, _ = process.communicate()
    return log, process.returncode


def row_of(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.syspath_prepend(str(NOTEBOOKS))
    import bridge_run

    sizes = bridge_run.Sizes(layers=2)
    return bridge_run.row(name, sizes, folder / name, *train(name, folder), 1)


def test_pretrain_has_our_figures_and_a_trace(tmp_path, monkeypatch):
    made = row_of("ours", tmp_path, monkeypatch)
    assert (made["exit_code"], made["iterations"], made["dropped"]) == (0, 60, [0.0] * 60)
    assert made["loss"][-1] < made["loss"][0] - 0.3
    assert made["tensorboard"]["moe/dropped"] == 0.0
    assert made["tensorboard"]["moe/needed_factor"] >= 1.0
    trace = load_traces([tmp_path / "ours" / "trace"])
    assert sorted(set(trace.steps.tolist())) == [*range(1, 61)]
    assert made["tune"]["exit_code"] == 0


def test_pretrain_repeats_steps_that_dropped_rows(tmp_path, monkeypatch):
    made = row_of("ours, retry", tmp_path, monkeypatch)
    assert (made["exit_code"], made["iterations"]) == (0, 20)
    assert min(made["dropped"]) > 0
    assert made["tensorboard"]["moe/retried_steps"] == 20.0


def test_pretrain_ends_at_the_first_line_that_drops(tmp_path, monkeypatch):
    made = row_of("ours, error", tmp_path, monkeypatch)
    assert made["exit_code"] and made["iterations"] == 1
    assert made["error"].startswith("RuntimeError: on_overflow='error': ")
    assert "found no room at step 1 (" in made["error"]


def test_pretrain_continues_with_the_options_of_a_saved_run_config(tmp_path, monkeypatch):
    saved = row_of("ours, saved", tmp_path, monkeypatch)
    continued = row_of("ours, continued", tmp_path, monkeypatch)
    assert (saved["iterations"], continued["iterations"]) == (20, 10)
    assert continued["loss"][0] == pytest.approx(saved["loss"][10], rel=1e-3)
