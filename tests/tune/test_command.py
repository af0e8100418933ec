"""`padded-dispatch tune` from a command line to its files."""

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from padded_dispatch import cli
from padded_dispatch.trace import save_trace
from padded_dispatch.tune.command import main
from padded_dispatch.tune.plots import REMEDY
from padded_dispatch.tune.replay import largest_need, replay
from padded_dispatch.tune.study import grid
from padded_dispatch.tune.synthetic import TraceSizes, synthetic_trace

SIZES = TraceSizes(num_steps=60, num_layers=2, num_ranks=2, num_tokens=40, num_experts=6, top_k=2)
MADE = "--steps 60 --layers 2 --ranks 2 --tokens 40 --experts 6 --top-k 2"
HUGE = "--synthetic zipf --steps 1000000"


@pytest.fixture
def tune(tmp_path, monkeypatch, capsys):
    """Run the command in an empty folder; return its exit code, output and recommendation."""
    monkeypatch.chdir(tmp_path)

    def run(flags):
        code = main(flags.split())
        path = tmp_path / "tune" / "recommendation.json"
        return code, capsys.readouterr().out, json.loads(path.read_text())

    return run


def test_a_made_up_trace_to_all_files(tune, tmp_path):
    code, printed, found = tune(
        f"--synthetic zipf {MADE} --steps-share 0.9 --hidden-size 64 --ffn-size 48"
    )
    assert code == 0
    assert {path.name for path in (tmp_path / "tune").iterdir()} == {
        "report.html",
        "recommendation.json",
        "recommendation.yaml",
        "settings.md",
        *(
            f"{name}.{kind}"
            for name in ("dropped", "load", "need", "cost", "pools")
            for kind in ("png", "svg")
        ),
    }
    assert found["sentence"] in printed
    assert found["sentence"] in (tmp_path / "tune" / "report.html").read_text().replace("\xa0", " ")
    assert re.search(
        r"^making a trace \.\.\. 19,200 rows, 240 records \(\d+\.\d s\)$", printed, re.M
    )
    assert found["training"]["overall"]["factor"] == float(
        re.search(r"--moe-expert-capacity-factor (\S+)", printed)[1]
    )
    assert list(found["training"]["layers"]) == ["1", "2"]  # as Megatron counts
    assert found["layer"]["sizes"]["num_layers"] == 2
    assert found["options"][-1]["dropped"] == 0


def test_a_terminal_gets_no_line_that_is_too_long(tune, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "60")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    sizes = "--hidden-size 64 --ffn-size 48 --hold-out 0.3"
    _, printed, found = tune(f"--synthetic zipf {MADE} --no-plots {sizes}")
    assert max(map(len, printed.splitlines())) <= 80
    assert found["sentence"] in " ".join(printed.split())


def test_recorded_traces_and_folders_of_them(tune, tmp_path):
    trace = synthetic_trace("lognormal", SIZES, seed=5)
    (tmp_path / "run").mkdir()
    for rank in (0, 1):
        save_trace(trace.where(trace.ranks == rank), tmp_path / "run" / f"rank-{rank}.npy")
    _, printed, by_folder = tune("run --no-plots --pools expert")
    assert "reading ... 9,600 rows, 120 records" not in printed
    assert "reading ... 19,200 rows, 240 records" in printed
    _, _, by_file = tune("run/rank-1.npy run/rank-0.npy --no-plots --pools expert")
    assert by_file["options"] == by_folder["options"]
    exact = replay(trace, grid(largest_need(trace)))
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
    _, printed, found = tune(". --experts 6 --ranks 2 --no-plots --pools expert")
    assert found["question"]["policy"] == "position"  # Such traces have no probabilities.
    exact = replay(trace, grid(largest_need(trace)))
    dropped = [option["dropped"] for option in found["options"]]
    assert dropped == (exact.dropped.sum(1) / 19_200).tolist()
    assert found["settings_per_layer"] is None
    assert (
        "No settings for each layer: this trace numbers layers within a pipeline stage" in printed
    )
    assert "layer-factors" not in found["settings"]["Megatron-LM"]
    with pytest.raises(
        ValueError, match="--experts and --ranks must be given for Megatron's traces"
    ):
        tune("router_trace_rank0.jsonl")


