"""The settings that decide every shape, and the capacity and buffer sizes that follow from them.

A row is a token's copy for one of its experts. A choice is one (token, k), with k from 0 to K - 1.
A cell is the buffer of one (source, expert). A store holds the rows of all layers of a model chunk.
Home is a token's own rank. The capacity factor is room relative to perfect balance: the rows of a
store, or, as in Megatron, the slots of a cell.

Letters, with the same meaning in every module (a module that needs more lists them at its top):

T: tokens on this rank
K: experts per token (top-k)
E: experts in all
L: experts on this rank, E / R
R: ranks in the expert-parallel group
S: sources of an expert's rows, R times the expert-tensor-parallel size
C: capacity, the slots of a cell
D: hidden size
F: ffn size of one expert
G: columns of fc1's result: 2F (gate before up) if the activation is gated, else F
O, I: output and input width of a linear
P: slots for the tokens that one source sends to one rank
N: rows that a buffer has room for
M: rows of a store, which all layers share
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

Policy = Literal["probs", "position"]
POLICIES: tuple[str, ...] = get_args(Policy)

# See `padded_dispatch.exchange`.
ExchangeKind = Literal["auto", "alltoall", "direct"]

CapacityPool = Literal["store", "cells"]
CAPACITY_POOLS: tuple[str, ...] = get_args(CapacityPool)
_FORMER_POOLS: dict[Any, Any] = {"expert": "cells"}

# The capacity factor that drops nothing, whatever the routing.
NO_DROP = math.inf
_STORE_FACTOR = 1.25  # NO_DROP's for a store: with a fresh router, 1 % of rows are recomputed.

# What a pass keeps of other ranks' tokens at most, relative to a layer's rows in the store.
_KEPT_SHARES = 1.5

# The capacity factor of eager passes that size their buffers to their routing, and drop nothing.
FIT: Final = "fit"

CapacityFactor = float | Literal["fit"]


def require(ok: object, field: str, value: object, rule: str, fix: str = "") -> None:
    """Raise `FIELD must RULE, got VALUE; FIX` unless `ok`.

    Example: `require(k <= e, "top_k", 9, "be at most num_experts=8", "lower top_k")` raises "top_k
    must be at most num_experts=8, got 9; lower top_k".
    """
    if not ok:
        raise ValueError(f"{field} must {rule}, got {value!r}" + (f"; {fix}" if fix else ""))


def pool_named(name: Any) -> Any:
    """Return the capacity pool of this name; `expert` is the former name of `cells`."""
    return _FORMER_POOLS.get(name, name) if isinstance(name, str) else name


def is_positive(value: Any) -> bool:
    """Return whether a value is a number above 0; a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def in_hundredths(need: float) -> float:
    """Return the smallest factor in hundredths that is enough for a needed one.

    Example: 1.1 gives 1.1, although 1.1 * 100 is above 110 in floats; 1.101 gives 1.11.
    """
    return math.ceil(round(need * 100, 6)) / 100


def require_count(field: str, value: object) -> None:
    """Raise unless a value is an int from 1 to 2**31 - 1; a bool and a NumPy integer are none."""
    is_count = type(value) is int and 1 <= value < 2**31
    require(is_count, field, value, "be an int of at least 1, below 2**31")


def require_tokens(num_tokens: int) -> None:
    """Raise if T is not a count, or 0, because a rank without tokens has no static shape."""
    fix = "pad the batch so that every rank has a token"
    require(num_tokens != 0, "num_tokens", num_tokens, "be at least 1", fix)
    require_count("num_tokens", num_tokens)


