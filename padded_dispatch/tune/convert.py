"""Convert capacity factors between the five meanings that the field gives the word.

Each of them sizes a static buffer. Two factors count as equal when their buffers hold equally many
rows per rank: equal in memory and on the wire, not in what they drop, since the meanings differ in
which rows share a buffer. `tune.replay` computes what would be dropped.

    source      slots per (source rank, expert), relative to balance: C = ceil(T * K / E * f).
                Ours, and Megatron-Core's `moe_expert_capacity_factor` (`moe_utils.get_capacity`,
                0.16.1 to 0.19.0), DeepSpeed's and Tutel's `capacity_factor`.
    rank        rows per receiving rank, shared by its experts, relative to balance:
                int(T * K * f). Megatron-Core's `moe_expert_rank_capacity_factor` (0.18 and 0.19,
                `token_dispatcher._HybridEPManager.setup_metadata`); there T is first padded.
    worst-case  rows per receiving rank, relative to the most that can come:
                T * R * min(L, K) * f. torchtitan's `non_blocking_capacity_factor`
                (`HybridEPTokenDispatcher.Config`, commit b5bcd76c), between 0 and 1.
    max-tokens  tokens that a source may send at most: a buffer of [L, M * R] rows, so C = M.
                DeepEP's `num_max_dispatch_tokens_per_rank` (low-latency kernels). It cannot drop:
                M is at least T.
    stash       rows kept for backward, paged, per layer and micro-batch: T * K * f for f above 0,
                the most rows that came times -f below. Megatron-Core's
                `moe_paged_stash_buffer_size_factor_cuda` (0.18 and 0.19, `paged_stash.py`). It
                stores rows and limits no routing.

FP8 recipes round `rank` and `worst-case` buffers up to their alignment, which is not included.

Letters: T tokens on a rank; K experts per token; E experts; L experts on a rank; R ranks; C slots
per (source rank, expert); f the factor; M the maximum of tokens.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from padded_dispatch.config import require

Meaning = Literal["source", "rank", "worst-case", "max-tokens", "stash"]
MEANINGS: tuple[str, ...] = get_args(Meaning)


@dataclass(frozen=True, kw_only=True)
class RoutingSizes:
    """The sizes that a conversion needs.

    Args:
        num_tokens: tokens on one rank (T).
        num_experts: experts in all (E).
        top_k: experts per token (K).
        num_ranks: ranks in the expert-parallel group (R), a divisor of E.
        max_rows: the most rows that a rank received in one micro-batch, as measured; for a
            negative stash factor only.

    Raises:
        ValueError: names the field, its value and what to change.
    """

    num_tokens: int
    num_experts: int
    top_k: int
    num_ranks: int
    max_rows: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_experts", "top_k", "num_ranks"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "be at least 1")
        divides = self.num_experts % self.num_ranks == 0
        require(divides, "num_ranks", self.num_ranks, f"divide num_experts={self.num_experts}")

    @property
    def balanced_rows(self) -> int:
        """Rows that every rank receives from a perfectly balanced router: T * K."""
        return self.num_tokens * self.top_k

    @property
    def worst_rows(self) -> int:
        """Rows that a rank receives when every token chooses as many of its experts as it can."""
        local = self.num_experts // self.num_ranks
        return self.num_tokens * self.num_ranks * min(local, self.top_k)


def to_source(value: float, meaning: Meaning, sizes: RoutingSizes) -> float:
    """Return the factor in our meaning whose buffer holds as many rows as `value` in `meaning`.

    Example: T = 4,096, K = 8, E = 128, R = 8: torchtitan's 0.2 is 1.6 in ours, and DeepEP's 4,096
    tokens are 16, which drops nothing.

    Raises:
        ValueError: `value` is invalid in that meaning, or has no counterpart in ours.
    """
    _check(value, meaning, sizes)
    if meaning == "worst-case":
        return value * sizes.worst_rows / sizes.balanced_rows
    if meaning == "max-tokens":
        return value * sizes.num_experts / sizes.balanced_rows
    if meaning == "stash" and value < 0:
        assert sizes.max_rows is not None
        return -value * sizes.max_rows / sizes.balanced_rows
    return value


def from_source(factor: float, meaning: Meaning, sizes: RoutingSizes) -> float:
    """Return the number in `meaning` whose buffer holds as many rows as ours at `factor`.

    A stash is given relative to balance (above 0). A factor beyond the worst case becomes 1, which
    is the most that torchtitan takes and drops nothing.

    Raises:
        ValueError: there is no such number.
    """
    _check(factor, "source", sizes)
    if meaning == "worst-case":
        return min(1.0, factor * sizes.balanced_rows / sizes.worst_rows)
    if meaning == "max-tokens":
        capacity = math.ceil((sizes.balanced_rows / sizes.num_experts) * factor)
        if capacity < sizes.num_tokens:
            least = sizes.num_experts / sizes.top_k
            raise ValueError(
                f"capacity factor must be at least {least:g} for max-tokens, got {factor:g}: "
                f"DeepEP drops nothing and needs num_tokens={sizes.num_tokens} slots, not "
                f"{capacity}"
            )
        return sizes.num_tokens
    return factor


def _check(value: float, meaning: Meaning, sizes: RoutingSizes) -> None:
    require(meaning in MEANINGS, "meaning", meaning, f"be one of {', '.join(MEANINGS)}")
    valid = math.isfinite(value) and (value > 0 or (value < 0 and meaning == "stash"))
    require(valid, meaning, value, "be a finite number above 0")
    require(meaning != "worst-case" or value <= 1, meaning, value, "be at most 1")
    require(
        meaning != "max-tokens" or (value == int(value) and value >= sizes.num_tokens),
        meaning,
        value,
        f"be a whole number of at least num_tokens={sizes.num_tokens}, since DeepEP drops nothing",
    )
    require(
        value > 0 or sizes.max_rows is not None,
        meaning,
        value,
        "be above 0 where max_rows is not known",
        "give max_rows, the most rows that a rank received",
    )
