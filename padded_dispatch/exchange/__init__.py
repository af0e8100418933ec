"""Moving slots between ranks: the values that travel and the stages that every exchange has.

'Tokens and a plan in, expert rows out' is the boundary. An exchange is six functions of
tensors, one for each method of a Megatron token dispatcher, with at most two tensors that have
gradients between two stages: the rows, and beside them what belongs to them.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from padded_dispatch.ops.plan import DispatchPlan


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Rows in slots, ordered (source or destination rank, local expert, slot).

    `rows_MCD`: [M, C, D], M = E before the exchange and S * L after it. `meta_MC1`: [M, C + 1], at
    least fp32: the probability of each slot, then the number of kept rows; None on the way back.
    With `PackedAtOnce`, the same shapes hold packed rows.
    """

    rows_MCD: Tensor
    meta_MC1: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertInput:
    """What the experts of this rank get, N = L * S * C rows in one of two layouts.

    Padded: expert l owns the rows `l * S * C` and the next S * C; padded rows are exactly zero.
    Packed: experts' real rows follow each other, ordered by (expert, source, slot), and the rows
    behind the last one are unspecified; whoever reads them, or returns something that depends on
    them, is wrong.

    `rows_ND`: [N, D]. `probs_N`: at least fp32, 0 in padded rows. `kept_SL`: int32, real rows per
    (source, local expert); of each C slots the first so many are real. `offsets_LS`: int32, where the
    packed rows of each (local expert, source) end; None says that the layout is the padded one.
    """

    rows_ND: Tensor
    probs_N: Tensor
    kept_SL: Tensor
    offsets_LS: Tensor | None = None


class Exchange(Protocol):
    """Six stages, in the order of their use. None keeps anything on `self` but buffers.

    `packed`: which layout of `ExpertInput` it hands out. `num_sources`, `num_local_experts`: S, L.
    """

    packed: bool
    num_sources: int
    num_local_experts: int

    def prepare(self, tokens_TD: Tensor, probs_TE: Tensor, plan: DispatchPlan) -> Slots:
        """Tokens and their probabilities into slots, on this rank."""
        ...

    def move(self, outgoing: Slots) -> Slots:
        """Slots to the ranks of their experts."""
        ...

    def arrange(self, incoming: Slots) -> ExpertInput:
        """Slots in the order that experts read."""
        ...

    def disarrange(self, out_ND: Tensor, offsets_LS: Tensor | None) -> Slots:
        """The experts' output, in the layout of their input, back into the order of the wire."""
        ...

    def move_back(self, outgoing: Slots) -> Slots:
        """Slots home to the ranks of their tokens."""
        ...

    def combine(self, incoming: Slots, plan: DispatchPlan, offsets_LS: Tensor | None) -> Tensor:
        """The sum of its slots for every token, [T, D]; `offsets_LS` are those of the input."""
        ...


class PackedAtOnce:
    """The middle of an `Exchange` whose first stage already lays rows where the experts read them,
    packed, and whose last one takes them from there."""

    packed = True

    def move(self, outgoing: Slots) -> Slots:
        """Nothing: they are there."""
        return outgoing

    def disarrange(self, out_ND: Tensor, offsets_LS: Tensor | None) -> Slots:
        """The same rows, [E, C, D]."""
        assert offsets_LS is not None
        return Slots(rows_MCD=out_ND.unflatten(0, (offsets_LS.numel(), -1)))

    def move_back(self, outgoing: Slots) -> Slots:
        """Nothing: `combine`, which has the plan, knows their way."""
        return outgoing
