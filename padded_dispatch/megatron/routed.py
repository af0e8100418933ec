"""`TopKRouter.routing` with scores, top-k and maps as one operation, where a config allows it.

Megatron's own code takes some 30 launches from the logits to the map, and as many backward. Here
`padded_dispatch.ops.router` takes one each; losses, their logs and the expert bias remain
Megatron's methods, called in its order. The bits of probabilities and map are those of Megatron's
code for softmax, so losses and expert bias are, too. Sums of sigmoids round in another order on
GPUs, and so do gradients of logits; in evaluation Megatron 0.18 and later leave the order of the
former unspecified.

`why_not` is the rule. Everything that it names goes through Megatron's code.

Letters: T tokens on this rank; E experts in all.
"""

from typing import Any

import torch
from megatron.core import package_info
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from padded_dispatch.megatron.config import log_once
from padded_dispatch.ops.router import ScoreFunction, route

# `TopKRouter.routing` of these does what `routed` does. A later one may do more.
_VERSIONS = ((0, 16), (0, 17), (0, 18), (0, 19), (0, 20))
_VERSION = (package_info.MAJOR, package_info.MINOR)

# Torch's softmax, whose bits the kernel has, is another one for longer rows.
_MOST_EXPERTS = 1024
_MOST_CHOICES = 32


def why_not(
    router: Any, logits: Tensor, padding_mask: Tensor | None, *, same_bits: bool = True
) -> str:
    """Return why Megatron's own code must route these logits; empty if `routed` may.

    `same_bits`: only if `routed` has the bits of Megatron's code. On an H200 with torch 2.11 it has
    them for softmax, before and after top-k, but not for sigmoid.
    """
    config = router.config
    routings = [vars(base)["routing"] for base in type(router).__mro__ if "routing" in vars(base)]
    rules = (
        (_VERSION in _VERSIONS, f"this Megatron-Core is {_VERSION[0]}.{_VERSION[1]}"),
        # Ours is the first one. Other tools replace the function, or bring a subclass.
        (
            routings[1] is TopKRouter.routing and _is_megatrons(TopKRouter.routing),
            "another tool has its own TopKRouter.routing",
        ),
        (not config.moe_router_fusion, "moe_router_fusion is set"),
        (
            router.routing_type not in ("sinkhorn", "quantile_balancing"),
            f"moe_router_load_balancing_type is {router.routing_type}",
        ),
        (
            router.score_function in ("softmax", "sigmoid"),
            f"moe_router_score_function is {router.score_function}",
        ),
        (
            not same_bits or router.score_function == "softmax",
            "moe_router_score_function is sigmoid, and the option router is not 'kernel'",
        ),
        (not config.moe_router_group_topk, "moe_router_group_topk is set"),
        (router.router_replay is None, "moe_enable_routing_replay is set"),
        (logits.dtype == torch.float32, f"logits are {logits.dtype}, not moe_router_dtype='fp32'"),
        (
            router.num_experts <= _MOST_EXPERTS and router.topk <= _MOST_CHOICES,
            f"there are more than {_MOST_EXPERTS} experts, or {_MOST_CHOICES} choices",
        ),
        (padding_mask is None, "there is a padding mask"),
    )
    return next((reason for ok, reason in rules if not ok), "")


def _is_megatrons(function: Any) -> bool:
    return function.__module__ == TopKRouter.__module__


def routed(router: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `TopKRouter.routing` returns: probabilities and map, both [T, E].

    Args:
        router: a TopKRouter for which `why_not` is empty.
        logits: fp32, [S, B, E].
    """
    config, (seq_length, batch_size) = router.config, logits.shape[:2]
    logits_TE = router.apply_z_loss(logits.view(-1, router.num_experts))
    has_losses = router.training and torch.is_grad_enabled() and router.is_aux_loss_enabled()
    found = route(
        logits_TE,
        top_k=router.topk,
        function=_function(router),
        bias_E=router.expert_bias if router.score_function == "sigmoid" else None,
        scaling=config.moe_router_topk_scaling_factor or 1.0,
        with_scores=has_losses,
    )
    probs_TE = found.probs_TE
    if has_losses:
        given = found.scores_TE, found.counted_TE
        probs_TE = router._apply_aux_loss(probs_TE, *given)
        probs_TE = router._apply_seq_aux_loss(probs_TE, *given, seq_length, batch_size)
        probs_TE = router._apply_global_aux_loss(probs_TE, *given)
    router._apply_expert_bias(found.map_TE)
    return probs_TE, found.map_TE


def _function(router: Any) -> ScoreFunction:
    if router.score_function == "sigmoid":
        return "sigmoid"
    return "softmax" if router.config.moe_router_pre_softmax else "chosen"


def say(reason: str) -> None:
    """Log which code routes, once for each reason."""
    if reason:
        log_once(f"Megatron's own code routes tokens, in some 30 launches: {reason}")
    else:
        log_once("one kernel routes tokens: scores, top-k and maps")
