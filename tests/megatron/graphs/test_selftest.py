"""A self-test's runs draw and quantize as training does; Transformer Engine is stood in for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import fp4_utils, fp8_utils
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from torch import Tensor, nn

from padded_dispatch.megatron.graphs.selftest import (
    Sample,
    first_microbatch,
    run_eager,
    scales_put_back,
)


def scaling(scale: float, noted: list[float]) -> SimpleNamespace:
    """Return what Transformer Engine keeps in the recipe `delayed`."""
    return SimpleNamespace(scale=torch.tensor([scale]), amax_history=torch.tensor([noted]).T)


def linear(**metas: Any) -> Any:
    module: Any = nn.Linear(2, 2)
    module.fp8_meta, module.is_first_microbatch = {"recipe": "any", **metas}, False
    return module


def values(one: Any) -> tuple[list[float], list[float]]:
    return one.scale.tolist(), one.amax_history.flatten().tolist()


@pytest.mark.parametrize("fails", [False, True])
def test_scales_and_what_they_come_from_are_put_back(fails):
    forward, backward, fused = (scaling(n, [n + 1, n + 2]) for n in (3.0, 5.0, 7.0))
    first, second, ops = linear(scaling_fwd=forward, scaling_bwd=backward), linear(), nn.Identity()
    vars(ops)["_fp8_metas"] = {"forward": {"scaling_fwd": fused}, "backward": None}
    made, current = scaling(1.5, [2.5, 3.5]), SimpleNamespace(recipe="tensorwise")
    model = nn.Sequential(first, second, ops)
    seen = forward.scale
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), scales_put_back(model):
        for one in (forward, backward, fused):
            one.scale.zero_()
            one.amax_history.add_(9)
        second.fp8_meta |= {"scaling_fwd": made, "scaling_bwd": current}
        first.is_first_microbatch = True
        assert not fails or 1 / 0
    assert values(forward) == ([3], [4, 5]) and forward.scale is seen  # Graphs know its address.
    assert values(backward) == ([5], [6, 7]) and values(fused) == ([7], [8, 9])
    assert values(made) == ([1], [0, 0])
    assert not first.is_first_microbatch and not second.is_first_microbatch


class Layer(nn.Module):
    """A transformer layer, as far as its fp8 is concerned."""

    def __init__(self, number: int, **fields: Any) -> None:
        super().__init__()
        self.layer_number, self.linear = number, linear()
        given = {"fp8": None, "fp4": None, "quant_recipe": None, **fields}
        self.config: Any = SimpleNamespace(**given)


@pytest.mark.parametrize(
    ("fields", "mtp", "wanted"),
    [
        ({}, False, None),
        ({"fp8": "hybrid"}, False, ("fp8", 2)),
        ({"fp8": "hybrid"}, True, ("fp8", -1)),
        ({"fp4": "e2m1"}, False, ("fp4", 2)),
        ({"quant_recipe": "of modules"}, False, ()),
    ],
    ids=str,
)
def test_a_layer_runs_as_in_a_first_microbatch(monkeypatch, fields, mtp, wanted):
    entered: list[Any] = []

    def context_of(name: str) -> Callable[..., Any]:
        @contextmanager
        def context(config: Any, number: int) -> Iterator[None]:
            entered.append((name, number))
            yield
            entered.append("left")

        return context

    monkeypatch.setattr(fp8_utils, "get_fp8_context", context_of("fp8"))
    monkeypatch.setattr(fp4_utils, "get_fp4_context", context_of("fp4"))
    layer: Any = Layer(3, **fields)
    layer.is_mtp_layer = mtp
    layer.current_microbatch = 4
    with first_microbatch(layer):
        assert entered == ([wanted] if wanted else [])
        inside = layer.current_microbatch, layer.linear.is_first_microbatch
    assert inside == ((4, False) if wanted is None else (0, True))
    assert layer.current_microbatch == 4
    assert entered == ([wanted, "left"] if wanted else [])


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
def test_a_layer_draws_as_in_megatrons_block(megatron, sequence_parallel):
    """Megatron captures and runs layers in a fork of its tracker under sequence parallelism."""
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
