"""The settings that decide every shape, and the capacity and buffer sizes that follow from them.

Everything here is integer arithmetic, done before anything is allocated.

`capacity factor` means at least five things in the field. Here it is Megatron's: slots per
(source rank, expert) relative to perfect balance.

Letters, with the same meaning in every module (a module that needs more lists them at its top):

T: tokens on this rank
K: experts per token (top-k)
E: experts in all
L: experts on this rank, E / R
R: ranks in the expert-parallel group
S: sources of an expert's rows, R times the expert-tensor-parallel size
C: capacity, the slots of one source in one expert's buffer
D: hidden size
F: ffn size of one expert
N: rows for which the experts of this rank have room, L * S * C where every expert has its own slots

A pool is a number of slots that several experts share: see `DispatchConfig.capacity_pool`.

G: pools in which one source lays out its rows
P: slots of one such pool
"""

import math
from dataclasses import astuple, dataclass, field
from typing import Final, Literal, get_args

Policy = Literal["probs", "position"]
POLICIES: tuple[str, ...] = get_args(Policy)

# See `padded_dispatch.exchange.choose`.
ExchangeKind = Literal["auto", "alltoall", "direct"]

CapacityPool = Literal["expert", "rank"]
CAPACITY_POOLS: tuple[str, ...] = get_args(CapacityPool)

# The capacity factor that drops nothing: every token has a slot with every expert (C = T).
NO_DROP = math.inf

# The factor of eager passes that drop nothing, whose sizes follow from their routing: see
# `padded_dispatch.exchange.fit`.
FIT: Final = "fit"

CapacityFactor = float | Literal["fit"]


def require(ok: object, field: str, value: object, rule: str, fix: str = "") -> None:
    """Raise `FIELD must RULE, got VALUE; FIX` unless `ok`.

    Example: `require(k <= e, "top_k", 9, "be at most num_experts=8", "lower top_k")` raises "top_k
    must be at most num_experts=8, got 9; lower top_k".

    Raises:
        ValueError: if `ok` is false.
    """
    if not ok:
        raise ValueError(f"{field} must {rule}, got {value!r}" + (f"; {fix}" if fix else ""))


def require_tokens(num_tokens: int) -> None:
    """Raise if T = 0, because a rank without tokens has no static shape."""
    require(
        num_tokens >= 1,
        "num_tokens",
        num_tokens,
        "be at least 1",
        "pad the batch so that every rank has a token",
    )


@dataclass(frozen=True, kw_only=True)
class BufferBytes:
    """Bytes of each buffer that one layer's dispatch and combine hold on one rank.

    Probabilities count as fp32. Not included: copies that live within one stage, and the 8 bytes
    per choice that packing keeps where there is only one rank.

    Attributes:
        send: rows and probabilities in slots before the exchange; packed rows if a single rank
            packs its own.
        receive: the same after the exchange, and gathered over the expert-tensor-parallel group.
        experts: what the experts read, unless it is a view of `receive`: regrouped rows,
            probabilities, counts.
        back: the experts' output on its way back to the tokens.
        plan: the maps of the dispatch plan.
    """

    send: int
    receive: int
    experts: int
    back: int
    plan: int

    @property
    def total(self) -> int:
        """Sum of all buffers in bytes: an upper bound, as if nothing were freed in between."""
        return sum(astuple(self))


@dataclass(frozen=True, kw_only=True)
class PoolSizes:
    """The sizes of one pass, which follow from the config and T.

    A source lays out its rows in `num_pools` pools of `pool_slots` slots each. A pool belongs to
    E / G consecutive experts, whose rows follow each other in it without gaps. Slot p of pool g has
    the number `g * P + p`.

    Attributes:
        num_experts: E.
        num_pools: pools of one source (G): E, one for each expert; or R, one for each destination
            rank.
        pool_slots: slots of one pool (P).
        num_rows: rows for which the experts of one rank have room (N).
        may_drop: False if no routing asks for more slots than there are.
    """

    num_experts: int
    num_pools: int
    pool_slots: int
    num_rows: int
    may_drop: bool

    @property
    def experts_per_pool(self) -> int:
        """Experts that share a pool, E / G."""
        return self.num_experts // self.num_pools


