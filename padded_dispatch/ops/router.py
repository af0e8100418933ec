"""Routing: from logits to probabilities, the map, and what load-balancing losses need.

It is the part of a top-k router between its linear and its losses: a score for each expert, the K
best ones, their probabilities. Losses read a normalized score of every expert, and a map of the K
best by that score. Rounding can make two scores equal whose logits differ, so that map is found on
its own.

The functions, as Megatron-Core's `topk_routing_with_score_function` has them:

- `softmax`: over all experts; the K best keep their probability.
- `chosen`: softmax over the K best logits (Megatron's default: no `moe_router_pre_softmax`).
- `sigmoid`: of each logit; the K best by score plus bias, each divided by the sum of their scores.

On CPUs the operations are those of Megatron's code in the same order, backward as autograd orders
them, and give the same bits. On CUDA devices one kernel each does the forward and the backward
pass, which are some 30 launches in torch. Forward it has the bits of torch's kernels, too: see
`padded_dispatch.kernels.router`. Backward it sums in another order.

Equals are ordered as by `torch.topk`: the lower expert id first on CUDA devices, unspecified on
CPUs. A NaN is larger than all numbers.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.library import custom_op

ScoreFunction = Literal["softmax", "chosen", "sigmoid"]

_LEAST_SUM = 1e-20  # Megatron's: added to a sum of sigmoids before it divides.


@dataclass(frozen=True, kw_only=True)
class Routed:
    """Experts that tokens ask for.

    Attributes:
        probs_TE: fp32 with gradient, exactly 0 where not asked for.
        map_TE: bool, K experts of each token.
        scores_TE: fp32 with gradient, each token's sum is 1; for losses. None if not wanted.
        counted_TE: bool, the K best by `scores_TE`; for losses. None if not wanted.
    """

    probs_TE: Tensor
    map_TE: Tensor
    scores_TE: Tensor | None
    counted_TE: Tensor | None


def route(
    logits_TE: Tensor,
    *,
    top_k: int,
    function: ScoreFunction,
    bias_E: Tensor | None = None,
    scaling: float = 1.0,
    with_scores: bool = False,
) -> Routed:
    """Route each token to its K best experts.

    Args:
        logits_TE: fp32; E at most 1,024.
        top_k: K, at most 32.
        function: see the module's docstring.
        bias_E: fp32, added to the scores that experts are chosen by; with "sigmoid" only.
        scaling: factor of the probabilities.
        with_scores: whether a loss needs `scores_TE` and `counted_TE`.

    Example: `logits = [[0, ln 3, ln 2]]`, K = 2 gives the map `[[0, 1, 1]]` and the probabilities
    `[[0, .6, .4]]` with "chosen", `[[0, .5, .333]]` with "softmax" and, since the sigmoids are
    .75 and .667, `[[0, .529, .471]]` with "sigmoid".
    """
    probs_TE, map_TE, scores_TE, counted_TE = _route(
        logits_TE, bias_E, top_k, function, scaling, with_scores
    )
    if not with_scores:
        return Routed(probs_TE=probs_TE, map_TE=map_TE, scores_TE=None, counted_TE=None)
    if function == "softmax":
        counted_TE = map_TE  # The same scores, so the same experts.
    return Routed(probs_TE=probs_TE, map_TE=map_TE, scores_TE=scores_TE, counted_TE=counted_TE)


def route_in_torch(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    function: str,
    scaling: float,
    with_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `Routed`; those that are not wanted have no rows.

    `counted_TE` has no rows with "softmax", where it would be the map.
    """
    weight_TK, expert_TK = _weights(logits_TE, bias_E, top_k, function)
    probs_TE = torch.zeros_like(logits_TE).scatter(1, expert_TK, weight_TK * scaling)
    map_TE = _map(logits_TE, expert_TK)
    if not with_scores:
        return probs_TE, map_TE, logits_TE.new_empty(0, logits_TE.shape[1]), map_TE[:0].clone()
    scores_TE = _scores(logits_TE, function)
    if function == "softmax":
        return probs_TE, map_TE, scores_TE, map_TE[:0].clone()
    return probs_TE, map_TE, scores_TE, _map(logits_TE, scores_TE.topk(top_k, 1).indices)


def _weights(
    logits_TE: Tensor, bias_E: Tensor | None, top_k: int, function: str
) -> tuple[Tensor, Tensor]:
    """Return the probabilities of the K best experts before scaling, and who they are."""
    if function == "softmax":
        weight_TK, expert_TK = logits_TE.softmax(1).topk(top_k, 1)
        return weight_TK, expert_TK
    if function == "chosen":
        chosen_TK, expert_TK = logits_TE.topk(top_k, 1)
        return chosen_TK.softmax(1), expert_TK
    score_TE = logits_TE.sigmoid()
    choice_TE = score_TE if bias_E is None else score_TE + bias_E
    expert_TK = choice_TE.topk(top_k, 1).indices
    score_TK = score_TE.gather(1, expert_TK)
    if top_k > 1:
        score_TK = score_TK / (score_TK.sum(1, keepdim=True) + _LEAST_SUM)
    return score_TK, expert_TK


