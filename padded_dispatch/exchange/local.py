"""The exchange for one rank and packed rows: tokens go straight to their packed rows.

All rows of an expert come from one source, so the plan alone decides where each packed row lies.
`prepare` writes the tokens there, and `combine` sums the experts' outputs where they lie.
`AllToAllExchange` would fill buffers of slots, pack them, and fill slots again on the way back.

If all experts share one pool, its slots are the packed rows already.

Letters: T tokens, E experts, D hidden size, G pools of P slots, N = G * P rows, L = E local
experts, S = 1 source, K experts per token, X = E / G; see `padded_dispatch.config`. GPX: the
numbers beside rows, [G, P + X].
"""

import torch
from torch import Tensor

from padded_dispatch.exchange import ExpertInput, PackedAtOnce, Slots
from padded_dispatch.routing.plan import DispatchPlan
from padded_dispatch.routing.rows import (
    combine_packed,
    gather_meta,
    gather_packed,
    pack_rows,
    running_offsets,
)
from padded_dispatch.utils.nvtx import nvtx_range


class LocalExchange(PackedAtOnce):
    """`Exchange` without peers.

    Between the stages, tensors have the shapes of `AllToAllExchange`, but rows [G, P, D] are packed
    already: as [N, D], the real ones come first.
    """

    num_sources = 1

    @nvtx_range("gather")
    def prepare(
        self, tokens_TD: Tensor, probs_TE: Tensor, plan: DispatchPlan, num_rows: int
    ) -> Slots:
        """Gather tokens into packed rows [G, P, D], and probabilities into slots [G, P + X]."""
        rows_ND = gather_packed(tokens_TD, plan, running_offsets(plan.kept_E[None]))
        rows_GPD = rows_ND.unflatten(0, plan.choice_of_slot_GP.shape)
        return Slots(rows_MPD=rows_GPD, meta_MPX=gather_meta(probs_TE, plan))

    @nvtx_range("regroup")
    def arrange(self, incoming: Slots) -> ExpertInput:
        """Return the same rows as [N, D], with their offsets and packed probabilities."""
        meta_GPX, pool_slots = incoming.meta_MPX, incoming.rows_MPD.shape[1]
        assert meta_GPX is not None
        kept_SL = meta_GPX[:, pool_slots:].detach().reshape(1, -1).to(torch.int32)
        offsets_LS = running_offsets(kept_SL)
        probs_GP = meta_GPX[:, :pool_slots]
        if probs_GP.shape[0] == 1:
            probs_N = probs_GP.flatten()
        else:
            probs_N = pack_rows(probs_GP[..., None], offsets_LS).squeeze(1)
        return ExpertInput(
            rows_ND=incoming.rows_MPD.flatten(0, 1),
            probs_N=probs_N,
            kept_SL=kept_SL,
            offsets_LS=offsets_LS,
        )

    @nvtx_range("combine")
    def combine(self, incoming: Slots, plan: DispatchPlan, offsets_LS: Tensor | None) -> Tensor:
        """Return the sum of every token's packed rows, [T, D]."""
        assert offsets_LS is not None
        return combine_packed(incoming.rows_MPD.flatten(0, 1), plan, offsets_LS)
