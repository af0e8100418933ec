"""What a dispatcher must do with a case of `fuzz_cases`: plain Python on lists, no arrays.

A row is a pair (token, expert) of one source. Rows are sorted by the policy's rule, and the first
ones are kept. Nothing is shared with `padded_dispatch`, its reference included.
"""

import math
from dataclasses import dataclass, field

from tests.support.fuzz_cases import Case, Source

Row = tuple[int, int]
Table = list[list[float]]


@dataclass
class Answer:
    """Everything that one source gets. Tables are by token."""

    kept: set[Row]
    demand: list[int]
    probs: Table
    out: Table = field(default_factory=list)
    grad_tokens: Table = field(default_factory=list)
    grad_probs: Table = field(default_factory=list)


def capacity(case: Case) -> int:
    """Slots per (source, expert), for a factor that is a number."""
    slots = case.num_tokens
    assert not isinstance(case.factor, str)
    if case.factor != math.inf:
        slots = math.ceil(case.num_tokens * case.top_k / case.num_experts * case.factor)
    slots = max(1, min(case.num_tokens, slots))
    while slots * len(case.sources) % case.alignment:
        slots += 1
    return slots


def slots_of_pools(case: Case) -> int:
    """Slots of a pool of one source."""
    if case.pool == "expert":
        return capacity(case)
    most = case.num_tokens * min(case.top_k, case.num_local)
    return min(capacity(case) * case.num_local, most)


def pools_of(case: Case) -> list[list[int]]:
    """The experts of each pool of one source."""
    width = 1 if case.pool == "expert" else case.num_local
    return [list(range(e, e + width)) for e in range(0, case.num_experts, width)]


def cut(case: Case, source: Source, rows: set[Row]) -> set[Row]:
    """Return the rows that are kept: of each pool the first ones, as many as fit."""

    def key(row: Row):
        t, e = row
        return -source.probs[t][e] if case.policy == "probs" else 0, t, e

    kept: set[Row] = set()
    for experts in pools_of(case):
        of_pool = sorted((row for row in rows if row[1] in experts), key=key)
        kept |= set(of_pool[: slots_of_pools(case)])
    return kept


def counts(case: Case, rows: set[Row]) -> list[int]:
    return [sum(e == expert for _, e in rows) for expert in range(case.num_experts)]


def answers(case: Case) -> list[Answer]:
    """Return what each source gets."""
    asked = [
        {
            (t, e)
            for t, experts in enumerate(source.asked)
            for e in experts
            if not (source.mask and source.mask[t])
        }
        for source in case.sources
    ]
    found = []
    for source, asks in zip(case.sources, asked, strict=True):
        kept = asks if case.factor == "fit" else cut(case, source, asks)
        demand, probs = counts(case, asks), _zeros(case, case.num_experts)
        answer = Answer(kept=kept, demand=demand, probs=probs)
        _compute(case, source, answer)
        found.append(answer)
    return found


def _zeros(case: Case, width: int) -> Table:
    return [[0.0] * width for _ in range(case.num_tokens)]


def _compute(case: Case, source: Source, answer: Answer) -> None:
    """Fill in probabilities, output and gradients, token by token."""
    answer.out, answer.grad_tokens = (_zeros(case, case.hidden) for _ in range(2))
    answer.grad_probs = _zeros(case, case.num_experts)
    for t, e in sorted(answer.kept):
        token, grad, prob = source.tokens[t], source.grad[t], source.probs[t][e] / 8
        weight = sum(weights[e] for weights in case.weights)
        answer.probs[t][e] = prob
        answer.grad_probs[t][e] = weight * sum(g * x for g, x in zip(grad, token, strict=True))
        for d in range(case.hidden):
            answer.out[t][d] += weight * prob * token[d]
            answer.grad_tokens[t][d] += weight * prob * grad[d]


def expert_rows(case: Case, found: list[Answer], rank: int) -> list[tuple[int, int, int]]:
    """Return the rows of a rank's experts, (expert, source, token), in the packed order."""
    own = range(rank * case.num_local, (rank + 1) * case.num_local)
    rows = [(e, s, t) for s, answer in enumerate(found) for t, e in answer.kept if e in own]
    return sorted(rows)
