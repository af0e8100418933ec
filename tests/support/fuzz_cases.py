"""Cases for `tests.fuzz`: a config, and what all sources of a layer ask, send and get back.

All numbers are lists of whole numbers. Tokens and gradients are at most 2 and factors of experts
are -1, 1 or 2. Probabilities are eighths. So all products and sums are exact in every dtype.
"""

import math
import random
from dataclasses import dataclass

from hypothesis import strategies as st

from padded_dispatch.config import CAPACITY_POOLS, FIT, NO_DROP, POLICIES

DTYPES = "bfloat16", "float16", "float32", "float64"
FACTORS = 0.2, 0.4, 0.5, 0.7, 1.0, 1.25, 2.0, NO_DROP, FIT


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source. Probabilities are in eighths; None is an argument that is not given.

    A token asks for the experts in its list of `asked`, at most K.
    """

    asked: list[list[int]]
    probs: list[list[int]]
    mask: list[bool] | None
    tokens: list[list[int]]
    grad: list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A config and its sources. `weights[i][e]` is what shard i of expert e multiplies with."""

    num_ranks: int
    etp_size: int
    num_local: int
    top_k: int
    factor: float | str
    alignment: int
    pool: str
    policy: str
    packed: bool
    dtype: str
    probs_dtype: str
    num_tokens: int
    hidden: int
    weights: list[list[int]]
    sources: list[Source]

    @property
    def num_experts(self) -> int:
        return self.num_ranks * self.num_local


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a case: its sizes and rules one by one, its many numbers from one seed."""
    # One rank is the cheapest world; expert tensor parallelism doubles the sources.
    num_ranks, etp_size = draw(st.sampled_from([(1, 1)] * 5 + [(2, 1), (1, 2), (3, 1), (2, 2)]))
    num_local = draw(st.integers(1, 4))
    num_experts = num_ranks * num_local
    top_k = draw(st.integers(1, min(3, num_experts)))
    num_tokens = draw(st.sampled_from([0, *[1, 2, 3, 4, 5, 6, 7, 9, 13] * 4]))
    hidden = draw(st.integers(1, 3))
    pool = draw(st.sampled_from(CAPACITY_POOLS))
    rng = random.Random(draw(st.integers(0, 2**32)))
    # How many experts a token asks for, and how much the first experts are preferred.
    fullness, skew = rng.random(), rng.choice([0, 1, 4])
    sources = [
        _source(rng, num_tokens, num_experts, top_k, hidden, fullness, skew)
        for _ in range(num_ranks * etp_size)
    ]
    return Case(
        num_ranks=num_ranks,
        etp_size=etp_size,
        num_local=num_local,
        top_k=top_k,
        factor=draw(st.sampled_from(FACTORS)),
        alignment=draw(st.sampled_from([1, 1, 3, 4])),
        pool=pool,
        policy=draw(st.sampled_from(POLICIES)),
        packed=pool != "expert" or draw(st.booleans()),
        dtype=draw(st.sampled_from(DTYPES)),
        probs_dtype=draw(st.sampled_from(DTYPES)),
        num_tokens=num_tokens,
        hidden=hidden,
        weights=[[rng.choice([-1, 1, 2]) for _ in range(num_experts)] for _ in range(etp_size)],
        sources=sources,
    )


def _source(
    rng: random.Random,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    fullness: float,
    skew: int,
) -> Source:
    def numbers(least: int, most: int, width: int) -> list[list[int]]:
        return [[rng.randint(least, most) for _ in range(width)] for _ in range(num_tokens)]

    mask, share = None, rng.choice([0.0, 0.2, 0.5, 1.0])
    if rng.random() < 0.5:
        mask = [rng.random() < share for _ in range(num_tokens)]
    fullness = rng.choice([0.0, 1.0, fullness, fullness])
    asked = []
    for _ in range(num_tokens):
        liking = [rng.random() * math.exp(-skew * e / num_experts) for e in range(num_experts)]
        best = sorted(range(num_experts), key=lambda e: -liking[e])
        asked.append(sorted(e for e in best[:top_k] if rng.random() < fullness))
    most = rng.choice([1, 3, 8])  # Few values have many ties.
    return Source(
        asked=asked,
        probs=numbers(0, most, num_experts),
        mask=mask,
        tokens=numbers(-2, 2, hidden),
        grad=numbers(-2, 2, hidden),
    )
