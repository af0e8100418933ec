"""The direct exchange on threads: memory of one process stands in for that of peers.

Everything but the memory and its barriers is real: the ops, their gradients, the dispatcher, and
the kernels, in Triton's interpreter. The all-to-all is the expectation, bit by bit.
"""

import dataclasses
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from triton.runtime import interpreter

from padded_dispatch import DispatchConfig, PaddedDispatcher
from padded_dispatch.exchange import direct
from padded_dispatch.exchange import symmetric_memory as peak
from padded_dispatch.exchange import symmetric_memory as peers
from padded_dispatch.exchange.direct import DirectExchange
from tests.support.direct_parity import (
    ROUTINGS,
    Layer,
    backward,
    differences,
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
    torch.cuda.is_available(), reason="kernels would not be interpreted; see test_direct_gpu.py"
)


class ThreadMemory:
    """`PeerMemory` of threads; the n-th one of each thread belongs to the n-th ones of the rest."""

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
    """Ranks as threads, of which one at a time interprets a kernel."""
    lock, launch = threading.Lock(), interpreter.GridExecutor.__call__

    def one_at_a_time(self, *args, **kwargs):
        with lock:
            return launch(self, *args, **kwargs)

    with (
        patch.object(interpreter.GridExecutor, "__call__", one_at_a_time),
        patch.object(peers, "PeerMemory", ThreadMemory),
        patch.object(peers, "_free_bytes", lambda device: 2**40),
        patch.object(direct, "check_group", lambda group: group),
        patch.object(direct, "_check", lambda tokens_TD, probs_TE: None),
        patch.object(peers, "gather_objects", lambda group, value: [value] * group.size()),
    ):
        yield


def _differences(layer: Layer, routing: str) -> list[str]:
    direct_, nccl = layer.dispatcher("direct"), layer.dispatcher("alltoall")
    first, second = (make_inputs(layer, routing, seed, CPU) for seed in (1, 2))
    found = differences(step(direct_, first), step(nccl, first))
    poison(direct_)
    return found + differences(step(direct_, second), step(nccl, second))


@needs_no_gpu
@pytest.mark.parametrize("routing", ROUTINGS)
def test_equals_the_all_to_all(threads, routing):
    assert run_on_threads(NUM_RANKS, _differences, SMALL, routing) == [[], []]


@needs_no_gpu
@pytest.mark.parametrize(
    "changes",
    [{"factor": None}, {"factor": 0.5}, {"tokens": 1, "top_k": 1, "local_experts": 1}],
)
def test_equals_the_all_to_all_in_other_sizes(threads, changes):
    layer = dataclasses.replace(SMALL, **changes)
    assert run_on_threads(NUM_RANKS, _differences, layer, "uniform") == [[], []]


def _in_flight(layers: tuple[Layer, ...]) -> list[str]:
    """All forward passes, then all backward passes, twice."""
    found = []
    directs = [layer.dispatcher("direct") for layer in layers]
    nccls = [layer.dispatcher("alltoall") for layer in layers]
    for seed in range(2):
        passes = [(i, n) for n in range(3) for i in range(len(layers))]
        inputs = [make_inputs(layers[i], "uniform", 10 * seed + n, CPU) for i, n in passes]
        given = list(zip(passes, inputs, strict=True))
        waiting = [forward(directs[i], one) for (i, _), one in given]
        for ((i, n), one), passed in zip(given, waiting, strict=True):
            expected = step(nccls[i], one)
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
        assert message.startswith("microbatches_in_flight=1 is not possible: ")


def test_what_waits_for_the_garbage_collector_is_not_in_flight():
    receive_buffer = peers.ReceiveBuffer.__new__(peers.ReceiveBuffer)
    cycle = [torch.zeros(3)]
    receive_buffer._given = [StorageWeakRef(cycle[0].untyped_storage())]
    cycle.append(cycle)
    assert not receive_buffer.is_free()
    gc.disable()
    try:
        del cycle
        assert receive_buffer.is_free()
    finally:
        gc.enable()


def _layers_share() -> tuple[bool, bool]:
    one, same = SMALL.dispatcher("direct"), SMALL.dispatcher("direct")
    other = dataclasses.replace(SMALL, width=6)
    another = other.dispatcher("direct")
    for layer, dispatcher in ((SMALL, one), (SMALL, same), (other, another)):
        step(dispatcher, make_inputs(layer, "uniform", 0, CPU))
    workspaces = [
        next(iter(dispatcher.exchange._buffers.values())).workspace
        for dispatcher in (one, same, another)
    ]
    return workspaces[0] is workspaces[1], workspaces[0] is workspaces[2]


