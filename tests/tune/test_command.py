"""`padded-dispatch tune` from a command line to its files."""

import dataclasses
import json
import re

import pytest

from padded_dispatch import cli
from padded_dispatch.tune.command import main
from padded_dispatch.tune.replay import what_if
from padded_dispatch.tune.study import grid, largest_need
from padded_dispatch.tune.synthetic import Sizes, synthetic_trace
from padded_dispatch.tune.trace import save_trace

SIZES = Sizes(num_steps=60, num_layers=2, num_ranks=2, num_tokens=40, num_experts=6, top_k=2)
MADE = "--steps 60 --layers 2 --ranks 2 --tokens 40 --experts 6 --top-k 2"


@pytest.fixture
def tune(tmp_path, monkeypatch, capsys):
    """Runs the command in a folder of its own; its exit code, what it said, what it wrote."""
    monkeypatch.chdir(tmp_path)

    def run(flags):
        code = main(flags.split())
        path = tmp_path / "tune" / "recommendation.json"
        return code, capsys.readouterr().out, json.loads(path.read_text())

    return run


def test_a_made_up_trace_to_all_files(tune, tmp_path):
    code, said, found = tune(
        f"--synthetic zipf {MADE} --steps-share 0.9 --hidden-size 64 --ffn-size 48"
    )
    assert code == 0
    assert {path.name for path in (tmp_path / "tune").iterdir()} == {
        "report.html",
        "recommendation.json",
        "recommendation.yaml",
        *(
            f"{name}.{kind}"
            for name in ("dropped", "load", "need", "cost")
            for kind in ("png", "svg")
        ),
    }
    assert found["sentence"] in said
    assert found["sentence"] in (tmp_path / "tune" / "report.html").read_text().replace("\xa0", " ")
    assert re.search(r"^making a trace \.\.\. 19,200 rows, 240 passes \(\d+\.\d s\)$", said, re.M)
    assert found["training"]["overall"]["factor"] == float(
        re.search(r"--moe-expert-capacity-factor (\S+)", said)[1]
    )
    assert list(found["training"]["layers"]) == ["1", "2"]  # as Megatron counts
    assert found["layer"]["sizes"]["num_layers"] == 2
    assert found["options"][-1]["dropped"] == 0


def test_recorded_traces_and_folders_of_them(tune, tmp_path):
    trace = synthetic_trace("lognormal", SIZES, seed=5)
    (tmp_path / "run").mkdir()
    for rank in (0, 1):
        save_trace(trace.where(trace.ranks == rank), tmp_path / "run" / f"rank-{rank}.npy")
    _, said, by_folder = tune("run --no-plots")
    assert "reading ... 9,600 rows, 120 passes" not in said
    assert "reading ... 19,200 rows, 240 passes" in said
    _, _, by_file = tune("run/rank-1.npy run/rank-0.npy --no-plots")
    assert by_file["options"] == by_folder["options"]
    exact = what_if(trace, grid(largest_need(trace)))
    dropped = [option["dropped"] for option in by_folder["options"]]
    assert dropped == (exact.dropped.sum(1) / 19_200).tolist()
    assert not list((tmp_path / "tune").glob("*.png"))


