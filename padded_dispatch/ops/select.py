"""Selection: cut a routing map down to the rows for which there are slots.

Slots belong to pools (`config.DispatchConfig.capacity_pool`), and the experts of a pool compete for
them: of all rows that ask for a pool, the first ones in the policy's order are kept, as many as it
has slots. A pool of one expert is an expert's own buffer of C slots.

The result is exact and deterministic under every policy; equals are ordered by token, then by
expert. Shapes are static: stable sorts of the whole [T, E] map, where a smarter selection would
read its values on the host. Selection goes by the map, never by `probs > 0`: a routed token may
have probability zero.

The policies, and what is published about them:

- `probs`: the most probable rows first. Megatron-Core's default, and DeepSeek-V2's, which drops the
  rows of lowest affinity at factor 1.0 and exempts about 10 % of the sequences (arXiv 2405.04434;
  here: `protected_T`).
- `position`: the first tokens first, as in GShard and Switch (arXiv 2101.03961). The cheapest; it
  always drops from the end of the batch.
- `random`: every subset of a pool's rows that fills its slots is equally probable. DeepSpeed's
  `use_rts` (arXiv 2109.10465) draws to remove that bias towards the front of the batch.
- `priority`: batch-prioritised routing (V-MoE, arXiv 2106.05974). Tokens are ordered by their best
  probability; first choices are served in that order, then second choices, and so on. V-MoE runs
  inference at factors well below 1 with it; in ST-MoE it "significantly helps for capacity factors
  less than one" (arXiv 2202.08906, section 5.2).

Each pool fills its slots independently of the others, so a policy is an order of one pool's rows,
and more slots never drop a row that fewer slots kept. Under every policy but `position`, whether a
token keeps its slot also depends on later tokens.

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
        asked_TE: bool, the map that was cut: what the router asked for, without padding tokens.
        kept_TE: bool, at most P rows in the columns of a pool. `asked_TE` itself where no routing
            can ask for more slots than there are.
        probs_TE: the router's dtype, exactly 0 where not kept; the only field with a gradient.
        demand_E: int32, rows asked for per expert, before dropping.
        protected_dropped_E: int32, dropped rows of protected tokens. A protected row is dropped
            only if the protected rows alone exceed the slots. None where no token was protected.
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
    sizes: PoolSizes,
    policy: Policy = "probs",
    mask_T: Tensor | None = None,
    protected_T: Tensor | None = None,
    draw: Tensor | None = None,
) -> Selection:
    """Cut a routing map down to the rows for which there are slots.

    Args:
        map_TE: bool [T, E], what the router asked for; any number of experts per token.
        probs_TE: floating point [T, E].
        sizes: of this pass: `DispatchConfig.sizes(T)`. Nothing is selected, and no selection kernel
            runs, if they say that nothing can be dropped.
        policy: see the module's docstring.
        mask_T: bool [T], True for padding tokens. They take no slot and are not demand.
        protected_T: bool [T], True for tokens that come before all others, whatever the policy.
            They are dropped, and counted, only if they alone ask for more slots than there are.
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
    if sizes.may_drop:
        level_TE = None if protected_T is None else protected_T[:, None].to(torch.uint8)
        kept_TE, demand_E = kept_map(
            asked_TE,
            probs_TE.detach(),
            sizes.pool_slots,
            policy,
            level_TE,
            draw,
            sizes.experts_per_pool,
        )
    else:
        kept_TE, demand_E = asked_TE, asked_TE.sum(0, dtype=torch.int32)
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
    slots: int,
    policy: str,
    level_TE: Tensor | None = None,
    draw: Tensor | None = None,
    experts_per_pool: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return the rows of `asked_TE` that keep a slot, and the demand.

    Args:
        asked_TE: bool, the routing map without padding tokens.
        probs_TE: floating point, finite where asked; read by "probs" and "priority" only.
        slots: the most rows of one pool (P).
        policy: see the module's docstring. Equals are ordered by token, then by expert; under
            "priority" also the equal choices of one token by expert.
        level_TE: uint8 [T, E] or [T, 1], at most 3. Rows of a higher level come before all of a
            lower one; the policy orders those of one level. None is one level for all.
        draw: int64 scalar on the device, for "random" only: the number of the draw.
        experts_per_pool: X consecutive experts share a pool.

    Returns:
        kept_TE bool [T, E] and demand_E int32 [E], the column sums of `asked_TE`.

    Example: column `asked = [1, 1, 0, 1]`, `probs = [.2, .5, .9, .5]`, P = 2 keeps tokens 1 and 3
    under "probs" and tokens 0 and 1 under "position"; with P = 1 it keeps 1 and 0.
    """
    demand_E = asked_TE.sum(0, dtype=torch.int32)
    if slots >= len(asked_TE) * experts_per_pool:
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
    criteria.append(asked_TE.to(torch.uint8))
    # A column for each pool, with its T * X candidates by token, then by expert: row t * X + x.
    columns = [_pool_columns(criterion_TE, experts_per_pool) for criterion_TE in criteria]
    places_N = torch.arange(len(columns[0]), device=asked_TE.device)
    order_NG = places_N[:, None].expand_as(columns[0])
    for criterion_NG in columns:
        sorted_NG = criterion_NG.gather(0, order_NG)
        order_NG = order_NG.gather(
            0, torch.sort(sorted_NG, dim=0, descending=True, stable=True).indices
        )
    within_NG = (places_N[:, None] < slots).expand_as(order_NG)
    first_NG = torch.empty_like(within_NG, memory_format=torch.contiguous_format)
    first_NG = first_NG.scatter(0, order_NG, within_NG)
    num_tokens, num_experts = asked_TE.shape
    first_TE = first_NG.view(num_tokens, experts_per_pool, -1).transpose(1, 2)
    return first_TE.reshape(num_tokens, num_experts) & asked_TE, demand_E


def _pool_columns(rows_TE: Tensor, experts_per_pool: int) -> Tensor:
    """Return a [T, E] tensor as [T * X, G]: a column for each pool, by token, then by expert."""
    rows_TGX = rows_TE.reshape(len(rows_TE), -1, experts_per_pool)
    return rows_TGX.transpose(1, 2).reshape(-1, rows_TGX.shape[1])


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
    mixed = mix(0x9E3779B9 ^ ((draw >> 32) & BITS_32))
    mixed = mix(mixed ^ (draw & BITS_32))
    return mix(mix(mixed ^ t_T1) ^ e_E)


BITS_32 = 0xFFFFFFFF


def mix(bits: Tensor) -> Tensor:
    """Apply the finalizer of MurmurHash3 to 32 bits in an int64."""
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & BITS_32
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & BITS_32
    return bits ^ (bits >> 16)


kept_map = custom_op("padded_dispatch::select", kept_map_in_torch, mutates_args=())


@kept_map.register_kernel("cuda")
def _(asked_TE, probs_TE, slots, policy, level_TE=None, draw=None, experts_per_pool=1):
    from padded_dispatch.kernels import select

    arguments = asked_TE, probs_TE, slots, policy, level_TE, draw, experts_per_pool
    if slots >= len(asked_TE) * experts_per_pool:
        return kept_map_in_torch(*arguments)  # Nothing to choose from.
    return select.kept_map(*arguments)


@kept_map.register_fake
def _(asked_TE, probs_TE, slots, policy, level_TE=None, draw=None, experts_per_pool=1):
    return torch.empty_like(asked_TE), asked_TE.new_empty(asked_TE.shape[1], dtype=torch.int32)


choice_ranks = custom_op("padded_dispatch::choice_ranks", choice_ranks_in_torch, mutates_args=())


@choice_ranks.register_kernel("cuda")
def _(asked_TE, probs_TE):
    from padded_dispatch.kernels import select

    return select.choice_ranks(asked_TE, probs_TE)


@choice_ranks.register_fake
def _(asked_TE, probs_TE):
    return asked_TE.new_empty(asked_TE.shape, dtype=torch.int32)