@dataclass(frozen=True, kw_only=True)
class DispatchConfig:
    """The settings that decide every shape on the padded path.

    Args:
        num_experts: experts in all (E), a multiple of `num_ranks`.
        top_k: the most experts that a token can have (K).
        capacity_factor: room relative to perfect balance. `NO_DROP` drops nothing: cells have C =
            T; a store has the factor 1.25, and at least room for any routing of one layer. `FIT`
            drops nothing either: buffers are sized to the routing, in eager passes only.
        alignment: S * C, the rows of an expert's padded cells, is a multiple of this; fp8 recipes
            need it.
        capacity_pool: which rows share room. "store": those of all layers. "cells": those of
            one (source, expert), which have C slots.
        policy: which rows keep a slot when more ask than fit: "probs" (the most probable) or
            "position" (the first tokens); see `padded_dispatch.routing`.
        num_ranks: ranks in the expert-parallel group (R).
        etp_size: ranks that split every expert's ffn between them (expert tensor parallel).

    Raises:
        ValueError: names the field, its value and what to change. Methods that take T raise it
            unless T is an int of at least 1; `capacity` and `rows` also raise it for `FIT`.
    """

    num_experts: int
    top_k: int
    capacity_factor: CapacityFactor = NO_DROP
    alignment: int = 1
    capacity_pool: CapacityPool = "cells"
    policy: Policy = "probs"
    num_ranks: int = 1
    etp_size: int = 1

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "alignment", "num_ranks", "etp_size"):
            require_count(name, getattr(self, name))
        top_k, num_experts = self.top_k, self.num_experts
        rule = f"be at most num_experts={num_experts}"
        require(top_k <= num_experts, "top_k", top_k, rule, "lower top_k")
        is_multiple = num_experts % self.num_ranks == 0
        rule = f"be a multiple of num_ranks={self.num_ranks}"
        require(is_multiple, "num_experts", num_experts, rule, "change one of the two")
        factor, rule = self.capacity_factor, "be a number above 0 or FIT"
        is_factor = factor == FIT or is_positive(factor)
        require(is_factor, "capacity_factor", factor, rule, "set NO_DROP to drop nothing")
        if factor != FIT:  # Ranks compare its text, and remember digests of what is equal to it.
            object.__setattr__(self, "capacity_factor", float(factor))
        object.__setattr__(self, "capacity_pool", pool_named(self.capacity_pool))
        for name, choices in (("capacity_pool", CAPACITY_POOLS), ("policy", POLICIES)):
            value = getattr(self, name)
            require(value in choices, name, value, f"be one of {', '.join(choices)}")

    @property
    def fits(self) -> bool:
        """True if each pass sizes its buffers to its routing (`FIT`)."""
        return self.capacity_factor == FIT

    @property
    def num_local_experts(self) -> int:
        """Experts on one rank (L)."""
        return self.num_experts // self.num_ranks

    @property
    def num_sources(self) -> int:
        """Ranks that send rows to one expert's buffer (S)."""
        return self.num_ranks * self.etp_size

    def capacity(self, num_tokens: int) -> int:
        """Return the slots of a cell (C) for T = `num_tokens` tokens on this rank.

        The capacity is `max(1, min(T, ceil(T * K / E * factor)))`, rounded up to the next C with
        `S * C % alignment == 0`; slots beyond T stay empty. The product is evaluated in the order
        of `megatron.core.transformer.moe.moe_utils.get_capacity`, so both round alike.

        Example: T=4096, K=8, E=128, factor 1.25 gives C = 320.
        """
        require_tokens(num_tokens)
        wanted = (num_tokens * self.top_k / self.num_experts) * self._factor
        return self.aligned(max(1, math.ceil(min(num_tokens, wanted))))

    def aligned(self, num_slots: int) -> int:
        """Return the least C >= `num_slots` with `S * C % alignment == 0`."""
        step = self.alignment // math.gcd(self.alignment, self.num_sources)
        return -(-num_slots // step) * step

    def share(self, num_tokens: int) -> int:
        """Return the rows of one rank's experts in a pass in perfect balance."""
        require_tokens(num_tokens)
        return self.etp_size * num_tokens * self.top_k

    def max_rows(self, num_tokens: int) -> int:
        """Return the most rows that a rank can get in a pass."""
        require_tokens(num_tokens)
        most = self.num_sources * num_tokens * min(self.top_k, self.num_local_experts)
        if self.capacity_pool == "store" or self.fits:
            return most
        return min(most, self.num_sources * self.num_local_experts * self.capacity(num_tokens))

    def least_store_rows(self, num_tokens: int) -> int:
        """Return the fewest rows of a store: the most of one layer, or five shares if that is less.

        With `NO_DROP` they are the most of one layer.
        """
        most = self.max_rows(num_tokens)
        return most if self.capacity_factor == NO_DROP else min(most, 5 * self.share(num_tokens))

    def rows(self, num_tokens: int) -> int:
        """Return the rows of a pass for which a rank has room; a store has the sum over layers.

        Example: T=4096, K=8, E=128, R=8, factor 1.25 gives 40,960 rows, in a store and in cells.
        """
        most = self.max_rows(num_tokens)
        factor = _STORE_FACTOR if self._factor == NO_DROP else self._factor
        if self.capacity_pool == "cells":
            return most
        return math.ceil(min(self.share(num_tokens) * factor, most))

    def wire_slots(self, num_tokens: int) -> int:
        """Return the slots of a source at one rank (P): of L cells, at most T; else T."""
        require_tokens(num_tokens)
        if self.capacity_pool == "store" or self.fits:
            return num_tokens
        return min(num_tokens, self.num_local_experts * self.capacity(num_tokens))

    def sends_again(self, num_hosts: int = 1) -> bool:
        """Return whether a pass keeps no tokens of other ranks, and backward sends them again.

        Where every token has a slot at every rank, S - 1 times T tokens can arrive. They are sent
        again if these are more than one and a half times the rows that a store has for a layer.
        `num_hosts`: a pass behind a rail keeps the tokens of H ranks, which the network brought,
        and always sends them again inside of each host.
        """
        factor = self.capacity_factor
        if factor in (FIT, NO_DROP):
            factor = _STORE_FACTOR
        return num_hosts > 1 or self.num_sources - 1 > _KEPT_SHARES * self.top_k * factor

    @property
    def _factor(self) -> float:
        factor = self.capacity_factor
        rule = "be a number for sizes that do not depend on the routing"
        require(factor != FIT, "capacity_factor", factor, rule, "set a number or NO_DROP")
        assert factor != FIT
        return factor


@dataclass(frozen=True, kw_only=True)
class StoreSizes:
    """Rows of a store, and of each call that uses it: the first layer's is the first.

    Attributes:
        num_rows: M, the sum of `DispatchConfig.rows`, at least `least_store_rows`.
        max_rows: the most rows of each call (N); 0 if it keeps none here, because it fits.
        overwritten: whether later calls may overwrite rows of each call.
    """

    num_rows: int
    max_rows: tuple[int, ...]
    overwritten: tuple[bool, ...]

    @classmethod
    def of(cls, configs: Sequence[DispatchConfig], num_tokens: int) -> "StoreSizes":
        """Return the sizes for calls with these configs in this order, and T tokens on a rank."""
        keep = [config for config in configs if not config.fits]
        num_rows = sum(config.rows(num_tokens) for config in keep)
        num_rows = max([num_rows, *(config.least_store_rows(num_tokens) for config in keep)])
        most = [0 if one.fits else min(one.max_rows(num_tokens), num_rows) for one in configs]
        overwritten = []
        for i in range(len(most)):
            # Rows of call i end here or before. A later call with n rows overwrites beyond M - n.
            end, later = sum(most[: i + 1]), max(most[i + 1 :], default=0)
            overwritten.append(later > 0 and end + later > num_rows)
        return cls(num_rows=num_rows, max_rows=tuple(most), overwritten=tuple(overwritten))
