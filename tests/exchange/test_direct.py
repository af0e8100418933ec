"""The direct exchange on threads, which replace the GPUs: ranks share the memory of one process.

Everything but the memory and its barriers is real: the ops, their gradients, the dispatcher, and
the kernels, in Triton's interpreter. Results must equal those of the all-to-all bit by bit.
"""

import dataclasses
import threading
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from triton.runtime import interpreter

from padded_dispatch import NO_DROP
from padded_dispatch.exchange import direct, symmetric_memory
from padded_dispatch.exchange.direct import DirectExchange
from tests.support.direct_parity import (
    ROUTINGS,
    Layer,
    backward,
    differences,
    direct_of,
    forward,
    make_inputs,
    poison,
    step,
)
from tests.support.threads import run_on_threads

CPU = torch.device("cpu")
SMALL = Layer(tokens=7, width=5, top_k=2, local_experts=2, dtype=torch.float32)
NUM_RANKS = 2

needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="kernels would not be interpreted; see tests/gpu/test_direct.py",
)


class ThreadMemory:
    """`PeerMemory` of threads; the n-th objects of all threads belong together."""

    met = threading.Barrier(NUM_RANKS)
    parts: list[np.ndarray | None] = [None] * NUM_RANKS

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        self._rank = group.rank()
        self.parts[self._rank] = np.full(num_bytes, 255, np.uint8)
        self.barrier()
        self._parts = list(self.parts)
        self.barrier()

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        part = self._parts[self._rank]
        size = int(np.prod(shape)) * dtype.itemsize
        return torch.from_numpy(part[offset : offset + size]).view(dtype).view(shape)

    def addresses(self, offset: int) -> Tensor:
        return torch.tensor([part.ctypes.data + offset for part in self._parts])

    def barrier(self) -> None:
        self.met.wait(60)


@pytest.fixture
def threads() -> Iterator[None]:
    """Run ranks as threads, one of which at a time parses and interprets a kernel."""
    lock, run = threading.Lock(), interpreter.InterpretedFunction.run
    ThreadMemory.met.reset()  # An earlier test that failed may have left it broken.

    def one_at_a_time(self, *args, **kwargs):
        with lock:
            return run(self, *args, **kwargs)

    with (
        patch.object(interpreter.InterpretedFunction, "run", one_at_a_time),
        patch.object(symmetric_memory, "PeerMemory", ThreadMemory),
        patch.object(symmetric_memory, "_free_bytes", lambda device: 2**40),
        patch.object(direct, "check_group", lambda group: group),
        patch.object(direct, "_check", lambda tokens_TD, probs_TE: None),
        patch.object(
            symmetric_memory, "gather_objects", lambda group, value: [value] * group.size()
        ),
    ):
        yield


def _differences(layer: Layer, routing: str) -> list[str]:
    direct_, alltoall = layer.dispatcher("direct"), layer.dispatcher("alltoall")
    first, second = (make_inputs(layer, routing, seed, CPU) for seed in (1, 2))
    found = differences(step(direct_, first), step(alltoall, first))
    poison(direct_)
    return found + differences(step(direct_, second), step(alltoall, second))


@needs_no_gpu
@pytest.mark.parametrize("routing", ROUTINGS)
def test_equals_the_all_to_all(threads, routing):
    assert run_on_threads(NUM_RANKS, _differences, SMALL, routing) == [[], []]


@needs_no_gpu
@pytest.mark.parametrize(
    "changes",
    [{"factor": NO_DROP}, {"factor": 0.5}, {"tokens": 1, "top_k": 1, "local_experts": 1}],
)
def test_equals_the_all_to_all_in_other_sizes(threads, changes):
    layer = dataclasses.replace(SMALL, **changes)
    assert run_on_threads(NUM_RANKS, _differences, layer, "uniform") == [[], []]


def _in_flight(layers: tuple[Layer, ...]) -> list[str]:
    """Run all forward passes, then all backward passes, twice."""
    found = []
    directs = [layer.dispatcher("direct") for layer in layers]
    alltoalls = [layer.dispatcher("alltoall") for layer in layers]
    for seed in range(2):
        microbatches = [(i, n) for n in range(3) for i in range(len(layers))]
        inputs = [make_inputs(layers[i], "uniform", 10 * seed + n, CPU) for i, n in microbatches]
        given = list(zip(microbatches, inputs, strict=True))
        waiting = [forward(directs[i], one) for (i, _), one in given]
        for ((i, n), one), passed in zip(given, waiting, strict=True):
            expected = step(alltoalls[i], one)
            found += [f"{seed}, {i}, {n}: {x}" for x in differences(backward(passed), expected)]
        del waiting, passed
    return found


@needs_no_gpu
def test_three_passes_in_flight_through_two_layers(threads):
    layers = (
        dataclasses.replace(SMALL, microbatches_in_flight=3),
        dataclasses.replace(SMALL, width=3, local_experts=1, top_k=1, microbatches_in_flight=3),
    )
    assert run_on_threads(NUM_RANKS, _in_flight, layers) == [[], []]


def _too_many() -> str:
    dispatcher = SMALL.dispatcher("direct")
    first = forward(dispatcher, make_inputs(SMALL, "uniform", 0, CPU))
    with pytest.raises(ValueError) as refused:
        forward(dispatcher, make_inputs(SMALL, "uniform", 1, CPU))
    backward(first)
    return str(refused.value)


@needs_no_gpu
def test_too_many_passes_in_flight_are_noticed(threads):
    for message in run_on_threads(NUM_RANKS, _too_many):
        assert message.startswith("microbatches_in_flight must be at least the number of forward ")
        assert ", got 1; " in message
        assert "raise it" in message


def _layers_share() -> tuple[bool, bool]:
    one, same = SMALL.dispatcher("direct"), SMALL.dispatcher("direct")
    other = dataclasses.replace(SMALL, width=6)
    another = other.dispatcher("direct")
    for layer, dispatcher in ((SMALL, one), (SMALL, same), (other, another)):
        step(dispatcher, make_inputs(layer, "uniform", 0, CPU))
    workspaces = [
        next(iter(direct_of(dispatcher)._buffers.values())).workspace
        for dispatcher in (one, same, another)
    ]
    return workspaces[0] is workspaces[1], workspaces[0] is workspaces[2]


@needs_no_gpu
def test_layers_of_one_shape_share_a_workspace(threads):
    assert run_on_threads(NUM_RANKS, _layers_share) == [(True, False)] * NUM_RANKS


# What is refused.


def test_a_group_that_splits_experts_is_refused():
    class Two:
        def size(self) -> int:
            return 2

    expected = "^expert_tensor_parallel_size must be 1 .*, got 2; .* set exchange='alltoall'$"
    with pytest.raises(ValueError, match=expected):
        DirectExchange(2, None, Two())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("tokens", "probs", "words"),
    [
        (torch.float64, torch.float32, ", got tokens in torch.float64 .*; lower the dtype"),
        (
            torch.bfloat16,
            torch.float64,
            "probabilities in torch.float64; lower .*moe_router_dtype",
        ),
        (
            torch.bfloat16,
            torch.float32,
            "tokens must be on a GPU .*, got tokens on cpu; .*='alltoall'",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tokens, probs, words):
    with pytest.raises(ValueError, match=words):
        direct._check(torch.zeros(1, 1, dtype=tokens), torch.zeros(1, 1, dtype=probs))
