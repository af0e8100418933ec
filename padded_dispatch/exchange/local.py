"""The exchange of one rank with itself, for experts that take packed rows: there is none.

All rows of an expert come from one source, so their place among the packed ones follows from the
plan. Tokens go straight there, and their outputs are summed where they lie: buffers of slots, which
`AllToAllExchange` would fill, pack, and fill again on the way back, do not exist.
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

    What passes between the stages has the shapes of `AllToAllExchange`, but rows [E, C, D] are
    packed already: read flat, the real ones come first.

    Args:
        num_local_experts: all experts (E).
    """

    num_sources = 1

    def __init__(self, num_local_experts: int) -> None:
        self.num_local_experts = num_local_experts

    @nvtx_range("gather")
    def prepare(self, tokens_TD: Tensor, probs_TE: Tensor, plan: DispatchPlan) -> Slots:
        """Tokens into packed rows [E, C, D], their probabilities into slots [E, C + 1]."""
        rows_ND = gather_packed(tokens_TD, plan, running_offsets(plan.kept_E[None]))
        rows_ECD = rows_ND.unflatten(0, plan.choice_of_slot_EC.shape)
        return Slots(rows_MCD=rows_ECD, meta_MC1=gather_meta(probs_TE, plan))

    @nvtx_range("regroup")
    def arrange(self, incoming: Slots) -> ExpertInput:
        """The same rows, [N, D], where they end, and the probabilities beside them."""
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
        """The sum of its packed rows for every token, [T, D]."""
        assert offsets_LS is not None
        return combine_packed(incoming.rows_MCD.flatten(0, 1), plan, offsets_LS)
