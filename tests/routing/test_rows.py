"""Moving rows: bit-exact against the reference, forward and backward, in memory full of NaN.

Payloads are whole numbers in fp64 that encode their address, so equality needs no tolerance.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.library import opcheck

from padded_dispatch.routing import rows as ops
from padded_dispatch.routing.plan import DispatchPlan, make_plan
from tests.support import reference
from tests.support.grids import poisoned_memory
from tests.support.pools import pools
from tests.support.routing_cases import (
    RoutingCase,
    addresses,
    assert_same,
    cases_with_pools,
    grad_of,
    leaf,
)
from tests.support.routings import routing_map, thin_out

HIDDEN = 3
ALL_OPS = torch.ops.padded_dispatch


def planned(case: RoutingCase, shared: int = 1) -> tuple[DispatchPlan, reference.Plan]:
    sizes = pools(case.map_TE.shape[1], case.capacity, shared)
    return (
        make_plan(torch.from_numpy(case.map_TE), top_k=case.top_k, sizes=sizes),
        reference.plan(case.map_TE, top_k=case.top_k, sizes=sizes),
    )


def by_expert(slots: np.ndarray, plan: reference.Plan) -> np.ndarray:
    """Spread payloads of pools [G, P, ...] over the buffers of their experts, [E, P, ...].

    What is not a row is NaN.
    """
    num_pools, num_slots = plan.choice_of_slot_GP.shape
    num_experts = len(plan.kept_E)
    spread = np.full((num_experts, *slots.shape[1:]), np.nan)
    for g in range(num_pools):
        p = 0
        for e in range(g * num_experts // num_pools, (g + 1) * num_experts // num_pools):
            kept = plan.kept_E[e]
            spread[e, :kept] = slots[g, p : p + kept]
            p += kept
    assert spread.shape[1] == num_slots
    return spread


def in_pools(buffers: np.ndarray, plan: reference.Plan) -> np.ndarray:
    """Bring rows of experts' buffers [E, P, ...] into their pools [G, P, ...]; 0 behind them."""
    num_pools, num_slots = plan.choice_of_slot_GP.shape
    pools = np.zeros((num_pools, *buffers.shape[1:]))
    for g, kept_X in enumerate(plan.kept_E.reshape(num_pools, -1)):
        buffers_X = buffers[g * len(kept_X) : (g + 1) * len(kept_X)]
        rows = [one[:kept] for one, kept in zip(buffers_X, kept_X, strict=True)]
        pools[g, : kept_X.sum()] = np.concatenate(rows)
    assert pools.shape[1] == num_slots
    return pools


@given(drawn=cases_with_pools())
def test_gathers_are_the_reference_s_dispatch(drawn: tuple[RoutingCase, int]):
    case, shared = drawn
    plan, plan_by_loops = planned(case, shared)
    num_tokens, num_experts = case.map_TE.shape
    shape = plan_by_loops.choice_of_slot_GP.shape
    tokens, probs = addresses(num_tokens, HIDDEN), addresses(num_tokens, num_experts, offset=100)
    grad_rows, grad_probs = addresses(*shape, HIDDEN, offset=200), addresses(*shape)
    with poisoned_memory():
        tokens_TD, probs_TE = leaf(tokens), leaf(probs)
        rows_GPD = ops.gather_rows(tokens_TD, plan)
        meta_GPX = ops.gather_meta(probs_TE, plan)
        probs_GP, counts_GX = meta_GPX[:, : case.capacity], meta_GPX[:, case.capacity :]
        rows_GPD.backward(torch.from_numpy(grad_rows))
        probs_GP.backward(torch.from_numpy(grad_probs))
    given = reference.dispatch(tokens[None], probs[None], [plan_by_loops], num_ranks=1)
    assert_same(rows_GPD, in_pools(given.rows_RLMD[0], plan_by_loops))
    assert_same(probs_GP, in_pools(given.probs_RLM[0], plan_by_loops))
    assert_same(counts_GX.flatten(), plan_by_loops.kept_E.astype(np.float64))
    grad_tokens_STD, grad_probs_STE = reference.dispatch_backward(
        by_expert(grad_rows, plan_by_loops)[None],
        by_expert(grad_probs, plan_by_loops)[None],
        [plan_by_loops],
        num_experts=num_experts,
    )
    assert_same(grad_of(tokens_TD), grad_tokens_STD[0])
    assert_same(grad_of(probs_TE), grad_probs_STE[0])


