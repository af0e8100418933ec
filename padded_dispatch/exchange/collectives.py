"""The exchange over equal-split collectives: NCCL on GPUs, gloo on CPUs.

Every slot travels, full or empty, so no rank has to receive counts before the rows. A second, small
all-to-all carries probabilities and counts. Expert tensor parallelism gathers the slots of all
ranks that split an expert, and sums their partial outputs on the way back.

If the experts take packed rows, one kernel packs the real rows after the exchange; empty slots
travel unwritten and are not read. The padded layout costs a copy of all slots if both L and S are
above 1. A pool lies whole on one destination rank: it belongs to one of its experts, or to all.

The collectives are custom ops over a named process group. Each allocates its result and changes
nothing else, so autograd, fake tensors and `torch.compile(fullgraph=True)` treat it as an ordinary
op, and a CUDA graph records one NCCL call on the current stream. (torch's own functional
collectives run on NCCL's stream and keep their work in a registry until a wait.) A reduction
accumulates in at least fp32, whatever the rows' dtype.

Letters: T tokens, E experts, R expert-parallel ranks, L = E / R local experts, S sources (R times
the expert-tensor-parallel size), D hidden size, N rows of this rank's experts, one for each slot
that they receive; M pools of P slots, of X experts each: E / X before the exchange, R * L / X after
it, S * L / X after the gather. PX: P + X.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.library import custom_op

from padded_dispatch.exchange import ExpertInput, Slots
from padded_dispatch.routing.plan import DispatchPlan
from padded_dispatch.routing.rows import (
    combine_rows,
    gather_meta,
    gather_rows,
    pack_rows,
    running_offsets,
    unpack_rows,
)
from padded_dispatch.utils.nvtx import nvtx_range

# torch 2.13 deprecates the longer names; 2.8 has no others.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def group_name(group: dist.ProcessGroup) -> str:
    """Return the name under which custom ops find `group`."""
    return cast(str, group.group_name)


def _group(name: str) -> dist.ProcessGroup:
    # Private, but torch's own functional collectives are built on it. Its argument's type has a
    # different name in each release, hence the cast.
    return cast(Any, distributed_c10d)._resolve_process_group(name)


@custom_op("padded_dispatch::all_to_all", mutates_args=())
def all_to_all(blocks: Tensor, name: str) -> Tensor:
    """Send block r of dim 0 to rank r and receive block r from rank r. Its own transpose."""
    received = torch.empty_like(blocks, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, blocks.contiguous(), group=_group(name))
    return received


@custom_op("padded_dispatch::all_gather", mutates_args=())
def all_gather(block: Tensor, name: str, size: int) -> Tensor:
    """Concatenate the blocks of all ranks along dim 0. Transpose of `reduce_scatter`."""
    gathered = block.new_empty(size * block.shape[0], *block.shape[1:])
    _all_gather(gathered, block.contiguous(), group=_group(name))
    return gathered


@custom_op("padded_dispatch::reduce_scatter", mutates_args=())
def reduce_scatter(blocks: Tensor, name: str, size: int) -> Tensor:
    """Sum this rank's block of dim 0 over all ranks. Transpose of `all_gather`."""
    wide = blocks.to(torch.promote_types(blocks.dtype, torch.float32)).contiguous()
    summed = wide.new_empty(wide.shape[0] // size, *wide.shape[1:])
    _reduce_scatter(summed, wide, group=_group(name))
    return summed.to(blocks.dtype)


@all_to_all.register_fake
def _(blocks, name):
    return torch.empty_like(blocks, memory_format=torch.contiguous_format)


@all_gather.register_fake
def _(block, name, size):
    return block.new_empty(size * block.shape[0], *block.shape[1:])


@reduce_scatter.register_fake
def _(blocks, name, size):
    return blocks.new_empty(blocks.shape[0] // size, *blocks.shape[1:])


def _save_group(ctx, inputs, output) -> None:
    ctx.group = inputs[1:]


all_to_all.register_autograd(
    nvtx_range("exchange backward")(lambda ctx, grad: (all_to_all(grad, *ctx.group), None)),
    setup_context=_save_group,
)
all_gather.register_autograd(
    lambda ctx, grad: (reduce_scatter(grad, *ctx.group), None, None), setup_context=_save_group
)
reduce_scatter.register_autograd(
    lambda ctx, grad: (all_gather(grad, *ctx.group), None, None), setup_context=_save_group
)


class AllToAllExchange:
    """`Exchange` with one equal-split all-to-all each way.

    Args:
        num_local_experts: experts on this rank (L).
        group: the expert-parallel group (R ranks), or None for one rank.
        etp_group: the group whose ranks split every expert's ffn, or None for one rank.
        packed: hand out the packed layout of `ExpertInput` instead of the padded one.
        experts_per_pool: local experts that share a pool (X); the padded layout needs 1.
    """

    def __init__(
        self,
        num_local_experts: int,
        group: dist.ProcessGroup | None = None,
        etp_group: dist.ProcessGroup | None = None,
        *,
        packed: bool = False,
        experts_per_pool: int = 1,
    ) -> None:
        assert packed or experts_per_pool == 1
        self.packed = packed
        self.num_local_experts = num_local_experts
        self.num_ranks = group.size() if group is not None else 1
        self.etp_size = etp_group.size() if etp_group is not None else 1
        self.num_sources = self.num_ranks * self.etp_size
        self._num_pools = self.num_sources * num_local_experts // experts_per_pool
        self._group = group_name(group) if group is not None else ""
        self._etp_group = group_name(etp_group) if etp_group is not None else ""

    @nvtx_range("gather")
    def prepare(
        self, tokens_TD: Tensor, probs_TE: Tensor, plan: DispatchPlan, num_rows: int
    ) -> Slots:
        """Gather tokens and probabilities into slots: rows [M, P, D], meta [M, P + X]."""
        rows_MPD = gather_rows(tokens_TD, plan, zeros=not self.packed)
        return Slots(rows_MPD=rows_MPD, meta_MPX=gather_meta(probs_TE, plan))

    @nvtx_range("exchange")
    def move(self, outgoing: Slots) -> Slots:
        """Send slots to the ranks of their experts, or back to those of their tokens."""
        if self.num_ranks == 1:
            return outgoing
        meta_MPX = outgoing.meta_MPX
        return Slots(
            rows_MPD=all_to_all(outgoing.rows_MPD, self._group),
            meta_MPX=None if meta_MPX is None else all_to_all(meta_MPX, self._group),
        )

    move_back = move  # An equal-split all-to-all is its own transpose.

    @nvtx_range("regroup")
    def arrange(self, incoming: Slots) -> ExpertInput:
        """Reorder received slots to rows [N, D] by expert; gather them over the etp group first."""
        rows_MPD, meta_MPX = incoming.rows_MPD, incoming.meta_MPX
        assert meta_MPX is not None
        if self.etp_size > 1:
            rows_MPD = all_gather(rows_MPD, self._etp_group, self.etp_size)
            meta_MPX = all_gather(meta_MPX, self._etp_group, self.etp_size)
        by_source = self.num_sources, self.num_local_experts
        pool_slots = rows_MPD.shape[1]
        kept_MX = meta_MPX[:, pool_slots:].detach()
        kept_SL = kept_MX.reshape(by_source).to(torch.int32)
        if self.packed:
            offsets_LS = running_offsets(kept_SL)
            probs_MP1 = meta_MPX[:, :pool_slots, None]
            return ExpertInput(
                rows_ND=pack_rows(rows_MPD, offsets_LS),
                probs_N=pack_rows(probs_MP1, offsets_LS).squeeze(1),
                kept_SL=kept_SL,
                offsets_LS=offsets_LS,
            )
        probs_SLC = meta_MPX[:, :pool_slots].unflatten(0, by_source)
        return ExpertInput(
            rows_ND=rows_MPD.unflatten(0, by_source).transpose(0, 1).flatten(0, 2),
            probs_N=probs_SLC.transpose(0, 1).flatten(),
            kept_SL=kept_SL,
        )

    @nvtx_range("regroup")
    def disarrange(self, out_ND: Tensor, offsets_LS: Tensor | None) -> Slots:
        """Reorder [N, D] to received slots, and sum them over the ranks that split an expert."""
        if offsets_LS is not None:
            rows_MPD = unpack_rows(out_ND, offsets_LS, self._num_pools)
        else:
            by_expert = (self.num_local_experts, self.num_sources, -1)
            rows_MPD = out_ND.unflatten(0, by_expert).transpose(0, 1).flatten(0, 1)
        if self.etp_size > 1:
            rows_MPD = reduce_scatter(rows_MPD, self._etp_group, self.etp_size)
        return Slots(rows_MPD=rows_MPD)

    @nvtx_range("combine")
    def combine(self, incoming: Slots, plan: DispatchPlan, offsets_LS: Tensor | None) -> Tensor:
        """Return the sum of every token's slots, [T, D]."""
        return combine_rows(incoming.rows_MPD, plan, zeros=not self.packed)
