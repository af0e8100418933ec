"""Synthetic routing maps: bool [T, E], the K experts that each token asked for."""

from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from padded_dispatch.utils.routings import Skew, routing_scores

# "none": no token asks for an expert, as on a rank whose tokens are all padding.
SKEWS: tuple[str, ...] = (*get_args(Skew), "none")
# Tokens and experts of maps on GPUs, which exceed a program of each kernel.
LARGE = ((4096, 128), (33000, 128), (131072, 512))


def routing_map(
    num_tokens: int, num_experts: int, top_k: int, *, skew: Any = "uniform", seed: int = 0
) -> NDArray[np.bool_]:
    """Return a routing map with K experts per token, or no experts for skew "none"."""
    map_TE = np.zeros((num_tokens, num_experts), bool)
    if skew != "none":
        scores_TE = routing_scores(num_tokens, num_experts, top_k, skew=skew, seed=seed)
        chosen_TK = np.argsort(-scores_TE, axis=1, kind="stable")[:, :top_k]
        np.put_along_axis(map_TE, chosen_TK, True, axis=1)
    return map_TE


def large_map(num_tokens: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return a map on a GPU, of eight experts for each token, one of which all have, and scores."""
    generator = torch.Generator("cuda").manual_seed(0)
    probs_TE = torch.rand(num_tokens, num_experts, device="cuda", generator=generator)
    probs_TE[:, 3] += 1
    map_TE = torch.zeros_like(probs_TE, dtype=torch.bool)
    return map_TE.scatter_(1, probs_TE.topk(8).indices, True), probs_TE


def thin_out(map_TE: NDArray[np.bool_], *, share: float, seed: int = 0) -> NDArray[np.bool_]:
    """Remove about `share` of the choices, so that tokens have from 0 to K experts."""
    # Not `seed` alone, which would repeat the noise of the map.
    return map_TE & (np.random.default_rng([seed, 1]).random(map_TE.shape) >= share)
