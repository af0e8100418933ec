"""Exchange: move tokens to the ranks of their experts, and results home.

A token is sent once to each rank that holds one of its experts. It arrives at [source, slot], which
the source computes without counts of other ranks. The source's plan (`routing.Plan`) is sent with
the tokens. The receiver makes rows of the tokens (`experts`). It returns one row for each choice
(`direct`: stores between the GPUs of one host) or one sum for each of the tokens (`collectives`:
any backend). `choose` picks one of the two for a layer. `agreement` first compares shapes and rules
over the ranks.

Letters: see `padded_dispatch.config`.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Values:
    """A row for every token that arrived: the token itself, or its output's gradient.

    Attributes:
        rows_SPD: the rows of each source, by slot, without this rank's if `own_TD` has them;
            unspecified in slots without a token.
        own_TD: the rows of this rank's own tokens, contiguous; None if `rows_SPD` has them.
        own: this rank's number among the sources; None if `own_TD` is.
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
        place_SPK: int32, index of the row among its source's rows for that expert.
        prob_SPK: at least fp32, the probability; unspecified where there is no expert.
        count_SL: int32, contiguous: rows of each source for each local expert.
    """

    values: Values
    expert_SPK: Tensor
    place_SPK: Tensor
    prob_SPK: Tensor
    count_SL: Tensor
