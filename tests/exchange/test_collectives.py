"""Every stage on real ranks against the reference, bit by bit.

Payloads are whole numbers in fp64 that encode their address. All sums are exact, so equality needs
no tolerance, and a misplaced row shows its origin. Fresh memory is NaN throughout.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import opcheck

from padded_dispatch.config import BufferBytes, DispatchConfig, PoolSizes
from padded_dispatch.exchange import Exchange
from padded_dispatch.exchange.collectives import (
    AllToAllExchange,
    all_gather,
    all_to_all,
    group_name,
    reduce_scatter,
)
from padded_dispatch.exchange.local import LocalExchange
from padded_dispatch.routing.plan import make_plan
from tests.support import reference
from tests.support.grids import GRIDS, Grid, grid, poisoned_memory
from tests.support.pool import WorkerPool
from tests.support.routing_cases import addresses, assert_same, grad_of, leaf
from tests.support.routings import routing_map, thin_out

LAYOUTS = pytest.mark.parametrize("layout", ["padded", "packed", "rank"])
ROUTINGS = "thin", "same", "idle", "tiny"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Payloads of all ranks. Shard i of an expert contributes `out_IRLMD[i]` to the sum.

    `sizes`: of the pools in which the reference lays rows out.
    """

    config: DispatchConfig
    sizes: PoolSizes
    packed: bool
    kept_STE: np.ndarray
    tokens_STD: np.ndarray
    probs_STE: np.ndarray
    grad_rows_IRLMD: np.ndarray
    grad_probs_IRLM: np.ndarray
    out_IRLMD: np.ndarray
    grad_combined_STD: np.ndarray

    def plans(self) -> list[reference.Plan]:
        return [
            reference.plan(kept_TE, top_k=self.config.top_k, sizes=self.sizes)
            for kept_TE in self.kept_STE
        ]


def make_case(routing: str, num_ranks: int, etp_size: int, layout: str) -> Case:
    """thin: 0 to K experts per token, some rows dropped. same: all tokens to the same experts, and
    all others idle. idle: the last rank has no real tokens. tiny: one of everything.

    layout: "padded" and "packed" rows of experts with slots of their own; packed pools of a "rank".
    """
    sources = num_ranks * etp_size
    num_tokens, local, top_k, capacity, hidden = 7, 2, 3, 3, 5
    if routing == "tiny":
        num_tokens, local, top_k, capacity, hidden = 1, 1, 1, 1, 1
    experts = local * num_ranks
    config = DispatchConfig(
        num_experts=experts,
        top_k=min(top_k, experts),
        capacity_factor=capacity * experts / (num_tokens * min(top_k, experts)),
        capacity_pool="rank" if layout == "rank" else "expert",
        policy="position",
        num_ranks=num_ranks,
        etp_size=etp_size,
    )
    sizes = config.sizes(num_tokens)
    maps = []
    for source in range(sources):
        skew = "same" if routing == "same" else "uniform"
        map_TE = routing_map(num_tokens, experts, config.top_k, skew=skew, seed=source)
        if routing == "thin":
            map_TE = thin_out(map_TE, share=0.2, seed=source)
        if routing == "idle" and source == sources - 1:
            map_TE[:] = False
        maps.append(map_TE)
    buffers = etp_size, num_ranks, local, sources * sizes.pool_slots
    return Case(
        config=config,
        sizes=sizes,
        packed=layout != "padded",
        kept_STE=kept_of(config, np.stack(maps)),
        tokens_STD=addresses(sources, num_tokens, hidden),
        probs_STE=addresses(sources, num_tokens, experts, offset=10_000),
        grad_rows_IRLMD=addresses(*buffers, hidden, offset=20_000),
        grad_probs_IRLM=addresses(*buffers, offset=30_000),
        out_IRLMD=addresses(*buffers, hidden, offset=40_000),
        grad_combined_STD=addresses(sources, num_tokens, hidden, offset=50_000),
    )


def kept_of(config: DispatchConfig, map_STE: np.ndarray) -> np.ndarray:
    """Cut the maps of all sources to the slots of a config."""
    sizes = config.sizes(map_STE.shape[1])
    return np.stack(
        [
            reference.select(map_TE, map_TE * 1.0, sizes=sizes, policy=config.policy).kept_TE
            for map_TE in map_STE
        ]
    )


def _there_and_back(cases: list[Case]) -> list[dict[str, Tensor]]:
    """Return all results and gradients of this rank of a pool, for each case."""
    with poisoned_memory():
        return [results_of(one, grid(one.config.num_ranks, one.config.etp_size)) for one in cases]


