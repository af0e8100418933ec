"""Products that store their rows at the tokens' ranks: the way home takes place inside them.

Rows travel home twice in a pass, and each time a product has just computed them: the experts'
output by fc2, and the gradients of received rows by fc1's backward pass. One needs links, the other
needs the tensor cores. So these two products do not write rows to memory from which another kernel
sends them. Each tile goes straight into slots of peers, while the next one is computed:

    find slots, product with stores, barrier, sum

instead of

    product, barrier, stores, barrier, sum

Bits are those of one after the other: a row is rounded where the product was rounded, a bias is
added as before, and the same kernel sums the same slots. A layer needs less memory, too: neither
the experts' output nor the gradients of received rows exist.

Why no slot is overwritten too early. The buffers are those of `padded_dispatch.exchange.direct`.
Slots, and the numbers beside them, were last read by the sum of an earlier return. Each return is
the second half of a forward or backward pass whose first half is a push, which ends with a barrier.
So a rank that stores rows has passed a barrier that all ranks reached after that sum, and needs no
other. This holds because between the push and the return of a pass its stream has no return of
another pass: halves of passes follow each other, as `direct` asks for gradients. Only Megatron's
combined schedule mixes them, and it does not fuse. Recomputation, evaluations and other layers, of
the same buffers or others, are whole halves. So are backward passes of layers side by side, because
autograd takes the node that was made last. A pass that breaks off, or whose tokens need no
gradient, leaves a push without a return, which does no harm.

On 2 H200, EP 2, factor 1.25, microseconds in a graph, barriers and sums included (commit a343413,
notebooks/results/fused.json):

                                                  product     home     both    fused
    Qwen3, 4,096 tokens, fc2                          178      238      416      256
                         gradients of fc1's rows      331      246      572      406
           512 tokens,   fc2                           60       36      101       73
                         gradients of fc1's rows      109       39      154      123
    GPT-OSS, 4,096,      fc2                          416      174      589      504
                         gradients of fc1's rows      923      180    1,076      975
             512,        fc2                          106       28      140      117
                         gradients of fc1's rows      191       30      225      208
    DeepSeek-V3, 4,096,  fc2                        1,899      795    2,485    2,173
                         gradients of fc1's rows    3,755      800    4,419    4,174
                 512,    fc2                          980      107    1,094    1,014
                         gradients of fc1's rows    1,835      111    1,966    2,046

What is left beside the product are sums (33 us for Qwen3, 25 for GPT-OSS), a barrier (4), addresses
(5), and stores that wait for the link: fc2 of Qwen3 sends 67 MB, which take a link 186 us, in about
the time of its product. There is no rule, since one case of twelve is slower, by 4 %, and its layer
is not. Also tried (commit e8c3699, a script that was not kept): tiles stored in four parts instead
of two, and stores that pass the cache by, which are as fast; tiles of 128 x 128, which are slower.

A layer's forward and backward pass in a graph, one after the other and fused, milliseconds (commit
a343413, 2 H200, EP 2):

    Qwen3, factor 1.0                   2.47   2.14      added to fp32   2.93   2.62
    Qwen3, factor 1.25                  2.59   2.24                      3.04   2.72
    Qwen3, factor 1.25, 512 tokens      0.90   0.85                      1.43   1.39
    GPT-OSS, factor 1.0                 4.71   4.68                      5.34   5.26
    GPT-OSS, factor 1.25                5.03   4.95                      5.57   5.46
    GPT-OSS, factor 1.25, 512 tokens    1.25   1.20                      1.94   1.92
    DeepSeek-V3, factor 1.0            18.20  17.80                     26.74  26.35
    DeepSeek-V3, factor 1.25           20.84  20.30                     28.83  28.37

Where products are large, the device is at its limit of power: with the links busy at the same time,
its clock falls from 1.98 to 1.6 GHz, and GPT-OSS gets less than the first table promises.

Before, gradients travelled home on a second stream beside the product of fc1's weight gradient,
which left 11 multiprocessors to the stores. That hid less, slowed down that product, and did
nothing for the forward pass: a layer of Qwen3 took 2.26 ms, GPT-OSS 4.65, and one after the other
2.47 and 4.72 (commit 80b3b2b).

Autograd. The pass of `FusedLinears` leaves out the ops between the tokens and fc1's result, and
between fc2's input and the tokens: `first` and `second` are their only nodes. `first` goes
from tokens and probabilities to fc1's result, though the forward pass has pushed the rows before,
and `second` from fc2's input to the sums. Their backward passes are

    second   push of gradients, then gradients of fc2's rows, weight, bias and probabilities
    first    fc1's product that sends gradients of rows home, then the gradient of its weight

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
from padded_dispatch.exchange.direct import (
    DirectExchange,
    maps_of,
    push_gradients,
    received,
)
from padded_dispatch.exchange.symmetric_memory import find
from padded_dispatch.ops.grouped import (
    check_on_gpu,
    linear_by_expert,
    linear_gradients,
    weight_gradient,
)
from padded_dispatch.ops.plan import DispatchPlan
from padded_dispatch.utils.nvtx import nvtx_range


@dataclass(frozen=True, kw_only=True)
class FusedLinears:
    """The linears of the experts in one pass, whose rows `prepare` has pushed.

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
        tiles: Tensor,
        sums_LGD: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return fc1's result, [N, G], and the probabilities of the rows, [N].

        Args:
            rows_ND: what the tokens became; has no gradient of its own.
            probs_N: likewise.
            weight_LGD: as in `grouped_linear`, and so are the others.
            offsets_L: see there.
            tiles: see there.
            sums_LGD: see there.
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
        tiles: Tensor,
        sums_LDF: Tensor | None,
    ) -> Tensor:
        """Return the sum of every token's rows of fc2's result, [T, D].

        The arguments are those of `grouped_linear`; `probs_N` scales the bias only.
        """
        given = hidden_NF, weight_LDF, bias_LD, probs_N, offsets_L, tiles, sums_LDF
        return _Second.apply(*given, *self.home)


