"""The probability that each expert would have had: what rerouting needs of Megatron's router.

Megatron gives probabilities of the chosen experts only. Those of all follow from the logits as in
`topk_routing_with_score_function` (Megatron-Core 0.16.1 to 0.19.0), with the divisor of the token's
own request:

- softmax before top-k: the softmax over all experts;
- softmax after top-k: exp(logit) over the sum of exp of the chosen experts' logits;
- sigmoid, and sqrtsoftplus since 0.18: over the sum of the chosen experts' scores, as they are for
  K = 1;

each times the scaling factor. The expert bias decides which expert is next, and has no part in its
probability. With groups a token stays within those that its own request touches, so that the limit
on groups holds.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# What chooses experts by more than logits and bias.
_OTHER_ROUTINGS = frozenset({"sinkhorn", "quantile_balancing"})


@dataclass(frozen=True, kw_only=True)
class AllScores:
    """For `ops.overflow.reroute`: `scores_TE` with gradient, `choice_TE` without."""

    scores_TE: Tensor
    choice_TE: Tensor


def check_reroute(config: Any) -> None:
    """Refuse routers whose next-best expert is not known.

    Raises:
        ValueError: names the field, its value and what to change.
    """
    routings = config.moe_router_load_balancing_type
    names = [routings] if isinstance(routings, str) else routings
    replays = config.moe_enable_routing_replay
    for name, value, refused in (
        ("moe_router_load_balancing_type", routings, not _OTHER_ROUTINGS.isdisjoint(names)),
        ("moe_enable_routing_replay", replays, replays),
    ):
        if refused:
            raise ValueError(
                f"{name}={value!r} is not possible with remedy='reroute': which expert comes next "
                "is not in the logits; set remedy='none' or 'renormalize'"
            )


def scores_of_all(router: Any, logits_TE: Tensor, map_TE: Tensor) -> AllScores:
    """Every expert's would-be probability.

    Args:
        router: a TopKRouter that `check_reroute` has passed.
        logits_TE: floating point [T, E], what the router chose by.
        map_TE: bool [T, E], the K experts that it chose for each token, padding tokens included.
    """
    config = router.config
    logits_TE = logits_TE.float()
    choice_TE = logits_TE.detach()
    if router.score_function == "softmax":
        chosen_TE = logits_TE
        if not config.moe_router_pre_softmax:
            chosen_TE = torch.where(map_TE, logits_TE, -torch.inf)
        scores_TE = (logits_TE - chosen_TE.logsumexp(1, keepdim=True)).exp()
    else:
        scores_TE = _raw_scores(router.score_function, logits_TE)
        choice_TE = scores_TE.detach()
        if router.expert_bias is not None:
            choice_TE = choice_TE + router.expert_bias
        if router.topk > 1:
            sum_T1 = torch.where(map_TE, scores_TE, 0).sum(1, keepdim=True)
            scores_TE = scores_TE / (sum_T1 + 1e-20)
    if config.moe_router_topk_scaling_factor:
        scores_TE = scores_TE * config.moe_router_topk_scaling_factor
    if config.moe_router_group_topk:
        in_groups_TGE = map_TE.unflatten(1, (config.moe_router_num_groups, -1))
        allowed_TE = in_groups_TGE.any(2, keepdim=True).expand_as(in_groups_TGE).flatten(1)
        choice_TE = torch.where(allowed_TE, choice_TE, -torch.inf)
    return AllScores(scores_TE=scores_TE, choice_TE=choice_TE)


def _raw_scores(score_function: str, logits_TE: Tensor) -> Tensor:
    if score_function == "sigmoid":
        return logits_TE.sigmoid()
    assert score_function == "sqrtsoftplus"
    return F.softplus(logits_TE).sqrt()