def test_a_missing_rank_prevents_a_promise(tune, tmp_path):
    sizes = TraceSizes(
        num_steps=60, num_layers=1, num_ranks=4, num_tokens=40, num_experts=8, top_k=2
    )
    trace = synthetic_trace("balanced", sizes)
    for rank in range(3):
        save_trace(trace.where(trace.ranks == rank), tmp_path / f"rank-{rank}.npy")
    flags = "--no-plots --steps-share 0.9 --require-promise --from-step 0"
    code, printed, found = tune(f"rank-0.npy rank-1.npy rank-2.npy {flags}")
    assert code == 3
    for advice in (found["training"], found["evaluation"]):
        (caveat,) = advice["overall"]["caveats"]
        assert caveat.startswith("traces of 1 of 4 ranks are missing (3)")
    assert "without a promise" in printed and "traces of 1 of 4 ranks are missing (3)" in printed
    save_trace(trace.where(trace.ranks == 3), tmp_path / "rank-3.npy")
    assert tune(f"rank-0.npy rank-1.npy rank-2.npy rank-3.npy {flags}")[0] == 0


def test_expert_tensor_parallelism(tune, tmp_path):
    sizes = TraceSizes(
        num_steps=4, num_layers=1, num_ranks=4, num_tokens=40, num_experts=4, top_k=2
    )
    trace = dataclasses.replace(synthetic_trace("zipf", sizes), num_experts=6)
    save_trace(trace, tmp_path / "etp.npy")
    _, _, found = tune("etp.npy --etp 2 --no-plots")
    assert found["trace"]["num_ranks"] == 2
    with pytest.raises(ValueError, match=r"--etp must split 4 sources .*, got 1"):
        tune("etp.npy --no-plots")


def test_no_promise_is_exit_code_3_only_if_it_is_required(tune):
    flags = f"--synthetic drift {MADE} --no-plots --from-step 0 --drop 0.001 --pools expert"
    assert tune(flags)[0] == 0
    code, printed, found = tune(f"{flags} --require-promise")
    assert code == 3
    assert "without a promise" in printed
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
    assert "--padded-alignment 16" in found["settings"]["Megatron-LM"]
    assert "--padded-policy position" in found["settings"]["padded-dispatch train"]


def test_from_step(tune):
    code, printed, found = tune(f"--synthetic drift {MADE} --no-plots --from-step 45")
    assert "making a trace ... 4,800 rows, 60 records" in printed
    assert found["training"]["overall"]["num_steps"] == 15
    assert found["warm_up"] is None
    assert code == 0


def test_a_warm_up_is_left_out_unless_a_step_is_named(tune, tmp_path):
    uneven, even = (synthetic_trace(kind, SIZES, seed=1) for kind in ("zipf", "balanced"))
    late = (even.steps >= 20)[:, None, None]
    warming = dataclasses.replace(even, ids_NTK=np.where(late, even.ids_NTK, uneven.ids_NTK))
    save_trace(warming, tmp_path / "warming.npy")
    _, printed, found = tune("warming.npy --no-plots")
    since = found["warm_up"]["settled_since"]
    assert since == found["warm_up"]["num_steps"]
    assert 18 <= since <= 25
    factor = found["training"]["overall"]["factor"]
    assert (
        f"The first {since} steps of the trace, before step {since}, are a warm-up and were left "
        f"out: {factor:g} drops " in printed
    )
    early = replay(warming.where(warming.steps < since), [factor])
    assert found["warm_up"]["dropped"] == early.dropped.sum() / early.demand.sum()
    _, printed, whole = tune("warming.npy --no-plots --from-step 0")
    assert whole["training"]["overall"]["num_steps"] == 60
    assert whole["training"]["overall"]["factor"] > factor
    assert "warm-up" not in printed
    _, _, named = tune(f"warming.npy --no-plots --from-step {since}")
    assert named["training"] == found["training"]


