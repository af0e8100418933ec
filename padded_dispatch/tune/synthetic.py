"""Traces to order: what routers do to capacity, each in its pure form, for tests and for questions.

Every kind is a log popularity of the experts that depends on step, layer and rank, with Gumbel
noise of `utils.routings`, whose K largest are a token's experts. Probabilities are the
softmax over these. The same arguments always give the same trace, and a layer's popular experts are
the same on all ranks, as in a real model.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import require
from padded_dispatch.tune.trace import Trace, ascending
from padded_dispatch.utils.routings import noisy_scores

# balanced     all experts exactly alike, on every rank (to one row where E does not divide T * K)
# uniform      all alike, and every token at random: the best that a router can learn
# zipf         popularity falls as 1 / place ** strength
# lognormal    its logarithm is normal with deviation `strength`; real loads look like this
# hot-experts  an eighth of the experts is e ** strength times as popular as the others
# hot-rank     all experts of one rank are
# rotating     hot-experts, and they are others at every fourth step
# burst        uniform; at every eighth step hot-experts with twice the strength
# ragged       uniform; rank r has real tokens in the first (r + 1) / R of its T, padding behind
# idle-rank    uniform; the last rank has nothing but padding
# drift        uniform at the first step, lognormal at the last, evenly in between
Kind = Literal[
    "balanced",
    "uniform",
    "zipf",
    "lognormal",
    "hot-experts",
    "hot-rank",
    "rotating",
    "burst",
    "ragged",
    "idle-rank",
    "drift",
]
KINDS: tuple[str, ...] = get_args(Kind)

_HOT = 8  # one of so many experts, at least one
_ROTATES, _BURSTS = 4, 8  # steps


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large a trace is: every step has one record per layer and rank.

    Raises:
        ValueError: names what is not possible and what to change.
    """

    num_steps: int
    num_layers: int
    num_ranks: int
    num_tokens: int
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value >= 1, name, value, "give at least 1")
        most = f"a token cannot have more than num_experts={self.num_experts} experts"
        require(self.top_k <= self.num_experts, "top_k", self.top_k, most)


def synthetic_trace(kind: Kind, sizes: Sizes, *, strength: float = 1.0, seed: int = 0) -> Trace:
    """A trace of one kind; see the table above.

    Args:
        kind: how demand spreads over experts, ranks and steps.
        sizes: of the trace; the number of experts is a multiple of that of ranks.
        strength: how uneven the popular kinds are; 0 makes them uniform.
        seed: of experts and tokens.

    Raises:
        ValueError: an unknown kind, or experts that do not spread over the ranks.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not possible: choose one of {', '.join(KINDS)}")
    require(seed >= 0, "seed", seed, "give 0 or more")
    require(math.isfinite(strength), "strength", strength, "give a finite number")
    if sizes.num_experts % sizes.num_ranks:
        raise ValueError(
            f"num_experts={sizes.num_experts} is not possible: make it a multiple of "
            f"num_ranks={sizes.num_ranks}"
        )
    shape = sizes.num_steps, sizes.num_layers, sizes.num_ranks
    steps_N, layers_N, ranks_N = (axis.flatten() for axis in np.indices(shape))
    ids_NTK = np.empty((steps_N.size, sizes.num_tokens, sizes.top_k), np.int16)
    probs_NTK = np.empty(ids_NTK.shape, np.float32)
    for n, (step, layer, rank) in enumerate(zip(steps_N, layers_N, ranks_N, strict=True)):
        tokens = seed, int(step), int(layer), int(rank)
        popularity_E = _popularity(kind, sizes, int(step), int(layer), strength, seed)
        scores_TE = noisy_scores(popularity_E, sizes.num_tokens, seed=tokens)
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
        steps=steps_N.astype(np.int64),
        layers=layers_N.astype(np.int32),
        ranks=ranks_N.astype(np.int32),
        ids_NTK=ids_NTK,
        probs_NTK=probs_NTK,
    )


def _popularity(
    kind: Kind, sizes: Sizes, step: int, layer: int, strength: float, seed: int
) -> NDArray[np.floating]:
    num_experts = sizes.num_experts
    # Which experts are popular is a draw per layer, and for some kinds per period of steps.
    period = step // _ROTATES if kind == "rotating" else 0
    random = np.random.default_rng([seed, layer, period])
    order_E = random.permutation(num_experts)
    hot_E = order_E < max(1, num_experts // _HOT)
    if kind == "zipf":
        return -strength * np.log1p(order_E)
    if kind in ("lognormal", "drift"):
        share = step / max(1, sizes.num_steps - 1) if kind == "drift" else 1.0
        return share * strength * random.normal(size=num_experts)
    if kind in ("hot-experts", "rotating"):
        return strength * hot_E
    if kind == "hot-rank":
        num_local_experts = num_experts // sizes.num_ranks
        rank = int(random.integers(sizes.num_ranks))
        return strength * (np.arange(num_experts) // num_local_experts == rank)
    if kind == "burst" and step % _BURSTS == _BURSTS - 1:
        return 2 * strength * hot_E
    return np.zeros(num_experts)


def _balanced_ids(sizes: Sizes, tokens: tuple[int, ...]) -> NDArray[np.int64]:
    """[T, K]: the experts in turn, in an order of their own for every record."""
    order_E = np.random.default_rng(tokens).permutation(sizes.num_experts)
    turns = np.arange(sizes.num_tokens * sizes.top_k).reshape(-1, sizes.top_k)
    return order_E[turns % sizes.num_experts]


def _num_real_tokens(kind: Kind, sizes: Sizes, rank: int) -> int:
    if kind == "ragged":
        return sizes.num_tokens * (rank + 1) // sizes.num_ranks
    if kind == "idle-rank" and rank == sizes.num_ranks - 1:
        return 0
    return sizes.num_tokens


def _softmax(scores_TK: NDArray[np.float64]) -> NDArray[np.float32]:
    weights_TK = np.exp(scores_TK - scores_TK.max(1, keepdims=True))
    return (weights_TK / weights_TK.sum(1, keepdims=True)).astype(np.float32)
