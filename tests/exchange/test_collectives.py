"""The exchange over collectives: layers beside the oracle, what kernels send, what is struck.

See `tests.support.direct_parity` for payloads; memory is NaN, or the largest integer, before it is
written.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch import DispatchConfig
from padded_dispatch.exchange.collectives import Collectives
from padded_dispatch.routing.plan import make_plan
from tests.support import reference
from tests.support.direct_parity import Layer, differences, expected, make_inputs, step
from tests.support.threads import ThreadGroup, grid, run_on_threads
from tests.support.whole_layers import check, make_case

# What a rank started: the collective, its group, and the dtype and shape of each tensor.
Started = tuple[str, tuple[int, ...], tuple[tuple[torch.dtype, torch.Size], ...]]


class Records:
    """The collectives of each rank, in the order in which it started them."""

    def __init__(self, num_ranks: int) -> None:
        self.of_rank: list[list[Started]] = [[] for _ in range(num_ranks)]
        self._known: dict[Started, Started] = {}

    def add(self, rank: int, started: Started) -> None:
        """Note what a rank started. Equal ones are one object: millions take little room."""
        self.of_rank[rank].append(self._known.setdefault(started, started))

    def differing(self) -> list[str]:
        """Return which ranks started other collectives in a group than its first rank did."""
        of_group: dict[tuple[int, ...], dict[int, list[Started]]] = {}
        for rank, started in enumerate(self.of_rank):
            for one in started:
                of_group.setdefault(one[1], {}).setdefault(rank, []).append(one)
        lines = []
        for group, of_rank in of_group.items():
            first = of_rank.get(group[0], [])
            for rank in group:
                own = of_rank.get(rank, [])
                if own != first:
                    pairs = enumerate(zip(own, first, strict=False))
                    n = next((n for n, (a, b) in pairs if a != b), min(len(own), len(first)))
                    lines.append(
                        f"collective {n} in group of {len(group)}: rank {rank} started "
                        f"{own[n : n + 1]}, rank {group[0]} {first[n : n + 1]}"
                    )
        return lines

    def differing_orders(self, ranks: list[int]) -> list[int]:
        """Return the ranks whose whole sequence, over all groups, is another than the first's."""

        def places(rank: int) -> list[tuple[Any, ...]]:
            return [(name, len(group), shapes) for name, group, shapes in self.of_rank[rank]]

        first = places(ranks[0])
        return [rank for rank in ranks if places(rank) != first]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


@contextmanager
def recorded(num_ranks: int) -> Iterator[Records]:
    """Record the collectives of `run_on_threads` inside the block."""
    records = Records(num_ranks)

    start = ThreadGroup.start

    def recording(group: ThreadGroup, name: str, copy: Callable[..., None], *data: Any) -> Any:
        shapes = tuple((tensor.dtype, tensor.shape) for tensor in _tensors(data))
        records.add(group.own_rank, (name, group.ranks, shapes))
        return start(group, name, copy, *data)

    with patch.object(ThreadGroup, "start", recording):
        yield records


IN_INTERPRETER = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels would not be interpreted; see tests/gpu"
)
# The interpreter multiplies the bits of bf16.
SMALL = Layer(tokens=5, width=8, top_k=2, local_experts=2, dtype=torch.float16)
OF_RANKS = [{"tokens": num_tokens, "slots": 6} for num_tokens in (3, 1, 6, 2)]
CPU = torch.device("cpu")


def there_and_back(num_ranks: int, etp_size: int, layers: list[Layer], routing: str) -> list[str]:
    """Send a pass to experts, and back, in kernels of a GPU; return what differs."""
    group, etp_group, shard = grid(num_ranks, etp_size)
    layer = layers[dist.get_rank() % len(layers) if dist.is_initialized() else 0]
    exchange = Collectives(layer.local_experts, group, etp_group, "position")
    inputs = make_inputs(layer, routing, 0, CPU, exchange)
    return differences(step(exchange, layer, inputs, shard), expected(layer, inputs, etp_size))


