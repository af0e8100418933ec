"""A run of the main job with a trace, and what its layers' counters said of every step."""

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from padded_dispatch.config import Policy
from padded_dispatch.megatron import uninstall
from padded_dispatch.megatron.telemetry import padded_moe_layers
from padded_dispatch.ops.counters import Counters
from padded_dispatch.train import loop
from padded_dispatch.train.arguments import parse
from padded_dispatch.train.settings import Settings
from padded_dispatch.tune.replay import what_if
from padded_dispatch.tune.trace import load_traces

# (step, layer, rank), then what was counted.
Counted = dict[tuple[int, int, int], dict[str, Any]]


def counted_run(flags: str, device: torch.device) -> Counted:
    """Train as `padded-dispatch train FLAGS` does, on this rank of a default group."""
    counted: Counted = {}
    step_of_run = loop.Trainer.step

    def step(trainer: loop.Trainer, number: int) -> loop.Step:
        layers = padded_moe_layers(trainer.chunks)
        before = {layer: copy(moe.token_dispatcher.counters) for layer, moe in layers.items()}
        for moe in layers.values():
            moe.token_dispatcher.counters.max_demand.zero_()
        done = step_of_run(trainer, number)
        for layer, moe in layers.items():
            after = copy(moe.token_dispatcher.counters)
            figures = {name: after[name] - before[layer][name] for name in after}
            figures["max_demand"] = after["max_demand"]
            counted[number, layer, stage_rank(trainer.settings)] = figures
        return done

    loop.Trainer.step = step
    try:
        settings = parse(flags.split())
        with contextlib.redirect_stdout(io.StringIO()):
            loop.train(settings, device)
    finally:
        loop.Trainer.step = step_of_run
        uninstall()
    return counted


def copy(counters: Counters) -> dict[str, Any]:
    """The counters, on the host."""
    names = ("asked_mass", "dropped_mass", "num_tokens", "lost_tokens", "num_slots", "max_demand")
    return {name: getattr(counters, name).item() for name in names} | {
        "demand_E": counters.demand_E.cpu().numpy().copy(),
        "kept_E": counters.kept_E.cpu().numpy().copy(),
    }


def stage_rank(settings: Settings) -> int:
    return dist.get_rank() % (settings.layout.workers // settings.layout.pp)


def assert_trace_says_the_same(
    folder: Path, counted: Counted, *, factor: float, policy: Policy = "probs"
) -> None:
    """The what-if of the run's own trace at the run's own factor equals its counters."""
    trace = load_traces([folder])
    found = what_if(trace, [factor], policy=policy)
    keys = list(zip(trace.steps.tolist(), trace.layers.tolist(), trace.ranks.tolist(), strict=True))
    assert set(keys) == {key for key in counted if key[0] in set(trace.steps.tolist())}
    assert found.dropped.sum() > 0 and found.lost_tokens_FN.sum() > 0  # Or it would say little.
    assert found.asked_mass_N is not None and found.kept_mass_FN is not None
    for key in sorted(set(keys)):
        here = np.array([other == key for other in keys])
        figures = counted[key]
        asked, kept = found.asked_mass_N[here].sum(), found.kept_mass_FN[0, here].sum()
        assert found.demand_NE[here].sum(0).tolist() == figures["demand_E"].tolist()
        assert found.kept_FNE[0, here].sum(0).tolist() == figures["kept_E"].tolist()
        assert (asked, asked - kept) == (figures["asked_mass"], figures["dropped_mass"])
        assert found.num_tokens_N[here].sum() == figures["num_tokens"]
        assert found.lost_tokens_FN[0, here].sum() == figures["lost_tokens"]
        assert found.slots_F[0] * here.sum() == figures["num_slots"]
        balance = trace.num_tokens * trace.top_k / trace.num_experts
        assert found.needed_factor_N[here].max() * balance == figures["max_demand"]
