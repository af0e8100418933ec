"""Why stock drop-and-pad has the lower loss in the first 100 steps of a fresh router.

    python -m notebooks.why_ahead --out notebooks/results/why_ahead.json --commit SHA

A fresh router sends nearly all tokens to the same few experts, so cells drop most rows at first.
Two explanations are possible. Dropping may act as balance: no expert gets more than its cell. Or
less of a layer's noise reaches the tokens, whichever rows are dropped. Contenders of the same
seeds, text and learning rate as `real_run.py` decide, on one GPU. Neither explains it so far: see
`results/README.md`.


- `dropless`: nothing dropped. `cells`: the rows that stock drop-and-pad drops.
- `cells, random rows`: as many rows of each expert as there, drawn at random.
- `same share at random`: the share that cells would drop, drawn from all rows. Experts stay as
  unevenly loaded as in `dropless`.
- `balanced router`: nothing dropped, and the auxiliary loss is 30 times as large.
"""

import argparse
import contextlib
import gc
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from notebooks.real_run import documents
from padded_dispatch.config import DispatchConfig
from padded_dispatch.megatron import router
from padded_dispatch.megatron.dispatcher import PackedTokenDispatcher
from padded_dispatch.megatron.world import world
from padded_dispatch.train import loop, model
from padded_dispatch.train.arguments import read, resolve
from padded_dispatch.train.settings import Settings
from padded_dispatch.utils.launch import start_workers
from padded_dispatch.utils.logs import show
from padded_dispatch.utils.patches import Patches
from padded_dispatch.utils.results import about, append_run, require_results

FACTOR = 1.25
AUX_LOSS = 1e-3  # of real_run.py
CONTENDERS = {
    "dropless": {},
    "cells": {"pool": "cells"},
    "same share at random": {"thinned": True},
    "balanced router": {"aux_loss": 30 * AUX_LOSS},
    "cells, random rows": {"pool": "cells", "random": True},
}
FLAGS = "--preset qwen3-30b-a3b --num-layers 6 --micro-batch 1 --global-batch 4 --graph layer"
TINY = "--preset tiny --device cpu --global-batch 16"


class Shares:
    """The share of rows that cells of `FACTOR` drop, or would drop, of each step.

    Counts stay on the device, and a replay of a graph adds to them.
    """

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(2, device=device)  # dropped, all
        self._before = (0.0, 0.0)

    def add(self, demand_E: Tensor, slots: int) -> Tensor:
        """Count a pass of a layer; return its share."""
        found = torch.stack([(demand_E - slots).clamp(min=0).sum(), demand_E.sum()]).float()
        self.counts += found
        return found[0] / found[1]

    def read(self) -> float:
        """Return the share of the passes since the last call."""
        before, self._before = self._before, tuple(self.counts.tolist())
        dropped, rows = (b - a for a, b in zip(before, self._before, strict=True))
        return dropped / rows


@contextlib.contextmanager
def contender(
    shares: Shares, *, thinned: bool = False, random: bool = False, aux_loss: float = AUX_LOSS
) -> Iterator[None]:
    """Change what the router asks for, or which rows cells keep, as a contender does."""
    asked, kept = PackedTokenDispatcher.dispatch_preprocess, router.select
    balancing = model._balancing

    def preprocess(self: Any, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        config = self.configs.training
        if config.capacity_pool == "store":
            slots = DispatchConfig(
                num_experts=config.num_experts, top_k=config.top_k, capacity_factor=FACTOR
            ).capacity(len(routing_map))
            share = shares.add(routing_map.sum(0), slots)
            if thinned:
                routing_map = routing_map & (torch.rand_like(probs) >= share)
        return asked(self, tokens, routing_map, probs)

    def select(map_TE: Tensor, probs_TE: Tensor, *, capacity: int, policy: Any) -> Any:
        if capacity < len(map_TE):
            shares.add(map_TE.sum(0), capacity)
        if not random:
            return kept(map_TE, probs_TE, capacity=capacity, policy=policy)
        chosen = kept(map_TE, torch.rand_like(probs_TE), capacity=capacity, policy=policy)
        probs_TE = torch.where(chosen.kept_TE, probs_TE, 0)
        return type(chosen)(**vars(chosen) | {"probs_TE": probs_TE})

    with Patches() as patches:
        patches.set(PackedTokenDispatcher, "dispatch_preprocess", preprocess)
        patches.set(router, "select", select)
        changed = {"moe_aux_loss_coeff": aux_loss}
        patches.set(model, "_balancing", lambda settings: balancing(settings) | changed)
        yield


def losses(settings: Settings, device: torch.device, **how: Any) -> dict[str, Any]:
    """Train a contender; return its loss and its share of dropped rows, of each step."""
    shares, found = Shares(device), {"loss": [], "dropped": []}

    class Meter(loop.Meter):
        def read(self) -> Any:
            row = super().read()
            found["loss"].append(row.loss)
            found["dropped"].append(shares.read())
            return row

    with contender(shares, **how), Patches() as patches:
        patches.set(loop, "Meter", Meter)
        patches.set(loop, "show", lambda line: None)
        loop.train(settings, device)
    return found


def work(given: argparse.Namespace, run: dict[str, Any]) -> None:
    """Train the contenders one after another, in a worker process."""
    flags = f"{TINY if given.cpu else FLAGS} --workers 1 --steps {given.steps} {given.more}"
    with world("cpu" if given.cpu else "cuda") as device, Patches() as patches:
        if not given.cpu:
            text = np.concatenate([np.array(some, np.int32) for some in documents(given.text)])
            patches.set(loop, "load_corpus", lambda _: (text, text))
            patches.set(model, "VOCABULARY", 32_768)
            # As there: constant after ten steps, and Megatron's defaults of Adam.
            patches.set(loop, "learning_rate", lambda peak, step, _: peak * min(1, step / 10))
            patches.set(model, "_BETAS", (0.9, 0.999))
            patches.set(model, "_WEIGHT_DECAY", 0.01)
        for seed, name in itertools.product(given.seeds, given.only):
            how = dict(CONTENDERS[name])
            pool = how.pop("pool", "store")
            own = f"{flags} --seed {seed} --capacity-factor {FACTOR} --padded-capacity-pool {pool}"
            settings = resolve(read(own.split()))
            with loop.model_parallel(settings.layout):
                row = losses(settings, device, **how)
            gc.collect()  # As `compare` does: model and hooks reference each other.
            torch.cuda.empty_cache()
            kind = {"kind": "why_ahead", "contender": name, "seed": seed, "steps": given.steps}
            append_run(given.out, run, [kind | row])
            loss, dropped = mean(row["loss"][-10:]), mean(row["dropped"])
            show(f"{name}, seed {seed}: loss {loss:.3f}, share of cells' drops {dropped:.1%}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="results file")
    parser.add_argument("--commit", help="of the code")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1234, 1235])
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--text", type=Path, default=Path(torch.__file__).parent)
    parser.add_argument("--more", default="", help="flags of padded-dispatch train, for all")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes, in bytes")
    given = parser.parse_args(argv)
    require_results("--out", given.out)
    command = " ".join(["notebooks/why_ahead.py", *(sys.argv[1:] if argv is None else argv)])
    run = about(num_gpus=int(not given.cpu), command=command, commit=given.commit)
    start_workers(work, (given, run), num_workers=1)


if __name__ == "__main__":
    main()
