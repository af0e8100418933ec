"""Dispatch, experts and combine on real ranks against the reference, bit by bit.

Tokens, weights and gradients are small whole numbers and probabilities are eighths, so that every
product and sum is exact in fp64 and equality needs no tolerance.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch import DispatchConfig, Dispatched, ExpertInput, PaddedDispatcher
from padded_dispatch.config import FIT, NO_DROP
from tests.support import reference
from tests.support.grids import GRIDS, Grid, grid, poisoned_memory
from tests.support.pool import WorkerError, WorkerPool
from tests.support.routing_cases import assert_same, grad_of, leaf
from tests.support.routings import routing_map, thin_out

ROUTINGS = "thin", "hot", "same", "idle", "masked", "tiny"
LAYOUTS = pytest.mark.parametrize("layout", ["padded", "packed", "rank"])
LOCAL_EXPERTS, TOP_K, TOKENS, HIDDEN = 2, 3, 7, 4


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens, routing and gradients of all sources."""

    map_STE: np.ndarray
    probs_STE: np.ndarray
    mask_ST: np.ndarray
    tokens_STD: np.ndarray
    grad_STD: np.ndarray


@dataclass(frozen=True, kw_only=True)
class OneRank:
    """Results of one rank: output and gradients."""

    out_TD: Tensor
    grad_tokens_TD: Tensor
    grad_probs_TE: Tensor
    grad_out_ND: Tensor
    is_real_N: Tensor
    demand_E: Tensor


def make_batch(config: DispatchConfig, routing: str, seed: int = 0) -> Batch:
    """Make the payloads of all sources for one routing.

    thin: 0 to K experts per token. hot: one expert overflows. same: most experts get no token.
    idle: tokens of the last rank ask for no expert. masked: some tokens, and all tokens of rank 0,
    are padding.
    """
    generator = np.random.default_rng(seed)
    num_tokens = 1 if routing == "tiny" else TOKENS
    sources, experts = config.num_sources, config.num_experts
    mask_ST = np.zeros((sources, num_tokens), bool)
    if routing == "masked":
        mask_ST = generator.random(mask_ST.shape) < 0.3
        mask_ST[0] = True
    maps = []
    for source in range(sources):
        skew = routing if routing in ("hot", "same") else "uniform"
        if routing == "idle" and source == sources - 1:
            skew = "none"
        map_TE = routing_map(num_tokens, experts, config.top_k, skew=skew, seed=seed + source)
        maps.append(thin_out(map_TE, share=0.3, seed=source) if routing == "thin" else map_TE)
    shape = sources, num_tokens
    return Batch(
        map_STE=np.stack(maps),
        probs_STE=generator.integers(0, 9, (*shape, experts)) / 8,
        mask_ST=mask_ST,
        tokens_STD=generator.integers(-9, 10, (*shape, HIDDEN)).astype(np.float64),
        grad_STD=generator.integers(-9, 10, (*shape, HIDDEN)).astype(np.float64),
    )


def weight(i: int, r: int) -> np.ndarray:
    """Return the weights [L, D, D] of shard i of the experts of rank r."""
    generator = np.random.default_rng([i, r])
    return generator.integers(-3, 4, (LOCAL_EXPERTS, HIDDEN, HIDDEN)).astype(np.float64)


def numpy_experts(i: int, r: int, rows_LMD: np.ndarray, probs_LM: np.ndarray) -> np.ndarray:
    return (rows_LMD @ weight(i, r)) * probs_LM[..., None]


