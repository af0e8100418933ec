"""Synthetic routing maps, for tests, benches and notebooks.

A routing map is bool [T, E], T tokens by E experts: the K experts that each token asked for. Sizes,
skew and seed determine it.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

# uniform: all experts are equally popular. lognormal: some experts are popular, the same ones on
# all ranks. topics: the same, but every seed (and so every rank) has popular experts of its own.
# hot: every token asks for one expert, otherwise uniform. same: all tokens ask for experts
# 0 to K - 1. none: no token asks for an expert, as on a rank whose tokens are all padding.
Skew = Literal["uniform", "lognormal", "topics", "hot", "same", "none"]
SKEWS: tuple[str, ...] = get_args(Skew)

_FAR = 100.0  # a log popularity that outweighs the noise


def routing_scores(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    skew: Skew = "uniform",
    sigma: float = 1.0,
    hot_expert: int = 0,
    num_idle: int = 0,
    seed: int = 0,
) -> NDArray[np.float64]:
    """Return scores [T, E], usable as router logits; `routing_map` takes each token's K largest.

    Args:
        num_tokens: T.
        num_experts: E.
        top_k: experts of each token (K).
        skew: distribution of the demand over experts, see `Skew`; "none" equals "uniform" here.
        sigma: standard deviation of the experts' log popularity under "lognormal" and "topics".
        hot_expert: the expert that every token asks for under "hot".
        num_idle: number of experts, the last ones, that get no token; at least K must remain.
        seed: seed of the tokens; pass a different one on each rank.
    """
    popularity_E = np.zeros(num_experts)
    if skew == "lognormal":
        popularity_E = sigma * np.random.default_rng(num_experts).normal(size=num_experts)
    elif skew == "topics":
        popularity_E = sigma * np.random.default_rng([num_experts, seed]).normal(size=num_experts)
    elif skew == "hot":
        popularity_E[hot_expert] = _FAR
    elif skew == "same":
        popularity_E[:top_k] = _FAR
    popularity_E[num_experts - num_idle :] = -_FAR
    return noisy_scores(popularity_E, num_tokens, seed=seed)


def noisy_scores(
    popularity_E: NDArray[np.floating], num_tokens: int, *, seed: int | Sequence[int]
) -> NDArray[np.float64]:
    """Return scores [T, E]: the experts' log popularity plus Gumbel noise.

    The K largest of a token are K weighted draws without replacement (the Gumbel top-k trick).
    """
    noise_TE = np.random.default_rng(seed).gumbel(size=(num_tokens, len(popularity_E)))
    return popularity_E + noise_TE


def routing_map(
    num_tokens: int, num_experts: int, top_k: int, *, skew: Skew = "uniform", seed: int = 0
) -> NDArray[np.bool_]:
    """Return a routing map with K experts per token, or no experts for skew "none".

    Args:
        num_tokens: T.
        num_experts: E.
        top_k: experts of each token (K).
        skew: distribution of the demand over experts, see `Skew`.
        seed: seed of the tokens; pass a different one on each rank.
    """
    scores_TE = routing_scores(num_tokens, num_experts, top_k, skew=skew, seed=seed)
    chosen_TK = np.argsort(-scores_TE, axis=1, kind="stable")[:, :top_k]
    map_TE = np.zeros((num_tokens, num_experts), bool)
    if skew != "none":
        np.put_along_axis(map_TE, chosen_TK, True, axis=1)
    return map_TE


def thin_out(map_TE: NDArray[np.bool_], *, share: float, seed: int = 0) -> NDArray[np.bool_]:
    """Remove about `share` of the choices, so that tokens have from 0 to K experts."""
    # Not `seed` alone, which would repeat the noise of the map.
    return map_TE & (np.random.default_rng([seed, 1]).random(map_TE.shape) >= share)
