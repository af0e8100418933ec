"""Make synthetic traces: the ways in which routers strain capacity, each in its pure form.

Every kind is a log popularity of the experts that depends on step, layer and rank. Gumbel noise
(`utils.routings`) is added to it, and the K largest are a token's experts; their softmax gives the
probabilities. The same arguments always give the same trace, and a layer's popular experts are the
same on all ranks, as in a real model.

Letters: N records; T tokens; K experts per token; E experts.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import require
from padded_dispatch.trace import MAX_EXPERTS, Trace, ascending
from padded_dispatch.utils.routings import noisy_scores

# balanced     all experts exactly alike, on every rank (to one row where E does not divide T * K)
# uniform      all experts alike, every token at random: the best that a router can learn
# zipf         popularity falls as 1 / place ** strength
# lognormal    its logarithm is normal with deviation `strength`; real loads look like this
# topics       lognormal, drawn for each rank: sources whose data has topics of its own
# hot-experts  an eighth of the experts is e ** strength times as popular as the others
# hot-rank     all experts of one rank are e ** strength times as popular
# rotating     hot-experts that change at every fourth step
# burst        uniform; at every eighth step hot-experts with twice the strength
# ragged       uniform; on rank r the first (r + 1) / R of the T tokens are real, the rest padding
# idle-rank    uniform; the last rank has padding only
# drift        uniform at the first step, lognormal at the last, evenly in between
Kind = Literal[
    "balanced",
    "uniform",
    "zipf",
    "lognormal",
    "topics",
    "hot-experts",
    "hot-rank",
    "rotating",
    "burst",
    "ragged",
    "idle-rank",
    "drift",
]
KINDS: tuple[str, ...] = get_args(Kind)

_HOT = 8  # one of so many experts is hot, at least one
_ROTATES, _BURSTS = 4, 8  # steps between changes, between bursts


@dataclass(frozen=True, kw_only=True)
class TraceSizes:
    """Sizes of a trace; every step has one record per layer and rank.

    Raises:
        ValueError: names the field, its value and what to change.
    """

    num_steps: int
    num_layers: int
    num_ranks: int
    num_tokens: int
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value >= 1, name, value, "be at least 1")
        experts, ranks = self.num_experts, self.num_ranks
        require(experts <= MAX_EXPERTS, "num_experts", experts, f"be at most {MAX_EXPERTS}")
        require(self.top_k <= experts, "top_k", self.top_k, f"be at most num_experts={experts}")
        require(experts % ranks == 0, "num_experts", experts, f"be a multiple of num_ranks={ranks}")


def synthetic_trace(
    kind: Kind, sizes: TraceSizes, *, strength: float = 1.0, seed: int = 0
) -> Trace:
    """Make a trace of one kind; see the table above.

    Args:
        kind: how demand spreads over experts, ranks and steps.
        sizes: of the trace.
        strength: how uneven the popular kinds are; 0 makes them uniform.
        seed: of experts and tokens.

    Raises:
        ValueError: names the argument, its value and what to change.
    """
    require(kind in KINDS, "kind", kind, f"be one of {', '.join(KINDS)}")
    require(seed >= 0, "seed", seed, "be 0 or more")
    require(math.isfinite(strength), "strength", strength, "be a finite number")
    shape = sizes.num_steps, sizes.num_layers, sizes.num_ranks
    steps, layers, ranks = (axis.flatten() for axis in np.indices(shape))
    ids_NTK = np.empty((steps.size, sizes.num_tokens, sizes.top_k), np.int16)
    probs_NTK = np.empty(ids_NTK.shape, np.float32)
    for n, (step, layer, rank) in enumerate(zip(steps, layers, ranks, strict=True)):
        tokens = seed, int(step), int(layer), int(rank)
        source = int(rank) if kind == "topics" else 0
        popularity = _popularity(kind, sizes, int(step), int(layer), source, strength, seed)
        scores_TE = noisy_scores(popularity, sizes.num_tokens, seed=tokens)
        if kind == "balanced":
            ids_NTK[n] = _balanced_ids(sizes, tokens)
        else:
            largest = slice(sizes.num_experts - sizes.top_k, None)
            ids_NTK[n] = np.argpartition(scores_TE, -sizes.top_k, axis=1)[:, largest]
        probs_NTK[n] = _softmax(np.take_along_axis(scores_TE, ids_NTK[n].astype(np.intp), axis=1))
        first_padding = _num_real_tokens(kind, sizes, int(rank))
        ids_NTK[n, first_padding:] = -1
        probs_NTK[n, first_padding:] = 0
    ids_NTK, probs_NTK = ascending(ids_NTK, probs_NTK)
    return Trace(
        num_experts=sizes.num_experts,
        top_k=sizes.top_k,
        num_ranks=sizes.num_ranks,
        steps=steps.astype(np.int64),
        layers=layers.astype(np.int32),
        ranks=ranks.astype(np.int32),
        ids_NTK=ids_NTK,
        probs_NTK=probs_NTK,
    )


def _popularity(
    kind: Kind,
    sizes: TraceSizes,
    step: int,
    layer: int,
    source: int,
    strength: float,
    seed: int,
) -> NDArray[np.floating]:
    """Return the log popularity of each expert, [E]."""
    num_experts = sizes.num_experts
    # The popular experts are drawn per layer, and for some kinds per period of steps.
    period = step // _ROTATES if kind == "rotating" else 0
    random = np.random.default_rng([seed, layer, period, source])
    order = random.permutation(num_experts)
    hot = order < max(1, num_experts // _HOT)
    if kind == "zipf":
        return -strength * np.log1p(order)
    if kind in ("lognormal", "topics", "drift"):
        share = step / max(1, sizes.num_steps - 1) if kind == "drift" else 1.0
        return share * strength * random.normal(size=num_experts)
    if kind in ("hot-experts", "rotating"):
        return strength * hot
    if kind == "hot-rank":
        num_local_experts = num_experts // sizes.num_ranks
        rank = int(random.integers(sizes.num_ranks))
        return strength * (np.arange(num_experts) // num_local_experts == rank)
    if kind == "burst" and step % _BURSTS == _BURSTS - 1:
        return 2 * strength * hot
    return np.zeros(num_experts)


def _balanced_ids(sizes: TraceSizes, tokens: tuple[int, ...]) -> NDArray[np.int64]:
    """Take the experts in turn, in a random order per record, [T, K]."""
    order = np.random.default_rng(tokens).permutation(sizes.num_experts)
    turns = np.arange(sizes.num_tokens * sizes.top_k).reshape(-1, sizes.top_k)
    return order[turns % sizes.num_experts]


def _num_real_tokens(kind: Kind, sizes: TraceSizes, rank: int) -> int:
    if kind == "ragged":
        return sizes.num_tokens * (rank + 1) // sizes.num_ranks
    if kind == "idle-rank" and rank == sizes.num_ranks - 1:
        return 0
    return sizes.num_tokens


def _softmax(scores_TK: NDArray[np.float64]) -> NDArray[np.float32]:
    weights_TK = np.exp(scores_TK - scores_TK.max(1, keepdims=True))
    return (weights_TK / weights_TK.sum(1, keepdims=True)).astype(np.float32)
