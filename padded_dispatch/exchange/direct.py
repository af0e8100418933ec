"""The exchange by direct stores: GPUs of one host write rows into each other's memory.

Only real rows travel. They arrive where the experts read them, packed by (expert, source, slot), so
there is no gather before the exchange and no regrouping after it. Two ops do all the work, and each
is the other's transpose:

    push_rows     tokens to their experts:      counts, barrier, offsets, rows, barrier
    return_rows   packed rows to their tokens:  barrier, rows into slots, barrier, sum

The forward of dispatch is a push, the forward of combine a return; backward, the other way round.
Probabilities, or their gradients, travel with the rows.

Why no buffer is overwritten too early. Everything that one call writes to peers' memory lies
between two barriers of all ranks on the current stream. The first barrier shows that all ranks have
finished with the previous contents, since their uses came before on their streams. The second shows
that all rows have arrived. A call therefore does not depend on the calls before it: they may belong
to another layer, a replayed graph, an evaluation, or a recomputation. The counts are the one
exception: ranks write them before the first barrier. Their last readers (`place_rows`) finished
before the second barrier of the previous push, which this rank has passed. Captured barriers reset
themselves. Every rank takes part in every call, also without rows.

What the caller must guarantee: all calls of a process are on one stream, or ordered as if they
were; what the forward pass received is not used after the backward pass, and gradients not after
the next layer's backward. If a peer dies or never comes, the others wait in a barrier, for 10
minutes as with NCCL; then each prints the missing rank's number in the group, and its device fails.
In eager the ranks compare shapes on the host before each call, and that comparison fails at once if
a peer has died.

Sums equal those of `AllToAllExchange` bit by bit: the same kernel adds the same slots.

Tried and left out:

- Gradients that return as soon as fc1's input has its own, on a second stream beside fc1's weight
  gradient (commit f65f1d6, 4 H200, Qwen3-30B-A3B). These three kernels took 958 us instead of 969
  at factor 1.0 and 1,009 instead of 1,008 at 2.0. The GEMM's programs fill the device until they
  end, and the programs that store wait for a free place, whatever their stream's priority.
- Experts in two halves, each with its own exchange on its own stream, so that rows of one half
  travel during the GEMMs of the other, both ways, forward and backward (2 H200, EP 2, factor 1.25,
  a script that was not kept). All of it in a graph took 2.68 ms instead of 2.76 for Qwen3-30B-A3B
  and 5.04 instead of 5.11 for GPT-OSS-20B; one half after the other took 2.94 and 5.28. It took
  longer with fewer programs that store, or with multiprocessors kept from the GEMMs, and it gained
  nothing with the all-to-all. Too little for two streams through all six stages.
- Shared experts during the exchange: whole steps of DeepSeek-V2-Lite's shape took 51.0 ms instead
  of 50.6, with the all-to-all 54.1 instead of 53.1 (commit 29e73fb, 2 H200). It is Megatron's
  option, so it stays available; its default is off.

Letters: T tokens, E experts, R ranks and S = R sources, L = E / R local experts, C slots per
(source, expert), D hidden size, N = E * C rows, the most that a rank's experts can receive.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op

from padded_dispatch.config import require
from padded_dispatch.exchange import ExpertInput, PackedAtOnce, Slots
from padded_dispatch.exchange.symmetric_memory import DirectBuffers, Shape, check_group, find
from padded_dispatch.ops.plan import DispatchPlan
from padded_dispatch.ops.rows import running_offsets
from padded_dispatch.utils.nvtx import nvtx_range

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class DirectExchange(PackedAtOnce):
    """`Exchange` by direct stores, for experts that take packed rows.

    Between the stages, tensors have the shapes of `AllToAllExchange`. From `prepare` to `arrange`,
    rows [E, C, D] are packed already, and meta [E, C + 1], flattened, is the probabilities of the N
    rows followed by the counts [S, L]. From `disarrange` to `combine`, rows are the experts' packed
    output.

    Args:
        num_local_experts: experts on this rank (L).
        group: the expert-parallel group, all on one host.
        etp_group: None, or a group of one rank.
        microbatches_in_flight: the most microbatches whose forward is done and whose backward is
            not.

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
    def prepare(self, tokens_TD: Tensor, probs_TE: Tensor, plan: DispatchPlan) -> Slots:
        """Push tokens and probabilities to their experts: rows [E, C, D], meta [E, C + 1].

        Raises:
            ValueError: for tensors on the CPU or in fp64.
        """
        _check(tokens_TD, probs_TE)
        num_experts, capacity = plan.choice_of_slot_EC.shape
        shape = Shape(
            num_experts=num_experts,
            capacity=capacity,
            width=tokens_TD.shape[1],
            dtype=tokens_TD.dtype,
        )
        if shape not in self._buffers:
            self._buffers[shape] = DirectBuffers(
                self._group,
                shape,
                tokens_TD.device,
                microbatches_in_flight=self._microbatches_in_flight,
            )
        rows_ND, meta, _ = _push_rows(
            tokens_TD,
            probs_TE,
            plan.slot_of_TK,
            plan.kept_E,
            capacity,
            self.num_sources,
            self._buffers[shape].key,
            True,
        )
        return Slots(
            rows_MCD=rows_ND.unflatten(0, (num_experts, capacity)),
            meta_MC1=meta.unflatten(0, (num_experts, capacity + 1)),
        )

    @nvtx_range("regroup")
    def arrange(self, incoming: Slots) -> ExpertInput:
        """Return the same rows as [N, D], with their probabilities and offsets."""
        assert incoming.meta_MC1 is not None
        rows_ND, meta = incoming.rows_MCD.flatten(0, 1), incoming.meta_MC1.flatten()
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
        num_experts, capacity, width = incoming.rows_MCD.shape
        dtype = incoming.rows_MCD.dtype
        shape = Shape(num_experts=num_experts, capacity=capacity, width=width, dtype=dtype)
        sum_TD, _ = _return_rows(
            incoming.rows_MCD.flatten(0, 1),
            None,
            offsets_LS,
            plan.slot_of_TK,
            plan.kept_E,
            capacity,
            self._buffers[shape].key,
        )
        return sum_TD


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
    kept_E: Tensor,
    capacity: int,
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
    start_E = torch.empty_like(kept_E)
    offsets_LS = kept_E.new_empty(num_experts // num_ranks, num_ranks)
    direct.push_counts(kept_E, workspace.table_R, rank)
    workspace.barrier()
    direct.place_rows(workspace.table_RE, rank, start_E, offsets_LS, meta[rows_ND.shape[0] :])
    direct.push_rows(
        tokens_TD.contiguous(),
        None if probs_TE is None else probs_TE.contiguous(),
        slot_of_TK,
        start_E,
        receive_buffer.rows_R,
        receive_buffer.meta_R,
        capacity,
    )
    workspace.barrier()
    return rows_ND, meta, offsets_LS


@_push_rows.register_fake
def _(tokens_TD, probs_TE, slot_of_TK, kept_E, capacity, num_ranks, key, saved):
    num_experts = kept_E.shape[0]
    num_rows = num_experts * capacity
    return (
        tokens_TD.new_empty(num_rows, tokens_TD.shape[1]),
        tokens_TD.new_empty(num_rows + num_experts, dtype=torch.float32),
        kept_E.new_empty(num_experts // num_ranks, num_ranks),
    )


@custom_op("padded_dispatch::return_rows", mutates_args=())
def _return_rows(
    packed_ND: Tensor,
    probs_N: Tensor | None,
    offsets_LS: Tensor,
    slot_of_TK: Tensor,
    kept_E: Tensor,
    capacity: int,
    key: str,
) -> tuple[Tensor, Tensor]:
    from padded_dispatch.kernels import direct, rows

    buffers = find(key)
    workspace = buffers.workspace
    workspace.barrier()
    direct.return_rows(
        packed_ND.contiguous(),
        None if probs_N is None else probs_N.contiguous(),
        offsets_LS,
        workspace.slots_R,
        workspace.meta_R,
        buffers.rank,
        capacity,
    )
    workspace.barrier()
    sum_TD = rows.sum_rows(workspace.slots_ECD.flatten(0, 1), slot_of_TK)
    if probs_N is None:
        return sum_TD, packed_ND.new_empty(0, dtype=torch.float32)
    return sum_TD, rows.scatter_meta(workspace.meta_EC1, slot_of_TK)


@_return_rows.register_fake
def _(packed_ND, probs_N, offsets_LS, slot_of_TK, kept_E, capacity, key):
    num_tokens = slot_of_TK.shape[0]
    values = (0,) if probs_N is None else (num_tokens, kept_E.shape[0])
    return (
        packed_ND.new_empty(num_tokens, packed_ND.shape[1]),
        packed_ND.new_empty(values, dtype=torch.float32),
    )


def _push_setup(ctx, inputs, output) -> None:
    _, probs_TE, slot_of_TK, kept_E, capacity, _, key, _ = inputs
    ctx.save_for_backward(output[2], slot_of_TK, kept_E)
    ctx.capacity, ctx.key, ctx.dtype = capacity, key, probs_TE.dtype


@nvtx_range("exchange backward")
def _push_backward(ctx, grad_ND, grad_meta, _):
    grads_N = grad_meta[: grad_ND.shape[0]]
    grad_TD, grad_TE = _return_rows(grad_ND, grads_N, *ctx.saved_tensors, ctx.capacity, ctx.key)
    return grad_TD, grad_TE.to(ctx.dtype), *(None,) * 6


def _return_setup(ctx, inputs, output) -> None:
    _, _, offsets_LS, slot_of_TK, kept_E, capacity, key = inputs
    ctx.save_for_backward(slot_of_TK, kept_E)
    ctx.capacity, ctx.num_ranks, ctx.key = capacity, offsets_LS.shape[1], key


@nvtx_range("exchange backward")
def _return_backward(ctx, grad_TD, _):
    where = ctx.capacity, ctx.num_ranks, ctx.key, False
    grad_ND, _, _ = _push_rows(grad_TD, None, *ctx.saved_tensors, *where)
    return grad_ND, *(None,) * 6


_push_rows.register_autograd(_push_backward, setup_context=_push_setup)
_return_rows.register_autograd(_return_backward, setup_context=_return_setup)
