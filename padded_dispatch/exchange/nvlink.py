"""NVLink: which GPUs it connects, by what the driver and NVML, its library of management, say.

An NVLink domain is the GPUs of one or several machines that NVLink connects, such as the 72 of a
GB200 NVL72; NVML calls it a clique of a cluster. Between machines GPUs share memory by fabric
handles, which a machine grants to processes that have a channel of IMEX. Where a rank lacks one,
torch's symmetric memory silently takes file descriptors, and its peers would wait for it for ever.
So ranks ask for both before torch's rendezvous: see `exchange.hosts`.
"""

import ctypes
import socket
from typing import Any

import torch

_NATIVE_ATOMICS = 3  # the driver's attribute of two GPUs that is 1 only if NVLink connects them
_MOST_LINKS = 18  # NVML_NVLINK_MAX_LINKS
_FABRIC = 8  # CU_MEM_HANDLE_TYPE_FABRIC of cuda.h; such a handle has 64 bytes.
_HANDLE_BYTES = 64
_NOT_SUPPORTED, _COMPLETED = 0, 3  # of nvmlGpuFabricState_t


class _FabricInfo(ctypes.Structure):
    """`nvmlGpuFabricInfo_v2_t` of nvml.h, since CUDA 12.4."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health", ctypes.c_uint),
    )


def linked(number: int, other: int) -> bool:
    """Return whether two GPUs that this process sees reach each other over NVLink."""
    found = ctypes.c_int(0)
    driver = ctypes.CDLL("libcuda.so.1")
    failed = driver.cuDeviceGetP2PAttribute(ctypes.byref(found), _NATIVE_ATOMICS, number, other)
    return failed == 0 and found.value == 1


def has_links() -> bool:
    """Return whether this process's GPU has an active NVLink, also if NVML does not tell.

    Unlike GPUs that this process does not see, its own is known in each container.
    """
    try:
        nvml, gpu = _gpu()
    except OSError:
        return True
    active = ctypes.c_uint(0)
    for link in range(_MOST_LINKS):
        if nvml.nvmlDeviceGetNvLinkState(gpu, link, ctypes.byref(active)) == 0 and active.value:
            return True
    return False


def domain() -> tuple[str, str]:
    """Return the NVLink domain of this process's GPU, and why it cannot share memory there.

    The domain is "" if there is certainly none, which is a reason, too. Hosts with NVSwitches of
    their own, such as HGX, have a fabric, and a cluster of zeros. It raises nothing, since other
    ranks wait for the answer.
    """
    try:
        return _find_domain()
    except (OSError, RuntimeError, AttributeError) as error:
        return "", f"{error!r:.200} from a driver, on {socket.gethostname()}"


def _find_domain() -> tuple[str, str]:
    info = _FabricInfo(version=ctypes.sizeof(_FabricInfo) | 2 << 24)
    name, obstacle = "", _ask_fabric(info)
    if not obstacle and info.state == _NOT_SUPPORTED:
        obstacle = "a GPU without an NVLink fabric"
    elif not obstacle:
        cluster = bytes(info.cluster)
        name = f"clique {info.clique} of {cluster.hex()}"
        if info.state != _COMPLETED:
            obstacle = f"an NVLink fabric in state {info.state}, where {_COMPLETED} is complete"
        elif info.status:
            obstacle = f"an NVLink fabric with error {info.status} of NVML"
        elif not any(cluster):
            name, obstacle = "", "an NVLink fabric of one machine"
        elif failed := _failed_handle():
            obstacle = (
                f"symmetric memory without a fabric handle ({failed}); it needs a channel of IMEX "
                "in /dev/nvidia-caps-imex-channels, and torch 2.9"
            )
    return name, obstacle and f"{obstacle}, on {socket.gethostname()}"


def _ask_fabric(info: _FabricInfo) -> str:
    """Fill in what NVML knows of this process's GPU; return why it does not, else ""."""
    try:
        nvml, gpu = _gpu()
        error = nvml.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(info))
    except AttributeError:
        return "a driver whose NVML knows no fabric"
    except OSError as problem:
        return str(problem)
    return f"error {error} of NVML" if error else ""


def _gpu() -> tuple[Any, ctypes.c_void_p]:
    """Return NVML and its handle of this process's GPU, or raise an `OSError`."""
    nvml, gpu = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    error = nvml.nvmlInit_v2()
    error = error or nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(gpu))
    if error:
        raise OSError(f"error {error} of NVML")
    return nvml, gpu


def _failed_handle() -> str:
    """Return which call for a fabric handle of torch's symmetric memory fails; "" if none does.

    Not of memory of our own: torch decides once for a process which handles its memory has.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    device = torch.device("cuda", torch.cuda.current_device())
    try:
        memory = _SymmetricMemory.empty_strided_p2p((1,), (1,), torch.uint8, device)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    driver = ctypes.CDLL("libcuda.so.1")
    own, imported = ctypes.c_uint64(0), ctypes.c_uint64(0)
    shared = ctypes.create_string_buffer(_HANDLE_BYTES)
    steps: tuple[tuple[Any, ...], ...] = (
        ("RetainAllocationHandle", ctypes.byref(own), ctypes.c_void_p(memory.data_ptr())),
        ("ExportToShareableHandle", shared, own, _FABRIC, ctypes.c_uint64(0)),
        ("ImportFromShareableHandle", ctypes.byref(imported), shared, _FABRIC),
    )
    failed = ""
    for name, *given in steps:
        if error := getattr(driver, f"cuMem{name}")(*given):
            failed = f"error {error} of cuMem{name}"
            break
    for handle in (own, imported):
        if handle.value:
            driver.cuMemRelease(handle)
    return failed
