"""The cases of `tests.gpu.situations` as tests: all on GPUs, a few in small sizes on a CPU.

The rows and the results file of that program are tested here too.
"""

import dataclasses
import json
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from padded_dispatch.megatron import telemetry
from tests.gpu import situations as graph_situations
from tests.gpu.situations import checks, on_cpu
from tests.support import gpu_cases, gpu_rows
from tests.support.gpu_cases import ENVIRONMENT, run_case
from tests.support.graph_protocol import GraphedLayer
from tests.support.graph_routings import (
    RoutingCase,
    draws_repeat_with_the_seed,
    routings_equal_eager,
)
from tests.support.graph_telemetry import telemetry_is_a_hosts_count
from tests.support.graph_training import Findings, Situation, replays_equal_eager
from tests.support.inline_pool import InlinePool
from tests.support.pool import WorkerPool

CASES = {case.name: (check, run, case) for check, run, case in checks(num_ranks=8)}
ON_ONE, ON_TWO, ON_FOUR = (
    [name for name, (_, _, case) in CASES.items() if case.ranks == ranks] for ranks in (1, 2, 4)
)


def small(name: str) -> Any:
    return on_cpu(CASES[name][2])


@pytest.mark.parametrize(
    "name",
    [
        "EP2: a rank without tokens in some steps, attn+moe",
        "PP2/VPP2",
        "dense and MoE layers",
        "masks, PP2",
        "masks, CP2/EP2, moe",
        "packed sequences, EP2, moe_router+moe_preprocess, with masks",
    ],
)
def test_replay_equals_eager_on_cpus(pool2, name):
    found = pool2.run(replays_equal_eager, small(name))
    assert [findings.failures() for findings in found] == [[], []]
    # A layer's forward and backward count as one. A pipeline has one per layer and microbatch.
    layers = {"PP2/VPP2": 2 * 4, "masks, PP2": 2 * 4, "dense and MoE layers": 3}.get(name, 2)
    assert [findings.facts["graphs"] for findings in found] == [layers, layers]


def test_routings_equal_eager_runs_on_cpus(pool2):
    found = pool2.run(routings_equal_eager, small("1,000 routings, EP2"))
    assert [findings.failures() for findings in found] == [[], []]
    assert found[0].facts["different_demands"] == 8


def test_telemetry_of_replays_is_a_hosts_count_on_cpus(pool2):
    found = pool2.run(telemetry_is_a_hosts_count, small("telemetry of 100 replays, EP2"))
    assert [findings.failures() for findings in found] == [[], []]
    assert found[0].facts["passes"] == 2 * 8


def _counting_one_rank(case: RoutingCase) -> Findings:
    with patch.object(telemetry, "_routes_its_own_tokens", lambda config: dist.get_rank() == 0):
        return telemetry_is_a_hosts_count(case)


def test_telemetry_that_leaves_out_a_rank_is_found(pool2):
    case = small("telemetry of 100 replays, EP2")
    first, second = pool2.run(_counting_one_rank, case)
    assert first.broken == second.broken
    assert "passes is 8, and the host counted 16" in first.broken


def test_draws_repeat_with_the_seed_on_cpus(pool2):
    found = pool2.run(draws_repeat_with_the_seed, small("draws of replays, EP2"))
    assert [findings.failures() for findings in found] == [[], []]


def test_draws_that_do_not_change_are_found(pool2):
    case = dataclasses.replace(small("draws of replays, EP2"), policy="probs")
    first, _ = pool2.run(draws_repeat_with_the_seed, case)
    assert "replay 0 is the same with another seed" in first.broken
    assert "replay 1 draws what an earlier one drew" in first.broken


def _with_a_stale_replay(case: Situation) -> Findings:
    """Run the case with a stale backward: each graph's third replay repeats its second."""
    replays: dict[GraphedLayer, int] = {}
    original = GraphedLayer.replay_backward

    def replay(graphed, grads):
        replays[graphed] = replays.get(graphed, 0) + 1
        if replays[graphed] == 3:
            return tuple(None if g is None else g.detach() for g in graphed._grad_inputs)
        return original(graphed, grads)

    with patch.object(GraphedLayer, "replay_backward", replay):
        return replays_equal_eager(case)


def test_a_replay_that_is_not_eager_is_found(pool2):
    first, _ = pool2.run(_with_a_stale_replay, small("EP2: DDP"))
    assert any("differs from eager" in failure for failure in first.failures())
    assert first.unreproducible == {}


def test_every_situation_has_its_own_name():
    assert len(CASES) == len(checks(num_ranks=8))


def _stub(case: Situation) -> Findings:
    """Right for one microbatch, wrong for two; any other raises."""
    differing = {1: {}, 2: {"the loss": 3}}[case.microbatches]
    return Findings(differing=differing, facts={"graphs": 2})


def test_a_row_says_what_happened(pool2):
    # After an error the pool would be closed, and the next test would start another.
    pools = (pool2, pool2, InlinePool(1, backend="gloo"))
    right, wrong, broken = (
        run_case(pool, "a check", _stub, Situation(name="stub", microbatches=number))
        for number, pool in enumerate(pools, 1)
    )
    assert (right["check"], right["passed"], right["failures"]) == ("a check", True, [])
    assert (right["name"], right["facts"]) == ("stub", {"graphs": 2})
    assert not wrong["passed"]
    assert wrong["failures"] == [
        f"rank {rank}: the loss differs from eager in 3 steps" for rank in range(2)
    ]
    assert not broken["passed"]
    assert "KeyError" in broken["failures"][0]
    assert right.keys() == wrong.keys() == broken.keys()
    json.dumps([right, wrong, broken])


def test_the_file_is_written_case_by_case_and_a_failure_does_not_end_it(tmp_path, monkeypatch):
    out = tmp_path / "results" / "situations.json"
    counts = []

    def count_rows(text: str) -> None:
        counts.append(len(json.loads(out.read_text())["runs"][0]["rows"]))

    cases = [("a check", _stub, Situation(name=f"{n}", microbatches=n)) for n in (3, 1)]
    monkeypatch.setattr(gpu_cases, "WorkerPool", InlinePool)
    monkeypatch.setattr(graph_situations, "checks", lambda num_ranks: cases)
    monkeypatch.setattr(gpu_rows, "print_line", count_rows)
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")  # put back what main() sets
    argv = ["graph_situations.py", "--out", str(out), "--commit", "abc", "--cpu", "1"]
    monkeypatch.setattr("sys.argv", argv)
    assert graph_situations.main() == 1
    assert counts[0] == 1
    (run,) = json.loads(out.read_text())["runs"]
    assert [row["passed"] for row in run["rows"]] == [False, True]
    assert run["about"]["commit"] == "abc"


def failures(pools: dict[int, WorkerPool], name: str) -> list[str]:
    check, run, case = CASES[name]
    return run_case(pools[case.ranks], check, run, case)["failures"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_ONE)
def test_on_one_gpu(gpu_pools, name):
    assert failures(gpu_pools, name) == []


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", ON_TWO)
def test_on_two_gpus(gpu_pools, name):
    assert failures(gpu_pools, name) == []


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 GPUs")
@pytest.mark.parametrize("name", ON_FOUR)
def test_on_four_gpus(gpu_pools, name):
    assert failures(gpu_pools, name) == []
