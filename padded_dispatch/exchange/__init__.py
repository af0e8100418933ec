"""Exchange: tokens to the ranks of their experts and sums home, and the values that travel.

Each token crosses once to each rank that holds one of its experts and arrives at [source, slot], a
place that is known without counts; the source's plan (`routing.plan`) and its counts arrive beside
it. The receiver lays out rows as it likes (`experts`), and sends back one row for each choice
(`direct`: stores between the GPUs of one host), or one sum for each token (`collectives`: any
backend). `choose` picks one per layer; `agreement` compares shapes and rules over the ranks first.

Letters: see `padded_dispatch.config`.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Values:
    """A row for every token that arrived: the token itself, or its output's gradient.

    Attributes:
        rows_SPD: those of each source in its slots; unspecified where no token lies.
        own_TD: this rank's own, contiguous; slot t is token t. `rows_SPD` has only those of other
            sources then, in order. None where it has them all.
        own: number of the source that is this rank; None as `own_TD`.
    """

    rows_SPD: Tensor
    own_TD: Tensor | None = None
    own: int | None = None


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