def _map(like_TE: Tensor, expert_TK: Tensor) -> Tensor:
    return torch.zeros_like(like_TE, dtype=torch.bool).scatter_(1, expert_TK, True)


def _scores(logits_TE: Tensor, function: str) -> Tensor:
    if function != "sigmoid":
        return logits_TE.softmax(1)
    score_TE = logits_TE.sigmoid()
    return score_TE / (score_TE.sum(1, keepdim=True) + _LEAST_SUM)


def route_backward_in_torch(
    grad_probs_TE: Tensor,
    grad_scores_TE: Tensor | None,
    logits_TE: Tensor,
    bias_E: Tensor | None,
    map_TE: Tensor,
    top_k: int,
    function: str,
    scaling: float,
) -> Tensor:
    """Return the gradient of the logits, [T, E].

    Args:
        grad_probs_TE: read where the map is True.
        grad_scores_TE: None if no loss had `scores_TE`.
        logits_TE: as in `route_in_torch`, like all that follow.
        bias_E: see there.
        map_TE: what `route_in_torch` returned.
        top_k: see there.
        function: see there.
        scaling: see there.
    """
    weight_TK, expert_TK = _weights(logits_TE, bias_E, top_k, function)
    grad_TK = grad_probs_TE.gather(1, expert_TK) * scaling
    if function == "chosen":
        grad_TK = _softmax_backward(grad_TK, weight_TK)
    elif function == "sigmoid" and top_k > 1:
        grad_TK = _quotient_backward(grad_TK, logits_TE.sigmoid().gather(1, expert_TK))
    grad_TE = torch.zeros_like(logits_TE).scatter(1, expert_TK, grad_TK)
    if function == "softmax":
        grad_TE = _softmax_backward(grad_TE, logits_TE.softmax(1))
    elif function == "sigmoid":
        grad_TE = _sigmoid_backward(grad_TE, logits_TE.sigmoid())
    if grad_scores_TE is None:
        return grad_TE
    if function != "sigmoid":
        return grad_TE + _softmax_backward(grad_scores_TE, logits_TE.softmax(1))
    score_TE = logits_TE.sigmoid()
    return grad_TE + _sigmoid_backward(_quotient_backward(grad_scores_TE, score_TE), score_TE)


def _softmax_backward(grad: Tensor, result: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data(grad, result, 1, result.dtype)


def _sigmoid_backward(grad: Tensor, result: Tensor) -> Tensor:
    return torch.ops.aten.sigmoid_backward(grad, result)


def _quotient_backward(grad: Tensor, score: Tensor) -> Tensor:
    """Return the gradient of scores that were divided by their sum, from that of the quotients."""
    total = score.sum(1, keepdim=True) + _LEAST_SUM
    of_sum = (-grad * ((score / total) / total)).sum(1, keepdim=True)
    return grad / total + of_sum


_route = custom_op("padded_dispatch::route", route_in_torch, mutates_args=())


@_route.register_kernel("cuda")
def _(logits_TE, bias_E, top_k, function, scaling, with_scores):
    from padded_dispatch.kernels import router

    return router.route(logits_TE, bias_E, top_k, function, scaling, with_scores)


@_route.register_fake
def _(logits_TE, bias_E, top_k, function, scaling, with_scores):
    map_TE = torch.empty_like(logits_TE, dtype=torch.bool)
    num_scored = len(logits_TE) if with_scores else 0
    num_counted = 0 if function == "softmax" else num_scored
    return (
        torch.empty_like(logits_TE),
        map_TE,
        logits_TE.new_empty(num_scored, logits_TE.shape[1]),
        map_TE.new_empty(num_counted, logits_TE.shape[1]),
    )


_route_backward = custom_op(
    "padded_dispatch::route_backward", route_backward_in_torch, mutates_args=()
)


@_route_backward.register_kernel("cuda")
def _(grad_probs_TE, grad_scores_TE, logits_TE, bias_E, map_TE, top_k, function, scaling):
    from padded_dispatch.kernels import router

    given = grad_probs_TE, grad_scores_TE, logits_TE, map_TE, top_k, function, scaling
    return router.route_backward(*given)


@_route_backward.register_fake
def _(grad_probs_TE, grad_scores_TE, logits_TE, bias_E, map_TE, top_k, function, scaling):
    return torch.empty_like(logits_TE)


def _save(ctx, inputs, output) -> None:
    logits_TE, bias_E, ctx.top_k, ctx.function, ctx.scaling, ctx.with_scores = inputs
    ctx.save_for_backward(logits_TE, bias_E, output[1])


def _backward(ctx, grad_probs_TE, grad_map_TE, grad_scores_TE, grad_counted_TE):
    logits_TE, bias_E, map_TE = ctx.saved_tensors
    grad_TE = _route_backward(
        grad_probs_TE,
        grad_scores_TE if ctx.with_scores else None,
        logits_TE,
        bias_E,
        map_TE,
        ctx.top_k,
        ctx.function,
        ctx.scaling,
    )
    return grad_TE, None, None, None, None, None


_route.register_autograd(_backward, setup_context=_save)
