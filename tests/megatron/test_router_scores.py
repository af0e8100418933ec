"""`scores_of_all` against Megatron's own probabilities, and by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from padded_dispatch.megatron.router_scores import check_reroute, scores_of_all

T, E, K = 40, 8, 3
# Logits below 8 are rounded to half an eps of that, and so is the logarithm of their sum; the
# exponential makes that a relative error. Division and scaling add one eps each.
RTOL = (8 + 2) * torch.finfo(torch.float32).eps


def router(**settings: Any) -> Any:
    """Return the fields of a TopKRouter and its config that `scores_of_all` reads."""
    config = SimpleNamespace(
        moe_router_pre_softmax=settings.get("use_pre_softmax", False),
        moe_router_topk_scaling_factor=settings.get("scaling_factor"),
        moe_router_num_groups=settings.get("num_groups"),
        moe_router_group_topk=settings.get("group_topk"),
    )
    return SimpleNamespace(
        config=config,
        topk=settings.get("topk", K),
        score_function=settings.get("score_function", "softmax"),
        expert_bias=settings.get("expert_bias"),
    )


def logits() -> torch.Tensor:
    logits_TE = torch.randn(T, E, generator=torch.Generator().manual_seed(0))
    assert logits_TE.abs().max() < 8
    return logits_TE


BIAS = torch.linspace(-0.5, 0.5, E)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_pre_softmax": True},
        {"use_pre_softmax": True, "scaling_factor": 2.5},
        {"topk": 1, "use_pre_softmax": True},
        {"score_function": "sigmoid"},
        {"score_function": "sigmoid", "topk": 1},
        {"score_function": "sigmoid", "expert_bias": BIAS, "scaling_factor": 2.5},
        {"score_function": "sigmoid", "expert_bias": BIAS, "num_groups": 4, "group_topk": 3},
        {"num_groups": 4, "group_topk": 3},
    ],
    ids=str,
)
def test_scores_are_megatron_s_where_it_gives_any(settings):
    probs_TE, map_TE = topk_routing_with_score_function(logits(), **{"topk": K, **settings})
    scores_TE, choice_TE = scores_of_all(router(**settings), logits(), map_TE)
    torch.testing.assert_close(scores_TE[map_TE], probs_TE[map_TE], rtol=RTOL, atol=0)
    # The experts that Megatron chose come first by `choice_TE`, too.
    least_T = torch.where(map_TE, choice_TE, torch.inf).amin(1)
    others_T = torch.where(map_TE, -torch.inf, choice_TE).amax(1)
    assert (least_T >= others_T).all()
    assert not choice_TE.requires_grad


def test_groups_that_a_request_does_not_touch_are_ruled_out():
    map_TE = torch.zeros(2, E, dtype=torch.bool)
    map_TE[0, :2] = True  # group 0 of four
    map_TE[1, [0, 7]] = True  # groups 0 and 3
    _, choice_TE = scores_of_all(router(num_groups=4, group_topk=2), logits()[:2], map_TE)
    assert (choice_TE == -torch.inf).tolist() == [
        [False, False, True, True, True, True, True, True],
        [False, False, True, True, True, True, False, False],
    ]


def test_the_bias_chooses_and_does_not_weigh():
    logits_TE = torch.zeros(1, 3)
    map_TE = torch.tensor([[True, True, False]])
    bias_E = torch.tensor([1.0, 2.0, 3.0])
    scores_TE, choice_TE = scores_of_all(
        router(score_function="sigmoid", topk=2, expert_bias=bias_E), logits_TE, map_TE
    )
    assert scores_TE.tolist() == [[0.5, 0.5, 0.5]]
    assert choice_TE.tolist() == [[1.5, 2.5, 3.5]]


def test_sqrtsoftplus_by_hand():
    # softplus(log(e**x - 1)) = x: roots 1, 2 and 3, over the 1 + 2 that were chosen.
    roots = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    logits_TE = (roots**2).expm1().log().float()
    map_TE = torch.tensor([[True, True, False]])
    scores_TE, _ = scores_of_all(router(score_function="sqrtsoftplus", topk=2), logits_TE, map_TE)
    expected_TE = torch.tensor([[1 / 3, 2 / 3, 1.0]])
    torch.testing.assert_close(scores_TE, expected_TE, rtol=RTOL, atol=0)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_gradients_are_those_of_megatron_s_probabilities(score_function):
    """Where Megatron has a probability, ours has the same gradient."""
    gradients = []
    for ours in (True, False):
        logits_TE = logits().double().requires_grad_()
        probs_TE, map_TE = topk_routing_with_score_function(
            logits_TE, K, score_function=score_function
        )
        if ours:
            probs_TE, _ = scores_of_all(router(score_function=score_function), logits_TE, map_TE)
        weight_TE = torch.arange(1.0, T * E + 1).view(T, E) / (T * E)
        (torch.where(map_TE, probs_TE, 0) * weight_TE).sum().backward()
        assert logits_TE.grad is not None
        gradients.append(logits_TE.grad)
    # Terms below 1 that nearly cancel: an absolute bound of RTOL for each of K + 1 of them.
    torch.testing.assert_close(*gradients, rtol=0, atol=(K + 1) * RTOL)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"moe_router_load_balancing_type": "sinkhorn"},
            "moe_router_load_balancing_type must .*'reroute', got 'sinkhorn'; .*'renormalize'",
        ),
        (
            {"moe_router_load_balancing_type": ["quantile_balancing"]},
            r"moe_router_load_balancing_type must .*'reroute', got \['quantile_balancing'\]; ",
        ),
        (
            {"moe_enable_routing_replay": True},
            "moe_enable_routing_replay must be False .*'reroute', got True; .*'renormalize'",
        ),
    ],
)
def test_routers_without_a_next_best_expert_are_refused(setting, message):
    known = {"moe_router_load_balancing_type": "aux_loss", "moe_enable_routing_replay": False}
    check_reroute(SimpleNamespace(**known))
    with pytest.raises(ValueError, match=message):
        check_reroute(SimpleNamespace(**{**known, **setting}))
