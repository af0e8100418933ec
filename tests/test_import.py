"""`import padded_dispatch` needs neither torch nor Megatron, and has no side effects."""

import importlib
import subprocess
import sys

import pytest

import padded_dispatch
import padded_dispatch.megatron
from tests.support.processes import ENVIRONMENT

REPORT = """
import logging, signal, sys, threading
before = signal.getsignal(signal.SIGINT), threading.active_count(), list(sys.path)
{statement}
import torch
import torch.distributed as dist
hosts = {{"megatron", "transformer_engine", "triton", "hypothesis", "pytest", "tensorboard"}}
after = signal.getsignal(signal.SIGINT), threading.active_count(), list(sys.path)
print(dict(
    hosts=sorted(hosts & {{name.split(".")[0] for name in sys.modules}}),
    process_group=dist.is_initialized(),
    cuda=torch.cuda.is_initialized(),
    default_dtype=str(torch.get_default_dtype()),
    deterministic=torch.are_deterministic_algorithms_enabled(),
    handlers=len(logging.getLogger().handlers + logging.getLogger("padded_dispatch").handlers),
    process=before == after,
))
"""
NOTHING = dict(
    hosts=[],
    process_group=False,
    cuda=False,
    default_dtype="torch.float32",
    deterministic=False,
    handlers=0,
    process=True,
)


def test_importing_has_no_side_effects():
    """Of two statements in a fresh interpreter, the first changes and writes nothing."""
    others = (
        "import torch, torch.distributed, logging, hypothesis",
        "logging.getLogger('padded_dispatch').addHandler(logging.NullHandler())",
        "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), "
        "rank=0, world_size=1)",
        "sys.path.append('/nowhere')",
    )
    statements = "import padded_dispatch", "; ".join(others)
    done = subprocess.run(
        [sys.executable, "-c", "".join(REPORT.format(statement=each) for each in statements)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    changed = dict(hosts=["hypothesis"], process_group=True, handlers=1, process=False)
    assert done.stdout.splitlines() == [str(NOTHING), str(NOTHING | changed)]


def test_command_lines_import_no_torch():
    modules = "padded_dispatch", "padded_dispatch.cli", "padded_dispatch.megatron.run"
    script = f"import {', '.join(modules)}, sys; print({{'torch', 'numpy'}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


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
