"""Wires on threads as ranks, from tokens to tokens, with the kernels of a GPU in the interpreter.

Experts multiply every row by a small whole number, so all sums are exact in fp16 and equality needs
no tolerance. Memory is NaN before it is written. See `tests.support.thread_memory`.
"""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.exchange import Homeward, Layout, Values, direct, symmetric_memory
from padded_dispatch.exchange.collectives import Collectives
from padded_dispatch.exchange.direct import DirectStores
from padded_dispatch.exchange.symmetric_memory import Shape, buffers_of
from padded_dispatch.kernels import Segments, gemm, rows
from padded_dispatch.routing.plan import Plan, make_plan
from tests.support.grids import grid
from tests.support.thread_memory import ThreadMemory, threads_as_ranks
from tests.support.threads import run_on_threads

LOCAL, BASE = 2, 3
DTYPE = torch.float16  # The interpreter multiplies the bits of bf16.

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels would not be interpreted; see tests/gpu"
)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with threads_as_ranks():
        yield


def exchange_of(kind: str, num_ranks: int, etp_size: int) -> tuple[Any, int]:
    """Return an exchange of this thread, and its number among those that split an expert."""
    here = grid.__wrapped__(num_ranks, etp_size)
    if kind == "direct":
        return DirectStores(LOCAL, here.group), 0
    return Collectives(LOCAL, here.group, here.etp_group, "position"), here.i


def small(*shape: int, seed: int) -> Tensor:
    """Return whole numbers from -3 to 3 of this rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(-3, 4, shape, generator=generator).to(DTYPE)


def map_of(num_tokens: int, num_experts: int, top_k: int, routing: str) -> Tensor:
    """thin: 0 to K experts per token. one: all to the last experts. idle: none from rank 0."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    map_TE = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    for t in range(num_tokens):
        number = int(torch.randint(0, top_k + 1, (), generator=generator))
        chosen = torch.randperm(num_experts, generator=generator)[:number]
        map_TE[t, range(num_experts - top_k, num_experts) if routing == "one" else chosen] = True
    return map_TE & (routing != "idle" or dist.get_rank() > 0)


class Receiver:
    """The experts of a rank: rows in a store from row `BASE` on, at most `level` of each cell.

    Expert e of shard i multiplies by `e % 3 + 1 + i`, so that products are exact.
    """

    def __init__(self, first: int, shard: int, arrived: Any, homes_S: Any, level: int) -> None:
        count_LS = arrived.count_SL.T.clamp(max=level)
        width = arrived.values.rows_SPD.shape[2]
        offsets = torch.cat([torch.tensor([BASE]), BASE + count_LS.flatten().cumsum(0)]).int()
        num_rows = int(offsets[-1]) - BASE + 2
        sizes = {"num_experts": LOCAL, "num_rows": num_rows, "num_expected": num_rows}
        tiles = gemm.row_tiles(Segments(offsets=offsets, **sizes))
        self.segments = Segments(offsets=offsets, tiles=tiles, **sizes)
        self.rows_MD = torch.full((BASE + num_rows, width), torch.nan).to(DTYPE)
        self.prob_M = torch.full((BASE + num_rows,), torch.nan)
        home_M = torch.zeros(BASE + num_rows, dtype=torch.int64)
        self._homes_S = homes_S
        row_SPK = rows.place_rows(
            *_given(arrived.values),
            arrived.expert_SPK,
            arrived.place_SPK,
            arrived.prob_SPK,
            self.segments,
            torch.tensor([level], dtype=torch.int32),
            homes_S,
            rows_MD=self.rows_MD,
            prob_M=self.prob_M,
            home_M=None if homes_S is None else home_M,
        )
        self.layout = Layout(segments=self.segments, row_SPK=row_SPK, home_M=home_M)
        scale_L = torch.arange(first, first + LOCAL) % 3 + 1.0 + shard
        self.weight_LDD = torch.diag_embed(scale_L[:, None].expand(-1, width)).to(DTYPE)

    def forward(self) -> Homeward:
        return Homeward(rows_NI=self.rows_MD, stored=True, weight_LOI=self.weight_LDD)

    def backward(self, values: Values) -> Homeward:
        """Rows of a push, loose, and the probabilities beside them."""
        spread = *_given(values), self.layout.row_SPK, self.segments, self._homes_S
        return Homeward(
            rows_NI=rows.spread_rows(*spread),
            stored=False,
            weight_LOI=self.weight_LDD.transpose(1, 2),
            beside_N=self.prob_M[BASE:].clone(),
        )


def _given(values: Values) -> tuple[Tensor, Tensor | None, int]:
    return values.rows_SPD, values.own_TD, values.own


