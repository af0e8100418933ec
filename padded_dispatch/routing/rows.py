"""Rows: copy every token into its slots, sum the slots of every token, and close the gaps between.

`gather_rows` gives every slot its token's row; `combine_rows` sums the slots of every token. Each
is the transpose of the other, so the backward of one calls the other. Every element of a result has
one writer: no order of writes could change a sum. Both follow the plan's `slot_of_TK`; of its
inverse, `choice_of_slot_GP`, they read only the shape, and, to write zeros, which slots are empty.

`pack_rows` takes received rows out of their pools and closes the gaps; `unpack_rows`, its
transpose, puts them back. Rows behind the last packed row are unspecified, forward and backward. A
received pool holds the rows of X experts from one source, by expert, in its first slots, so the
counts alone say where its rows of an expert begin. With one source, nothing lies between slots and
packed rows: `gather_packed` and `combine_packed` are the same ops with packed rows for slots.

An empty slot or a missing choice is -1. The torch bodies read row 0 for it and replace the result
by exact zeros with `torch.where`; multiplying by zero instead would let a NaN through. Rows that
are packed need no zeros: slots of `unpack_rows`, and with `zeros=False` all others, are unspecified
where they are empty, in results and in gradients. The torch bodies fill them with NaN, which shows
any read.

G: pools of this source, of P slots each, which belong to X = E / G experts each. M: pools that
this rank receives, S * L / X. PX: P + X.
"""

import torch
from torch import Tensor
from torch.library import custom_op

from padded_dispatch.routing.plan import DispatchPlan, packed_slots
from padded_dispatch.utils.nvtx import nvtx_range


def gather_rows(tokens_TD: Tensor, plan: DispatchPlan, *, zeros: bool = True) -> Tensor:
    """Copy its token to every slot: [T, D] to [G, P, D], 0 in padded rows if `zeros`."""
    return _gather(tokens_TD, plan.slot_of_TK, plan.choice_of_slot_GP, zeros)


def gather_meta(probs_TE: Tensor, plan: DispatchPlan) -> Tensor:
    """Gather what travels beside the rows: [T, E] to [G, P + X], at least fp32.

    The probabilities of each pool by slot, 0 in padded rows, then the number of kept rows of each
    of its experts, which has no gradient. Counts are exact in fp32 up to 2**24 rows, far above any
    T.
    """
    maps = plan.slot_of_TK, plan.expert_of_TK, plan.choice_of_slot_GP
    return _gather_meta(probs_TE, *maps, plan.kept_E)


def combine_rows(rows_GPD: Tensor, plan: DispatchPlan, *, zeros: bool = True) -> Tensor:
    """Sum the slots of every token: [G, P, D] to [T, D].

    The sum is unweighted, in ascending expert order, accumulated in fp32 (fp64 for fp64 rows) and
    rounded once. A token without slots gets exact zeros. Padded rows are never read into a sum;
    their gradient is 0 if `zeros`.
    """
    return _combine(rows_GPD, plan.slot_of_TK, plan.choice_of_slot_GP, zeros)


def running_offsets(kept_SL: Tensor) -> Tensor:
    """Return where packed rows lie: int32 [S, L] to int32 [L, S].

    The rows of expert l from source s end at `[l, s]` and begin where the rows before them end.
    """
    num_sources, num_local_experts = kept_SL.shape
    offsets = kept_SL.T.flatten().cumsum(0, dtype=torch.int32)
    return offsets.view(num_local_experts, num_sources)


def pack_rows(slots_MPD: Tensor, offsets_LS: Tensor) -> Tensor:
    """Pack real rows without gaps: [M, P, D] to [M * P, D].

    The input is ordered by source, pool, slot, the result by expert, source, slot. Rows from
    `offsets_LS[-1, -1]` on are unspecified, as is the gradient of padded rows.
    """
    return _pack(slots_MPD, offsets_LS)


def unpack_rows(packed_ND: Tensor, offsets_LS: Tensor, num_pools: int) -> Tensor:
    """Put packed rows back in their slots: [N, D] to [M, P, D]; padded rows are unspecified."""
    return _unpack(packed_ND, offsets_LS, num_pools)


