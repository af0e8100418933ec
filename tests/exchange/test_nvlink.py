"""What the driver says of NVLink, with a stand-in for it."""

import ctypes
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

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
