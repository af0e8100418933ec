"""The direct exchange on threads, which replace the GPUs; see `tests.support.thread_memory`.

Results must equal those of the all-to-all bit by bit.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from padded_dispatch import NO_DROP
from padded_dispatch.exchange import direct
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
from tests.support.thread_memory import NUM_RANKS, ThreadMemory, threads_as_ranks
from tests.support.threads import run_on_threads

CPU = torch.device("cpu")
SMALL = Layer(tokens=7, width=5, top_k=2, local_experts=2, dtype=torch.float32)

needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="kernels would not be interpreted; see tests/gpu/test_direct.py",
)


@pytest.fixture
def threads() -> Iterator[None]:
    with threads_as_ranks():
        yield


def _differences(layer: Layer, routing: str) -> list[str]:
    direct_, alltoall = layer.dispatcher("direct"), layer.dispatcher("alltoall")
    first, second = (make_inputs(layer, routing, seed, CPU) for seed in (1, 2))
    found = differences(step(direct_, first), step(alltoall, first))
    poison(direct_)
    return found + differences(step(direct_, second), step(alltoall, second))


@needs_no_gpu
@pytest.mark.parametrize(
    ("routing", "changes"),
    [
        *((routing, {}) for routing in ROUTINGS[2:]),
        *((routing, {"pool": "rank", "factor": 0.8}) for routing in ("hot", "same", "absent")),
        ("uniform", {"factor": NO_DROP}),
        ("uniform", {"pool": "rank", "factor": 0.8, "local_experts": 3}),
        ("uniform", {"tokens": 1, "top_k": 1, "local_experts": 1}),
    ],
    ids=str,
)
def test_equals_the_all_to_all(threads, routing, changes):
    layer = dataclasses.replace(SMALL, **changes)
    assert run_on_threads(NUM_RANKS, _differences, layer, routing) == [[], []]


def _in_flight(layers: tuple[Layer, ...]) -> list[str]:
    """Run all forward passes, then all backward passes, twice."""
    found = []
    directs = [layer.dispatcher("direct") for layer in layers]
    alltoalls = [layer.dispatcher("alltoall") for layer in layers]
    for seed in range(2):
        microbatches = [(i, n) for n in range(2) for i in range(len(layers))]
        inputs = [make_inputs(layers[i], "uniform", 10 * seed + n, CPU) for i, n in microbatches]
        given = list(zip(microbatches, inputs, strict=True))
        waiting = [forward(directs[i], one) for (i, _), one in given]
        for ((i, n), one), passed in zip(given, waiting, strict=True):
            expected = step(alltoalls[i], one)
            found += [f"{seed}, {i}, {n}: {x}" for x in differences(backward(passed), expected)]
        del waiting, passed
    return found


@needs_no_gpu
def test_two_passes_in_flight_through_three_layers(threads):
    layers = (
        dataclasses.replace(SMALL, microbatches_in_flight=2),
        dataclasses.replace(SMALL, width=3, local_experts=1, top_k=1, microbatches_in_flight=2),
        dataclasses.replace(SMALL, pool="rank", factor=0.8, microbatches_in_flight=2),
    )
    assert run_on_threads(NUM_RANKS, _in_flight, layers) == [[], []]


def _barriers() -> list[int]:
    """Return the numbers of barriers of a forward and a backward pass after the first one."""
    dispatcher = SMALL.dispatcher("direct")
    step(dispatcher, make_inputs(SMALL, "uniform", 0, CPU))
    counts, rank = [ThreadMemory.num_barriers[dist.get_rank()]], dist.get_rank()
    passed = forward(dispatcher, make_inputs(SMALL, "uniform", 1, CPU))
    counts.append(ThreadMemory.num_barriers[rank])
    backward(passed)
    counts.append(ThreadMemory.num_barriers[rank])
    return [after - before for before, after in itertools.pairwise(counts)]


@needs_no_gpu
def test_a_push_and_a_return_take_two_barriers_each(threads):
    assert run_on_threads(NUM_RANKS, _barriers) == [[4, 4]] * NUM_RANKS


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
        (torch.bfloat16, torch.float64, "probabilities in torch.float64; lower .*moe_router_dtype"),
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
