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
from typing import cast

import torch
from torch import Tensor
from torch.library import custom_op

from padded_dispatch.config import POLICIES, Policy
from padded_dispatch.utils.nvtx import nvtx_range

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


@nvtx_range("select")
def select(
    map_TE: Tensor,
    probs_TE: Tensor,
    *,
    capacity: int,
    policy: Policy = "probs",
    mask_T: Tensor | None = None,
    protected_T: Tensor | None = None,
    draw: Tensor | None = None,
) -> Selection:
    """Cut a routing map down to at most C tokens per expert.

    Args:
        map_TE: bool [T, E], what the router asked for; any number of experts per token.
        probs_TE: floating point [T, E].
        capacity: slots per expert on this source rank (C).
        policy: see `padded_dispatch.ops.select`.
        mask_T: bool [T], True for padding tokens; they never take a slot and are not demand.
        protected_T: bool [T], True for tokens that come before all others, whatever the policy: they
            are dropped only where they alone ask for more than C slots, and then counted.
        draw: int64 scalar on the tokens' device, for policy "random" only: equal numbers give equal
            draws. Whoever owns it changes it in place, after the pass that records gradients.

    Returns:
        The kept map, its probabilities (0 elsewhere, also their gradient) and the demand.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r} is not possible: choose one of {', '.join(POLICIES)}")
    if policy == "random" and draw is None:
        raise ValueError("draw=None is not possible with policy='random': give an int64 scalar")
    asked_TE = map_TE if mask_T is None else map_TE & ~mask_T[:, None]
    level_TE = None if protected_T is None else protected_T[:, None].to(torch.uint8)
    kept_TE, demand_E = _select(asked_TE, probs_TE.detach(), capacity, policy, level_TE, draw)
    dropped_E = None
    if protected_T is not None:
        dropped_E = (asked_TE & ~kept_TE & protected_T[:, None]).sum(0, dtype=torch.int32)
    return Selection(
        kept_TE=kept_TE,
        probs_TE=torch.where(kept_TE, probs_TE, 0),
        demand_E=demand_E,
        protected_dropped_E=dropped_E,
    )


def kept_map(
    asked_TE: Tensor,
    probs_TE: Tensor,
    *,
    capacity: int,
    policy: Policy,
    level_TE: Tensor,
    draw: Tensor | None,
) -> Tensor:
    """`kept_map_in_torch`, or the kernel that equals it."""
    return _select(asked_TE, probs_TE.detach(), capacity, policy, level_TE, draw)[0]


def choice_ranks(asked_TE: Tensor, probs_TE: Tensor) -> Tensor:
    """`choice_ranks_in_torch`, or the kernel that equals it."""
    return _choice_ranks(asked_TE, probs_TE.detach())


def kept_map_in_torch(
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
        criteria += [
            best_T[:, None].expand_as(probs_TE),
            -choice_ranks_in_torch(asked_TE, probs_TE),
        ]
    if level_TE is not None:
        criteria.append(level_TE.expand_as(asked_TE))
    order_TE = torch.arange(num_tokens, device=asked_TE.device)[:, None].expand_as(asked_TE)
    for criterion_TE in (*criteria, asked_TE.to(torch.uint8)):
        sorted_TE = criterion_TE.gather(0, order_TE)
        places_TE = torch.sort(sorted_TE, dim=0, descending=True, stable=True).indices
        order_TE = order_TE.gather(0, places_TE)
    return torch.zeros_like(asked_TE).scatter(0, order_TE[:capacity], True) & asked_TE


def choice_ranks_in_torch(asked_TE: Tensor, probs_TE: Tensor) -> Tensor:
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


def _select_in_torch(
    asked_TE: Tensor,
    probs_TE: Tensor,
    capacity: int,
    policy: str,
    level_TE: Tensor | None,
    draw: Tensor | None,
) -> tuple[Tensor, Tensor]:
    demand_E = asked_TE.sum(0, dtype=torch.int32)
    policy_ = cast(Policy, policy)
    return kept_map_in_torch(asked_TE, probs_TE, capacity, policy_, level_TE, draw), demand_E


_select = custom_op("padded_dispatch::select", _select_in_torch, mutates_args=())


@_select.register_kernel("cuda")
def _(asked_TE, probs_TE, capacity, policy, level_TE, draw):
    from padded_dispatch.kernels import select

    # Nothing to choose from, or too much for one program.
    if not capacity < asked_TE.shape[0] <= select.MAX_TOKENS:
        return _select_in_torch(asked_TE, probs_TE, capacity, policy, level_TE, draw)
    return select.select(asked_TE, probs_TE, capacity, policy, level_TE, draw)


@_select.register_fake
def _(asked_TE, probs_TE, capacity, policy, level_TE, draw):
    return torch.empty_like(asked_TE), asked_TE.new_empty(asked_TE.shape[1], dtype=torch.int32)


_choice_ranks = custom_op("padded_dispatch::choice_ranks", choice_ranks_in_torch, mutates_args=())


@_choice_ranks.register_kernel("cuda")
def _(asked_TE, probs_TE):
    from padded_dispatch.kernels import select

    return select.choice_ranks(asked_TE, probs_TE)


@_choice_ranks.register_fake
def _(asked_TE, probs_TE):
    return asked_TE.new_empty(asked_TE.shape, dtype=torch.int32)