@needs_no_gpu
def test_layers_of_one_shape_share_what_is_transient(threads):
    assert run_on_threads(NUM_RANKS, _layers_share) == [(True, False)] * NUM_RANKS


def test_peaks_count_what_peers_store_to(monkeypatch):
    """Of two that live, one of them gone later, beside a GiB of torch's."""
    from torch._C import _distributed_c10d
    from torch.distributed import _symmetric_memory

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 2**31)
    monkeypatch.setattr(_distributed_c10d, "_SymmetricMemory", Mock())
    monkeypatch.setattr(_symmetric_memory, "rendezvous", Mock())
    monkeypatch.setattr(peers, "_print_at_once", Mock())
    memories = [peers.PeerMemory(Mock(group_name="0"), 2**29, CPU) for _ in range(2)]
    assert (peak.allocated_gib(), peak.reserved_gib()) == (2.0, 3.0)
    del memories[0]
    assert (peak.allocated_gib(), peak.reserved_gib()) == (1.5, 2.5)


# Peers that never come.


@pytest.mark.parametrize(("captured", "timeout_ms"), [(False, 600_000), (True, 45_000)])
def test_replays_wait_less_than_a_minute_for_a_peer(captured, timeout_ms):
    memory = peers.PeerMemory.__new__(peers.PeerMemory)
    memory._handle = Mock()
    with patch.object(torch.cuda, "is_current_stream_capturing", lambda: captured):
        memory.barrier()
    memory._handle.barrier.assert_called_once_with(channel=0, timeout_ms=timeout_ms)


def test_what_a_kernel_prints_outlives_an_abort():
    program = """
import ctypes, os
from padded_dispatch.exchange.symmetric_memory import _print_at_once

_print_at_once()
ctypes.CDLL(None).printf(b"rank 0 failed to receive signal from rank %d\\n", 3)
os.abort()
"""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert ended.stdout == "rank 0 failed to receive signal from rank 3\n"


# What is refused.


def test_padded_rows_are_refused():
    config = DispatchConfig(num_experts=2, top_k=1)
    with pytest.raises(ValueError, match="exchange='direct' is not possible with padded rows"):
        PaddedDispatcher(config, exchange="direct")


def test_unknown_exchanges_are_refused():
    config = DispatchConfig(num_experts=2, top_k=1)
    with pytest.raises(ValueError, match="exchange='mpi' is not possible: choose one of nccl, dir"):
        PaddedDispatcher(config, exchange="mpi")  # pyright: ignore[reportArgumentType]


def test_one_rank_or_no_gpu_is_refused():
    with pytest.raises(ValueError, match=r"^exchange='direct' is not possible: .*'alltoall'$"):
        DirectExchange(2, None)


def test_two_hosts_are_refused():
    with patch.object(torch.cuda, "current_device", lambda: 0):
        complaint = peers._unreachable([("a", "1"), ("b", "2")])
    assert complaint == "the expert-parallel group spans the hosts a, b"


def test_a_group_that_splits_experts_is_refused():
    class Two:
        def size(self) -> int:
            return 2

    with pytest.raises(ValueError, match="with 2 ranks that split every expert"):
        DirectExchange(2, None, Two())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("tokens", "probs", "complaint"),
    [
        (torch.float64, torch.float32, "tokens in torch.float64"),
        (torch.bfloat16, torch.float64, "probabilities in torch.float64"),
        (torch.bfloat16, torch.float32, "tokens on cpu are not possible"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tokens, probs, complaint):
    with pytest.raises(ValueError, match=complaint):
        direct._check(torch.zeros(1, 1, dtype=tokens), torch.zeros(1, 1, dtype=probs))


def test_buffers_that_do_not_fit_are_refused():
    shape = peers.Shape(num_experts=4, capacity=2**20, width=2**10, dtype=torch.bfloat16)
    with (
        patch.object(peers, "gather_objects", lambda group, value: [value]),
        patch.object(peers, "_free_bytes", lambda device: 2**30),
        pytest.raises(ValueError, match=r"and a rank has 1\.00 GiB free; lower the capa"),
    ):
        group = dist.ProcessGroup(0, 1)
        peers._workspace(group, shape, CPU, 0)
