"""The router counts the map that was asked for, then returns the map that is kept."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.quantization.quant_config import RecipeConfig
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.router import TopKRouter
from torch.utils.checkpoint import checkpoint

from padded_dispatch.config import POLICIES
from padded_dispatch.megatron import StepHooks
from padded_dispatch.megatron.compat import layer_graphs
from padded_dispatch.megatron.router import select_after_counting
from padded_dispatch.routing import select
from tests.support import tiny
from tests.support.parity import megatron

pytestmark = pytest.mark.usefixtures("one_process")

T = 12


def router(**overrides: Any) -> Any:
    """Return the router of a layer in which every token wants experts 0 and 1 most."""
    layer = tiny.padded_layer(**overrides)
    tiny.ask_for(layer, 0, 1)
    return layer.router


def tokens() -> torch.Tensor:
    """Return tokens [T, 1, D]; later ones are surer of experts 0 and 1."""
    hidden = torch.zeros(T, 1, tiny.HIDDEN)
    hidden[:, 0, 0] = torch.arange(1, T + 1) / T
    return hidden


@pytest.mark.parametrize("policy", POLICIES)
def test_the_router_returns_the_selection_of_its_map(policy):
    """Against softmax, top-k and `select` by hand, with the gradient of the logits."""
    settings = {"moe_expert_capacity_factor": 0.75, "moe_token_drop_policy": policy}
    route = router(moe_router_pre_softmax=True, **settings)
    noise = torch.randn(24, 1, tiny.NUM_EXPERTS, generator=torch.Generator().manual_seed(0))
    given, by_hand = ((noise + torch.tensor([2.0, 1, 0, 0])).requires_grad_() for _ in range(2))
    probs_TE, kept_TE = route.routing(given)
    scores_TE = by_hand.flatten(0, 1).softmax(1)
    map_TE = torch.zeros_like(kept_TE).scatter(1, scores_TE.topk(tiny.TOP_K).indices, True)
    expected = select(map_TE, torch.where(map_TE, scores_TE, 0), capacity=9, policy=policy)
    assert torch.equal(kept_TE, expected.kept_TE) and not torch.equal(kept_TE, map_TE)
    assert torch.equal(probs_TE != 0, kept_TE)
    torch.testing.assert_close(probs_TE, expected.probs_TE)
    assert torch.equal(route.dispatcher.observers[0].demand_E, map_TE.sum(0))
    for result in (probs_TE, expected.probs_TE):
        (result * torch.arange(1.0, 1 + result.numel()).view_as(result)).sum().backward()
    assert given.grad.any()
    torch.testing.assert_close(given.grad, by_hand.grad)


def test_the_router_drops_nothing_where_rows_share_a_store():
    route = router(experts="packed", moe_expert_capacity_factor=0.25, **tiny.EXPERT_BIAS)
    with torch.no_grad():  # The first pass of recompute counts nothing.
        route(tokens())
    probs_TE, map_TE = route(tokens())
    assert map_TE.sum(0).tolist() == [T, T, 0, 0] and torch.equal(probs_TE != 0, map_TE)
    [counters] = route.dispatcher.observers
    assert counters.demand_E.tolist() == [T, T, 0, 0]
    assert route.local_tokens_per_expert.tolist() == [T, T, 0, 0]
    assert not counters.kept_E.any()  # Receivers count.


def _disagreements() -> dict[str, str]:
    """Return the errors of passes in which the second of two ranks differs, by what differs."""
    other, found = dist.get_rank() == 1, {}

    def differ(words: str, route: Any, skips: int = 0) -> None:
        with pytest.raises(ValueError, match="ranks disagree") as caught:
            route(tokens()[skips:])
        found[words] = str(caught.value)

    with megatron("cpu", expert_model_parallel_size=2):
        made = functools.partial(router, moe_expert_capacity_factor=0.5)
        differ(
            "overflow_threshold is 0.0 on rank 0, 0.25 on rank 1",
            made(overflow_threshold=0.25 * other),
        )
        scaled = made(moe_router_topk_scaling_factor=2.0 if other else None)
        differ("moe_router_topk_scaling_factor is None on rank 0, 2.0 on rank 1", scaled)
        of_experts = {
            "activation_func": (F.silu, F.gelu, "silu", "gelu"),
            "gated_linear_unit": (True, False, "True", "False"),
            "activation_func_clamp_value": (None, 7.0, "None", "7.0"),
            "glu_linear_offset": (0.0, 1.0, "0.0", "1.0"),
        }
        for name, (one, another, *texts) in of_experts.items():
            words = f"{name} is {texts[0]} on rank 0, {texts[1]} on rank 1"
            differ(words, made(**{name: another if other else one}))
        widened = made()
        widened.dispatcher.experts.to(torch.float64 if other else torch.float32)
        differ("dtype of experts is torch.float32 on rank 0, torch.float64 on rank 1", widened)
        # They would have the same capacity here, and so the same shapes.
        differ("training is 1 on rank 0, 0 on rank 1", made().train(not other))
        # They differ behind what an error shows of a value.
        part = {"later": "x" * 400 + str(other)}
        recipe = RecipeConfig.from_config_dict({"configs": {"all": {"training_recipe": part}}})
        differ("quant_recipe is ({'all': {'training_rec", made(quant_recipe=recipe))
        with torch.set_grad_enabled(not other):
            differ("gradients are enabled is True on rank 0, False on rank 1", made())
        controlled = made()
        controlled.dispatcher.configs.hooks = object if other else None
        differ("layer has StepHooks is False on rank 0, True on rank 1", controlled)
        controlled.dispatcher.configs.retry = None if other else object
        controlled.dispatcher.configs.hooks = object
        differ("layer has a Retry is True on rank 0, False on rank 1", controlled)
        mask = torch.zeros(1, T - other, dtype=torch.bool)
        words = "padding_mask has an entry for each token is True on rank 0, False on rank 1"
        differ(words, functools.partial(made(), padding_mask=mask))
        frozen = made().requires_grad_(other)
        differ("router needs gradients is False on rank 0, True on rank 1", frozen)
        alone = made().requires_grad_(False)
        alone.dispatcher.experts.requires_grad_(other)
        differ("any need gradients is False on rank 0, True on rank 1", alone)
        graphed = made(**layer_graphs("moe_router"))
        mask = torch.zeros(1, T, dtype=torch.bool) if other else None
        words = "padding_mask is given is False on rank 0, True on rank 1"
        differ(words, functools.partial(graphed, padding_mask=mask))
        words = "T is 12 on rank 0, 11 on rank 1"  # Only evaluation that fits takes any T.
        differ(words, made(eval_factor=0.5).eval(), skips=other)
        configs = (fits := made()).dispatcher.configs
        configs.training = configs.fitting
        differ(words, fits, skips=other)
        made()(tokens(), mask)  # Without a graph a mask may be on some ranks only.
        routers = made(), made()
        routers[1].set_layer_number(2)
        # The numbers of dispatchers count those above.
        differ("caller is layer 1 (dispatcher 19) on rank 0, layer 2 (", routers[other])
        ended = made(on_overflow="error")
        ended.dispatcher.configs.hooks = (lambda: None) if other else object
        differ("layer lacks StepHooks is False on rank 0, True on rank 1", ended)
    return found


def test_ranks_that_disagree_raise(pool2):
    first, second = pool2.run(_disagreements)
    assert first == second
    for differs, words in first.items():
        assert differs in words


def test_the_router_reads_the_layers_config_but_sees_no_factor(monkeypatch):
    losses = {"moe_aux_loss_coeff": 0.25, "moe_router_load_balancing_type": "aux_loss"}
    layer = tiny.padded_layer(moe_expert_capacity_factor=0.5, **losses)
    route, gradients = layer.router, []
    for coefficient in (0.25, 0.5):
        layer.config.moe_aux_loss_coeff = coefficient
        probs_TE, _ = route(tokens())
        (probs_TE * 0).sum().backward()  # the auxiliary loss adds its gradient by itself
        gradients.append(route.weight.grad)
        route.weight.grad = None
    assert gradients[0].abs().sum() > 0
    assert torch.equal(2 * gradients[0], gradients[1])
    assert route.config is layer.config and layer.config.moe_expert_capacity_factor == 0.5

    def fail(router: Any, *args: Any) -> None:
        assert router.config.moe_expert_capacity_factor is None
        raise RuntimeError("routing failed")

    monkeypatch.setattr(TopKRouter, "routing", fail)
    with pytest.raises(RuntimeError, match="routing failed"):
        route(tokens())
    assert layer.config.moe_expert_capacity_factor == 0.5


class Adapted(torch.nn.Module):
    """A router with an adapter, as Megatron-Bridge's `LoRATopKRouter` runs it."""

    def __init__(self, route: Any) -> None:
        super().__init__()
        self.to_wrap = route
        self.adapter = torch.nn.Linear(tiny.HIDDEN, tiny.NUM_EXPERTS, bias=False)

    def forward(self, tokens: torch.Tensor, *args: Any) -> Any:
        tokens = self.to_wrap.apply_input_jitter(tokens)
        logits = self.to_wrap.gating(tokens)
        return self.to_wrap.routing(logits + self.adapter(tokens), *args)


