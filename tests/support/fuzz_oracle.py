"""Cases for `tests.fuzz`, and what a dispatcher must do with them: plain Python on lists.

All numbers are whole: tokens and gradients at most 2, factors of experts -1, 1 or 2, probabilities
in eighths. So all products and sums are exact in every dtype. A row is a pair (token, expert) of
one source. Nothing is shared with `padded_dispatch`, its reference included.
"""

import math
import random
from dataclasses import dataclass

from hypothesis import strategies as st

DTYPES = "bfloat16", "float16", "float32", "float64"
FACTORS = 0.2, 0.4, 0.5, 0.7, 1.0, 1.25, 2.0, math.inf, "fit"
Row = tuple[int, int]
Table = list[list[float]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source: the experts that each token asks for, at most K; None is no mask."""

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


@dataclass
class Answer:
    """Everything that one source gets. Tables are by token."""

    kept: set[Row]
    demand: list[int]
    probs: Table
    out: Table
    grad_tokens: Table
    grad_probs: Table


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
    pool = draw(st.sampled_from(["expert", "rank"]))
    rng = random.Random(draw(st.integers(0, 2**32)))
    # How many experts a token asks for, and how much the first experts are preferred.
    liked = rng.random(), rng.choice([0, 1, 4])
    sizes = num_tokens, num_experts, top_k, hidden
    sources = [_source(rng, *sizes, *liked) for _ in range(num_ranks * etp_size)]
    return Case(
        num_ranks=num_ranks,
        etp_size=etp_size,
        num_local=num_local,
        top_k=top_k,
        factor=draw(st.sampled_from(FACTORS)),
        alignment=draw(st.sampled_from([1, 1, 3, 4])),
        pool=pool,
        policy=draw(st.sampled_from(["probs", "position"])),
        packed=pool == "rank" or draw(st.booleans()),
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

    fullness = rng.choice([0.0, 1.0, fullness, fullness])
    asked = []
    for _ in range(num_tokens):
        liking = [rng.random() * math.exp(-skew * e / num_experts) for e in range(num_experts)]
        best = sorted(range(num_experts), key=lambda e: -liking[e])
        asked.append(sorted(e for e in best[:top_k] if rng.random() < fullness))
    share = rng.choice([0.0, 0.2, 0.5, 1.0])
    mask = [rng.random() < share for _ in range(num_tokens)] if rng.random() < 0.5 else None
    return Source(
        asked=asked,
        probs=numbers(0, rng.choice([1, 3, 8]), num_experts),  # Few values have many ties.
        mask=mask,
        tokens=numbers(-2, 2, hidden),
        grad=numbers(-2, 2, hidden),
    )


def slots_of_pools(case: Case) -> int:
    """Slots of a pool of one source, for a factor that is a number."""
    slots = case.num_tokens
    assert not isinstance(case.factor, str)
    if case.factor != math.inf:
        slots = math.ceil(case.num_tokens * case.top_k / case.num_experts * case.factor)
    slots = max(1, min(case.num_tokens, slots))
    while slots * len(case.sources) % case.alignment:
        slots += 1
    most = case.num_tokens * min(case.top_k, case.num_local)
    return slots if case.pool == "expert" else min(slots * case.num_local, most)


def answers(case: Case) -> list[Answer]:
    """Return what each source gets."""
    return [_answer(case, source) for source in case.sources]


def _answer(case: Case, source: Source) -> Answer:
    asked = {
        (t, e)
        for t, experts in enumerate(source.asked)
        for e in experts
        if not (source.mask and source.mask[t])
    }
    kept = asked
    if case.factor != "fit":
        width = 1 if case.pool == "expert" else case.num_local
        by_probability = case.policy == "probs"
        ordered = sorted(
            asked, key=lambda row: (-source.probs[row[0]][row[1]] if by_probability else 0, *row)
        )
        kept = set()
        for first in range(0, case.num_experts, width):
            pool = [row for row in ordered if first <= row[1] < first + width]
            kept |= set(pool[: slots_of_pools(case)])
    tokens, width, experts = range(case.num_tokens), case.hidden, case.num_experts
    answer = Answer(
        kept=kept,
        demand=counts(case, asked),
        probs=[[0.0] * experts for _ in tokens],
        out=[[0.0] * width for _ in tokens],
        grad_tokens=[[0.0] * width for _ in tokens],
        grad_probs=[[0.0] * experts for _ in tokens],
    )
    for t, e in kept:
        weight = sum(weights[e] for weights in case.weights)
        prob = answer.probs[t][e] = source.probs[t][e] / 8
        for d in range(width):
            answer.out[t][d] += weight * prob * source.tokens[t][d]
            answer.grad_tokens[t][d] += weight * prob * source.grad[t][d]
            answer.grad_probs[t][e] += weight * source.grad[t][d] * source.tokens[t][d]
    return answer


def counts(case: Case, rows: set[Row]) -> list[int]:
    """Return the rows of each expert."""
    return [sum(e == expert for _, e in rows) for expert in range(case.num_experts)]


def expert_rows(case: Case, found: list[Answer], rank: int) -> list[tuple[int, int, int]]:
    """Return the rows of a rank's experts, (expert, source, token), in the packed order."""
    own = range(rank * case.num_local, (rank + 1) * case.num_local)
    return sorted((e, s, t) for s, answer in enumerate(found) for t, e in answer.kept if e in own)
