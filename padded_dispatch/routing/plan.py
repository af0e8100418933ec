"""The plan of a source: which experts each token has, and which row of the source each one is.

It is all that a receiver needs to know about the tokens of a source. It says nothing about layouts
or ranks. A token's experts are in ascending order, which is the order of every sum over them. The
rows of one (source, expert) are numbered by token.

Letters: T tokens, K experts per token, E experts.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of one source rank. All tensors are int32 without a gradient.

    Attributes:
        expert_TK: the experts of each token, ascending; -1 behind the last.
        place_TK: number of this row among the source's rows for that expert, from 0, by token; -1
            where there is no expert.
        kept_E: rows for each expert.
        unplaced_E: rows of the map without a place: beyond K per token. Must be zero; nonzero means
            that the map had more than K experts for a token.
    """

    expert_TK: Tensor
    place_TK: Tensor
    kept_E: Tensor
    unplaced_E: Tensor


def make_plan(map_TE: Tensor, *, top_k: int) -> Plan:
    """Number the rows of a map.

    Args:
        map_TE: bool [T, E], T at least 1.
        top_k: experts per token that the plan has room for (K).

    Example: K = 2, `map = [[1, 0, 1], [0, 0, 1], [0, 0, 0]]` give `expert = [[0, 2], [2, -1], [-1,
    -1]]`, `place = [[0, 0], [1, -1], [-1, -1]]` and `kept = [1, 0, 2]`.
    """
    raise NotImplementedError


def choice_probs(probs_TE: Tensor, expert_TK: Tensor) -> Tensor:
    """Return the probability of every choice, [T, K], at least fp32; 0 where there is none.

    Differentiable in `probs_TE`.
    """
    raise NotImplementedError