def adapted(**overrides: Any) -> Any:
    layer = tiny.padded_layer(**overrides)
    layer.router = Adapted(layer.router)
    return layer


def _disagreement_of_adapted_routers() -> str:
    with megatron("cpu", expert_model_parallel_size=2):
        layer = adapted(moe_expert_capacity_factor=0.5)
        with pytest.raises(ValueError, match="ranks disagree") as caught:
            layer(tokens()[dist.get_rank() :])
    return str(caught.value)


def test_ranks_that_disagree_raise_with_adapters_of_routers(pool2):
    first, second = pool2.run(_disagreement_of_adapted_routers)
    assert first == second and "T is 12 on rank 0, 11 on rank 1" in first


def test_drops_of_a_router_with_an_adapter_are_said(caplog):
    ended = adapted(moe_expert_capacity_factor=0.25, on_overflow="error")
    with pytest.raises(ValueError, match="must have StepHooks to follow on_overflow='error'"):
        ended(tokens())
    layer = adapted(moe_expert_capacity_factor=0.25)
    for _ in range(3):  # What a pass dropped is said a pass later.
        layer(tokens())
    assert "found no room on rank 0" in caplog.text
    hooks = StepHooks([layer])
    layer(tokens())
    assert hooks.read().training.figures()["dropped"] > 0


