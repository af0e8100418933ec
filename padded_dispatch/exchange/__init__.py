"""Move slots between ranks: the values that travel and the stages that every exchange has.

The boundary is "tokens and a plan in, expert rows out". An exchange is six functions of tensors,
one for each method of a Megatron token dispatcher. Between two stages pass at most two tensors with
gradients: the rows, and the numbers that belong to them.

Three exchanges: `alltoall` (equal-split collectives, any backend), `direct` (stores between the
GPUs of one host) and `local` (one rank). `choose` picks one per layer and number of tokens;
`agreement` compares shapes and rules over the ranks first.

Letters: T tokens, E experts, L experts on this rank, S sources of an expert's rows, C capacity,
D hidden size, N = L * S * C rows of this rank's experts, M blocks of C slots: E of them before the
exchange and S * L after it.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from padded_dispatch.ops.plan import DispatchPlan


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Rows in slots, ordered (source or destination rank, local expert, slot).

    With `PackedAtOnce`, the same shapes hold packed rows.

    Attributes:
        rows_MCD: [M, C, D].
        meta_MC1: [M, C + 1], at least fp32: the probability of each slot, then the number of kept
            rows. None on the way back.
    """

    rows_MCD: Tensor
    meta_MC1: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertInput:
    """Rows for the experts of this rank: N = L * S * C rows in one of two layouts.

    Padded: expert l owns the rows `l * S * C` and the next S * C; padded rows are exactly zero.
    Packed: experts' real rows follow each other, ordered by (expert, source, slot). The rows behind
    the last one are unspecified and must not be read, nor may a result depend on them.

    Attributes:
        rows_ND: [N, D].
        probs_N: at least fp32, 0 in padded rows.
        kept_SL: int32, real rows per (source, local expert), which fill the first of its C slots.
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
        num_local_experts: L.
    """

    packed: bool
    num_sources: int
    num_local_experts: int

    def prepare(self, tokens_TD: Tensor, probs_TE: Tensor, plan: DispatchPlan) -> Slots:
        """Put tokens and their probabilities into slots, on this rank."""
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
        """Return the same rows as [E, C, D]."""
        assert offsets_LS is not None
        return Slots(rows_MCD=out_ND.unflatten(0, (offsets_LS.numel(), -1)))

    def move_back(self, outgoing: Slots) -> Slots:
        """Return the slots: `combine` moves the rows back, since it has the plan."""
        return outgoing
