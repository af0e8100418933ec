"""Worker processes on this machine, for benches, training and tests.

`start_workers` runs one function in several processes, as torchrun would. Under torchrun it only
calls the function.

A worker answers on a pipe, with a result or an exception. It stays alive after an exception, since
its peers would otherwise fail as well and hide the first cause. A dead worker closes its pipe, so
the parent detects a death without polling. The parent hosts the rendezvous store, so no port has to
be guessed.

Workers end with their parent, however and whenever that ends. On Linux the kernel kills them, also
while they import; elsewhere a thread waits for the parent's end, from the end of the imports on. A
worker sets this up before it imports anything, so the first statements of its command line are
ours. They also let SIGINT end it at once: Ctrl-C reaches all processes of a terminal, and only the
parent should report it.
"""

import ctypes
import errno
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import spawn as spawning
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from padded_dispatch.config import require
from padded_dispatch.utils.patches import Patches
from padded_dispatch.utils.signals import ending_signals, held_back, write_line

_PEERS_S = 2.0  # after the first error, time for peers to report theirs before they are stopped
_EXIT_S = 30.0  # time for a worker's exit handlers
_END_S = 3.0  # time for a worker to end after SIGTERM, and again after SIGKILL

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class WorkerError(RuntimeError):
    """At least one worker raised, died or did not answer in time.

    `errors`: by rank, in order of arrival: the worker's own exception with its traceback as a note,
    `ChildProcessError` for one that died, `TimeoutError` for one that did not answer. Workers that
    were only waiting for these ranks are not in it.
    """

    def __init__(self, errors: dict[int, BaseException]) -> None:
        self.errors = errors
        super().__init__(
            "\n".join(f"rank {r}: {_words(e)}\n{_traceback(e)}" for r, e in errors.items())
        )

    def first(self) -> int:
        """Return the rank that failed first.

        A rank that died comes before all others, since its peers fail because of it.
        """
        died = (rank for rank, e in self.errors.items() if isinstance(e, ChildProcessError))
        return next(died, next(iter(self.errors)))


