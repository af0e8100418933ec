"""Trainings whose products send rows home, in Megatron's schedules."""

import dataclasses
from typing import Any

import pytest

from tests.support.graph_training import Findings
from tests.support.overlapped_training import OverlapCase, OverlapTraining, schedule_on
from tests.support.retried_training import differing_names, world

CASE = OverlapCase(name="direct", experts="packed", exchange="direct", microbatches=4)
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def _fused_equals_serial(case: OverlapCase) -> Findings:
    """Compare two trainings; the facts are the barriers of a step of each."""
    shared = {"moe_shared_expert_intermediate_size": case.shared_ffn, **case.fields}
    case = dataclasses.replace(case, fields=shared)
    given: dict[str, Any] = {"experts": "packed", "exchange": "direct", "capacity_pool": case.pool}
    differing: dict[str, int] = {}
    with world(case), schedule_on(case) as order:
        assert order is not None
        trainings = [OverlapTraining(case, rows_home=home, **given) for home in ("auto", "after")]
        barriers = []
        for number in range(case.steps):
            results = []
            for training in trainings:
                before = len(order.barriers)
                results.append(training.step(number))
                barriers.append(len(order.barriers) - before)
            for name in differing_names(*results):
                differing[name] = differing.get(name, 0) + 1
    return Findings(
        differing=differing,
        facts={"barriers": barriers},
        broken=tuple(sorted(set(order.unordered))),
    )


@pytest.mark.parametrize(
    ("changes", "halves"),
    [
        ({"pp": 2, "vpp": 2, "ranks": 4, "num_layers": 4}, 2 * 2),
        ({"mtp": True, "recompute": True, "shared_ffn": 8}, 3 * 3),
        ({"pool": "receiver", "fields": FULL}, 2 * 3),
    ],
    ids=["virtual stages", "prediction of several tokens", "receiver, all recomputed"],
)
def test_no_slot_is_overwritten_before_its_sum_is_done(pool2, pool4, changes, halves):
    """A half is a push and a return, of a microbatch: two barriers, and one or two."""
    case = dataclasses.replace(CASE, **changes)
    found = (pool4 if case.ranks == 4 else pool2).run(_fused_equals_serial, case)
    assert [findings.failures() for findings in found] == [[]] * case.ranks
    halves *= case.microbatches
    barriers = [3 * halves, 4 * halves] * case.steps
    assert [findings.facts["barriers"] for findings in found] == [barriers] * case.ranks
