"""Fit: sizes that hold all rows of one eager pass, agreed by all ranks that share the layer.

    demand of each pool -> the largest over pools and ranks -> sizes, alike on all ranks

One small all-reduce and one read on the host per pass. A pass therefore waits for the device, and a
CUDA graph cannot capture it. In return it drops nothing, whatever the routing, and its buffers are
as large as its largest pool, not as large as the worst routing asks for.

Sizes are rounded up to 16 steps per power of two, by at most 1/16. Passes of similar routing then
have equal sizes, so that the allocator finds blocks that earlier passes gave back, and kernels see
multiples of 16.

Ranks may have different numbers of tokens: in text generation each has requests of its own.

Letters: T tokens on this rank, E experts, G pools of a source.
"""

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.config import FIT, NO_DROP, DispatchConfig, PoolSizes, require

_LEAST = 16  # Slots of a pool are a multiple of it, and of a 16th of the power of two below.


def fit(
    config: DispatchConfig, asked_TE: Tensor, *groups: dist.ProcessGroup | None, packed: bool
) -> PoolSizes:
    """Return the sizes of a pass that drops nothing. A collective call of each group's members.

    Pools are of "rank" where experts read packed rows, because those need least room, and else of
    "expert". Which pool rows share decides where they travel, and no bit of a result.

    Args:
        config: config of the layer; its factor is not read.
        asked_TE: bool [T, E], what the router asked for, without padding tokens.
        groups: the groups whose ranks share the layer; None for a single rank.
        packed: the experts read packed rows.

    Raises:
        ValueError: inside a capture.
    """
    require_eager(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    pool = "rank" if packed else "expert"
    num_pools = config.num_ranks if packed else config.num_experts
    config = dataclasses.replace(config, capacity_pool=pool, capacity_factor=NO_DROP)
    demand_G = asked_TE.sum(0, dtype=torch.int32).view(num_pools, -1).sum(1, dtype=torch.int32)
    largest = torch.stack([demand_G.max(), demand_G.new_full((), asked_TE.shape[0])])
    for group in groups:
        if group is not None and group.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    demand, num_tokens = largest.tolist()
    most = config.sizes(num_tokens).pool_slots
    return config.sizes_that_fit(num_tokens, min(round_up(demand), most))


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
