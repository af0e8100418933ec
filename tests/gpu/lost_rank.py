"""Lose a rank in the middle of replays of direct writes: all others end and name it."""

import itertools
import multiprocessing
import os
import re
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from tests.support.direct_parity import Layer, captured, make_inputs, my_gpu, step
from tests.support.pool import worker_env

HOW = "dies", "stalls"
START_S = 180.0  # imports of all ranks, and the capture
LIMIT_S = 60.0


def lost_rank(num_ranks: int, how: str) -> dict[str, Any]:
    """Lose the last rank; return a row with the time and the messages of the other ranks' ends.

    Only after the time limit are they killed.
    """
    started = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    left = spawn.Event()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(rank)) for rank in range(num_ranks)]
        processes = [
            spawn.Process(
                target=_replay_for_ever,
                args=(how, worker_env(rank, num_ranks, store.port), str(log), left),
                daemon=True,
            )
            for rank, log in enumerate(logs)
        ]
        for process in processes:
            process.start()
        began = left.wait(START_S)
        since = time.monotonic()
        for process in processes[:-1]:
            process.join(max(0.0, since + LIMIT_S - time.monotonic()))
        seconds_to_end = time.monotonic() - since
        ended = [process.exitcode is not None for process in processes[:-1]]
        for process in processes:
            process.kill()
            process.join()
        texts = [log.read_text(errors="replace") if log.exists() else "" for log in logs[:-1]]
    name = re.compile(rf"^.*\brank {num_ranks - 1}\b.*$", re.MULTILINE)
    words = [match[0] if (match := name.search(text)) else None for text in texts]
    passed = began and all(ended) and None not in words
    return {
        "check": "a rank is lost in the middle of replays, and all others end and name it",
        "name": f"a rank {how}",
        "ranks": num_ranks,
        "passed": passed,
        "facts": {"seconds_to_end": round(seconds_to_end, 1), "words": words},
        "failures": [] if passed else [text[-3000:] for text in texts],
        "seconds": round(time.monotonic() - started, 1),
    }


def _replay_for_ever(how: str, env: dict[str, str], log: str, left: Any) -> None:
    """Replay, while the last rank "dies" or "stalls"; the main function of a process."""
    os.environ.update(env)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    device = my_gpu()
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=45))
    layer = Layer()
    exchange, inputs = layer.direct(device), make_inputs(layer, "uniform", 0, device)
    leaves = dist.get_rank() == dist.get_world_size() - 1
    with torch.cuda.stream(torch.cuda.Stream()):
        graph, _ = captured(lambda: step(exchange, layer, inputs))
        for number in itertools.count():
            graph.replay()
            if leaves and number == 105:  # while the device still has replays to do
                left.set()
                if how == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(3600)
            if number % 10 == 0:
                torch.cuda.synchronize()
