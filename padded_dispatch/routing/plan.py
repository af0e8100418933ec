"""The plan of a source: which experts each token has, and which row of the source each one is.

With probabilities it is all that a receiver needs to lay out and sum the rows of a source. A
token's experts are in ascending order; every sum over them runs in this order. Plain torch runs on
CPUs and is the specification; on CUDA tensors kernels give the same bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from padded_dispatch.utils.nvtx import nvtx_range


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of one source rank. All tensors are contiguous int32 without a gradient.

    Attributes:
        expert_TK: the experts of each token, ascending; -1 after the last.
        place_TK: index of the row among the source's rows for that expert, in token order; -1 where
            there is no expert.
        kept_E: rows for each expert. A token has at most K rows, those of its first K experts.
    """

    expert_TK: Tensor
    place_TK: Tensor
    kept_E: Tensor


@nvtx_range("plan")
def make_plan(map_TE: Tensor, *, top_k: int) -> Plan:
    """Return the plan of a routing map.

    Args:
        map_TE: bool [T, E], T at least 1.
        top_k: experts per token that the plan has room for (K).

    Example: K = 2, `map = [[1, 0, 1], [0, 0, 1], [0, 0, 0]]` give `expert = [[0, 2], [2, -1], [-1,
    -1]]`, `place = [[0, 0], [1, -1], [-1, -1]]` and `kept = [1, 0, 2]`.
    """
    plan = plan_in_torch
    if map_TE.is_cuda:
        from padded_dispatch.kernels.plan import plan
    expert_TK, place_TK, kept_E = plan(map_TE, top_k)
    return Plan(expert_TK=expert_TK, place_TK=place_TK, kept_E=kept_E)


def plan_in_torch(map_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors of a plan in plain torch: the specification of `kernels.plan`."""
    num_tokens, num_experts = map_TE.shape
    before_TE = map_TE.cumsum(1) - map_TE.long()
    row_TE = map_TE & (before_TE < top_k)
    place_TE = row_TE.cumsum(0, dtype=torch.int32) - 1
    # Entries without a row go to column K, which is cut off.
    k_TE = torch.where(row_TE, before_TE, top_k)
    none_TK = place_TE.new_full((num_tokens, top_k + 1), -1)
    number_E = torch.arange(num_experts, dtype=torch.int32, device=map_TE.device)
    expert_TE = number_E.expand(num_tokens, -1)
    expert_TK, place_TK = (
        none_TK.scatter(1, k_TE, of_TE)[:, :top_k].contiguous() for of_TE in (expert_TE, place_TE)
    )
    return expert_TK, place_TK, row_TE.sum(0, dtype=torch.int32)


def choice_probs(probs_TE: Tensor, expert_TK: Tensor) -> Tensor:
    """Return the probability of every choice, [T, K], at least fp32; 0 where there is no expert.

    Differentiable in `probs_TE`, which is read only where a token has an expert.
    """
    if probs_TE.is_cuda:
        from padded_dispatch.kernels.plan import ChoiceProbs

        return ChoiceProbs.apply(probs_TE, expert_TK)
    prob_TK = probs_TE.gather(1, expert_TK.clamp(min=0).long())
    prob_TK = prob_TK.to(torch.promote_types(probs_TE.dtype, torch.float32))
    return torch.where(expert_TK >= 0, prob_TK, 0)
