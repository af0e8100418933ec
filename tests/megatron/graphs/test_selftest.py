"""The self-test's runs draw as training draws; tests of captures cover the rest."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from torch import Tensor, nn

from padded_dispatch.megatron.graphs.selftest import Sample, run_eager
from tests.support import tiny


class Noisy(nn.Module):
    """A layer whose output is a draw."""

    layer_number = 1

    def __init__(self, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            sequence_parallel=sequence_parallel, delay_wgrad_compute=False, fp8=None, fp4=None
        )
        self.cuda_graphs: list[Any] = []

    def forward(self, given: Tensor) -> tuple[Tensor]:
        return (given * 0 + torch.rand(given.shape),)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_layer_draws_as_in_megatrons_block(sequence_parallel):
    """Megatron captures and runs layers in a fork of its tracker under sequence parallelism."""
    with tiny.one_process():
        model_parallel_cuda_manual_seed(7)
        layer = Noisy(sequence_parallel=sequence_parallel)
        chunk = SimpleNamespace(zero_grad_buffer=lambda: None)
        sample = Sample(layer=layer, args=(torch.ones(5),), kwargs={})
        results = run_eager([chunk], sample)
        again = run_eager([chunk], sample)
        tracker: Any = get_cuda_rng_tracker()
        with tracker.fork() if sequence_parallel else nullcontext():
            expected = torch.rand(5)
    assert torch.equal(results["its output"], expected)
    assert torch.equal(again["its output"], expected)
