"""Rows: copy every token into its slots, sum the slots of every token, and close the gaps between.

`gather_rows` gives every slot its token's row; `combine_rows` sums the slots of every token. Each
is the transpose of the other, so the backward of one calls the other. Every element of a result has
one writer: there are no atomics, and no order of writes that could change a sum. Both ops follow
the plan's `slot_of_TK`. Of its inverse, `choice_of_slot_EC`, they read only the shape, and, to
write zeros, which slots are empty.

`pack_rows` takes received rows out of their slots and closes the gaps; `unpack_rows`, its
transpose, puts them back. Rows behind the last packed row are unspecified, forward and backward.

With one source, nothing lies between slots and packed rows. `gather_packed` and `combine_packed`
then take one step instead of two: the same ops, with packed rows in place of slots and no zeros.

An empty slot or a missing choice is -1. The torch bodies read row 0 for it and replace the result
by exact zeros with `torch.where`; multiplying by zero instead would let a NaN through.

Rows that will be packed need no zeros, because no op reads an empty slot then. `zeros=False` leaves
those slots unspecified, in results and in gradients, so that a kernel need not write them. The
torch bodies fill them with NaN, which shows any read.

M: buffers of (source, local expert) pairs on this rank, S * L. C1: C + 1.
"""

import torch
from torch import Tensor
from torch.library import custom_op

from padded_dispatch.ops.plan import DispatchPlan, packed_slots
from padded_dispatch.utils.nvtx import nvtx_range


def gather_rows(tokens_TD: Tensor, plan: DispatchPlan, *, zeros: bool = True) -> Tensor:
    """Copy its token to every slot: [T, D] to [E, C, D], 0 in padded rows if `zeros`."""
    return _gather(tokens_TD, plan.slot_of_TK, plan.choice_of_slot_EC, zeros)


def gather_meta(probs_TE: Tensor, plan: DispatchPlan) -> Tensor:
    """Gather what travels beside the rows: [T, E] to [E, C + 1], at least fp32.

    Each expert's probabilities by slot, 0 in padded rows, then the number of its kept rows, which
    has no gradient. Counts are exact in fp32 up to 2**24 rows, far above any T.
    """
    return _gather_meta(probs_TE, plan.slot_of_TK, plan.choice_of_slot_EC, plan.kept_E)


def combine_rows(rows_ECD: Tensor, plan: DispatchPlan, *, zeros: bool = True) -> Tensor:
    """Sum the slots of every token: [E, C, D] to [T, D].

    The sum is unweighted, in ascending expert order, accumulated in fp32 (fp64 for fp64 rows) and
    rounded once. A token without slots gets exact zeros. Padded rows are never read into a sum;
    their gradient is 0 if `zeros`.
    """
    return _combine(rows_ECD, plan.slot_of_TK, plan.choice_of_slot_EC, zeros)


def running_offsets(kept_SL: Tensor) -> Tensor:
    """Return where packed rows lie: int32 [S, L] to int32 [L, S].

    The rows of expert l from source s end at `[l, s]` and begin where the rows before them end.
    """
    num_sources, num_local_experts = kept_SL.shape
    offsets = kept_SL.T.flatten().cumsum(0, dtype=torch.int32)
    return offsets.view(num_local_experts, num_sources)


def pack_rows(slots_MCD: Tensor, offsets_LS: Tensor, *, zeros: bool = True) -> Tensor:
    """Pack real rows without gaps: [S * L, C, D] to [N, D].

    The input is ordered by source, expert, slot, the result by expert, source, slot. Rows from
    `offsets_LS[-1, -1]` on are unspecified. The gradient of padded rows is 0 if `zeros`.
    """
    return _pack(slots_MCD, offsets_LS, zeros)


def unpack_rows(packed_ND: Tensor, offsets_LS: Tensor, *, zeros: bool = True) -> Tensor:
    """Put packed rows back in their slots: [N, D] to [S * L, C, D], 0 in padded rows if `zeros`."""
    return _unpack(packed_ND, offsets_LS, zeros)


