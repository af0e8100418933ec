"""Selection: cut a routing map down to the rows for which there are slots.

Slots belong to pools (`config.DispatchConfig.capacity_pool`), and the experts of a pool compete for
them: of all rows that ask for a pool, the first ones in the policy's order are kept, as many as it
has slots. A pool of one expert is an expert's own buffer of C slots.

The policies are those of Megatron's `moe_token_drop_policy`:

- `probs`: the most probable rows first, as in DeepSeek-V2 (arXiv 2405.04434).
- `position`: the first tokens first, as in GShard and Switch (arXiv 2101.03961). The cheapest; it
  always drops from the end of the batch.

The result is exact and deterministic; equals are ordered by token, then by expert. More slots never
drop a row that fewer slots kept. Under `probs`, whether a token keeps its slot also depends on
later tokens. Shapes are static. Selection goes by the map, never by `probs > 0`: a routed token may
have probability zero. A dropped row adds nothing to its token, whose residual passes through.

G pools, P slots of one pool, X experts of one pool.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import custom_op

from padded_dispatch.config import POLICIES, Policy, PoolSizes, require
from padded_dispatch.utils.nvtx import nvtx_range


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The routing map, cut down to the rows that have a slot.

    Attributes:
        kept_TE: bool, at most P rows in the columns of a pool. What was asked for, itself, where no
            routing can ask for more slots than there are.
        probs_TE: the router's dtype, exactly 0 where not kept; the only field with a gradient.
        demand_E: int32, rows asked for per expert, before dropping.
    """

    kept_TE: Tensor
    probs_TE: Tensor
    demand_E: Tensor


@nvtx_range("select")
def select(
    map_TE: Tensor,
    probs_TE: Tensor,
    *,
    sizes: PoolSizes,
    policy: Policy = "probs",
    mask_T: Tensor | None = None,
) -> Selection:
    """Cut a routing map down to the rows for which there are slots.

    Args:
        map_TE: bool [T, E], what the router asked for; any number of experts per token.
        probs_TE: floating point [T, E].
        sizes: of this pass: `DispatchConfig.sizes(T)`. Nothing is selected, and no selection kernel
            runs, if they say that nothing can be dropped.
        policy: see the module's docstring.
        mask_T: bool [T], True for padding tokens. They take no slot and are not demand.

    Raises:
        ValueError: if the policy is unknown.
    """
    require(policy in POLICIES, "policy", policy, f"be one of {', '.join(POLICIES)}")
    asked_TE = map_TE if mask_T is None else map_TE & ~mask_T[:, None]
    if sizes.may_drop:
        kept_TE, demand_E = kept_map(
            asked_TE, probs_TE.detach(), sizes.pool_slots, policy, sizes.experts_per_pool
        )
    else:
        kept_TE, demand_E = asked_TE, asked_TE.sum(0, dtype=torch.int32)
    probs_TE = torch.where(kept_TE, probs_TE, 0)
    return Selection(kept_TE=kept_TE, probs_TE=probs_TE, demand_E=demand_E)


def kept_map_in_torch(
    asked_TE: Tensor, probs_TE: Tensor, slots: int, policy: str, experts_per_pool: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the rows of `asked_TE` that keep a slot, and the demand.

    Args:
        asked_TE: bool, the routing map without padding tokens.
        probs_TE: floating point, finite where asked; read by "probs" only.
        slots: the most rows of one pool (P).
        policy: see the module's docstring.
        experts_per_pool: X consecutive experts share a pool.

    Returns:
        kept_TE bool [T, E] and demand_E int32 [E], the column sums of `asked_TE`.

    Example: column `asked = [1, 1, 0, 1]`, `probs = [.2, .5, .9, .5]`, P = 2 keeps tokens 1 and 3
    under "probs" and tokens 0 and 1 under "position"; with P = 1 it keeps 1 and 0.
    """
    demand_E = asked_TE.sum(0, dtype=torch.int32)
    num_tokens, num_experts = asked_TE.shape
    if slots >= num_tokens * experts_per_pool:
        return asked_TE.clone(), demand_E
    score_TE = asked_TE.to(torch.uint8)
    if policy == "probs":
        score_TE = torch.where(asked_TE, probs_TE, -torch.inf)
    # A column for each pool, with its T * X candidates by token, then by expert: row t * X + x.
    score_TGX = score_TE.view(num_tokens, -1, experts_per_pool)
    score_NG = score_TGX.transpose(1, 2).reshape(num_tokens * experts_per_pool, -1)
    order_NG = torch.sort(score_NG, dim=0, descending=True, stable=True).indices
    first_NG = torch.zeros_like(score_NG, dtype=torch.bool).scatter(0, order_NG[:slots], True)
    first_TGX = first_NG.view(num_tokens, experts_per_pool, -1).transpose(1, 2)
    return first_TGX.reshape(num_tokens, num_experts) & asked_TE, demand_E


kept_map = custom_op("padded_dispatch::select", kept_map_in_torch, mutates_args=())


@kept_map.register_kernel("cuda")
def _(asked_TE, probs_TE, slots, policy, experts_per_pool=1):
    from padded_dispatch.kernels import select

    arguments = asked_TE, probs_TE, slots, policy, experts_per_pool
    if slots >= len(asked_TE) * experts_per_pool:
        return kept_map_in_torch(*arguments)  # Nothing to choose from.
    return select.kept_map(*arguments)


@kept_map.register_fake
def _(asked_TE, probs_TE, slots, policy, experts_per_pool=1):
    return torch.empty_like(asked_TE), asked_TE.new_empty(asked_TE.shape[1], dtype=torch.int32)
