"""The exchange of one rank with itself, for experts that take packed rows: there is none.

All rows of an expert come from one source, so their place among the packed ones follows from the
plan. Tokens go straight there, and their outputs are summed where they lie: buffers of slots, which
`CollectiveExchange` would fill, pack, and fill again on the way back, do not exist.
"""

import torch
from torch import Tensor

from padded_dispatch.exchange import ExpertInput, PackedAtOnce, Slots
from padded_dispatch.ops.plan import DispatchPlan
from padded_dispatch.ops.rows import (
    combine_packed,
    gather_packed,
    gather_side,
    pack_rows,
    running_ends,
)
from padded_dispatch.utils.nvtx import stage


class LocalExchange(PackedAtOnce):
    """`Exchange` without peers.

    What passes between the stages has the shapes of `CollectiveExchange`, but rows [E, C, D] are
    packed already: read flat, the real ones come first.

    Args:
        num_local_experts: all experts (E).
    """

    num_sources = 1

    def __init__(self, num_local_experts: int) -> None:
        self.num_local_experts = num_local_experts

    @stage("gather")
    def prepare(self, tokens_TD: Tensor, probs_TE: Tensor, plan: DispatchPlan) -> Slots:
        """Tokens into packed rows [E, C, D], their probabilities into slots [E, C + 1]."""
        rows_ND = gather_packed(tokens_TD, plan, running_ends(plan.kept_E[None]))
        rows_ECD = rows_ND.unflatten(0, plan.choice_of_slot_EC.shape)
        return Slots(rows_MCD=rows_ECD, side_MC1=gather_side(probs_TE, plan))

    @stage("regroup")
    def arrange(self, incoming: Slots) -> ExpertInput:
        """The same rows, [N, D], where they end, and the probabilities beside them."""
        side_EC1 = incoming.side_MC1
        assert side_EC1 is not None
        kept_SL = side_EC1[None, :, -1].detach().to(torch.int32)
        ends_LS = running_ends(kept_SL)
        return ExpertInput(
            rows_ND=incoming.rows_MCD.flatten(0, 1),
            probs_N=pack_rows(side_EC1[:, :-1, None], ends_LS, zeros=False).squeeze(1),
            kept_SL=kept_SL,
            ends_LS=ends_LS,
        )

    @stage("combine")
    def combine(self, incoming: Slots, plan: DispatchPlan, ends_LS: Tensor | None) -> Tensor:
        """The sum of its packed rows for every token, [T, D]."""
        assert ends_LS is not None
        return combine_packed(incoming.rows_MCD.flatten(0, 1), plan, ends_LS)
