"""Pools of slots on real ranks against the reference, bit by bit: forward and all gradients.

Tokens, gradients and the experts' factors are whole numbers, and probabilities are eighths, so that
sums are exact. Packed rows behind the last one are NaN, and so are their gradients and fresh
memory.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from padded_dispatch import DispatchConfig, PaddedDispatcher, reference
from padded_dispatch.config import NO_DROP, POLICIES
from padded_dispatch.dispatcher import Dispatched
from tests.support.grids import GRIDS, Grid, grid, poisoned_memory
from tests.support.routing_cases import assert_same, grad_of, leaf
from tests.support.routings import routing_map, thin_out
from tests.test_dispatcher import poison

POOLS = pytest.mark.parametrize("pool", ["expert", "rank"])
TOKENS, LOCAL_EXPERTS, TOP_K, HIDDEN = 9, 3, 3, 4


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs of all sources, and gradients of their outputs."""

    map_STE: np.ndarray
    probs_STE: np.ndarray
    mask_ST: np.ndarray
    tokens_STD: np.ndarray
    grad_STD: np.ndarray


def config_of(pool: Any, num_ranks: int, etp_size: int, **changes: Any) -> DispatchConfig:
    num_experts = LOCAL_EXPERTS * num_ranks
    sizes = dict(num_experts=num_experts, top_k=min(TOP_K, num_experts), capacity_factor=0.7)
    groups = dict(num_ranks=num_ranks, etp_size=etp_size)
    return DispatchConfig(**{**sizes, **changes}, **groups, capacity_pool=pool)


def make_batch(config: DispatchConfig, num_tokens: int = TOKENS, seed: int = 0) -> Batch:
    """Make a batch in which most tokens of some sources ask for the first rank's experts."""
    generator = np.random.default_rng(seed)
    sources, num_experts = config.num_sources, config.num_experts
    maps = []
    for s in range(sources):
        skew = "same" if s % 2 else "hot"
        map_TE = routing_map(num_tokens, num_experts, config.top_k, skew=skew, seed=seed + s)
        maps.append(thin_out(map_TE, share=0.2, seed=s))
    shape = sources, num_tokens
    return Batch(
        map_STE=np.stack(maps),
        probs_STE=generator.integers(0, 9, (*shape, num_experts)) / 8,
        mask_ST=generator.random(shape) < 0.1,
        tokens_STD=generator.integers(-9, 10, (*shape, HIDDEN)).astype(np.float64),
        grad_STD=generator.integers(-9, 10, (*shape, HIDDEN)).astype(np.float64),
    )


def factors(i: int, r: int) -> np.ndarray:
    """Return what shard i of each expert of rank r multiplies with."""
    generator = np.random.default_rng([i, r])
    return generator.integers(1, 9, LOCAL_EXPERTS).astype(np.float64)


def experts(sent: Dispatched, here: Grid) -> Tensor:
    """Return the experts' output for packed rows, NaN behind the last one."""
    given = sent.expert_input
    assert given.offsets_LS is not None
    ends_L = given.offsets_LS[:, -1].contiguous()
    row_N = torch.arange(given.rows_ND.shape[0], dtype=torch.int32)
    is_real_N = row_N < ends_L[-1]
    local_N = torch.searchsorted(ends_L, row_N, right=True).clamp(max=LOCAL_EXPERTS - 1)
    factor_N = torch.from_numpy(factors(here.i, here.r))[local_N]
    rows_ND, probs_N = poison(given.rows_ND, is_real_N), poison(given.probs_N, is_real_N)
    return poison(rows_ND * factor_N[:, None] * probs_N[:, None], is_real_N)


class Step:
    """One microbatch on one rank, in two parts, so that tests can choose their order."""

    def __init__(self, dispatcher: PaddedDispatcher, batch: Batch, here: Grid) -> None:
        self.dispatcher, self.here, source = dispatcher, here, here.source
        self.tokens_TD, self.probs_TE = (
            leaf(batch.tokens_STD[source]),
            leaf(batch.probs_STE[source]),
        )
        self.grad_TD = torch.from_numpy(batch.grad_STD[source])
        self.sent = dispatcher.dispatch(
            self.tokens_TD,
            self.probs_TE,
            torch.from_numpy(batch.map_STE[source]),
            torch.from_numpy(batch.mask_ST[source]),
        )
        self.sent.selection.probs_TE.retain_grad()

    def finish(self) -> dict[str, Tensor]:
        """Run experts, combine and backward."""
        out_TD = self.dispatcher.combine(experts(self.sent, self.here), self.sent)
        out_TD.backward(self.grad_TD)
        return {
            "out": out_TD.detach(),
            "kept": self.sent.selection.kept_TE,
            "unplaced": self.sent.plan.unplaced_E,
            "grad_tokens": grad_of(self.tokens_TD),
            "grad_probs": grad_of(self.sent.selection.probs_TE),
        }