@IN_INTERPRETER
@pytest.mark.parametrize(
    ("num_ranks", "etp_size", "routing", "changes"),
    [
        (1, 1, "uniform", [{}]),
        (1, 1, "none", [{"level": 1}]),
        (4, 1, "same", [{"slots": 3}]),
        (4, 1, "absent", [{"level": 1}]),
        (1, 2, "uniform", [{"level": 1}]),
        (2, 2, "idle", [{"slots": 2}]),
        (2, 2, "uniform", [{"slots": 7}]),
        (1, 2, "hot", [{"slots": 7}]),
        (4, 1, "uniform", OF_RANKS),
        (2, 2, "uniform", OF_RANKS),
    ],
    ids=str,
)
def test_sums_go_home(num_ranks, etp_size, routing, changes):
    layers = [dataclasses.replace(SMALL, **one) for one in changes]
    size, given = num_ranks * etp_size, (num_ranks, etp_size, layers, routing)
    assert run_on_threads(size, there_and_back, *given) == [[]] * size


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
    assert wire.bring(tokens_TD[None]).data_ptr() == tokens_TD.data_ptr()
    assert wire.bring_beside(torch.full((1, 3, 2), 7.0)).tolist() == [[7, 0], [7, 7], [0, 0]]


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
        rows_SPD = wire.open(tokens_TD, torch.ones(1, num_ranks)).values.rows_SPD
        rows_SPD.backward(torch.full_like(rows_SPD, value))
        dtype = torch.float32 if etp_size > 1 else torch.bfloat16
        found.append(wire.bring(torch.full((4, 1, 1), value, dtype=dtype)))
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
                assert struck.num_rows.dtype == struck.num_asked.dtype == torch.int32
                assert struck.num_rows == (map_TE & ~expected_TE).sum()
                of_ranks = [int(part.any(1).sum()) for part in map_TE.split(3, 1)]
                assert struck.num_asked == max(of_ranks)


def test_example_of_strike():
    map_TE = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]]).bool()
    probs_TE = torch.tensor([[0.2, 0.2, 0, 0], [0.3, 0, 0.4, 0]])
    later_TE = torch.tensor([[0.1, 0.1, 0, 0], [0.3, 0, 0.4, 0]])
    for policy, given_TE, wanted in (
        ("probs", probs_TE, [[1, 1, 0, 0], [0, 0, 1, 0]]),
        ("probs", later_TE, [[0, 0, 0, 0], [1, 0, 1, 0]]),
        ("position", later_TE, [[1, 1, 0, 0], [0, 0, 1, 0]]),
    ):
        for kept_TE, _ in run_on_threads(2, _struck, map_TE, given_TE, 1, policy):
            assert kept_TE.int().tolist() == wanted


@pytest.mark.parametrize("factor", [4.0, 0.3])
def test_all_ranks_start_the_same_collectives_whatever_the_routing(factor):
    """Forward and backward, with a struck token and without."""
    sizes: Any = dict(num_experts=8, top_k=3, num_ranks=4, etp_size=2, capacity_factor=factor)
    config = DispatchConfig(**sizes, capacity_pool="store", policy="position")
    with recorded(8) as records:
        check(make_case(config, ["thin", "idle rank", "idle source", "masked", "none"]), "store")
    assert not records.differing()
    assert not records.differing_orders(list(range(8)))


def _one_differs(how: str) -> None:
    dist.all_reduce(torch.zeros(2))
    if dist.get_rank() < 2 or how == "size":
        dist.all_reduce(torch.zeros(2 + dist.get_rank() // 2))
    elif how == "collective":
        dist.barrier()


@pytest.mark.parametrize(
    ("how", "started", "error"),
    [
        ("size", "[('allreduce', (0, 1, 2), ((torch.float32, torch.Size([3])),))]", "equal size"),
        (
            "collective",
            "[('barrier', (0, 1, 2), ())]",
            "rank 0 started allreduce, ranks [2] barrier",
        ),
        ("nothing", "[]", "no rank is left that could join those that wait: ['[0, 1] in allreduce"),
    ],
)
def test_a_rank_that_starts_another_collective_is_found(how, started, error):
    with recorded(3) as records, pytest.raises(RuntimeError) as raised:
        run_on_threads(3, _one_differs, how)
    assert error in str(raised.value.__cause__)
    line = records.differing()[-1]
    assert line.startswith(f"collective 1 in group of 3: rank 2 started {started}, rank 0 [('allre")
