"""Synthetic routing maps: bool [T, E], the K experts that each token asked for."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from torch import Tensor

from padded_dispatch.bench.cases import SKEWS, routing_scores

# Tokens and experts of maps on GPUs, which exceed a program of each kernel.
LARGE = ((4096, 128), (33000, 128), (131072, 512))


def routing_map(
    num_tokens: int, num_experts: int, top_k: int, *, skew: str = "uniform", seed: int = 0
) -> NDArray[np.bool_]:
    """Return a routing map with K experts per token.

    Beside the skews of `routing_scores`, "same": the first K experts, and "none": no experts, as on
    a rank whose tokens are all padding.
    """
    map_TE = np.zeros((num_tokens, num_experts), bool)
    if skew == "same":
        map_TE[:, :top_k] = True
    elif skew != "none":
        scores_TE = routing_scores(num_tokens, num_experts, skew=skew, seed=seed)
        chosen_TK = np.argsort(-scores_TE, axis=1, kind="stable")[:, :top_k]
        np.put_along_axis(map_TE, chosen_TK, True, axis=1)
    return map_TE


def maps_of(
    routing: str, sizes: tuple[int, int, int], *, num_ranks: int, num_sources: int, seed: int = 0
) -> NDArray[np.bool_]:
    """Return maps [S, T, E] of these T, E and K, with the skew `routing`, or one of these.

    thin: 0 to K experts per token. one rank: all rows go to rank 0, as many as can. idle rank: no
    row goes to the last. idle source: the last source has none. idle half: nor have those of the
    second half. full: as "uniform".
    """
    num_tokens, num_experts, top_k = sizes
    local, maps = num_experts // num_ranks, []
    num_idle = {"idle source": 1, "idle half": num_sources // 2}.get(routing, 0)
    for source in range(num_sources):
        skew = routing if routing in (*SKEWS, "same", "none") else "uniform"
        if source >= num_sources - num_idle:
            skew = "none"
        map_TE = routing_map(num_tokens, num_experts, top_k, skew=skew, seed=seed + source)
        if routing == "one rank":
            map_TE[:] = np.arange(num_experts) < min(top_k, local)
        if routing == "idle rank":
            map_TE[:, -local:] = False
        is_thin = routing == "thin"
        maps.append(thin_out(map_TE, share=0.3, seed=seed + source) if is_thin else map_TE)
    return np.stack(maps)


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


@dataclass(frozen=True, kw_only=True)
class RoutingCase:
    """A router's output and sizes to cut it to. C may exceed T, a token's rows may exceed K."""

    map_TE: np.ndarray
    probs_TE: np.ndarray
    top_k: int
    capacity: int

    def tensors(self) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.map_TE), torch.from_numpy(self.probs_TE)


@st.composite
def routing_cases(draw: st.DrawFn) -> RoutingCase:
    """Draw cases from one token and one expert up, with any number of experts per token."""
    num_tokens = draw(st.integers(1, 6))
    num_experts = draw(st.integers(1, 5))
    shape = num_tokens, num_experts
    # Few values: ties are the rule. Zeros of both signs: a routed token may have probability 0.
    probs = st.sampled_from([0.5, 0.25, 1.0, 0.0, -0.0])
    return RoutingCase(
        map_TE=draw(arrays(bool, shape)),
        probs_TE=draw(arrays(np.float64, shape, elements=probs)),
        top_k=draw(st.integers(1, num_experts)),
        capacity=draw(st.integers(1, num_tokens + 2)),
    )


def assert_same(actual: Tensor, expected: np.ndarray) -> None:
    """Assert equal values, shape and dtype; NaN equals nothing."""
    torch.testing.assert_close(
        actual.detach(), torch.from_numpy(np.asarray(expected)), rtol=0, atol=0
    )
