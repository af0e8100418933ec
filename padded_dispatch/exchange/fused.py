"""Products that store their rows at the tokens' ranks: the way home takes place inside them.

Rows travel home twice in a pass, and each time a product has just computed them: the experts'
output by fc2, and the gradients of received rows by fc1's backward pass. One needs links, the other
needs the tensor cores. So each tile goes straight into slots of peers, while the next one is
computed: find slots, product with stores, barrier, sum. Bits are those of one after the other: a
row is rounded where the product was rounded, a bias is added as before, and the same kernel sums
the same slots. Neither the experts' output nor the gradients of received rows exist in memory.

Why no slot is overwritten too early. The buffers are those of `padded_dispatch.exchange.direct`.
Each return is the second half of a forward or backward pass whose first half is a push, which ends
with a barrier. So a rank that stores rows has passed a barrier that all ranks reached after the sum
of an earlier return, the last reader of the slots. This holds because between the push and the
return of a pass its stream has no return of another pass: only Megatron's combined schedule mixes
them, and it does not fuse. (Autograd takes the node that was made last, so backward passes of
layers side by side are whole halves, too.) A pass that breaks off leaves a push without a return,
which does no harm. notebooks/results/LOG.md has times and what else was tried.

Letters: T tokens, K experts per token, E experts, L experts on this rank, S sources, D and F hidden
and ffn size, G columns of fc1's result, N rows of this rank's experts, I and O columns of rows that
go into a linear and come out.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from padded_dispatch.exchange import Slots
from padded_dispatch.exchange.direct import DirectExchange, maps_of, push_gradients, received
from padded_dispatch.exchange.symmetric_memory import find
from padded_dispatch.experts.grouped import (
    check_on_gpu,
    linear_by_expert,
    linear_gradients,
    weight_gradient,
)
from padded_dispatch.routing.plan import DispatchPlan
from padded_dispatch.utils.nvtx import nvtx_range


@dataclass(frozen=True, kw_only=True)
class FusedLinears:
    """The linears of the experts in one pass, whose rows `prepare` has pushed.

    `first` goes from tokens and probabilities to fc1's result, and `second` from fc2's input to the
    sums; the ops that moved rows are no nodes. Their backward passes are

        second   push of gradients, then gradients of fc2's rows, weight, bias and probabilities
        first    fc1's product that sends gradients of rows home, then the gradient of its weight

    Attributes:
        tokens_TD: what was pushed, and gets the gradients of the rows.
        probs_TE: likewise.
        home: what `return_product` reads from `offsets_LS` on.
    """

    tokens_TD: Tensor
    probs_TE: Tensor
    home: tuple[Any, ...]

    def first(
        self,
        rows_ND: Tensor,
        probs_N: Tensor,
        weight_LGD: Tensor,
        offsets_L: Tensor,
        tiles: Tensor | None,
        sums_LGD: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return fc1's result, [N, G], and the probabilities of the rows, [N].

        Arguments as of `grouped_linear`; rows and probabilities have no gradient of their own.
        """
        given = rows_ND, probs_N, offsets_L, tiles, sums_LGD
        return _First.apply(self.tokens_TD, self.probs_TE, weight_LGD, *given, *self.home)

    def second(
        self,
        hidden_NF: Tensor,
        probs_N: Tensor,
        weight_LDF: Tensor,
        bias_LD: Tensor | None,
        offsets_L: Tensor,
        tiles: Tensor | None,
        sums_LDF: Tensor | None,
    ) -> Tensor:
        """Return the sum of every token's rows of fc2's result, [T, D].

        The arguments are those of `grouped_linear`; `probs_N` scales the bias only.
        """
        given = hidden_NF, weight_LDF, bias_LD, probs_N, offsets_L, tiles, sums_LDF
        return _Second.apply(*given, *self.home)


def prepare(
    exchange: DirectExchange, tokens_TD: Tensor, probs_TE: Tensor, plan: DispatchPlan, num_rows: int
) -> tuple[Slots, FusedLinears]:
    """Return `exchange.prepare` of the arguments, without gradients, and what has them instead."""
    with torch.no_grad():
        slots, offsets_LS = exchange.push(tokens_TD, probs_TE, plan, num_rows)
    key = exchange.key(plan, num_rows, tokens_TD)
    home = offsets_LS, *maps_of(plan), key
    return slots, FusedLinears(tokens_TD=tokens_TD, probs_TE=probs_TE, home=home)


@custom_op("padded_dispatch::return_product", mutates_args=())
def return_product(
    rows_NI: Tensor,
    weight_LOI: Tensor,
    bias_LO: Tensor | None,
    weights_N: Tensor | None,
    probs_N: Tensor | None,
    offsets_L: Tensor,
    tiles: Tensor | None,
    offsets_LS: Tensor,
    slot_of_TK: Tensor,
    expert_of_TK: Tensor,
    kept_E: Tensor,
    pool_slots: int,
    experts_per_pool: int,
    key: str,
) -> tuple[Tensor, Tensor]:
    """Return `exchange.direct.return_rows` of a linear's result; its first barrier is left out.

    Up to `tiles` the arguments are those of `grouped_linear`, but for `weights_N`, which scale the
    bias, and `probs_N`, which travel beside the rows; the others are those of `return_rows`. On
    CPUs the rows leave once they are computed.
    """
    from padded_dispatch.kernels import direct

    buffers = find(key)
    workspace = buffers.workspace
    out_NO = linear_by_expert(rows_NI, weight_LOI, bias_LO, weights_N, offsets_L, tiles)
    beside_N = None if probs_N is None else probs_N.contiguous()
    to = workspace.slots_R, workspace.meta_R, buffers.rank, pool_slots, experts_per_pool
    direct.return_rows(out_NO, beside_N, offsets_LS, *to)
    workspace.barrier()
    maps = slot_of_TK, expert_of_TK, kept_E, pool_slots
    return received(workspace, *maps, numbers=probs_N is not None)


