"""Which exchange and layout a layer takes: the rule, what forbids direct stores, what fits."""

from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from padded_dispatch.config import NO_DROP, DispatchConfig
from padded_dispatch.exchange import choose
from padded_dispatch.exchange.agreement import Agreement
from padded_dispatch.exchange.choose import Choice, LayerExchanges, Layout, prefers_padded
from padded_dispatch.exchange.local import LocalExchange
from padded_dispatch.exchange.symmetric_memory import Shape, direct_bytes

QWEN3 = {"num_experts": 128, "top_k": 8}
GPT_OSS = {"num_experts": 32, "top_k": 4}
DEEPSEEK = {"num_experts": 64, "top_k": 6}
SMALL = {"num_experts": 4, "top_k": 2}


@pytest.mark.parametrize(
    ("shape", "num_ranks", "tokens", "factor", "padded"),
    [
        # The example of the docstring.
        (QWEN3, 1, 4096, 1.25, True),
        (QWEN3, 1, 4096, 2.0, False),
        # Where one of the two was faster by more than 2 %, on one H200 and on two.
        (QWEN3, 1, 512, 2.0, True),
        (QWEN3, 1, 16384, 1.25, False),
        (GPT_OSS, 1, 512, 2.0, True),
        (GPT_OSS, 1, 4096, 1.5, False),
        (DEEPSEEK, 1, 4096, 1.25, True),
        (DEEPSEEK, 1, 4096, 1.5, False),
        (QWEN3, 2, 512, 1.25, True),
        (GPT_OSS, 2, 4096, 1.25, False),
        (DEEPSEEK, 2, 512, 1.0, True),
        # Nothing dropped: T slots for each expert.
        (QWEN3, 1, 4096, NO_DROP, False),
        (QWEN3, 1, 64, NO_DROP, True),
    ],
)
def test_the_rule_takes_what_was_faster(shape, num_ranks, tokens, factor, padded):
    config = DispatchConfig(**shape, capacity_factor=factor, num_ranks=num_ranks)
    assert prefers_padded(config, tokens) == padded


def one_rank(layout="either", **settings) -> tuple[DispatchConfig, LayerExchanges]:
    config = DispatchConfig(**SMALL, capacity_factor=settings.pop("factor", 1.0))
    return config, LayerExchanges(config, Agreement(), layout=layout, **settings)


def chosen(exchanges: LayerExchanges, config: DispatchConfig, num_tokens: int) -> Choice:
    return exchanges.choose(config, torch.zeros(num_tokens, 3), torch.zeros(num_tokens, 4))


@pytest.mark.parametrize(
    ("layout", "factor", "tokens", "packed"),
    [
        ("padded", NO_DROP, 4096, False),
        ("packed", 1.0, 8, True),
        ("either", 1.0, 8, False),
        ("either", NO_DROP, 4096, True),
    ],
)
def test_one_rank_moves_nothing(layout, factor, tokens, packed):
    config, exchanges = one_rank(layout, factor=factor)
    choice = chosen(exchanges, config, tokens)
    assert (choice.kind, choice.exchange.packed) == ("none", packed)
    assert isinstance(choice.exchange, LocalExchange) == packed
    assert choice.reason.startswith("one rank")


def test_a_choice_stays_and_is_found_by_tokens_and_capacity():
    config, exchanges = one_rank(factor=1.0)
    larger = DispatchConfig(**SMALL, capacity_factor=NO_DROP)
    small, large = chosen(exchanges, config, 8), chosen(exchanges, larger, 4096)
    assert chosen(exchanges, config, 8) is small
    assert exchanges.chosen(8, 4, config.capacity(8)) is small.exchange
    assert exchanges.chosen(4096, 4, 4096) is large.exchange
    assert small.exchange is not large.exchange


