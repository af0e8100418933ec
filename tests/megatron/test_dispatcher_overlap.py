"""The combined schedule calls the methods one by one, frees what went in, and has two streams.

That trainings have the bits of the plain schedule is in the table of `tests.gpu.table`.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from padded_dispatch.megatron import PaddedOptions, dispatcher, megatron_on_cpu, padded_spec
from padded_dispatch.routing.plan import DispatchPlan
from tests.support import tiny
from tests.support.stream_order import StreamOrder


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
def test_no_result_shares_the_memory_that_the_schedule_frees():
    """On one rank, the exchange hands on rows as they are."""
    moe, hidden = layer(), torch.randn(9, 2, tiny.HIDDEN)
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
def test_direct_stores_must_be_asked_for_with_pipeline_stages_and_the_log_has_the_reason():
    def no_direct(**how: Any) -> str:
        return layer(experts="packed", **how).token_dispatcher.exchanges.no_direct

    assert "no CUDA device" in no_direct()
    assert no_direct(stages=2).startswith(
        "with overlap_moe_expert_parallel_comm and pipeline stages direct stores must be asked for"
    )
    assert "no CUDA device" in no_direct(stages=2, overlaps=False)