def test_a_factor_set_after_the_model_was_built_is_refused():
    """The layer would go on with the one that it has read; text generation leaves None."""
    layer, hidden = tiny.padded_layer(moe_expert_capacity_factor=0.5), tiny.tokens(6)
    layer.config.moe_expert_capacity_factor = None
    layer(hidden)
    layer.config.moe_expert_capacity_factor = 2.0  # As while text is generated.
    layer.eval()(hidden)
    words = r"^moe_expert_capacity_factor must stay 0\.5 in a model that is built, got 2\.0; build"
    with pytest.raises(ValueError, match=words):
        layer.train()(hidden)


def test_a_router_of_another_kind_is_refused():
    with pytest.raises(ValueError, match=r"router must be a TopKRouter .* got 'Linear'"):
        select_after_counting(torch.nn.Linear(1, 1), router().dispatcher)
    assert type(router()) is type(router())  # One class, whatever the number of layers.


def test_gating_with_a_bias_narrower_than_the_logits(monkeypatch):
    settings = {"params_dtype": torch.bfloat16, "moe_router_dtype": "fp32"}
    for name, dtype in ((None, torch.bfloat16), ("fp64", torch.float64)):
        other = router(add_bias_linear=True, **settings | {"moe_router_dtype": name})
        found = other.gating(tokens().bfloat16())
        assert found.dtype == dtype and "_Gradients" not in str(found.grad_fn)
    route = router(add_bias_linear=True, **settings)
    with torch.no_grad():
        route.bias.copy_(torch.tensor([1.0, -2.0, 0.5, 4.0]))
    monkeypatch.setattr(router_module, "router_gating_linear", None)  # GPUs read the bias in fp32.
    logits = route.gating(tokens().bfloat16())
    assert logits.dtype == torch.float32
    weights_E = torch.tensor([2.0, 1.0, 0.0, 0.0])
    assert torch.equal(logits[-1, 0], weights_E + torch.tensor([1.0, -2.0, 0.5, 4.0]))
    logits.sum().backward()
    assert route.bias.grad.dtype == torch.bfloat16
    assert route.bias.grad.tolist() == [T] * 4


