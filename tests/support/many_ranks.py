"""A training job of many ranks as threads: two MoE layers, every situation, random steps.

A step is drawn alike on all ranks: tokens, microbatches, capacity factor, recompute, evaluation,
how skewed the routing is. Tokens, the rank that has padding only, and the experts without a token
are drawn apart. Steps that drop rows are repeated by `Retry`. Layers pass nothing to each other:
their tokens are drawn, and which collectives a rank starts must not depend on them. Stages of a
pipeline are in `tests.gpu.table`.
"""

import dataclasses
import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module

from padded_dispatch.config import NO_DROP
from padded_dispatch.megatron import PaddedOptions, padded_spec, retry
from padded_dispatch.megatron.cpu import _CudaMeansCpu, megatron_on_cpu
from padded_dispatch.megatron.retry import Retry
from tests.support import tiny
from tests.support.collectives import Records, recorded
from tests.support.threads import run_on_threads


@dataclass(frozen=True, kw_only=True)
class World:
    """A grid of ranks: i * ep + r is rank r of the i-th group."""

    ep: int
    etp: int

    @property
    def num_ranks(self) -> int:
        return self.ep * self.etp


class Alone:
    """A group of one rank, for Megatron, which reads only the size and rank of such groups."""

    group_name = "alone"

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class _Chunk(torch.nn.Module):
    """A layer with what `Retry` asks of Megatron's DistributedDataParallel."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.module = layer

    def zero_grad_buffer(self) -> None:
        self.zero_grad()


def _groups(world: World) -> ProcessGroupCollection:
    def group(ranks: list[int]) -> Any:
        if len(ranks) == 1:
            return Alone()
        # Only its members call this: all groups of a world would be hundreds for each rank.
        return dist.new_group(ranks, use_local_synchronization=True)

    i, r = divmod(dist.get_rank(), world.ep)
    every = list(range(world.num_ranks))
    ep, etp = every[i * world.ep :][: world.ep], every[r :: world.ep]
    alone = ("cp", "expt_dp", "tp_cp", "tp_dp_cp", "dp", "dp_cp", "pp")
    etp_group = group(etp)
    return ProcessGroupCollection(
        ep=group(ep),
        tp_ep=group(every),
        tp=etp_group,
        expt_tp=etp_group,
        **{name: Alone() for name in alone},
    )


class _Rank:
    """One rank of the job."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.seed = world, seed
        self.own = random.Random(f"{seed} {dist.get_rank()}")
        config = tiny.config(
            num_layers=2,
            num_moe_experts=max(world.ep, 4),
            hidden_size=4,
            num_attention_heads=2,
            moe_ffn_hidden_size=2 * world.etp,
            gated_linear_unit=False,
            expert_model_parallel_size=world.ep,
            expert_tensor_parallel_size=world.etp,
            tensor_model_parallel_size=world.etp,
            sequence_parallel=world.etp > 1,
            moe_expert_capacity_factor=1.0,
        )
        config.padded_dispatch = PaddedOptions(on_overflow="retry")
        spec = padded_spec(tiny.layer_spec()).submodules.mlp
        make = spec if callable(spec) else functools.partial(build_module, spec)
        groups = _groups(world)
        self.layers = [make(config=config, pg_collection=groups) for _ in range(2)]
        for number, layer in enumerate(self.layers, 1):
            layer.set_layer_number(number)
            layer.router.gating = functools.partial(self._gating, layer.router.gating)
        self.bias = torch.zeros(config.num_moe_experts)
        chunks: list[Any] = [_Chunk(layer) for layer in self.layers]
        self.retry = Retry(self._forward_backward, chunks)

    def _gating(self, original: Any, tokens: Any) -> Any:
        return original(tokens) + self.bias

    def step(self, common: random.Random) -> None:
        """Run a step that `common` draws alike on all ranks."""
        num_tokens = common.choice([1, 2, 3, 5])
        num_microbatches = common.choice([1, 1, 2])
        trains = common.random() < 0.75
        factor = common.choice([0.5, 1.25, 2.0, NO_DROP, NO_DROP])
        recomputes = common.random() < 0.25
        padded_rank = common.randrange(2 * self.world.num_ranks)  # None in half of the steps.
        wanted = common.choice([0, 1, len(self.bias) // 2, len(self.bias)])
        for layer in self.layers:
            layer.train(trains)
            layer.moe_layer_recompute = recomputes
            configs = layer.token_dispatcher.configs
            configs.training = dataclasses.replace(configs.training, capacity_factor=factor)
        # Experts beyond the wanted ones get no token of this rank; with one wanted, most ranks
        # starve.
        self.bias.zero_()
        if wanted:
            self.bias[wanted + 1 :] = -100.0
        self.padded = dist.get_rank() == padded_rank
        self.num_tokens = num_tokens
        seeds = iter(
            [self.own.randrange(2**31) for _ in range(num_microbatches * len(self.layers))]
        )
        self.retry(data_iterator=seeds, num_microbatches=num_microbatches, forward_only=not trains)

    def _forward_backward(
        self, *, data_iterator: Iterator[int], num_microbatches: int, forward_only: bool = False
    ) -> list[Any]:
        mask = torch.ones(1, self.num_tokens, dtype=torch.bool) if self.padded else None
        waiting = []
        for _ in range(num_microbatches):  # All forward passes, then all backward passes.
            for layer in self.layers:
                draw = torch.Generator().manual_seed(next(data_iterator))
                tokens = torch.randn(self.num_tokens, 1, 4, generator=draw)
                with torch.set_grad_enabled(not forward_only):
                    tokens.requires_grad_(not forward_only)
                    waiting.append(layer(tokens, padding_mask=mask)[0])
        while waiting and not forward_only:
            waiting.pop().sum().backward()
        return []


def _train(world: World, seed: int, num_steps: int) -> tuple[int, int]:
    """Train on one rank; return the training steps, and those of them that were repeated."""
    with _CudaMeansCpu():
        rank, common = _Rank(world, seed), random.Random(seed)
    for _ in range(num_steps):
        rank.step(common)
    return rank.retry.num_steps, rank.retry.num_retried


def train(world: World, *, seed: int, num_steps: int) -> tuple[Records, tuple[int, int]]:
    """Return the collectives of all ranks, training steps, and those of them that were repeated.

    Args:
        world: the grid of ranks.
        seed: of all that is drawn.
        num_steps: steps, with those that only evaluate.
    """
    torch.manual_seed(seed)
    with (
        megatron_on_cpu(),
        patch.object(retry, "check_retry"),
        recorded(world.num_ranks) as records,
    ):
        steps = run_on_threads(world.num_ranks, _train, world, seed, num_steps)
    assert len(set(steps)) == 1
    return records, steps[0]
