"""The exchange for one rank and packed rows: tokens go straight to their packed rows.

All rows of an expert come from one source, so the plan alone decides where each packed row lies.
`prepare` writes the tokens there, and `combine` sums the experts' outputs where they lie.
`AllToAllExchange` would fill buffers of slots, pack them, and fill slots again on the way back.

Letters: T tokens, E experts, D hidden size, C slots per expert, N = E * C rows, L = E local
experts, S = 1 source, K experts per token; see `padded_dispatch.config`.
"""

import torch
from torch import Tensor

from padded_dispatch.exchange import ExpertInput, PackedAtOnce, Slots
from padded_dispatch.ops.plan import DispatchPlan
from padded_dispatch.ops.rows import (
    combine_packed,
    gather_meta,
    gather_packed,
    pack_rows,
    running_offsets,
)
from padded_dispatch.utils.nvtx import nvtx_range


class LocalExchange(PackedAtOnce):
    """`Exchange` without peers.

    Between the stages, tensors have the shapes of `AllToAllExchange`, but rows [E, C, D] are packed
    already: as [N, D], the real ones come first.

    Args:
        num_local_experts: all experts (E).
    """

    num_sources = 1

    def __init__(self, num_local_experts: int) -> None:
        self.num_local_experts = num_local_experts

    @nvtx_range("gather")
    def prepare(self, tokens_TD: Tensor, probs_TE: Tensor, plan: DispatchPlan) -> Slots:
        """Gather tokens into packed rows [E, C, D], and probabilities into slots [E, C + 1]."""
        rows_ND = gather_packed(tokens_TD, plan, running_offsets(plan.kept_E[None]))
        rows_ECD = rows_ND.unflatten(0, plan.choice_of_slot_EC.shape)
        return Slots(rows_MCD=rows_ECD, meta_MC1=gather_meta(probs_TE, plan))

    @nvtx_range("regroup")
    def arrange(self, incoming: Slots) -> ExpertInput:
        """Return the same rows as [N, D], with their offsets and packed probabilities."""
        meta_EC1 = incoming.meta_MC1
        assert meta_EC1 is not None
        kept_SL = meta_EC1[None, :, -1].detach().to(torch.int32)
        offsets_LS = running_offsets(kept_SL)
        return ExpertInput(
            rows_ND=incoming.rows_MCD.flatten(0, 1),
            probs_N=pack_rows(meta_EC1[:, :-1, None], offsets_LS, zeros=False).squeeze(1),
            kept_SL=kept_SL,
            offsets_LS=offsets_LS,
        )

    @nvtx_range("combine")
    def combine(self, incoming: Slots, plan: DispatchPlan, offsets_LS: Tensor | None) -> Tensor:
        """Return the sum of every token's packed rows, [T, D]."""
        assert offsets_LS is not None
        return combine_packed(incoming.rows_MCD.flatten(0, 1), plan, offsets_LS)
