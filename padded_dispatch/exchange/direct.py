"""The exchange by direct stores: GPUs of one host write rows into each other's memory.

Only real rows travel. They arrive where the experts read them, packed by (expert, source, slot), so
there is no gather before the exchange and no regrouping after it. Two ops do all the work, and each
is the other's transpose:

    push_rows     tokens to their experts:      counts, barrier, offsets, rows, barrier, copies
    return_rows   packed rows to their tokens:  barrier, rows into slots, barrier, sum

The forward of dispatch is a push, the forward of combine a return; backward, the other way round.
Probabilities, or their gradients, travel with the rows. A token, or a gradient, that goes to
several experts of one rank crosses the link there once, into its first row, from which the receiver
copies it to the others behind the barrier. Both returns may take place inside of the products that
compute their rows: see `padded_dispatch.exchange.fused`. Sums equal those of `AllToAllExchange` bit
by bit: the same kernel adds the same slots. `DirectExchange` has what callers must guarantee, and
why no buffer is overwritten too early; notebooks/results/LOG.md has what was tried and left out.

Letters: T tokens, K experts per token, E experts, R ranks and S = R sources, L = E / R local
experts, D hidden size, N the most rows that a rank's experts can receive, G pools of P slots of a
source, X = E / G experts of a pool.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op

from padded_dispatch.config import require
from padded_dispatch.exchange import ExpertInput, PackedAtOnce, Slots
from padded_dispatch.exchange.symmetric_memory import (
    DirectBuffers,
    Shape,
    Workspace,
    check_group,
    find,
)
from padded_dispatch.routing.plan import DispatchPlan
from padded_dispatch.routing.rows import running_offsets
from padded_dispatch.utils.nvtx import nvtx_range

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class DirectExchange(PackedAtOnce):
    """`Exchange` by direct stores, for experts that take packed rows.

    From `prepare` to `arrange`, rows [1, N, D] are packed already, and meta [1, N + E] is their
    probabilities followed by the counts [S, L]. From `disarrange` to `combine`, rows are the
    experts' packed output.

    What the caller must guarantee: all calls of a process are on one stream, or ordered as if they
    were, and so are uses of what they returned; all ranks make their calls in the same order; what
    the forward pass received is not used after the backward pass, and gradients not after the next
    layer's backward; and no return comes between a push and the return of its pass, if that one is
    inside of a product. If a peer dies or never comes, the others wait in a barrier, for 10 minutes
    as with NCCL; then each prints the missing rank's number in the group, and its device fails.

    Why no buffer is overwritten too early: everything that one call writes to peers' memory lies
    between two barriers of all ranks on the current stream. The first shows that all ranks have
    finished with the previous contents, since their uses came before on their streams; the second,
    that all rows have arrived. So a call does not depend on the calls before it, of another layer,
    a replayed graph, an evaluation, or a recomputation. Captured barriers reset themselves. Every
    rank takes part in every call, also without rows. (A return inside of a product begins without a
    barrier; that of the push of its pass takes its place.) Two buffers need more words:

    - Counts (`Workspace.table_RE`) are written before the first barrier of a push. Their last
      readers (`place_rows`) finished before the second barrier of the push that they belong to,
      which this rank has passed.
    - Places, the list beside received rows from which copies are made, belong to the receive buffer
      and are written with its rows. Their only reader is the copy of the same call.

    Args:
        num_local_experts: experts on this rank (L).
        group: the expert-parallel group, all on one host.
        etp_group: None, or a group of one rank.
        microbatches_in_flight: the most whose forward pass is done and whose backward pass is not.

    Raises:
        ValueError: on all ranks, if their GPUs cannot write to each other or `etp_group` has more
            than one rank.
    """

    def __init__(
        self,
        num_local_experts: int,
        group: dist.ProcessGroup | None,
        etp_group: dist.ProcessGroup | None = None,
        *,
        microbatches_in_flight: int = 1,
    ) -> None:
        require(
            etp_group is None or etp_group.size() == 1,
            "expert_tensor_parallel_size",
            etp_group and etp_group.size(),
            "be 1 with exchange='direct'",
            "set it to 1, or set exchange='alltoall'",
        )
        self._group = check_group(group)
        self.num_local_experts = num_local_experts
        self.num_sources = self._group.size()
        self._microbatches_in_flight = microbatches_in_flight
        self._buffers: dict[Shape, DirectBuffers] = {}

    @nvtx_range("exchange")
    def prepare(
        self, tokens_TD: Tensor, probs_TE: Tensor, plan: DispatchPlan, num_rows: int
    ) -> Slots:
        """Push tokens and probabilities to their experts: rows [1, N, D], meta [1, N + E].

        Raises:
            ValueError: for tensors on the CPU or in fp64.
        """
        return self.push(tokens_TD, probs_TE, plan, num_rows)[0]

    def push(
        self, tokens_TD: Tensor, probs_TE: Tensor, plan: DispatchPlan, num_rows: int
    ) -> tuple[Slots, Tensor]:
        """Return what `prepare` returns, and where rows end, int32 [L, S]; it raises likewise."""
        _check(tokens_TD, probs_TE)
        shape = self._shape(plan, num_rows, tokens_TD)
        if shape not in self._buffers:
            in_flight = self._microbatches_in_flight
            self._buffers[shape] = DirectBuffers(
                self._group, shape, tokens_TD.device, microbatches_in_flight=in_flight
            )
        where = num_rows, self.num_sources, self._buffers[shape].key, True
        rows_ND, meta, offsets_LS = _push_rows(tokens_TD, probs_TE, *maps_of(plan), *where)
        return Slots(rows_MPD=rows_ND[None], meta_MPX=meta[None]), offsets_LS

    @nvtx_range("regroup")
    def arrange(self, incoming: Slots) -> ExpertInput:
        """Return the same rows as [N, D], with their probabilities and offsets."""
        assert incoming.meta_MPX is not None
        rows_ND, meta = incoming.rows_MPD.flatten(0, 1), incoming.meta_MPX.flatten()
        num_rows = rows_ND.shape[0]
        count_SL = meta[num_rows:].detach().view(self.num_sources, self.num_local_experts)
        kept_SL = count_SL.to(torch.int32)
        return ExpertInput(
            rows_ND=rows_ND,
            probs_N=meta[:num_rows],
            kept_SL=kept_SL,
            offsets_LS=running_offsets(kept_SL),
        )

    @nvtx_range("exchange")
    def combine(self, incoming: Slots, plan: DispatchPlan, offsets_LS: Tensor | None) -> Tensor:
        """Return packed rows to their tokens' ranks, and sum every token's slots: [T, D]."""
        assert offsets_LS is not None
        rows_ND = incoming.rows_MPD.flatten(0, 1)
        key = self.key(plan, rows_ND.shape[0], rows_ND)
        sum_TD, _ = return_rows(rows_ND, None, offsets_LS, *maps_of(plan), key)
        return sum_TD

    def key(self, plan: DispatchPlan, num_rows: int, rows: Tensor) -> str:
        """Return the key of the buffers that `prepare` used for rows of such a width and dtype."""
        return self._buffers[self._shape(plan, num_rows, rows)].key

    def _shape(self, plan: DispatchPlan, num_rows: int, rows_ND: Tensor) -> Shape:
        num_tokens, top_k = plan.slot_of_TK.shape
        return Shape(
            num_experts=plan.kept_E.shape[0],
            num_slots=plan.choice_of_slot_GP.numel(),
            num_rows=num_rows,
            width=rows_ND.shape[1],
            dtype=rows_ND.dtype,
            num_places=self.num_sources * num_tokens * top_k,
        )


def maps_of(plan: DispatchPlan) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Return what the ops read of a plan: maps, counts, P and X."""
    num_pools, pool_slots = plan.choice_of_slot_GP.shape
    experts_per_pool = plan.kept_E.shape[0] // num_pools
    maps = plan.slot_of_TK, plan.expert_of_TK, plan.kept_E
    return *maps, pool_slots, experts_per_pool