@dataclass(frozen=True, kw_only=True)
class DispatchConfig:
    """The settings that decide every shape on the padded path.

    Args:
        num_experts: experts in all (E), a multiple of `num_ranks`.
        top_k: the most experts that a token can have (K).
        capacity_factor: slots per (source, expert) relative to perfect balance. `NO_DROP`
            drops nothing and costs C = T. `FIT` drops nothing, in eager passes only: their sizes
            follow from the routing.
        alignment: every expert's buffer (S * C rows) is a multiple of this; some recipes need it.
        capacity_pool: which rows share slots. "expert": C slots belong to one (source, expert).
            "rank": L * C slots belong to one (source, destination rank), whose experts share them.
            Both offer as many slots in all.
        policy: which rows keep a slot when more ask than fit: "probs" (the most probable) or
            "position" (the first tokens); see `padded_dispatch.routing.select`.
        num_ranks: ranks in the expert-parallel group (R).
        etp_size: ranks that split every expert's ffn between them (expert tensor parallel).

    Raises:
        ValueError: names the field, its value and what to change.
    """

    num_experts: int
    top_k: int
    capacity_factor: CapacityFactor = NO_DROP
    alignment: int = 1
    capacity_pool: CapacityPool = "expert"
    policy: Policy = "probs"
    num_ranks: int = 1
    etp_size: int = 1
    _capacity_step: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "alignment", "num_ranks", "etp_size"):
            value = getattr(self, name)
            require(
                isinstance(value, int) and not isinstance(value, bool) and value >= 1,
                name,
                value,
                "be a whole number of at least 1",
            )
        require(
            self.top_k <= self.num_experts,
            "top_k",
            self.top_k,
            f"be at most num_experts={self.num_experts}",
            "lower top_k",
        )
        require(
            self.num_experts % self.num_ranks == 0,
            "num_experts",
            self.num_experts,
            f"be a multiple of num_ranks={self.num_ranks}",
            "change one of the two",
        )
        factor = self.capacity_factor
        require(
            factor == FIT or (isinstance(factor, int | float) and factor > 0),
            "capacity_factor",
            factor,
            "be a number above 0 or FIT",
            "set NO_DROP to drop nothing",
        )
        for name, choices in (("capacity_pool", CAPACITY_POOLS), ("policy", POLICIES)):
            value = getattr(self, name)
            require(value in choices, name, value, f"be one of {', '.join(choices)}")
        # Not in capacity(), because Dynamo cannot trace math.gcd of a symbolic number.
        step = self.alignment // math.gcd(self.alignment, self.num_sources)
        object.__setattr__(self, "_capacity_step", step)

    @property
    def num_local_experts(self) -> int:
        """Experts on one rank (L)."""
        return self.num_experts // self.num_ranks

    @property
    def num_sources(self) -> int:
        """Ranks that send rows to one expert's buffer (S)."""
        return self.num_ranks * self.etp_size

    @property
    def fits(self) -> bool:
        """True if the sizes of a pass follow from its routing."""
        return self.capacity_factor == FIT

    @property
    def cells_per_pool(self) -> int:
        """Pairs of (source, expert) that share a pool."""
        return 1 if self.capacity_pool == "expert" else self.num_local_experts

    def capacity(self, num_tokens: int) -> int:
        """Return the slots per (source, expert) for T = `num_tokens` tokens on this rank.

        The capacity is `max(1, min(T, ceil(T * K / E * factor)))`, rounded up to the next C with
        `S * C % alignment == 0`; slots beyond T stay empty. The product is evaluated in the order
        of `megatron.core.transformer.moe.moe_utils.get_capacity`, so both round alike.

        Example: T=4096, K=8, E=128, factor 1.25 gives C = 320.

        Raises:
            ValueError: if T = 0, and if the factor is `FIT`.
        """
        require(
            self.capacity_factor != FIT,
            "capacity_factor",
            self.capacity_factor,
            "be a number for sizes that do not depend on the routing",
            "set a number or NO_DROP, or take sizes_that_fit",
        )
        require_tokens(num_tokens)
        slots, factor = num_tokens, self.capacity_factor
        assert factor != "fit"
        if factor != NO_DROP:
            slots = math.ceil((num_tokens * self.top_k / self.num_experts) * factor)
        slots = max(1, min(num_tokens, slots))
        return -(-slots // self._capacity_step) * self._capacity_step

    def sizes(self, num_tokens: int) -> PoolSizes:
        """Return the sizes of a pass with T = `num_tokens` tokens on this rank.

        Pools of several experts have no slots that no routing can fill: a source has at most
        T * min(K, L) rows for the L experts of one rank.

        Example: T=4096, K=8, E=128, R=8, factor 1.25 (C = 320) gives 128 pools of 320 slots,
        or 8 pools of 5,120; N = 40,960 in both cases.

        Raises:
            ValueError: if T = 0, and if the factor is `FIT`.
        """
        capacity = self.capacity(num_tokens)
        if self.capacity_pool == "expert":
            return self._sizes(capacity, may_drop=capacity < num_tokens)
        most = num_tokens * min(self.top_k, self.num_local_experts)
        slots = min(capacity * self.num_local_experts, most)
        return self._sizes(slots, may_drop=slots < most)

    def sizes_that_fit(self, num_tokens: int, demand: int) -> PoolSizes:
        """Return the sizes of a pass of T tokens in which `demand` is the largest for one pool.

        Slots of pool "expert" keep the alignment.

        Raises:
            ValueError: if T = 0.
        """
        require_tokens(num_tokens)
        step = self._capacity_step if self.capacity_pool == "expert" else 1
        return self._sizes(-(-max(1, demand) // step) * step, may_drop=False)

    def _sizes(self, slots: int, *, may_drop: bool) -> PoolSizes:
        """Return the sizes for pools of `slots` slots each."""
        of_experts = self.capacity_pool == "expert"
        local = self.num_local_experts if of_experts else 1
        return PoolSizes(
            num_experts=self.num_experts,
            num_pools=self.num_experts if of_experts else self.num_ranks,
            pool_slots=slots,
            num_rows=slots * local * self.num_sources,
            may_drop=may_drop,
        )

    def buffer_bytes(
        self, num_tokens: int, hidden_size: int, element_size: int, *, packed: bool = False
    ) -> BufferBytes:
        """Return the bytes of one layer's buffers on one rank: of collectives, or of a single rank.

        Args:
            num_tokens: tokens on this rank (T).
            hidden_size: width of a row (D).
            element_size: bytes of one element of a row: 2 for bf16, 4 for fp32.
            packed: whether the experts take packed rows, whose offsets lie beside the counts;
                experts that share slots always do.
        """
        sizes = self.sizes(num_tokens)
        slots, rows = sizes.num_pools * sizes.pool_slots, sizes.num_rows
        counts = self.num_local_experts * self.num_sources
        per_row = hidden_size * element_size
        pooled = self.capacity_pool != "expert"
        packed = packed or pooled
        plan = 4 * (2 * num_tokens * self.top_k + slots + 2 * self.num_experts)
        # Each row travels with its fp32 probability, each expert's rows with their fp32 count.
        send = slots * (per_row + 4) + 4 * self.num_experts
        exchanged, shared = self.num_ranks > 1, self.etp_size > 1
        regrouped = self.num_sources > 1 and (packed or self.num_local_experts > 1)
        # A single rank's pool of all experts is packed already.
        copied = self.num_sources > 1 or not pooled
        back = rows * per_row + slots * per_row * ((regrouped or shared) + exchanged)
        return BufferBytes(
            send=send,
            receive=send * exchanged + self.etp_size * send * shared,
            experts=rows * (per_row * regrouped + 4 * copied) + 4 * counts * (1 + packed),
            back=back,
            plan=plan,
        )
