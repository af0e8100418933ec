"""The watchdog ends its process, so each case runs in a separate process."""

import subprocess
import sys

from padded_dispatch.utils.watchdog import EXIT_CODE
from tests.support.processes import ENVIRONMENT

HEADER = """
import threading
from padded_dispatch.utils.watchdog import Watchdog

def stuck_in_here():
    threading.Event().wait()

watchdog = Watchdog(0.2)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HEADER + program],
        env={**ENVIRONMENT, "RANK": "3"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_stuck_call_ends_the_process_and_prints_its_stack():
    """Work that ends in time has no effect."""
    ended = run("""
import time
for _ in range(3):
    with watchdog.watch('a capture'):
        pass
    watchdog.beat('a step')
time.sleep(0.5)
print('alive', flush=True)
with watchdog.watch('the capture'): stuck_in_here()
""")
    assert (ended.returncode, ended.stdout) == (EXIT_CODE, "alive\n")
    assert ended.stderr.startswith("rank 3: the capture did not finish in 0.2 s\n")
    assert "in stuck_in_here" in ended.stderr


def test_an_event_that_the_device_does_not_reach_ends_the_process():
    """Two fake events replace the device: the first has happened, the second never does."""
    ended = run("""
import torch
from unittest.mock import Mock

events = [Mock(**{'query.return_value': True}), Mock(**{'query.return_value': False})]
torch.cuda.is_available = lambda: True
torch.cuda.Event = lambda: events.pop(0)
watchdog.beat('step 1')
watchdog.beat('step 2')
stuck_in_here()
""")
    assert ended.returncode == EXIT_CODE
    assert ended.stderr.startswith("rank 3: step 2 did not finish in 0.2 s\n")
