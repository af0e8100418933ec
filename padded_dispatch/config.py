"""Capacity arithmetic: pure integers, known before anything is allocated.

Letters, used in every file of this package:
T tokens on this rank; K experts per token; E experts in all; L experts on this rank; R ranks in
the expert-parallel group; S sources of an expert's rows (R times the expert-tensor-parallel size);
C capacity, the slots that one source owns in one expert's buffer; D hidden size; N = L * S * C.

`capacity factor` means at least five things in the field. Here it is Megatron's: slots per
(source rank, expert) relative to perfect balance.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

Policy = Literal["probs", "position", "random", "priority"]
POLICIES: tuple[str, ...] = get_args(Policy)

Remedy = Literal["none", "renormalize", "reroute"]
REMEDIES: tuple[str, ...] = get_args(Remedy)


# The capacity factor that drops nothing: every token has a slot with every expert (C = T).
NO_DROP = math.inf


def require(ok: object, field: str, value: object, rule: str, fix: str = "") -> None:
    """Raise `FIELD must RULE, got VALUE; FIX` unless `ok`.

    Example: `require(k <= e, "top_k", 9, "be at most num_experts=8", "lower top_k")` raises "top_k
    must be at most num_experts=8, got 9; lower top_k".

    Raises:
        ValueError: unless `ok`.
    """
    if not ok:
        raise ValueError(f"{field} must {rule}, got {value!r}" + (f"; {fix}" if fix else ""))


@dataclass(frozen=True, kw_only=True)
class BufferBytes:
    """Bytes of each buffer that one layer's dispatch and combine hold on one rank.

    `send`: rows and probabilities in slots, before the exchange; packed rows, where one rank packs
    its own. `receive`: the same after it, and gathered over the expert-tensor-parallel group.
    `experts`: what the experts read, as far as it is not a view of that: rows where they are
    regrouped, probabilities, counts. `back`: the experts' output on its way home. `plan`: its maps.
    Probabilities are taken as fp32; copies that live within one stage only, and 8 bytes per choice
    that packing with one rank keeps, are not in it.
    """

    send: int
    receive: int
    experts: int
    back: int
    plan: int

    @property
    def total(self) -> int:
        """All of it, as if nothing were freed in between: an upper bound in bytes."""
        return self.send + self.receive + self.experts + self.back + self.plan


@dataclass(frozen=True, kw_only=True)
class DispatchConfig:
    """What decides every shape on the padded path.

    Args:
        num_experts: experts in all (E), a multiple of `num_ranks`.
        top_k: most experts that a token can have (K).
        capacity_factor: slots per (source, expert) relative to perfect balance; `NO_DROP`
            drops nothing and costs C = T.
        min_capacity: least slots per (source, expert).
        alignment: an expert's buffer (S * C rows) is a multiple of this, as a recipe may need.
        policy: who keeps a slot when more rows ask than fit: "probs" (the most probable),
            "position" (the first tokens), "random" (a draw), or "priority" (first choices before
            second ones, sure tokens first); see `padded_dispatch.ops.select`.
        remedy: what becomes of dropped rows: "none", "renormalize" (their tokens' kept rows weigh
            more) or "reroute" (to the next-best expert with a free slot); see
            `padded_dispatch.ops.overflow`.
        reroute_rounds: how often "reroute" tries.
        num_ranks: ranks in the expert-parallel group (R).
        etp_size: ranks that split every expert's ffn between them (expert tensor parallel).

    Raises:
        ValueError: names the field, its value and what to change.
    """

    num_experts: int
    top_k: int
    capacity_factor: float = NO_DROP
    min_capacity: int = 1
    alignment: int = 1
    policy: Policy = "probs"
    remedy: Remedy = "none"
    reroute_rounds: int = 1
    num_ranks: int = 1
    etp_size: int = 1
    _capacity_step: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in (
            "num_experts",
            "top_k",
            "min_capacity",
            "alignment",
            "reroute_rounds",
            "num_ranks",
            "etp_size",
        ):
            value = getattr(self, name)
            require(
                isinstance(value, int) and not isinstance(value, bool) and value >= 1,
                name,
                value,
                "give a whole number of at least 1",
            )
        require(
            self.top_k <= self.num_experts,
            "top_k",
            self.top_k,
            f"a token cannot have more than num_experts={self.num_experts} experts",
        )
        require(
            self.num_experts % self.num_ranks == 0,
            "num_experts",
            self.num_experts,
            f"make it a multiple of num_ranks={self.num_ranks}",
        )
        factor = self.capacity_factor
        require(
            isinstance(factor, int | float) and factor > 0,
            "capacity_factor",
            factor,
            "be a number above 0",
            "set NO_DROP to drop nothing",
        )
        for name, value, choices in (
            ("policy", self.policy, POLICIES),
            ("remedy", self.remedy, REMEDIES),
        ):
            require(value in choices, name, value, f"choose one of {', '.join(choices)}")
        # Here and not in capacity(): Dynamo cannot trace math.gcd of a number that it generalises.
        step = self.alignment // math.gcd(self.alignment, self.num_sources)
        object.__setattr__(self, "_capacity_step", step)

    @property
    def num_local_experts(self) -> int:
        """Experts on one rank (L)."""
        return self.num_experts // self.num_ranks

    @property
    def num_sources(self) -> int:
        """Ranks whose rows meet in one expert's buffer (S)."""
        return self.num_ranks * self.etp_size

    def capacity(self, num_tokens: int) -> int:
        """Slots per (source, expert) for T = `num_tokens` tokens on this rank.

        `max(1, min(T, max(ceil(T * K / E * factor), min_capacity)))`, then up to the next C with
        `S * C % alignment == 0`; slots beyond T stay empty. The product is evaluated in the order
        of `megatron.core.transformer.moe.moe_utils.get_capacity`, so that both round alike.

        Example: T=4096, K=8, E=128, factor 1.25 gives C = 320.

        Raises:
            ValueError: for T = 0; a rank without tokens has no static shape to take part with.
        """
        require(
            num_tokens >= 1,
            "num_tokens",
            num_tokens,
            "every rank needs at least one token per step; pad the batch",
        )
        slots = num_tokens
        if self.capacity_factor != NO_DROP:
            demand = num_tokens * self.top_k
            slots = math.ceil((demand / self.num_experts) * self.capacity_factor)
        slots = max(1, min(num_tokens, max(slots, self.min_capacity)))
        return -(-slots // self._capacity_step) * self._capacity_step

    def buffer_bytes(
        self, num_tokens: int, hidden_size: int, element_size: int, *, packed: bool = False
    ) -> BufferBytes:
        """Bytes of one layer's buffers on one rank, before anything is allocated.

        Args:
            num_tokens: tokens on this rank (T).
            hidden_size: width of a row (D).
            element_size: bytes of one element of a row: 2 for bf16, 4 for fp32.
            packed: the experts take packed rows, whose ends lie beside the counts.
        """
        capacity = self.capacity(num_tokens)
        per_row = hidden_size * element_size
        # Beside each row travels its fp32 probability, beside each expert's rows their fp32 count.
        send = self.num_experts * (capacity * (per_row + 4) + 4)
        home = self.num_experts * capacity * per_row
        buffers = self.num_local_experts * self.num_sources
        rows = buffers * capacity
        exchanged, shared = self.num_ranks > 1, self.etp_size > 1
        regrouped = self.num_sources > 1 and (packed or self.num_local_experts > 1)
        return BufferBytes(
            send=send,
            receive=send * exchanged + self.etp_size * send * shared,
            experts=rows * (per_row * regrouped + 4) + 4 * buffers * (1 + packed),
            back=rows * per_row + home * ((regrouped or shared) + exchanged),
            plan=4 * (num_tokens * self.top_k + self.num_experts * (capacity + 2)),
        )