def _there_and_back(
    kind: str, num_ranks: int, etp_size: int, routing: str, level: int, passes: list[Any]
) -> list[int]:
    """Check passes of (T, K, D, P); return this rank's number of barriers."""
    exchange, shard = exchange_of(kind, num_ranks, etp_size)
    assert (exchange.num_sources, exchange.etp_size) == (num_ranks * etp_size, etp_size)
    num_experts = LOCAL * num_ranks
    for seed, (num_tokens, top_k, width, num_slots) in enumerate(passes):
        tokens_TD = small(num_tokens, width, seed=seed)
        prob_TK = torch.rand(num_tokens, top_k)
        map_TE = map_of(num_tokens, num_experts, top_k, routing)
        map_TE, _ = exchange.strike(map_TE, map_TE.float(), num_slots)
        plan = make_plan(map_TE, top_k=top_k)
        wire = exchange.start(plan, tokens_TD, num_slots)
        arrived = wire.open(tokens_TD, prob_TK)
        first = dist.get_rank() % num_ranks * LOCAL
        receiver = Receiver(first, shard, arrived, wire.homes_S, level)
        home = wire.home(receiver.forward(), receiver.layout)
        assert home.beside_TK is None
        expert_TK = plan.expert_TK
        kept_TK = (expert_TK >= 0) & (plan.place_TK < level)
        scale_TK = sum(expert_TK % 3 + 1 + i for i in range(etp_size)) * kept_TK
        expected_TD = scale_TK.sum(1, keepdim=True) * tokens_TD
        assert torch.equal(home.sum_TD, expected_TD.to(DTYPE))
        grad_TD = small(num_tokens, width, seed=seed + 50)
        home = wire.home(receiver.backward(wire.push(grad_TD)), receiver.layout)
        assert torch.equal(home.sum_TD, (scale_TK.sum(1, keepdim=True) * grad_TD).to(DTYPE))
        assert torch.equal(home.beside_TK, torch.where(kept_TK, prob_TK * etp_size, 0))
    return ThreadMemory.num_barriers.get(dist.get_rank(), 0)


SHAPES = [(5, 2, 8, 5), (9, 3, 16, 9), (1, 1, 8, 1), (5, 2, 8, 7)]


@pytest.mark.parametrize("level", [99, 1])
@pytest.mark.parametrize("routing", ["thin", "one", "idle"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_rows_go_home_by_direct_stores(num_ranks, routing, level):
    given = "direct", num_ranks, 1, routing, level, SHAPES
    num_barriers = run_on_threads(num_ranks, _there_and_back, *given)
    assert num_barriers == [4 * len(SHAPES)] * num_ranks


@pytest.mark.parametrize("level", [99, 1])
@pytest.mark.parametrize("routing", ["thin", "one", "idle"])
@pytest.mark.parametrize(("num_ranks", "etp_size"), [(1, 1), (4, 1), (1, 2), (2, 2)])
def test_sums_go_home_by_collectives(num_ranks, etp_size, routing, level):
    given = "alltoall", num_ranks, etp_size, routing, level, [*SHAPES, (5, 2, 8, 3)]
    run_on_threads(num_ranks * etp_size, _there_and_back, *given)


def _different_tokens() -> list[int]:
    num_tokens = dist.get_rank() + 2
    return _there_and_back("direct", 4, 1, "thin", 99, [(num_tokens, 2, 8, 5)])


def test_ranks_may_have_different_numbers_of_tokens():
    run_on_threads(4, _different_tokens)


# Buffers.


def _shape(num_slots: int, **changes: Any) -> Shape:
    given = dict(num_slots=num_slots, top_k=2, num_local_experts=LOCAL, width=8)
    return Shape(**given | {"dtype": torch.bfloat16} | changes)


def _memories() -> list[list[int]]:
    """Return the bytes that this rank holds after each shape: of arrivals, of what comes home."""
    group, found = dist.group.WORLD, []
    for shape in (_shape(256), _shape(100), _shape(300), _shape(256), _shape(256, top_k=1)):
        buffers = buffers_of(group, shape, torch.device("cpu"))
        assert buffers_of(group, shape, torch.device("cpu")) is buffers
        assert buffers.rows_SPD.shape == (2, shape.num_slots, 8)
        assert buffers.home_QD.shape == (shape.num_slots * shape.top_k, 8)
        known = symmetric_memory._groups[group]
        found.append([m.num_bytes for m in (*known.arriving, *known.coming)])
    return found


def test_layers_share_memory_and_a_larger_shape_gets_more():
    # 256 slots: 2 sources, 8 columns, 3 numbers for each choice, counts; 512 rows, and numbers.
    arriving, coming = 2 * 256 * (16 + 3 * 8) + 256, 512 * 16 + 512 * 4
    grown = [arriving, arriving * 3 // 2 + 128, coming, coming * 3 // 2]
    for found in run_on_threads(2, _memories):
        assert found == [[arriving, coming]] * 2 + [grown] * 3


def _does_not_fit() -> str:
    with pytest.raises(ValueError) as refused:
        buffers_of(dist.group.WORLD, _shape(2**22, width=2**10), torch.device("cpu"))
    return str(refused.value)


def test_buffers_that_do_not_fit_are_refused_on_all_ranks():
    with threads_as_ranks(free_bytes=2**30):
        for message in run_on_threads(2, _does_not_fit):
            assert message.startswith("the buffers of exchange='direct' must fit on every rank")
            assert "got 32.22 GiB for Shape(num_slots=4194304, " in message
            assert "1.00 GiB free; lower the number of tokens per rank, or set" in message


def test_a_new_shape_in_a_capture_is_refused():
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
        pytest.raises(ValueError, match=r"must exist before .* one eager step with the same shap"),
    ):
        buffers_of(dist.ProcessGroup(0, 1), _shape(1), torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tokens_that_do_not_fit_are_refused(dtype):
    nothing: Any = None
    plan = Plan(expert_TK=nothing, place_TK=nothing, kept_E=nothing, unplaced_E=nothing)
    group: Any = dist.ProcessGroup(0, 2)
    exchange = DirectStores(2, group)
    expected = rf"^tokens must be bf16, fp16 or fp32 on a GPU .*, got {dtype} on cpu; set exchange="
    with patch.object(direct, "DEVICE", "cuda"), pytest.raises(ValueError, match=expected):
        exchange.start(plan, torch.zeros(1, 1, dtype=dtype), 1)
