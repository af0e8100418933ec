"""What a dispatcher must do with a case of `fuzz_cases`: plain Python on lists, no arrays.

A row is a pair (token, expert) of one source. Rows are sorted by the policy's rule, and the first
ones are kept. Nothing is shared with `padded_dispatch`, its reference included.
"""

import itertools
import math
from dataclasses import dataclass, field

from tests.support.fuzz_cases import Case, Source

Row = tuple[int, int]
Table = list[list[float]]

_32_BITS = 2**32 - 1


@dataclass
class Answer:
    """Everything that one source gets. Tables are by token.

    The tables `of_...` are sums of magnitudes, to which rounding errors are relative.
    """

    kept: set[Row]
    demand: list[int]
    protected_dropped: list[int]
    rerouted: list[int]
    probs: Table
    out: Table = field(default_factory=list)
    grad_tokens: Table = field(default_factory=list)
    grad_probs: Table = field(default_factory=list)
    grad_scores: Table = field(default_factory=list)
    of_out: Table = field(default_factory=list)
    of_grad_tokens: Table = field(default_factory=list)
    of_grad_probs: Table = field(default_factory=list)


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
    """Slots of a pool of one source; for shared receivers, those of one receiver."""
    if case.pool == "expert":
        return capacity(case)
    most = case.num_tokens * min(case.top_k, case.num_local)
    of_rank = min(capacity(case) * case.num_local, most)
    return of_rank * len(case.sources) if case.pool == "receiver" else of_rank


def shares_receivers(case: Case) -> bool:
    return case.pool == "receiver" and len(case.sources) > 1 and case.factor != "fit"


def pools_of(case: Case) -> list[list[int]]:
    """The experts of each pool of one source."""
    width = 1 if case.pool == "expert" else case.num_local
    return [list(range(e, e + width)) for e in range(0, case.num_experts, width)]


