"""The exchange over collectives: what arrives, what comes home, and the gradients of both.

Payloads are whole numbers in fp64, so every sum is exact and equality needs no tolerance. Fresh
memory is NaN, or the largest integer.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.exchange.collectives import Collectives
from padded_dispatch.routing.plan import choice_probs, make_plan
from tests.support import reference
from tests.support.collectives import recorded
from tests.support.grids import grid, poisoned_memory
from tests.support.threads import run_on_threads

WIDTH, TOP_K, LOCAL = 5, 3, 2
GRIDS = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2)]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The inputs of a source, which are those of its number alone."""

    map_TE: Tensor
    tokens_TD: Tensor
    probs_TE: Tensor
    weights_TD: Tensor  # of the loss: the gradient of what comes home


def inputs(source: int, num_tokens: int, num_experts: int, routing: str) -> Pass:
    """thin: 0 to K experts per token. same: all to the first experts. idle: none from source 0."""
    random = np.random.default_rng(source)
    map_TE = np.zeros((num_tokens, num_experts), bool)
    top_k = min(TOP_K, num_experts)
    for t in range(num_tokens):
        chosen = random.permutation(num_experts)[: random.integers(0, top_k + 1)]
        map_TE[t, range(top_k) if routing == "same" else chosen] = True
    if routing == "idle" and source == 0:
        map_TE[:] = False

    def whole(width: int) -> Tensor:
        return torch.from_numpy(random.integers(1, 100, (num_tokens, width)).astype(np.float64))

    return Pass(
        map_TE=torch.from_numpy(map_TE),
        tokens_TD=whole(WIDTH),
        probs_TE=whole(num_experts),
        weights_TD=whole(WIDTH),
    )


def factor(expert: Tensor, shard: int) -> Tensor:
    """Return by what the experts multiply their rows."""
    return (expert + 1 + 100 * shard).double()


def there_and_back(
    num_ranks: int, etp_size: int, tokens_of: list[int], num_slots: int, routing: str
) -> dict[str, Any]:
    """Send a pass to experts that scale rows, and back; return what the rank saw."""
    group, etp_group, shard = grid(num_ranks, etp_size)
    source = dist.get_rank()
    num_experts = num_ranks * LOCAL
    given = inputs(source, tokens_of[source], num_experts, routing)
    exchange = Collectives(LOCAL, group, etp_group, "position")
    map_TE, struck = exchange.strike(given.map_TE, given.probs_TE, num_slots)
    plan = make_plan(map_TE, top_k=min(TOP_K, num_experts))
    tokens_TD, probs_TE = given.tokens_TD.requires_grad_(), given.probs_TE.requires_grad_()
    wire = exchange.start(plan, tokens_TD, num_slots)
    arrived = wire.open(tokens_TD, choice_probs(probs_TE, plan.expert_TK))
    assert arrived.values.own_TD is None
    expert_SPK, rows_SPD = arrived.expert_SPK, arrived.values.rows_SPD
    mine = (expert_SPK >= 0) & (expert_SPK < LOCAL)
    first = 0 if group is None else group.rank() * LOCAL
    scale_SPK = factor(expert_SPK + first, shard)
    scale_SPK = torch.where(mine, scale_SPK * torch.where(mine, arrived.prob_SPK, 0), 0)
    read_SPD = torch.where(mine.any(2, keepdim=True), rows_SPD, 0)
    home = wire.bring(
        scale_SPK.sum(2, keepdim=True) * read_SPD, torch.where(mine, scale_SPK, 0).detach()
    )
    home.sum_TD.backward(given.weights_TD)
    with torch.no_grad():
        again = wire.push(tokens_TD).rows_SPD
        assert torch.equal(again[mine.any(2)], rows_SPD[mine.any(2)])
    return {
        "map": map_TE,
        "struck": struck,
        "rows": rows_SPD.detach(),
        "prob": arrived.prob_SPK.detach(),
        "expert": torch.where(mine, expert_SPK, -1),
        "place": arrived.place_SPK,
        "count": arrived.count_SL,
        "home": home.sum_TD.detach(),
        "beside": home.beside_TK,
        "grad_tokens": tokens_TD.grad,
        "grad_probs": probs_TE.grad,
    }


