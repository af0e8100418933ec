"""Routing decisions of one source: which rows it keeps, and the plan that numbers them.

Selection cuts a routing map down to the rows for which cells have slots. A cell is the C slots of
one expert for the rows of this source. Of all rows that ask for an expert, the first C in the
policy's order are kept. The policies are those of Megatron's `moe_token_drop_policy`:

- `probs`: the most probable rows first, as in DeepSeek-V2 (arXiv 2405.04434).
- `position`: the first tokens first, as in GShard and Switch (arXiv 2101.03961). The cheapest; it
  always drops from the end of the batch.

Ties go to the first token. A row that is kept with C slots is kept with more slots, too. Under
`probs`, whether a token keeps its slot also depends on later tokens. Selection reads the map and
never tests `probs > 0`: a routed token may have probability zero.

The plan says which experts each token has, and which row of the source each one is. With
probabilities it is all that a receiver needs to lay out and sum the rows of a source. A token's
experts are in ascending order; every sum over them runs in this order.

Plain torch runs on CPUs and is the specification; on CUDA tensors kernels give the same bits.
Letters: see `padded_dispatch.config`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from padded_dispatch.config import POLICIES, Policy, require, require_count
from padded_dispatch.kernels import TOO_MANY
from padded_dispatch.utils.phases import nvtx_range
from padded_dispatch.utils.tensors import is_dense, kind_of


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The routing map, cut down to the rows that have a slot.

    Attributes:
        kept_TE: bool, at most C rows in a column; the router's map itself if C >= T.
        probs_TE: the router's probabilities, in its dtype, exactly 0 where not kept; the router's
            tensor itself if C >= T. The only field with a gradient.
        demand_E: int32, rows asked for per expert, before dropping; None if C >= T.
        capacity: slots of a cell (C).
    """

    kept_TE: Tensor
    probs_TE: Tensor
    demand_E: Tensor | None
    capacity: int


@nvtx_range("select")
def select(
    map_TE: Tensor, probs_TE: Tensor, *, capacity: int, policy: Policy = "probs"
) -> Selection:
    """Cut a routing map down to the rows for which there are slots.

    Args:
        map_TE: bool [T, E], what the router asked for; none for padding tokens.
        probs_TE: floating point [T, E].
        capacity: slots of a cell (C). If C >= T every row is kept, and no selection kernel runs.
        policy: see the module's docstring.

    Raises:
        ValueError: names the argument, its value and what it must be.
    """
    _require_map(map_TE)
    found, rule = kind_of(probs_TE), "be a dense floating point tensor of the map's shape"
    is_right = is_dense(probs_TE) and probs_TE.shape == map_TE.shape
    require(is_right and probs_TE.is_floating_point(), "probs_TE", found, rule)
    require(policy in POLICIES, "policy", policy, f"be one of {', '.join(POLICIES)}")
    require_count("capacity", capacity)
    kept_TE, demand_E = map_TE, None
    if capacity < len(map_TE):
        kept_TE, demand_E = kept_map(map_TE, probs_TE.detach(), capacity, policy)
        probs_TE = torch.where(kept_TE, probs_TE, 0)
    return Selection(kept_TE=kept_TE, probs_TE=probs_TE, demand_E=demand_E, capacity=capacity)


def kept_map(
    asked_TE: Tensor, probs_TE: Tensor, capacity: int, policy: Policy
) -> tuple[Tensor, Tensor]:
    """Do the work of `kept_map_in_torch`, by kernels on a GPU."""
    kept = kept_map_in_torch
    if asked_TE.is_cuda:
        from padded_dispatch.kernels.select import kept_map as kept
    return kept(asked_TE, probs_TE, capacity, policy)


