"""Memory that all ranks can write to: peaks that count it, its barriers, and what is refused.

No test here needs a GPU: what torch and the driver would do is replaced. `test_direct` has buffers.
"""

import ctypes
import os
import socket
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from padded_dispatch.exchange import symmetric_memory
from padded_dispatch.exchange.hosts import arranged
from padded_dispatch.exchange.symmetric_memory import PeerMemory, SharedMemory, check_group
from tests.support.graph_protocol import pretend_capture
from tests.support.pool import WorkerError, WorkerPool

CPU = torch.device("cpu")


@pytest.fixture
def rendezvous(monkeypatch) -> Mock:
    """Replace torch's symmetric memory; return its `rendezvous`."""
    from torch._C import _distributed_c10d
    from torch.distributed import _symmetric_memory

    found = Mock(**{"return_value.buffer_ptrs": [64, 128]})
    memory = Mock(**{"empty_strided_p2p.return_value": torch.empty(0)})
    monkeypatch.setattr(_distributed_c10d, "_SymmetricMemory", memory)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", found)
    monkeypatch.setattr(symmetric_memory, "_line_buffer_stdout", Mock())
    return found


def group_of_two() -> Any:
    """Return a group whose collectives may take 45 s."""
    group = Mock(group_name="0", **{"size.return_value": 2})
    group._get_backend.return_value.options._timeout = timedelta(seconds=45)
    return group


def test_peaks_count_symmetric_memory_for_all_that_use_it(monkeypatch, rendezvous):
    """Beside a GiB of torch's own: of each layer in turn, whatever those before it allocated."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", Mock())
    monkeypatch.setattr(symmetric_memory, "_require_room", Mock())
    group, found = group_of_two(), []
    sizes: Any = {"top_k": 2, "num_local_experts": 1, "width": 2**20, "dtype": torch.bfloat16}
    for in_turn in ((64,), (64,), (128,), (64,), (128, 99), ()):  # The last has no direct writes.
        symmetric_memory.reset_peaks()
        for num_slots in in_turn:
            shape = symmetric_memory.Shape(num_slots=num_slots, **sizes)
            symmetric_memory.buffers_for(group, shape, CPU)
        found.append(symmetric_memory.allocated_gib())
    # Tokens of one other rank, and K rows that come home: three times 2 MiB for each slot.
    assert found == pytest.approx([1.375, 1.375, 1.75, 1.375, 1.75, 1.0], rel=1e-4)


def test_a_barrier_waits_as_long_as_a_collective_of_the_group(rendezvous):
    PeerMemory(group_of_two(), 1, CPU).barrier()
    rendezvous.return_value.barrier.assert_called_once_with(channel=0, timeout_ms=45_000)


def test_a_capture_leaves_an_open_push_as_it_is():
    shared = SharedMemory()
    for is_open in (True, False):
        with pretend_capture():
            shared.note(is_open=is_open)
        assert shared.is_open != is_open
        shared.note(is_open=is_open)
        assert shared.is_open == is_open


def test_addresses_are_those_of_all_ranks(rendezvous):
    assert PeerMemory(group_of_two(), 1, CPU).address_R.tolist() == [64, 128]


def _print_and_abort(path: str) -> None:
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 1)
    symmetric_memory._line_buffer_stdout()
    ctypes.CDLL(None).printf(b"rank 0 failed to receive signal from rank %d\n", 3)
    os.abort()


def test_what_a_kernel_prints_outlives_an_abort(tmp_path):
    with WorkerPool(1) as pool, pytest.raises(WorkerError, match="killed by SIGABRT"):
        pool.run(_print_and_abort, str(tmp_path / "output"))
    assert (tmp_path / "output").read_text() == "rank 0 failed to receive signal from rank 3\n"


def test_one_rank_is_refused():
    words = "^the ranks of exchange='direct' must have GPUs of one host .*, got "
    one = "an expert-parallel group of one rank; set exchange='alltoall'$"
    with pytest.raises(ValueError, match=words + one):
        check_group(None, over_nvlink=False)


@pytest.fixture
def machine(monkeypatch, rendezvous) -> SimpleNamespace:
    """A host whose processes see GPUs 0 to 2; GPU 2 is no rank's. Each part can be replaced."""
    here = SimpleNamespace(visible=3, reached={0, 1}, linked={1}, seats=({}, {}), other=[])
    here.has_links = True
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here.visible)
    properties = lambda number: SimpleNamespace(uuid=f"gpu {number}")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    reaches = lambda _, number: number in here.reached  # noqa: E731
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)
    monkeypatch.setattr(symmetric_memory, "linked", lambda _, number: number in here.linked)

    monkeypatch.setattr(symmetric_memory, "has_links", lambda: here.has_links)

    def gather(group, value):
        if isinstance(value, str):
            return [here.other.pop(0) if here.other else "", value]
        each = {"machine": "m", "host": "a", "folder": "f"}
        of_ranks = [
            each | {"pid": 7 + n, "uuid": f"gpu {n % 2}"} | seat
            for n, seat in enumerate(here.seats)
        ]
        return [type(value)(**given) for given in of_ranks]

    monkeypatch.setattr(symmetric_memory, "gather_objects", gather)
    return here