def test_direct_stores_that_cannot_work_are_refused_or_left_out():
    with pytest.raises(ValueError, match="exchange='direct'"):
        one_rank("packed", kind="direct")
    with pytest.raises(ValueError, match=r"layout must be packed .*, got 'padded'; set"):
        one_rank("padded", kind="direct")
    with pytest.raises(ValueError, match=r"exchange must be one of auto, alltoall, direct, got"):
        one_rank(kind="nccl")
    config, exchanges = one_rank("packed", kind="auto")
    assert chosen(exchanges, config, 8).kind == "none"


class Group:
    """As much of a process group as the choice reads."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


class Direct:
    """In the place of `DirectExchange`: the machine allows it."""

    packed = True

    def __init__(self, *args, **settings) -> None:
        pass


def reason_of(
    *,
    free: int = 2**40,
    num_layers: int = 1,
    num_shapes: int = 1,
    cuda: bool = True,
    probs_dtype: torch.dtype = torch.float32,
    shared: bool = False,
    layout: Layout = "packed",
    ffn_size: int = 0,
    pool: Any = "expert",
    factor: float = 1.0,
    why_not: str = "",
) -> Choice:
    config = DispatchConfig(**SMALL, capacity_factor=factor, capacity_pool=pool, num_ranks=2)
    group = Group()

    class Rows:
        is_cuda, dtype, device = cuda, torch.bfloat16, torch.device("cuda" if cuda else "cpu")

        def __init__(self, num_tokens: int) -> None:
            self.shape = num_tokens, 16

        def __len__(self) -> int:
            return self.shape[0]

    with (
        patch.object(choose, "DirectExchange", Direct),
        patch.object(
            choose, "AllToAllExchange", lambda *args, packed, **settings: Mock(packed=packed)
        ),
        patch.object(choose, "free_bytes", lambda group, device: free),
        patch.object(choose, "shares_workspace", lambda group, shape: shared),
    ):
        exchanges = LayerExchanges(
            config,
            Agreement(),
            group,
            layout=layout,
            num_layers=num_layers,
            ffn_size=ffn_size,
            why_not_direct=why_not,
        )
        for number in range(num_shapes):
            rows = Rows(64 * (number + 1))
            probs = Mock(is_cuda=cuda, dtype=probs_dtype, device=rows.device)
            choice = exchanges.choose(config, rows, probs)
    return choice


def test_auto_takes_direct_stores_where_buffers_of_all_layers_fit_twice():
    sizes = dict(num_experts=4, num_slots=128, num_rows=128, width=16, num_places=2 * 128)
    shape = Shape(**sizes, dtype=torch.bfloat16)
    need = direct_bytes(shape, num_ranks=2, num_buffers=3)
    choice = reason_of(free=2 * need, num_layers=3)
    assert choice.kind == "direct"
    assert choice.reason == "the 2 ranks share a host and reach each other's GPUs"
    choice = reason_of(free=2 * need - 1, num_layers=3)
    assert choice.kind == "alltoall"
    assert "GiB for 3 layers" in choice.reason
    # Another layer of the shape has its buffers: the first one has decided.
    assert reason_of(free=0, num_layers=3, shared=True).kind == "direct"


def test_auto_leaves_direct_stores_out_on_a_cpu_and_for_ever_new_shapes():
    assert reason_of(cuda=False).reason == "the rows are torch.bfloat16 on cpu"
    wide = reason_of(probs_dtype=torch.float64)
    assert (wide.kind, wide.reason) == ("alltoall", "the probabilities are torch.float64 on cuda")
    assert reason_of(num_shapes=4).kind == "direct"
    choice = reason_of(num_shapes=5)
    assert (choice.kind, choice.reason) == ("alltoall", "4 other shapes have buffers")


def test_auto_takes_batched_experts_where_weights_outweigh_rows():
    """64 tokens ask for 2 of 4 experts on 2 ranks: 64 rows per expert, and 20 * 64 is 1,280."""
    few = reason_of(layout="either", ffn_size=1281)
    assert (few.kind, few.exchange.packed) == ("alltoall", False)
    assert few.reason.startswith("64 rows per expert are few for weights of 1281")
    assert reason_of(layout="either", ffn_size=1280).kind == "direct"
    assert reason_of(layout="packed", ffn_size=1281).kind == "direct"