def gather_packed(tokens_TD: Tensor, plan: DispatchPlan, offsets_LS: Tensor) -> Tensor:
    """Do `gather_rows` and `pack_rows` in one step if this rank is the only source: to [N, D].

    Args:
        tokens_TD: floating point.
        plan: the plan of these tokens, with a pool for each expert or one for all of them.
        offsets_LS: `running_offsets` of the plan's counts.
    """
    slot_of_TK = _packed_row_of_choice(plan, offsets_LS)
    return _gather(tokens_TD, slot_of_TK, plan.choice_of_slot_GP, False).flatten(0, 1)


def combine_packed(rows_ND: Tensor, plan: DispatchPlan, offsets_LS: Tensor) -> Tensor:
    """Do `unpack_rows` and `combine_rows` in one step: the transpose of `gather_packed`."""
    slot_of_TK = _packed_row_of_choice(plan, offsets_LS)
    rows_GPD = rows_ND.unflatten(0, plan.choice_of_slot_GP.shape)
    return _combine(rows_GPD, slot_of_TK, plan.choice_of_slot_GP, False)


def _packed_row_of_choice(plan: DispatchPlan, offsets_LS: Tensor) -> Tensor:
    """Return the packed row of every (token, choice); a single pool has no gaps."""
    num_pools, pool_slots = plan.choice_of_slot_GP.shape
    if num_pools == 1:
        return plan.slot_of_TK
    return packed_slots(plan.slot_of_TK, offsets_LS, pool_slots)


# The ops, in the order of their functions, then their backward passes.


def _take(source_ND: Tensor, index: Tensor, *, zeros: bool = True) -> Tensor:
    """Return `source_ND[index]`, with exact zeros (or NaN) where the index is -1."""
    taken = source_ND.index_select(0, index.clamp(min=0).flatten()).view(*index.shape, -1)
    return torch.where((index >= 0)[..., None], taken, 0.0 if zeros else torch.nan)


@custom_op("padded_dispatch::gather", mutates_args=())
def _gather(
    tokens_TD: Tensor, slot_of_TK: Tensor, choice_of_slot_GP: Tensor, zeros: bool
) -> Tensor:
    num_tokens, num_slots = tokens_TD.shape[0], choice_of_slot_GP.numel()
    token_of_slot = torch.full((num_slots + 1,), -1, device=tokens_TD.device)
    # Choices without a slot, -1, write to the extra element at the end.
    token_of_slot[slot_of_TK] = torch.arange(num_tokens, device=tokens_TD.device)[:, None]
    return _take(tokens_TD, token_of_slot[:-1].view_as(choice_of_slot_GP), zeros=zeros)


@_gather.register_kernel("cuda")
def _(tokens_TD, slot_of_TK, choice_of_slot_GP, zeros):
    from padded_dispatch.kernels import rows

    return rows.spread_rows(tokens_TD.contiguous(), slot_of_TK, choice_of_slot_GP, zeros=zeros)


@_gather.register_fake
def _(tokens_TD, slot_of_TK, choice_of_slot_GP, zeros):
    return tokens_TD.new_empty(*choice_of_slot_GP.shape, tokens_TD.shape[1])


