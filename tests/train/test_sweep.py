"""`sweep`: its runs, their independence of runs beside them, and its results file."""

import contextlib
import json
import os
from itertools import product
from unittest.mock import patch

import pytest

from padded_dispatch.megatron.options import PaddedOptions
from padded_dispatch.train import sweep as sweep_module
from padded_dispatch.train.runs import read_sweep
from padded_dispatch.train.sweep import finished, flags_of, line, main, planned, run_key
from padded_dispatch.utils.results import about, append_run
from tests.support.inline_pool import only_worker

SMALL = "--steps 2 --seq-length 24 --micro-batch 3 --log-every 1 --eval-passes 2 --workers 1"


@pytest.fixture(autouse=True)
def laptop(monkeypatch):
    """A machine without a GPU, outside torchrun."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def runs_of(factors, policies, seeds, flags, pools=("expert",)):
    words = ["--factors", *factors, "--policies", *policies, "--seeds", *seeds, "--pools", *pools]
    return planned(read_sweep([*words, "--out", "results.json", *flags])[1])


def rows_of(path):
    return [row for run in json.loads(path.read_text())["runs"] for row in run["rows"]]


def work_and_write(runs, path, about, ports) -> None:
    """Run a worker with its stdout in a file, since pytest does not capture it."""
    with (
        open(f"{path}.rank-{os.environ['RANK']}", "w") as stdout,
        contextlib.redirect_stdout(stdout),
    ):
        sweep_module._work(runs, path, about, ports)


def test_side_by_side_or_in_turn_a_run_is_the_same_and_none_is_made_twice(tmp_path, capsys):
    together, in_turn = tmp_path / "together.json", tmp_path / "in_turn.json"

    def sweep(path, flags: str) -> str:
        assert main(f"{flags} --seeds 0 {SMALL} --out {path}".split()) == 0
        return capsys.readouterr().out

    policies = ["probs", "priority+renormalize"]
    done = runs_of(["0.5", "none"], ["position"], ["0"], SMALL.split())
    before = about(num_gpus=0, command="", commit="a")
    append_run(together, before, [{"flags": flags_of(run)} for run in done])
    factors = "--factors 0.5 none"
    with patch.object(sweep_module, "_work", work_and_write):
        out = sweep(together, f"{factors} --policies {' '.join(policies)} position --jobs 2")
    assert out.startswith("6 runs, 2 of them done before\n")
    printed = "".join(path.read_text() for path in tmp_path.glob("together.json.rank-*"))
    assert "4/4 factor none, priority+renormalize, seed 0" in printed
    with only_worker():
        assert sweep(in_turn, factors).startswith("2 runs, 0 of them done before\n1/2 factor 0.5")
        assert sweep(in_turn, "--factors none") == "1 runs, 1 of them done before\n"

    rows = {(row["capacity_factor"], row["variant"]): row for row in rows_of(together)[2:]}
    assert set(rows) == set(product([0.5, None], policies))
    alone = rows_of(in_turn)
    assert [row["capacity_factor"] for row in alone] == [0.5, None]
    for row in alone:
        beside = rows[row["capacity_factor"], "probs"]
        for name in ("step", "loss", "dropped", "fill", "held_out"):
            assert row[name] == beside[name]
        assert row["ms"] > 0 and row["jobs"] == 1
        assert beside["ms"] is None and beside["jobs"] == 2
        assert row["step"] == [1, 2] and row["held_out"]["step"] == [2]
    # 72 tokens, 2 of 8 experts each: 9 of the 18 slots of perfect balance.
    assert all(drop >= 0.5 for drop in rows[0.5, "probs"]["dropped"])
    assert rows[None, "probs"]["dropped"] == [0, 0]
    # Policy and remedy matter only if rows are dropped.
    other = "priority+renormalize"
    assert rows[None, "probs"]["loss"] == rows[None, other]["loss"]
    assert rows[0.5, "probs"]["loss"][1] != rows[0.5, other]["loss"][1]


class Joined(Exception):  # noqa: N818
    """A worker would now join its job."""


@pytest.mark.parametrize(
    ("number", "joined"),
    [("0", "0 of 2 at 70"), ("1", "1 of 2 at 70"), ("2", "0 of 2 at 71"), ("3", "1 of 2 at 71")],
)
def test_workers_side_by_side_are_dealt_to_jobs(monkeypatch, tmp_path, number, joined):
    def join(device_type):
        raise Joined("{RANK} of {WORLD_SIZE} at {MASTER_PORT}".format_map(os.environ))

    monkeypatch.setattr(sweep_module, "world", join)
    runs = runs_of(["1", "2"], ["probs"], ["0"], ["--workers", "2"])
    launched = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": "4", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Joined, match=f"^{joined}$"):
        sweep_module._work(runs, tmp_path, {}, [70, 71])


def test_a_policy_may_bring_a_remedy():
    plain, with_remedy = runs_of(["1"], ["random", "position+reroute"], ["0"], [])
    assert (plain.dispatch.padded.policy, plain.dispatch.padded.remedy) == ("random", "none")
    padded = with_remedy.dispatch.padded
    assert (padded.policy, padded.remedy) == ("position", "reroute")


def test_pools_are_compared_with_one_seed_and_policy():
    runs = runs_of(["1", "2"], ["probs"], ["0"], ["--workers", "2"], ["expert", "rank"])
    named = [(run.dispatch.padded.capacity_pool, run.dispatch.capacity_factor) for run in runs]
    assert named == [("expert", 1.0), ("expert", 2.0), ("rank", 1.0), ("rank", 2.0)]


def test_megatrons_own_dispatchers_have_its_policies():
    flags = ["--dispatcher", "alltoall-drop-pad"]
    runs = runs_of(["1"], ["probs", "position"], ["0"], flags)
    found = [(run.dispatch.drop_policy, run.dispatch.padded) for run in runs]
    assert found == [("probs", PaddedOptions()), ("position", PaddedOptions())]
    (ours,) = runs_of(["1"], ["position"], ["0"], ["--dispatcher", "padded_alltoall"])
    assert (ours.dispatch.drop_policy, ours.dispatch.padded.policy) == ("probs", "position")


def test_a_file_without_runs_is_found_first(tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{"a": 1}')
    with pytest.raises(ValueError, match=rf"^--out\b.*{path}"):
        main(["--out", str(path)])


def test_seeds_are_outermost_and_runs_evaluate_at_their_end():
    runs = runs_of(["0.5", "none"], ["probs"], ["0", "7"], ["--steps", "9"])
    named = [(run.recipe.seed, run.dispatch.capacity_factor) for run in runs]
    assert named == [(0, 0.5), (0, None), (7, 0.5), (7, None)]
    assert {run.output.eval_every for run in runs} == {9}
    (often,) = runs_of(["1"], ["probs"], ["0"], ["--steps", "9", "--eval-every", "4"])
    assert often.output.eval_every == 4


def test_only_runs_of_the_same_machine_versions_and_flags_are_done(tmp_path):
    path = tmp_path / "r.json"
    here = {"machine": "this", "versions": {"torch": "2"}, "date": "today", "commit": "b"}
    assert finished(path, here) == set()
    before, other = here | {"date": "before", "commit": "a"}, here | {"machine": "other"}
    one, two = runs_of(["1", "2"], ["probs"], ["0"], [])
    runs = [
        {"about": before, "rows": [{"flags": flags_of(one)}]},
        {"about": other, "rows": [{"flags": flags_of(two)}]},
    ]
    path.write_text(json.dumps({"runs": runs}))
    assert finished(path, here) == {run_key(flags_of(one))}
    longer = runs_of(["1"], ["probs"], ["0"], ["--steps", "401"])[0]
    assert run_key(flags_of(longer)) not in finished(path, here)


def test_a_row_as_text():
    row = {
        "capacity_factor": 1.25,
        "variant": "probs",
        "pool": "expert",
        "seed": 3,
        "loss": [5.0, 2.0],
        "held_out": {"step": [2], "loss": [2.5]},
        "dropped": [0.2, 0.123],
        "seconds": 11.4,
    }
    assert line(row) == (
        "factor 1.25, probs, seed 3: loss 2.0000, held-out 2.5000, dropped 12%, 11 s"
    )
    row |= {"capacity_factor": None, "dropped": [None, None]}
    assert line(row) == "factor none, probs, seed 3: loss 2.0000, held-out 2.5000, 11 s"
    row |= {"pool": "rank"}
    assert line(row).startswith("factor none, probs, pool rank, seed 3: loss 2.0000")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--jobs 0", "^--jobs must be at least 1, got 0$"),
        ("--factors 1 0", r"^--capacity-factor must be a number above 0, .* got 0\.0$"),
        ("--seed 7", "^--seed must be left out of sweep, got 7; give --seeds$"),
        ("--capacity-f none", "^--capacity-factor must be left out of sweep, got None; give --fac"),
        ("--drop-policy position", "^--drop-policy must .*, got 'position'; give --policies$"),
        ("--padded-policy random", "^--padded-policy must .*, got 'random'; give --policies$"),
        ("--padded-remedy none", "^--padded-remedy must .*, got 'none'; give --policies$"),
        (
            "--padded-capacity-pool rank",
            "^--padded-capacity-pool must be left out of sweep, got 'rank'; give --pools$",
        ),
        (
            "--factors 1 --policies probs+reroute --dispatcher alltoall-drop-pad",
            "^--padded-remedy must be left out with --dispatcher alltoall-drop-pad, got 'reroute'",
        ),
        ("--run-dir somewhere", r"^--run-dir must be left out of sweep, .* got .somewhere.; "),
        ("--trace somewhere", r"^--trace must be left out of sweep, .* got .somewhere.; "),
    ],
)
def test_mistakes_are_found_before_there_are_workers(tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        main(["--out", str(tmp_path / "r.json"), *flags.split()])
