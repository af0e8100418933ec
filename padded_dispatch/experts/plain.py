"""Packed experts in plain torch, for CPUs: autograd writes the backward.

    send tokens -> lay out -> (fc1 -> activation * prob -> fc2) of each expert -> sum -> send home

With weights in e4m3 a product quantizes its rows, and in backward its gradient (`_Product`).

The host reads which rows are real, so a pass computes no others. Products and sums are done in at
least fp32, and each step rounds once, as on GPUs. A row without room is not among the rows of its
pass, so it adds zero to its token, and its token gets no gradient from it.

n: rows of the pass; `..._N` has one element for each of them.
"""

from bisect import bisect_right
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from padded_dispatch.exchange.collectives import CollectiveWire
from padded_dispatch.experts import Activation, Call, ExpertWeights, Function
from padded_dispatch.experts.scaled import quantize, widen
from padded_dispatch.experts.store import RUN_ONCE, Room
from padded_dispatch.kernels import Scaled
from padded_dispatch.routing import require_choices
from padded_dispatch.utils.phases import require_first_derivatives, unseen

NO_LEVEL = 2**31 - 1  # Every place is below it.


@unseen()
def store_offsets(
    count_SL: Tensor,
    room: Room,
    *,
    kept_L: Tensor | None = None,
    no_room: Tensor | None = None,
    num_again: Tensor | None = None,
    max_need: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return offsets, level and before, and change `room.top` in place.

    Rule, arguments, results and example: see `kernels.layout`.
    """
    in_use, asked, low = 0, 0, room.limit
    if room.top is not None and not room.first:
        in_use, asked, low = room.top.tolist()
    total, level = int(count_SL.sum()), NO_LEVEL
    if total > room.limit:
        levels = range(int(count_SL.max()))  # Find the largest that fits; 0 does.
        level = bisect_right(levels, room.limit, key=lambda w: int(count_SL.clamp(max=w).sum())) - 1
    kept_LS = count_SL.T.clamp(max=level)
    num_rows = int(kept_LS.sum())
    base = min(in_use, room.limit - num_rows)
    ends = base + kept_LS.flatten().cumsum(0, dtype=torch.int32)
    offsets = torch.cat([ends.new_full((1,), base), ends])
    if room.top is not None:
        low = min(low, base) if base < in_use else low
        room.top.copy_(room.top.new_tensor([base + num_rows, asked + total, low]))
    if kept_L is not None:
        kept_L += kept_LS.sum(1)
    if no_room is not None:
        no_room += total - num_rows
    if num_again is not None:
        num_again += in_use - base
    if max_need is not None:
        max_need.clamp_(min=asked + total)
    return offsets, offsets.new_tensor([level]), offsets.new_tensor([in_use, asked])


def release(top: Tensor, offsets: Tensor, before: Tensor) -> None:
    """Give back the rows of a pass, like `kernels.layout.release`; raise if they already were."""
    if top[0] < offsets[-1]:
        raise RuntimeError("rows of a store were given back before their last use")
    top[:2] = before


def rows_of_choices(
    expert_SPK: Tensor, place_SPK: Tensor, offsets: Tensor, level: Tensor, num_experts: int
) -> Tensor:
    """Return the row of each choice, int32 [S, P, K]; -1: no expert of this rank, -2: no room."""
    is_ours = (expert_SPK >= 0) & (expert_SPK < num_experts)
    source_S11 = torch.arange(len(expert_SPK), device=offsets.device)[:, None, None]
    segment_SPK = torch.where(is_ours, expert_SPK, 0) * len(expert_SPK) + source_S11
    row_SPK = offsets[segment_SPK] + place_SPK
    return torch.where(is_ours, torch.where(place_SPK < level, row_SPK, -2), -1)


def take(values_SPD: Tensor, slot_N: Tensor) -> Tensor:
    """Return the value in the slot of each row, [n, D]; sum a slot's gradients in at least fp32."""
    wide = values_SPD.flatten(0, 1).to(_wide(values_SPD.dtype))
    return wide.index_select(0, slot_N).to(values_SPD.dtype)


def add(rows_ND: Tensor, slot_N: Tensor, num_sources: int, num_slots: int) -> Tensor:
    """Sum the rows of each slot in their order, in at least fp32: [S, P, D], not rounded."""
    wide_ND = rows_ND.to(_wide(rows_ND.dtype))
    sum_CD = wide_ND.new_zeros(num_sources * num_slots, wide_ND.shape[1])
    return sum_CD.index_add(0, slot_N, wide_ND).unflatten(0, (num_sources, num_slots))


def run(
    tokens_TD: Tensor, prob_TK: Tensor, weights: ExpertWeights, activation: Activation, call: Call
) -> Tensor:
    """Do the work of `experts.run` in plain torch, for any floating point dtype."""
    wire = cast(CollectiveWire, call.wire)  # Direct writes need a GPU.
    arrived = wire.open(tokens_TD, prob_TK)
    require_choices(arrived.count_SL, arrived.expert_SPK.shape[2])
    values_SPD, prob_SPK = arrived.values.rows_SPD, arrived.prob_SPK
    room = call.take_room(arrived.count_SL)
    counters = {} if call.counters is None else call.counters.of_receiver
    offsets, level, before = store_offsets(arrived.count_SL, room, **counters)
    row_SPK = rows_of_choices(
        arrived.expert_SPK, arrived.place_SPK, offsets, level, len(weights.fc1_LGD)
    )
    row_C = row_SPK.flatten()
    choice_N = (row_C >= 0).nonzero().flatten()
    choice_N = choice_N[row_C[choice_N].argsort()]  # The choice of each row.
    slot_N = choice_N // row_SPK.shape[2]
    prob_N = prob_SPK.flatten().index_select(0, choice_N)
    kept_L = offsets[:: len(values_SPD)].diff().tolist()
    out_ND = _experts(take(values_SPD, slot_N), prob_N, kept_L, weights, activation)
    sum_TD = wire.bring(add(out_ND, slot_N, *values_SPD.shape[:2]))
    if room.top is not None:
        sum_TD = _Release.apply(sum_TD, room, offsets, before)
    return sum_TD


def _experts(
    rows_ND: Tensor,
    prob_N: Tensor,
    kept_L: list[int],
    weights: ExpertWeights,
    activation: Activation,
) -> Tensor:
    dtype, no_bias, scaled = rows_ND.dtype, [None] * len(kept_L), weights.scaled
    fc1_LGD = _Weight.apply(weights.fc1_LGD, weights.fc1_sums)
    fc2_LDF = _Weight.apply(weights.fc2_LDF, weights.fc2_sums)
    fc1_forms = fc2_forms = ()
    if scaled is not None:
        fc1_forms = scaled.fc1_LGD, scaled.fc1_LDG
        fc2_forms = scaled.fc2_LDF, scaled.fc2_LFD
    fc1_bias_LG, fc2_bias_LD = weights.fc1_bias_LG, weights.fc2_bias_LD
    of_experts = zip(
        rows_ND.split(kept_L),
        prob_N.split(kept_L),
        _products(fc1_LGD, *fc1_forms),
        no_bias if fc1_bias_LG is None else fc1_bias_LG.unbind(),
        _products(fc2_LDF, *fc2_forms),
        no_bias if fc2_bias_LD is None else fc2_bias_LD.unbind(),
        strict=True,
    )
    out = []
    for rows, prob, apply_fc1, fc1_bias, apply_fc2, fc2_bias in of_experts:
        product = apply_fc2(activate(apply_fc1(rows).to(dtype), prob, activation, fc1_bias))
        if fc2_bias is not None:
            product = product + prob[:, None] * fc2_bias
        out.append(product.to(dtype))
    return torch.cat(out)


def activate(
    fc1_NG: Tensor, prob_N: Tensor, activation: Activation, bias: Tensor | None = None
) -> Tensor:
    """Apply the activation to rows, [N, G], and multiply by their probabilities: [N, F].

    `bias`: added to the rows: [G], the same for all, or [N, G], one for each.
    """
    x_NG = fc1_NG.to(_wide(fc1_NG.dtype))
    if bias is not None:
        x_NG = x_NG + bias
    if activation.gated:
        gate, up = x_NG.chunk(2, dim=1)
        up = up.clamp(-activation.clamp, activation.clamp) + activation.offset
        value = _curve(activation.function, gate.clamp(max=activation.clamp)) * up
    else:
        value = _curve(activation.function, x_NG)
    return (value * prob_N[:, None]).to(fc1_NG.dtype)


def _curve(function: Function, x: Tensor) -> Tensor:
    if function == "squared_relu":
        return x.relu().square()
    if function == "gelu":
        return F.gelu(x)
    return x * ((1.702 if function == "quick_gelu" else 1.0) * x).sigmoid()


def _products(weight_LOI: Tensor, *forms: Scaled) -> list[Callable[[Tensor], Tensor]]:
    """Return, for each expert, a function that multiplies rows by its weight, in at least fp32.

    `forms`: the weight in e4m3, for forward and for backward; without them no row is quantized.
    """
    if not forms:
        return [lambda rows, weight=weight: rows.to(weight) @ weight.T for weight in weight_LOI]
    of_experts = zip(weight_LOI, *(widen(form, weight_LOI.dtype) for form in forms), strict=True)
    return [lambda rows, weights=weights: _Product.apply(rows, *weights) for weights in of_experts]


class _Product(torch.autograd.Function):
    """`rows @ weight.T` and the gradient of the rows in e4m3; the weight's gradient is not."""

    @staticmethod
    def forward(ctx, rows_NI, weight_OI, form_OI, back_IO):
        ctx.save_for_backward(rows_NI, back_IO)
        return widen(quantize(rows_NI), form_OI.dtype) @ form_OI.T

    @staticmethod
    def backward(ctx, grad_NO):  # pyright: ignore[reportIncompatibleMethodOverride]
        rows_NI, back_IO = ctx.saved_tensors
        grad_rows = widen(quantize(grad_NO), grad_NO.dtype) @ back_IO.T
        return grad_rows.to(rows_NI), grad_NO.T @ rows_NI.to(grad_NO), None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Weight(torch.autograd.Function):
    """A weight in at least fp32, whose gradient may be added to sums."""

    @staticmethod
    def forward(ctx, weight_LOI, sums):
        ctx.sums = sums
        return weight_LOI.to(_wide(weight_LOI.dtype))

    @staticmethod
    def backward(ctx, grad_LOI):  # pyright: ignore[reportIncompatibleMethodOverride]
        sums = ctx.sums
        if sums is None:
            return grad_LOI, None  # Autograd rounds it.
        if sums.zeroed[0]:
            sums.sums_LOI.copy_(grad_LOI)
            sums.zeroed.zero_()
        else:
            sums.sums_LOI.add_(grad_LOI)
        return sums.unspecified(), None


class _Release(torch.autograd.Function):
    """Return the sums of a pass as they are; backward gives its rows back to the store."""

    # On CPUs no step of backward reads the store, so giving back can be its first step. The first
    # step runs whichever of the inputs have gradients, and a second backward raises before any
    # collective.

    @staticmethod
    def forward(ctx, sum_TD, room, offsets, before):
        ctx.state = room, offsets, before
        return sum_TD.detach()  # Autograd would forbid to change the input itself in place.

    @staticmethod
    def backward(ctx, grad_TD):  # pyright: ignore[reportIncompatibleMethodOverride]
        require_first_derivatives()
        if ctx.state is None:
            raise ValueError(RUN_ONCE)
        (room, offsets, before), ctx.state = ctx.state, None
        if room.gives_back():
            release(room.top, offsets, before)
            room.close()
        return grad_TD, None, None, None
