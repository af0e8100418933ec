"""Who keeps a slot: a routing map in, a map with at most C tokens per expert out.

Exact and deterministic: ties break by token index. Static: a stable sort of the whole [T, E] map
where a smarter selection would have to look at its values. Select by the map, never by
`probs > 0`: a routed token may have probability zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from padded_dispatch.config import Policy


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What the router asked for, cut down to capacity.

    `kept_TE`: bool, at most C per column. `probs_TE`: the router's dtype, exactly 0 where not kept;
    the only field with a gradient. `demand_E`: int32, rows asked for before dropping, padding
    tokens not counted.
    """

    kept_TE: Tensor
    probs_TE: Tensor
    demand_E: Tensor


def kept_map(asked_TE: Tensor, probs_TE: Tensor, capacity: int, policy: Policy) -> Tensor:
    """The rows of `asked_TE` that keep a slot.

    Args:
        asked_TE: bool, the routing map without padding tokens.
        probs_TE: floating point, finite where asked; read by policy "probs" only.
        capacity: most tokens per expert (C).
        policy: "probs" keeps the most probable, "position" the first; both break ties by the
            lower token index.

    Returns:
        bool [T, E].

    Example: column `asked = [1, 1, 0, 1]`, `probs = [.2, .5, .9, .5]`, C = 2 keeps tokens 1 and 3
    under "probs" and tokens 0 and 1 under "position"; with C = 1 it keeps 1 and 0.
    """
    num_tokens = asked_TE.shape[0]
    if capacity >= num_tokens:
        return asked_TE.clone()
    if policy == "position":
        return asked_TE & (asked_TE.cumsum(0, dtype=torch.int32) <= capacity)
    score_TE = torch.where(asked_TE, probs_TE, -torch.inf)
    order_TE = torch.sort(score_TE, dim=0, descending=True, stable=True).indices
    return torch.zeros_like(asked_TE).scatter(0, order_TE[:capacity], True) & asked_TE
