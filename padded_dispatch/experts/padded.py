"""Padded cells for experts from outside of this package: C rows for each (expert, source).

    send tokens -> cells [L * S * C, D] -> (experts) -> sum of each (source, slot) -> send sums home

Row `(l * S + s) * C + c` is row c of source s for local expert l; real rows come first. A padded
row and its probability are exactly 0, and so is the gradient of its output, whatever the memory
held. The experts' results for padded rows, forward and backward, are not read. So all sizes follow
from C, and experts may compute padding.

On GPUs two autograd functions over kernels do the steps before and after the experts; on CPUs plain
torch does.

N = L * S * C.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from padded_dispatch.config import DispatchConfig, require
from padded_dispatch.exchange import Wire
from padded_dispatch.exchange.collectives import CollectiveWire
from padded_dispatch.experts.plain import add, rows_of_choices, take
from padded_dispatch.kernels import Segments, SlotList
from padded_dispatch.routing import require_choices
from padded_dispatch.utils.phases import nvtx_range, require_first_derivatives
from padded_dispatch.utils.tensors import is_dense, kind_of


@dataclass(frozen=True, kw_only=True)
class ExpertInput:
    """Rows that the experts of this rank read, in padded cells.

    Attributes:
        rows_ND: tokens, by local expert, then by source; exactly 0 in padded rows.
        probs_N: at least fp32, their probabilities, by which the experts must multiply their
            output; exactly 0 in padded rows.
        count_SL: int32, real rows of each source for each local expert.
    """

    rows_ND: Tensor
    probs_N: Tensor
    count_SL: Tensor


@dataclass(frozen=True, kw_only=True)
class DispatchState:
    """State of a dispatch that `combine` needs.

    Attributes:
        wire: the exchange of the pass.
        cells: offsets of every (expert, source).
        rows: on a GPU the list of slots and their rows; on a CPU int32 [S, P, K], the row of each
            choice, negative if it has none on this rank.
        count_SL: as in `ExpertInput`.
        width: of a row (D).
    """

    wire: CollectiveWire
    cells: Segments
    rows: SlotList | Tensor
    count_SL: Tensor
    width: int


@nvtx_range("dispatch")
def dispatch(
    tokens_TD: Tensor, prob_TK: Tensor, wire: Wire, config: DispatchConfig
) -> tuple[ExpertInput, DispatchState]:
    """Send tokens to their experts, in padded cells.

    Args:
        tokens_TD: floating point.
        prob_TK: at least fp32, the probability of every choice of the plan.
        wire: the exchange of the pass, over collectives.
        config: of the pass. A row beyond its capacity has no room and counts as zero. With `FIT`
            the host reads the C that this rank needs; other ranks may have another C.
    """
    arrived = wire.open(tokens_TD, prob_TK)
    count_SL = arrived.count_SL
    if not _has_kernels(tokens_TD):  # Else `zero_padding` sees it.
        require_choices(count_SL, arrived.expert_SPK.shape[2])
    num_sources, num_experts = count_SL.shape
    if config.fits:
        capacity = config.aligned(max(1, int(count_SL.max())))
    else:
        capacity = config.capacity(len(tokens_TD))
    begin = capacity * torch.arange(count_SL.numel() + 1, device=count_SL.device)
    cells = Segments(
        offsets=begin.to(torch.int32),
        num_experts=num_experts,
        num_sources=num_sources,
        num_rows=count_SL.numel() * capacity,
        num_expected=count_SL.numel() * capacity,
    )
    level = cells.offsets[1:2]
    choices = arrived.expert_SPK, arrived.place_SPK
    if _has_kernels(tokens_TD):
        from padded_dispatch.kernels import layout

        given = *choices, arrived.prob_SPK.detach(), cells.offsets, level
        where = layout.list_slots(*given, num_experts)
        values_SPD = arrived.values.rows_SPD
        rows_ND, probs_N = _ToCells.apply(values_SPD, arrived.prob_SPK, where, cells, count_SL)
    else:
        where = rows_of_choices(*choices, cells.offsets, level, num_experts)
        row_C, slot_C = _places(where, cells.num_rows)
        rows, probs = take(arrived.values.rows_SPD, slot_C), arrived.prob_SPK.flatten()
        none_ND = rows.new_zeros(cells.num_rows + 1, rows.shape[1])
        rows_ND = none_ND.index_copy(0, row_C, rows)[:-1]
        probs_N = probs.new_zeros(cells.num_rows + 1).index_copy(0, row_C, probs)[:-1]
    expert_input = ExpertInput(rows_ND=rows_ND, probs_N=probs_N, count_SL=count_SL)
    return expert_input, DispatchState(
        wire=cast(CollectiveWire, wire),
        cells=cells,
        rows=where,
        count_SL=count_SL,
        width=tokens_TD.shape[1],
    )


@nvtx_range("combine")
def combine(out_ND: Tensor, state: DispatchState) -> Tensor:
    """Bring the experts' output home and sum it for every token: [N, D] to [T, D].

    Rows are added in at least fp32: those of one rank in ascending expert order, then the ranks'
    sums in rank order. Padded rows of `out_ND` may hold anything.
    """
    shape, device = (state.cells.num_rows, state.width), state.count_SL.device
    is_right = is_dense(out_ND) and out_ND.shape == shape and out_ND.is_floating_point()
    rule = f"be floating point of shape {shape} on {device}, as the rows of dispatch"
    require(is_right and out_ND.device == device, "out_ND", kind_of(out_ND), rule)
    if isinstance(state.rows, SlotList):
        return state.wire.bring(_ToSums.apply(out_ND, state))
    num_sources, num_slots, _ = state.rows.shape
    row_C, slot_C = _places(state.rows, len(out_ND))
    rows = torch.cat((out_ND, out_ND.new_zeros(1, out_ND.shape[1]))).index_select(0, row_C)
    return state.wire.bring(add(rows, slot_C, num_sources, num_slots))


def _has_kernels(values: Tensor) -> bool:
    return values.is_cuda


def _places(row_SPK: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the row of each choice, `num_rows` if it has none, and its slot; both flat."""
    row_C = row_SPK.flatten().long()
    slot_C = torch.arange(len(row_C), device=row_C.device) // row_SPK.shape[2]
    return torch.where(row_C < 0, num_rows, row_C), slot_C