def numpy_experts_backward(
    i: int, r: int, rows_LMD: np.ndarray, probs_LM: np.ndarray, grad_LMD: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    grad_rows_LMD = (grad_LMD * probs_LM[..., None]) @ weight(i, r).transpose(0, 2, 1)
    return grad_rows_LMD, ((rows_LMD @ weight(i, r)) * grad_LMD).sum(-1)


def experts_of(given: ExpertInput) -> tuple[Tensor, Tensor]:
    """Return the expert of each row [N], and bool [N], True for rows that hold a token."""
    num_sources, num_local = given.kept_SL.shape
    row_N = torch.arange(len(given.rows_ND), dtype=torch.int32)
    if given.offsets_LS is not None:
        ends_L = given.offsets_LS[:, -1].contiguous()
        local_N = torch.searchsorted(ends_L, row_N, right=True).clamp(max=num_local - 1)
        return local_N, row_N < ends_L[-1]
    c_C = torch.arange(len(row_N) // given.kept_SL.numel())
    is_real = c_C < given.kept_SL.T.reshape(num_local, num_sources, 1)
    return row_N // (len(row_N) // num_local), is_real.flatten()


def poison(rows: Tensor, is_real_N: Tensor) -> Tensor:
    """Write NaN to every padded row, of the values and of their gradient in backward."""

    def nan(values: Tensor) -> Tensor:
        return torch.where(is_real_N.view(-1, *[1] * (values.ndim - 1)), values, torch.nan)

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Tensor) -> Tensor:
            return nan(values)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return nan(grad)

    return Poison.apply(rows)


def experts(given: ExpertInput, here: Grid) -> Tensor:
    """Return the experts' output; rows without a token are NaN, in all values and gradients."""
    local_N, is_real_N = experts_of(given)
    rows_ND, probs_N = poison(given.rows_ND, is_real_N), poison(given.probs_N, is_real_N)
    weight_NDD = torch.from_numpy(weight(here.i, here.r))[local_N]
    out_ND = (rows_ND[:, None] @ weight_NDD).squeeze(1) * probs_N[:, None]
    return poison(out_ND, is_real_N)


class _Step:
    """One microbatch on one rank, in two parts, so that tests can choose their order."""

    def __init__(self, config: DispatchConfig, batch: Batch) -> None:
        self.here = grid(config.num_ranks, config.etp_size)
        source = self.here.source
        self.tokens_TD = leaf(batch.tokens_STD[source])
        self.probs_TE = leaf(batch.probs_STE[source])
        self.map_TE = torch.from_numpy(batch.map_STE[source])
        self.mask_T = torch.from_numpy(batch.mask_ST[source])
        self.grad_TD = torch.from_numpy(batch.grad_STD[source])

    def dispatch(self, dispatcher: PaddedDispatcher) -> Dispatched:
        return dispatcher.dispatch(self.tokens_TD, self.probs_TE, self.map_TE, self.mask_T)

    def finish(self, dispatcher: PaddedDispatcher, dispatched: Dispatched) -> OneRank:
        """Run experts with NaN in all padded rows, then combine and backward."""
        out_ND = experts(dispatched.expert_input, self.here)
        out_ND.retain_grad()
        out_TD = dispatcher.combine(out_ND, dispatched)
        out_TD.backward(self.grad_TD)
        assert not dispatched.plan.unplaced_E.any()
        return OneRank(
            out_TD=out_TD.detach(),
            grad_tokens_TD=grad_of(self.tokens_TD),
            grad_probs_TE=grad_of(self.probs_TE),
            grad_out_ND=grad_of(out_ND),
            is_real_N=experts_of(dispatched.expert_input)[1],
            demand_E=dispatched.selection.demand_E,
        )


def _dispatcher(config: DispatchConfig, packed: bool = False) -> PaddedDispatcher:
    here = grid(config.num_ranks, config.etp_size)
    return PaddedDispatcher(config, group=here.group, etp_group=here.etp_group, packed=packed)


def _in_flight(config: DispatchConfig, packed: bool, batches: list[Batch]) -> list[OneRank]:
    """Dispatch all microbatches, then finish them, the last one first, as pipelines do."""
    with poisoned_memory():
        dispatcher = _dispatcher(config, packed)
        steps = [_Step(config, batch) for batch in batches]
        sent = [step.dispatch(dispatcher) for step in steps]
        results = [step.finish(dispatcher, sent.pop()) for step in reversed(steps)]
    return results[::-1]


def assert_is_reference(
    config: DispatchConfig, batch: Batch, results: list[OneRank], packed: bool = False
) -> None:
    sizes = config.sizes(batch.tokens_STD.shape[1])
    selections = [
        reference.select(map_TE, probs_TE, sizes=sizes, policy=config.policy, mask_T=mask_T)
        for map_TE, probs_TE, mask_T in zip(
            batch.map_STE, batch.probs_STE, batch.mask_ST, strict=True
        )
    ]
    plans = [reference.plan(s.kept_TE, top_k=config.top_k, sizes=sizes) for s in selections]
    probs_STE = np.stack([selection.probs_TE for selection in selections])
    ranks = dict(num_ranks=config.num_ranks, etp_size=config.etp_size)
    out_STD = reference.layer(batch.tokens_STD, probs_STE, plans, numpy_experts, **ranks)
    grad_tokens_STD, grad_probs_STE = reference.layer_backward(
        batch.tokens_STD, probs_STE, plans, numpy_experts_backward, batch.grad_STD, **ranks
    )
    grad_out_RLMD = reference.combine_backward(batch.grad_STD, plans, num_ranks=config.num_ranks)
    given = reference.dispatch(batch.tokens_STD, probs_STE, plans, num_ranks=config.num_ranks)
    for source, (result, selection) in enumerate(zip(results, selections, strict=True)):
        assert_same(result.out_TD, out_STD[source])
        assert_same(result.grad_tokens_TD, grad_tokens_STD[source])
        assert_same(
            result.grad_probs_TE,
            reference.select_backward(selection.kept_TE, grad_probs_STE[source]),
        )
        r = source % config.num_ranks
        expected = reference.pack(grad_out_RLMD[r], given.kept_RSL[r])
        assert_same(result.grad_out_ND[result.is_real_N], expected)
        if not packed:  # Rows behind packed ones are unspecified.
            assert not result.grad_out_ND[~result.is_real_N].any()
        assert_same(result.demand_E, selection.demand_E)


def config_of(layout: str, num_ranks: int = 1, etp_size: int = 1, **changes: Any) -> DispatchConfig:
    """Return a config for "padded" or "packed" cells, or packed pools of a "rank"."""
    num_experts = LOCAL_EXPERTS * num_ranks
    sizes = dict(num_experts=num_experts, top_k=min(TOP_K, num_experts), capacity_factor=0.75)
    pool: Any = "rank" if layout == "rank" else "expert"
    groups = dict(num_ranks=num_ranks, etp_size=etp_size, capacity_pool=pool)
    return DispatchConfig(**{**sizes, **changes}, **groups)


def check(on_ranks: Any, config: DispatchConfig, packed: bool, batches: list[Batch]) -> None:
    results = on_ranks(config.num_sources, _in_flight, config, packed, batches)
    for batch, of_ranks in zip(batches, zip(*results, strict=True), strict=True):
        assert_is_reference(config, batch, list(of_ranks), packed)


@LAYOUTS
@GRIDS
def test_all_ranks_are_the_reference(on_ranks, num_ranks, etp_size, layout):
    """Every routing in a pass of its own; all wait for their backward pass at the same time."""
    config = config_of(layout, num_ranks, etp_size)
    batches = [make_batch(config, routing, seed) for seed, routing in enumerate(ROUTINGS)]
    check(on_ranks, config, layout != "padded", batches)


@LAYOUTS
@pytest.mark.parametrize(
    "changes",
    [
        {"policy": "position"},
        {"capacity_factor": NO_DROP},
        {"capacity_factor": 0.01},
        {"alignment": 16},
        {"top_k": 1},
    ],
    ids=str,
)
def test_every_setting_is_the_reference(on_ranks, layout, changes):
    config = config_of(layout, 2, 1, **changes)
    batches = [make_batch(config, routing) for routing in ("hot", "tiny")]
    check(on_ranks, config, layout != "padded", batches)


@LAYOUTS
def test_sizes_that_fit_drop_nothing(on_ranks, layout):
    batches = [make_batch(config_of(layout, 2, 2), one) for one in ("hot", "masked", "tiny")]
    fitted, whole = (
        on_ranks(
            4,
            _in_flight,
            config_of(layout, 2, 2, capacity_factor=factor),
            layout != "padded",
            batches,
        )
        for factor in (FIT, NO_DROP)
    )
    for of_rank, expected_of_rank in zip(fitted, whole, strict=True):
        for ours, expected in zip(of_rank, expected_of_rank, strict=True):
            for name in ("out_TD", "grad_tokens_TD", "grad_probs_TE", "demand_E"):
                assert torch.equal(getattr(ours, name), getattr(expected, name)), name
            assert len(ours.grad_out_ND) <= len(expected.grad_out_ND)


def _layer(
    dispatcher: PaddedDispatcher, tokens_TD: Tensor, probs_TE: Tensor, map_TE: Tensor
) -> Tensor:
    dispatched = dispatcher.dispatch(tokens_TD, probs_TE, map_TE)
    given = dispatched.expert_input
    return dispatcher.combine(torch.tanh(given.rows_ND) * given.probs_N[:, None], dispatched)


def _compiled_and_eager(layout: str, num_ranks: int, etp_size: int) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of outputs and gradients in fp32, in which another order of sums would show."""
    config = config_of(layout, num_ranks, etp_size)
    dispatcher = _dispatcher(config, layout != "padded")
    compiled = torch.compile(_layer, fullgraph=True, backend="aot_eager")
    pairs = []
    for num_tokens in (7, 9):
        generator = torch.Generator().manual_seed(num_tokens)
        map_TE = torch.from_numpy(routing_map(num_tokens, config.num_experts, config.top_k))
        results = []
        tokens_TD = torch.rand(num_tokens, HIDDEN, generator=generator)
        probs_TE = torch.rand(map_TE.shape, generator=generator)
        for layer in (compiled, _layer):
            leaves = [x.clone().requires_grad_() for x in (tokens_TD, probs_TE)]
            out_TD = layer(dispatcher, *leaves, map_TE)
            out_TD.square().sum().backward()
            results.append([out_TD.detach(), *map(grad_of, leaves)])
        pairs += zip(*results, strict=True)
    return pairs


@pytest.mark.parametrize(
    ("layout", "num_ranks", "etp_size"), [("packed", 1, 1), ("padded", 1, 2), ("rank", 2, 1)]
)
def test_compiled_as_one_graph_is_eager_bit_by_bit(on_ranks, layout, num_ranks, etp_size):
    for pairs in on_ranks(num_ranks * etp_size, _compiled_and_eager, layout, num_ranks, etp_size):
        assert len(pairs) == 6
        for ours, theirs in pairs:
            assert torch.equal(ours, theirs)


def test_padded_rows_need_slots_of_their_own():
    expected = r"^capacity_pool must be 'expert' with experts that read padded rows, got 'rank'"
    with pytest.raises(ValueError, match=expected):
        PaddedDispatcher(config_of("rank"))


@pytest.mark.parametrize("field", ["num_ranks", "etp_size"])
def test_a_config_of_another_size_than_its_group_is_refused(field):
    config = DispatchConfig(num_experts=4, top_k=2, **{field: 2})
    with pytest.raises(ValueError, match=rf"^{field}\b.*2") as refused:
        PaddedDispatcher(config)
    assert "process group" in str(refused.value)


def _world_for_one_rank() -> None:
    PaddedDispatcher(DispatchConfig(num_experts=4, top_k=2), group=dist.group.WORLD)


def test_a_group_of_another_size_than_its_config_is_refused(pool2: WorkerPool):
    with pytest.raises(WorkerError, match=r"num_ranks\b.*1") as refused:
        pool2.run(_world_for_one_rank)
    for error in refused.value.errors.values():
        assert "process group" in str(error) and "2" in str(error)


def _exchange_with(**on_rank_1: Any) -> None:
    config = DispatchConfig(num_experts=4, top_k=2, num_ranks=2)
    options = on_rank_1 if dist.get_rank() == 1 else {}
    PaddedDispatcher(config, group=dist.group.WORLD, **options)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"packed": True}, "layout is 0 on rank 0, 1 on rank 1"),
        ({"microbatches_in_flight": 3}, "microbatches_in_flight is 1 on rank 0, 3 on rank 1"),
    ],
    ids=["packed", "in flight"],
)
def test_ranks_must_choose_the_same_exchange(pool2: WorkerPool, option, words):
    with pytest.raises(WorkerError, match=words) as caught:
        pool2.run(functools.partial(_exchange_with, **option))
    assert {type(error) for error in caught.value.errors.values()} == {ValueError}
    assert len(caught.value.errors) == 2


def test_no_tokens_are_refused():
    dispatcher = PaddedDispatcher(DispatchConfig(num_experts=4, top_k=2))
    with pytest.raises(ValueError, match=r"^num_tokens must .*, got 0"):
        no_experts_TE = torch.zeros(0, 4)
        dispatcher.dispatch(torch.zeros(0, 3), no_experts_TE, no_experts_TE > 0)