def exchange_of(here: Grid, config: DispatchConfig, packed: bool) -> Exchange:
    """Return the exchange that a dispatcher of this rank takes."""
    num_local_experts = config.num_local_experts
    if packed and here.group is None and here.etp_group is None:
        return LocalExchange()
    return AllToAllExchange(
        num_local_experts,
        here.group,
        here.etp_group,
        packed=packed,
        experts_per_pool=1 if config.capacity_pool == "expert" else num_local_experts,
    )


def results_of(case: Case, here: Grid) -> dict[str, Tensor]:
    config, sizes, packed = case.config, case.sizes, case.packed
    exchange = exchange_of(here, config, packed)
    kept_TE = torch.from_numpy(case.kept_STE[here.source])
    plan = make_plan(kept_TE, top_k=config.top_k, sizes=sizes)
    tokens_TD, probs_TE = leaf(case.tokens_STD[here.source]), leaf(case.probs_STE[here.source])
    outgoing = exchange.prepare(tokens_TD, probs_TE, plan, sizes.num_rows)
    given = exchange.arrange(exchange.move(outgoing))
    assert given.rows_ND.shape[0] == given.probs_N.shape[0] == sizes.num_rows

    def experts_hold(payload_IRLM: np.ndarray) -> np.ndarray:
        """Return this rank's part in the experts' layout; NaN after the last packed row."""
        payload_LM = payload_IRLM[here.i, here.r]
        if not packed:
            return payload_LM.reshape(-1, *payload_LM.shape[2:])
        real = reference.pack(payload_LM, given.kept_SL.numpy())
        rows = np.full((sizes.num_rows, *payload_LM.shape[2:]), np.nan)
        rows[: len(real)] = real
        return rows

    torch.autograd.backward(
        (given.rows_ND, given.probs_N),
        (
            torch.from_numpy(experts_hold(case.grad_rows_IRLMD)),
            torch.from_numpy(experts_hold(case.grad_probs_IRLM)),
        ),
    )
    out_ND = leaf(experts_hold(case.out_IRLMD))
    returned = exchange.disarrange(out_ND, given.offsets_LS)
    combined_TD = exchange.combine(exchange.move_back(returned), plan, given.offsets_LS)
    combined_TD.backward(torch.from_numpy(case.grad_combined_STD[here.source]))
    return {
        "rows": given.rows_ND.detach(),
        "probs": given.probs_N.detach(),
        "kept": given.kept_SL,
        "grad_tokens": grad_of(tokens_TD),
        "grad_probs": grad_of(probs_TE),
        "combined": combined_TD.detach(),
        "grad_out": grad_of(out_ND),
    }


def assert_is_reference(case: Case, results: list[dict[str, Tensor]]) -> None:
    plans, num_ranks = case.plans(), case.config.num_ranks
    assert all(plan.num_unplaced == 0 for plan in plans)
    given = reference.dispatch(case.tokens_STD, case.probs_STE, plans, num_ranks=num_ranks)
    grad_tokens_STD, grad_probs_STE = reference.dispatch_backward(
        case.grad_rows_IRLMD.sum(0),
        case.grad_probs_IRLM.sum(0),
        plans,
        num_experts=case.probs_STE.shape[-1],
    )
    combined_STD = reference.combine(case.out_IRLMD.sum(0), plans)
    grad_out_RLMD = reference.combine_backward(case.grad_combined_STD, plans, num_ranks=num_ranks)
    for source, result in enumerate(results):
        r = source % num_ranks
        for name, by_loops_RLM in (
            ("rows", given.rows_RLMD),
            ("probs", given.probs_RLM),
            ("grad_out", grad_out_RLMD),
        ):
            if case.packed:  # What follows the real rows is unspecified.
                expected = reference.pack(by_loops_RLM[r], given.kept_RSL[r])
                assert_same(result[name][: len(expected)], expected)
            else:
                expected = by_loops_RLM[r].reshape(-1, *by_loops_RLM.shape[3:])
                assert_same(result[name], expected)
        assert_same(result["kept"], given.kept_RSL[r])
        assert_same(result["grad_tokens"], grad_tokens_STD[source])
        assert_same(result["grad_probs"], grad_probs_STE[source])
        assert_same(result["combined"], combined_STD[source])


@LAYOUTS
@GRIDS
def test_every_stage_is_the_reference(on_ranks, num_ranks, etp_size, layout):
    cases = [make_case(routing, num_ranks, etp_size, layout) for routing in ROUTINGS]
    results = on_ranks(num_ranks * etp_size, _there_and_back, cases)
    for case, of_ranks in zip(cases, zip(*results, strict=True), strict=True):
        assert_is_reference(case, list(of_ranks))