def obstacle(*, over_nvlink: bool) -> str:
    """Return what all ranks raise; "" if they raise nothing."""
    group = group_of_two()
    try:
        assert check_group(group, over_nvlink=over_nvlink) is group
    except ValueError as error:
        return str(error).partition("access each other, got ")[2]
    return ""


def test_ranks_of_one_host_may_write_to_each_other(machine, rendezvous):
    assert obstacle(over_nvlink=True) == ""
    rendezvous.assert_called_once()
    machine.linked = set()
    assert obstacle(over_nvlink=False) == ""


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"host": "b"}, ""),  # Containers that share what torch needs.
        ({"folder": "g"}, "an expert-parallel group on a without a common TMPDIR (or /tmp)"),
        (
            {"host": "b", "folder": "g"},
            "an expert-parallel group on a, b without a common TMPDIR (or /tmp)",
        ),
        ({"pid": 7}, "ranks of containers that share TMPDIR (or /tmp), and PIDs"),
    ],
)
def test_what_the_rendezvous_needs_decides_and_not_the_name_of_a_host(
    machine, rendezvous, other, expected
):
    machine.seats = ({}, other)
    assert obstacle(over_nvlink=False) == expected + bool(expected) * "; set exchange='alltoall'"
    assert rendezvous.called == (expected == "")


def test_machines_of_an_nvlink_domain_need_no_folder(machine, rendezvous):
    """There torch sends fabric handles through the store; `exchange.hosts` has who is in one."""
    machine.seats = ({}, {"machine": "n", "host": "b", "folder": "g", "pid": 7, "uuid": "gpu 9"})
    assert obstacle(over_nvlink=True) == ""
    rendezvous.assert_called_once()


@pytest.mark.parametrize("error", [OSError("libcuda.so.1: no such file"), RuntimeError("lost\nat")])
def test_a_driver_that_fails_on_one_rank_is_refused_on_all(machine, monkeypatch, error):
    monkeypatch.setattr(symmetric_memory, "linked", Mock(side_effect=error))
    words = f"{type(error).__name__}('{error.args[0].splitlines()[0]}"
    assert obstacle(over_nvlink=True).startswith(words)