@custom_op("padded_dispatch::gather_meta", mutates_args=())
def _gather_meta(
    probs_TE: Tensor,
    slot_of_TK: Tensor,
    expert_of_TK: Tensor,
    choice_of_slot_GP: Tensor,
    kept_E: Tensor,
) -> Tensor:
    choice_GP = choice_of_slot_GP.clamp(min=0).long()
    # Clamped again: choice 0 may be without an expert.
    expert_GP = expert_of_TK.flatten()[choice_GP].clamp(min=0)
    probs_GP = probs_TE[choice_GP // slot_of_TK.shape[1], expert_GP]
    probs_GP = torch.where(choice_of_slot_GP >= 0, probs_GP, 0)
    dtype = torch.promote_types(probs_TE.dtype, torch.float32)
    counts_GX = kept_E.view(choice_GP.shape[0], -1)
    return torch.cat([probs_GP.to(dtype), counts_GX.to(dtype)], dim=1)


@_gather_meta.register_kernel("cuda")
def _(probs_TE, slot_of_TK, expert_of_TK, choice_of_slot_GP, kept_E):
    from padded_dispatch.kernels import rows

    return rows.gather_meta(probs_TE.contiguous(), expert_of_TK, choice_of_slot_GP, kept_E)


@_gather_meta.register_fake
def _(probs_TE, slot_of_TK, expert_of_TK, choice_of_slot_GP, kept_E):
    num_pools, pool_slots = choice_of_slot_GP.shape
    dtype = torch.promote_types(probs_TE.dtype, torch.float32)
    width = pool_slots + kept_E.shape[0] // num_pools
    return probs_TE.new_empty(num_pools, width, dtype=dtype)


@custom_op("padded_dispatch::scatter_meta", mutates_args=())
def _scatter_meta(
    meta_GPX: Tensor,
    slot_of_TK: Tensor,
    expert_of_TK: Tensor,
    choice_of_slot_GP: Tensor,
    num_experts: int,
) -> Tensor:
    pool_slots = choice_of_slot_GP.shape[1]
    value_TK = _take(meta_GPX[:, :pool_slots].reshape(-1, 1), slot_of_TK).squeeze(-1)
    # One compare per k instead of a scatter_add: its targets never collide, but torch's
    # deterministic mode would sort them all the same.
    experts_E = torch.arange(num_experts, device=meta_GPX.device)
    values_TE = meta_GPX.new_zeros(slot_of_TK.shape[0], num_experts)
    for value_T, expert_T in zip(value_TK.unbind(1), expert_of_TK.unbind(1), strict=True):
        values_TE = torch.where(expert_T[:, None] == experts_E, value_T[:, None], values_TE)
    return values_TE


@_scatter_meta.register_kernel("cuda")
def _(meta_GPX, slot_of_TK, expert_of_TK, choice_of_slot_GP, num_experts):
    from padded_dispatch.kernels import rows

    pool_slots = choice_of_slot_GP.shape[1]
    maps = slot_of_TK, expert_of_TK
    return rows.scatter_meta(meta_GPX.contiguous(), *maps, pool_slots, num_experts)


@_scatter_meta.register_fake
def _(meta_GPX, slot_of_TK, expert_of_TK, choice_of_slot_GP, num_experts):
    return meta_GPX.new_empty(slot_of_TK.shape[0], num_experts)


@custom_op("padded_dispatch::combine", mutates_args=())
def _combine(
    rows_GPD: Tensor, slot_of_TK: Tensor, choice_of_slot_GP: Tensor, zeros: bool
) -> Tensor:
    rows_ND = rows_GPD.flatten(0, 1)
    dtype = torch.promote_types(rows_ND.dtype, torch.float32)
    first, *others = slot_of_TK.unbind(1)
    sum_TD = _take(rows_ND, first).to(dtype)
    for slot_T in others:
        sum_TD += _take(rows_ND, slot_T)
    return sum_TD.to(rows_ND.dtype)


@_combine.register_kernel("cuda")
def _(rows_GPD, slot_of_TK, choice_of_slot_GP, zeros):
    from padded_dispatch.kernels import rows

    return rows.sum_rows(rows_GPD.contiguous().flatten(0, 1), slot_of_TK)


@_combine.register_fake
def _(rows_GPD, slot_of_TK, choice_of_slot_GP, zeros):
    return rows_GPD.new_empty(slot_of_TK.shape[0], rows_GPD.shape[-1])


def _packed_row_of_slot(offsets_LS: Tensor, num_pools: int, pool_slots: int) -> Tensor:
    """Return the packed row of each received slot, int [M, P]; -1 is none."""
    begins_LS = torch.cat([offsets_LS.new_zeros(1), offsets_LS.flatten()[:-1]]).view_as(offsets_LS)
    begins_MX = begins_LS.T.reshape(num_pools, -1)
    kept_MX = offsets_LS.T.reshape(num_pools, -1) - begins_MX
    ends_MX = kept_MX.cumsum(1, dtype=torch.int32)
    p_P = torch.arange(pool_slots, dtype=torch.int32, device=offsets_LS.device)
    p_MP = p_P.repeat(num_pools, 1)
    # The run of a slot is the first that ends behind it.
    x_MP = torch.searchsorted(ends_MX, p_MP, right=True)
    num_shared = ends_MX.shape[1]
    shift_MP = (begins_MX - ends_MX + kept_MX).gather(1, x_MP.clamp(max=num_shared - 1))
    return torch.where(x_MP < num_shared, p_MP + shift_MP, -1)


@custom_op("padded_dispatch::pack", mutates_args=())
def _pack(slots_MPD: Tensor, offsets_LS: Tensor) -> Tensor:
    row_MP = _packed_row_of_slot(offsets_LS, *slots_MPD.shape[:2])
    packed_ND = slots_MPD.new_empty(row_MP.numel(), slots_MPD.shape[2])
    packed_ND[row_MP[row_MP >= 0]] = slots_MPD[row_MP >= 0]
    return packed_ND


@_pack.register_kernel("cuda")
def _(slots_MPD, offsets_LS):
    from padded_dispatch.kernels import rows

    return rows.pack_rows(slots_MPD, offsets_LS)


@_pack.register_fake
def _(slots_MPD, offsets_LS):
    num_pools, pool_slots, width = slots_MPD.shape
    return slots_MPD.new_empty(num_pools * pool_slots, width)


@custom_op("padded_dispatch::unpack", mutates_args=())
def _unpack(packed_ND: Tensor, offsets_LS: Tensor, num_pools: int) -> Tensor:
    row_MP = _packed_row_of_slot(offsets_LS, num_pools, packed_ND.shape[0] // num_pools)
    return _take(packed_ND, row_MP, zeros=False)


@_unpack.register_kernel("cuda")
def _(packed_ND, offsets_LS, num_pools):
    from padded_dispatch.kernels import rows

    return rows.unpack_rows(packed_ND.contiguous(), offsets_LS, num_pools)


@_unpack.register_fake
def _(packed_ND, offsets_LS, num_pools):
    num_rows, width = packed_ND.shape
    return packed_ND.new_empty(num_pools, num_rows // num_pools, width)


def _save_maps(ctx, inputs, output) -> None:
    _, slots, choices, ctx.zeros = inputs
    ctx.save_for_backward(slots, choices)


@nvtx_range("gather backward")
def _gather_backward(ctx, grad_GPD):
    return _combine(grad_GPD, *ctx.saved_tensors, ctx.zeros), None, None, None


@nvtx_range("combine backward")
def _combine_backward(ctx, grad_TD):
    return _gather(grad_TD, *ctx.saved_tensors, ctx.zeros), None, None, None


def _save_meta_maps(ctx, inputs, output) -> None:
    probs_TE, *maps, _ = inputs
    ctx.save_for_backward(*maps)
    ctx.num_experts, ctx.dtype = probs_TE.shape[1], probs_TE.dtype


@nvtx_range("gather backward")
def _gather_meta_backward(ctx, grad_GPX):
    grad_TE = _scatter_meta(grad_GPX, *ctx.saved_tensors, ctx.num_experts)
    return grad_TE.to(ctx.dtype), None, None, None, None


def _save_scatter_maps(ctx, inputs, output) -> None:
    meta_GPX, *maps, _ = inputs
    ctx.save_for_backward(*maps)
    ctx.num_counts = meta_GPX.shape[1] - maps[2].shape[1]


def _scatter_meta_backward(ctx, grad_TE):
    choices = ctx.saved_tensors[2]
    no_counts_E = choices.new_zeros(choices.shape[0] * ctx.num_counts)
    return _gather_meta(grad_TE, *ctx.saved_tensors, no_counts_E), None, None, None, None


def _save_pools(ctx, inputs, output) -> None:
    slots_MPD, offsets_LS = inputs
    ctx.save_for_backward(offsets_LS)
    ctx.num_pools = slots_MPD.shape[0]


def _save_offsets(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[1])


@nvtx_range("regroup backward")
def _pack_backward(ctx, grad_ND):
    return _unpack(grad_ND, *ctx.saved_tensors, ctx.num_pools), None


@nvtx_range("regroup backward")
def _unpack_backward(ctx, grad_MPD):
    return _pack(grad_MPD, *ctx.saved_tensors), None, None


_gather.register_autograd(_gather_backward, setup_context=_save_maps)
_combine.register_autograd(_combine_backward, setup_context=_save_maps)
_gather_meta.register_autograd(_gather_meta_backward, setup_context=_save_meta_maps)
_scatter_meta.register_autograd(_scatter_meta_backward, setup_context=_save_scatter_maps)
_pack.register_autograd(_pack_backward, setup_context=_save_pools)
_unpack.register_autograd(_unpack_backward, setup_context=_save_offsets)