def mixed(bits: int) -> int:
    """The finalizer of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ bits >> shift) * factor % 2**32
    return bits ^ bits >> 16


def random_bits(draw: int, t: int, e: int) -> int:
    bits = mixed(mixed(0x9E3779B9 ^ (draw >> 32 & _32_BITS)) ^ (draw & _32_BITS))
    return mixed(mixed(bits ^ t) ^ e)


def in_order(case: Case, source: Source, rows: set[Row], probs: list[list[int]], first: set[Row]):
    """Sort rows of one source: those of `first`, then of protected tokens, then by the policy."""
    of_token: dict[int, list[int]] = {}
    for t, e in rows:
        of_token.setdefault(t, []).append(e)
    for t, experts in of_token.items():
        experts.sort(key=lambda e: (-probs[t][e], e))

    def key(row: Row):
        t, e = row
        level = (row not in first, not (source.protected and source.protected[t]))
        rules = {
            "probs": lambda: (-probs[t][e],),
            "position": lambda: (),
            "random": lambda: (-random_bits(case.draw, t, e),),
            "priority": lambda: (of_token[t].index(e), -probs[t][of_token[t][0]]),
        }
        return *level, *rules[case.policy](), t, e

    return sorted(rows, key=key)


def cut(case: Case, source: Source, rows: set[Row], probs, first: set[Row], limits=None):
    """Return the rows that are kept: of each pool as many as fit, or of each expert its limit."""
    pools = pools_of(case) if limits is None else [[e] for e in range(case.num_experts)]
    kept: set[Row] = set()
    ordered = in_order(case, source, rows, probs, first)
    for number, experts in enumerate(pools):
        slots = slots_of_pools(case) if limits is None else limits[number]
        kept |= set([row for row in ordered if row[1] in experts][:slots])
    return kept


def counts(case: Case, rows: set[Row]) -> list[int]:
    return [sum(e == expert for _, e in rows) for expert in range(case.num_experts)]


def accepted(case: Case, demand: list[list[int]], base: list[list[int]] | None) -> list[list[int]]:
    """Share each receiver's slots among all sources, by source and expert."""
    slots = slots_of_pools(case)
    table = [[0] * case.num_experts for _ in demand]
    for r in range(case.num_ranks):
        own = range(r * case.num_local, (r + 1) * case.num_local)
        cells = [(s, e) for s in range(len(demand)) for e in own]
        asked = [demand[s][e] for s, e in cells]
        least = [min(rows, slots // len(cells)) for rows in asked]
        if base is not None:
            least = [base[s][e] for s, e in cells]
        excess = [rows - kept for rows, kept in zip(asked, least, strict=True)]
        free = slots - sum(least)
        gets = excess
        if sum(excess) > free:
            bits = sum(mixed(mixed(m ^ 0x9E3779B9) ^ rows) for m, rows in enumerate(asked))
            offset = mixed(mixed(r) ^ bits % 2**32) * sum(excess) // 2**32
            upto = [(sum(excess[:m]) * free + offset) // sum(excess) for m in range(len(cells) + 1)]
            gets = [end - begin for begin, end in itertools.pairwise(upto)]
            assert sum(gets) == free and all(0 <= g <= x for g, x in zip(gets, excess, strict=True))
        for (s, e), kept, more in zip(cells, least, gets, strict=True):
            table[s][e] = kept + more
    return table


def rerouted(case: Case, asked: list[set[Row]], kept: list[set[Row]]) -> list[set[Row]]:
    """Return the rows that all sources keep once dropped rows have tried other experts."""
    num_sources = range(len(case.sources))
    table = [counts(case, rows) for rows in kept]
    for _ in range(case.rounds):
        wanted = []
        for s in num_sources:
            full: set[int] = set()
            for experts in pools_of(case):
                rows = sum(table[s][e] for e in experts)
                if shares_receivers(case):
                    rows = sum(table[other][e] for other in num_sources for e in experts)
                if rows >= slots_of_pools(case):
                    full |= set(experts)
            proposed = set()
            for t in range(case.num_tokens):
                lost = sum(row[0] == t for row in asked[s]) - sum(row[0] == t for row in kept[s])
                free = [
                    e
                    for e in range(case.num_experts)
                    if (t, e) not in asked[s] and (t, e) not in kept[s] and e not in full
                ]
                free.sort(key=lambda e: -case.sources[s].scores[t][e])
                proposed |= {(t, e) for e in free[:lost]}
            wanted.append(kept[s] | proposed)
        limits = None
        if shares_receivers(case):
            limits = accepted(case, [counts(case, rows) for rows in wanted], table)
        kept = [
            cut(
                case,
                case.sources[s],
                wanted[s],
                case.sources[s].scores,
                kept[s],
                None if limits is None else limits[s],
            )
            for s in num_sources
        ]
        table = [counts(case, rows) for rows in kept]
    return kept


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
    kept = asked
    if case.factor != "fit":
        limits = None
        if shares_receivers(case):
            limits = accepted(case, [counts(case, rows) for rows in asked], None)
        kept = [
            cut(case, source, rows, source.probs, set(), None if limits is None else limits[s])
            for s, (source, rows) in enumerate(zip(case.sources, asked, strict=True))
        ]
    selected = kept
    if case.remedy == "reroute" and case.factor != "fit":
        kept = rerouted(case, asked, kept)
    found = []
    for source, asks, first, last in zip(case.sources, asked, selected, kept, strict=True):
        protects = source.protected or [False] * case.num_tokens
        answer = Answer(
            kept=last,
            demand=counts(case, asks),
            protected_dropped=counts(case, {row for row in asks - first if protects[row[0]]}),
            rerouted=counts(case, last - asks),
            probs=_zeros(case, case.num_experts),
        )
        _compute(case, source, asks, answer)
        found.append(answer)
    return found


def _zeros(case: Case, width: int) -> Table:
    return [[0.0] * width for _ in range(case.num_tokens)]


def _compute(case: Case, source: Source, asked: set[Row], answer: Answer) -> None:
    """Fill in probabilities, output and gradients, token by token."""
    for name in ("out", "grad_tokens", "of_out", "of_grad_tokens"):
        setattr(answer, name, _zeros(case, case.hidden))
    for name in ("grad_probs", "grad_scores", "of_grad_probs"):
        setattr(answer, name, _zeros(case, case.num_experts))
    for t in range(case.num_tokens):
        token, grad = source.tokens[t], source.grad[t]
        asks = sorted(e for row, e in asked if row == t)
        keeps = sorted(e for row, e in answer.kept if row == t)
        prob = {e: (source.probs if e in asks else source.scores)[t][e] / 8 for e in keeps}
        sum_asked = sum(source.probs[t][e] / 8 for e in asks)
        sum_kept = sum(prob.values())
        scales = case.remedy == "renormalize" and keeps != asks and sum_kept > 0
        of_prob = {}  # Gradients of the probabilities that the experts multiply with.
        for e in keeps:
            shards = [weights[e] for weights in case.weights]
            weight, size = sum(shards), sum(abs(shard) for shard in shards)
            used = prob[e] * sum_asked / sum_kept if scales else prob[e]
            answer.probs[t][e] = used
            of_prob[e] = weight * sum(g * x for g, x in zip(grad, token, strict=True))
            for d in range(case.hidden):
                answer.out[t][d] += weight * used * token[d]
                answer.of_out[t][d] += size * used * abs(token[d])
                answer.grad_tokens[t][d] += weight * used * grad[d]
                answer.of_grad_tokens[t][d] += size * used * abs(grad[d])
        if not scales:
            for e in keeps:
                target = answer.grad_probs if e in asks else answer.grad_scores
                target[t][e] = of_prob[e]
            continue
        for e in asks:
            terms = [of_prob[i] * prob[i] / sum_kept for i in keeps]
            if e in keeps:
                terms += [of_prob[e] * sum_asked / sum_kept]
                terms += [-of_prob[i] * prob[i] * sum_asked / sum_kept**2 for i in keeps]
            answer.grad_probs[t][e] = sum(terms)
            answer.of_grad_probs[t][e] = sum(abs(term) for term in terms)


def expert_rows(case: Case, found: list[Answer], rank: int) -> list[tuple[int, int, int]]:
    """Return the rows of a rank's experts, (expert, source, token), in the packed order."""
    own = range(rank * case.num_local, (rank + 1) * case.num_local)
    rows = [(e, s, t) for s, answer in enumerate(found) for t, e in answer.kept if e in own]
    return sorted(rows)
