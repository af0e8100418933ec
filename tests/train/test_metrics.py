"""Figures over all ranks: sums of losses and counts, and a clock that can be stopped."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from padded_dispatch.config import DispatchConfig
from padded_dispatch.ops.counters import Counters
from padded_dispatch.train import metrics
from padded_dispatch.train.metrics import Meter, StepWork, mean_over_ranks

CPU = torch.device("cpu")


def counted(demand, kept, slots, unplaced=0):
    counters = Counters(DispatchConfig(num_experts=2, top_k=1), CPU)
    counters.demand_E += torch.tensor(demand)
    counters.kept_E += torch.tensor(kept)
    counters.num_slots += slots
    counters.num_unplaced += unplaced
    return SimpleNamespace(token_dispatcher=SimpleNamespace(counters=counters))


def _rows():
    """Return rows of two ranks with two layers; the second rank has no losses."""
    first = dist.get_rank() == 0
    layers = [counted([5, 3], [4, 3], 10), counted([2, 6], [2, 4], 10, unplaced=1)]
    meter = Meter(layers, CPU, StepWork(tokens=100, flops=100 * 30))
    for losses in ([1.0, 2.0], [4.0, 5.0]):
        meter.add([torch.tensor(loss) for loss in losses] if first else [])
    rows = [meter.read(2, 0.5, None)]
    layers[0].token_dispatcher.counters.num_slots += 4
    layers[0].token_dispatcher.counters.demand_E += 1
    meter.add([torch.tensor(7.0)] if first else [])
    return [*rows, meter.read(3, 0.25, 1.5)]


def test_rows_sum_over_layers_and_ranks(pool2):
    ranks = pool2.run(_rows)
    for first, second in ranks:
        assert (first.step, first.lr, first.grad_norm) == (2, 0.5, None)
        assert first.loss == 3.0
        assert first.fill == 13 / 20 and first.dropped == 1 - 13 / 16 and first.unplaced == 2
        assert first.tokens_per_s == pytest.approx(100 * 1e3 / first.step_ms, rel=1e-12)
        assert first.tflops_per_gpu == pytest.approx(first.tokens_per_s * 30 / 2 / 1e12, rel=1e-12)
        assert first.allocated_gib is None
        assert (second.loss, second.grad_norm) == (7.0, 1.5)
        assert (second.fill, second.dropped, second.unplaced) == (0.0, 1.0, 0)


def _without_counters():
    stock = SimpleNamespace(token_dispatcher=SimpleNamespace())
    meter = Meter([stock], CPU, StepWork(tokens=1, flops=1))
    meter.add([torch.tensor(2.5)])
    row = meter.read(1, 0.1, None)
    return row.loss, row.fill, row.dropped, row.unplaced


def test_dispatchers_that_do_not_count_have_no_figures(pool2):
    assert pool2.run(_without_counters) == [(2.5, None, None, None)] * 2


def _step_ms():
    """Return the time of a step of 1.5 s with a pause of 3 s in it; reading takes time, too."""
    seconds = iter([0.0, 1.0, 4.0, 4.5, 9.0])
    with patch.object(metrics, "time", SimpleNamespace(perf_counter=seconds.__next__)):
        meter = Meter([], CPU, StepWork(tokens=1, flops=1))
        with meter.paused():
            pass
        meter.add([torch.tensor(0.0)])
        return meter.read(1, 0.1, None).step_ms


def test_a_pause_is_not_counted(pool2):
    assert pool2.run(_step_ms) == [1500.0, 1500.0]


def _mean():
    losses = [torch.tensor(1.0), torch.tensor(4.0)] if dist.get_rank() == 0 else []
    return mean_over_ranks(losses, CPU)


def test_mean_over_ranks_takes_ranks_without_losses(pool2):
    assert pool2.run(_mean) == [2.5, 2.5]
