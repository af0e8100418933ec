"""Whole training runs on two ranks: learning, resuming bit by bit, capacity control."""

import contextlib
import dataclasses
import io
import json
import math
import shutil

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
from torch.distributed import distributed_c10d

from padded_dispatch.megatron import uninstall
from padded_dispatch.megatron.cpu import megatron_on_cpu
from padded_dispatch.train.arguments import parse
from padded_dispatch.train.checkpoint import check_resumable, newest
from padded_dispatch.train.loop import Outcome, train
from padded_dispatch.train.model import transformer_config
from padded_dispatch.train.settings import Settings
from tests.support.parity import end_gloo_groups

SMALL = "--seq-length 24 --micro-batch 3 --log-every 1 --lr-warmup 2"


def _settings(flags: str, shared_overlap: bool | None) -> Settings:
    """Return settings, with shared experts unless `shared_overlap` is None."""
    settings = parse(f"{SMALL} --device cpu --workers 2 {flags}".split())
    if shared_overlap is None:
        return settings
    return dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, shared_ffn_size=32),
        dispatch=dataclasses.replace(settings.dispatch, shared_overlap=shared_overlap),
    )


def _train(flags: str, shared_overlap: bool | None = None) -> Outcome:
    settings = _settings(flags, shared_overlap)
    with megatron_on_cpu(), contextlib.redirect_stdout(io.StringIO()):
        outcome = train(settings, torch.device("cpu"))
    uninstall()
    return outcome


def run(pool, flags: str) -> Outcome:
    first, second = pool.run(_train, flags)
    assert [row.loss for row in first.rows] == [row.loss for row in second.rows]
    return first


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--capacity-factor none --balancing expert-bias",
        "--dispatcher allgather",
        "--dispatcher alltoall-drop-pad",
        "--pp 2 --global-batch 6",
        "--pp 2 --vpp 2 --num-layers 4",
        "--etp 2",
        "--ep 1",
        "--padded-capacity-pool rank --pp 2 --vpp 2 --num-layers 4",
        "--padded-capacity-pool receiver",
        "--padded-schedule 0:fit",
    ],
)
def test_the_loss_falls(pool2, flags):
    outcome = run(pool2, f"--steps 8 {flags}")
    assert outcome.first_loss == pytest.approx(math.log(256), rel=0.05)
    assert outcome.fell
    assert outcome.sentence() == (
        f"loss fell from {outcome.first_loss:.2f} to {outcome.rows[-1].loss:.2f}"
    )


def test_shared_experts_beside_the_exchange_train_alike(pool2):
    """The order of gradient sums differs; tests of the Megatron layer compare the gradients."""
    without, behind, beside = (
        pool2.run(_train, "--steps 3", overlap)[0] for overlap in (None, False, True)
    )
    assert behind.first_loss == beside.first_loss != without.first_loss
    assert beside.fell
    for given in (False, True):
        config = transformer_config(_settings("--steps 3", given))
        assert config.moe_shared_expert_overlap == given
    uninstall()


def test_forced_balance_fills_all_slots_alike(pool2):
    flags = "--steps 1 --capacity-factor 2 --seq-length 256 --micro-batch 2"
    learned = run(pool2, flags).rows[0]
    forced = run(pool2, f"{flags} --balancing forced").rows[0]
    assert learned.dropped is not None and learned.dropped > 0
    assert forced.dropped == 0 and forced.fill == 1 / 2


def test_no_factor_drops_nothing_and_a_small_one_much(pool2):
    everything = run(pool2, "--steps 1 --capacity-factor none").rows[0]
    # 72 tokens, 2 of 8 experts each, 72 slots for each expert.
    assert everything.dropped == 0 and everything.fill == 2 / 8 and everything.unplaced == 0
    little = run(pool2, "--steps 1 --capacity-factor 0.25").rows[0]
    # ceil(72 * 2 / 8 * 0.25) = 5 slots, so at most 40 of 144 rows.
    assert little.fill is not None and little.dropped is not None
    assert little.dropped == pytest.approx(1 - little.fill * 40 / 144)
    assert little.dropped >= 1 - 40 / 144


