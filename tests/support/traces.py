"""Made-up routing, and its recording: one file for each rank."""

from pathlib import Path

import numpy as np

from padded_dispatch.trace import Demand, record_dtype


def made_up(
    *,
    num_steps: int,
    num_layers: int,
    num_ranks: int,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    spread: float = 1.0,
    drift: bool = False,
    seed: int = 0,
) -> Demand:
    """Return what tokens ask for that choose by a popularity of each layer's experts.

    Its logarithm is normal with deviation `spread`, or grows to it with `drift`.
    """
    random = np.random.default_rng(seed)
    popularity_YE = random.normal(size=(num_layers, num_experts)) * spread
    counts = np.empty((num_steps, num_layers, num_ranks, num_experts), np.int32)
    for step, layer, rank in np.ndindex(counts.shape[:3]):
        scores_TE = random.gumbel(size=(num_tokens, num_experts))
        scores_TE += popularity_YE[layer] * (step / max(1, num_steps - 1) if drift else 1)
        chosen_TK = np.argpartition(scores_TE, -top_k, axis=1)[:, -top_k:]
        counts[step, layer, rank] = np.bincount(chosen_TK.flatten(), minlength=num_experts)
    return Demand(
        num_tokens=num_tokens,
        top_k=top_k,
        steps=np.arange(num_steps),
        layers=np.arange(1, num_layers + 1, dtype=np.int32),
        counts=counts,
    )


def save(demand: Demand, folder: Path, *, start: int = 0, group: int = 0) -> None:
    """Write the files that the ranks of a group record, which begin after step `start`."""
    folder.mkdir(exist_ok=True)
    for source in range(demand.num_sources):
        rank = group * demand.num_sources + source
        with (folder / f"rank-{rank:05d}-step-{start:08d}.npy").open("wb") as file:
            for step in np.unique(demand.steps):
                counts = demand.counts[demand.steps == step, :, source].swapaxes(0, 1)
                records = np.zeros(counts.shape[:2], record_dtype(demand.num_experts))
                records["step"], records["layer"] = step, demand.layers[:, None]
                records["rank"], records["num_ranks"] = rank, demand.num_sources
                records["num_tokens"], records["top_k"] = demand.num_tokens, demand.top_k
                records["pool"], records["counts"] = demand.pool or "store", counts
                np.save(file, records)


def equal(one: Demand, other: Demand) -> bool:
    """Return whether two have the same sizes and counts."""
    arrays = all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("steps", "layers", "counts")
    )
    return arrays and (one.num_tokens, one.top_k) == (other.num_tokens, other.top_k)
