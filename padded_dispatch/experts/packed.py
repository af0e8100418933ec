"""The pass of a layer on a GPU: one autograd function from tokens to tokens.

    forward    send tokens; lay out, list; spread, fc1, activation; fc2 with rows sent home, sum
    backward   send gradients, and tokens again if the pass kept none; refill overwritten rows;
               spread gradients, gradients of fc2 and activation; spread tokens, fc1's weight
               gradient; gradients of fc1's input, sent home, sum

To spread is to copy each token, or its gradient, to all its rows. The store keeps fc1's results
until backward, or until a later pass overwrites them. A pass keeps the tokens that arrived, not
their rows; where these would be many, it keeps none (`DispatchConfig.sends_again`). The kernel of
the activation's gradient recomputes fc2's input and overwrites fc1's results, so backward runs once
per forward pass. For products in e4m3 the kernels that make rows also quantize them; only the next
product reads quantized rows.

Pushes and returns must alternate (see `exchange.direct`), so backward always brings the gradients
of tokens home, even if they are not needed. What a push brought is read before the return.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from padded_dispatch.exchange import Wire
from padded_dispatch.exchange.collectives import Values
from padded_dispatch.experts import Activation, Call, ExpertWeights, Sums
from padded_dispatch.experts.store import BUFFERS, RUN_ONCE, Buffers, Room
from padded_dispatch.kernels import Scaled, Segments, SlotList, gemm, grouped, layout, rows
from padded_dispatch.kernels import activation as curves
from padded_dispatch.utils.phases import nvtx_range, require_first_derivatives, wanted


def run(
    tokens_TD: Tensor, prob_TK: Tensor, weights: ExpertWeights, activation: Activation, call: Call
) -> Tensor:
    """Do the work of `experts.run` on a GPU; raise as `gemm.check_on_gpu` does."""
    gemm.check_on_gpu(tokens_TD, weights.fc2_LDF, 8 if weights.scaled is None else 16)
    # A pass keeps tokens for this gradient. Without gradients, autograd would still ask for it.
    fc1_LGD = weights.fc1_LGD if torch.is_grad_enabled() else weights.fc1_LGD.detach()
    biases = weights.fc1_bias_LG, weights.fc2_bias_LD
    biases = [None if bias is None else bias.contiguous() for bias in biases]
    leaves = fc1_LGD, weights.fc2_LDF, *biases
    return _Pass.apply(tokens_TD, prob_TK, *leaves, weights, activation, call)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The place of the rows of a pass: the list of slots, offsets, and memory for backward."""

    listed: SlotList
    segments: Segments
    buffers: Buffers


@dataclass(frozen=True, kw_only=True)
class _PassState:
    """State that backward needs beside the tensors that autograd saves, which have `names`.

    Autograd saves all that depends on the routing, so that a recompute which routes a token
    otherwise replaces all of it. `own`: see `Values`; `stack_buffers`: the buffers, if a stack's.
    """

    wire: Wire
    room: Room
    segments: Segments
    num_slots: int
    own: int | None
    stack_buffers: Buffers | None
    names: tuple[str, ...]