def gather_packed(tokens_TD: Tensor, plan: DispatchPlan, offsets_LS: Tensor) -> Tensor:
    """Do `gather_rows` and `pack_rows` in one step if this rank is the only source: to [N, D].

    Args:
        tokens_TD: floating point.
        plan: the plan of these tokens.
        offsets_LS: `running_offsets` of the plan's counts.
    """
    slot_of_TK = packed_slots(plan.slot_of_TK, offsets_LS, plan.capacity)
    return _gather(tokens_TD, slot_of_TK, plan.choice_of_slot_EC, False).flatten(0, 1)


def combine_packed(rows_ND: Tensor, plan: DispatchPlan, offsets_LS: Tensor) -> Tensor:
    """Do `unpack_rows` and `combine_rows` in one step: the transpose of `gather_packed`."""
    slot_of_TK = packed_slots(plan.slot_of_TK, offsets_LS, plan.capacity)
    rows_ECD = rows_ND.unflatten(0, plan.choice_of_slot_EC.shape)
    return _combine(rows_ECD, slot_of_TK, plan.choice_of_slot_EC, False)


# The ops, in the order of their functions, then their backward passes.


def _take(source_ND: Tensor, index: Tensor, *, zeros: bool = True) -> Tensor:
    """Return `source_ND[index]`, with exact zeros (or NaN) where the index is -1."""
    taken = source_ND.index_select(0, index.clamp(min=0).flatten()).view(*index.shape, -1)
    return torch.where((index >= 0)[..., None], taken, 0.0 if zeros else torch.nan)


@custom_op("padded_dispatch::gather", mutates_args=())
def _gather(
    tokens_TD: Tensor, slot_of_TK: Tensor, choice_of_slot_EC: Tensor, zeros: bool
) -> Tensor:
    num_tokens, num_slots = tokens_TD.shape[0], choice_of_slot_EC.numel()
    token_of_slot = torch.full((num_slots + 1,), -1, device=tokens_TD.device)
    # Choices without a slot, -1, write to the extra element at the end.
    token_of_slot[slot_of_TK] = torch.arange(num_tokens, device=tokens_TD.device)[:, None]
    return _take(tokens_TD, token_of_slot[:-1].view_as(choice_of_slot_EC), zeros=zeros)


@_gather.register_kernel("cuda")
def _(tokens_TD, slot_of_TK, choice_of_slot_EC, zeros):
    from padded_dispatch.kernels import rows

    return rows.spread_rows(tokens_TD.contiguous(), slot_of_TK, choice_of_slot_EC, zeros=zeros)


@_gather.register_fake
def _(tokens_TD, slot_of_TK, choice_of_slot_EC, zeros):
    return tokens_TD.new_empty(*choice_of_slot_EC.shape, tokens_TD.shape[1])


@custom_op("padded_dispatch::gather_meta", mutates_args=())
def _gather_meta(
    probs_TE: Tensor, slot_of_TK: Tensor, choice_of_slot_EC: Tensor, kept_E: Tensor
) -> Tensor:
    top_k = slot_of_TK.shape[1]
    token_EC = choice_of_slot_EC.clamp(min=0).long() // top_k
    probs_EC = torch.where(choice_of_slot_EC >= 0, probs_TE.T.gather(1, token_EC), 0)
    dtype = torch.promote_types(probs_TE.dtype, torch.float32)
    return torch.cat([probs_EC.to(dtype), kept_E[:, None].to(dtype)], dim=1)


@_gather_meta.register_kernel("cuda")
def _(probs_TE, slot_of_TK, choice_of_slot_EC, kept_E):
    from padded_dispatch.kernels import rows

    top_k = slot_of_TK.shape[1]
    return rows.gather_meta(probs_TE.contiguous(), choice_of_slot_EC, kept_E, top_k)


