"""Rounds: a pass that dispatches, computes and combines some of its tokens after the other.

A pass that fits its sizes to its routing goes in rounds if it would need more room than allowed:
see `padded_dispatch.exchange.fit`. Router, losses and shared experts see all tokens at once; the
steps of the dispatcher around the experts hand on tokens as they are. Where the layer asks for the
input of its experts, all rounds but the last run, and the layer's own call of its experts computes
the last one. So `MoELayer` needs no change.

All ranks go through as many rounds as the one with most tokens. A rank with fewer appends tokens
that ask for no expert, so that no round of its is empty, and cuts them off at the end.

Letters: T tokens, D hidden size, E experts, N rows of this rank's experts.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from padded_dispatch.exchange import Exchange, ExpertInput
from padded_dispatch.exchange.fit import Fitted
from padded_dispatch.ops.counters import Counters
from padded_dispatch.ops.plan import DispatchPlan, make_plan


class Rounds:
    """One pass in rounds.

    Args:
        fitted: tokens and sizes of each round.
        exchange: moves the rows of each round.
        top_k: K.
        map_TE: bool [T, E], what the router asked for.
    """

    def __init__(self, fitted: Fitted, exchange: Exchange, *, top_k: int, map_TE: Tensor) -> None:
        self._fitted = fitted
        self._exchange = exchange
        self._top_k = top_k
        self._map_TE = map_TE
        self._shape: torch.Size | None = None
        self._outputs: list[Tensor] = []
        self._last: tuple[DispatchPlan, ExpertInput] | None = None

    def until_last(
        self,
        experts: Callable[..., Any],
        tokens: Tensor,
        probs_TE: Tensor,
        counters: Counters | None,
    ) -> ExpertInput:
        """Run all rounds but the last, and return the experts' input in the last one.

        Args:
            experts: module that takes what `arguments_of_experts` returns.
            tokens: floating point [..., D], T in all.
            probs_TE: floating point [T, E].
            counters: counts the pass; None leaves it out.
        """
        self._shape = tokens.shape
        length, num_rounds = self._fitted.tokens_per_round, self._fitted.num_rounds
        missing = max(0, (num_rounds - 1) * length + 1 - self._shape[:-1].numel())
        tokens_TD, probs_TE, map_TE = (
            F.pad(tensor, (0, 0, 0, missing)) if missing else tensor
            for tensor in (tokens.flatten(0, -2), probs_TE, self._map_TE)
        )
        received = []
        for start in range(0, num_rounds * length, length):
            if self._last is not None:
                rows_ND = experts(*arguments_of_experts(self._last[1]))[0]
                self._outputs.append(self._combine(rows_ND))
            part = slice(start, start + length)
            self._last = self._dispatch(tokens_TD[part], probs_TE[part], map_TE[part])
            plan, arranged = self._last
            received.append(arranged.kept_SL)
            if counters is not None:
                counters.add_unplaced(plan.unplaced_E)
        if counters is not None:
            counters.add_received(torch.stack(received))
        assert self._last is not None
        return self._last[1]

    def after_last(self, out_ND: Tensor) -> Tensor:
        """Return the sum of every token's rows, in the shape of the tokens.

        Args:
            out_ND: the experts' output in the last round.
        """
        assert self._shape is not None
        combined_TD = torch.cat([*self._outputs, self._combine(out_ND)])
        return combined_TD[: self._shape[:-1].numel()].view(self._shape)

    def _dispatch(
        self, tokens_TD: Tensor, probs_TE: Tensor, map_TE: Tensor
    ) -> tuple[DispatchPlan, ExpertInput]:
        sizes = self._fitted.sizes
        plan = make_plan(map_TE, top_k=self._top_k, sizes=sizes)
        outgoing = self._exchange.prepare(tokens_TD, probs_TE, plan, sizes.num_rows)
        return plan, self._exchange.arrange(self._exchange.move(outgoing))

    def _combine(self, out_ND: Tensor) -> Tensor:
        assert self._last is not None
        (plan, arranged), exchange = self._last, self._exchange
        incoming = exchange.move_back(exchange.disarrange(out_ND, arranged.offsets_LS))
        return exchange.combine(incoming, plan, arranged.offsets_LS)


def arguments_of_experts(arranged: ExpertInput) -> tuple[Tensor, Tensor, Tensor]:
    """Return what Megatron passes to an experts module: rows [N, D], counts [L], probabilities [N].

    For padded rows, the counts are rows per local expert, int64 on the host: N / L each, padded
    rows included. For packed rows, they are running counts of real rows, int32 on the device.
    """
    if arranged.offsets_LS is not None:
        return arranged.rows_ND, arranged.offsets_LS[:, -1].contiguous(), arranged.probs_N
    num_local_experts = arranged.kept_SL.shape[1]
    rows_per_expert = torch.full((num_local_experts,), len(arranged.rows_ND) // num_local_experts)
    return arranged.rows_ND, rows_per_expert, arranged.probs_N