@return_product.register_kernel("cuda")
def _return_product_on_gpu(
    rows_NI, weight_LOI, bias_LO, weights_N, probs_N, offsets_L, tiles, offsets_LS, *home
):
    from padded_dispatch.kernels import direct, gemm

    check_on_gpu(rows_NI, weight_LOI)
    slot_of_TK, expert_of_TK, kept_E, pool_slots, experts_per_pool, key = home
    buffers = find(key)
    workspace = buffers.workspace
    at_N = torch.empty(rows_NI.shape[0], dtype=torch.int64, device=rows_NI.device)
    direct.find_slots(
        None if probs_N is None else probs_N.contiguous(),
        offsets_LS,
        workspace.slots_R,
        workspace.meta_R,
        buffers.rank,
        pool_slots,
        experts_per_pool,
        row_bytes=weight_LOI.shape[1] * rows_NI.element_size(),
        at_N=at_N,
    )
    gemm.rows_times_weights_at(
        rows_NI.contiguous(),
        weight_LOI,
        offsets_L,
        at_N,
        bias_LO=None if bias_LO is None else bias_LO.contiguous(),
        probs_N=None if weights_N is None else weights_N.contiguous(),
        table=tiles,
    )
    workspace.barrier()
    maps = slot_of_TK, expert_of_TK, kept_E, pool_slots
    return received(workspace, *maps, numbers=probs_N is not None)


@return_product.register_fake
def _(rows_NI, weight_LOI, _b, _w, probs_N, _o, _t, _offsets, slot_of_TK, _e, kept_E, *_):
    num_tokens = slot_of_TK.shape[0]
    values = (0,) if probs_N is None else (num_tokens, kept_E.shape[0])
    return (
        rows_NI.new_empty(num_tokens, weight_LOI.shape[1]),
        rows_NI.new_empty(values, dtype=torch.float32),
    )


class _First(torch.autograd.Function):
    """fc1 of rows that are pushed already; its backward pass sends their gradients home."""

    @staticmethod
    def forward(
        ctx, tokens_TD, probs_TE, weight_LGD, rows_ND, probs_N, offsets_L, tiles, sums_LGD, *home
    ):
        *maps, pool_slots, experts_per_pool, key = home
        saved = rows_ND if ctx.needs_input_grad[2] else None, weight_LGD, offsets_L, tiles
        ctx.save_for_backward(*saved, *maps)
        ctx.where = pool_slots, experts_per_pool, key
        ctx.sums_LGD, ctx.dtype = sums_LGD, probs_TE.dtype
        fc1_NG = linear_by_expert(rows_ND, weight_LGD, None, None, offsets_L, tiles)
        return fc1_NG, probs_N.view_as(probs_N)

    @staticmethod
    @nvtx_range("exchange and experts backward")
    def backward(ctx, grad_NG, grad_N):  # pyright: ignore[reportIncompatibleMethodOverride]
        rows_ND, weight_LGD, offsets_L, tiles, *maps = ctx.saved_tensors
        needs_tokens, needs_probs, needs_weight, *_ = ctx.needs_input_grad
        grad_TD = grad_TE = grad_LGD = None
        if needs_tokens or needs_probs:
            linear = grad_NG, weight_LGD.transpose(1, 2), None, None, grad_N, offsets_L, tiles
            grad_TD, grad_TE = return_product(*linear, *maps, *ctx.where)
            grad_TE = grad_TE.to(ctx.dtype)
        if needs_weight:
            grad_LGD = weight_gradient(grad_NG, rows_ND, offsets_L, ctx.sums_LGD)
        return grad_TD, grad_TE, grad_LGD, *(None,) * 12


class _Second(torch.autograd.Function):
    """fc2, whose rows go home; its backward pass pushes their gradients."""

    @staticmethod
    def forward(ctx, hidden_NF, weight_LDF, bias_LD, probs_N, offsets_L, tiles, sums_LDF, *home):
        *maps, pool_slots, experts_per_pool, key = home
        hidden = hidden_NF if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(hidden, weight_LDF, bias_LD, probs_N, offsets_L, tiles, *maps[1:])
        offsets_LS = maps[0]
        ctx.where = pool_slots, experts_per_pool, hidden_NF.shape[0], offsets_LS.shape[1], key
        ctx.sums_LDF = sums_LDF
        linear = hidden_NF, weight_LDF, bias_LD, probs_N, None, offsets_L, tiles
        return return_product(*linear, *home)[0]

    @staticmethod
    @nvtx_range("exchange and experts backward")
    def backward(ctx, grad_TD):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_NF, weight_LDF, bias_LD, probs_N, offsets_L, tiles, *maps = ctx.saved_tensors
        grad_ND = push_gradients(grad_TD, *maps, *ctx.where)
        linear = hidden_NF, weight_LDF, bias_LD, probs_N, offsets_L, tiles, ctx.sums_LDF
        grads = linear_gradients(ctx.needs_input_grad, grad_ND, *linear)
        return *grads, *(None,) * 10