class _ToCells(torch.autograd.Function):
    """Rows and probabilities of cells, on a GPU; `listed` has the probabilities, too."""

    @staticmethod
    def forward(ctx: Any, rows_SPD, prob_SPK, listed, cells, count_SL):
        from padded_dispatch.kernels import rows

        _save(ctx, listed)
        probs_N = prob_SPK.new_empty(cells.num_rows)
        rows_ND = rows.spread_rows(rows_SPD.contiguous(), listed, cells, prob_M=probs_N)
        rows.zero_padding(rows_ND, probs_N, count_SL)
        return rows_ND, probs_N

    @staticmethod
    @nvtx_range("dispatch backward")
    def backward(ctx: Any, grad_ND, grad_N):  # pyright: ignore
        from padded_dispatch.kernels import rows

        require_first_derivatives()
        listed, _ = _saved(ctx)
        grad_SPD = rows.sum_slots(grad_ND.contiguous(), listed)
        grad_SPK = rows.send_numbers(grad_N.contiguous(), listed)
        return grad_SPD, grad_SPK, None, None, None


class _ToSums(torch.autograd.Function):
    """The sum of the rows of each (source, slot), on a GPU; not rounded if ranks split experts."""

    @staticmethod
    def forward(ctx: Any, out_ND, state):
        from padded_dispatch.kernels import rows

        _save(ctx, state.rows, state.count_SL)
        ctx.cells, ctx.dtype = state.cells, out_ND.dtype
        return rows.sum_slots(out_ND.contiguous(), state.rows, wide=state.wire.splits)

    @staticmethod
    @nvtx_range("combine backward")
    def backward(ctx: Any, grad_SPD):  # pyright: ignore
        from padded_dispatch.kernels import rows

        require_first_derivatives()
        listed, count_SL = _saved(ctx)
        grad_ND = rows.spread_rows(grad_SPD.to(ctx.dtype).contiguous(), listed, ctx.cells)
        rows.zero_padding(grad_ND, None, count_SL)
        return grad_ND, None


def _save(ctx: Any, listed: SlotList, count_SL: Tensor | None = None) -> None:
    """Let autograd save what follows from the routing: a recomputed pass may have another one."""
    ctx.save_for_backward(
        listed.slot_A, listed.length, listed.row_AK, listed.prob_AK.detach(), count_SL
    )
    ctx.sizes = {"num_sources": listed.num_sources, "num_slots": listed.num_slots}


def _saved(ctx: Any) -> tuple[SlotList, Any]:
    """Return what `_save` was given."""
    slot_A, length, row_AK, prob_AK, count_SL = ctx.saved_tensors
    tensors = {"slot_A": slot_A, "length": length, "row_AK": row_AK, "prob_AK": prob_AK}
    return SlotList(**tensors, **ctx.sizes), count_SL