def _dispatcher(config: DispatchConfig) -> tuple[PaddedDispatcher, Grid]:
    here = grid(config.num_ranks, config.etp_size)
    return PaddedDispatcher(config, group=here.group, etp_group=here.etp_group, packed=True), here


def _steps(configs: list[DispatchConfig], batch: Batch) -> list[dict[str, Tensor]]:
    with poisoned_memory():
        return [Step(*_step_of(config, batch)).finish() for config in configs]


def _step_of(config: DispatchConfig, batch: Batch) -> tuple[PaddedDispatcher, Batch, Grid]:
    dispatcher, here = _dispatcher(config)
    return dispatcher, batch, here


def selected(config: DispatchConfig, batch: Batch) -> list[reference.Selection]:
    """Return what the reference selects for each source."""
    sizes = config.sizes(batch.map_STE.shape[1])
    asked_STE = batch.map_STE & ~batch.mask_ST[..., None]
    return [
        reference.select(map_TE, probs_TE, sizes=sizes, policy=config.policy)
        for map_TE, probs_TE in zip(asked_STE, batch.probs_STE, strict=True)
    ]


def by_loops(i: int, r: int, rows_LMD: np.ndarray, probs_LM: np.ndarray) -> np.ndarray:
    return rows_LMD * factors(i, r)[:, None, None] * probs_LM[..., None]


