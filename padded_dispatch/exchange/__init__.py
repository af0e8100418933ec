"""Move slots between ranks: the values that travel and the stages that every exchange has.

The boundary is "tokens and a plan in, expert rows out". An exchange is six functions of tensors,
one for each method of a Megatron token dispatcher. Between two stages pass at most two tensors with
gradients: the rows, and the numbers that belong to them.

Three exchanges: `alltoall` (equal-split collectives, any backend), `direct` (stores between the
GPUs of one host) and `local` (one rank). `choose` picks one per layer and number of tokens;
`agreement` compares shapes and rules over the ranks first.

Letters: T tokens, E experts, L experts on this rank, S sources of an expert's rows, D hidden size,
N rows for which this rank's experts have room, M pools of P slots: those of this source before the
exchange, those of all sources after it. A pool belongs to X experts; PX is P + X.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from padded_dispatch.routing.plan import DispatchPlan


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Rows in slots, ordered (source or destination rank, pool, slot).

    With `PackedAtOnce`, they hold packed rows.

    Attributes:
        rows_MPD: [M, P, D].
        meta_MPX: [M, P + X], at least fp32: the probability of each slot, then the numbers of kept
            rows of the pool's experts. None on the way back.
    """

    rows_MPD: Tensor
    meta_MPX: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertInput:
    """Rows for the experts of this rank: N rows in one of two layouts.

    Padded: expert l owns the rows `l * S * C` and the next S * C; padded rows are exactly zero.
    Only experts with pools of their own can have it.
    Packed: experts' real rows follow each other, ordered by (expert, source, slot). The rows behind
    the last one are unspecified and must not be read, nor may a result depend on them.

    Attributes:
        rows_ND: [N, D].
        probs_N: at least fp32, 0 in padded rows.
        kept_SL: int32, real rows per (source, local expert).
        offsets_LS: int32, where the packed rows of each (local expert, source) end; None for the
            padded layout.
    """

    rows_ND: Tensor
    probs_N: Tensor
    kept_SL: Tensor
    offsets_LS: Tensor | None = None


class Exchange(Protocol):
    """Six stages in the order of their use. An exchange keeps nothing on `self` but buffers.

    Attributes:
        packed: whether `ExpertInput` is packed.
        num_sources: S.
    """

    packed: bool
    num_sources: int

    def prepare(
        self, tokens_TD: Tensor, probs_TE: Tensor, plan: DispatchPlan, num_rows: int
    ) -> Slots:
        """Put tokens and their probabilities into slots, on this rank.

        `num_rows`: rows for which the experts of each rank have room (N).
        """
        ...

    def move(self, outgoing: Slots) -> Slots:
        """Send slots to the ranks of their experts."""
        ...

    def arrange(self, incoming: Slots) -> ExpertInput:
        """Bring slots into the order that experts read."""
        ...

    def disarrange(self, out_ND: Tensor, offsets_LS: Tensor | None) -> Slots:
        """Bring the experts' output, laid out as their input was, back into slots."""
        ...

    def move_back(self, outgoing: Slots) -> Slots:
        """Send slots back to the ranks of their tokens."""
        ...

    def combine(self, incoming: Slots, plan: DispatchPlan, offsets_LS: Tensor | None) -> Tensor:
        """Sum the slots of every token: [T, D]. `offsets_LS` are those of the input."""
        ...


class PackedAtOnce:
    """The middle stages of an `Exchange` whose `prepare` already packs rows for the experts."""

    packed = True

    def move(self, outgoing: Slots) -> Slots:
        """Return the slots: `prepare` already placed the rows."""
        return outgoing

    def disarrange(self, out_ND: Tensor, offsets_LS: Tensor | None) -> Slots:
        """Return the same rows, [1, N, D]."""
        return Slots(rows_MPD=out_ND[None])

    def move_back(self, outgoing: Slots) -> Slots:
        """Return the slots: `combine` moves the rows back, since it has the plan."""
        return outgoing
