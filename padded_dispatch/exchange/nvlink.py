"""NVLink: which GPUs it connects, by what the driver says."""

import ctypes

_NATIVE_ATOMICS = 3  # the driver's attribute of two GPUs that is 1 only if NVLink connects them


def linked(number: int, other: int) -> bool:
    """Return whether two GPUs that this process sees reach each other over NVLink."""
    found = ctypes.c_int(0)
    driver = ctypes.CDLL("libcuda.so.1")
    failed = driver.cuDeviceGetP2PAttribute(ctypes.byref(found), _NATIVE_ATOMICS, number, other)
    return failed == 0 and found.value == 1
