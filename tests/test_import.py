"""`import padded_dispatch` needs only torch and NumPy, and has no side effects."""

import subprocess
import sys

import pytest

from tests.support.ahead import ENVIRONMENT

pytestmark = pytest.mark.ahead

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


def effects_of(statement: str) -> str:
    """Return what `statement` changes in a fresh interpreter, and everything it writes."""
    script = REPORT.format(statement=statement)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_importing_has_no_side_effects():
    assert effects_of("import padded_dispatch") == str(NOTHING)


def test_side_effects_are_found():
    statements = (
        "import padded_dispatch, torch, torch.distributed, logging, hypothesis",
        "logging.getLogger('padded_dispatch').addHandler(logging.NullHandler())",
        "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), "
        "rank=0, world_size=1)",
        "sys.path.append('/nowhere')",
    )
    changed = dict(hosts=["hypothesis"], process_group=True, handlers=1, process=False)
    assert effects_of("; ".join(statements)) == str(NOTHING | changed)