@given(drawn=cases_with_pools())
def test_combine_is_the_reference_and_reads_no_padded_row(drawn: tuple[RoutingCase, int]):
    case, shared = drawn
    plan, plan_by_loops = planned(case, shared)
    num_tokens = case.map_TE.shape[0]
    rows = addresses(*plan_by_loops.choice_of_slot_GP.shape, HIDDEN)
    rows[plan_by_loops.choice_of_slot_GP < 0] = np.nan
    grad = addresses(num_tokens, HIDDEN, offset=100)
    with poisoned_memory():
        rows_GPD = leaf(rows)
        out_TD = ops.combine_rows(rows_GPD, plan)
        out_TD.backward(torch.from_numpy(grad))
    expected = reference.combine(by_expert(rows, plan_by_loops)[None], [plan_by_loops])[0]
    assert_same(out_TD, expected)
    grad_RLMD = reference.combine_backward(grad[None], [plan_by_loops], num_ranks=1)
    assert_same(grad_of(rows_GPD), in_pools(grad_RLMD[0], plan_by_loops))


@pytest.mark.parametrize("shared", [False, True], ids=["own pools", "one pool"])
@pytest.mark.parametrize(
    "kept",
    [[[2]], [[0, 3, 1], [3, 0, 2]], [[0], [0]], [[0, 0], [1, 0], [0, 3]]],
    ids=["one of all", "gaps", "nothing", "experts and sources without rows"],
)
def test_packing_is_the_reference(kept, shared: bool):
    """Forward and backward of both, with NaN behind the last row; capacity 3."""
    kept_SL = torch.tensor(kept, dtype=torch.int32)
    num_sources, num_local = kept_SL.shape
    payload = addresses(num_sources, num_local, 3, HIDDEN)
    packed = reference.pack(
        payload.transpose(1, 0, 2, 3).reshape(num_local, -1, HIDDEN), kept_SL.numpy()
    )
    num_pools, num_slots = kept_SL.numel(), 3
    slots = payload.reshape(num_pools, 3, HIDDEN)
    kept_MX = kept_SL.view(-1, 1)
    if shared:  # Rows of a source behind each other, in a pool that they do not fill.
        num_pools, num_slots, kept_MX = num_sources, 3 * num_local + 1, kept_SL
        slots = addresses(num_pools, num_slots, HIDDEN, offset=1000)
        for one, payload_LCD, kept_L in zip(slots, payload, kept, strict=True):
            rows = [buffer[:n] for buffer, n in zip(payload_LCD, kept_L, strict=True)]
            one[: sum(kept_L)] = np.concatenate(rows)
    real_MP = np.arange(num_slots) < kept_MX.sum(1, keepdim=True).numpy()
    grad_packed = np.full((num_pools * num_slots, HIDDEN), np.nan)
    grad_packed[: len(packed)] = packed
    with poisoned_memory():
        offsets_LS = ops.running_offsets(kept_SL)
        slots_MPD = leaf(slots)
        rows_ND = ops.pack_rows(slots_MPD, offsets_LS)
        rows_ND.backward(torch.from_numpy(grad_packed))
        packed_ND = leaf(grad_packed)
        back_MPD = ops.unpack_rows(packed_ND, offsets_LS, num_pools)
        back_MPD.backward(slots_MPD.detach())
    assert rows_ND.shape == grad_packed.shape
    assert_same(rows_ND[: len(packed)], packed)
    for found_MPD in (grad_of(slots_MPD), back_MPD):
        assert_same(found_MPD[torch.from_numpy(real_MP)], slots[real_MP])
        assert torch.equal(found_MPD.isnan().all(2), torch.from_numpy(~real_MP))
    assert_same(grad_of(packed_ND)[: len(packed)], packed)


def one_plan() -> DispatchPlan:
    """Tokens with 0 to K experts, an expert with too many rows, one with none."""
    map_TE = torch.from_numpy(thin_out(routing_map(7, 5, 3, seed=2), share=0.2))
    map_TE[:, 4] = False
    plan = make_plan(map_TE, top_k=3, sizes=pools(5, 2))
    assert plan.unplaced_E.sum().item() > 0
    assert (plan.slot_of_TK < 0).all(1).any()
    assert plan.kept_E.tolist()[4] == 0
    return plan


def test_slots_that_are_not_read_may_be_left_unwritten():
    """With `zeros=False`: NaN in empty slots and in their gradients, the same values elsewhere."""
    plan = one_plan()
    empty_EC = plan.choice_of_slot_GP < 0
    tokens_TD = leaf(addresses(1, 1, 7, HIDDEN).reshape(7, HIDDEN))
    rows_GPD = ops.gather_rows(tokens_TD, plan, zeros=False)
    assert torch.equal(rows_GPD.isnan().all(2), empty_EC)
    assert torch.equal(rows_GPD.nan_to_num(0), ops.gather_rows(tokens_TD, plan))
    rows_GPD.backward(rows_GPD.detach())
    whole_TD = ops.combine_rows(ops.gather_rows(tokens_TD.detach(), plan), plan)
    assert torch.equal(grad_of(tokens_TD), whole_TD)
    again_ECD = rows_GPD.detach().requires_grad_()
    ops.combine_rows(again_ECD, plan, zeros=False).backward(tokens_TD.detach())
    assert torch.equal(grad_of(again_ECD).nan_to_num(-1), rows_GPD.detach().nan_to_num(-1))


