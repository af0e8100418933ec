"""Fit: sizes that hold all rows of one eager pass, agreed by all ranks that share the layer.

    demand of each pool -> the largest over pools and ranks -> sizes, alike on all ranks

One small all-reduce and one read on the host per pass. A pass therefore waits for the device, and a
CUDA graph cannot capture it. In return it drops nothing, whatever the routing, and its buffers are
as large as its largest pool, not as large as the worst routing asks for.

Sizes are rounded up to 16 steps per power of two, by at most 1/16. Passes of similar routing then
have equal sizes, so that the allocator finds blocks that earlier passes gave back, and kernels see
multiples of 16.

Memory has a limit: no pool has more slots than `max_factor` would give it. A pass that needs more
goes in rounds. Each round takes the next tokens, with all their rows, and all rounds have the same
sizes. As no token is split, each sum over a token's rows is one sum, rounded once, as in a pass of
one round. Buffers of a round are free for the next one; what backward needs stays.

Ranks may have different numbers of tokens: in text generation each has requests of its own. The
largest number decides limit and rounds; a rank that has fewer tokens joins in all rounds.

Letters: T tokens on this rank, E experts, G pools of a source.
"""

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.config import FIT, DispatchConfig, PoolSizes, require

_LEAST = 16  # Slots of a pool are a multiple of it, and of a 16th of the power of two below.


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The course of one pass, alike on all ranks.

    Attributes:
        sizes: sizes of a round.
        tokens_per_round: tokens of each round but the last, which may have fewer.
        num_rounds: rounds of the pass; the last ones may find no tokens on this rank.
    """

    sizes: PoolSizes
    tokens_per_round: int
    num_rounds: int

    @property
    def sizes_of_pass(self) -> PoolSizes:
        """Sizes of all rounds together, for counters."""
        return dataclasses.replace(
            self.sizes,
            pool_slots=self.sizes.pool_slots * self.num_rounds,
            num_rows=self.sizes.num_rows * self.num_rounds,
        )


def fit(
    config: DispatchConfig,
    asked_TE: Tensor,
    *groups: dist.ProcessGroup | None,
    packed: bool,
    max_factor: float,
) -> Fitted:
    """Return the sizes of a pass that drops nothing. A collective call of each group's members.

    Pools are of "rank" where experts read packed rows, because those need least room, and else of
    "expert". Which pool rows share decides where they travel, and no bit of a result.

    Args:
        config: config of the layer; its factor is not read.
        asked_TE: bool [T, E], what the router asked for, without padding tokens.
        groups: the groups whose ranks share the layer; None for a single rank.
        packed: the experts read packed rows.
        max_factor: the capacity factor whose slots no pool exceeds; `NO_DROP` sets no limit.

    Raises:
        ValueError: inside a capture.
    """
    require_eager(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    pool = "rank" if packed else "expert"
    num_pools = config.num_ranks if packed else config.num_experts
    config = dataclasses.replace(config, capacity_pool=pool, capacity_factor=max_factor)
    here = asked_TE.shape[0]
    demand_here = _demand(asked_TE, num_pools, here)
    num_tokens, demand = _largest([demand_here.new_full((), here), demand_here], groups)
    limit = config.sizes(num_tokens)
    tokens_per_round = num_tokens
    if demand > limit.pool_slots:
        halvings = range(1, num_tokens.bit_length() + 1)
        lengths = [math.ceil(num_tokens / 2**halving) for halving in halvings]  # Down to 1.
        demands = _largest([_demand(asked_TE, num_pools, length) for length in lengths], groups)
        tokens_per_round, demand = next(
            (length, demand)
            for length, demand in zip(lengths, demands, strict=True)
            if demand <= limit.pool_slots
        )
    return Fitted(
        sizes=config.sizes_that_fit(tokens_per_round, min(round_up(demand), limit.pool_slots)),
        tokens_per_round=tokens_per_round,
        num_rounds=math.ceil(num_tokens / tokens_per_round),
    )


def require_eager(captures: bool) -> None:
    """Raise if a CUDA graph captures a pass that would fit.

    Raises:
        ValueError: names the factor and what to set.
    """
    require(
        not captures,
        "capacity_factor",
        FIT,
        "be a number in a CUDA graph, because sizes that fit are read on the host in each pass",
        "set a number or no-drop where graphs are captured: the eval_factor for evaluation",
    )


def round_up(demand: int) -> int:
    """Return the next multiple of 16, or of a 16th of the largest power of two in `demand`.

    Example: 5 gives 16, 250 gives 256, 1,000 gives 1,024, 1,030 gives 1,088.
    """
    step = max(_LEAST, 1 << max(0, demand.bit_length() - 5))
    return -(-demand // step) * step


def _largest(numbers: list[Tensor], groups: tuple[dist.ProcessGroup | None, ...]) -> list[int]:
    """Return the largest of each number, over all ranks."""
    largest = torch.stack(numbers)
    for group in groups:
        if group is not None and group.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest.tolist()


def _demand(asked_TE: Tensor, num_pools: int, length: int) -> Tensor:
    """Return this rank's largest demand for a pool, in rounds of so many tokens each."""
    num_rounds = math.ceil(asked_TE.shape[0] / length)
    missing = num_rounds * length - asked_TE.shape[0]
    rows_TG = asked_TE.unflatten(1, (num_pools, -1)).sum(2, dtype=torch.int32)
    rows_TG = torch.nn.functional.pad(rows_TG, (0, 0, 0, missing))
    return rows_TG.unflatten(0, (num_rounds, length)).sum(1).max()
