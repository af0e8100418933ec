"""Telemetry of captured layers is what a host counts; growth captures again and trains on."""

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from layer_parity import LayerCase, build_layer
from megatron.core import parallel_state
from torch import Tensor, nn

from padded_dispatch.launch import WorkerPool
from padded_dispatch.megatron import PaddedOptions, install, uninstall
from padded_dispatch.megatron.compat import training_stream
from padded_dispatch.megatron.graphs import LayerGraphs
from padded_dispatch.megatron.telemetry import Telemetry
from padded_dispatch.train.arguments import parse
from padded_dispatch.train.loop import train

pytestmark = pytest.mark.gpu

E, K, HIDDEN, LENGTH, BATCH = 8, 2, 128, 65, 3
T = LENGTH * BATCH


@pytest.fixture
def one_gpu() -> Iterator[None]:
    assert torch.cuda.is_available(), "tests marked gpu were asked for, and there is no GPU"
    torch.cuda.set_device(0)
    store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    install()
    yield
    uninstall()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


class Layer(nn.Module):
    """A whole MoE layer that returns its output alone; C = ceil(195 * 2 / 8 * 1.1) = 54."""

    def __init__(self) -> None:
        super().__init__()
        case = LayerCase(
            name="",
            device="cuda",
            dtype=torch.bfloat16,
            options=PaddedOptions(experts="packed"),
            num_experts=E,
            top_k=K,
            hidden=HIDDEN,
            ffn=72,
            seq=LENGTH,
            ours=(("moe_expert_capacity_factor", 1.1),),
        )
        self.moe = build_layer(case, "padded_alltoall")
        self.moe.set_layer_number(1)
        self.config = self.moe.config

    def forward(self, tokens: Tensor) -> Tensor:
        return self.moe(tokens)[0]


class LastPass:
    """Keeps the maps of the last pass where a replay writes them."""

    def __init__(self) -> None:
        self.asked_TE = torch.zeros(T, E, dtype=torch.bool, device="cuda")
        self.probs_TE = torch.zeros(T, E, dtype=torch.float64, device="cuda")
        self.capacity = 0

    def observe(self, asked_TE, probs_TE, selection, capacity):
        self.asked_TE.copy_(asked_TE)
        self.probs_TE.copy_(probs_TE)
        self.capacity = capacity


class HostCount:
    """Policy "probs" and its counts, in NumPy."""

    def __init__(self) -> None:
        self.demand_E = np.zeros(E, dtype=np.int64)
        self.kept_E = np.zeros(E, dtype=np.int64)
        self.asked_mass = self.dropped_mass = self.lost_tokens = self.largest = 0

    def add(self, asked_TE, probs_TE, capacity: int) -> None:
        kept_TE = np.zeros_like(asked_TE)
        for e in range(E):
            rows = np.flatnonzero(asked_TE[:, e])
            order = np.argsort(-probs_TE[rows, e], kind="stable")
            kept_TE[rows[order[:capacity]], e] = True
        self.demand_E += asked_TE.sum(0)
        self.kept_E += kept_TE.sum(0)
        self.asked_mass += int(np.rint(probs_TE[asked_TE] * 2**32).astype(np.int64).sum())
        dropped = probs_TE[asked_TE & ~kept_TE]
        self.dropped_mass += int(np.rint(dropped * 2**32).astype(np.int64).sum())
        self.lost_tokens += int((asked_TE.any(1) & ~kept_TE.any(1)).sum())
        self.largest = max(self.largest, int(asked_TE.sum(0).max()))


def tokens_of(seed: int) -> Tensor:
    """Every third draw goes to few experts: tokens that are nearly the same."""
    tokens = torch.randn(LENGTH, BATCH, HIDDEN, generator=torch.Generator().manual_seed(seed))
    if seed % 3 == 0:
        tokens = tokens[:1, :1] + tokens / 100
    return tokens.to("cuda", torch.bfloat16)


def test_telemetry_of_a_hundred_replays_is_a_hosts_count(one_gpu):
    layer, last, host = Layer(), LastPass(), HostCount()
    layer.moe.router.selector.observers.append(last)
    torch.cuda.make_graphed_callables(layer, (tokens_of(0).requires_grad_(),))
    telemetry = Telemetry([layer], every=7)  # What the capture counted lies before it.
    readings = []
    for seed in range(100):
        layer(tokens_of(seed).requires_grad_()).sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            reading = telemetry.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        readings += [reading] if reading is not None else []
        host.add(last.asked_TE.cpu().numpy(), last.probs_TE.cpu().numpy(), last.capacity)
    readings.append(telemetry.read())
    assert [reading.num_steps for reading in readings] == [7] * 14 + [2]
    seen = [reading.training for reading in readings]
    assert sum(s.demand_YE[0] for s in seen).tolist() == host.demand_E.tolist()
    assert sum(s.kept_YE[0] for s in seen).tolist() == host.kept_E.tolist()
    assert sum(int(s.asked_mass_Y[0]) for s in seen) == host.asked_mass
    assert sum(int(s.dropped_mass_Y[0]) for s in seen) == host.dropped_mass > 0
    assert sum(int(s.lost_tokens_Y[0]) for s in seen) == host.lost_tokens > 0
    assert max(int(s.max_demand_Y[0]) for s in seen) == host.largest > 54
    assert sum(int(s.num_passes_Y[0]) for s in seen) == 100
    assert sum(int(s.num_positions_Y[0]) for s in seen) == 100 * T
    assert sum(int(s.num_slots_Y[0]) for s in seen) == 100 * E * 54
    assert not any(reading.evaluation.num_passes_Y.any() for reading in readings)


def grown(graph: str) -> tuple[list[float], list[float | None], int]:
    """Losses and fill of every step of a run that grows twice, and its captures of layers."""
    flags = (
        "--device cuda --workers 1 --steps 24 --log-every 1 --deterministic --seq-length 128 "
        "--micro-batch 2 --capacity-factor 0.5 --padded-on-overflow grow --padded-grow-after 2 "
        f"--padded-grow-factors 0.75,no-drop --padded-telemetry-every 2 --graph {graph}"
    )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.cuda.set_stream(training_stream())
    capture, captures = LayerGraphs.capture, []

    def counted(graphs: LayerGraphs) -> Any:
        captures.append(1)
        return capture(graphs)

    with patch.object(LayerGraphs, "capture", counted), contextlib.redirect_stdout(io.StringIO()):
        outcome = train(parse(flags.split()), device)
    return [row.loss for row in outcome.rows], [row.fill for row in outcome.rows], len(captures)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1, backend="nccl") as made:
        yield made


@pytest.mark.parametrize(
    ("graph", "captures"), [("partial", 3), ("layer", 3), ("full-iteration", 0)]
)
def test_growth_captures_again_and_trains_on_as_an_eager_run(pool, graph, captures):
    """Read every 2 steps and a step later: larger after step 5, and after step 11 C = T."""
    [(losses, fills, num_captures)] = pool.run(grown, graph)
    [(eager_losses, eager_fills, _)] = pool.run(grown, "none")
    assert num_captures == captures
    assert losses == eager_losses and fills == eager_fills
    # 2 of 8 experts and nothing dropped, from step 12 on.
    assert [fill == 2 / 8 for fill in fills] == [False] * 11 + [True] * 13
