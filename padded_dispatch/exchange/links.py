"""Rows of a token that cross a link of direct stores: one for each rank, or for each expert.

    once    one copy of a token goes to each rank of its experts, which copies it to the others
    each    every (token, expert) row goes by itself
    summed  as `once`, and one sum of a token's rows on a rank goes home

The first two place the same bits in the same rows. `"auto"` takes `once` where routing that spreads
tokens evenly saves at least `_SAVES` of the rows. Shares of the rows that still cross,
`crossing_share`:

    EP                                    2      4      8
    Qwen3-30B-A3B       E 128, K 8     0.25   0.45   0.67
    DeepSeek-V2-Lite    E 64,  K 6     0.33   0.56   0.76
    GPT-OSS-20B         E 32,  K 4     0.47   0.70   0.86
    Mixtral             E 8,   K 2     0.79   0.93   1.00

Between two H200 rows travel at 333 GB/s, and a copy reads and writes 4,000 GB/s, so a row that is
saved costs a sixth of its time or less; one more launch and the lists of places take a few
microseconds. By these figures one push of 4,096 tokens, with 10 us for its barriers and counts,
takes as many microseconds. Those marked * were measured (2 H200: direct.json, commit 9ab9dd9):

                 each    once: link + copies + the rest
    Qwen3   EP 2  198*     50 + 20 + 10 =  80, measured  84*, of it 20* for the copies
    Qwen3   EP 4  296*    137 + 25 + 10 = 172
    Qwen3   EP 8  362     235 + 21 + 10 = 266
    GPT-OSS EP 2  143*     67 + 13 + 10 =  90, measured  90*, of it 10* for the copies

The way back of `summed` is never taken by "auto", as its bits are others. By the 285 GB/s of the
way back it would take 59 us over the links instead of 235 for Qwen3 at EP 2, and at least 34 to
read the rows that it adds.

Letters: T tokens, K experts per token, E experts, R ranks.
"""

from math import comb

from padded_dispatch.config import LinkRows

_SAVES = 0.1


def crossing_share(num_ranks: int, num_experts: int, top_k: int) -> float:
    """Return the ranks that a token reaches per expert that it has, for uniform routing.

    Example: R = 2, E = 4, K = 2. Of the 6 pairs of experts 2 are of one rank: (2 * 1 + 4 * 2) / 6 =
    5 / 3 ranks for 2 experts, a share of 5 / 6.
    """
    elsewhere = num_experts - num_experts // num_ranks
    reaches = 1 - comb(elsewhere, top_k) / comb(num_experts, top_k)
    return num_ranks * reaches / top_k


def num_places(
    link_rows: LinkRows, *, num_ranks: int, num_experts: int, top_k: int, num_tokens: int
) -> int:
    """Return R * T * K, the places that a rank is told, if tokens cross a link once; else 0."""
    once = link_rows in ("once", "summed")
    if link_rows == "auto":
        once = crossing_share(num_ranks, num_experts, top_k) <= 1 - _SAVES
    return num_ranks * num_tokens * top_k if once else 0
