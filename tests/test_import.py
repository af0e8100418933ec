"""`import padded_dispatch` needs neither torch nor Megatron, and has no side effects."""

import importlib

import pytest

import padded_dispatch
import padded_dispatch.megatron
from tests.support.processes import python

CODE = """
import logging, signal, sys, threading

def state():
    handlers = [logging.getLogger(name).handlers for name in ("", "padded_dispatch")]
    return signal.getsignal(signal.SIGINT), threading.active_count(), [*sys.path], str(handlers)

before = state()
import padded_dispatch, padded_dispatch.cli, padded_dispatch.megatron.run
assert state() == before
hosts = {"megatron", "transformer_engine", "triton", "tensorboard", "torch", "numpy"}
print(hosts & set(sys.modules))
import triton, torch  # It is seen.
print(sorted(hosts & set(sys.modules)))
"""


def test_importing_has_no_side_effects():
    """Torch's state cannot have changed, because torch is not there."""
    assert python("-c", CODE) == "set()\n['numpy', 'torch', 'triton']\n"


@pytest.mark.parametrize("package", [padded_dispatch, padded_dispatch.megatron])
def test_every_public_name_is_imported_when_it_is_used(package):
    """Also after its module, whose name may be the same, was imported by itself."""
    assert set(package._HOMES) <= set(package.__all__) <= set(dir(package))
    for name, home in package._HOMES.items():
        module = importlib.import_module(f"{package.__name__}.{home}")
        public = package.__getattr__(name), getattr(package, name), getattr(module, name)
        assert public[0] is public[1] is public[2], name
    assert all(hasattr(package, name) for name in package.__all__)
    with pytest.raises(AttributeError, match=f"^module '{package.__name__}' has no attribute 'no"):
        package.nothing
