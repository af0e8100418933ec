"""Products that send rows home on threads, beside products whose rows travel afterwards."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from padded_dispatch import PaddedDispatcher
from padded_dispatch.dispatcher import Dispatched
from padded_dispatch.exchange import Slots, fused
from padded_dispatch.exchange.fused import FusedLinears
from padded_dispatch.experts import ExpertWeights, grouped_mlp
from padded_dispatch.experts.activation import Activation
from tests.support.direct_parity import Inputs, Layer, direct_of, make_inputs, poison
from tests.support.thread_memory import NUM_RANKS, threads_as_ranks
from tests.support.threads import run_on_threads

CPU = torch.device("cpu")
FFN = 3
SMALL = Layer(
    tokens=7, width=5, top_k=2, local_experts=2, dtype=torch.float32, microbatches_in_flight=2
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels would not be interpreted; see tests/gpu/fused.py"
)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with threads_as_ranks():
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """What a pass is besides its routing. `constant`: the input without a gradient."""

    layer: Layer = SMALL
    constant: str = ""
    biased: bool = False
    added: bool = False
    recompute: bool = False
    frozen: bool = False


def _weights(given: Pass) -> ExpertWeights:
    generator = torch.Generator().manual_seed(dist.get_rank())

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    layer = given.layer
    experts, width = layer.local_experts, layer.width
    fc1_LGD, fc2_LDF = drawn(experts, 2 * FFN, width), drawn(experts, width, FFN)
    fc1_LGD.requires_grad_(not given.frozen)
    return ExpertWeights(
        fc1_LGD=fc1_LGD,
        fc2_LDF=fc2_LDF,
        fc1_bias_LG=drawn(experts, 2 * FFN) if given.biased else None,
        fc2_bias_LD=drawn(experts, width) if given.biased else None,
        fc1_sums_LGD=torch.ones_like(fc1_LGD) if given.added else None,
        fc2_sums_LDF=torch.ones_like(fc2_LDF) if given.added else None,
    )


def _sent(
    dispatcher: PaddedDispatcher, inputs: Inputs, fuses: bool
) -> tuple[Dispatched, FusedLinears | None]:
    """Dispatch tokens; return the linears of the pass, too, if it `fuses`."""
    exchange, made = direct_of(dispatcher), []

    def prepared(*given: Any) -> Slots:
        slots, linears = fused.prepare(exchange, *given)
        made.append(linears)
        return slots

    with patch.object(exchange, "prepare", prepared if fuses else exchange.prepare):
        sent = dispatcher.dispatch(inputs.tokens_TD, inputs.probs_TE, inputs.map_TE)
    return sent, made[0] if fuses else None


def _two_passes(given: Pass, routing: str, fuses: bool) -> list[Tensor]:
    """Run two forward passes, then both backward passes; return results, gradients and sums."""
    dispatcher, weights = given.layer.dispatcher("direct"), _weights(given)
    passes = []
    for seed in range(2):
        inputs = make_inputs(given.layer, routing, seed, CPU)
        if given.constant:
            getattr(inputs, given.constant).requires_grad_(False)
        sent, linears = _sent(dispatcher, inputs, fuses)
        received = sent.expert_input
        assert received.offsets_LS is not None and received.rows_ND.requires_grad != fuses
        rows = received.rows_ND, received.probs_N, received.offsets_LS[:, -1].contiguous()
        how = weights, Activation()
        if linears is None:
            out_ND = grouped_mlp(*rows, *how, recompute=given.recompute)
            out_TD = dispatcher.combine(out_ND, sent)
            del out_ND
        else:
            out_TD = grouped_mlp(*rows, *how, home=linears, recompute=given.recompute)
        del sent, received, rows, linears
        passes.append((inputs, out_TD))
    found = []
    leaves = [one for one in vars(weights).values() if one is not None and one.requires_grad]
    while passes:
        inputs, out_TD = passes.pop(0)
        of = [one for one in (inputs.tokens_TD, inputs.probs_TE, *leaves) if one.requires_grad]
        grads = torch.autograd.grad(out_TD, of, inputs.grad_TD)
        if given.added:  # Those of the weights are unspecified.
            grads = [grad for grad in grads if grad.ndim < 3]
        found += [out_TD.detach(), *grads]
        del out_TD
    sums = weights.fc1_sums_LGD, weights.fc2_sums_LDF
    return found + [one for one in sums if one is not None]


@pytest.mark.parametrize(
    ("given", "routing"),
    [
        (Pass(), "uniform"),
        (Pass(), "same"),
        (Pass(), "idle"),
        (Pass(), "none"),
        (Pass(biased=True), "uniform"),
        (Pass(added=True), "uniform"),
        (Pass(recompute=True, biased=True), "hot"),
        (Pass(frozen=True), "uniform"),
        (Pass(constant="tokens_TD"), "uniform"),
        (Pass(constant="probs_TE"), "uniform"),
        (Pass(layer=dataclasses.replace(SMALL, top_k=3)), "uniform"),
        (Pass(layer=dataclasses.replace(SMALL, pool="rank", factor=0.8)), "hot"),
    ],
    ids=str,
)
def test_they_have_the_bits_of_one_after_the_other(given, routing):
    """The thread that comes last to a barrier runs on: it stores rows before others sum theirs."""
    both = [
        run_on_threads(NUM_RANKS, _two_passes, given, routing, fuses) for fuses in (True, False)
    ]
    assert len(both[0][0]) >= 8
    for one, other in zip(*(itertools.chain(*ranks) for ranks in both), strict=True):
        assert torch.equal(one, other)
    assert (both[0][0][0].abs().sum() > 0) == (routing != "none")


def _faked(*args: Any) -> tuple[Tensor, ...]:
    """Return what the product returns while torch traces it."""
    with FakeTensorMode() as mode:
        return fused.return_product(
            *(mode.from_tensor(one) if isinstance(one, Tensor) else one for one in args)
        )


def _like(tensors: tuple[Tensor, ...]) -> list[Any]:
    return [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors]


def _products(routing: str) -> list[bool]:
    """Compare the product for GPUs with the one for CPUs; whole numbers, whose sums are exact."""
    layer = dataclasses.replace(SMALL, width=16, dtype=torch.float16, microbatches_in_flight=1)
    dispatcher = layer.dispatcher("direct")
    inputs = make_inputs(layer, routing, 3, CPU)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def drawn(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)

    def pushed() -> tuple[tuple[Any, ...], Tensor, int]:
        """Return what a return gets from a push, behind which no slot has rows."""
        if direct_of(dispatcher)._buffers:
            poison(dispatcher)
        sent, linears = _sent(dispatcher, inputs, True)
        assert linears is not None and sent.expert_input.offsets_LS is not None
        offsets_L = sent.expert_input.offsets_LS[:, -1].contiguous()
        return linears.home, offsets_L, len(sent.expert_input.rows_ND)

    num_rows = pushed()[2]
    rows_NI, weight_LIO = drawn(num_rows, 8), drawn(layer.local_experts, 8, 16)
    bias_LO, weights_N, probs_N = (
        drawn(layer.local_experts, 16),
        drawn(num_rows, dtype=torch.float32),
        drawn(num_rows, dtype=torch.float32),
    )
    found = []
    for weight_LOI, *given in (
        (weight_LIO.transpose(1, 2).contiguous(), bias_LO, weights_N, None),  # fc2
        (weight_LIO.transpose(1, 2), None, None, probs_N),  # Gradients of fc1's rows.
    ):
        results = []
        for product in (fused.return_product, fused._return_product_on_gpu):
            home, offsets_L, _ = pushed()
            args: Any = rows_NI, weight_LOI, *given, offsets_L, None, *home
            results.append(product(*args))
        expected, got = results
        found += [torch.equal(*pair) for pair in zip(got, expected, strict=True)]
        found.append(_like(_faked(*args)) == _like(got))
        some = routing != "none"
        found.append(bool(got[0].any()) == some)
        found.append(bool(got[1].any()) == (some and given[2] is not None))
    return found


@pytest.mark.parametrize("routing", ["uniform", "same", "idle", "none"])
def test_the_product_for_gpus_is_the_one_for_cpus(routing):
    """Slots hold NaN before each of them, so that one of them cannot live on the other's rows."""
    with patch.object(fused, "check_on_gpu", lambda rows_NI, weight_LOI: None):
        assert run_on_threads(NUM_RANKS, _products, routing) == [[True] * 10] * 2