class _Pass(torch.autograd.Function):
    @staticmethod
    @nvtx_range("experts")
    def forward(
        ctx: Any, tokens_TD, prob_TK, fc1_LGD, fc2_LDF, fc1_bias_LG, fc2_bias_LD, weights, act, call
    ):
        # 1. Send tokens, and find room for the rows that they have here.
        wire, tokens_TD = call.wire, tokens_TD.contiguous()
        arrived = wire.open(tokens_TD, prob_TK.contiguous())
        values, expert_SPK, count_SL = arrived.values, arrived.expert_SPK, arrived.count_SL
        num_experts, fc1_width, _ = fc1_LGD.shape
        num_sources, num_slots, _ = expert_SPK.shape
        room = call.take_room(count_SL)
        counters = {} if call.counters is None else call.counters.of_receiver
        found = layout.lay_out(count_SL, room.top, first=room.first, limit=room.limit, **counters)
        plans = expert_SPK, arrived.place_SPK, arrived.prob_SPK
        listed = layout.list_slots(*plans, found.offsets, found.level, num_experts)
        segments = gemm.with_tiles(
            Segments(
                offsets=found.offsets,
                num_experts=num_experts,
                num_sources=num_sources,
                num_rows=room.max_rows,
                num_expected=room.share,
            )
        )
        buffers = room.buffers(segments.num_rows, fc1_width, like=tokens_TD)
        rows_here = _Rows(listed=listed, segments=segments, buffers=buffers)

        # 2. Compute fc1 and the activation. Tokens are kept for fc1's weight gradient and for rows
        # that are overwritten, where they are if they stay there, unless backward sends them again.
        keeps = (room.overwritten or ctx.needs_input_grad[2]) and not wire.sends_again
        kept_SPD = copy_SPD = None
        if keeps and values.lasts:
            kept_SPD = values.rows_SPD
        elif keeps:
            kept_SPD = copy_SPD = torch.empty_like(values.rows_SPD)
        _multiply_by_fc1(values, rows_here, weights, wire.homes_S, kept_SPD=copy_SPD)
        scaled_NF = _for_e4m3(weights, segments, fc2_LDF.shape[2])
        hidden_NF = curves.activate(
            buffers.fc1_MG, fc1_bias_LG, buffers.prob_M, segments, scaled=scaled_NF, **vars(act)
        )

        # 3. Send rows home from inside the product, and sum them there.
        product = partial(
            gemm.rows_times_weights,
            hidden_NF if scaled_NF is None else scaled_NF,
            weights.operands().fc2,
            segments,
            stored=False,
            at_M=None if wire.homes_S is None else buffers.home_M,
            bias_LO=fc2_bias_LD,
            prob_M=buffers.prob_M,
        )
        sum_TD, _ = wire.home(product, listed, found.offsets)

        needs_own = wire.sends_again or (keeps and values.own_TD is not None)
        saved = {
            "fc1_LGD": fc1_LGD,
            "fc2_LDF": fc2_LDF,  # Its version is checked; products read `weights`.
            "fc1_bias_LG": fc1_bias_LG,
            "fc2_bias_LD": fc2_bias_LD,
            "kept_SPD": kept_SPD,
            "own_TD": arrived.sent_TD if needs_own else None,
            "slot_A": listed.slot_A,
            "length": listed.length,
            "row_AK": listed.row_AK,
            "prob_AK": listed.prob_AK if room.overwritten else None,
            "offsets": found.offsets,
            "tiles": segments.tiles,
            "before": found.before,
            **wire.routed(),
        }
        # Autograd saves buffers outside of a stack, so that recompute may drop and refill them.
        if room.stack is None:
            saved |= vars(buffers)
        ctx.save_for_backward(*saved.values())
        ctx.state = _PassState(
            wire=wire,
            room=room,
            segments=segments,
            num_slots=num_slots,
            own=values.own,
            stack_buffers=None if room.stack is None else buffers,
            names=tuple(saved),
        )
        ctx.weights, ctx.activation = weights, act
        return sum_TD

    @staticmethod
    @nvtx_range("experts backward")
    def backward(ctx: Any, grad_TD):  # pyright: ignore[reportIncompatibleMethodOverride]
        require_first_derivatives()
        if ctx.state is None:
            raise ValueError(RUN_ONCE)
        gives_back = ctx.state.room.gives_back()
        state, ctx.state = ctx.state, None
        saved: dict[str, Any] = dict(zip(state.names, ctx.saved_tensors, strict=True))
        fc1_bias_LG, fc2_bias_LD = saved["fc1_bias_LG"], saved["fc2_bias_LD"]
        room, wire = state.room, state.wire.rerouted(saved)
        offsets, num_sources = saved["offsets"], state.segments.num_sources
        rows_here = _Rows(
            listed=SlotList(
                **{name: saved[name] for name in ("slot_A", "length", "row_AK", "prob_AK")},
                num_sources=num_sources,
                num_slots=state.num_slots,
            ),
            segments=dataclasses.replace(state.segments, offsets=offsets, tiles=saved["tiles"]),
            buffers=state.stack_buffers or Buffers(**{name: saved[name] for name in BUFFERS}),
        )
        weights, operands = ctx.weights, ctx.weights.operands()
        needs_fc1_bias, needs_fc2_bias = ctx.needs_input_grad[4:6]
        # Sums change only if this very backward pass asks for the gradient of their weight.
        needs_fc1, needs_fc2 = wanted(ctx, 2), wanted(ctx, 3)

        # 1. Send gradients, and the tokens again if none were kept. Config and T alone decide that:
        # a rank that sent no tokens would leave its peers without them.
        own_TD, grad_TD = saved["own_TD"], grad_TD.contiguous()  # That of a sum repeats one number.
        values, tokens = wire.push(grad_TD, own_TD if wire.sends_again else None)
        tokens = tokens or Values(rows_SPD=saved["kept_SPD"], own_TD=own_TD, own=state.own)

        # 2. Refill rows that later layers overwrote.
        if room.overwritten:
            rows_here = _refill(rows_here, room, tokens, weights, wire.homes_S, gives_back)
        listed, segments, buffers = rows_here.listed, rows_here.segments, rows_here.buffers

        # 3. Make the gradient of fc2's input. From it the activation's kernel makes that of fc1's
        # result, in whose memory it stays, and once more fc2's input.
        width, fc1_width = grad_TD.shape[1], buffers.fc1_MG.shape[1]
        scaled_ND = _for_e4m3(weights, segments, width)
        to_rows = {"listed": listed, "segments": segments}
        grad_ND = rows.spread_rows(
            **values.rows(), **to_rows, homes_S=wire.homes_S, scaled=scaled_ND
        )
        operand = grad_ND if scaled_ND is None else scaled_ND
        grad_NF = gemm.rows_times_weights(operand, operands.fc2_back, segments, stored=False)
        grad_prob_N = buffers.prob_M.new_empty(segments.num_rows)
        scaled_NG = _for_e4m3(weights, segments, fc1_width)
        hidden_NF = curves.activate(
            buffers.fc1_MG,
            fc1_bias_LG,
            buffers.prob_M,
            segments,
            grad_NF,
            grad_prob_N,
            scaled=scaled_NG,
            **vars(ctx.activation),
        )
        grad_fc1_MG = buffers.fc1_MG
        del grad_NF, operand, scaled_ND

        # 4. Compute gradients of weights and biases. Tokens are spread before the return, behind
        # which peers may overwrite the memory in which they arrived again.
        grad_fc1 = grad_fc2 = grad_fc1_bias = grad_fc2_bias = None
        if fc2_bias_LD is not None:
            grad_prob_N += grouped.dot_rows(grad_ND, fc2_bias_LD, segments)
        if needs_fc2_bias:
            grad_fc2_bias = grouped.sum_rows(grad_ND, buffers.prob_M, segments, stored=False)
        if needs_fc2:
            grad_fc2 = _weight_gradient(grad_ND, hidden_NF, segments, False, weights.fc2_sums)
        del grad_ND, hidden_NF
        if needs_fc1_bias:
            grad_fc1_bias = grouped.sum_rows(grad_fc1_MG, None, segments, stored=True)
        if needs_fc1:
            rows_ND = rows.spread_rows(**tokens.rows(), **to_rows)
            grad_fc1 = _weight_gradient(grad_fc1_MG, rows_ND, segments, True, weights.fc1_sums)
            del rows_ND

        # 5. Send the gradients of tokens home. That is the last use of the rows.
        product = partial(
            gemm.rows_times_weights,
            grad_fc1_MG if scaled_NG is None else scaled_NG,
            operands.fc1_back,
            segments,
            stored=scaled_NG is None,
            at_M=None if wire.homes_S is None else buffers.home_M,
        )
        grad_TD, grad_TK = wire.home(product, listed, segments.offsets, grad_prob_N)
        if gives_back:
            layout.release(room.top, offsets, saved["before"])
            room.close()
        return grad_TD, grad_TK, grad_fc1, grad_fc2, grad_fc1_bias, grad_fc2_bias, None, None, None