@_gather_meta.register_fake
def _(probs_TE, slot_of_TK, choice_of_slot_EC, kept_E):
    num_experts, capacity = choice_of_slot_EC.shape
    dtype = torch.promote_types(probs_TE.dtype, torch.float32)
    return probs_TE.new_empty(num_experts, capacity + 1, dtype=dtype)


@custom_op("padded_dispatch::scatter_meta", mutates_args=())
def _scatter_meta(meta_EC1: Tensor, slot_of_TK: Tensor, choice_of_slot_EC: Tensor) -> Tensor:
    num_experts, capacity = choice_of_slot_EC.shape
    expert_TK = torch.div(slot_of_TK, capacity, rounding_mode="floor")
    value_TK = _take(meta_EC1[:, :-1].reshape(-1, 1), slot_of_TK).squeeze(-1)
    # One compare per k instead of a scatter_add: its targets never collide, but torch's
    # deterministic mode would sort them all the same.
    experts_E = torch.arange(num_experts, device=meta_EC1.device)
    values_TE = meta_EC1.new_zeros(slot_of_TK.shape[0], num_experts)
    for value_T, expert_T in zip(value_TK.unbind(1), expert_TK.unbind(1), strict=True):
        values_TE = torch.where(expert_T[:, None] == experts_E, value_T[:, None], values_TE)
    return values_TE


@_scatter_meta.register_kernel("cuda")
def _(meta_EC1, slot_of_TK, choice_of_slot_EC):
    from padded_dispatch.kernels import rows

    return rows.scatter_meta(meta_EC1.contiguous(), slot_of_TK)


@_scatter_meta.register_fake
def _(meta_EC1, slot_of_TK, choice_of_slot_EC):
    return meta_EC1.new_empty(slot_of_TK.shape[0], meta_EC1.shape[0])


@custom_op("padded_dispatch::combine", mutates_args=())
def _combine(
    rows_ECD: Tensor, slot_of_TK: Tensor, choice_of_slot_EC: Tensor, zeros: bool
) -> Tensor:
    rows_ND = rows_ECD.flatten(0, 1)
    dtype = torch.promote_types(rows_ND.dtype, torch.float32)
    first, *others = slot_of_TK.unbind(1)
    sum_TD = _take(rows_ND, first).to(dtype)
    for slot_T in others:
        sum_TD += _take(rows_ND, slot_T)
    return sum_TD.to(rows_ND.dtype)


@_combine.register_kernel("cuda")
def _(rows_ECD, slot_of_TK, choice_of_slot_EC, zeros):
    from padded_dispatch.kernels import rows

    return rows.sum_rows(rows_ECD.contiguous().flatten(0, 1), slot_of_TK)


@_combine.register_fake
def _(rows_ECD, slot_of_TK, choice_of_slot_EC, zeros):
    return rows_ECD.new_empty(slot_of_TK.shape[0], rows_ECD.shape[-1])


def _packed_row_of_slot(offsets_LS: Tensor, capacity: int) -> Tensor:
    """Return the packed row of each slot, int [S * L, C]; -1 is none."""
    num_local_experts, num_sources = offsets_LS.shape
    kept = torch.diff(offsets_LS.flatten(), prepend=offsets_LS.new_zeros(1))
    kept_LS1 = kept.view(num_local_experts, num_sources, 1)
    c_C = torch.arange(capacity, device=offsets_LS.device)
    row_LSC = torch.where(c_C < kept_LS1, offsets_LS[..., None] - kept_LS1 + c_C, -1)
    return row_LSC.transpose(0, 1).flatten(0, 1)