def test_megatrons_own_traces(tune, tmp_path):
    trace = synthetic_trace("lognormal", SIZES, seed=5)
    for n in range(trace.num_records):
        record = {
            "step": int(trace.steps[n]),
            "stage": "pre_dispatch",
            "block": "decoder",
            "layer": int(trace.layers[n]),
            "rank": int(trace.ranks[n]),
            "num_tokens": 40,
            "topk": 2,
            "top_indices": trace.ids_NTK[n].tolist(),
        }
        with (tmp_path / f"router_trace_rank{trace.ranks[n]}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
    _, said, found = tune(". --experts 6 --ranks 2 --no-plots")
    assert found["question"]["policy"] == "position"  # Such traces have no probabilities.
    exact = what_if(trace, grid(largest_need(trace)))
    dropped = [option["dropped"] for option in found["options"]]
    assert dropped == (exact.dropped.sum(1) / 19_200).tolist()
    assert found["flags_per_layer"] is None
    assert "No settings for each layer: this trace numbers layers within a pipeline stage" in said
    assert not any("layer-factors" in flag for flag in found["flags"])
    with pytest.raises(ValueError, match="give --experts and --ranks"):
        tune("router_trace_rank0.jsonl")


def test_a_missing_rank_takes_the_promise(tune, tmp_path):
    sizes = Sizes(num_steps=60, num_layers=1, num_ranks=4, num_tokens=40, num_experts=8, top_k=2)
    trace = synthetic_trace("balanced", sizes)
    for rank in range(3):
        save_trace(trace.where(trace.ranks == rank), tmp_path / f"rank-{rank}.npy")
    flags = "--no-plots --steps-share 0.9"
    code, said, found = tune(f"rank-0.npy rank-1.npy rank-2.npy {flags}")
    assert code == 3
    for advice in (found["training"], found["evaluation"]):
        (caveat,) = advice["overall"]["caveats"]
        assert caveat.startswith("traces of 1 of 4 ranks are missing (3)")
    assert "without a promise" in said and "traces of 1 of 4 ranks are missing (3)" in said
    save_trace(trace.where(trace.ranks == 3), tmp_path / "rank-3.npy")
    assert tune(f"rank-0.npy rank-1.npy rank-2.npy rank-3.npy {flags}")[0] == 0


def test_expert_tensor_parallelism_is_told(tune, tmp_path):
    sizes = Sizes(num_steps=4, num_layers=1, num_ranks=4, num_tokens=40, num_experts=4, top_k=2)
    trace = dataclasses.replace(synthetic_trace("zipf", sizes), num_experts=6)
    save_trace(trace, tmp_path / "etp.npy")
    _, _, found = tune("etp.npy --etp 2 --no-plots")
    assert found["trace"]["num_ranks"] == 2
    with pytest.raises(ValueError, match="etp=1 is not possible: 4 sources"):
        tune("etp.npy --no-plots")


def test_no_promise_is_exit_code_3(tune):
    code, said, found = tune(f"--synthetic drift {MADE} --no-plots")
    assert code == 3
    assert "without a promise" in said
    (caveat,) = found["training"]["overall"]["caveats"]
    assert "the need changes over the trace" in caveat


def test_slots_and_promise_are_what_was_asked_for(tune):
    flags = "--policy position --min-capacity 3 --alignment 16 --factors 2 6 --drop 0.5"
    _, _, found = tune(
        f"--synthetic zipf {MADE} --no-plots {flags} --confidence 0.9 --eval-drop 0.4"
    )
    question = found["question"]
    assert (question["policy"], question["min_capacity"], question["alignment"]) == (
        "position",
        3,
        16,
    )
    assert (question["target"]["drop"], question["target"]["confidence"]) == (0.5, 0.9)
    assert question["eval_target"]["drop"] == 0.4
    assert [(option["factor"], option["capacity"]) for option in found["options"]] == [
        (2.0, 32),
        (6.0, 40),
    ]
    assert "--padded-alignment 16" in found["flags"]
    assert "--padded-policy position" in found["flags"]


def test_the_beginning_can_be_left_out(tune):
    """Of 60 steps, the last 15."""
    code, said, found = tune(f"--synthetic drift {MADE} --no-plots --from-step 45")
    assert "making a trace ... 4,800 rows, 60 passes" in said
    assert found["training"]["overall"]["num_steps"] == 15
    assert code == 3


def test_evaluation_from_a_trace_of_its_own(tune, tmp_path):
    save_trace(synthetic_trace("balanced", SIZES), tmp_path / "even.npy")
    _, said, found = tune(f"--synthetic zipf {MADE} --no-plots --eval-traces even.npy")
    assert found["evaluation"]["overall"]["factor"] < found["training"]["overall"]["factor"]
    assert "In evaluation: 1, for no row dropped in 99 % of steps, without a promise." in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "TRACE is not possible so: give traces, or --synthetic KIND"),
        ("some.npy --synthetic zipf", "TRACE is not possible so"),
        ("nowhere.npy", "nowhere.npy: No such file or directory"),
        ("broken.npy", "broken.npy: "),
        ("folder", "folder: no trace (*.npy) is there"),
        (f"--synthetic zipf {MADE} --from-step 60", "from_step=60 is not possible: the trace ends"),
        ("--synthetic zipf --drop 2", "drop=2 is not possible: give a share"),
        (f"--synthetic zipf {MADE} --factors 0.5", "factors up to 0.5 are not possible"),
        (f"--synthetic zipf {MADE} --hidden-size 8", "hidden_size and ffn_size go together"),
        (
            f"--synthetic zipf {MADE} --hidden-size 8 --ffn-size 8 --calibration none.json",
            "calibration=none.json is not possible",
        ),
        ("--synthetic zipf --top-k 99", "top_k=99 is not possible: a token cannot have more than"),
        ("--synthetic zipf --seed -1", "seed=-1 is not possible: give 0 or more"),
        ("--synthetic zipf --tokens 0", "num_tokens=0 is not possible: give at least 1"),
        ("broken.npy --max-gib nan", "max_gib=nan is not possible: give a finite number"),
        (
            f"--synthetic zipf {MADE} --out broken.npy",
            "out=broken.npy is not possible (File exists",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, monkeypatch, tmp_path, flags, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONWARNINGS", "")
    (tmp_path / "broken.npy").write_bytes(b"\x93NUMPY nothing more")
    (tmp_path / "folder").mkdir()
    assert cli.main(["tune", "--no-plots", *flags.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"padded-dispatch tune: {message}")
