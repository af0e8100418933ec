"""Worker processes on this machine, by torch's own launcher: `torch.multiprocessing`.

No worker outlives the parent. Ctrl-C reaches all processes of a terminal, but workers start with
SIGINT blocked. Only the parent reports it, and ends the workers by SIGTERM, which also works while
they import. If the parent is killed, the kernel (Linux) kills the workers.
"""

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from padded_dispatch.utils.logs import torchrun_ranks

_END_S = 3.0  # time for a worker to end after SIGTERM, and for peers of one that failed
_STDERR = 2


def start_workers(fn: Callable[..., Any], args: tuple[Any, ...] = (), *, num_workers: int) -> Any:
    """Run `fn(*args)`, which are pickled, in `num_workers` processes, and wait for their end.

    Workers have the environment of torchrun; the function must set its CUDA device and create its
    process groups. Under torchrun this only calls the function. Call it from the main thread, since
    no other thread can handle signals.

    Returns:
        The function's result on rank 0; under torchrun, on this rank.

    Raises:
        SystemExit: with code 1 if a worker raised or died, after its rank and traceback on stderr;
            with code 128 + signal on SIGINT, SIGTERM and SIGHUP. Either way all workers have ended.
    """
    if torchrun_ranks()[1]:
        return fn(*args)
    # SIGHUP stays ignored under nohup.
    ends = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    handlers = {s: signal.getsignal(s) for s in ends if signal.getsignal(s) is not signal.SIG_IGN}
    earlier = set(multiprocessing.active_children())
    # The parent hosts the store of the rendezvous, so no port has to be guessed.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Hide torch's log lines about the processes that it ends after an error.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with TemporaryDirectory(prefix="padded-dispatch-") as folder:
        try:
            for number in handlers:
                signal.signal(number, _exit)
            resource_tracker.ensure_running()  # Starting it later would unblock SIGINT.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # Workers inherit it.
            work_args = fn, args, num_workers, store.port, folder
            context = start_processes(_work, work_args, nprocs=num_workers, join=False, daemon=True)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            assert context is not None
            # A signal that comes just before a wait is handled after it, so waits are short.
            while not context.join(timeout=1.0, grace_period=_END_S):
                pass
            return pickle.loads(Path(folder, "result").read_bytes())
        except ProcessExitedException as ended:
            sys.stderr.write(f"{_failure_message(ended, Path(folder), num_workers)}\n")
            raise SystemExit(1) from None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            _end(set(multiprocessing.active_children()) - earlier)
            for number, handler in handlers.items():
                signal.signal(number, handler)


def torchrun_env(rank: int, num_workers: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun would set for a worker on this machine.

    `port`: of the store of the rendezvous, which the parent hosts.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # The store exists; rank 0 must not start one.
    }


def _work(
    rank: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    num_workers: int,
    port: int,
    folder: str,
) -> None:
    """Run a worker from start to end, and leave its result or its error in `folder`."""
    die_with_parent: Any = vars(torch.multiprocessing)["_prctl_pr_set_pdeathsig"]
    die_with_parent(signal.SIGKILL)  # torch has set SIGINT, which is blocked.
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():  # It ended before the line above.
        os._exit(1)
    os.environ |= torchrun_env(rank, num_workers, port)
    torch.set_num_threads(1)
    try:
        result = fn(*args)
    except BaseException:
        text = traceback.format_exc()
        try:
            Path(folder, f"error-{rank}").write_text(text)
            sys.stdout.flush()
        except OSError:  # The disk is full, which may be the error.
            sys.stderr.write(text)
        finally:
            os._exit(1)  # At once, since destroying a group that peers still use can block.
    if rank == 0:
        Path(folder, "result").write_bytes(pickle.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


def _failure_message(ended: ProcessExitedException, folder: Path, num_workers: int) -> str:
    """Return an error with the rank that failed first, and why; its peers fail because of it."""
    rank, error = ended.error_index, f" exited with code {ended.exit_code}"
    error_files = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    if ended.signal_name is not None:
        error = f" killed by {ended.signal_name}"
    elif folder / f"error-{rank}" in error_files:
        rank = int(error_files[0].name.removeprefix("error-"))
        error = f"\n{error_files[0].read_text().strip()}"
    return f"rank {rank} of {num_workers} failed:{error}"


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    for handled in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(handled, signal.SIG_IGN)  # A second Ctrl-C must not stop the stopping.
    # sys.stderr raises if a signal interrupts one of its own writes.
    os.write(_STDERR, f"{signal.Signals(number).name}: stopping all workers\n".encode())
    raise SystemExit(128 + number)


def _end(workers: set[BaseProcess]) -> None:
    """End workers, rank 0 before its peers, since it may need them to write its results."""
    # In the order in which they were started. The system's numbers of processes begin again.
    first_to_last = sorted(workers, key=lambda worker: worker._identity)
    deadline = time.monotonic() + _END_S
    for together in (first_to_last[:1], first_to_last[1:]):
        for worker in together:
            worker.terminate()
        for worker in together:
            worker.join(max(0.0, deadline - time.monotonic()))
            worker.kill()  # SIGTERM does not end it inside of a driver call.
            worker.join(_END_S)