def fp64(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_gradients_are_those_of_the_functions():
    plan = one_plan()
    for function, inputs in (
        (ops.gather_rows, fp64(7, HIDDEN)),
        (ops.gather_meta, fp64(7, 5)),
        (ops.combine_rows, fp64(5, 2, HIDDEN)),
    ):
        assert torch.autograd.gradcheck(lambda x, f=function: f(x, plan), inputs)
        assert torch.autograd.gradgradcheck(lambda x, f=function: f(x, plan), inputs)


def test_all_are_sound_custom_ops():
    plan = one_plan()
    maps = plan.slot_of_TK, plan.choice_of_slot_GP
    checked = {
        "gather_meta": (fp64(7, 5), maps[0], plan.expert_of_TK, maps[1], plan.kept_E),
        "scatter_meta": (fp64(5, 3), maps[0], plan.expert_of_TK, maps[1], 5),
        "gather": (fp64(7, HIDDEN), *maps, True),
        "combine": (fp64(5, 2, HIDDEN), *maps, True),
    }
    # All slots full, since opcheck compares every element.
    offsets_LS = ops.running_offsets(torch.full((2, 3), 4, dtype=torch.int32))
    checked["pack"] = fp64(6, 4, HIDDEN), offsets_LS
    checked["unpack"] = fp64(24, HIDDEN), offsets_LS, 6
    for name, arguments in checked.items():
        opcheck(getattr(ALL_OPS, name), arguments)
    opcheck(ALL_OPS.pack, (fp64(2, 12, HIDDEN), offsets_LS))
    opcheck(ALL_OPS.unpack, (fp64(24, HIDDEN), offsets_LS, 2))
    # Rows with strides, too: experts and transposed weights make such.
    opcheck(ALL_OPS.gather, (torch.randn(HIDDEN, 7).T.requires_grad_(), *maps, True))
    opcheck(ALL_OPS.combine, (torch.randn(2, 5, HIDDEN).transpose(0, 1), *maps, True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_narrow_rows_are_fp32_rounded_once(dtype):
    # `big` is where the spacing of the dtype becomes 2: adding ones one by one would lose them.
    big = 2.0 / torch.finfo(dtype).eps
    plan = make_plan(torch.ones(1, 4, dtype=torch.bool), top_k=4, sizes=pools(4, 1))
    narrow = torch.tensor([big, 1, 1, 1], dtype=dtype)
    assert ((narrow[0] + narrow[1]) + narrow[2]) + narrow[3] == big
    assert ops.combine_rows(narrow.view(4, 1, 1), plan).tolist() == [[big + 4]]  # 3, rounded
    # The backward of a gather is the same sum.
    token_TD = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    ops.gather_rows(token_TD, plan).backward(narrow.view(4, 1, 1))
    assert grad_of(token_TD).tolist() == [[big + 4]]


def test_sums_follow_ascending_experts():
    # In fp32, (2**24 + 1) - 2**24 is 0 and (2**24 - 2**24) + 1 is 1: the order shows.
    plan = make_plan(torch.ones(2, 3, dtype=torch.bool), top_k=3, sizes=pools(3, 2))
    first_token, second_token = [2.0**24, 1.0, -(2.0**24)], [2.0**24, -(2.0**24), 1.0]
    rows_GPD = torch.tensor([first_token, second_token]).T[..., None]
    assert ops.combine_rows(rows_GPD, plan).tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_meta_is_at_least_fp32(dtype):
    """Counts above 2**11 are exact beside narrow probabilities, whose gradient is narrow again."""
    num_tokens = 2051
    everything_TE = torch.ones(num_tokens, 1, dtype=torch.bool)
    plan = make_plan(everything_TE, top_k=1, sizes=pools(1, num_tokens))
    probs_TE = torch.full((num_tokens, 1), 0.3, dtype=dtype, requires_grad=True)
    meta_EC1 = ops.gather_meta(probs_TE, plan)
    assert meta_EC1.dtype == torch.promote_types(dtype, torch.float32)
    assert meta_EC1[0, -1].item() == num_tokens
    assert torch.equal(meta_EC1[0, :-1], probs_TE[:, 0].to(meta_EC1.dtype))
    meta_EC1.sum().backward()
    assert torch.equal(grad_of(probs_TE), torch.ones(num_tokens, 1, dtype=dtype))
    # The fake tensor has the same dtype.
    maps = plan.slot_of_TK, plan.expert_of_TK, plan.choice_of_slot_GP, plan.kept_E
    arguments = probs_TE.detach(), *maps
    opcheck(ALL_OPS.gather_meta, arguments, test_utils=("test_schema", "test_faketensor"))