@pytest.mark.parametrize("scale", [1.0, 2.0**-30])
def test_gradients_of_logits_have_sixteen_bits(scale):
    settings = {"params_dtype": torch.bfloat16, "moe_router_dtype": "fp32"}
    route = router(add_bias_linear=True, **settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        route.weight[:, 0] = 1.0
    given = torch.randn(T, 1, tiny.HIDDEN, generator=generator).bfloat16().requires_grad_()
    grad = torch.randn(T, 1, tiny.NUM_EXPERTS, generator=generator) * scale
    # Rounded to bf16 they cancel.
    grad[0, 0] = torch.tensor([1 + 2.0**-12, -1.0, 0.0, 0.0]) * scale
    route.gating(given).backward(grad)
    assert given.grad[0, 0, 0] == 2.0**-12 * scale
    pairs = {
        given: torch.einsum("tbe,ed->tbd", grad.double(), route.weight.double()),
        route.weight: torch.einsum("tbe,tbd->ed", grad.double(), given.double()),
        route.bias: grad.double().sum((0, 1)),
    }
    for leaf, exact in pairs.items():
        plain = (exact.float().bfloat16().double() - exact).abs().max()
        ulp = torch.finfo(torch.bfloat16).eps * exact.abs().max()
        assert leaf.grad.dtype == torch.bfloat16
        assert (leaf.grad.double() - exact).abs().max() <= 2 * plain + ulp


def test_both_parts_of_a_weight_s_gradient_are_added_before_rounding():
    """Those below sum up to 2**-8 + 2**-20, in bf16 2**-8; 1 + 2**-8 is a tie, and would be 1."""
    route = router(params_dtype=torch.bfloat16, moe_router_dtype="fp32")
    grad = torch.zeros(5, 1, tiny.NUM_EXPERTS)
    tiny_part = 2.0**-12
    of_tokens = 1.0, 1 + 2.0**-9, -1 + 2.0**-9, tiny_part + 2.0**-20, -tiny_part
    grad[:, 0, 0] = torch.tensor(of_tokens)
    assert grad[:, 0, 0].bfloat16().sum() == 1
    route.gating(torch.ones(5, 1, tiny.HIDDEN).bfloat16()).backward(grad)
    assert route.weight.grad[0].unique().tolist() == [1 + 2.0**-7]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_pass_moves_the_expert_bias_once(reentrant):
    """The first run of one kind of recompute has gradients enabled.

    A square keeps its input, so that the second run goes on behind the router.
    """
    route = router(**tiny.EXPERT_BIAS)
    given = tokens().requires_grad_()
    out = checkpoint(lambda x: route(x)[0].square(), given, use_reentrant=reentrant)
    out.sum().backward()
    assert route.local_tokens_per_expert.tolist() == [T, T, 0, 0]


class Cooler(TopKRouter):
    def gating(self, input):
        return router_module.Router.gating(self, input) * 0.25


@pytest.mark.parametrize("patched", [False, True])
def test_a_router_that_computes_its_own_logits_has_its_own_gradients(monkeypatch, patched):
    route = router(params_dtype=torch.bfloat16, moe_router_dtype="fp32")
    grad = torch.linspace(-1, 1, T * tiny.NUM_EXPERTS).view(T, 1, -1)
    given, same = (tokens().bfloat16().requires_grad_() for _ in range(2))
    gating = TopKRouter.gating
    gating(route, given).backward(grad * 0.25)
    expected, route.weight.grad = route.weight.grad, None
    if patched:
        monkeypatch.setattr(TopKRouter, "gating", Cooler.gating)
    else:
        dispatcher, route.__class__ = route.dispatcher, Cooler
        select_after_counting(route, dispatcher)
    route.gating(same).backward(grad)
    assert torch.equal(same.grad, given.grad) and torch.equal(route.weight.grad, expected)


def test_second_derivatives_of_logits_are_refused():
    route = router(params_dtype=torch.bfloat16, moe_router_dtype="fp32")
    given = tokens().bfloat16().requires_grad_()
    with pytest.raises(ValueError, match=r"^create_graph must be False in the backward pass"):
        torch.autograd.grad(route.gating(given).square().sum(), given, create_graph=True)
