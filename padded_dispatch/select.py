"""Who keeps a slot: a routing map in, a map with at most C tokens per expert out.

Exact and deterministic, in any order that was asked for; what is equal in it is ordered by token
index. Static: stable sorts of the whole [T, E] map where a smarter selection would have to look at
its values. Select by the map, never by `probs > 0`: a routed token may have probability zero.

The policies, and what the field knows of them:

- `probs`: the most probable rows first. Megatron-Core's default, and DeepSeek-V2's, which drops the
  rows of lowest affinity at factor 1.0 and exempts about 10 % of the sequences (arXiv 2405.04434;
  here: protect them).
- `position`: the first tokens first, as in GShard and Switch (arXiv 2101.03961). The cheapest; it
  always hits the end of the batch.
- `random`: every subset of C askers is equally probable. DeepSpeed's `use_rts` (arXiv 2109.10465)
  is meant to take away that bias towards the front of the batch.
- `priority`: batch-prioritised routing (V-MoE, arXiv 2106.05974). Tokens are ordered by their best
  probability; first choices are served in that order, then second choices, and so on. V-MoE runs
  inference at factors well below 1 with it; in ST-MoE it "significantly helps for capacity factors
  less than one" (arXiv 2202.08906, section 5.2).

Every expert's slots fill independently of the others', so each policy is an order of one expert's
askers: a larger capacity never drops a row that a smaller one kept. Whether a token keeps its slot
depends, under all policies but `position`, on tokens behind it, too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from padded_dispatch.config import Policy

_32_BITS = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What the router asked for, cut down to capacity.

    `kept_TE`: bool, at most C per column. `probs_TE`: the router's dtype, exactly 0 where not kept;
    the only field with a gradient. `demand_E`: int32, rows asked for before dropping, padding
    tokens not counted. `protected_dropped_E`: int32, rows of protected tokens that were dropped,
    which happens only where such rows alone exceed C; None where no token was protected.
    `rerouted_E`: int32, rows that the remedy "reroute" brought to each expert; None without it.
    """

    kept_TE: Tensor
    probs_TE: Tensor
    demand_E: Tensor
    protected_dropped_E: Tensor | None = None
    rerouted_E: Tensor | None = None


def kept_map(
    asked_TE: Tensor,
    probs_TE: Tensor,
    capacity: int,
    policy: Policy,
    level_TE: Tensor | None = None,
    draw: Tensor | None = None,
) -> Tensor:
    """The rows of `asked_TE` that keep a slot.

    Args:
        asked_TE: bool, the routing map without padding tokens.
        probs_TE: floating point, finite where asked; read by "probs" and "priority" only.
        capacity: most tokens per expert (C).
        policy: see the module's docstring. Equals are ordered by token, under "priority" also the
            equal choices of one token by expert.
        level_TE: uint8 [T, E] or [T, 1], at most 3. Rows of a higher level come before all of a
            lower one; the policy orders those of one level. None is one level for all.
        draw: int64 scalar on the device, for "random" only: the number of the draw.

    Returns:
        bool [T, E].

    Example: column `asked = [1, 1, 0, 1]`, `probs = [.2, .5, .9, .5]`, C = 2 keeps tokens 1 and 3
    under "probs" and tokens 0 and 1 under "position"; with C = 1 it keeps 1 and 0.
    """
    num_tokens = asked_TE.shape[0]
    if capacity >= num_tokens:
        return asked_TE.clone()
    # From the last to the first criterion, as stable sorts want them.
    criteria = []
    if policy == "probs":
        criteria.append(probs_TE)
    elif policy == "random":
        assert draw is not None
        criteria.append(random_scores(draw, *asked_TE.shape))
    elif policy == "priority":
        best_T = torch.where(asked_TE, probs_TE, -torch.inf).amax(1)
        criteria += [best_T[:, None].expand_as(probs_TE), -choice_ranks(asked_TE, probs_TE)]
    if level_TE is not None:
        criteria.append(level_TE.expand_as(asked_TE))
    order_TE = torch.arange(num_tokens, device=asked_TE.device)[:, None].expand_as(asked_TE)
    for criterion_TE in (*criteria, asked_TE.to(torch.uint8)):
        sorted_TE = criterion_TE.gather(0, order_TE)
        places_TE = torch.sort(sorted_TE, dim=0, descending=True, stable=True).indices
        order_TE = order_TE.gather(0, places_TE)
    return torch.zeros_like(asked_TE).scatter(0, order_TE[:capacity], True) & asked_TE


def choice_ranks(asked_TE: Tensor, probs_TE: Tensor) -> Tensor:
    """Which choice of its token each expert is: int32 [T, E].

    0 is the most probable expert that the token asked for; equals go by expert id. Unspecified
    where nothing was asked for.

    Example: `asked = [[1, 0, 1, 1]]`, `probs = [[.2, .9, .4, .2]]` give `[[1, -, 0, 2]]`.
    """
    order_TE = torch.sort(probs_TE, dim=1, descending=True, stable=True).indices
    asked_first_TE = torch.sort(
        asked_TE.gather(1, order_TE).to(torch.uint8), dim=1, descending=True, stable=True
    ).indices
    order_TE = order_TE.gather(1, asked_first_TE)
    return torch.argsort(order_TE, dim=1).to(torch.int32)


def random_scores(draw: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """Numbers of 32 random bits, int64 [T, E], from the number of the draw alone.

    Token and expert are mixed in with the finalizer of MurmurHash3, which maps 32-bit numbers one
    to one: no two tokens of one expert are equal. The same draw gives the same numbers everywhere.
    """
    t_T1 = torch.arange(num_tokens, device=draw.device)[:, None]
    e_E = torch.arange(num_experts, device=draw.device)
    mixed = _mix(0x9E3779B9 ^ ((draw >> 32) & _32_BITS))
    mixed = _mix(mixed ^ (draw & _32_BITS))
    return _mix(_mix(mixed ^ t_T1) ^ e_E)


def _mix(bits: Tensor) -> Tensor:
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & _32_BITS
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & _32_BITS
    return bits ^ (bits >> 16)