def start_workers(fn: Callable[..., Any], args: tuple[Any, ...] = (), *, num_workers: int) -> Any:
    """Run a job, `fn(*args)` in `num_workers` processes, and wait for its end.

    Every worker gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as
    under torchrun; the function sets its CUDA device and creates its process groups itself. If RANK
    and WORLD_SIZE are already set, as under torchrun, this only calls the function. Call it from
    the main thread, since no other thread can handle signals.

    Args:
        fn: a function at the top level of a module; it and `args` are pickled.
        args: its arguments.
        num_workers: processes, the ranks of the job.

    Returns:
        The function's result on rank 0; under torchrun, on this rank.

    Raises:
        ValueError: the environment names a port for rendezvous that another process has.
        SystemExit: with code 1 if a worker raised or died, after its traceback and one line with
            the rank and its error on stderr; with code 128 + signal on SIGINT, SIGTERM and SIGHUP.
            Either way all workers have ended.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _require_free_port()
        return fn(*args)
    handlers = {number: signal.signal(number, _exit) for number in ending_signals()}
    try:
        workers = Workers(num_workers)
        try:
            results = workers.run(fn, args)
            workers.finish()
            return results[0]
        finally:
            workers.stop()
    except WorkerError as failure:
        rank = failure.first()
        error = failure.errors[rank]
        sys.stderr.write(_traceback(error))
        sys.stderr.write(f"rank {rank} of {num_workers} failed: {_words(error)}\n")
        raise SystemExit(1) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _require_free_port() -> None:
    """Raise on rank 0 if it cannot host the rendezvous store; torch tries for half a minute."""
    port, shared = os.environ.get("MASTER_PORT", ""), "TORCHELASTIC_USE_AGENT_STORE"
    if os.environ["RANK"] != "0" or os.environ.get(shared) == "True" or not port.isdigit():
        return
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", int(port)), family=family, dualstack_ipv6=both).close()
        taken = False
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
    fix = "set another one on all ranks, or end the process that listens on it"
    require(not taken, "MASTER_PORT", int(port), "be a free port", fix)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    for handled in ending_signals():
        signal.signal(handled, signal.SIG_IGN)  # a second Ctrl-C must not stop the stopping
    write_line(number, "stopping all workers")
    raise SystemExit(128 + number)


class Workers:
    """Processes that run functions one after another; all run the same one at a time."""

    def __init__(self, num_workers: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        try:
            # A signal in the middle of a start would leave a process that no list names.
            with held_back(), Patches() as patches:
                patches.set(spawning, "get_command_line", _with_first_statements())
                for rank in range(num_workers):
                    ours, theirs = spawn.Pipe()
                    env = torchrun_env(rank, num_workers, self._store.port)
                    # Daemons: if this process ends without stop(), it does not wait for them.
                    process = spawn.Process(target=_serve, args=(theirs, env), daemon=True)
                    process.start()
                    theirs.close()  # Otherwise the pipe would outlive the worker.
                    self._pipes.append(ours)
                    self._processes.append(process)
        except BaseException:
            self.stop()
            raise

    def run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float | None = None
    ) -> list[Any]:
        """Call `fn(*args)` on every worker and return the results by rank.

        Raises:
            WorkerError: a worker raised, died or did not answer within `timeout_s`.
        """
        request = pickle.dumps((fn, args))
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        for pipe in waiting:
            with suppress(BrokenPipeError):  # The worker died while idle; its pipe ends below.
                pipe.send_bytes(request)
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while waiting:
            left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            ready = wait(list(waiting), left)
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    returned, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    returned, value = False, self._death(rank)
                (results if returned else errors)[rank] = value
            if errors:
                deadline = min(deadline, time.monotonic() + _PEERS_S)
        if waiting and not errors:
            late = TimeoutError(f"no answer within {timeout_s} s")
            errors = dict.fromkeys(waiting.values(), late)
        if errors:
            raise WorkerError(errors)
        return [results[rank] for rank in range(len(self._pipes))]

    def finish(self) -> None:
        """Wait until idle workers have ended by themselves, exit handlers included."""
        for pipe in self._pipes:
            pipe.close()
        self._join(_EXIT_S)

    def stop(self) -> None:
        """End all workers, busy or idle."""
        for process in self._processes:
            process.terminate()
        self._join(_END_S)
        for process in self._processes:
            process.kill()
        self._join(_END_S)  # A process inside a driver's call may not end at all.

    def _join(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))

    def _death(self, rank: int) -> ChildProcessError:
        process = self._processes[rank]
        if process.exitcode is None:
            process.join(_END_S)
        code = process.exitcode
        if code is not None and code < 0:
            return ChildProcessError(f"killed by {signal.Signals(-code).name}")
        return ChildProcessError(f"exited with code {code}")


def torchrun_env(rank: int, num_workers: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun would set for a worker on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # The store exists; rank 0 must not start one.
    }


def _serve(pipe: Connection, env: dict[str, str]) -> None:
    """Answer requests until the pipe ends; the main function of a worker."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # A daemon could not have child processes, such as the writers of a checkpoint.
    multiprocessing.current_process().daemon = False
    # A child, such as a writer of a checkpoint, would keep the pipe open, and outlive this process.
    os.register_at_fork(after_in_child=pipe.close)
    os.register_at_fork(after_in_child=_die_with_parent)
    Patches().set(spawning, "get_command_line", _with_first_statements())
    os.environ.update(env)
    torch.set_num_threads(1)
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            break
        try:
            fn, args = pickle.loads(request)
            answer = pickle.dumps((True, fn(*args)))
        except BaseException as error:
            answer = _pickled(error)
        sys.stdout.flush()  # A signal may end this worker, which loses unwritten output.
        pipe.send_bytes(answer)
    if dist.is_initialized():
        dist.destroy_process_group()


def _with_first_statements() -> Callable[..., list[str]]:
    """Return `multiprocessing.spawn.get_command_line` with statements before its own."""
    get_command_line = spawning.get_command_line
    first = "import os, signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    if _libc is not None:
        first += (
            f"import ctypes; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL); "
            f"os.getppid() == {os.getpid()} or os._exit(1); "
        )

    def command_line(**values: Any) -> list[str]:
        command = get_command_line(**values)
        place = command.index("-c") + 1
        return [*command[:place], first + command[place], *command[place + 1 :]]

    return command_line


def _die_with_parent() -> None:
    """Let the kernel kill this process when the thread that forked it ends."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _pickled(error: BaseException) -> bytes:
    """Pickle `error` with its traceback, or a RuntimeError with its text if that is impossible."""
    error.add_note(traceback.format_exc())
    try:
        answer = pickle.dumps((False, error))
        pickle.loads(answer)
    except Exception:
        stand_in = RuntimeError(_words(error))
        stand_in.add_note(_traceback(error))
        answer = pickle.dumps((False, stand_in))
    return answer


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _traceback(error: BaseException) -> str:
    return "".join(getattr(error, "__notes__", ()))
