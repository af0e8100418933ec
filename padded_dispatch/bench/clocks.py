"""Clocks of a GPU's multiprocessors, from NVIDIA's management library.

A rate means little without them: under load an H200 meets its power cap, and its clock falls from
1,980 MHz by a quarter. The library comes with the driver and is called directly, which takes less
than a millisecond; a process for `nvidia-smi` would take longer than what is measured.
"""

import ctypes
import functools

import torch

_SM = 1  # NVML_CLOCK_SM


def sm_mhz(device: torch.device) -> int | None:
    """Return the clock at this moment; None on CPUs, and where the library does not tell."""
    return _clock("nvmlDeviceGetClockInfo", device)


def max_sm_mhz(device: torch.device) -> int | None:
    """Return the highest clock that the GPU has; None as in `sm_mhz`."""
    return _clock("nvmlDeviceGetMaxClockInfo", device)


def _clock(function: str, device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    found = _library_and_handle(index)
    if found is None:
        return None
    library, handle = found
    mhz = ctypes.c_uint()
    failed = getattr(library, function)(handle, _SM, ctypes.byref(mhz))
    return None if failed else mhz.value


@functools.cache
def _library_and_handle(index: int) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """Return the library and its handle of a GPU, which torch numbers otherwise than the driver."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    name = f"GPU-{torch.cuda.get_device_properties(index).uuid}".encode()
    failed = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle))
    return None if failed else (library, handle)