@custom_op("padded_dispatch::pack", mutates_args=())
def _pack(slots_MCD: Tensor, offsets_LS: Tensor, zeros: bool) -> Tensor:
    row_MC = _packed_row_of_slot(offsets_LS, slots_MCD.shape[1])
    packed_ND = slots_MCD.new_empty(row_MC.numel(), slots_MCD.shape[2])
    packed_ND[row_MC[row_MC >= 0]] = slots_MCD[row_MC >= 0]
    return packed_ND


@_pack.register_kernel("cuda")
def _(slots_MCD, offsets_LS, zeros):
    from padded_dispatch.kernels import rows

    return rows.pack_rows(slots_MCD, offsets_LS)


@_pack.register_fake
def _(slots_MCD, offsets_LS, zeros):
    num_buffers, capacity, width = slots_MCD.shape
    return slots_MCD.new_empty(num_buffers * capacity, width)


@custom_op("padded_dispatch::unpack", mutates_args=())
def _unpack(packed_ND: Tensor, offsets_LS: Tensor, zeros: bool) -> Tensor:
    row_MC = _packed_row_of_slot(offsets_LS, packed_ND.shape[0] // offsets_LS.numel())
    return _take(packed_ND, row_MC, zeros=zeros)


@_unpack.register_kernel("cuda")
def _(packed_ND, offsets_LS, zeros):
    from padded_dispatch.kernels import rows

    return rows.unpack_rows(packed_ND.contiguous(), offsets_LS, zeros=zeros)


@_unpack.register_fake
def _(packed_ND, offsets_LS, zeros):
    num_buffers = offsets_LS.numel()
    num_rows, width = packed_ND.shape
    return packed_ND.new_empty(num_buffers, num_rows // num_buffers, width)


def _save_maps(ctx, inputs, output) -> None:
    _, slots, choices, ctx.zeros = inputs
    ctx.save_for_backward(slots, choices)


@nvtx_range("gather backward")
def _gather_backward(ctx, grad_ECD):
    return _combine(grad_ECD, *ctx.saved_tensors, ctx.zeros), None, None, None


@nvtx_range("combine backward")
def _combine_backward(ctx, grad_TD):
    return _gather(grad_TD, *ctx.saved_tensors, ctx.zeros), None, None, None


def _save_meta_maps(ctx, inputs, output) -> None:
    probs_TE, slots, choices, _ = inputs
    ctx.save_for_backward(slots, choices)
    ctx.dtype = probs_TE.dtype


@nvtx_range("gather backward")
def _gather_meta_backward(ctx, grad_EC1):
    return _scatter_meta(grad_EC1, *ctx.saved_tensors).to(ctx.dtype), None, None, None


def _save_scatter_maps(ctx, inputs, output) -> None:
    _, slots, choices = inputs
    ctx.save_for_backward(slots, choices)


def _scatter_meta_backward(ctx, grad_TE):
    slots, choices = ctx.saved_tensors
    no_counts_E = torch.zeros_like(choices[:, 0])
    return _gather_meta(grad_TE, slots, choices, no_counts_E), None, None


def _save_offsets(ctx, inputs, output) -> None:
    _, offsets_LS, ctx.zeros = inputs
    ctx.save_for_backward(offsets_LS)


@nvtx_range("regroup backward")
def _pack_backward(ctx, grad_ND):
    return _unpack(grad_ND, *ctx.saved_tensors, ctx.zeros), None, None


@nvtx_range("regroup backward")
def _unpack_backward(ctx, grad_MCD):
    return _pack(grad_MCD, *ctx.saved_tensors, ctx.zeros), None, None


_gather.register_autograd(_gather_backward, setup_context=_save_maps)
_combine.register_autograd(_combine_backward, setup_context=_save_maps)
_gather_meta.register_autograd(_gather_meta_backward, setup_context=_save_meta_maps)
_scatter_meta.register_autograd(_scatter_meta_backward, setup_context=_save_scatter_maps)
_pack.register_autograd(_pack_backward, setup_context=_save_offsets)
_unpack.register_autograd(_unpack_backward, setup_context=_save_offsets)