def _check(tokens_TD: Tensor, probs_TE: Tensor) -> None:
    if tokens_TD.dtype not in _DTYPES or probs_TE.dtype not in _DTYPES:
        raise ValueError(
            "tokens and probabilities must be bf16, fp16 or fp32 with exchange='direct', got "
            f"tokens in {tokens_TD.dtype} and probabilities in {probs_TE.dtype}; lower the dtype "
            "(that of probabilities is moe_router_dtype), or set exchange='alltoall'"
        )
    if tokens_TD.device.type != "cuda":
        raise ValueError(
            f"tokens must be on a GPU with exchange='direct', got tokens on {tokens_TD.device}; "
            "move them to a GPU, or set exchange='alltoall'"
        )


# The ops. A custom op takes no objects, so `key` is the string with which it finds the layer's
# `DirectBuffers`, as a name finds a process group. `saved` rows go to the layer's own buffer for
# this microbatch, others to the workspace, which the next layer overwrites.


@custom_op("padded_dispatch::push_rows", mutates_args=())
def _push_rows(
    tokens_TD: Tensor,
    probs_TE: Tensor | None,
    slot_of_TK: Tensor,
    expert_of_TK: Tensor,
    kept_E: Tensor,
    pool_slots: int,
    experts_per_pool: int,
    num_rows: int,
    num_ranks: int,
    key: str,
    saved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from padded_dispatch.kernels import direct

    buffers = find(key)
    workspace, rank = buffers.workspace, buffers.rank
    receive_buffer = buffers.next_receive_buffer() if saved else workspace.gradients
    rows_ND, meta = receive_buffer.take()
    num_experts = kept_E.shape[0]
    shift_E = torch.empty_like(kept_E)
    offsets_LS = kept_E.new_empty(num_experts // num_ranks, num_ranks)
    direct.push_counts(kept_E, workspace.table_R, rank)
    workspace.barrier()
    out = shift_E, offsets_LS, meta[num_rows:]
    direct.place_rows(workspace.table_RE, rank, *out, pool_slots, experts_per_pool)
    direct.push_tokens(
        tokens_TD.contiguous(),
        None if probs_TE is None else probs_TE.contiguous(),
        slot_of_TK,
        expert_of_TK,
        shift_E,
        receive_buffer.rows_R,
        receive_buffer.meta_R,
        receive_buffer.places_R,
        rank,
    )
    workspace.barrier()
    direct.copy_rows(rows_ND, receive_buffer.places(num_ranks, *slot_of_TK.shape), rank)
    return rows_ND, meta, offsets_LS


@_push_rows.register_fake
def _(tokens_TD, _probs, _slots, _experts, kept_E, _P, _X, num_rows, num_ranks, *_):
    num_experts = kept_E.shape[0]
    return (
        tokens_TD.new_empty(num_rows, tokens_TD.shape[1]),
        tokens_TD.new_empty(num_rows + num_experts, dtype=torch.float32),
        kept_E.new_empty(num_experts // num_ranks, num_ranks),
    )


@custom_op("padded_dispatch::return_rows", mutates_args=())
def return_rows(
    packed_ND: Tensor,
    probs_N: Tensor | None,
    offsets_LS: Tensor,
    slot_of_TK: Tensor,
    expert_of_TK: Tensor,
    kept_E: Tensor,
    pool_slots: int,
    experts_per_pool: int,
    key: str,
) -> tuple[Tensor, Tensor]:
    """Return packed rows home: the sums of every token's slots, [T, D], and numbers [T, E].

    Numbers beside the rows, `probs_N`, travel with them; without, the second result is empty.
    """
    from padded_dispatch.kernels import direct

    buffers = find(key)
    workspace = buffers.workspace
    probs_N = None if probs_N is None else probs_N.contiguous()
    returned = packed_ND.contiguous(), probs_N, offsets_LS
    to = workspace.slots_R, workspace.meta_R, buffers.rank, pool_slots, experts_per_pool
    workspace.barrier()
    direct.return_rows(*returned, *to)
    workspace.barrier()
    maps = slot_of_TK, expert_of_TK, kept_E, pool_slots
    return received(workspace, *maps, numbers=probs_N is not None)


def received(
    workspace: Workspace,
    slot_of_TK: Tensor,
    expert_of_TK: Tensor,
    kept_E: Tensor,
    pool_slots: int,
    *,
    numbers: bool,
) -> tuple[Tensor, Tensor]:
    """Return the sums of every token's slots, and the `numbers` of the slots, if any."""
    from padded_dispatch.kernels import rows

    sum_TD = rows.sum_rows(workspace.slots_QD, slot_of_TK)
    if not numbers:
        return sum_TD, sum_TD.new_empty(0, dtype=torch.float32)
    meta_GP, num_experts = workspace.meta_Q.view(-1, pool_slots), kept_E.shape[0]
    return sum_TD, rows.scatter_meta(meta_GP, slot_of_TK, expert_of_TK, pool_slots, num_experts)


@return_rows.register_fake
def _(packed_ND, probs_N, _offsets, slot_of_TK, _experts, kept_E, *_):
    num_tokens = slot_of_TK.shape[0]
    values = (0,) if probs_N is None else (num_tokens, kept_E.shape[0])
    return (
        packed_ND.new_empty(num_tokens, packed_ND.shape[1]),
        packed_ND.new_empty(values, dtype=torch.float32),
    )


def _push_setup(ctx, inputs, output) -> None:
    _, probs_TE, *maps, pool_slots, experts_per_pool, _, _, key, _ = inputs
    ctx.save_for_backward(output[2], *maps)
    ctx.where, ctx.dtype = (pool_slots, experts_per_pool, key), probs_TE.dtype


@nvtx_range("exchange backward")
def _push_backward(ctx, grad_ND, grad_meta, _):
    grads_N = grad_meta[: grad_ND.shape[0]]
    grad_TD, grad_TE = return_rows(grad_ND, grads_N, *ctx.saved_tensors, *ctx.where)
    return grad_TD, grad_TE.to(ctx.dtype), *(None,) * 9


def _return_setup(ctx, inputs, output) -> None:
    packed_ND, _, offsets_LS, *maps, pool_slots, experts_per_pool, key = inputs
    ctx.save_for_backward(*maps)
    num_ranks = offsets_LS.shape[1]
    ctx.where = pool_slots, experts_per_pool, packed_ND.shape[0], num_ranks, key


@nvtx_range("exchange backward")
def _return_backward(ctx, grad_TD, _):
    return push_gradients(grad_TD, *ctx.saved_tensors, *ctx.where), *(None,) * 8


def push_gradients(grad_TD: Tensor, *where: Any) -> Tensor:
    """Push the gradient of every token to its rows, [N, D], which last until the next such call.

    `where`: the arguments of `_push_rows` from the maps to the key.
    """
    return _push_rows(grad_TD, None, *where, False)[0]


_push_rows.register_autograd(_push_backward, setup_context=_push_setup)
return_rows.register_autograd(_return_backward, setup_context=_return_setup)
