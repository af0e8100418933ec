"""Selection: cut a routing map down to at most C tokens per expert.

The result is exact and deterministic under every policy; equals are ordered by token index. Shapes
are static: stable sorts of the whole [T, E] map, where a smarter selection would read its values on
the host. Selection goes by the map, never by `probs > 0`: a routed token may have probability zero.

The policies, and what is published about them:

- `probs`: the most probable rows first. Megatron-Core's default, and DeepSeek-V2's, which drops the
  rows of lowest affinity at factor 1.0 and exempts about 10 % of the sequences (arXiv 2405.04434;
  here: `protected_T`).
- `position`: the first tokens first, as in GShard and Switch (arXiv 2101.03961). The cheapest; it
  always drops from the end of the batch.
- `random`: every subset of C of an expert's rows is equally probable. DeepSpeed's `use_rts` (arXiv
  2109.10465) draws to remove that bias towards the front of the batch.
- `priority`: batch-prioritised routing (V-MoE, arXiv 2106.05974). Tokens are ordered by their best
  probability; first choices are served in that order, then second choices, and so on. V-MoE runs
  inference at factors well below 1 with it; in ST-MoE it "significantly helps for capacity factors
  less than one" (arXiv 2202.08906, section 5.2).

Each expert fills its slots independently of the others, so a policy is an order of one expert's
rows, and a larger capacity never drops a row that a smaller one kept. Under every policy but
`position`, whether a token keeps its slot also depends on later tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import custom_op

from padded_dispatch.config import POLICIES, Policy, require
from padded_dispatch.utils.nvtx import nvtx_range

_32_BITS = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The routing map, cut down to capacity.

    Attributes:
        asked_TE: bool, the map that was cut: what the router asked for, without padding tokens.
        kept_TE: bool, at most C per column.
        probs_TE: the router's dtype, exactly 0 where not kept; the only field with a gradient.
        demand_E: int32, rows asked for per expert, before dropping.
        protected_dropped_E: int32, dropped rows of protected tokens. A protected row is dropped
            only if the protected rows alone exceed C. None where no token was protected.
        rerouted_E: int32, rows that remedy "reroute" brought to each expert; None without it.
    """

    asked_TE: Tensor
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
        policy: see the module's docstring.
        mask_T: bool [T], True for padding tokens. They take no slot and are not demand.
        protected_T: bool [T], True for tokens that come before all others, whatever the policy.
            They are dropped, and counted, only if they alone ask for more than C slots.
        draw: int64 scalar on the tokens' device, for policy "random" only: equal numbers give equal
            draws. Its owner changes it in place, after the pass that records gradients.

    Raises:
        ValueError: if the policy is unknown, or is "random" without `draw`.
    """
    require(policy in POLICIES, "policy", policy, f"be one of {', '.join(POLICIES)}")
    require(
        policy != "random" or draw is not None,
        "draw",
        draw,
        "be an int64 scalar with policy='random'",
        "pass one on the tokens' device",
    )
    asked_TE = map_TE if mask_T is None else map_TE & ~mask_T[:, None]
    level_TE = None if protected_T is None else protected_T[:, None].to(torch.uint8)
    kept_TE, demand_E = kept_map(asked_TE, probs_TE.detach(), capacity, policy, level_TE, draw)
    dropped_E = None
    if protected_T is not None:
        dropped_E = (asked_TE & ~kept_TE & protected_T[:, None]).sum(0, dtype=torch.int32)
    return Selection(
        asked_TE=asked_TE,
        kept_TE=kept_TE,
        probs_TE=torch.where(kept_TE, probs_TE, 0),
        demand_E=demand_E,
        protected_dropped_E=dropped_E,
    )


def kept_map_in_torch(
    asked_TE: Tensor,
    probs_TE: Tensor,
    capacity: int,
    policy: str,
    level_TE: Tensor | None = None,
    draw: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the rows of `asked_TE` that keep a slot, and the demand.

    Args:
        asked_TE: bool, the routing map without padding tokens.
        probs_TE: floating point, finite where asked; read by "probs" and "priority" only.
        capacity: the most tokens per expert (C).
        policy: see the module's docstring. Equals are ordered by token; under "priority" also the
            equal choices of one token by expert.
        level_TE: uint8 [T, E] or [T, 1], at most 3. Rows of a higher level come before all of a
            lower one; the policy orders those of one level. None is one level for all.
        draw: int64 scalar on the device, for "random" only: the number of the draw.

    Returns:
        kept_TE bool [T, E] and demand_E int32 [E], the column sums of `asked_TE`.

    Example: column `asked = [1, 1, 0, 1]`, `probs = [.2, .5, .9, .5]`, C = 2 keeps tokens 1 and 3
    under "probs" and tokens 0 and 1 under "position"; with C = 1 it keeps 1 and 0.
    """
    num_tokens, demand_E = asked_TE.shape[0], asked_TE.sum(0, dtype=torch.int32)
    if capacity >= num_tokens:
        return asked_TE.clone(), demand_E
    # Stable sorts by one criterion after the other, the least important one first.
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
    first_TE = torch.zeros_like(asked_TE).scatter(0, order_TE[:capacity], True)
    return first_TE & asked_TE, demand_E


def choice_ranks_in_torch(asked_TE: Tensor, probs_TE: Tensor) -> Tensor:
    """Rank each token's experts by probability: int32 [T, E].

    0 is the most probable expert that the token asked for; equals are ordered by expert id. The
    rank is unspecified where the token did not ask.

    Example: `asked = [[1, 0, 1, 1]]`, `probs = [[.2, .9, .4, .2]]` give `[[1, -, 0, 2]]`.
    """
    order_TE = torch.sort(probs_TE, dim=1, descending=True, stable=True).indices
    asked_first_TE = torch.sort(
        asked_TE.gather(1, order_TE).to(torch.uint8), dim=1, descending=True, stable=True
    ).indices
    order_TE = order_TE.gather(1, asked_first_TE)
    return torch.argsort(order_TE, dim=1).to(torch.int32)


def random_scores(draw: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """Return 32 random bits for each row, int64 [T, E], from the number of the draw alone.

    Token and expert are mixed in with the finalizer of MurmurHash3, which maps 32-bit numbers one
    to one: no two tokens of one expert are equal. The same draw gives the same numbers on every
    device.
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


kept_map = custom_op("padded_dispatch::select", kept_map_in_torch, mutates_args=())


@kept_map.register_kernel("cuda")
def _(asked_TE, probs_TE, capacity, policy, level_TE=None, draw=None):
    from padded_dispatch.kernels import select

    # Nothing to choose from, or too many tokens for one program.
    if not capacity < asked_TE.shape[0] <= select.MAX_TOKENS:
        return kept_map_in_torch(asked_TE, probs_TE, capacity, policy, level_TE, draw)
    return select.kept_map(asked_TE, probs_TE, capacity, policy, level_TE, draw)


@kept_map.register_fake
def _(asked_TE, probs_TE, capacity, policy, level_TE=None, draw=None):
    return torch.empty_like(asked_TE), asked_TE.new_empty(asked_TE.shape[1], dtype=torch.int32)


choice_ranks = custom_op("padded_dispatch::choice_ranks", choice_ranks_in_torch, mutates_args=())


@choice_ranks.register_kernel("cuda")
def _(asked_TE, probs_TE):
    from padded_dispatch.kernels import select

    return select.choice_ranks(asked_TE, probs_TE)


@choice_ranks.register_fake
def _(asked_TE, probs_TE):
    return asked_TE.new_empty(asked_TE.shape, dtype=torch.int32)