def kept_map_in_torch(
    asked_TE: Tensor, probs_TE: Tensor, capacity: int, policy: str
) -> tuple[Tensor, Tensor]:
    """Return the rows of `asked_TE` that keep a slot, bool [T, E], and the demand, int32 [E].

    Only policy "probs" reads `probs_TE`, which must be finite where a row is asked for.

    Example: column `asked = [1, 1, 0, 1]`, `probs = [.2, .5, .9, .5]`, C = 2 keeps tokens 1 and 3
    under "probs" and tokens 0 and 1 under "position"; with C = 1 it keeps 1 and 0.
    """
    score_TE = asked_TE.to(torch.uint8)
    if policy == "probs":
        score_TE = torch.where(asked_TE, probs_TE, -torch.inf)
    order_TE = torch.sort(score_TE, dim=0, descending=True, stable=True).indices
    first_TE = torch.zeros_like(asked_TE).scatter(0, order_TE[:capacity], True)
    return first_TE & asked_TE, asked_TE.sum(0, dtype=torch.int32)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of one source rank. All tensors are contiguous int32 without a gradient.

    Attributes:
        expert_TK: the experts of each token, ascending; -1 after the last.
        place_TK: index of the row among the source's rows for that expert, in token order; -1 where
            there is no expert.
        kept_E: rows for each expert. If a token has more than K experts, `TOO_MANY` for all: the
            counts go to all ranks, and each of them raises, or its device fails.
    """

    expert_TK: Tensor
    place_TK: Tensor
    kept_E: Tensor


@nvtx_range("plan")
def make_plan(map_TE: Tensor, *, top_k: int) -> Plan:
    """Return the plan of a routing map.

    Args:
        map_TE: bool [T, E], T at least 1.
        top_k: experts per token that the plan has room for (K), at least 1.

    Example: K = 2, `map = [[1, 0, 1], [0, 0, 1], [0, 0, 0]]` give `expert = [[0, 2], [2, -1], [-1,
    -1]]`, `place = [[0, 0], [1, -1], [-1, -1]]` and `kept = [1, 0, 2]`.
    """
    _require_map(map_TE)
    require_count("top_k", top_k)
    plan = plan_in_torch
    if map_TE.is_cuda:
        from padded_dispatch.kernels.plan import plan
    expert_TK, place_TK, kept_E = plan(map_TE, top_k)
    return Plan(expert_TK=expert_TK, place_TK=place_TK, kept_E=kept_E)


def _require_map(map_TE: Any) -> None:
    """Raise unless it is a bool tensor [T, E]; kernels would read the bytes of another dtype."""
    rule = "be a dense tensor [T, E] of torch.bool"
    is_map = is_dense(map_TE) and map_TE.ndim == 2 and map_TE.dtype == torch.bool
    require(is_map, "map_TE", kind_of(map_TE), rule, "use .bool()")


def plan_in_torch(map_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors of a plan in plain torch: the specification of `kernels.plan`."""
    num_tokens, num_experts = map_TE.shape
    before_TE = map_TE.cumsum(1) - map_TE.long()
    row_TE = map_TE & (before_TE < top_k)
    place_TE = row_TE.cumsum(0, dtype=torch.int32) - 1
    # Entries without a row go to column K, which is cut off.
    k_TE = torch.where(row_TE, before_TE, top_k)
    none_TK = place_TE.new_full((num_tokens, top_k + 1), -1)
    number_E = torch.arange(num_experts, dtype=torch.int32, device=map_TE.device)
    expert_TE = number_E.expand(num_tokens, -1)
    expert_TK, place_TK = (
        none_TK.scatter(1, k_TE, of_TE)[:, :top_k].contiguous() for of_TE in (expert_TE, place_TE)
    )
    has_more = (map_TE.sum(1) > top_k).any()
    return expert_TK, place_TK, torch.where(has_more, TOO_MANY, row_TE.sum(0, dtype=torch.int32))


def require_choices(count_SL: Tensor, top_k: int) -> None:
    """Raise if a source has sent `TOO_MANY`; on CPUs, since the host reads the counts.

    On a GPU the first kernel that reads them fails: `kernels.layout` or `rows.zero_padding`.
    """
    sources = (count_SL < 0).any(1).nonzero().flatten().tolist()
    rule = f"be the most experts that a token can have, and tokens of sources {sources} have more"
    fix = "set it (moe_router_topk) to that most, or let the router choose fewer"
    require(not sources, "top_k", top_k, rule, fix)


def choice_probs(probs_TE: Tensor, expert_TK: Tensor) -> Tensor:
    """Return the probability of every choice, [T, K], at least fp32; 0 where there is no expert.

    Differentiable in `probs_TE`, which is read only where a token has an expert.
    """
    if probs_TE.is_cuda:
        from padded_dispatch.kernels.plan import ChoiceProbs

        return ChoiceProbs.apply(probs_TE, expert_TK)
    prob_TK = probs_TE.gather(1, expert_TK.clamp(min=0).long())
    prob_TK = prob_TK.to(torch.promote_types(probs_TE.dtype, torch.float32))
    return torch.where(expert_TK >= 0, prob_TK, 0)
