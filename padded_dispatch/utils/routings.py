"""Synthetic routing maps to order, one home for tests, benches and notebooks.

A routing is bool [T, E]: which experts each token asked for. Sizes, skew and seed decide it.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

# uniform: every expert alike. lognormal: some experts are popular, the same ones on all ranks. hot:
# every token asks for expert 0, else uniform. same: all tokens ask for experts 0 to K - 1, nobody
# for the others. none: no token asks for any, as on a rank with nothing but padding.
Skew = Literal["uniform", "lognormal", "hot", "same", "none"]
SKEWS: tuple[str, ...] = get_args(Skew)

_FAR = 100.0  # log popularity that no noise outweighs


def routing_scores(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    skew: Skew = "uniform",
    sigma: float = 1.0,
    num_idle: int = 0,
    seed: int = 0,
) -> NDArray[np.float64]:
    """Scores [T, E] whose K largest per token are what `routing_map` gives; logits for a router.

    Args:
        num_tokens: T.
        num_experts: E.
        top_k: experts of each token (K).
        skew: how the demand spreads over experts, see above; "none" has no scores of its own.
        sigma: spread of the experts' log popularity under "lognormal".
        num_idle: how many of the last experts nobody asks for; at least K must be left.
        seed: of the tokens; give each rank its own.
    """
    popularity_E = np.zeros(num_experts)
    if skew == "lognormal":
        popularity_E = sigma * np.random.default_rng(num_experts).normal(size=num_experts)
    elif skew == "hot":
        popularity_E[0] = _FAR
    elif skew == "same":
        popularity_E[:top_k] = _FAR
    popularity_E[num_experts - num_idle :] = -_FAR
    return noisy_scores(popularity_E, num_tokens, seed=seed)


def noisy_scores(
    popularity_E: NDArray[np.floating], num_tokens: int, *, seed: int | Sequence[int]
) -> NDArray[np.float64]:
    """Scores [T, E] from the experts' log popularity: K weighted draws, without replacement.

    That is what the K largest are after Gumbel noise was added.
    """
    noise_TE = np.random.default_rng(seed).gumbel(size=(num_tokens, len(popularity_E)))
    return popularity_E + noise_TE


def routing_map(
    num_tokens: int, num_experts: int, top_k: int, *, skew: Skew = "uniform", seed: int = 0
) -> NDArray[np.bool_]:
    """A routing map with K experts per token (without any for skew "none").

    Args:
        num_tokens: T.
        num_experts: E.
        top_k: experts of each token (K).
        skew: how the demand spreads over experts, see above.
        seed: of the tokens; give each rank its own.
    """
    scores_TE = routing_scores(num_tokens, num_experts, top_k, skew=skew, seed=seed)
    chosen_TK = np.argsort(-scores_TE, axis=1, kind="stable")[:, :top_k]
    map_TE = np.zeros((num_tokens, num_experts), bool)
    if skew != "none":
        np.put_along_axis(map_TE, chosen_TK, True, axis=1)
    return map_TE


def thin_out(map_TE: NDArray[np.bool_], *, share: float, seed: int = 0) -> NDArray[np.bool_]:
    """Take about `share` of the rows away, so that tokens have from 0 to K experts."""
    # A stream of its own: the seed alone would repeat the noise that made the map.
    return map_TE & (np.random.default_rng([seed, 1]).random(map_TE.shape) >= share)
