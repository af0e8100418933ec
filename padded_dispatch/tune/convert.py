"""Capacity factors, from and into each of the five meanings that the field gives the word.

Every one of them sizes a static buffer. Two factors are taken as equal when the buffers hold
equally many rows per rank: equal in memory and on the wire, not in what they drop, since the
meanings differ in who may share. What would be dropped is for the what-if to say.

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

FP8 recipes round `rank` and `worst-case` buffers up to their alignment, which is not in here.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

Meaning = Literal["source", "rank", "worst-case", "max-tokens", "stash"]
MEANINGS: tuple[str, ...] = get_args(Meaning)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a conversion needs to know.

    Args:
        num_tokens: tokens on one rank (T).
        num_experts: experts in all (E).
        top_k: experts per token (K).
        num_ranks: ranks in the expert-parallel group (R), a divisor of E.
        max_rows: the most rows that a rank received in one pass, as measured; for a negative
            stash factor only.

    Raises:
        ValueError: names what is not possible and what to change.
    """

    num_tokens: int
    num_experts: int
    top_k: int
    num_ranks: int
    max_rows: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_experts", "top_k", "num_ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not possible: give at least 1")
        if self.num_experts % self.num_ranks:
            raise ValueError(
                f"num_ranks={self.num_ranks} is not possible: it must divide "
                f"num_experts={self.num_experts}"
            )

    @property
    def balanced_rows(self) -> int:
        """Rows that every rank gets when the router is in perfect balance: T * K."""
        return self.num_tokens * self.top_k

    @property
    def worst_rows(self) -> int:
        """Rows that a rank gets when every token wants as many of its experts as it can."""
        local = self.num_experts // self.num_ranks
        return self.num_tokens * self.num_ranks * min(local, self.top_k)


def to_source(value: float, meaning: Meaning, sizes: Sizes) -> float:
    """The factor in our meaning whose buffer holds as many rows as `value` in theirs.

    Example: T = 4,096, K = 8, E = 128, R = 8: torchtitan's 0.2 is 1.6 in ours, and DeepEP's 4,096
    tokens are 16, which drops nothing.

    Raises:
        ValueError: where `value` means nothing there, or has no counterpart here.
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


def from_source(factor: float, meaning: Meaning, sizes: Sizes) -> float:
    """The number in `meaning` whose buffer holds as many rows as ours at `factor`.

    A stash comes out relative to balance (above 0). What is more than the worst case comes out as
    1, which is all that torchtitan takes and drops nothing.

    Raises:
        ValueError: where there is none.
    """
    _check(factor, "source", sizes)
    if meaning == "worst-case":
        return min(1.0, factor * sizes.balanced_rows / sizes.worst_rows)
    if meaning == "max-tokens":
        capacity = math.ceil((sizes.balanced_rows / sizes.num_experts) * factor)
        if capacity < sizes.num_tokens:
            least = sizes.num_experts / sizes.top_k
            raise ValueError(
                f"capacity factor {factor:g} has no counterpart in max-tokens: DeepEP drops "
                f"nothing, so {capacity} slots must be at least num_tokens={sizes.num_tokens} "
                f"(a factor of {least:g})"
            )
        return sizes.num_tokens
    return factor


def _check(value: float, meaning: Meaning, sizes: Sizes) -> None:
    if meaning not in MEANINGS:
        raise ValueError(
            f"meaning={meaning!r} is not possible: choose one of {', '.join(MEANINGS)}"
        )
    if not math.isfinite(value) or value == 0 or (value < 0 and meaning != "stash"):
        raise ValueError(f"{meaning} {value:g} is not possible: give a finite number above 0")
    if meaning == "worst-case" and value > 1:
        raise ValueError(f"worst-case {value:g} is not possible: it is at most 1")
    if meaning == "max-tokens" and (value != int(value) or value < sizes.num_tokens):
        raise ValueError(
            f"max-tokens {value:g} is not possible: a whole number of at least "
            f"num_tokens={sizes.num_tokens}, since DeepEP drops nothing"
        )
    if meaning == "stash" and value < 0 and sizes.max_rows is None:
        raise ValueError(
            f"stash {value:g} is relative to the most rows that a rank received: give max_rows"
        )
