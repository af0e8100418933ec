"""Sizes fit a routing: the largest demand of all ranks, rounded up."""

import pytest
import torch
import torch.distributed as dist

from padded_dispatch.config import DispatchConfig, PoolSizes
from padded_dispatch.exchange.fit import fit, round_up

E, K = 4, 2


def routed(num_tokens: int, seed: int = 0) -> torch.Tensor:
    """Return a map in which most tokens ask for expert 0."""
    generator = torch.Generator().manual_seed(seed)
    scores_TE = torch.rand(num_tokens, E, generator=generator) + torch.tensor([0.8, 0.2, 0.0, 0.0])
    map_TE = torch.zeros(num_tokens, E, dtype=torch.bool)
    return map_TE.scatter(1, scores_TE.topk(K).indices, True)


def config(**settings: int) -> DispatchConfig:
    return DispatchConfig(num_experts=E, top_k=K, **settings)


@pytest.mark.parametrize(
    ("demand", "slots"),
    [(0, 0), (1, 16), (16, 16), (17, 32), (250, 256), (511, 512), (1000, 1024), (1030, 1088)],
)
def test_rounding_up(demand, slots):
    assert round_up(demand) == slots


def test_rounding_up_costs_at_most_a_sixteenth_and_has_few_sizes():
    demands = range(256, 4097)
    rounded = [round_up(demand) for demand in demands]
    assert all(d <= slots <= d * 17 / 16 for d, slots in zip(demands, rounded, strict=True))
    assert len(set(rounded)) == 1 + 4 * 16


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 40])
@pytest.mark.parametrize("packed", [False, True])
def test_a_pass_has_room_for_the_largest_pool(num_tokens, packed):
    map_TE = routed(num_tokens)
    sizes = fit(config(), map_TE, None, packed=packed)
    demand = int(map_TE.sum()) if packed else int(map_TE.sum(0).max())
    most = num_tokens * K if packed else num_tokens
    assert sizes.pool_slots == min(round_up(demand), most)
    assert sizes.num_pools == (1 if packed else E)
    assert not sizes.may_drop


def _on_a_rank(lengths: tuple[int, int]) -> PoolSizes:
    rank, world = dist.get_rank(), dist.get_world_size()
    map_TE = routed(lengths[rank], seed=rank)
    map_TE[: 20 * rank, 1] = True
    return fit(config(num_ranks=world), map_TE, dist.group.WORLD, packed=False)


@pytest.mark.parametrize("lengths", [(64, 64), (3, 40)])
def test_the_largest_demand_and_the_most_tokens_decide_for_all_ranks(pool2, lengths):
    demands = []
    for rank, num_tokens in enumerate(lengths):
        map_TE = routed(num_tokens, seed=rank)
        map_TE[: 20 * rank, 1] = True
        demands.append(int(map_TE.sum(0).max()))
    first, second = pool2.run(_on_a_rank, lengths)
    assert first == second
    assert first.pool_slots == min(max(lengths), round_up(max(demands)))
    assert first.num_rows == first.pool_slots * 2 * 2
