"""Buffers that all ranks can write to: their lifetime, their barriers, and what is refused.

No test here needs a GPU: what torch and the driver would do is replaced.
"""

import gc
import os
import subprocess
import sys
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from padded_dispatch.exchange import symmetric_memory
from padded_dispatch.exchange.symmetric_memory import PeerMemory, ReceiveBuffer, Shape

CPU = torch.device("cpu")


def test_a_buffer_whose_tensors_only_await_garbage_collection_is_free():
    receive_buffer = ReceiveBuffer.__new__(ReceiveBuffer)
    cycle = [torch.zeros(3)]
    receive_buffer._taken = [StorageWeakRef(cycle[0].untyped_storage())]
    cycle.append(cycle)
    assert not receive_buffer.is_free()
    gc.disable()
    try:
        del cycle
        assert receive_buffer.is_free()
    finally:
        gc.enable()


def test_peaks_count_symmetric_memory(monkeypatch):
    """Two allocations of half a GiB, one of them freed later, and a GiB of torch's own."""
    from torch._C import _distributed_c10d
    from torch.distributed import _symmetric_memory

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 2**31)
    monkeypatch.setattr(_distributed_c10d, "_SymmetricMemory", Mock())
    monkeypatch.setattr(_symmetric_memory, "rendezvous", Mock())
    monkeypatch.setattr(symmetric_memory, "_line_buffer_stdout", Mock())
    memories = [PeerMemory(Mock(group_name="0"), 2**29, CPU) for _ in range(2)]
    assert (symmetric_memory.allocated_gib(), symmetric_memory.reserved_gib()) == (2.0, 3.0)
    del memories[0]
    assert (symmetric_memory.allocated_gib(), symmetric_memory.reserved_gib()) == (1.5, 2.5)


def test_what_a_kernel_prints_outlives_an_abort():
    program = """
import ctypes, os
from padded_dispatch.exchange.symmetric_memory import _line_buffer_stdout

_line_buffer_stdout()
ctypes.CDLL(None).printf(b"rank 0 failed to receive signal from rank %d\\n", 3)
os.abort()
"""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert ended.stdout == "rank 0 failed to receive signal from rank 3\n"


def test_one_rank_or_no_gpu_is_refused():
    expected = (
        r"^the ranks of exchange='direct' must have GPUs of one host .*, "
        r"got (no CUDA device|an expert-parallel group of one rank); set exchange='alltoall'$"
    )
    with pytest.raises(ValueError, match=expected):
        symmetric_memory.check_group(None)


def test_two_hosts_are_refused():
    with patch.object(torch.cuda, "current_device", lambda: 0):
        obstacle = symmetric_memory._obstacle([("a", "1"), ("b", "2")])
    assert obstacle == "an expert-parallel group that spans the hosts a, b"


def test_bytes_are_those_that_buffers_allocate(monkeypatch):
    """The parts of this shape are multiples of the alignment."""
    allocated = []

    def memory(group, num_bytes, device):
        allocated.append(num_bytes)
        return Mock()

    monkeypatch.setattr(symmetric_memory, "PeerMemory", memory)
    monkeypatch.setattr(symmetric_memory, "gather_objects", lambda group, value: [value])
    monkeypatch.setattr(symmetric_memory, "_free_bytes", lambda device: 2**40)
    sizes = dict(num_experts=32, num_slots=64, num_rows=96, width=64, num_places=192)
    shape = Shape(**sizes, dtype=torch.float32)
    group = Mock(group_name="0", **{"size.return_value": 2, "rank.return_value": 0})
    buffers = symmetric_memory.DirectBuffers(group, shape, CPU, microbatches_in_flight=3)
    assert len(allocated) == 3 + 2
    assert sum(allocated) == symmetric_memory.direct_bytes(shape, num_ranks=2, num_buffers=3)
    del buffers


def test_buffers_that_do_not_fit_are_refused():
    sizes = dict(num_experts=4, num_slots=2**22, num_rows=2**22, width=2**10, num_places=0)
    shape = Shape(**sizes, dtype=torch.bfloat16)
    with (
        patch.object(symmetric_memory, "gather_objects", lambda group, value: [value]),
        patch.object(symmetric_memory, "_free_bytes", lambda device: 2**30),
        pytest.raises(
            ValueError,
            match=r"must fit on every rank, got 16\.03 GiB .* 1\.00 GiB free; lower the capa",
        ),
    ):
        group = dist.ProcessGroup(0, 1)
        symmetric_memory._workspace(group, shape, CPU, 0)
