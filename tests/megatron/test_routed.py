"""Routing in one operation has the bits of Megatron's code, and leaves the rest to that."""

import logging
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import router as megatrons
from megatron.core.transformer.moe.router import TopKRouter

from padded_dispatch.megatron import PaddedOptions, routed
from padded_dispatch.megatron.compat import forget_moe_state, logged_tensors
from padded_dispatch.megatron.config import log_once
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("one_process")

S, B = 11, 2
BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
LOSSES = {"moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss", "global_aux_loss"]}
LOSSES |= {"moe_aux_loss_coeff": [0.1, 0.2, 0.3], "moe_z_loss_coeff": 0.05}
CONFIGS = {
    "plain": {},
    "losses": LOSSES,
    "losses per token": LOSSES | {"calculate_per_token_loss": True},
    "softmax of all": LOSSES | {"moe_router_pre_softmax": True},
    "one expert": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "sigmoid": LOSSES | {"moe_router_score_function": "sigmoid"},
    "bias": LOSSES | BIAS | {"moe_router_topk_scaling_factor": 2.5},
}


def router(choice: str = "auto", **settings: Any) -> Any:
    return tiny.padded_layer(PaddedOptions(router=choice), **settings).router


def passes(router: Any) -> dict[str, torch.Tensor]:
    """Return everything that three passes leave: two in training and one in evaluation."""
    forget_moe_state()
    generator = torch.Generator().manual_seed(3)
    found = {}
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.randn(tiny.NUM_EXPERTS, generator=generator) / 8)
    for number in range(3):
        router.train(number < 2)
        hidden = torch.randn(S, B, tiny.HIDDEN, generator=generator).requires_grad_()
        probs_TE, map_TE = router(hidden)
        (probs_TE * torch.randn(probs_TE.shape, generator=generator)).sum().backward()
        found |= {f"probs {number}": probs_TE, f"map {number}": map_TE}
        found[f"gradient {number}"] = hidden.grad
    found |= {name: value.clone() for name, value in logged_tensors().items()}
    if router.local_tokens_per_expert is not None:
        found["counts"] = router.local_tokens_per_expert
    return found | {"weight": router.weight.grad}


@pytest.mark.parametrize("name", CONFIGS)
def test_bits_are_megatrons(name, monkeypatch):
    settings = CONFIGS[name]
    expected = passes(router("megatron", **settings))

    def never(*args, **kwargs):
        raise AssertionError("Megatron's code routed")

    monkeypatch.setattr(megatrons, "topk_routing_with_score_function", never)
    found = passes(router("kernel", **settings))
    assert found.keys() == expected.keys()
    assert len(found) >= 10 + 4 * ("moe_z_loss_coeff" in settings)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"moe_router_fusion": True}, "moe_router_fusion is set"),
        (
            {"moe_router_load_balancing_type": "sinkhorn"},
            "moe_router_load_balancing_type is sinkhorn",
        ),
        ({"moe_router_num_groups": 2, "moe_router_group_topk": 1}, "moe_router_group_topk is set"),
        ({"moe_enable_routing_replay": True}, "moe_enable_routing_replay is set"),
        ({"moe_router_dtype": "fp64"}, "logits are torch.float64, not moe_router_dtype='fp32'"),
    ],
)
def test_the_rule_names_what_it_leaves_to_megatron(settings, reason):
    made = router()
    for name, value in settings.items():
        setattr(made.config, name, value)
    made.routing_type = made.config.moe_router_load_balancing_type
    made.router_replay = object() if made.config.moe_enable_routing_replay else None
    dtype = torch.float64 if made.config.moe_router_dtype == "fp64" else torch.float32
    assert routed.why_not(made, torch.zeros(3, 1, 4, dtype=dtype), None) == reason


def test_masks_score_functions_and_versions_that_it_does_not_know(monkeypatch):
    made, logits = router(), torch.zeros(3, 1, 4)
    assert routed.why_not(made, logits, None) == ""
    assert routed.why_not(made, logits, torch.zeros(3, 1)) == "there is a padding mask"
    made.score_function = "sigmoid"
    expected = "moe_router_score_function is sigmoid, and the option router is not 'kernel'"
    assert routed.why_not(made, logits, None) == expected
    assert routed.why_not(made, logits, None, same_bits=False) == ""
    made.score_function = "sqrtsoftplus"
    expected = "moe_router_score_function is sqrtsoftplus"
    assert routed.why_not(made, logits, None) == expected
    monkeypatch.setattr(routed, "_VERSION", (0, 99))
    assert routed.why_not(made, logits, None) == "this Megatron-Core is 0.99"


@pytest.mark.parametrize("minor", [16, 17, 18, 19, 20])
def test_versions_that_it_knows(monkeypatch, minor):
    monkeypatch.setattr(routed, "_VERSION", (0, minor))
    assert routed.why_not(router(), torch.zeros(3, 1, 4), None) == ""


@pytest.mark.parametrize("version", [(0, 15), (0, 21), (1, 16)])
def test_versions_that_it_does_not_know(monkeypatch, version):
    monkeypatch.setattr(routed, "_VERSION", version)
    words = f"this Megatron-Core is {version[0]}.{version[1]}"
    assert routed.why_not(router(), torch.zeros(3, 1, 4), None) == words


def test_the_most_experts_and_choices():
    made, logits = router(), torch.zeros(3, 1, 4)
    made.num_experts, made.topk = 1024, 32
    assert routed.why_not(made, logits, None) == ""
    many = "there are more than 1024 experts, or 32 choices"
    made.num_experts = 1025
    assert routed.why_not(made, logits, None) == many
    made.num_experts, made.topk = 1024, 33
    assert routed.why_not(made, logits, None) == many


def test_a_routing_of_another_tool_is_called(monkeypatch):
    calls = []
    stock = TopKRouter.routing

    def replayed(self, *args, **kwargs):
        calls.append(self)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(TopKRouter, "routing", replayed)
    made = router()
    made(torch.randn(S, B, tiny.HIDDEN))
    assert calls == [made]


def test_which_code_routes_is_said_once(caplog):
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="padded_dispatch"):
        for choice in ("auto", "auto", "megatron", "megatron"):
            router(choice)(torch.randn(S, B, tiny.HIDDEN))
    said = [line for line in caplog.messages if "routes tokens" in line]
    assert said == [
        "one kernel routes tokens: scores, top-k and maps",
        "Megatron's own code routes tokens, in some 30 launches: the option router is 'megatron'",
    ]