def test_processes_meet_in_one_folder_of_one_host(pool2, monkeypatch, tmp_path):
    here = symmetric_memory._folder()
    assert pool2.run(symmetric_memory._folder) == [here, here]
    (tmp_path / "link").symlink_to(os.environ.get("TMPDIR", "/tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "link"))
    assert symmetric_memory._folder() == here
    monkeypatch.setattr(symmetric_memory.Path, "read_text", lambda path: "another boot")
    assert symmetric_memory._folder() != here
    monkeypatch.undo()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert symmetric_memory._folder() != here
    monkeypatch.setenv("TMPDIR", "/none/such")
    assert symmetric_memory._folder() == "no /none/such"


@pytest.mark.parametrize("backend", ["NCCL", "NVSHMEM"])
def test_another_backend_of_symmetric_memory_is_refused(machine, rendezvous, monkeypatch, backend):
    from torch.distributed import _symmetric_memory

    monkeypatch.setattr(_symmetric_memory, "get_backend", lambda device: backend)
    words = f"the backend {backend} of torch's symmetric memory, which has no barrier on streams;"
    assert obstacle(over_nvlink=False).startswith(words)
    rendezvous.assert_not_called()


def test_a_gpu_out_of_reach_is_refused(machine):
    machine.reached = {0}
    assert obstacle(over_nvlink=False).startswith("GPU 0, which cannot access GPU 1;")


def test_pcie_is_refused_where_nvlink_is_required(machine):
    machine.linked = set()
    assert obstacle(over_nvlink=True).startswith("GPU 0, which has no NVLink to GPU 1;")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_a_gpu_is_refused_on_all(machine, rendezvous, monkeypatch, rank):
    machine.seats[rank].update(uuid="", host="b")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: rank == 1)
    assert obstacle(over_nvlink=False).startswith("no CUDA device on b;")
    rendezvous.assert_not_called()


def test_an_attempt_decides_where_processes_see_one_gpu(machine, rendezvous):
    """Over NVLink, if its own GPU has any."""
    machine.visible = 1
    assert obstacle(over_nvlink=True) == ""
    machine.has_links = False
    assert obstacle(over_nvlink=True).startswith("GPU 0, which has no NVLink;")
    assert obstacle(over_nvlink=False) == ""
    machine.has_links = True
    rendezvous.side_effect = RuntimeError("overlapping devices\nat frame 0")
    assert obstacle(over_nvlink=True).startswith("'overlapping devices' from an attempt to map")
    rendezvous.side_effect = None
    for machine.other in (["not seen"], ["", "not mapped"]):  # All ranks raise what one finds.
        *_, words = machine.other
        assert obstacle(over_nvlink=True).startswith(f"{words}; set")


def test_ranks_try_again_together_where_one_of_them_had_failed(machine, rendezvous):
    """A rank that has mapped memory, and would not try again, would leave its peers waiting."""
    group = group_of_two()
    for machine.other in (["", "not mapped"], ["", "not mapped"]):
        with pytest.raises(ValueError, match="not mapped"):
            check_group(group, over_nvlink=True)
    for _ in range(2):
        check_group(group, over_nvlink=True)
    assert rendezvous.call_count == 3


@pytest.mark.parametrize("other", [["no NVLink on b"], ["", "not mapped on b"]])
def test_one_host_that_cannot_map_takes_direct_stores_from_all(
    machine, rendezvous, monkeypatch, other
):
    """This rank's own host can; rank 0 is on another one, and its obstacle has its host's name."""
    inside, hosts = group_of_two(), arranged(["b", "a", "b", "a"], 1)
    inside.group_name = "inside"
    monkeypatch.setattr(symmetric_memory, "groups_of", lambda *given: (inside, None))
    machine.seats = ({"folder": "g"}, {}, {"folder": "g"}, {})  # What is elsewhere does not matter.
    assert check_group(group_of_two(), over_nvlink=True, hosts=hosts) is inside
    assert rendezvous.call_args.args[1] == "inside"
    machine.other = other
    with pytest.raises(ValueError, match=f"got {other[-1]}; set exchange='alltoall'"):
        check_group(group_of_two(), over_nvlink=True, hosts=hosts)
    machine.other, machine.linked = [], set()
    here = socket.gethostname()
    with pytest.raises(ValueError, match=f"no NVLink to GPU 1 on {here}; set"):
        check_group(group_of_two(), over_nvlink=True, hosts=hosts)
