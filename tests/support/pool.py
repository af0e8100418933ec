"""Worker processes that run functions on every rank of a group.

On CPUs, workers are forked from one process that has imported what they need, so they start at
once; CUDA does not survive a fork.
"""

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from padded_dispatch.utils.launch import torchrun_env

_START_S = 120.0  # imports and rendezvous, on a busy laptop
_PEERS_S = 2.0  # after the first error, for peers that do not wait for that rank
_context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
_context.set_forkserver_preload(["torch._dynamo", "tests.support.training"])
_groups: dict[tuple[int, ...], Any] = {}  # by their ranks


class WorkerError(RuntimeError):
    """At least one worker raised, died or did not answer in time.

    `errors`: by rank, the worker's own exception with its traceback as a note, `ChildProcessError`
    for one that died, `TimeoutError` for one that did not answer; none for ranks that only waited.
    """

    def __init__(self, errors: dict[int, BaseException]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"rank {r}: {_words(e)}" for r, e in errors.items()))


class WorkerPool:
    """Worker processes with a default process group; they start in the first `run`."""

    def __init__(self, num_workers: int, *, backend: str = "gloo") -> None:
        self.num_workers = num_workers
        self.backend = backend
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """Call `fn(*args)` on every worker and return the results by rank.

        Unless all of them raised, some may be stuck in a collective after an error: all are ended,
        and the next `run` starts new ones.
        """
        if not self._processes:
            self._start()
            self._run(_begin, (self.backend,), _START_S)
        return self._run(fn, args, timeout_s)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._pipes, self._processes = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    def _start(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):
            for rank in range(self.num_workers):
                ours, theirs = _context.Pipe()
                env = worker_env(rank, self.num_workers, self._store.port)
                process = _context.Process(target=_serve, args=(theirs, env), daemon=True)
                process.start()
                theirs.close()  # Otherwise the pipe would outlive the worker.
                self._pipes.append(ours)
                self._processes.append(process)

    def _run(self, fn: Any, args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        healthy = False
        try:
            results, errors = self._answers(fn, args, timeout_s)
            ends = ChildProcessError, TimeoutError
            raised = [e for e in errors.values() if not isinstance(e, ends)]
            healthy = not errors or len(raised) == self.num_workers
        finally:
            if not healthy:
                self.end()
        if errors:
            raise WorkerError(errors)
        return [results[rank] for rank in range(self.num_workers)]

    def _answers(self, fn: Any, args: tuple[Any, ...], timeout_s: float) -> tuple[Any, Any]:
        """Call `fn(*args)` on every worker; return results and errors, each by rank."""
        request = pickle.dumps((fn, args))
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # The worker died; its pipe ends below.
                pipe.send_bytes(request)
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    good, answer = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(_PEERS_S)
                    code = self._processes[rank].exitcode
                    died = code is not None and code < 0
                    words = f"killed by {signal.Signals(-code).name}" if died else f"code {code}"
                    good, answer = False, ChildProcessError(words)
                (results if good else errors)[rank] = answer
            if errors:
                deadline = min(deadline, time.monotonic() + _PEERS_S)
        if not errors:
            late = f"no answer within {timeout_s:g} s"
            errors = {rank: TimeoutError(late) for rank in waiting.values()}
        return results, errors


@contextmanager
def shared_groups() -> Iterator[None]:
    """Let groups of gloo that are made inside of such blocks be one per ranks, until all end.

    Megatron makes twenty for one rank. Each would have three threads, which wake up a hundred times
    a second, and need a hundredth of a second to end.
    """
    make = dist.new_group

    def group_of(ranks: list[int], backend: str | None = None, **options: Any) -> Any:
        if (backend or dist.get_backend()) != "gloo":
            return make(ranks, backend=backend, **options)
        if tuple(ranks) not in _groups:
            _groups[tuple(ranks)] = make(ranks, backend=backend, **options)
        return _groups[tuple(ranks)]

    with patch.multiple(dist, new_group=group_of, destroy_process_group=lambda group: None):
        yield


def end_groups() -> None:
    _groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def worker_env(rank: int, num_workers: int, port: int) -> dict[str, str]:
    local_rank = rank % (torch.cuda.device_count() or num_workers)
    return torchrun_env(rank, num_workers, port) | {"LOCAL_RANK": str(local_rank)}


def _serve(pipe: Connection, env: dict[str, str]) -> None:
    """Answer requests until the pipe ends; the main function of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent reports it.
    multiprocessing.current_process().daemon = False  # which could not have child processes
    os.register_at_fork(after_in_child=pipe.close)  # Such a child would keep the pipe open.
    os.environ.update(env)
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(100_000)
    with suppress(EOFError):
        while True:
            request = pipe.recv_bytes()
            try:
                fn, args = pickle.loads(request)
                answer = pickle.dumps((True, fn(*args)))
            except BaseException as error:
                answer = _pickled(error)
            pipe.send_bytes(answer)


def _begin(backend: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def forget_models() -> None:
    """Free models that tests of this process left; they hold groups, and those hold threads.

    Megatron's DDP is in a cycle through autograd's nodes, which nothing collects: a node has a
    hook of it, and its model or a graph of the stand-in keeps tensors of a step. Both are emptied.
    A cache of positions keeps embeddings.
    """
    roots = "DistributedDataParallel", "GraphedLayer"
    for thing in gc.get_objects():
        if type(thing).__name__ in roots:
            vars(thing).clear()
    if module := sys.modules.get("megatron.core.models.common.embeddings.rotary_pos_embedding"):
        for function in vars(module.RotaryEmbedding).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
    gc.collect()


def _pickled(error: BaseException) -> bytes:
    """Pickle `error` with its traceback, or a RuntimeError with its text if that is impossible."""
    error.add_note(traceback.format_exc())
    try:
        answer = pickle.dumps((False, error))
        pickle.loads(answer)
    except Exception:
        answer = pickle.dumps((False, RuntimeError(_words(error))))
    return answer


def _words(error: BaseException) -> str:
    notes = "".join(getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}\n{notes}"
