"""A training run with a trace, and the counters of its layers after every step."""

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from padded_dispatch.megatron import uninstall
from padded_dispatch.megatron.telemetry import padded_moe_layers
from padded_dispatch.counters import Counters
from padded_dispatch.trace import load_traces
from padded_dispatch.train import loop
from padded_dispatch.train.arguments import parse
from padded_dispatch.train.settings import Settings
from padded_dispatch.tune.replay import Policy, replay

# Counters by (step, layer, rank).
Counted = dict[tuple[int, int, int], dict[str, Any]]


def counted_run(flags: str, device: torch.device) -> Counted:
    """Train as `padded-dispatch train FLAGS` does, on this rank of the default group."""
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
    """Copy the counters to the host."""
    names = ("num_tokens", "lost_tokens", "num_slots", "max_demand")
    return {name: getattr(counters, name).item() for name in names} | {
        "demand_E": counters.demand_E.cpu().numpy().copy(),
        "kept_E": counters.kept_E.cpu().numpy().copy(),
    }


def stage_rank(settings: Settings) -> int:
    return dist.get_rank() % (settings.layout.workers // settings.layout.pp)


def assert_trace_says_the_same(
    folder: Path, counted: Counted, *, factor: float, policy: Policy = "probs"
) -> None:
    """Check that a replay of the run's trace at the run's factor equals its counters."""
    trace = load_traces([folder])
    found = replay(trace, [factor], policy=policy)
    keys = list(zip(trace.steps.tolist(), trace.layers.tolist(), trace.ranks.tolist(), strict=True))
    assert set(keys) == {key for key in counted if key[0] in set(trace.steps.tolist())}
    assert found.dropped.sum() > 0 and found.lost_tokens.sum() > 0  # Else the test would be weak.
    for key in sorted(set(keys)):
        here = np.array([other == key for other in keys])
        figures = counted[key]
        assert found.demand_by_expert[here].sum(0).tolist() == figures["demand_E"].tolist()
        assert found.kept_by_expert[0, here].sum(0).tolist() == figures["kept_E"].tolist()
        assert found.num_tokens[here].sum() == figures["num_tokens"]
        assert found.lost_tokens[0, here].sum() == figures["lost_tokens"]
        assert found.slots[0] * here.sum() == figures["num_slots"]
        balance = trace.num_tokens * trace.top_k / trace.num_experts
        assert found.needed_factor[here].max() * balance == figures["max_demand"]
