"""Megatron's combined schedule computes what its plain one does, bit by bit.

The schedule runs the forward pass of a microbatch beside the backward pass of another, calls the
dispatcher's methods one by one, and frees what went into them.
"""

import dataclasses
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core import package_info
from torch import Tensor

from padded_dispatch.config import FIT
from padded_dispatch.megatron import PaddedOptions, dispatcher, megatron_on_cpu, padded_spec
from padded_dispatch.ops.plan import DispatchPlan
from tests.support import tiny
from tests.support.overlapped_training import OverlapCase, overlapped_equals_plain
from tests.support.stream_order import StreamOrder

CASES = [
    OverlapCase(name="module"),
    OverlapCase(name="packed", experts="packed", protects=True, factor=0.5),
    OverlapCase(name="batched", experts="batched", expert_bias=True, policy="random"),
    # The rows of one local expert are in order as they arrive.
    OverlapCase(name="one local expert", num_experts=2),
    OverlapCase(name="one local expert, batched", num_experts=2, experts="batched"),
    OverlapCase(name="shared experts", shared_ffn=8, experts="packed"),
    OverlapCase(name="delayed", delay_wgrad=True, experts="packed", overlap_grad_reduce=True),
    OverlapCase(name="delayed, batched", delay_wgrad=True, experts="batched"),
]
if (package_info.MAJOR, package_info.MINOR) >= (0, 18):  # The setting is new there.
    CASES += [
        OverlapCase(name=f"beside dispatch, {experts}", dispatch_backward=True, experts=experts)
        for experts in ("module", "packed", "batched")
    ]
DIRECT = OverlapCase(name="direct", experts="packed", exchange="direct")
FITS: dict[str, Any] = {"layer_factors": {1: FIT, 2: FIT}}


@pytest.mark.ahead
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bits_are_those_of_the_plain_schedule(pool2, case):
    found = pool2.run(overlapped_equals_plain, case)
    assert [findings.failures() for findings in found] == [[], []]


@pytest.mark.ahead
@pytest.mark.parametrize(
    "scopes", [("attn", "moe_router"), ("attn", "moe_router", "moe_preprocess")], ids=str
)
def test_bits_are_those_of_the_plain_schedule_with_graphs_of(pool2, scopes):
    case = OverlapCase(name="graphs", scopes=scopes, steps=4)
    found = pool2.run(overlapped_equals_plain, case)
    assert [findings.failures() for findings in found] == [[], []]
    # The combined schedule has two microbatches in flight, so each has graphs of its own.
    assert found[0].facts["graphs"] == case.num_layers * case.microbatches


