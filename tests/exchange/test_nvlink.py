"""What the driver and NVML say of NVLink, with a stand-in for both."""

import ctypes
import socket
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from padded_dispatch.exchange import nvlink


@pytest.mark.parametrize(
    ("error", "atomics", "linked"), [(0, 1, True), (0, 0, False), (1, 1, False)]
)
def test_native_atomics_show_nvlink(error, atomics, linked):
    def attribute(found: Any, number: int, *gpus: int) -> int:
        assert (number, gpus) == (3, (0, 5))
        found._obj.value = atomics
        return error

    driver = SimpleNamespace(cuDeviceGetP2PAttribute=attribute)
    with patch.object(ctypes, "CDLL", lambda name: driver):
        assert nvlink.linked(0, 5) is linked


class Rack:
    """NVML, the driver and symmetric memory of a GPU of a GB200 NVL72; each part can be replaced.

    `fails`: an error by the name of a function. `links`: whether each of the first ones is active.
    `live`: handles that are not released.
    """

    uuid = "f00d"
    cluster = bytes(range(16))

    def __init__(self) -> None:
        self.fails: dict[str, int] = {}
        self.fabric: dict[str, Any] = {"status": 0, "clique": 7, "state": 3}
        self.allocates = self.has_nvml = True
        self.live: list[int] = []
        self.links = [True] * 18
        self.nvml = SimpleNamespace(
            nvmlInit_v2=lambda: self.fails.get("init", 0),
            nvmlDeviceGetHandleByUUID=self._gpu,
            nvmlDeviceGetGpuFabricInfoV=self._fabric_info,
            nvmlDeviceGetNvLinkState=self._link,
        )
        self.driver = SimpleNamespace(
            cuMemRetainAllocationHandle=self._retain,
            cuMemExportToShareableHandle=self._export,
            cuMemImportFromShareableHandle=self._import,
            cuMemRelease=lambda handle: self.live.remove(handle.value),
        )

    def library(self, name: str) -> Any:
        if name == "libcuda.so.1":
            return self.driver
        assert name == "libnvidia-ml.so.1"
        if not self.has_nvml:
            raise OSError(name)
        return self.nvml

    def _gpu(self, uuid: bytes, gpu: Any) -> int:
        assert uuid == b"GPU-f00d"
        gpu._obj.value = 11
        return self.fails.get("gpu", 0)

    def _fabric_info(self, gpu: Any, found: Any) -> int:
        info = found._obj
        assert (gpu.value, info.version) == (11, 0x2000024)  # The second form, of 36 bytes.
        info.cluster[:] = self.cluster
        for name, value in self.fabric.items():
            setattr(info, name, value)
        return self.fails.get("fabric", 0)

    def _link(self, gpu: Any, link: int, active: Any) -> int:
        assert gpu.value == 11
        if link >= len(self.links):
            return 2  # an invalid argument
        active._obj.value = self.links[link]
        return self.fails.get("link", 0)

    def allocate(self, size: Any, stride: Any, dtype: Any, device: Any) -> Any:
        assert (size, stride, dtype) == ((1,), (1,), torch.uint8)
        if not self.allocates:
            raise RuntimeError("CUDA driver error: 801\nat frame 0")
        return SimpleNamespace(data_ptr=lambda: 4096)

    def _retain(self, handle: Any, address: Any) -> int:
        assert address.value == 4096
        return self._made(handle, 5, "retain")

    def _export(self, shared: Any, handle: Any, kind: int, flags: Any) -> int:
        assert (len(shared), handle.value, kind, flags.value) == (64, 5, 8, 0)
        shared.value = b"shared"
        return self.fails.get("export", 0)

    def _import(self, handle: Any, shared: Any, kind: int) -> int:
        assert (shared.value, kind) == (b"shared", 8)
        return self._made(handle, 6, "import")

    def _made(self, handle: Any, value: int, name: str) -> int:
        if error := self.fails.get(name, 0):
            return error
        handle._obj.value = value
        self.live.append(value)
        return 0


