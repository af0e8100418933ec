"""Selection: cut a routing map down to the rows for which cells have slots.

A cell is the C slots of one expert for the rows of this source. Of all rows that ask for an expert,
the first C in the policy's order are kept. The policies are those of Megatron's
`moe_token_drop_policy`:

- `probs`: the most probable rows first, as in DeepSeek-V2 (arXiv 2405.04434).
- `position`: the first tokens first, as in GShard and Switch (arXiv 2101.03961). The cheapest; it
  always drops from the end of the batch.

Ties go to the first token. A row that is kept with C slots is kept with more slots, too. Under
`probs`, whether a token keeps its slot also depends on later tokens. Selection reads the map and
never tests `probs > 0`: a routed token may have probability zero.

Plain torch runs on CPUs and is the specification; on CUDA tensors a kernel gives the same bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from padded_dispatch.config import POLICIES, Policy, require
from padded_dispatch.utils.nvtx import nvtx_range


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
    map_TE: Tensor,
    probs_TE: Tensor,
    *,
    capacity: int,
    policy: Policy = "probs",
) -> Selection:
    """Cut a routing map down to the rows for which there are slots.

    Args:
        map_TE: bool [T, E], what the router asked for; any number of experts per token, none for
            padding tokens.
        probs_TE: floating point [T, E].
        capacity: slots of a cell (C). If C >= T every row is kept, and no selection kernel runs.
        policy: see the module's docstring.

    Raises:
        ValueError: if the policy is unknown.
    """
    require(policy in POLICIES, "policy", policy, f"be one of {', '.join(POLICIES)}")
    kept_TE, demand_E = map_TE, None
    if capacity < len(map_TE):
        kept_map = kept_map_in_torch
        if map_TE.is_cuda:
            from padded_dispatch.kernels.select import kept_map

        kept_TE, demand_E = kept_map(map_TE, probs_TE.detach(), capacity, policy)
        probs_TE = torch.where(kept_TE, probs_TE, 0)
    return Selection(kept_TE=kept_TE, probs_TE=probs_TE, demand_E=demand_E, capacity=capacity)


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
