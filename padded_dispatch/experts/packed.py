"""The pass of a layer on a GPU: one autograd function from tokens to tokens.

    forward    send tokens, lay out, spread, fc1, activation, fc2 with rows sent home, sum
    backward   for overwritten rows: spread, fc1; then send gradients, spread, gradients of fc2 and
               activation; gradients of fc1's input, sent home, sum; spread, fc1's weight gradient

To spread is to copy each token, or its gradient, to all its rows. The store keeps fc1's results
until backward, or until a later pass overwrites them. A pass keeps the tokens that arrived, not
their rows, if backward will spread them again. The kernel of the activation's gradient recomputes
fc2's input and overwrites fc1's results, so backward runs once per forward pass. For products in
e4m3 the kernels that make rows also quantize them; only the next product reads quantized rows.

Pushes and returns must alternate (see `exchange.direct`), so backward always brings the gradients
of tokens home, even if they are not needed.
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
from padded_dispatch.experts.store import RUN_ONCE, Buffers, Room
from padded_dispatch.kernels import Scaled, Segments, gemm, grouped, layout, rows
from padded_dispatch.kernels import activation as curves
from padded_dispatch.utils.phases import nvtx_range, require_first_derivatives


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
class _PassState:
    """State that backward needs and autograd does not save.

    `stack_buffers`: the buffers, if they are a stack's; `own`: see `Values`.
    """

    wire: Wire
    room: Room
    row_offsets: layout.Offsets
    segments: Segments
    row_SPK: Tensor
    stack_buffers: tuple[Tensor, ...]
    own: int | None


class _Pass(torch.autograd.Function):
    @staticmethod
    @nvtx_range("experts")
    def forward(
        ctx: Any, tokens_TD, prob_TK, fc1_LGD, fc2_LDF, fc1_bias_LG, fc2_bias_LD, weights, act, call
    ):
        wire, forms = call.wire, weights.scaled
        arrived = wire.open(tokens_TD.contiguous(), prob_TK.contiguous())
        token_values, prob_SPK = arrived.values, arrived.prob_SPK
        room = call.take_room(arrived.count_SL)
        sizes = {"first": room.first, "limit": room.limit}
        counters = {} if call.counters is None else call.counters.of_receiver
        row_offsets = layout.lay_out(arrived.count_SL, room.top, **sizes, **counters)
        num_experts, fc1_width, _ = fc1_LGD.shape
        num_sources, num_slots, top_k = arrived.expert_SPK.shape
        segments = Segments(
            offsets=row_offsets.offsets,
            num_experts=num_experts,
            num_sources=num_sources,
            num_rows=min(room.max_rows, num_sources * num_slots * min(top_k, num_experts)),
            num_expected=room.share,
        )
        segments = dataclasses.replace(segments, tiles=gemm.row_tiles(segments))
        buffers = room.buffers(segments.num_rows, fc1_width, like=tokens_TD)
        # Autograd saves buffers outside of a stack, so that recompute may drop and refill them.
        tensors = tuple(vars(buffers).values())
        own_buffers, stack_buffers = (tensors, ()) if room.stack is None else ((), tensors)
        ctx.state = state = _PassState(
            wire=wire,
            room=room,
            row_offsets=row_offsets,
            segments=segments,
            row_SPK=torch.empty_like(arrived.expert_SPK),
            stack_buffers=stack_buffers,
            own=token_values.own,
        )
        keeps_tokens = room.overwritten or ctx.needs_input_grad[2]
        kept_SPD = (
            torch.empty_like(token_values.rows_SPD) if keeps_tokens and not wire.lasts else None
        )
        if room.overwritten and not wire.lasts:
            prob_SPK = prob_SPK.clone()
        layout_args = {"expert_SPK": arrived.expert_SPK, "place_SPK": arrived.place_SPK}
        layout_args |= {"level": row_offsets.level, "kept_SPD": kept_SPD}
        _multiply_by_fc1(state, token_values, prob_SPK, buffers, weights, **layout_args)
        scaled_NF = forms and Scaled.empty(segments.num_rows, fc2_LDF.shape[2], like=tokens_TD)
        hidden_NF = curves.activate(
            buffers.fc1_MG, fc1_bias_LG, buffers.prob_M, segments, scaled=scaled_NF, **vars(act)
        )
        product = partial(
            gemm.rows_times_weights,
            scaled_NF or hidden_NF,
            fc2_LDF if forms is None else forms.fc2_LDF,
            segments,
            stored=False,
            at_M=None if wire.homes_S is None else buffers.home_M,
            bias_LO=fc2_bias_LD,
            prob_M=buffers.prob_M,
        )
        sum_TD, _ = wire.home(product, state.row_SPK, row_offsets.offsets)
        tokens_SPD = token_values.rows_SPD if wire.lasts else kept_SPD
        tokens = (tokens_SPD, token_values.own_TD) if keeps_tokens else (None, None)
        probs = prob_SPK if room.overwritten else None
        ctx.save_for_backward(
            fc1_LGD, fc2_LDF, fc1_bias_LG, fc2_bias_LD, *tokens, probs, *own_buffers
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
        fc1_LGD, fc2_LDF, fc1_bias_LG, fc2_bias_LD, *saved = ctx.saved_tensors
        tokens_SPD, own_TD, prob_SPK, *own_buffers = saved
        token_values = Values(rows_SPD=tokens_SPD, own_TD=own_TD, own=state.own)
        fc1_MG, prob_M, home_M = own_buffers or state.stack_buffers
        wire, segments, row_SPK = state.wire, state.segments, state.row_SPK
        weights, forms, num_rows = ctx.weights, ctx.weights.scaled, segments.num_rows
        needs_fc1, needs_fc2, needs_fc1_bias, needs_fc2_bias = ctx.needs_input_grad[2:6]
        if state.room.overwritten:
            stale_offsets = torch.maximum(segments.offsets, state.room.top[2])
            if not gives_back:  # Later calls may have rows there: recompute all in other memory.
                base, room = segments.offsets[:1], dataclasses.replace(state.room, stack=None)
                stale_offsets, row_SPK = segments.offsets - base, row_SPK - base * (row_SPK >= 0)
                scratch_buffers = room.buffers(num_rows, fc1_MG.shape[1], like=fc1_MG)
                fc1_MG, prob_M, home_M = vars(scratch_buffers).values()
            stale_rows = dataclasses.replace(segments, offsets=stale_offsets)
            stale_rows = dataclasses.replace(stale_rows, tiles=gemm.row_tiles(stale_rows))
            stale_state = dataclasses.replace(state, segments=stale_rows, row_SPK=row_SPK)
            buffers = Buffers(fc1_MG=fc1_MG, prob_M=prob_M, home_M=home_M)
            _multiply_by_fc1(stale_state, token_values, prob_SPK, buffers, weights)
            segments = segments if gives_back else stale_rows
        spread = partial(rows.spread_rows, row_SPK=row_SPK, segments=segments)
        values = wire.push(grad_TD.contiguous())
        scaled_ND = forms and Scaled.empty(num_rows, fc1_LGD.shape[2], like=fc1_LGD)
        grad_ND = spread(**vars(values), homes_S=wire.homes_S, scaled=scaled_ND)
        fc2_LFD = fc2_LDF.transpose(1, 2) if forms is None else forms.fc2_LFD
        grad_NF = gemm.rows_times_weights(scaled_ND or grad_ND, fc2_LFD, segments, stored=False)
        grad_prob_N = prob_M.new_empty(num_rows)
        scaled_NG = forms and Scaled.empty(num_rows, fc1_LGD.shape[1], like=fc1_LGD)
        hidden_NF = curves.activate(
            fc1_MG,
            fc1_bias_LG,
            prob_M,
            segments,
            grad_NF,
            grad_prob_N,
            scaled=scaled_NG,
            **vars(ctx.activation),
        )
        del grad_NF, scaled_ND
        grad_fc1_MG = fc1_MG  # Overwritten.
        grad_fc2_bias = grad_fc1_bias = None
        if fc2_bias_LD is not None:
            grad_prob_N += grouped.dot_rows(grad_ND, fc2_bias_LD, segments)
        if needs_fc2_bias:
            grad_fc2_bias = grouped.sum_rows(grad_ND, prob_M, segments, stored=False)
        grad_fc1 = grad_fc2 = None
        if needs_fc2:
            grad_fc2 = _weight_gradient(grad_ND, hidden_NF, segments, False, weights.fc2_sums)
        del grad_ND, hidden_NF
        product = partial(
            gemm.rows_times_weights,
            scaled_NG or grad_fc1_MG,
            fc1_LGD.transpose(1, 2) if forms is None else forms.fc1_LDG,
            segments,
            stored=scaled_NG is None,
            at_M=None if wire.homes_S is None else home_M,
        )
        grad_TD, grad_TK = wire.home(product, row_SPK, segments.offsets, grad_prob_N)
        if needs_fc1_bias:
            grad_fc1_bias = grouped.sum_rows(grad_fc1_MG, None, segments, stored=True)
        if needs_fc1:
            rows_ND = spread(**vars(token_values))
            grad_fc1 = _weight_gradient(grad_fc1_MG, rows_ND, segments, True, weights.fc1_sums)
        if gives_back:  # That was the last use of the rows.
            layout.release(state.room.top, state.row_offsets)
            state.room.close()
        return grad_TD, grad_TK, grad_fc1, grad_fc2, grad_fc1_bias, grad_fc2_bias, None, None, None


def _multiply_by_fc1(
    state: _PassState,
    token_values: Values,
    prob_SPK: Tensor,
    buffers: Buffers,
    weights: ExpertWeights,
    **layout_args: Any,
) -> None:
    """Spread tokens to rows, multiply the rows by fc1's weight, and store results in `buffers`."""
    forms, fc1_LGD, homes_S = weights.scaled, weights.fc1_LGD, state.wire.homes_S
    scaled_ND = forms and Scaled.empty(state.segments.num_rows, fc1_LGD.shape[2], like=fc1_LGD)
    rows_ND = rows.spread_rows(
        **vars(token_values),
        row_SPK=state.row_SPK,
        segments=state.segments,
        homes_S=homes_S,
        scaled=scaled_ND,
        plain=scaled_ND is None,
        prob_SPK=prob_SPK,
        prob_M=buffers.prob_M,
        home_M=None if homes_S is None else buffers.home_M,
        **layout_args,
    )
    weight_LGD = fc1_LGD if forms is None else forms.fc1_LGD
    gemm.rows_times_weights(
        scaled_ND or rows_ND, weight_LGD, state.segments, stored=False, out=buffers.fc1_MG
    )


def _weight_gradient(
    grad: Tensor, rows_NI: Tensor, segments: Segments, stored: bool, sums: Sums | None
) -> Tensor:
    """Return a weight's gradient, or add it to `sums` and return the stand-in of `Sums`."""
    to = () if sums is None else (sums.sums_LOI, sums.zeroed)
    product_LOI = gemm.weight_gradients(grad, rows_NI, segments, *to, stored=stored)
    return product_LOI if sums is None else sums.unspecified()
