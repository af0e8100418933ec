"""Experts whose fc1 leaves its weight's gradient to the dispatch, with direct stores of one rank.

A process plays the only rank: its kernels run in Triton's interpreter, on memory of its own. All
the rest is real: Megatron's layer, its DDP, and autograd.
"""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor

from padded_dispatch.config import FIT
from padded_dispatch.exchange import direct, symmetric_memory
from padded_dispatch.exchange.beside import Beside
from padded_dispatch.megatron import PaddedOptions, experts
from padded_dispatch.megatron.compat import captures_dispatch_alone, layer_graphs
from tests.support import tiny

pytestmark = [
    pytest.mark.usefixtures("one_process"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels would not be interpreted"),
]

RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
FUSED = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)


class OwnMemory:
    """`PeerMemory` of one rank."""

    def __init__(self, group: Any, num_bytes: int, device: torch.device) -> None:
        self._bytes = torch.full((num_bytes,), 255, dtype=torch.uint8)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        # With a storage of its own, as the tensors of `PeerMemory` have.
        return torch.from_numpy(self._bytes[offset : offset + size].numpy()).view(dtype).view(shape)

    def addresses(self, offset: int) -> Tensor:
        return torch.tensor([self._bytes.data_ptr() + offset])

    def barrier(self) -> None: ...


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[list[int]]:
    """Let one rank have direct stores; the list gets an entry for each gradient left to them."""
    left, run = [], Beside.run

    def noted(self: Beside, *args: Any) -> Any:
        left.append(self.room.stores)
        return run(self, *args)

    with (
        patch.object(symmetric_memory, "PeerMemory", OwnMemory),
        patch.object(symmetric_memory, "_free_bytes", lambda device: 2**40),
        patch.object(direct, "check_group", lambda group: group),
        patch.object(direct, "_check", lambda tokens_TD, probs_TE: None),
        patch.object(Beside, "run", noted),
        patch.object(experts, "pays", lambda **sizes: True),
    ):
        yield left


def _layer(
    home: Any, later: Any = None, in_flight: int = 1, link_rows: Any = "each", **settings: Any
) -> Any:
    config: Any = tiny.config(moe_expert_capacity_factor=1.0, **settings)
    config.padded_dispatch = PaddedOptions(
        experts="packed",
        exchange="direct",
        link_rows=link_rows,
        microbatches_in_flight=in_flight,
        gradients_home=home,
    )
    for name, value in (later or {}).items():
        setattr(config, name, value)
    return tiny.padded_layer_of(config)


def _tokens(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 3, tiny.HIDDEN, generator=generator).requires_grad_()


def _gradients(layer: Any, seeds: tuple[int, ...]) -> list[Any]:
    """Run the forward passes, then the backward passes; return all gradients."""
    given = [_tokens(seed) for seed in seeds]
    outputs = [layer(tokens)[0] for tokens in given]
    while outputs:
        outputs.pop(0).square().sum().backward()
    layer.experts.backward_dw()
    parameters = [p for p in layer.parameters() if p.requires_grad]
    return [tokens.grad for tokens in given] + [
        p.main_grad if hasattr(p, "main_grad") else p.grad for p in parameters
    ]


