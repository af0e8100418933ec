"""Synthetic router scores [T, E], T tokens by E experts: the K largest of a token are its experts.

Sizes, skew and seed determine them.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

# uniform: all experts are equally popular. lognormal: some experts are popular, the same ones on
# all ranks. hot: every token asks for expert 0, otherwise uniform. same: all tokens ask for experts
# 0 to K - 1.
Skew = Literal["uniform", "lognormal", "hot", "same"]

_FAR = 100.0  # a log popularity that outweighs the noise


def routing_scores(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    skew: Skew = "uniform",
    sigma: float = 1.0,
    seed: int = 0,
) -> NDArray[np.float64]:
    """Return scores [T, E], usable as router logits.

    Args:
        num_tokens: T.
        num_experts: E.
        top_k: experts of each token (K).
        skew: distribution of the demand over experts, see `Skew`.
        sigma: standard deviation of the experts' log popularity under "lognormal".
        seed: seed of the tokens; pass a different one on each rank.
    """
    popularity_E = np.zeros(num_experts)
    if skew == "lognormal":
        popularity_E = sigma * np.random.default_rng(num_experts).normal(size=num_experts)
    elif skew == "hot":
        popularity_E[0] = _FAR
    elif skew == "same":
        popularity_E[:top_k] = _FAR
    # Gumbel noise: the K largest of a token are K weighted draws without replacement.
    noise_TE = np.random.default_rng(seed).gumbel(size=(num_tokens, num_experts))
    return popularity_E + noise_TE