def test_the_answer_fits_one_screen(tune):
    _, printed, found = tune(f"--synthetic zipf {MADE} --no-plots --hidden-size 64 --ffn-size 48")
    assert len(printed.splitlines()) <= 40
    pool, factor = (line for line in printed.splitlines() if line.startswith(">"))
    recommended = f"{found['training']['overall']['factor']:g}"
    assert pool.split()[1:3] == [found["pool"], recommended]
    assert factor.split()[1] == recommended


def test_pools_are_compared_and_the_best_one_is_set(tune):
    _, printed, found = tune(f"--synthetic lognormal {MADE} --no-plots --drop 0.01")
    assert list(found["pools"]) == ["expert", "rank", "receiver"]
    factors = [answer["factor"] for answer in found["pools"].values()]
    assert factors[0] > 1.03 * min(factors[1:])
    assert found["pool"] != "expert"
    assert f"--padded-capacity-pool {found['pool']}" in printed
    assert f"capacity_pool={found['pool']}" in found["sentence"]
    dropped = [answer["needed_factor"] for answer in found["pools"].values()]
    assert dropped == sorted(dropped, reverse=True)


def test_evaluation_from_a_trace_of_its_own(tune, tmp_path):
    save_trace(synthetic_trace("balanced", SIZES), tmp_path / "even.npy")
    _, printed, found = tune(f"--synthetic zipf {MADE} --no-plots --eval-traces even.npy")
    assert found["evaluation"]["overall"]["factor"] < found["training"]["overall"]["factor"]
    assert "--padded-eval-factor 1 is for no row dropped in 99 % of steps, without a pro" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (HUGE, "--max-gib must be at least 45.8, which this trace takes, got 4.0; lower --steps"),
        ("--synthetic zipf --tokens 100000000", "--max-gib must be at least 7,176.4, which this"),
        (
            "--synthetic zipf --run-dir /proc/x",
            "--run-dir must be a path in a writable folder, got",
        ),
        ("", "TRACE or --synthetic must be given, got none"),
        ("some.npy --synthetic zipf", "TRACE or --synthetic must be given, got both"),
        ("nowhere.npy", "TRACE must be a trace or a folder of traces, got 'nowhere.npy'"),
        ("broken.npy", "broken.npy: "),
        ("folder", "folder: the folder must hold traces (*.npy), got none"),
        (
            f"--synthetic zipf {MADE} --from-step 60",
            "--from-step must be at most the last, 59, got 60",
        ),
        ("--synthetic zipf --drop 2", "--drop must be a share from 0 to below 1, got 2.0"),
        (
            f"--synthetic zipf {MADE} --factors 0.5",
            "--factors must suffice in every step, got 'at most 0.5'; add ",
        ),
        (
            f"--synthetic zipf {MADE} --hidden-size 8",
            "--hidden-size and --ffn-size must be given together",
        ),
        (
            f"--synthetic zipf {MADE} --hidden-size 8 --ffn-size 8 --calibration none.json",
            "--calibration must be a file of `padded-dispatch calibrate`, got 'none.json'",
        ),
        ("--synthetic zipf --top-k 99", "--top-k must be at most num_experts=32, got 99"),
        ("--synthetic zipf --seed -1", "--seed must be 0 or more, got -1"),
        ("--synthetic zipf --tokens 0", "--tokens must be at least 1, got 0"),
        ("broken.npy --max-gib nan", "--max-gib must be a finite number, got nan"),
        (
            f"--synthetic zipf {MADE} --calibration broken.json",
            "--calibration must be a file of `padded-dispatch calibrate`, got 'broken.json' (not J",
        ),
        ("broken.jsonl --experts 4 --ranks 2", "broken.jsonl, line 1 must be one JSON object, got"),
        ("broken.jsonl", "--experts and --ranks must be given for Megatron's traces"),
        # Refused before any work: these traces would take minutes to make.
        (f"{HUGE} --factors 1 -1", "--factors must be finite numbers above 0, got (1.0, -1.0)"),
        (f"{HUGE} --hold-out 2", "--hold-out must be a share from 0 to below 1, got 2.0"),
        (f"{HUGE} --eval-drop -1", "--eval-drop must be a share from 0 to below 1, got -1.0"),
        (f"{HUGE} --confidence 0.2", "--confidence must be a share above 0.5 and below 1, got 0.2"),
        (f"{HUGE} --min-capacity 0", "--min-capacity must be at least 1, got 0"),
        (f"{HUGE} --etp 0", "--etp must be at least 1, got 0"),
        (f"{HUGE} --in-flight 0", "--in-flight must be at least 1, got 0"),
        (f"{HUGE} --layers-per-rank 0", "--layers-per-rank must be at least 1, got 0"),
        (f"{HUGE} --ranks 0", "--ranks must be at least 1, got 0"),
        (f"{HUGE} --run-dir broken.npy", "--run-dir must "),
        (f"{HUGE} --eval-traces nowhere.npy", "TRACE must be a trace"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, monkeypatch, tmp_path, flags, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONWARNINGS", "")
    (tmp_path / "broken.npy").write_bytes(b"\x93NUMPY nothing more")
    for name in ("broken.json", "broken.jsonl"):
        (tmp_path / name).write_text("nothing")
    (tmp_path / "folder").mkdir()
    assert cli.main(["tune", "--no-plots", *flags.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"padded-dispatch tune: {message}")


def test_a_typo_in_a_flag_is_named(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["tune", "--synthetic", "zipf", "--dorp", "0.1"])
    assert stopped.value.code == 2
    assert "unrecognized arguments: --dorp" in capsys.readouterr().err


@pytest.fixture
def without_matplotlib(monkeypatch):
    monkeypatch.setattr("padded_dispatch.tune.plots.find_spec", lambda name: None)


def test_without_matplotlib_the_report_has_no_figures(without_matplotlib, tune, tmp_path):
    """As after the first block of the README's Quick start."""
    _, printed, _ = tune(f"--synthetic zipf {MADE}")
    last = "The report has no figures; for them, run pip install 'matplotlib>=3.9,<4'."
    assert printed.splitlines()[-1] == last
    assert {path.name for path in (tmp_path / "tune").iterdir()} == {
        "report.html",
        "recommendation.json",
        "recommendation.yaml",
        "settings.md",
    }
    _, printed, _ = tune(f"--synthetic zipf {MADE} --no-plots")
    assert "figures" not in printed


def test_a_missing_matplotlib_is_named_after_the_arguments(without_matplotlib, tmp_path, tune):
    with pytest.raises(ValueError, match=r"^Matplotlib must be .* for --plots, got none; run pip"):
        tune(f"{HUGE} --plots")
    with pytest.raises(ValueError, match=r"--drop must be"):
        tune(f"{HUGE} --plots --drop 3")


def test_the_extra_has_the_matplotlib_that_the_remedy_names():
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    (package,) = extras["project"]["optional-dependencies"]["tune"]
    assert f"run pip install '{package}'" == REMEDY


def test_a_group_over_hosts_gets_a_table(tune, tmp_path):
    sizes = "--hidden-size 64 --ffn-size 48 --no-plots"
    made = "--steps 30 --layers 1 --ranks 4 --tokens 40 --experts 8 --top-k 2"
    _, printed, found = tune(f"--synthetic zipf {made} {sizes} --ranks-per-host 2")
    assert [one["num_ranks"] for one in found["hosts"]] == [2, 4, 8]
    assert re.search(r"^>  4 +2 .* two-level$", printed, re.M)
    assert "Fastest by this model: direct from EP 2, two-level from EP 4, " in printed
    page = (tmp_path / "tune" / "report.html").read_text()
    assert "<h2>Several hosts</h2>" in page
    ms = found["hosts"][1]["exchanges"]["alltoall"]["ms"]
    _, _, faster = tune(
        f"--synthetic zipf {made} {sizes} --ranks-per-host 2 --network-gb-per-s 100"
    )
    assert faster["hosts"][1]["exchanges"]["alltoall"]["ms"] == pytest.approx(ms / 2)
    assert found["options"][0]["packed_ms"] > faster["options"][0]["packed_ms"]
    _, printed, found = tune(f"--synthetic zipf {made} {sizes}")
    assert (found["hosts"], "over hosts" in printed) == ([], False)
    with pytest.raises(ValueError, match="--nvlink-gb-per-s must be above 0, got 0"):
        tune(f"--synthetic zipf {made} {sizes} --nvlink-gb-per-s 0")
