"""Small traces for tests: odd sizes, many ties, missing choices; and made-up routing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from padded_dispatch.trace import Trace, TracedRun, append


def ascending(ids: np.ndarray, probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort every token's choices into the normal form: by expert, then -1. Shapes [..., K]."""
    order = np.argsort(ids.view(np.uint16), axis=-1, kind="stable")
    return tuple(np.take_along_axis(values, order, axis=-1) for values in (ids, probs))


def traced_run(**given: Any) -> TracedRun:
    """Return a run of rows of 64 elements, whose experts are 96 wide."""
    return TracedRun(**dict(hidden_size=64, fc1_width=96) | given)


def small_trace(
    *,
    steps: list[int],
    layers: list[int],
    ranks: list[int],
    num_tokens: int = 5,
    num_experts: int = 6,
    top_k: int = 3,
    num_ranks: int = 2,
    seed: int = 0,
) -> Trace:
    """Return random choices, a quarter of them missing, with many equal probabilities."""
    random = np.random.default_rng(seed)
    shape = len(steps), num_tokens
    scores_NTE = random.random((*shape, num_experts))
    ids_NTK = scores_NTE.argsort(-1)[..., :top_k].astype(np.int16)
    ids_NTK[random.random(ids_NTK.shape) < 0.25] = -1
    probs_NTK = random.choice(np.float32([0, 0.25, 0.5, 1]), ids_NTK.shape)
    ids_NTK, probs_NTK = ascending(ids_NTK, np.where(ids_NTK < 0, np.float32(0), probs_NTK))
    return _trace(num_experts, num_ranks, (steps, layers, ranks), ids_NTK, probs_NTK)


def _trace(
    num_experts: int, num_ranks: int, where: Any, ids: np.ndarray, probs: np.ndarray
) -> Trace:
    """Return a trace of records with choices [N, T, K]; `where`: their steps, layers, ranks."""
    _, num_tokens, top_k = ids.shape
    sizes = {"num_tokens": num_tokens, "top_k": top_k}
    steps, layers, ranks = where
    return Trace(
        run=traced_run(**sizes, num_experts=num_experts, num_ranks=num_ranks),
        steps=np.array(steps, np.int64),
        layers=np.array(layers, np.int32),
        ranks=np.array(ranks, np.int32),
        ids_NTK=ids,
        probs_NTK=probs,
    )


def equal(one: Trace, other: Trace) -> bool:
    names = ("steps", "layers", "ranks", "ids_NTK", "probs_NTK")
    arrays = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)
    return arrays and one.run == other.run


def of_run(trace: Trace, **changes: Any) -> Trace:
    return replace(trace, run=replace(trace.run, **changes))


def save(trace: Trace, path: Path) -> None:
    """Write a trace as one step of a file, which is replaced."""
    with path.open("wb") as file:
        append(trace, file)


def synthetic_trace(
    kind: str,
    *,
    num_steps: int = 40,
    num_layers: int = 2,
    num_ranks: int = 2,
    num_tokens: int = 64,
    num_experts: int = 16,
    top_k: int = 2,
    strength: float = 1.0,
    seed: int = 0,
) -> Trace:
    """Make a trace of layers from 1 on, whose tokens choose by a popularity of experts.

    Its logarithm is normal with deviation `strength` ("lognormal"), or grows to it ("drift").
    "balanced": all experts get the same rows, to one.
    """
    steps, layers, ranks = (a.flatten() for a in np.indices((num_steps, num_layers, num_ranks)))
    ids_NTK = np.empty((steps.size, num_tokens, top_k), np.int16)
    probs_NTK = np.full(ids_NTK.shape, 1 / top_k, np.float32)
    for n, (step, layer, rank) in enumerate(zip(steps, layers, ranks, strict=True)):
        if kind == "balanced":
            turns = np.arange(num_tokens * top_k).reshape(-1, top_k)
            ids_NTK[n] = turns % num_experts
            continue
        popularity_E = strength * np.random.default_rng([seed, layer]).normal(size=num_experts)
        if kind == "drift":
            popularity_E *= step / max(1, num_steps - 1)
        random = np.random.default_rng([seed, step, layer, rank])
        scores_TE = popularity_E + random.gumbel(size=(num_tokens, num_experts))
        ids_NTK[n] = np.argpartition(scores_TE, -top_k, axis=1)[:, -top_k:]
    ids_NTK, probs_NTK = ascending(ids_NTK, probs_NTK)
    return _trace(num_experts, num_ranks, (steps, layers + 1, ranks), ids_NTK, probs_NTK)