@pytest.fixture
def rack(monkeypatch) -> Rack:
    from torch._C import _distributed_c10d

    rack = Rack()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = lambda number: SimpleNamespace(uuid=rack.uuid)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    memory = SimpleNamespace(empty_strided_p2p=rack.allocate)
    monkeypatch.setattr(_distributed_c10d, "_SymmetricMemory", memory)
    monkeypatch.setattr(ctypes, "CDLL", rack.library)
    return rack


NAME = "clique 7 of 000102030405060708090a0b0c0d0e0f"


def found() -> tuple[str, str]:
    """Return the answer without the name of the host; no handle is left."""
    name, obstacle = nvlink.domain()
    here = f", on {socket.gethostname()}"
    assert not obstacle or obstacle.endswith(here)
    return name, obstacle.removesuffix(here)


def test_one_active_link_is_enough(rack):
    assert nvlink.has_links()
    rack.links = [False, False, True, False]
    assert nvlink.has_links()
    rack.links = [False] * 4
    assert not nvlink.has_links()
    rack.links = []
    assert not nvlink.has_links()
    rack.links, rack.fails["link"] = [True], 3  # not supported
    assert not nvlink.has_links()
    rack.has_nvml = False  # It does not tell; ranks then try.
    assert nvlink.has_links()


def test_a_gpu_that_can_share_is_in_its_domain(rack):
    assert found() == (NAME, "")
    rack.fabric["clique"] = 8
    assert found()[0] == NAME.replace("7", "8", 1)
    rack.cluster = bytes(15) + b"\x01"
    assert found() == (f"clique 8 of {'00' * 15}01", "")
    assert rack.live == []


def test_a_gpu_of_an_ordinary_host_is_in_no_domain(rack):
    """Its memory is not tried: HGX hosts, hosts without a fabric, old drivers and no NVML."""
    rack.allocates = False
    rack.cluster = bytes(16)
    assert found() == ("", "an NVLink fabric of one machine")
    rack.fabric["state"] = 0
    assert found() == ("", "a GPU without an NVLink fabric")
    for step, error in (("fabric", 3), ("gpu", 6), ("init", 9)):  # 3: not supported
        rack.fails[step] = error
        assert found() == ("", f"error {error} of NVML")
    rack.fails.clear()
    del rack.nvml.nvmlDeviceGetGpuFabricInfoV
    assert found() == ("", "a driver whose NVML knows no fabric")
    rack.has_nvml = False
    assert found() == ("", "libnvidia-ml.so.1")


@pytest.mark.parametrize("state", [1, 2])
def test_a_fabric_that_is_not_complete_is_an_obstacle(rack, state):
    """Nothing else is known of it then."""
    rack.fabric |= {"state": state, "status": 5}
    rack.cluster = bytes(16)
    name, obstacle = found()
    assert name and obstacle == f"an NVLink fabric in state {state}, where 3 is complete"


def test_a_fabric_with_an_error_is_an_obstacle(rack):
    rack.fabric["status"] = 15
    assert found() == (NAME, "an NVLink fabric with error 15 of NVML")


@pytest.mark.parametrize(
    ("step", "name"),
    [
        ("retain", "cuMemRetainAllocationHandle"),
        ("export", "cuMemExportToShareableHandle"),  # Torch had taken a file descriptor.
        ("import", "cuMemImportFromShareableHandle"),
    ],
)
def test_memory_without_a_fabric_handle_is_an_obstacle(rack, step, name):
    rack.fails[step] = 800
    domain, obstacle = found()
    assert domain == NAME and rack.live == []
    assert obstacle.startswith(f"symmetric memory without a fabric handle (error 800 of {name}); ")
    assert "a channel of IMEX" in obstacle


def test_memory_that_torch_cannot_allocate_is_an_obstacle(rack):
    rack.allocates = False
    domain, obstacle = found()
    assert domain == NAME and "fabric handle (CUDA driver error: 801); it needs" in obstacle


def test_a_question_that_raises_is_an_answer_since_peers_wait_for_it(rack, monkeypatch):
    def lost(number: int) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(torch.cuda, "get_device_properties", lost)
    assert found() == ("", "RuntimeError('the device is lost') from a driver")
