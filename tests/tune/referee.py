"""Compare what the kinds of pools drop under skewed routing, and write results rows.

    python -m tests.tune.referee --out notebooks/results/pools.json --commit SHA

Synthetic routing of the models' shapes over 8 ranks, without a GPU: the replay of `tune` decides
what is dropped, as the dispatcher does. `--tokens` and `--steps` make it smaller.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from padded_dispatch.config import CAPACITY_POOLS
from padded_dispatch.trace import Trace, ascending
from padded_dispatch.tune.replay import largest_need, replay
from padded_dispatch.utils.results import about, append_run, require_results
from padded_dispatch.utils.routings import noisy_scores
from padded_dispatch.utils.shapes import SHAPES

FACTORS = (1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
MODELS = ("qwen3-30b-a3b", "gpt-oss-20b")
_HOT = 2.0  # log popularity of a hot expert

# From the number of experts, the step and the rank to their log popularity.
Popularity = Callable[[int, int, int], np.ndarray]


def _lognormal(sigma: float, *, of_a_rank: bool = False) -> Popularity:
    def popularity(num_experts: int, step: int, rank: int) -> np.ndarray:
        seed = [num_experts, step, rank] if of_a_rank else [num_experts, step]
        return sigma * np.random.default_rng(seed).normal(size=num_experts)

    return popularity


def _hot(moves: bool) -> Popularity:
    def popularity(num_experts: int, step: int, rank: int) -> np.ndarray:
        found = np.zeros(num_experts)
        found[step % num_experts if moves else 0] = _HOT
        return found

    return popularity


SKEWS: dict[str, Popularity] = {
    "uniform": lambda num_experts, step, rank: np.zeros(num_experts),
    "lognormal 0.3": _lognormal(0.3),
    "lognormal 0.6": _lognormal(0.6),
    "topics 0.5": _lognormal(0.5, of_a_rank=True),
    "hot expert": _hot(moves=False),
    "rotating hotspot": _hot(moves=True),
}


def trace_of(model: str, skew: str, *, ranks: int, tokens: int, steps: int) -> Trace:
    """Return a trace of one layer with a new draw of popularities at every step."""
    shape = SHAPES[model]
    step_N, rank_N = (axis.flatten() for axis in np.mgrid[:steps, :ranks])
    ids_NTK = np.empty((len(step_N), tokens, shape.top_k), np.int16)
    probs_NTK = np.empty(ids_NTK.shape, np.float32)
    for n, (step, rank) in enumerate(zip(step_N.tolist(), rank_N.tolist(), strict=True)):
        popularity = SKEWS[skew](shape.num_experts, step, rank)
        scores_TE = noisy_scores(popularity, tokens, seed=[1, step, rank])
        chosen_TK = np.argpartition(scores_TE, -shape.top_k, axis=1)[:, -shape.top_k :]
        weights_TK = np.exp(np.take_along_axis(scores_TE, chosen_TK, axis=1))
        ids_NTK[n], probs_NTK[n] = chosen_TK, weights_TK / weights_TK.sum(1, keepdims=True)
    ids, probs = ascending(ids_NTK, probs_NTK)
    return Trace(
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        num_ranks=ranks,
        steps=step_N.astype(np.int64),
        layers=np.ones(len(step_N), np.int32),
        ranks=rank_N.astype(np.int32),
        ids_NTK=ids,
        probs_NTK=probs,
    )


def rows_of(model: str, skew: str, **sizes: int) -> list[dict[str, Any]]:
    """Return a row for each kind of pool."""
    trace, found = trace_of(model, skew, **sizes), []
    for pool in CAPACITY_POOLS:
        replayed = replay(trace, FACTORS, pool=pool)
        shares = replayed.dropped.sum(1) / replayed.demand.sum()
        found.append(
            {
                "check": "rows dropped by synthetic routing",
                "model": model,
                "skew": skew,
                "ep": sizes["ranks"],
                **sizes,
                "capacity_pool": pool,
                "dropped": dict(zip(map(str, FACTORS), shares.round(6).tolist(), strict=True)),
                "drops_nothing_at": round(largest_need(trace, pool=pool), 4),
            }
        )
    return found


def main() -> int:
    """Write the rows of all models and skews."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    require_results("--out", given.out)
    run = about(
        num_gpus=0, command=f"python -m tests.tune.referee {_flags(given)}", commit=given.commit
    )
    for model in MODELS:
        for skew in SKEWS:
            started = time.monotonic()
            rows = rows_of(model, skew, ranks=given.ranks, tokens=given.tokens, steps=given.steps)
            append_run(given.out, run, rows)
            dropped = ", ".join(f"{r['capacity_pool']} {r['dropped']['1.25']:.2%}" for r in rows)
            sys.stdout.write(
                f"{model}, {skew}: {dropped} at 1.25 ({time.monotonic() - started:.0f} s)\n"
            )
            sys.stdout.flush()
    return 0


def _flags(given: argparse.Namespace) -> str:
    sizes = f"--ranks {given.ranks} --tokens {given.tokens} --steps {given.steps}"
    return f"--out {given.out} --commit {given.commit} {sizes}"


if __name__ == "__main__":
    sys.exit(main())