@pytest.mark.parametrize(
    ("changes", "num_left"),
    [
        ({}, 2),
        ({"in_flight": 2}, 2),
        (RECOMPUTED, 2),
        ({"later": {"delay_wgrad_compute": True}}, 0),
        ({"later": layer_graphs("moe_router", "moe_preprocess")}, 0),
        ({"later": layer_graphs("moe_router")}, 2),
    ],
    ids=["plain", "in flight", "recompute", "Megatron delays", "graph before experts", "router"],
)
def test_gradients_have_the_bits_of_those_computed_before(one_rank, changes, num_left):
    found: list[list[Any]] = []
    for home in ("auto", "after"):
        made = _layer(home, **changes)
        batches = ((1, 2),) if "in_flight" in changes else ((1,), (2,))
        grads = [grad for seeds in batches for grad in _gradients(made, seeds)]
        assert len(one_rank) == num_left
        found.append([*grads, made.experts.linear_fc1.weight.grad])
    for one, other in zip(*found, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    assert found[0][-1].any()


@pytest.mark.parametrize("frozen", [("linear_fc1",), ("linear_fc2",), ("linear_fc1", "linear_fc2")])
def test_frozen_weights_leave_nothing(one_rank, frozen):
    found = []
    for home in ("auto", "after"):
        made = _layer(home)
        for name in frozen:
            getattr(made.experts, name).weight.requires_grad_(False)
        found.append(_gradients(made, (1,)))
    assert len(one_rank) == int("linear_fc1" not in frozen)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("fuses", [False, True], ids=["returned", "added"])
def test_ddp_hears_of_a_gradient_once_and_when_it_is_there(one_rank, fuses):
    """In bf16, with an fp32 buffer, into which the product adds, or DDP's hook."""
    found = []
    for home in ("auto", "after"):
        made = _layer(home, bf16=True, params_dtype=torch.bfloat16)
        ddp = DistributedDataParallel(made.config, FUSED, made)
        weight, ready = made.experts.linear_fc1.weight, []
        if not fuses:
            made.experts.linear_fc1.sums = lambda: None
        group = ddp.param_to_bucket_group[weight]
        hear = group.register_grad_ready

        def heard(parameter, *args, hear=hear, weight=weight, ready=ready):
            if parameter is weight:
                ready.append(weight.main_grad.clone())
            hear(parameter, *args)

        group.register_grad_ready = heard
        for seed in range(2):
            ddp.zero_grad_buffer()
            tokens = _tokens(seed).detach().bfloat16().requires_grad_()
            ddp(tokens)[0].float().square().sum().backward()
            assert weight.grad is None and weight.grad_added_to_main_grad == fuses
            ddp.finish_grad_sync()
            assert len(ready) == seed + 1
            assert torch.equal(ready[-1], weight.main_grad) and weight.main_grad.any()
        found.append([parameter.main_grad for parameter in made.parameters()])
    assert len(one_rank) == 2
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_pass_that_broke_off_leaves_no_gradient_to_the_next(one_rank):
    """The next pass computes its own, where its exchange is another one."""
    made, expected = _layer("auto"), _layer("after")
    with patch.object(made.experts, "forward", side_effect=KeyError), pytest.raises(KeyError):
        made(_tokens(0))
    assert made.experts._left is not None
    for layer in (made, expected):
        layer.token_dispatcher.configs.set_factor(FIT)
    for one, other in zip(_gradients(made, (1,)), _gradients(expected, (1,)), strict=True):
        assert torch.equal(one, other)
    assert not one_rank


@pytest.mark.parametrize("added", [False, True])
def test_the_rule_reads_the_sizes_of_a_pass(one_rank, added):
    made, seen = _layer("auto"), []
    if added:
        made.experts.linear_fc1.weight.main_grad = torch.zeros(tiny.NUM_EXPERTS, 48, tiny.HIDDEN)
    with patch.object(experts, "pays", lambda **sizes: seen.append(sizes)):
        made(_tokens(0))
    assert seen == [
        {
            "num_rows": 15 * tiny.TOP_K,
            "width": tiny.HIDDEN,
            "out": 48,
            "num_experts": tiny.NUM_EXPERTS,
            "num_ranks": 1,
            "added": added,
        }
    ]
    assert made.experts._left is None and not one_rank


def test_sums_that_go_home_leave_nothing(one_rank):
    assert _gradients(_layer("auto", link_rows="summed"), (1,))[0].any() and not one_rank


def test_passes_without_gradients_leave_nothing(one_rank):
    made = _layer("auto")
    with torch.no_grad():
        made(_tokens(0))
    assert made.experts._left is None
    made.eval()
    with torch.no_grad():
        made(_tokens(0))
    made.train()
    assert _gradients(made, (1,))[0].any() and len(one_rank) == 1


def test_graphs_that_end_before_the_experts():
    found = {
        scopes: captures_dispatch_alone(tiny.config(**layer_graphs(*scopes)))
        for scopes in (
            ("moe_router",),
            ("moe_router", "moe_preprocess"),
            ("attn", "moe_router", "moe_preprocess"),
        )
    }
    assert list(found.values()) == [False, True, True]
    assert not captures_dispatch_alone(tiny.config())