def _refill(
    here: _Rows,
    room: Room,
    tokens: Values,
    weights: ExpertWeights,
    homes_S: Tensor | None,
    gives_back: bool,
) -> _Rows:
    """Compute again what later layers overwrote of fc1's result; return where the rows lie then.

    `gives_back`: no later layer has rows in the stack, so rows go back to where they were. Else
    later layers still need that memory, and all rows are computed in other memory, from 0 on.
    """
    assert room.top is not None
    segments, listed = here.segments, here.listed
    base = segments.offsets[:1]
    stale = torch.maximum(segments.offsets, room.top[2]) if gives_back else segments.offsets - base
    refilled = gemm.with_tiles(dataclasses.replace(segments, offsets=stale))
    if not gives_back:
        row_AK, like = listed.row_AK - base * (listed.row_AK >= 0), here.buffers.fc1_MG
        room = dataclasses.replace(room, stack=None)
        here = _Rows(
            listed=dataclasses.replace(listed, row_AK=row_AK),
            segments=refilled,
            buffers=room.buffers(segments.num_rows, like.shape[1], like=like),
        )
    _multiply_by_fc1(tokens, dataclasses.replace(here, segments=refilled), weights, homes_S)
    return here


def _multiply_by_fc1(
    tokens: Values,
    here: _Rows,
    weights: ExpertWeights,
    homes_S: Tensor | None,
    *,
    kept_SPD: Tensor | None = None,
) -> None:
    """Spread tokens to rows, multiply the rows by fc1's weight, and store results in the buffers.

    `kept_SPD`: takes a copy of the tokens that have rows.
    """
    segments, buffers, operands = here.segments, here.buffers, weights.operands()
    scaled_ND = _for_e4m3(weights, segments, weights.fc1_LGD.shape[2])
    rows_ND = rows.spread_rows(
        **tokens.rows(),
        listed=here.listed,
        segments=segments,
        homes_S=homes_S,
        scaled=scaled_ND,
        plain=scaled_ND is None,
        kept_SPD=kept_SPD,
        prob_M=buffers.prob_M,
        home_M=None if homes_S is None else buffers.home_M,
    )
    operand = rows_ND if scaled_ND is None else scaled_ND
    gemm.rows_times_weights(operand, operands.fc1, segments, stored=False, out=buffers.fc1_MG)


def _for_e4m3(weights: ExpertWeights, segments: Segments, width: int) -> Scaled | None:
    """Return memory for the rows of a pass in e4m3, if products run in it."""
    if weights.scaled is None:
        return None
    return Scaled.empty(segments.num_rows, width, like=weights.fc1_LGD)


def _weight_gradient(
    grad: Tensor, rows_NI: Tensor, segments: Segments, stored: bool, sums: Sums | None
) -> Tensor:
    """Return a weight's gradient, or add it to `sums` and return the stand-in of `Sums`."""
    to = () if sums is None else (sums.sums_LOI, sums.zeroed)
    product_LOI = gemm.weight_gradients(grad, rows_NI, segments, *to, stored=stored)
    return product_LOI if sums is None else sums.unspecified()
