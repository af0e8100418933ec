"""Experts whose products send rows home, with direct stores of one rank.

A process plays the only rank: its kernels run in Triton's interpreter, on memory of its own. All
the rest is real: Megatron's layer, its DDP, and autograd.
"""

import itertools
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor

from padded_dispatch.exchange import direct, fused, symmetric_memory
from padded_dispatch.megatron import PaddedOptions, dispatcher
from padded_dispatch.megatron.compat import captures_dispatch_alone, layer_graphs
from tests.support import tiny

pytestmark = [
    pytest.mark.usefixtures("one_process"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels would not be interpreted"),
]

RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
FUSED = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)


class OwnMemory:
    """`PeerMemory` of one rank; `calls` has its barriers, and sums and stores of slots."""

    calls: ClassVar[list[str]] = []

    def __init__(self, group: Any, num_bytes: int, device: torch.device) -> None:
        self._bytes = torch.full((num_bytes,), 255, dtype=torch.uint8)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        # With a storage of its own, as the tensors of `PeerMemory` have.
        return torch.from_numpy(self._bytes[offset : offset + size].numpy()).view(dtype).view(shape)

    def addresses(self, offset: int) -> Tensor:
        return torch.tensor([self._bytes.data_ptr() + offset])

    def barrier(self) -> None:
        self.calls.append("barrier")


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[list[int]]:
    """Let one rank have direct stores; the list gets the rows of each product that goes home.

    Between a sum of slots and a product that stores rows in them there must be a barrier.
    """
    sent, product, received = [], fused.return_product, direct.received
    OwnMemory.calls.clear()

    def noted(rows_NI: Tensor, *args: Any) -> Any:
        sent.append(len(rows_NI))
        OwnMemory.calls.append("store")
        return product(rows_NI, *args)

    def summed(*args: Any, **kwargs: Any) -> Any:
        OwnMemory.calls.append("sum")
        return received(*args, **kwargs)

    with (
        patch.object(symmetric_memory, "PeerMemory", OwnMemory),
        patch.object(symmetric_memory, "_free_bytes", lambda device: 2**40),
        patch.object(direct, "check_group", lambda group: group),
        patch.object(direct, "_check", lambda tokens_TD, probs_TE: None),
        patch.object(fused, "return_product", noted),
        patch.object(direct, "received", summed),
        patch.object(fused, "received", summed),
    ):
        yield sent
    assert OwnMemory.calls.count("store") == len(sent)
    assert ("sum", "store") not in itertools.pairwise(OwnMemory.calls)


def _layer(home: Any, later: Any = None, in_flight: int = 1, **settings: Any) -> Any:
    """Return a layer whose rows go home inside of products, or "after" them."""
    config: Any = tiny.config(moe_expert_capacity_factor=1.0, **settings)
    config.padded_dispatch = PaddedOptions(
        experts="packed",
        exchange="direct",
    )
    for name, value in (later or {}).items():
        setattr(config, name, value)
    with patch.object(dispatcher, "passes_in_flight", lambda *_: in_flight):
        made = tiny.padded_layer_of(config)
    made.token_dispatcher._fuses &= home == "auto"
    return made


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
    ("changes", "num_sent"),
    [
        ({}, 4),
        ({"in_flight": 2}, 4),
        (RECOMPUTED, 6),
        ({"add_bias_linear": True}, 4),
        ({"later": {"delay_wgrad_compute": True}}, 0),
        ({"later": layer_graphs("moe_router", "moe_preprocess")}, 0),
        ({"later": layer_graphs("moe_router")}, 4),
    ],
    ids=[
        "plain",
        "in flight",
        "recompute",
        "biases",
        "Megatron delays",
        "graph before experts",
        "router",
    ],
)
def test_results_have_the_bits_of_one_after_the_other(one_rank, changes, num_sent):
    """Products that send rows: two a pass, fc2's forward one once more where it is recomputed."""
    found: list[list[Any]] = []
    for home in ("auto", "after"):
        made = _layer(home, **changes)
        batches = ((1, 2),) if "in_flight" in changes else ((1,), (2,))
        grads = [grad for seeds in batches for grad in _gradients(made, seeds)]
        assert len(one_rank) == num_sent
        found.append([*grads, made.experts.linear_fc1.weight.grad])
    for one, other in zip(*found, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    assert found[0][-1].any()


@pytest.mark.parametrize("frozen", [("linear_fc1",), ("linear_fc2",), ("linear_fc1", "linear_fc2")])
def test_weights_may_be_frozen(one_rank, frozen):
    found = []
    for home in ("auto", "after"):
        made = _layer(home)
        for name in frozen:
            getattr(made.experts, name).weight.requires_grad_(False)
        found.append(_gradients(made, (1,)))
    assert len(one_rank) == 2
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
    assert len(one_rank) == 4
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_experts_of_fsdp_take_no_linears(one_rank):
    """It gathers weights by hooks on tensors that a fused pass goes past."""
    made = _layer("auto")
    made.experts.linear_fc1.weight.__fsdp_param__ = True
    made(_tokens(0))
    assert not one_rank


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_passes_without_gradients_send_rows_from_fc2(one_rank, without):
    """Also between a forward pass and its backward pass, whose rows they do not touch."""
    made, plain = _layer("auto", in_flight=2), _layer("after", in_flight=2)
    tokens, found = _tokens(0), []
    for layer in (made, plain):
        given = _tokens(1)
        output = layer(given)[0]
        with without():
            found.append(layer(tokens)[0].clone())
        output.square().sum().backward()
        found += [given.grad, layer.experts.linear_fc1.weight.grad]
    assert len(one_rank) == 3 and made.experts.linears is None
    for one, other in zip(found[:3], found[3:], strict=True):
        assert torch.equal(one, other) and one.any()


def test_a_pass_keeps_neither_its_tokens_nor_its_rows(one_rank):
    """Its graph holds them as long as it lives; nothing else does."""
    made = _layer("auto")
    for _ in range(2):  # A second pass takes the only buffer, which must be free.
        tokens = _tokens(0)
        given = weakref.ref(tokens)
        made(tokens)[0].square().sum().backward()
        del tokens
        assert given() is None
    assert len(one_rank) == 4


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
    config: Any = tiny.config(**layer_graphs("moe_router"))
    config.cuda_graph_impl = "local"
    assert captures_dispatch_alone(config)
    assert not captures_dispatch_alone(tiny.config())
