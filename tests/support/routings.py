"""Synthetic routing maps: bool [T, E], the K experts that each token asked for."""

from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.utils.routings import Skew, routing_scores

# "none": no token asks for an expert, as on a rank whose tokens are all padding.
SKEWS: tuple[str, ...] = (*get_args(Skew), "none")


def routing_map(
    num_tokens: int, num_experts: int, top_k: int, *, skew: Any = "uniform", seed: int = 0
) -> NDArray[np.bool_]:
    """Return a routing map with K experts per token, or no experts for skew "none".

    Args:
        num_tokens: T.
        num_experts: E.
        top_k: experts of each token (K).
        skew: distribution of the demand over experts, one of `SKEWS`.
        seed: seed of the tokens; pass a different one on each rank.
    """
    map_TE = np.zeros((num_tokens, num_experts), bool)
    if skew != "none":
        scores_TE = routing_scores(num_tokens, num_experts, top_k, skew=skew, seed=seed)
        chosen_TK = np.argsort(-scores_TE, axis=1, kind="stable")[:, :top_k]
        np.put_along_axis(map_TE, chosen_TK, True, axis=1)
    return map_TE


def thin_out(map_TE: NDArray[np.bool_], *, share: float, seed: int = 0) -> NDArray[np.bool_]:
    """Remove about `share` of the choices, so that tokens have from 0 to K experts."""
    # Not `seed` alone, which would repeat the noise of the map.
    return map_TE & (np.random.default_rng([seed, 1]).random(map_TE.shape) >= share)
