"""The entry of selection, and what happens to dropped rows: nothing, renormalizing or rerouting.

`none`: a dropped row adds nothing to its token, whose residual passes through.
`renormalize`: a token's kept probabilities are scaled up to the sum that it asked with.
`reroute`: a dropped row goes to its token's next-best expert whose pool has a free slot.

Measure before you use either remedy. The authors of Switch Transformer tried rerouting (No Token
Left Behind) and "found no empirical benefits" (arXiv 2101.03961, appendix). For inference,
capacity-aware dropping with rerouting to underused experts is reported to help (arXiv 2503.05066).

Shapes are static here, too: a remedy is a fixed number of kernels, whatever was dropped. Losses,
expert bias and `demand_E` see what the router asked for; a remedy never changes them.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from padded_dispatch.config import DispatchConfig, Policy, PoolSizes
from padded_dispatch.ops.select import Selection, choice_ranks, kept_map, select


def least_kept(dtype: torch.dtype) -> float:
    """Return the least sum of kept probabilities that `renormalize` scales up.

    The gradient through the quotient grows like one over the sum. It is rounded to the dtype of the
    probabilities, so half of the dtype's exponents are for it, and half for the gradient that it is
    multiplied by: 2**-63 for fp32 and bf16, 2**-7 for fp16, 2**-511 for fp64.
    """
    return math.sqrt(torch.finfo(dtype).tiny)


def select_with_remedy(
    config: DispatchConfig,
    sizes: PoolSizes,
    map_TE: Tensor,
    probs_TE: Tensor,
    scores_TE: Tensor | None = None,
    choice_TE: Tensor | None = None,
    *,
    mask_T: Tensor | None = None,
    protected_T: Tensor | None = None,
    draw: Tensor | None = None,
) -> Selection:
    """Cut a routing map down to its slots by the config's policy, then apply the config's remedy.

    See `select` for `sizes`, `mask_T`, `protected_T` and `draw`, and `reroute` for `scores_TE` and
    `choice_TE`, which only that remedy reads.

    Returns:
        See `padded_dispatch.ops.select.Selection`.

    Raises:
        ValueError: if the remedy is "reroute" and `scores_TE` is None; see also `select`.
    """
    selection = select(
        map_TE,
        probs_TE,
        sizes=sizes,
        policy=config.policy,
        mask_T=mask_T,
        protected_T=protected_T,
        draw=draw,
    )
    if config.remedy == "none" or not sizes.may_drop:
        return selection
    if config.remedy == "renormalize":
        return renormalize(selection, probs_TE)
    if scores_TE is None:
        raise ValueError(
            "scores_TE must be given with remedy='reroute', got None; pass the probability that "
            "each expert would have had"
        )
    return reroute(
        selection,
        scores_TE,
        choice_TE,
        sizes=sizes,
        policy=config.policy,
        rounds=config.reroute_rounds,
        protected_T=protected_T,
        draw=draw,
    )


def renormalize(selection: Selection, probs_TE: Tensor) -> Selection:
    """Scale each token's kept probabilities up to the sum of those that it asked with.

    The arithmetic is at least fp32 and rounds once. Tokens that lost nothing keep their bits.
    Tokens that lost all rows, or kept less than `least_kept`, are left as they are. The gradient is
    that of the quotient, so through the sum it also reaches the probabilities of dropped rows.

    Args:
        selection: made from these probabilities.
        probs_TE: floating point [T, E], at least 0 where asked.

    Example: a token asked with .4, .2 and .2, and the last row was dropped: .533 and .267.
    """
    asked_TE = selection.asked_TE
    wide = torch.promote_types(probs_TE.dtype, torch.float32)
    sum_asked_T1 = torch.where(asked_TE, probs_TE, 0).sum(1, keepdim=True, dtype=wide)
    # Wide from here on: two large parts of its gradient cancel, and must be summed before rounding.
    kept_probs_TE = selection.probs_TE.to(wide)
    sum_kept_T1 = kept_probs_TE.sum(1, keepdim=True)
    enough_T1 = sum_kept_T1 >= least_kept(probs_TE.dtype)
    scaled_T1 = enough_T1 & (asked_TE & ~selection.kept_TE).any(1, keepdim=True)
    share_TE = kept_probs_TE / torch.where(scaled_T1, sum_kept_T1, 1)
    scaled_TE = (share_TE * sum_asked_T1).to(probs_TE.dtype)
    return replace(selection, probs_TE=torch.where(scaled_T1, scaled_TE, selection.probs_TE))


def reroute(
    selection: Selection,
    scores_TE: Tensor,
    choice_TE: Tensor | None = None,
    *,
    sizes: PoolSizes,
    policy: Policy,
    rounds: int = 1,
    protected_T: Tensor | None = None,
    draw: Tensor | None = None,
) -> Selection:
    """Send dropped rows to experts that have slots left.

    In each round, a token with dropped rows that have no place yet proposes as many experts: the
    best by `choice_TE` (equals by expert id) whose pool has a free slot, that it did not ask for
    and was not given. Where proposals exceed the free slots, the policy decides by `scores_TE`,
    protected tokens first. Kept rows never lose their slot, no pool gets more rows than it has
    slots, and no token gets more rows than it asked for.

    A rerouted row has the probability that `scores_TE` gives its expert, and its gradient.

    Args:
        selection: the map that was asked for, and what was kept of it.
        scores_TE: floating point [T, E], the probability that each expert would have had: the
            router's score over the divisor of the token's own request, so that it equals the
            router's probability where the token asked. A token's sum then falls by as much as the
            new expert's score is lower; no other row changes.
        choice_TE: floating point [T, E] without gradient: what experts are chosen by, if that is
            not their score (expert bias, groups). -inf is never chosen. None is `scores_TE`.
        sizes: as in the selection.
        policy: as in the selection.
        rounds: how many times rows without a place try again.
        protected_T: as in the selection.
        draw: as in the selection.

    Example: P = 1, both tokens ask for expert 0 with .6 and .5; token 1 scores .3 for expert 1 and
    .2 for expert 2, and gets expert 1 with .3.
    """
    asked_TE, kept_TE = selection.asked_TE, selection.kept_TE
    choice_TE = scores_TE.detach() if choice_TE is None else choice_TE.detach()
    open_TE = ~asked_TE & (choice_TE > -torch.inf)
    for _ in range(rounds):
        num_lost_T1 = (asked_TE.sum(1) - kept_TE.sum(1))[:, None]
        has_room_E = _has_room(kept_TE, sizes.num_pools, sizes.pool_slots)
        free_TE = open_TE & ~kept_TE & has_room_E
        proposed_TE = free_TE & (choice_ranks(free_TE, choice_TE) < num_lost_T1)
        level_TE = 2 * kept_TE.to(torch.uint8)
        if protected_T is not None:
            level_TE += protected_T[:, None]
        wanted_TE = kept_TE | proposed_TE
        kept_TE = kept_map(
            wanted_TE,
            scores_TE.detach(),
            sizes.pool_slots,
            policy,
            level_TE,
            draw,
            sizes.experts_per_pool,
        )[0]
    rerouted_TE = kept_TE & ~asked_TE
    probs_TE = torch.where(rerouted_TE, scores_TE.to(selection.probs_TE.dtype), selection.probs_TE)
    return replace(
        selection,
        kept_TE=kept_TE,
        probs_TE=probs_TE,
        rerouted_E=rerouted_TE.sum(0, dtype=torch.int32),
    )


def _has_room(rows_NE: Tensor, num_pools: int, slots: int) -> Tensor:
    """Return for each expert whether its pool has a free slot: bool [E].

    Args:
        rows_NE: bool or integer [N, E], taken slots; their sum over an expert's column is its rows.
        num_pools: pools of consecutive experts.
        slots: of one pool.
    """
    num_rows, num_experts = rows_NE.shape
    taken_G = rows_NE.view(num_rows, num_pools, -1).sum((0, 2))
    return (taken_G < slots)[:, None].expand(-1, num_experts // num_pools).reshape(-1)
