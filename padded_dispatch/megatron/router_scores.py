"""Probabilities of the experts that a token did not choose, for rerouting.

Letters: T tokens on this rank; E experts, in G groups of P.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from padded_dispatch.config import require

# Load balancing that does not choose experts by logits and bias alone.
_OTHER_ROUTINGS = frozenset({"sinkhorn", "quantile_balancing"})


def check_reroute(config: Any) -> None:
    """Raise if the logits do not determine which expert is a token's next best.

    Raises:
        ValueError: names the field, its value and what to change.
    """
    fix = "the logits do not determine which expert comes next; set remedy='none' or 'renormalize'"
    name = "moe_router_load_balancing_type"
    value = getattr(config, name)
    types = [value] if isinstance(value, str) else value
    rule = "be neither sinkhorn nor quantile_balancing with remedy='reroute'"
    require(_OTHER_ROUTINGS.isdisjoint(types), name, value, rule, fix)
    name = "moe_enable_routing_replay"
    value = getattr(config, name)
    require(not value, name, value, "be False with remedy='reroute'", fix)


def scores_of_all(router: Any, logits_TE: Tensor, map_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probability that each expert would have had, and the order of choice.

    Megatron returns probabilities of the chosen experts only; rerouting needs those of all experts.
    They follow from the logits as in `topk_routing_with_score_function` (Megatron-Core 0.16.1 to
    0.19.0), with the divisor of the token's own request:

    - softmax before top-k: the softmax over all experts;
    - softmax after top-k: exp(logit) over the sum of exp of the chosen experts' logits;
    - sigmoid, and sqrtsoftplus since 0.18: the score over the sum of the chosen experts' scores;
      for K = 1 the score itself;

    each times the scaling factor. The expert bias decides which expert is next, and has no part in
    its probability. With groups, a token stays within the groups that its own request touches, so
    that the limit on groups holds.

    Args:
        router: a TopKRouter that `check_reroute` has passed.
        logits_TE: floating point [T, E], the logits that the router chose by.
        map_TE: bool [T, E], the K experts that it chose for each token, padding tokens included.

    Returns:
        `scores_TE`, fp32 with gradient, and `choice_TE`, fp32 without: a token's next expert is the
        one with the largest `choice_TE`; -inf rules an expert out.
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
        map_TGP = map_TE.unflatten(1, (config.moe_router_num_groups, -1))
        allowed_TE = map_TGP.any(2, keepdim=True).expand_as(map_TGP).flatten(1)
        choice_TE = torch.where(allowed_TE, choice_TE, -torch.inf)
    return scores_TE, choice_TE


def _raw_scores(score_function: str, logits_TE: Tensor) -> Tensor:
    if score_function == "sigmoid":
        return logits_TE.sigmoid()
    assert score_function == "sqrtsoftplus"
    return F.softplus(logits_TE).sqrt()
