"""The program that runs the recipes on GPUs, with stand-ins for torchrun and padded-dispatch."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.gpu.recipes import FIGURES, differences, main, scalars, schedule, summary, untrained
from tests.support.recipes import GRAPHS_016, GRAPHS_018

# Reads flags as Megatron-LM does: 30 iterations, or as many as the last `--train-iters` says, with
# a reading of telemetry after every tenth.
TORCHRUN = """#!{python}
import os, sys
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

flags = sys.argv[1:]
assert int(os.environ["PET_MASTER_PORT"]) > 0 and "{broken}" not in flags
value = lambda name: flags[len(flags) - flags[::-1].index(name)]
steps = int(value("--train-iters"))
writer = EventFileWriter(value("--tensorboard-dir"))
print("gpus", os.environ["CUDA_VISIBLE_DEVICES"], "port", os.environ["PET_MASTER_PORT"])
figures = dict.fromkeys({figures}, None)
for step in range(1, steps + 1):
    if step % 10 == 0:
        for index, name in enumerate(figures):
            figures[name] = index * step / 3
            entry = Summary.Value(tag=name, simple_value=figures[name])
            writer.add_event(Event(step=step, summary=Summary(value=[entry])))
    line = "".join(f" {{n}}: {{v:.6E}} |" for n, v in figures.items() if v)
    print(f" [now] iteration {{step:8d}}/{{steps:8d}} | lm loss: 1.0 |{{line}}")
writer.close()
"""
TUNE = """#!/bin/sh
mkdir tune
cat >tune/settings.md <<'END'
```bash
torchrun --nproc-per-node auto x.py "${ARGS[@]}" --pasted
```
END
echo Set the capacity factor to 2
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a checkout of Megatron-LM 0.18 or later, and the stand-ins."""
    config = tmp_path / "megatron" / "core" / "transformer" / "transformer_config.py"
    config.parent.mkdir(parents=True)
    config.write_text("cuda_graph_modules: list")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    add_program(tmp_path / "padded-dispatch", TUNE)
    add_program(tmp_path / "torchrun", torchrun())
    return tmp_path


def torchrun(*, broken: str = "nothing") -> str:
    return TORCHRUN.format(python=sys.executable, broken=broken, figures=FIGURES)


def add_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def run(checkout: Path, *arguments: str) -> tuple[int, str]:
    """Run the program; return its exit code and its summary."""
    logs = checkout / "logs"
    code = main(["--megatron-lm", str(checkout), "--logs", str(logs), *arguments])
    return code, (logs / "summary.log").read_text()


def test_the_printed_block_is_pasted_and_every_tensorboard_file_read_back(checkout):
    code, text = run(checkout, "--recipes", "trace", "pasted")
    assert code == 0, text
    trace, pasted = re.split(r"^== ", text, flags=re.MULTILINE)[1:]
    assert "iteration      400/     400" in trace and "Set the capacity factor to 2" in trace
    assert "iteration       30/      30" in pasted
    log = (checkout / "logs" / "pasted.log").read_text()
    assert "torchrun --nproc-per-node auto x.py" in log and "gpus 0 port" in log


def test_a_run_that_fails_fails_the_program_and_names_the_run(checkout):
    add_program(checkout / "torchrun", torchrun(broken="--padded-trace"))
    code, text = run(checkout, "--recipes", "trace", "pasted")
    assert code == 1
    assert re.search(r"^== trace, 1 GPU\(s\), \d+ s: FAILED: exit code 1$", text, re.MULTILINE)
    assert "== pasted, 1 GPU(s), 0 s: FAILED: no settings to paste: " in text


def names(graphs: str, num_gpus: int, only: list[str] | None = None) -> list[list[list[str]]]:
    stages = schedule(graphs, num_gpus, only)
    return [[[f"{j.name} {j.gpus}" for j in lane] for lane in stage] for stage in stages]


def test_recipes_for_one_gpu_run_beside_each_other_on_two():
    eager, trace, pasted = ("eager (0,)", "trace (1,)", "pasted (1,)")
    assert names(GRAPHS_016, 2) == [
        [[eager, f"{GRAPHS_016} (0,)"], [trace, pasted]],
        [["one host (0, 1)"]],
    ]
    assert names(GRAPHS_018, 1) == [
        [[eager, f"{GRAPHS_018} (0,)", "trace (0,)", "pasted (0,)"]],
        [["one host (0,)"]],
    ]
    assert names(GRAPHS_018, 2, ["one host"]) == [[["one host (0, 1)"]]]


LINES = [f" iteration {step:8d}/       3 | moe/fill: {0.5:.6E} | x" for step in (1, 2, 3)]
FOUND = {name: {1: 0.0} for name in FIGURES} | {"moe/fill": {1: 0.5}}


def test_lines_and_tensorboard_have_the_same_values():
    assert differences("\n".join(LINES), FOUND) == []
    assert differences("\n".join(LINES), FOUND | {"moe/fill": {1: 0.5, 3: 0.25}}) == [
        "moe/fill of step 3: 0.5 in the line, 0.25"
    ]
    assert differences("\n".join(LINES), FOUND | {"moe/dropped": {}}) == [
        "not in the TensorBoard file: ['moe/dropped']"
    ]


def test_a_run_must_reach_its_last_iteration():
    assert untrained("\n".join(LINES)) == []
    assert untrained("\n".join(LINES[:2])) == ["the last iteration in the log is ('2', '3')"]
    assert untrained("") == ["the last iteration in the log is None"]


def test_a_folder_without_events_has_no_scalars(tmp_path):
    assert scalars(tmp_path) == {}


def test_the_summary_has_three_steps_and_what_tune_said():
    said = "+ padded-dispatch tune traces\nSet the capacity factor to 2\n"
    output = "\n".join(["start", *LINES, said, "exit code 0\n"])
    assert summary(output).splitlines() == [
        *(line.strip() for line in LINES),
        *said.splitlines(),
        "",
        "exit code 0",
    ]
