"""Sizes fit a routing: the largest demand of all ranks, rounded up, in rounds above a limit."""

import pytest
import torch
import torch.distributed as dist

from padded_dispatch.config import NO_DROP, DispatchConfig
from padded_dispatch.exchange.fit import Fitted, fit, round_up

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
    rounded = [round_up(demand) for demand in range(256, 4097)]
    assert all(
        demand <= slots <= demand * 17 / 16
        for demand, slots in zip(range(256, 4097), rounded, strict=True)
    )
    assert len(set(rounded)) == 1 + 4 * 16


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 40])
@pytest.mark.parametrize("packed", [False, True])
def test_one_round_has_room_for_the_largest_pool(num_tokens, packed):
    map_TE = routed(num_tokens)
    fitted = fit(config(), map_TE, None, packed=packed, max_factor=NO_DROP)
    demand = int(map_TE.sum()) if packed else int(map_TE.sum(0).max())
    most = num_tokens * K if packed else num_tokens
    assert fitted.sizes.pool_slots == min(round_up(demand), most)
    assert fitted.sizes.num_pools == (1 if packed else E)
    assert not fitted.sizes.may_drop
    assert (fitted.num_rounds, fitted.tokens_per_round) == (1, num_tokens)
    assert fitted.sizes_of_pass == fitted.sizes


def test_nobody_asks():
    empty_TE = torch.zeros(5, E, dtype=torch.bool)
    fitted = fit(config(), empty_TE, packed=False, max_factor=1.0)
    assert (fitted.sizes.pool_slots, fitted.num_rounds) == (1, 1)


@pytest.mark.parametrize(("num_tokens", "max_factor"), [(3, 0.1), (40, 1.0), (41, 0.25), (64, 0.5)])
def test_rounds_keep_the_limit_and_hold_all_rows(num_tokens, max_factor):
    map_TE = torch.zeros(num_tokens, E, dtype=torch.bool)
    map_TE[:, 0] = True  # All to one.
    limit = DispatchConfig(num_experts=E, top_k=K, capacity_factor=max_factor).capacity(num_tokens)
    fitted = fit(config(), map_TE, packed=False, max_factor=max_factor)
    length = fitted.tokens_per_round
    assert fitted.sizes.pool_slots <= limit < num_tokens
    assert fitted.sizes.pool_slots >= length
    assert (fitted.num_rounds - 1) * length < num_tokens <= fitted.num_rounds * length
    assert fitted.sizes_of_pass.num_rows == fitted.num_rounds * fitted.sizes.num_rows


def test_the_fewest_halvings_are_taken():
    map_TE = torch.zeros(16, E, dtype=torch.bool)
    map_TE[:8, 0] = True
    map_TE[8:, 1] = True
    # Halves ask for 8 rows of one expert, quarters for 4.
    for limit, rounds in ((8, 1), (7, 4), (4, 4), (3, 8), (1, 16)):
        fitted = fit(config(), map_TE, packed=False, max_factor=limit * E / (16 * K))
        assert (fitted.num_rounds, fitted.sizes.pool_slots <= limit) == (rounds, True)


def test_slots_of_an_expert_keep_the_alignment():
    map_TE = torch.zeros(100, E, dtype=torch.bool)
    map_TE[:33, 0] = True
    fitted = fit(config(alignment=64), map_TE, packed=False, max_factor=NO_DROP)
    assert fitted.sizes.pool_slots == 64


def _on_a_rank() -> Fitted:
    rank, world = dist.get_rank(), dist.get_world_size()
    map_TE = routed(64, seed=rank)
    map_TE[: 20 * rank, 1] = True
    settings = {"num_ranks": world}
    return fit(config(**settings), map_TE, dist.group.WORLD, packed=False, max_factor=NO_DROP)


def test_all_ranks_take_the_largest_demand_of_all(pool2):
    first, second = pool2.run(_on_a_rank)
    demands = []
    for rank in range(2):
        map_TE = routed(64, seed=rank)
        map_TE[: 20 * rank, 1] = True
        demands.append(int(map_TE.sum(0).max()))
    assert first == second
    assert first.sizes.pool_slots == min(64, round_up(max(demands)))


def _of_other_lengths(max_factor: float) -> Fitted:
    map_TE = routed((3, 40)[dist.get_rank()], seed=1)
    settings = {"num_ranks": dist.get_world_size()}
    return fit(config(**settings), map_TE, dist.group.WORLD, packed=False, max_factor=max_factor)


@pytest.mark.parametrize(("max_factor", "num_rounds"), [(NO_DROP, 1), (0.5, 4)])
def test_the_rank_with_most_tokens_decides_the_rounds_of_all(pool2, max_factor, num_rounds):
    first, second = pool2.run(_of_other_lengths, max_factor)
    assert first == second
    assert (first.num_rounds, first.tokens_per_round) == (num_rounds, 40 // num_rounds)
