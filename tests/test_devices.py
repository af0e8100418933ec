"""A default device that a script sets (`torch.set_default_device`) moves no tensor of the package.

On a GPU it is "cuda", under which a tensor meant for the host costs a copy back, or cannot be
pinned. Here it is "meta", whose tensors cannot be read.
"""

import ast
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from padded_dispatch import Activation, DispatchConfig, ExpertWeights, PaddedDispatcher
from padded_dispatch.megatron import StepHooks
from tests.support import tiny

ROOT = Path(__file__).parent.parent / "padded_dispatch"
# What makes a tensor on the default device.
MADE = "arange as_tensor asarray empty empty_strided eye full linspace ones rand randint randn "
MADE += "randperm scalar_tensor tensor zeros"


def undecided(source: str) -> list[int]:
    """Return the lines of calls such as `torch.zeros(...)` that name no device."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = {f"torch.{name}" for name in MADE.split()}
    made = [call for call in calls if ast.unparse(call.func) in names]
    return [call.lineno for call in made if "device" not in {word.arg for word in call.keywords}]


def test_each_tensor_is_made_on_a_named_device():
    found = {
        str(path.relative_to(ROOT)): undecided(path.read_text()) for path in ROOT.rglob("*.py")
    }
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert undecided("torch.zeros(\n  2)\ntorch.zeros(2, device=d)\nx.new_zeros(2)") == [1]


@pytest.fixture
def no_data() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("pool", ["cells", "store"])
def test_packed_experts_run_under_another_default_device(no_data, pool):
    """By hand: all weights, tokens and probabilities are 1."""
    dispatcher = PaddedDispatcher(DispatchConfig(num_experts=2, top_k=1, capacity_pool=pool))
    ones = torch.ones(2, 2, 1, device="cpu", requires_grad=True)
    weights = ExpertWeights(fc1_LGD=ones, fc2_LDF=ones[:, :1])
    tokens_TD, probs_TE = torch.ones(2, 1, device="cpu"), torch.ones(2, 2, device="cpu")
    map_TE = torch.eye(2, device="cpu").bool()
    out_TD = dispatcher.run(tokens_TD, probs_TE, map_TE, weights, Activation(function="silu"))
    out_TD.sum().backward()
    silu = 1 / (1 + math.exp(-1))
    assert out_TD.tolist() == [[pytest.approx(silu)]] * 2
    assert ones.grad is not None
    of_gate, of_up = silu * (2 - silu), silu  # The sum of what fc1 and fc2 get in the first row.
    assert ones.grad.flatten(1).tolist() == [pytest.approx([of_gate + silu, of_up])] * 2


@pytest.mark.parametrize("experts", ["packed", "module"])
def test_a_layer_trains_and_reports_under_another_default_device(request, experts):
    tokens = tiny.tokens(5)
    with tiny.one_process():
        layer = tiny.padded_layer(experts=experts)
        expected = tiny.results(layer, tokens)
        request.getfixturevalue("no_data")
        hooks = StepHooks([layer], every=1)
        found = tiny.results(layer, tokens)
        hooks.after_step()
        assert hooks.read().training.counts["demand_E"].sum() == 5 * tiny.TOP_K
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
