"""A training run with a trace, and the counters of its layers after every step."""

import contextlib
import io
from pathlib import Path

import torch

from padded_dispatch.config import Policy
from padded_dispatch.megatron import uninstall
from padded_dispatch.megatron.telemetry import padded_moe_layers
from padded_dispatch.trace import load_traces
from padded_dispatch.train import loop
from padded_dispatch.train.arguments import parse
from padded_dispatch.tune.demand import demand_of
from padded_dispatch.tune.replay import replay

# By (step, layer): rows asked for at this rank's tokens, rows that this rank counts as kept, and
# the largest need of a pass.
Counted = dict[tuple[int, int], tuple[int, int, int]]


def counted_run(flags: str, device: torch.device) -> Counted:
    """Train as `padded-dispatch train FLAGS` does, on this rank of the default group."""
    counted: Counted = {}
    step_of_run = loop.Trainer.step

    def step(trainer: loop.Trainer, number: int) -> loop.Step:
        layers = padded_moe_layers(trainer.chunks)
        counters = {layer: moe.token_dispatcher.counters for layer, moe in layers.items()}
        before = {layer: rows_of(c) for layer, c in counters.items()}
        for c in counters.values():
            c.max_need.zero_()
        done = step_of_run(trainer, number)
        for layer, c in counters.items():
            asked, kept = (now - was for now, was in zip(rows_of(c), before[layer], strict=True))
            counted[number, layer] = asked, kept, int(c.max_need)
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


def rows_of(counters) -> tuple[int, int]:
    return int(counters.demand_E.sum()), int(counters.kept_E.sum())


def assert_trace_says_the_same(
    folder: Path,
    counted: list[Counted],
    *,
    factor: float,
    strikes: Policy | None = "probs",
    store_layers: int | None = None,
) -> None:
    """Check that a replay of the run's trace at the run's factor equals the counters of all ranks.

    `strikes`: None over direct stores, which strike nothing.
    """
    trace = load_traces([folder])
    assert trace.capacity_pool is not None
    demand = demand_of(trace)
    given = {"store_layers": store_layers, "strikes": strikes}
    found = replay(demand, [factor], pool=trace.capacity_pool, **given)
    assert found.dropped.sum() > 0  # Else the test would be weak.
    places = [
        (step, layer)
        for step in found.steps.tolist()
        for layer in demand.layers.tolist()
        if any((step, layer) in of_rank for of_rank in counted)
    ]
    assert {place for of_rank in counted for place in of_rank if place[0] in found.steps} == {
        *places
    }
    for step, layer in places:
        here = [of_rank[step, layer] for of_rank in counted if (step, layer) in of_rank]
        asked, kept = sum(rows for rows, _, _ in here), sum(rows for _, rows, _ in here)
        at = demand.layers.tolist().index(layer), found.steps.tolist().index(step)
        assert (asked, asked - kept) == (found.asked[at], found.dropped[0][at]), (step, layer)
    if trace.capacity_pool == "expert":
        most = max(need for of_rank in counted for _, _, need in of_rank.values())
        assert found.needed.max() * demand.mean_rows == most
