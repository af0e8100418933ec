"""Packed experts in fp8: their numbers, which layers, and that no weight is stale."""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import transformer_config
from torch import Tensor
from torch.nn.functional import linear
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from padded_dispatch.megatron.experts import StackedExperts, in_fp8
from tests.support import tiny
from tests.support.direct_parity import differences

FP8: dict[str, Any] = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
SIZES = {"hidden_size": 32, "moe_ffn_hidden_size": 48}

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture(autouse=True)
def accepts_fp8(monkeypatch) -> None:
    monkeypatch.setattr(transformer_config, "is_te_min_version", lambda *version: True)


def layer(number: int = 1, **settings: Any) -> Any:
    made = tiny.padded_layer(number, experts="packed", **SIZES | settings)
    assert type(made.experts) is StackedExperts
    return made


def tokens() -> Tensor:
    return tiny.tokens(7, 3, width=32)


def results(layer: Any) -> dict[str, Tensor]:
    return tiny.results(layer, tokens())


def output(layer: Any) -> Tensor:
    with torch.no_grad():
        return layer(tokens())[0]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_layer_in_fp8_is_near_that_in_full_precision(recipe):
    """Rounding two operands to three bits behind the point, in each product; and it does."""
    exact, found = results(layer()), results(layer(fp8="hybrid", fp8_recipe=recipe))
    for name, value in exact.items():
        error = (found[name] - value).norm() / value.norm()
        assert 0.002 < error < 0.12, (name, error)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_token_that_is_not_finite_spoils_itself_alone(bad):
    made, given = layer(**FP8), tokens()
    # The router must not see it: its probabilities would be NaN, and its choice another one.
    made.router.gating = lambda tokens: linear(tokens.nan_to_num(0, 0, 0), made.router.weight)
    given[2, 1, 5] = 0
    expected = made(given)[0].detach()
    given[2, 1, 5], expected[2, 1] = bad, torch.nan
    torch.testing.assert_close(made(given)[0], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("zeroed", ["tokens", "weights", "subnormal tokens"])
def test_zeros_and_subnormals_are_finite(zeroed):
    made = layer(**FP8)
    if zeroed == "weights":
        for parameter in made.experts.parameters():
            parameter.data.zero_()
    given = tokens() * (0 if zeroed == "tokens" else 1e-40 if "sub" in zeroed else 1)
    given.requires_grad_()
    found = made(given)[0]
    found.sum().backward()
    assert found.isfinite().all() and given.grad.isfinite().all()
    assert all(weight.grad.isfinite().all() for weight in made.parameters())
    if zeroed != "subnormal tokens":
        assert not found.any()


def double(made: Any) -> None:
    """Change weights as optimizers do: in place, and so that no version of a tensor changes."""
    for parameter in made.experts.parameters():
        parameter.data.mul_(2)


def loads(made: Any) -> None:
    state = {name: value.clone() for name, value in made.state_dict().items()}
    double(made)
    made.load_state_dict({n: v if "_extra" in n else 2 * v for n, v in state.items()})


REFRESHES = {
    "a step's first micro-batch": lambda made: (double(made), made.set_is_first_microbatch()),
    "a step of an optimizer": lambda made: (double(made), SGD(made.parameters()).step()),
    "evaluation": lambda made: (double(made), made.eval()),
    "training after evaluation": lambda made: (made.eval(), double(made), made.train()),
    "a checkpoint": loads,
    "another dtype": lambda made: (double(made), made.double(), made.float()),
}


@pytest.mark.parametrize("how", REFRESHES)
def test_weights_are_quantized_once_and_again_after(how):
    made, other = layer(**FP8), layer(**FP8)
    before = output(made)
    made.zero_grad()
    double(made)
    assert torch.equal(output(made), before), "weights were quantized without need"
    for parameter in made.experts.parameters():
        parameter.data.div_(2)
    REFRESHES[how](made)
    other.train(made.training)
    with torch.no_grad():
        other.load_state_dict(made.state_dict())
    after = output(other)
    assert not torch.equal(after, before)
    assert torch.equal(output(made), after)


def test_a_move_to_the_same_device_keeps_the_memory_that_graphs_read():
    made = layer(**FP8)
    output(made)
    scaled = made.experts._scaled
    double(made)
    assert made.cpu().float().experts._scaled is scaled and scaled._stale
    output(made)
    assert made.double().experts._scaled is None


def test_first_and_last_layers_stay_in_bf16():
    ends = {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 1}
    settings = {"num_layers": 4, **FP8, **ends, "num_layers_at_start_in_bf16": 2}
    config = tiny.config(**SIZES | settings)
    assert [in_fp8(config, number) for number in range(1, 6)] == [False, False, True, False, True]
    assert not in_fp8(tiny.config(), 3)
    exact = output(layer(num_layers=4))
    same = [torch.equal(output(layer(number, **settings)), exact) for number in range(1, 5)]
    assert same == [True, True, False, True]


def test_checkpoints_are_those_of_bf16_and_scales_of_others_are_left_out():
    quantized, exact, fresh = layer(**FP8), layer(), layer(**FP8)
    output(quantized)
    for source, target in ((quantized, exact), (exact, quantized)):
        double(source)
        state = source.state_dict()
        assert state.keys() == target.state_dict().keys()
        # As Transformer Engine writes it: scales and histories.
        scales = torch.arange(40, dtype=torch.uint8)
        state |= {name: scales for name in state if "_extra_state" in name}
        target.load_state_dict(state, strict=True)
        for (name, one), other in zip(target.named_parameters(), source.parameters(), strict=True):
            assert torch.equal(one, other), name
    fresh.load_state_dict(quantized.state_dict())
    assert torch.equal(output(quantized), output(fresh))


@pytest.mark.parametrize("packed", [True, False])
def test_weights_stay_in_bf16_with_fp8_param_gather(monkeypatch, packed):
    """Transformer Engine makes parameters in fp8 where its context says so."""
    contexts = []

    @contextmanager
    def fp8_model_init(enabled: bool) -> Iterator[None]:
        contexts.append(enabled)
        yield

    engine = SimpleNamespace(fp8_model_init=fp8_model_init)
    monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace(pytorch=engine))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    experts = "packed" if packed else "module"
    tiny.padded_layer(experts=experts, **SIZES, **FP8, fp8_param=True)
    assert contexts == [False] * packed


def test_text_generation_may_come_first():
    """It runs in inference mode, whose tensors training could not change."""
    made = layer(**FP8)
    with torch.inference_mode():
        first = made(tokens())[0]
    assert torch.equal(results(made)["output"], first)
    made.set_is_first_microbatch()
    assert torch.equal(results(made)["output"], first)


def test_recompute_computes_the_same():
    made = layer(**FP8)
    expected, forward = results(made), made.forward
    made.forward = functools.partial(checkpoint, forward, use_reentrant=False)
    assert differences(results(made), expected) == []