def by_loops_backward(
    i: int, r: int, rows_LMD: np.ndarray, probs_LM: np.ndarray, grad_LMD: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    factor_L11 = factors(i, r)[:, None, None]
    grad_rows_LMD = grad_LMD * probs_LM[..., None] * factor_L11
    return grad_rows_LMD, (rows_LMD * factor_L11 * grad_LMD).sum(-1)


def assert_is_reference(
    config: DispatchConfig, batch: Batch, results: list[dict[str, Tensor]]
) -> None:
    sizes, chosen = config.sizes(batch.map_STE.shape[1]), selected(config, batch)
    plans = [reference.plan(one.kept_TE, top_k=config.top_k, sizes=sizes) for one in chosen]
    probs_STE = np.stack([one.probs_TE for one in chosen])
    ranks = dict(num_ranks=config.num_ranks, etp_size=config.etp_size)
    out_STD = reference.layer(batch.tokens_STD, probs_STE, plans, by_loops, **ranks)
    grad_tokens_STD, grad_probs_STE = reference.layer_backward(
        batch.tokens_STD, probs_STE, plans, by_loops_backward, batch.grad_STD, **ranks
    )
    for source, result in enumerate(results):
        assert_same(result["kept"], chosen[source].kept_TE)
        assert not result["unplaced"].any()
        assert_same(result["out"], out_STD[source])
        assert_same(result["grad_tokens"], grad_tokens_STD[source])
        assert_same(result["grad_probs"], grad_probs_STE[source])


@POOLS
@GRIDS
def test_every_policy_is_the_reference(on_ranks, num_ranks, etp_size, pool):
    configs = [config_of(pool, num_ranks, etp_size, policy=policy) for policy in POLICIES]
    batch = make_batch(configs[0])
    assert configs[0].sizes(TOKENS).may_drop
    results = on_ranks(num_ranks * etp_size, _steps, configs, batch)
    for config, of_ranks in zip(configs, zip(*results, strict=True), strict=True):
        assert_is_reference(config, batch, list(of_ranks))


@POOLS
@GRIDS
def test_a_pool_keeps_as_many_rows_as_it_has_slots(on_ranks, num_ranks, etp_size, pool):
    config = config_of(pool, num_ranks, etp_size, capacity_factor=0.5)
    batch, sizes = make_batch(config), config.sizes(TOKENS)
    sources = num_ranks * etp_size
    results = on_ranks(sources, _steps, [config], batch)
    asked_SE = (batch.map_STE & ~batch.mask_ST[..., None]).sum(1)
    kept_SE = np.stack([result["kept"].sum(0).numpy() for (result,) in results])
    asked_SG, kept_SG = (
        rows.reshape(sources, sizes.num_pools, -1).sum(2) for rows in (asked_SE, kept_SE)
    )
    assert (asked_SG > sizes.pool_slots).any()
    np.testing.assert_array_equal(kept_SG, np.minimum(asked_SG, sizes.pool_slots))


@POOLS
@pytest.mark.parametrize(
    "changes",
    [
        {"capacity_factor": NO_DROP},
        {"capacity_factor": 0.01},
        {"alignment": 8},
        {"min_capacity": 5},
        {"top_k": 1},
    ],
    ids=str,
)
def test_other_sizes_are_the_reference(on_ranks, pool, changes):
    config = config_of(pool, 2, 1, **changes)
    for num_tokens in (1, 6):
        batch = make_batch(config, num_tokens, seed=num_tokens)
        results = on_ranks(2, _steps, [config], batch)
        assert_is_reference(config, batch, [result for (result,) in results])


def _in_flight(config: DispatchConfig, batches: list[Batch]) -> list[dict[str, Tensor]]:
    """Dispatch all microbatches, then finish them, the last one first."""
    with poisoned_memory():
        dispatcher, here = _dispatcher(config)
        steps = [Step(dispatcher, batch, here) for batch in batches]
        return [step.finish() for step in reversed(steps)][::-1]


@POOLS
@GRIDS
def test_passes_in_flight_do_not_meet(on_ranks, num_ranks, etp_size, pool):
    config = config_of(pool, num_ranks, etp_size)
    batches = [make_batch(config, n, seed=n) for n in (TOKENS, 1, TOKENS)]
    results = on_ranks(num_ranks * etp_size, _in_flight, config, batches)
    for batch, of_ranks in zip(batches, zip(*results, strict=True), strict=True):
        assert_is_reference(config, batch, list(of_ranks))


def _recomputed(config: DispatchConfig, batch: Batch) -> list[Tensor]:
    """Return pairs of output and gradients, without and with recomputation of the forward pass."""
    dispatcher, here = _dispatcher(config)
    source = here.source
    map_TE = torch.from_numpy(batch.map_STE[source])

    def layer(tokens_TD: Tensor, probs_TE: Tensor) -> Tensor:
        sent = dispatcher.dispatch(tokens_TD, probs_TE, map_TE)
        return dispatcher.combine(experts(sent, here), sent)

    found = []
    for recompute in (False, True):
        leaves = leaf(batch.tokens_STD[source]), leaf(batch.probs_STE[source])
        if recompute:
            out_TD = torch.utils.checkpoint.checkpoint(layer, *leaves, use_reentrant=False)
        else:
            out_TD = layer(*leaves)
        out_TD.backward(torch.from_numpy(batch.grad_STD[source]))
        found += [out_TD.detach(), *map(grad_of, leaves)]
    return found


@POOLS
def test_recomputation_gives_the_same_bits(on_ranks, pool):
    config = config_of(pool, 2, 1)
    for found in on_ranks(2, _recomputed, config, make_batch(config)):
        for first, second in zip(found[:3], found[3:], strict=True):
            assert torch.equal(first, second)


def _compiled_and_eager(pool: Any, num_ranks: int) -> list[tuple[Tensor, Tensor]]:
    config = config_of(pool, num_ranks, 1)
    dispatcher, _ = _dispatcher(config)

    def layer(tokens_TD: Tensor, probs_TE: Tensor, map_TE: Tensor) -> Tensor:
        sent = dispatcher.dispatch(tokens_TD, probs_TE, map_TE)
        given = sent.expert_input
        return dispatcher.combine(torch.tanh(given.rows_ND) * given.probs_N[:, None], sent)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    pairs = []
    for num_tokens in (7, 9):
        generator = torch.Generator().manual_seed(num_tokens)
        map_TE = torch.from_numpy(routing_map(num_tokens, config.num_experts, config.top_k))
        tokens_TD = torch.rand(num_tokens, HIDDEN, generator=generator)
        probs_TE = torch.rand(map_TE.shape, generator=generator)
        results = []
        for one in (compiled, layer):
            leaves = [x.clone().requires_grad_() for x in (tokens_TD, probs_TE)]
            out_TD = one(*leaves, map_TE)
            out_TD.square().sum().backward()
            results.append([out_TD.detach(), *map(grad_of, leaves)])
        pairs += zip(*results, strict=True)
    return pairs


@pytest.mark.parametrize(("pool", "num_ranks"), [("rank", 1), ("rank", 2)])
def test_compiled_as_one_graph_is_eager_bit_by_bit(on_ranks, pool, num_ranks):
    for pairs in on_ranks(num_ranks, _compiled_and_eager, pool, num_ranks):
        assert len(pairs) == 6
        for ours, theirs in pairs:
            assert torch.equal(ours, theirs)


def test_padded_rows_need_slots_of_their_own():
    expected = (
        r"^capacity_pool must be 'expert' with experts that read padded rows, got 'rank'; set "
    )
    with pytest.raises(ValueError, match=expected):
        PaddedDispatcher(config_of("rank", 1, 1))