def _sums_of_shards() -> tuple[Tensor, Tensor]:
    """Sum 256 from rank 0 and 1 each from ranks 1 to 3: once forward, once backward."""
    name = group_name(dist.group.WORLD)
    value = 256 if dist.get_rank() == 0 else 1
    summand = torch.full((4, 1), value, dtype=torch.bfloat16)
    block = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    all_gather(block, name, 4).backward(summand)
    assert block.grad is not None
    return reduce_scatter(summand, name, 4), block.grad


def test_shards_of_bf16_add_up_in_fp32(pool4: WorkerPool):
    # Above 256 bf16 has even numbers only: adding 1 changes nothing. 259 rounds to 260.
    ones = torch.ones((), dtype=torch.bfloat16)
    assert (((256 * ones) + ones) + ones) + ones == 256
    for forward, backward in pool4.run(_sums_of_shards):
        assert forward.tolist() == [[260.0]]
        assert backward.tolist() == [[260.0]]


def _check_ops() -> None:
    name = group_name(dist.group.WORLD)
    rows = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    strided = torch.randn(3, 4, dtype=torch.float64).T.requires_grad_()
    for blocks in (rows, strided):
        opcheck(all_to_all, (blocks, name))
        opcheck(all_gather, (blocks, name, 2))
        opcheck(reduce_scatter, (blocks, name, 2))


def test_collectives_are_sound_custom_ops(pool2: WorkerPool):
    assert pool2.run(_check_ops) == [None, None]


def _allocated(config: DispatchConfig, dtype: torch.dtype, packed: bool) -> BufferBytes:
    """Return the bytes of new storage behind the results of every stage, on this rank."""
    here = grid(config.num_ranks, config.etp_size)
    exchange = exchange_of(here, config, packed)
    known: dict[int, Tensor] = {}  # Keeps everything alive, so that no address is used twice.

    def new_bytes(*tensors: Tensor | None) -> int:
        stored = {t.untyped_storage().data_ptr(): t for t in tensors if t is not None}
        new = {pointer: t for pointer, t in stored.items() if pointer not in known}
        known.update(new)
        return sum(t.untyped_storage().nbytes() for t in new.values())

    map_TE = torch.from_numpy(routing_map(7, config.num_experts, config.top_k))
    plan = make_plan(map_TE, top_k=config.top_k, sizes=config.sizes(7))
    maps = plan.slot_of_TK, plan.expert_of_TK, plan.choice_of_slot_GP
    plan_bytes = new_bytes(*maps, plan.kept_E, plan.unplaced_E)
    tokens_TD, num_rows = torch.ones(7, 3, dtype=dtype), config.sizes(7).num_rows
    sent = exchange.prepare(tokens_TD, torch.ones(map_TE.shape), plan, num_rows)
    send = new_bytes(sent.rows_MPD, sent.meta_MPX)
    moved = exchange.move(sent)
    receive = new_bytes(moved.rows_MPD, moved.meta_MPX)
    if here.etp_group is not None:  # Inside `arrange`: the slots of all shards.
        receive += config.etp_size * send
    given = exchange.arrange(moved)
    experts = new_bytes(given.rows_ND, given.probs_N, given.kept_SL, given.offsets_LS)
    out_ND = given.rows_ND.clone()
    returned = exchange.disarrange(out_ND, given.offsets_LS)
    moved_back = exchange.move_back(returned)
    back = new_bytes(out_ND, returned.rows_MPD, moved_back.rows_MPD)
    return BufferBytes(send=send, receive=receive, experts=experts, back=back, plan=plan_bytes)


@pytest.mark.parametrize("layout", ["padded", "packed", "rank"])
@GRIDS
def test_bytes_are_those_that_ranks_allocate(on_ranks, num_ranks, etp_size, layout):
    config = DispatchConfig(
        num_experts=4,
        top_k=2,
        capacity_factor=1.5,
        capacity_pool="rank" if layout == "rank" else "expert",
        num_ranks=num_ranks,
        etp_size=etp_size,
    )
    packed, dtype = layout != "padded", torch.bfloat16
    expected = config.buffer_bytes(7, 3, dtype.itemsize, packed=packed)
    found = on_ranks(num_ranks * etp_size, _allocated, config, dtype, packed)
    assert found == [expected] * (num_ranks * etp_size)
    parts = expected.send, expected.receive, expected.experts, expected.back, expected.plan
    assert expected.total == sum(parts)
