"""A run's trace, replayed at the run's factor, equals the counts of the run."""

import pytest
import torch

from padded_dispatch.megatron import uninstall
from padded_dispatch.megatron.cpu import megatron_on_cpu
from padded_dispatch.train.arguments import parse
from padded_dispatch.train.check import check
from padded_dispatch.tune.trace import load_traces
from tests.support.traced_run import Counted, assert_trace_says_the_same, counted_run

SMALL = "--seq-length 24 --micro-batch 3 --log-every 2 --lr-warmup 2 --steps 6"


def _run_on_a_cpu(flags: str) -> Counted:
    with megatron_on_cpu():
        return counted_run(f"{SMALL} {flags}", torch.device("cpu"))


def run(pool, flags: str) -> Counted:
    counted: Counted = {}
    for of_rank in pool.run(_run_on_a_cpu, flags):
        counted |= of_rank
    return counted


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        ("--trace-every 1", "probs"),
        ("--trace-every 2 --eval-every 1 --global-batch 18 --drop-policy position", "position"),
        ("--trace-every 3 --pp 2 --num-layers 4", "probs"),
        ("--trace-every 2 --etp 2 --balancing expert-bias", "probs"),
        ("--trace-every 2 --ep 1", "probs"),
        ("--trace-every 2 --padded-policy priority --padded-remedy renormalize", "priority"),
    ],
)
def test_the_what_if_is_what_the_run_counted(pool2, tmp_path, flags, policy):
    counted = run(pool2, f"--capacity-factor 0.5 --trace {tmp_path} {flags}")
    assert_trace_says_the_same(tmp_path, counted, factor=0.5, policy=policy)


def test_a_recording_names_its_sources(pool2, tmp_path):
    run(pool2, f"--trace {tmp_path / 'two'} --trace-every 2")
    trace = load_traces([tmp_path / "two"])
    assert (trace.num_experts, trace.top_k, trace.num_ranks, trace.num_tokens) == (8, 2, 2, 72)
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [
        "rank-00000-step-00000000.npy",
        "rank-00001-step-00000000.npy",
    ]
    assert sorted(set(trace.steps.tolist())) == [2, 4, 6]
    run(pool2, f"--trace {tmp_path / 'one'} --trace-every 6 --ep 1")
    trace = load_traces([tmp_path / "one"])
    assert trace.num_ranks == 1 and sorted(set(trace.ranks.tolist())) == [0, 1]


def test_a_resumed_run_goes_on_in_files_of_its_own(pool2, tmp_path):
    flags = (
        f"--trace {tmp_path / 'trace'} --trace-every 2 --run-dir {tmp_path / 'run'} --save-every 3"
    )
    run(pool2, f"{flags} --steps 3 --lr-decay 6")
    undone = tmp_path / "trace" / "rank-00001-step-00000005.npy"
    undone.touch()  # An earlier run continued from a later checkpoint, which is gone.
    counted = run(pool2, f"{flags} --resume --lr-decay 6 --capacity-factor 1.25")
    trace = load_traces([tmp_path / "trace"])
    assert sorted(set(trace.steps.tolist())) == [2, 4, 6]
    assert not undone.exists()
    assert sorted({step for step, _, _ in counted}) == [4, 5, 6]


def test_mistakes_are_named(tmp_path):
    (tmp_path / "rank-00000-step-00000000.npy").touch()
    with pytest.raises(ValueError, match=rf"^--trace must hold no earlier trace, got '{tmp_path}'"):
        parse(f"--trace {tmp_path}".split())
    with pytest.raises(
        ValueError, match=r"^--dispatcher must be padded_alltoall with --trace, got 'all"
    ):
        parse(f"--trace {tmp_path} --dispatcher allgather".split())
    with pytest.raises(ValueError, match=r"^--trace-every must be at most steps=9, .*, got 10$"):
        parse(f"--trace {tmp_path / 'new'} --steps 9".split())


def test_a_limit_below_one_step_is_found_before_the_run(tmp_path):
    with pytest.raises(ValueError, match=r"^--trace-gib must be at least \S+, got 1e-06$"):
        check(parse(f"--trace {tmp_path} --trace-gib 1e-6".split()))
    uninstall()
