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
# lognormal    the log of popularity is normal with deviation `strength`; real loads look like this
# topics       lognormal, drawn for each rank: sources whose data has topics of its own
# hot-experts  an eighth of the experts is e ** strength times as popular as the others
# drift        uniform at the first step, lognormal at the last, evenly in between
Kind = Literal["balanced", "uniform", "lognormal", "topics", "hot-experts", "drift"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_HOT = 8  # one of so many experts is hot, at least one


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
    """Make a trace of one kind; see the table above. Its layers are numbered from 1.

    Args:
        kind: how demand spreads over experts, ranks and steps.
        sizes: of the trace.
        strength: how uneven the popular kinds are; 0 makes them uniform.
        seed: of experts and tokens, 0 or more.

    Raises:
        ValueError: names the argument, its value and what to change.
    """
    require(kind in KINDS, "kind", kind, f"be one of {', '.join(KINDS)}")
    require(math.isfinite(strength), "strength", strength, "be a finite number")
    shape = sizes.num_steps, sizes.num_layers, sizes.num_ranks
    steps, layers, ranks = (axis.flatten() for axis in np.indices(shape))
    ids_NTK = np.empty((steps.size, sizes.num_tokens, sizes.top_k), np.int16)
    probs_NTK = np.empty(ids_NTK.shape, np.float32)
    for n, (step, layer, rank) in enumerate(np.stack([steps, layers, ranks], axis=1).tolist()):
        # The popular experts are drawn per layer, and for topics per rank.
        random = np.random.default_rng([seed, layer, rank if kind == "topics" else 0])
        progress = step / max(1, sizes.num_steps - 1)
        popularity = strength * _popularity(kind, sizes.num_experts, progress, random)
        tokens = seed, step, layer, rank
        scores_TE = noisy_scores(popularity, sizes.num_tokens, seed=tokens)
        if kind == "balanced":
            ids_NTK[n] = _in_turn(sizes, tokens)
        else:
            ids_NTK[n] = np.argpartition(scores_TE, -sizes.top_k, axis=1)[:, -sizes.top_k :]
        scores_TK = np.take_along_axis(scores_TE, ids_NTK[n].astype(np.intp), axis=1)
        weights_TK = np.exp(scores_TK - scores_TK.max(1, keepdims=True))
        probs_NTK[n] = weights_TK / weights_TK.sum(1, keepdims=True)
    sorted_ids_NTK, sorted_probs_NTK = ascending(ids_NTK, probs_NTK)
    return Trace(
        num_experts=sizes.num_experts,
        top_k=sizes.top_k,
        num_ranks=sizes.num_ranks,
        steps=steps.astype(np.int64),
        layers=(layers + 1).astype(np.int32),
        ranks=ranks.astype(np.int32),
        ids_NTK=sorted_ids_NTK,
        probs_NTK=sorted_probs_NTK,
    )


def _popularity(
    kind: Kind, num_experts: int, progress: float, random: np.random.Generator
) -> NDArray[np.floating]:
    """Return the log popularity of each expert for strength 1, [E].

    `progress` grows from 0 at the first step to 1 at the last.
    """
    if kind in ("lognormal", "topics"):
        return random.normal(size=num_experts)
    if kind == "drift":
        return progress * random.normal(size=num_experts)
    if kind == "hot-experts":
        return 1.0 * (random.permutation(num_experts) < max(1, num_experts // _HOT))
    return np.zeros(num_experts)


def _in_turn(sizes: TraceSizes, tokens: tuple[int, ...]) -> NDArray[np.int64]:
    """Take the experts in turn, in a random order per record, [T, K]."""
    order = np.random.default_rng(tokens).permutation(sizes.num_experts)
    turns = np.arange(sizes.num_tokens * sizes.top_k).reshape(-1, sizes.top_k)
    return order[turns % sizes.num_experts]