def test_a_run_that_does_not_learn_reports_it(pool2):
    learned = run(pool2, "--steps 2")
    last = dataclasses.replace(learned.rows[-1], loss=6.5)
    outcome = Outcome(first_loss=5.5, rows=(learned.rows[0], last), evaluations=())
    assert outcome.fell is False
    assert outcome.sentence() == "loss did not fall: it went from 5.50 to 6.50"
    # After one step only, there is nothing to compare.
    outcome = Outcome(first_loss=5.5, rows=learned.rows[:1], evaluations=())
    assert outcome.fell is None and outcome.sentence() == "loss 5.50 in the only step"


@pytest.mark.parametrize("flags", ["--balancing expert-bias --global-batch 12", "--pp 2"])
def test_a_resumed_run_repeats_the_next_five_losses_bit_by_bit(pool2, tmp_path, flags):
    out = tmp_path / "run"
    flags = f"--steps 8 --save-every 3 --eval-every 4 --run-dir {out} {flags}"
    whole = run(pool2, flags)
    metrics = (out / "metrics.jsonl").read_text()
    assert [path.name[-1] for path in sorted((out / "checkpoints").iterdir())] == ["3", "6", "8"]
    for step in (6, 8):
        shutil.rmtree(out / "checkpoints" / f"step-{step:08d}")
    (out / "checkpoints" / "unfinished").mkdir()  # An interrupted run leaves it.

    resumed = run(pool2, f"{flags} --resume")
    assert [row.step for row in resumed.rows] == [4, 5, 6, 7, 8]
    assert [row.loss for row in resumed.rows] == [row.loss for row in whole.rows[3:]]
    assert [evaluation.step for evaluation in whole.evaluations] == [4, 8]
    assert resumed.evaluations == whole.evaluations
    assert [row.dropped for row in resumed.rows] == [row.dropped for row in whole.rows[3:]]
    assert resumed.first_loss == whole.first_loss

    def figures(text):
        rows = [json.loads(line) for line in text.splitlines()]
        return [(row["kind"], row["step"], row["loss"]) for row in rows if "loss" in row]

    kept = [e for e in figures(metrics) if e[0] == "held-out"]
    assert kept == [("held-out", e.step, e.loss) for e in whole.evaluations]

    assert figures((out / "metrics.jsonl").read_text()) == figures(metrics)
    assert newest(out).name == "step-00000008"
    assert not (out / "checkpoints" / "unfinished").exists()

    with pytest.raises(ValueError, match=r"^--steps must exceed the 8 steps .* done, got 8"):
        check_resumable(parse(f"{SMALL} {flags} --resume".split()))
    with pytest.raises(
        ValueError, match=r"^--resume .*'lr=1.0 \(was 0.005\), seed=9 \(was 1234\)'; "
    ):
        check_resumable(parse(f"{SMALL} {flags} --resume --seed 9 --lr 1".split()))


def test_there_must_be_a_checkpoint_to_resume(tmp_path):
    with pytest.raises(ValueError, match=r"^--run-dir must hold a checkpoint, got .*; leave"):
        check_resumable(parse(f"--resume --run-dir {tmp_path}".split()))


def test_results_are_kept(pool2, tmp_path):
    path = tmp_path / "results.json"
    outcome = run(pool2, f"--steps 3 --out {path} --commit abc-dirty")
    (kept,) = json.loads(path.read_text())["runs"]
    assert kept["about"]["commit"] == "abc-dirty"
    (row,) = kept["rows"]
    assert (row["model"], row["contender"], row["graph"]) == ("tiny", "ours", "none")
    assert (row["ep"], row["tokens"], row["capacity_factor"]) == (2, 72, 1.25)
    assert row["loss"] == [r.loss for r in outcome.rows]
    assert row["flags"]["recipe"]["seq_length"] == 24


def _error(flags: str) -> str:
    """Return the error that ends a run, and leave this worker as it was before."""
    groups = set(distributed_c10d._world.pg_map)
    try:
        _train(flags)
    except RuntimeError as error:
        unset_num_microbatches_calculator()
        parallel_state.destroy_model_parallel()
        end_gloo_groups(groups)
        uninstall()
        return str(error)
    return "none"


