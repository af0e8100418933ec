"""The exchange by direct stores: GPUs of one host write rows into each other's memory.

Only real rows travel, and they land where the experts read them, packed by (expert, source, slot):
nothing is gathered before, and nothing regrouped behind. There are two ops, each other's transpose.

    push   tokens to their experts:   counts, barrier, places, rows, barrier
    home   packed rows to their token: barrier, rows into slots, barrier, sum

The forward of dispatch is a push, the forward of combine a home; backward, the other way round.
Beside the rows travel probabilities, or their gradients.

Why nothing is overwritten too early. All that one call does to peers' memory lies between two
barriers of all ranks on the current stream. The first says that everyone is done with whatever was
there, since all uses of it came before on their streams; the second that everything has arrived. A
call therefore needs to know nothing of the calls before it: they may be another layer's, a replayed
graph's, an evaluation's, or a recomputation's. The one exception are the counts, which are told
before the first barrier: their last readers (`place_rows`) were done before the second barrier of
the push before, which this rank has passed. Captured barriers reset themselves; every rank takes
part in every call, also without rows.

What it asks for: all calls of a process are on one stream, or ordered as if they were; what the
forward pass received is not used after the backward pass, and gradients not after the next layer's.
A peer that has died or never comes leaves the others in a barrier. In a replay they wait for 45
seconds, then each prints for which rank of the group, and its device fails. (So a rank that pauses
for longer, to write a checkpoint alone, say, lets the others wait on the host meanwhile.) In eager
it is 10 minutes, but ranks agree on the host before each call, which notices a death at once.

Sums are those of `CollectiveExchange`, bit by bit: the same kernel adds the same slots.

Tried and left out:

- Gradients that start home when fc1's input has its own, on a second stream beside fc1's weight
  gradient (commit f65f1d6, 4 H200, Qwen3-30B-A3B). These three kernels took 958 us instead of 969
  at factor 1.0 and 1,009 instead of 1,008 at 2.0: the product's programs fill the device until they
  end, and those that store wait for a place, whatever their stream's priority.
- Experts in two halves, each with an exchange of its own on a stream of its own, so that rows of
  one travel beside products of the other, both ways, forward and backward (2 H200, EP 2, factor
  1.25, a script without a file). All of it in a graph took 2.68 ms instead of 2.76 for
  Qwen3-30B-A3B and 5.04 instead of 5.11 for GPT-OSS-20B; one half after the other 2.94 and 5.28.
  With fewer programs that store, or multiprocessors kept from the products, it took longer; with
  the all-to-all it gained nothing. Too little for two streams through all six stages.
- Shared experts beside the exchange: whole steps of DeepSeek-V2-Lite's shape took 51.0 ms instead
  of 50.6, with the all-to-all 54.1 instead of 53.1 (commit 29e73fb, 2 H200). It stays an option,
  being Megatron's, and is off where nobody asks for it.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op

from padded_dispatch.exchange import ExpertInput, PackedAtOnce, Slots
from padded_dispatch.exchange.symmetric_memory import DirectBuffers, Shape, check_group, find
from padded_dispatch.ops.plan import DispatchPlan
from padded_dispatch.ops.rows import running_offsets
from padded_dispatch.utils.nvtx import nvtx_range

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class DirectExchange(PackedAtOnce):
    """`Exchange` by direct stores, for experts that take packed rows.

    What passes between the stages has the shapes of `CollectiveExchange`. On the way there, rows
    [E, C, D] are packed already; the side [E, C + 1] is, read flat, the probabilities of the N rows
    and then the counts [S, L]. On the way back, rows are the experts' packed output as it is.

    Args:
        num_local_experts: experts on this rank (L).
        group: the expert-parallel group, all on one host.
        etp_group: must be None, or have one rank.
        microbatches_in_flight: microbatches whose forward is done and whose backward is not, at most.

    Raises:
        ValueError: on all ranks, where it is not possible, with the reason.
    """

    def __init__(
        self,
        num_local_experts: int,
        group: dist.ProcessGroup | None,
        etp_group: dist.ProcessGroup | None = None,
        *,
        microbatches_in_flight: int = 1,
    ) -> None:
        if etp_group is not None and etp_group.size() > 1:
            raise ValueError(
                f"exchange='direct' is not possible with {etp_group.size()} ranks that split every "
                "expert; set expert_tensor_parallel_size=1 or exchange='alltoall'"
            )
        self._group = check_group(group)
        self.num_local_experts = num_local_experts
        self.num_sources = self._group.size()
        self._in_flight = microbatches_in_flight
        self._buffers: dict[Shape, DirectBuffers] = {}

    @nvtx_range("exchange")
    def prepare(self, tokens_TD: Tensor, probs_TE: Tensor, plan: DispatchPlan) -> Slots:
        """Tokens and probabilities to their experts: rows [E, C, D], side [E, C + 1].

        Raises:
            ValueError: for tensors that are not on a GPU, or in fp64.
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
                self._group, shape, tokens_TD.device, microbatches_in_flight=self._in_flight
            )
        rows_ND, meta, _ = _push(
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
        """The same rows, [N, D], and where they end."""
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
        """Packed rows home, and the sum of its slots for every token, [T, D]."""
        assert offsets_LS is not None
        num_experts, capacity, width = incoming.rows_MCD.shape
        dtype = incoming.rows_MCD.dtype
        shape = Shape(num_experts=num_experts, capacity=capacity, width=width, dtype=dtype)
        sum_TD, _ = _home(
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
            f"tokens in {tokens_TD.dtype} with probabilities in {probs_TE.dtype} are not possible "
            "with exchange='direct': use at most fp32 (moe_router_dtype), or exchange='alltoall'"
        )
    if tokens_TD.device.type != "cuda":
        raise ValueError(
            f"tokens on {tokens_TD.device} are not possible with exchange='direct': move them to a "
            "GPU, or set exchange='alltoall'"
        )


# The ops. `key` finds buffers as a name finds a process group; `saved`: into the layer's own
# buffers, else into those that the next layer overwrites.


@custom_op("padded_dispatch::push", mutates_args=())
def _push(
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
    transient, rank = buffers.transient, buffers.rank
    landing = buffers.next_landing() if saved else transient.gradients
    rows_ND, meta = landing.take()
    num_experts = kept_E.shape[0]
    start_E = torch.empty_like(kept_E)
    offsets_LS = kept_E.new_empty(num_experts // num_ranks, num_ranks)
    direct.push_counts(kept_E, transient.table_R, rank)
    transient.barrier()
    direct.place_rows(transient.table_RE, rank, start_E, offsets_LS, meta[rows_ND.shape[0] :])
    direct.push_rows(
        tokens_TD.contiguous(),
        None if probs_TE is None else probs_TE.contiguous(),
        slot_of_TK,
        start_E,
        landing.rows_R,
        landing.meta_R,
        capacity,
    )
    transient.barrier()
    return rows_ND, meta, offsets_LS


@_push.register_fake
def _(tokens_TD, probs_TE, slot_of_TK, kept_E, capacity, num_ranks, key, saved):
    num_experts = kept_E.shape[0]
    num_rows = num_experts * capacity
    return (
        tokens_TD.new_empty(num_rows, tokens_TD.shape[1]),
        tokens_TD.new_empty(num_rows + num_experts, dtype=torch.float32),
        kept_E.new_empty(num_experts // num_ranks, num_ranks),
    )


@custom_op("padded_dispatch::home", mutates_args=())
def _home(
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
    transient = buffers.transient
    transient.barrier()
    direct.return_rows(
        packed_ND.contiguous(),
        None if probs_N is None else probs_N.contiguous(),
        offsets_LS,
        transient.slots_R,
        transient.meta_R,
        buffers.rank,
        capacity,
    )
    transient.barrier()
    sum_TD = rows.sum_rows(transient.slots_ECD.flatten(0, 1), slot_of_TK)
    if probs_N is None:
        return sum_TD, packed_ND.new_empty(0, dtype=torch.float32)
    return sum_TD, rows.scatter_meta(transient.meta_EC1, slot_of_TK)


@_home.register_fake
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
    grad_TD, grad_TE = _home(grad_ND, grads_N, *ctx.saved_tensors, ctx.capacity, ctx.key)
    return grad_TD, grad_TE.to(ctx.dtype), *(None,) * 6


def _home_setup(ctx, inputs, output) -> None:
    _, _, offsets_LS, slot_of_TK, kept_E, capacity, key = inputs
    ctx.save_for_backward(slot_of_TK, kept_E)
    ctx.capacity, ctx.num_ranks, ctx.key = capacity, offsets_LS.shape[1], key


@nvtx_range("exchange backward")
def _home_backward(ctx, grad_TD, _):
    where = ctx.capacity, ctx.num_ranks, ctx.key, False
    grad_ND, _, _ = _push(grad_TD, None, *ctx.saved_tensors, *where)
    return grad_ND, *(None,) * 6


_push.register_autograd(_push_backward, setup_context=_push_setup)
_home.register_autograd(_home_backward, setup_context=_home_setup)