@pytest.mark.parametrize(
    "changes",
    [
        {"delay_wgrad": True, "shared_ffn": 8, "factor": 0.5},
        {"scopes": ("attn", "moe_router", "moe_preprocess"), "steps": 3},
    ],
    ids=["delayed", "graphs"],
)
def test_direct_stores_are_on_one_stream_and_have_the_bits_of_the_plain_schedule(pool2, changes):
    case = dataclasses.replace(DIRECT, **changes)
    found = pool2.run(overlapped_equals_plain, case)
    assert [findings.failures() for findings in found] == [[], []]
    # Two for a push and two for a return, forward and backward. A return inside of a product, as in
    # the plain schedule, has one.
    barriers = 8 * case.num_layers * case.microbatches * case.steps
    assert [findings.facts["barriers"] for findings in found] == [barriers, barriers]
    if not case.scopes:  # Else the self-test has more of them.
        elsewhere = [findings.facts["barriers_elsewhere"] for findings in found]
        assert elsewhere == [barriers * 6 // 8] * 2


@pytest.mark.parametrize("waits", [True, False])
def test_the_check_of_the_order_sees_what_does_not_wait(waits):
    with megatron_on_cpu():
        order, second = StreamOrder(), torch.cuda.Stream()
        watched = torch.zeros(3)
        order.watch(address := watched.data_ptr())
        with order.followed():
            event = torch.cuda.Event()
            for _ in range(2):
                event.record()
                with torch.cuda.stream(second):
                    if waits:
                        event.wait()
                    order.barrier()
                    order.write(address)
                    order.barrier()
                    event.record()
                if waits:
                    event.wait()
                watched + 1
    assert order.barriers == [second] * 4
    early, late = (
        "is read before peers have written it",
        "is overwritten before its last use is done",
    )
    assert order.unordered == ([] if waits else [f"memory {text}" for text in (early, late, early)])


def _with_options(case: OverlapCase, options: dict[str, Any]) -> Any:
    return overlapped_equals_plain(case, **options)


@pytest.mark.ahead
@pytest.mark.parametrize(
    "options",
    [
        {"capacity_pool": "rank"},
        {"fit_max_factor": 0.5, **FITS},  # Rounds, which hand tokens on as they are.
        {"on_overflow": "retry"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_bits_are_those_of_the_plain_schedule_with(pool2, options):
    case = OverlapCase(name="half a slot for each row", factor=0.5, experts="packed")
    found = pool2.run(_with_options, case, options)
    assert [findings.failures() for findings in found] == [[], []]


def layer(*, overlaps: bool = True, stages: int = 1, **options: Any) -> Any:
    """Build a layer alone, whose config Megatron's checks would want more ranks for."""
    config = tiny.config()
    config.pipeline_model_parallel_size = stages
    config.overlap_moe_expert_parallel_comm = overlaps
    config.padded_dispatch = PaddedOptions(**options)
    return tiny.layer(config, padded_spec(tiny.layer_spec()))


def share(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("options", [{}, {"fit_max_factor": 0.5, **FITS}], ids=["once", "rounds"])
def test_no_result_shares_the_memory_that_the_schedule_frees(options):
    """On one rank, the exchange hands on rows as they are, and so do the steps around rounds."""
    moe, hidden = layer(**options), torch.randn(9, 2, tiny.HIDDEN)
    given = [hidden, *reversed(moe.route(hidden))]
    rows, meta = moe.token_dispatcher.dispatch_preprocess(*given)
    assert not share(rows, hidden) and not share(meta, given[2])
    sent, probs = moe.token_dispatcher.token_dispatch(rows, meta)
    assert not share(sent, rows) and not share(probs, meta)
    rows_ND, *more = moe.token_dispatcher.dispatch_postprocess(sent, probs)
    assert not share(rows_ND, sent)
    out = moe.token_dispatcher.combine_preprocess(moe.experts(rows_ND, *more)[0])
    combined = moe.token_dispatcher.token_combine(out)
    assert not share(moe.token_dispatcher.combine_postprocess(combined), out)


@pytest.mark.usefixtures("one_process")
def test_without_the_schedule_nothing_is_copied():
    moe, hidden = layer(overlaps=False), torch.randn(9, 2, tiny.HIDDEN)
    probs, kept = moe.route(hidden)
    rows, meta = moe.token_dispatcher.dispatch_preprocess(hidden, kept, probs)
    assert share(moe.token_dispatcher.token_dispatch(rows, meta)[0], rows)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("overlaps", [True, False])
def test_the_allocator_keeps_the_plan_for_the_second_stream(overlaps):
    recorded: list[int] = []
    plans: list[DispatchPlan] = []

    def plan(**tensors: Any) -> DispatchPlan:
        plans.append(DispatchPlan(**tensors))
        return plans[-1]

    moe = layer(overlaps=overlaps)
    with (
        patch.object(dispatcher, "DispatchPlan", plan),
        patch.object(
            torch.Tensor, "record_stream", lambda tensor, _: recorded.append(tensor.data_ptr())
        ),
    ):
        moe(torch.randn(9, 2, tiny.HIDDEN))
    tensors = [tensor for tensor in vars(plans[0]).values() if tensor is not None]
    assert recorded == [tensor.data_ptr() for tensor in tensors if overlaps]


@pytest.mark.usefixtures("one_process")
def test_virtual_stages_without_overlapped_sends_are_refused_when_a_layer_is_built():
    config = tiny.config()
    config.overlap_moe_expert_parallel_comm = True
    config.virtual_pipeline_model_parallel_size = 2
    with pytest.raises(ValueError, match="overlap_p2p_comm must be True"):
        tiny.layer(config, padded_spec(tiny.layer_spec()))


@pytest.mark.usefixtures("one_process")
def test_direct_stores_must_be_asked_for_with_pipeline_stages_and_the_log_has_the_reason():
    def no_direct(**how: Any) -> str:
        return layer(experts="packed", **how).token_dispatcher.exchanges.no_direct

    assert "no CUDA device" in no_direct()
    assert no_direct(stages=2).startswith(
        "with overlap_moe_expert_parallel_comm and pipeline stages direct stores must be asked for"
    )
    assert "no CUDA device" in no_direct(stages=2, overlaps=False)
    # No other exchange serves these, so "auto" tries them.
    assert "no CUDA device" in no_direct(stages=2, capacity_pool="receiver")