def kept_rows(out, kind: str) -> list[dict]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def test_what_is_dropped_is_kept_in_rows_by_layer(pool2, tmp_path):
    flags = f"--steps 5 --capacity-factor 0.25 --padded-telemetry-every 2 --run-dir {tmp_path} "
    outcome = run(pool2, flags + "--eval-every 5 --padded-eval-factor no-drop")
    rows = kept_rows(tmp_path, "moe")
    assert [(row["step"], row["steps"]) for row in rows] == [(2, 2), (4, 2), (5, 1)]
    dropped = [row.dropped for row in outcome.rows]
    assert rows[0]["dropped"] == pytest.approx((dropped[0] + dropped[1]) / 2)
    assert rows[2]["dropped"] == pytest.approx(dropped[4])
    assert rows[0]["layers"]["layer"] == [1, 2]
    assert rows[0]["needed_factor"] == max(rows[0]["layers"]["needed_factor"]) > 1
    [evaluated] = kept_rows(tmp_path, "moe-held-out")
    assert evaluated["dropped"] == 0.0 and evaluated["fill"] == 2 / 8


def test_a_schedule_changes_all_layers_but_those_with_their_own_factor(pool2, tmp_path):
    flags = (
        f"--steps 4 --run-dir {tmp_path} --padded-telemetry-every 1 --padded-layer-factors 2:0.5 "
        "--padded-schedule 0:no-drop,2:0.25"
    )
    run(pool2, flags)
    fills = [row["layers"]["fill"] for row in kept_rows(tmp_path, "moe")]
    dropped = [row["layers"]["dropped"] for row in kept_rows(tmp_path, "moe")]
    assert [fill[0] == 2 / 8 for fill in fills] == [True, True, False, False]
    assert [share[0] == 0 for share in dropped] == [True, True, False, False]
    assert all(share[1] > 0 for share in dropped)


GROW = (
    "--capacity-factor 0.25 --padded-on-overflow grow --padded-telemetry-every 1 "
    "--padded-grow-after 2 --padded-grow-factors 0.5,no-drop"
)


def test_capacity_grows_until_nothing_is_dropped(pool2, tmp_path):
    """A read is used one step later: factor 0.5 holds from step 4 on, C = T from step 7 on."""
    run(pool2, f"--steps 8 --run-dir {tmp_path} {GROW}")
    rows = kept_rows(tmp_path, "moe")
    assert all(row["dropped"] > 0 for row in rows[:6])
    assert [row["fill"] for row in rows[6:]] == [2 / 8] * 2
    assert [row["dropped"] for row in rows[6:]] == [0.0, 0.0]


def test_a_resumed_run_grows_as_the_whole_one(pool2, tmp_path):
    """At the checkpoint, one layer's factor has grown, and one of two reads for more is done."""
    flags = f"--steps 8 --save-every 4 --eval-every 4 --run-dir {tmp_path} {GROW}"
    whole, kinds = run(pool2, flags), ("moe", "moe-held-out", "held-out")
    lines = [kept_rows(tmp_path, kind) for kind in kinds]
    about = json.loads((tmp_path / "checkpoints/step-00000004/run.json").read_text())
    assert about["factors"] == {"1": "0.5", "2": "0.5"}
    assert about["reads_above"] == {"1": 1, "2": 1}
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000008")
    resumed = run(pool2, f"{flags} --resume")
    assert [(row.loss, row.fill) for row in resumed.rows] == [
        (row.loss, row.fill) for row in whole.rows[4:]
    ]
    assert resumed.rows[-1].fill == 2 / 8
    assert [kept_rows(tmp_path, kind) for kind in kinds] == lines


def test_an_overflow_that_is_an_error_ends_all_ranks_alike(pool2):
    flags = "--steps 3 --capacity-factor 0.25 --padded-on-overflow error"
    first, second = pool2.run(_error, f"{flags} --padded-telemetry-every 1")
    assert first == second
    assert first.startswith("on_overflow='error': layer 1 dropped ")
    assert "in steps 1 to 1 and needed factor" in first and "layer 2 dropped" in first
