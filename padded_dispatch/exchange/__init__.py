"""Exchange: tokens to the ranks of their experts and sums home, and the values that travel.

Each token crosses once to each rank that holds one of its experts and arrives at [source, slot], a
place that is known without counts; the source's plan (`routing.plan`) and its counts arrive beside
it. The receiver lays out rows as it likes (`experts`), and sends back one row for each choice
(`direct`: stores between the GPUs of one host), or one sum for each token (`collectives`: any
backend). `choose` picks one per layer; `agreement` compares shapes and rules over the ranks first.

Letters: see `padded_dispatch.config`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from padded_dispatch.routing.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Values:
    """A row for every token that arrived: the token itself, or its output's gradient.

    Attributes:
        rows_SPD: those of source s in its slots; unspecified where no token lies.
        own_TD: this rank's own, contiguous, which are read in place of `rows_SPD[own]`; slot t is
            token t. None where `rows_SPD` has them all.
        own: number of the source that is this rank; -1 where `own_TD` is None.
    """

    rows_SPD: Tensor
    own_TD: Tensor | None = None
    own: int = -1


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """Tokens and plans of all sources, as they arrived at this rank in a forward pass.

    Attributes:
        values: the tokens.
        expert_SPK: int32, local experts of each token, 0 to L - 1; any other number, such as -1, is
            no expert of this rank.
        place_SPK: int32, which row of its source for that expert it is, from 0.
        prob_SPK: at least fp32, the probability; unspecified where there is no expert.
        count_SL: int32, contiguous: rows of each source for each local expert.
    """

    values: Values
    expert_SPK: Tensor
    place_SPK: Tensor
    prob_SPK: Tensor
    count_SL: Tensor


class Wire(Protocol):
    """The exchange of one pass of one layer, forward and backward.

    Calls alternate: `open` or `push`, then `home`.

    Attributes:
        homes_S: int64 on the device, the address at each source of the rows of its choices, [T * K,
            D]; None where sums go home.
    """

    homes_S: Tensor | None

    def open(self, tokens_TD: Tensor, prob_TK: Tensor) -> Arrived:
        """Send tokens and their plan. `prob_TK`: at least fp32."""
        ...

    def push(self, values_TD: Tensor) -> Values:
        """Send a row for every token over the same way, without the plan."""
        ...

    def home(
        self,
        product: Callable[[], Tensor],
        row_SPK: Tensor,
        offsets: Tensor,
        beside_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a product on a GPU and bring home its rows, summed for every token.

        A token's rows are added in ascending expert order (of one rank first, where sums travel),
        in at least fp32. Rows without room count as zero.

        Args:
            product: sends each row to its address at home; returns them, loose, where sums go home.
            row_SPK: int32, the row of each choice; -1 where it is no choice of this rank, -2 where
                it found no room. Rows count from the beginning of the store.
            offsets: of the pass; the first is its first row.
            beside_N: loose fp32, a number beside each row; None if nothing travels beside rows.

        Returns:
            The sums, [T, D], and the numbers, fp32 [T, K]: 0 where a token has no choice, or its
            row found no room.
        """
        ...


class Exchange(Protocol):
    """The exchange of a layer; keeps nothing on `self` but buffers.

    Attributes:
        kind: for logs.
    """

    kind: str

    def strike(
        self, map_TE: Tensor, probs_TE: Tensor, num_slots: int
    ) -> tuple[Tensor, Tensor | None]:
        """Cut a map so that no rank gets more than P tokens of this source; before the plan.

        Args:
            map_TE: bool [T, E].
            probs_TE: of at least these experts; ties go to the first tokens.
            num_slots: P.

        Returns:
            The map, and the rows that it lost, int32 [1]; None if it cannot lose any.
        """
        ...

    def start(self, plan: Plan, tokens_TD: Tensor, num_slots: int) -> Wire:
        """Begin a pass.

        Args:
            plan: the plan of these tokens.
            tokens_TD: its shape, dtype and device are read.
            num_slots: slots of a source on the wire (P) where not every token has one.
        """
        ...
