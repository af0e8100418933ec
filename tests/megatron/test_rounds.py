"""A pass in rounds equals a pass in one, bit by bit; only weights sum their gradients by rounds."""

from typing import Any

import pytest
import torch

from padded_dispatch.config import FIT, NO_DROP
from padded_dispatch.megatron import PaddedOptions
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("one_process")

SHARED = {"moe_shared_expert_intermediate_size": 8}


def layer(max_factor: float, **settings: Any) -> Any:
    options = PaddedOptions(schedule=((0, FIT),), fit_max_factor=max_factor)
    made = tiny.padded_layer(options, **settings)
    with torch.no_grad():
        made.router.weight[0] += 3 * made.router.weight[1]  # Expert 0 is busy.
    return made


def run(made: Any, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, 1, tiny.HIDDEN, generator=generator).requires_grad_()
    output, _ = made(hidden)
    output.backward(torch.randn(output.shape, generator=generator))
    return output.detach(), hidden.grad, {name: p.grad for name, p in made.named_parameters()}


@pytest.mark.parametrize("num_tokens", [5, 7, 40])
@pytest.mark.parametrize("settings", [{}, SHARED], ids=["routed", "shared"])
def test_outputs_and_gradients(num_tokens, settings):
    whole, parts = layer(NO_DROP, **settings), layer(0.5, **settings)
    output, grad, of_weights = run(whole, num_tokens)
    in_rounds, grad_in_rounds, of_weights_in_rounds = run(parts, num_tokens)
    dispatchers = whole.token_dispatcher, parts.token_dispatcher
    assert [dispatcher.configs.fitted.num_rounds > 1 for dispatcher in dispatchers] == [False, True]
    assert torch.equal(output, in_rounds)
    assert torch.equal(grad, grad_in_rounds)
    for name, gradient in of_weights.items():
        torch.testing.assert_close(gradient, of_weights_in_rounds[name], rtol=1e-5, atol=1e-6)


def test_counters_see_one_pass():
    whole, parts = layer(NO_DROP), layer(0.25)
    for made in (whole, parts):
        run(made, 40)
    counts = [made.token_dispatcher.counters for made in (whole, parts)]
    for name in ("demand_E", "kept_E", "num_passes", "idle_passes", "num_unplaced", "max_demand"):
        assert torch.equal(*(getattr(count, name) for count in counts)), name
    fitted = parts.token_dispatcher.configs.fitted
    assert counts[1].num_slots == fitted.num_rounds * fitted.sizes.pool_slots * tiny.NUM_EXPERTS
    assert counts[1].num_slots >= counts[1].kept_E.sum()


def test_nothing_outlives_the_pass_and_the_next_may_need_one_round():
    made = layer(0.25)
    expected = run(made, 20)[0]
    assert made.token_dispatcher._rounds is None
    assert run(made, 1)[0].shape == (1, 1, tiny.HIDDEN)
    assert made.token_dispatcher.configs.fitted.num_rounds == 1
    assert torch.equal(run(made, 20)[0], expected)