def prepare(
    exchange: DirectExchange,
    tokens_TD: Tensor,
    probs_TE: Tensor,
    plan: DispatchPlan,
    num_rows: int,
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

    On CPUs the rows leave once they are computed.

    Args:
        rows_NI: as in `grouped_linear`, and so are the others up to `tiles`.
        weight_LOI: see there.
        bias_LO: see there.
        weights_N: scale the bias; there they are `probs_N`.
        probs_N: as in `return_rows`: numbers that travel beside the rows.
        offsets_L: see above.
        tiles: see above.
        offsets_LS: as in `return_rows`, and so are all behind it.
        slot_of_TK: see there.
        expert_of_TK: see there.
        kept_E: see there.
        pool_slots: see there.
        experts_per_pool: see there.
        key: see there.
    """
    from padded_dispatch.kernels import direct

    buffers = find(key)
    workspace = buffers.workspace
    out_NO = linear_by_expert(rows_NI, weight_LOI, bias_LO, weights_N, offsets_L, tiles)
    returned = out_NO, None if probs_N is None else probs_N.contiguous(), offsets_LS
    to = workspace.slots_R, workspace.meta_R, buffers.rank, pool_slots, experts_per_pool
    direct.return_rows(*returned, *to)
    workspace.barrier()
    maps = slot_of_TK, expert_of_TK, kept_E, pool_slots
    return received(workspace, *maps, numbers=probs_N is not None)


@return_product.register_kernel("cuda")
def _return_product_on_gpu(
    rows_NI,
    weight_LOI,
    bias_LO,
    weights_N,
    probs_N,
    offsets_L,
    tiles,
    offsets_LS,
    slot_of_TK,
    expert_of_TK,
    kept_E,
    pool_slots,
    experts_per_pool,
    key,
):
    from padded_dispatch.kernels import direct, gemm

    check_on_gpu(rows_NI, weight_LOI)
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