def check(
    results: list[dict[str, Any]], num_ranks: int, tokens_of: list[int], routing: str
) -> None:
    num_experts, num_sources = num_ranks * LOCAL, len(results)
    shards = range(num_sources // num_ranks)
    for s, result in enumerate(results):
        given, map_TE = inputs(s, tokens_of[s], num_experts, routing), result["map"]
        assert not (map_TE & ~given.map_TE).any()
        scale_E = sum(factor(torch.arange(num_experts), shard) for shard in shards)
        scale_TE = torch.where(map_TE, given.probs_TE * scale_E, 0)
        assert torch.equal(result["home"], scale_TE.sum(1, keepdim=True) * given.tokens_TD)
        assert torch.equal(result["grad_tokens"], scale_TE.sum(1, keepdim=True) * given.weights_TD)
        product_T1 = (given.tokens_TD * given.weights_TD).sum(1, keepdim=True)
        assert torch.equal(result["grad_probs"], torch.where(map_TE, scale_E * product_T1, 0))
        top_k = min(TOP_K, num_experts)
        expert_TK = make_plan(map_TE, top_k=top_k).expert_TK
        expected_TK = scale_TE.gather(1, expert_TK.clamp(min=0).long())
        assert torch.equal(result["beside"], torch.where(expert_TK < 0, 0, expected_TK))
        # What this source sent, at all receivers, in the order of its tokens.
        for number, there in enumerate(results):
            first = number % num_ranks * LOCAL
            here_TE = map_TE[:, first : first + LOCAL]
            assert there["count"][s].tolist() == here_TE.sum(0).tolist()
            slots = (there["expert"][s] >= 0).any(1).nonzero().flatten()
            tokens = here_TE.any(1).nonzero().flatten()
            assert torch.equal(there["rows"][s, slots], given.tokens_TD[tokens])
            for p, t in zip(slots.tolist(), tokens.tolist(), strict=True):
                found = there["expert"][s, p] >= 0
                experts = there["expert"][s, p][found]
                assert experts.tolist() == here_TE[t].nonzero().flatten().tolist()
                assert torch.equal(
                    there["prob"][s, p][found], given.probs_TE[t, first + experts.long()]
                )
                places = here_TE[:t].sum(0)[experts.long()]
                assert there["place"][s, p][found].tolist() == places.tolist()


@pytest.mark.parametrize("routing", ["thin", "same", "idle"])
@pytest.mark.parametrize("num_slots", [7, 3, 1])
@pytest.mark.parametrize(("num_ranks", "etp_size"), GRIDS)
def test_tokens_arrive_with_their_plan_and_sums_come_home(num_ranks, etp_size, num_slots, routing):
    num_sources = num_ranks * etp_size
    given = num_ranks, etp_size, [7] * num_sources, num_slots, routing
    with poisoned_memory():
        results = run_on_threads(num_sources, there_and_back, *given)
    check(results, num_ranks, [7] * num_sources, routing)
    rows = torch.cat([result["rows"] for result in results])
    assert rows.shape[1] == (7 if num_ranks == 1 else num_slots)


@pytest.mark.parametrize(("num_ranks", "etp_size"), [(4, 1), (2, 2), (1, 4)])
def test_ranks_may_have_different_numbers_of_tokens(num_ranks, etp_size):
    tokens_of = [3, 1, 6, 2]
    with poisoned_memory():
        results = run_on_threads(4, there_and_back, num_ranks, etp_size, tokens_of, 6, "thin")
    check(results, num_ranks, tokens_of, "thin")


def test_processes_do_as_threads(pool4):
    given = 2, 2, [4] * 4, 2, "thin"
    with poisoned_memory():
        expected = run_on_threads(4, there_and_back, *given)
    for result, same in zip(pool4.run(there_and_back, *given), expected, strict=True):
        for name in ("map", "struck", "count", "home", "beside", "grad_tokens", "grad_probs"):
            assert torch.equal(result[name], same[name])


def test_one_rank_moves_nothing():
    map_TE = torch.tensor([[True, False], [True, True], [False, False]])
    plan = make_plan(map_TE, top_k=2)
    tokens_TD, prob_TK = torch.ones(3, 4), torch.ones(3, 2)
    exchange = Collectives(2)
    assert (exchange.kind, exchange.num_sources) == ("none", 1)
    assert exchange.strike(map_TE, prob_TK, 1) == (map_TE, None)
    wire = exchange.start(plan, tokens_TD, 1)
    arrived = wire.open(tokens_TD, prob_TK)
    assert arrived.values.rows_SPD.data_ptr() == tokens_TD.data_ptr()
    assert arrived.expert_SPK.data_ptr() == plan.expert_TK.data_ptr()
    home = wire.bring(tokens_TD[None], torch.full((1, 3, 2), 7.0))
    assert home.sum_TD.data_ptr() == tokens_TD.data_ptr()
    assert home.beside_TK.tolist() == [[7, 0], [7, 7], [0, 0]]


def _shards_and_ranks() -> list[Tensor]:
    """Return sums of 256 and ones in bf16 over etp ranks, and over ranks, and their transposes."""
    found = []
    for num_ranks, etp_size in ((1, 4), (4, 1)):
        group, etp_group, _ = grid(num_ranks, etp_size)
        tokens_TD = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
        plan = make_plan(torch.ones(1, num_ranks, dtype=torch.bool), top_k=num_ranks)
        exchange = Collectives(1, group, etp_group)
        value = 256.0 if dist.get_rank() == 0 else 1.0
        wire = exchange.start(plan, tokens_TD, 1)
        rows_SPD = wire.push(tokens_TD).rows_SPD
        rows_SPD.backward(torch.full_like(rows_SPD, value))
        dtype = torch.float32 if etp_size > 1 else torch.bfloat16
        found.append(wire.bring(torch.full((4, 1, 1), value, dtype=dtype)).sum_TD)
        found.append(tokens_TD.grad)
    return found


def test_bf16_adds_up_in_fp32():
    # Above 256 bf16 has even numbers only: adding 1 changes nothing. 259 rounds to 260.
    ones = torch.ones((), dtype=torch.bfloat16)
    assert (((256 * ones) + ones) + ones) + ones == 256
    for results in run_on_threads(4, _shards_and_ranks):
        for summed in results:
            assert summed.tolist() == [[260.0]]
            assert summed.dtype == torch.bfloat16


def _struck(map_TE: Tensor, probs_TE: Tensor, num_slots: int, policy: str) -> Any:
    exchange = Collectives(map_TE.shape[1] // 2, dist.group.WORLD, None, policy)
    return exchange.strike(map_TE, probs_TE, num_slots)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_tokens_past_the_slots_of_a_rank_are_struck(policy):
    random = np.random.default_rng(0)
    for num_slots in (1, 2, 5, 6):
        map_TE = torch.from_numpy(random.random((6, 6)) < 0.4)
        probs_TE = torch.from_numpy(random.choice([0.5, 0.25, 0.0, -0.0], (6, 6)))  # with ties
        for kept_TE, struck in run_on_threads(2, _struck, map_TE, probs_TE, num_slots, policy):
            given = dict(num_slots=num_slots, num_ranks=2, policy=policy)
            kept = reference.strike(map_TE.numpy(), probs_TE.numpy(), **given)
            expected_TE = torch.from_numpy(kept)
            assert torch.equal(kept_TE, expected_TE)
            if num_slots == 6:
                assert struck is None
            else:
                assert struck.dtype == torch.int32
                assert struck.tolist() == [(map_TE & ~expected_TE).sum()]


def test_example_of_strike():
    map_TE = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]]).bool()
    probs_TE = torch.tensor([[0.2, 0.2, 0, 0], [0.3, 0, 0.4, 0]])
    later_TE = torch.tensor([[0.1, 0.1, 0, 0], [0.3, 0, 0.4, 0]])
    for policy, given_TE, expected in (
        ("probs", probs_TE, [[1, 1, 0, 0], [0, 0, 1, 0]]),
        ("probs", later_TE, [[0, 0, 0, 0], [1, 0, 1, 0]]),
        ("position", later_TE, [[1, 1, 0, 0], [0, 0, 1, 0]]),
    ):
        for kept_TE, _ in run_on_threads(2, _struck, map_TE, given_TE, 1, policy):
            assert kept_TE.int().tolist() == expected


@pytest.mark.parametrize("num_slots", [7, 3])
def test_all_ranks_start_the_same_collectives_whatever_the_routing(num_slots):
    with recorded(8) as records:
        run_on_threads(8, there_and_back, 4, 2, [7] * 8, num_slots, "idle")
    assert not records.differing()
    assert not records.differing_orders(list(range(8)))
