"""Two torchruns on this machine that play two hosts, which share a folder: one training job.

Each worker has the name of the host that it plays, and notes which files it writes. `Hosts` starts
both torchruns; `kill` ends one of them and its workers at once, as a power cut would.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from tests.support.processes import children_of

# Python imports it at its start. It sees files that Python opens for writing or renames.
_AT_START = """
import os, socket, sys
if "RANK" in os.environ:
    name = os.environ["PLAYED_HOST"]
    socket.gethostname = lambda: name
    appends = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    notes = os.open(os.environ["NOTES"] + os.environ["RANK"], appends)
    shared = os.environ["SHARED"]

    def note(event, args):
        path = None
        if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR):
            path = args[0]
        elif event == "os.rename":
            path = args[1]
        if isinstance(path, (str, os.PathLike)):
            path = os.path.abspath(path)
            if path.startswith(shared):
                os.write(notes, f"{path}\\n".encode())

    sys.addaudithook(note)
"""
_TRAIN = (
    "train --device cpu --seq-length 24 --micro-batch 2 --lr-warmup 2 --lr-decay 8 --log-every 1 "
    "--save-every 2 --trace-every 1 --trace trace --run-dir run --tensorboard --exchange two-level"
)


class Hosts:
    """A job of two hosts with two workers each, in `folder`."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        self.shared = folder / "shared"
        self.shared.mkdir(parents=True)
        self._notes = folder / "notes-"
        (folder / "sitecustomize.py").write_text(_AT_START)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._outputs = [folder / "host0.log", folder / "host1.log"]
        paths = [str(folder), str(Path(__file__).parents[2])]
        self.processes = []
        for number, output in enumerate(self._outputs):
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join(paths),
                "OMP_NUM_THREADS": "1",
                "PLAYED_HOST": f"host{number}",
                "NOTES": str(self._notes),
                "SHARED": str(self.shared),
            }
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            command += ["--node-rank", str(number), "--nproc-per-node", "2"]
            command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
            command += ["-m", "padded_dispatch.cli", *_TRAIN.split(), "--steps", str(num_steps)]
            with output.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        cwd=self.shared,
                        env=environment,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def output(self, number: int) -> str:
        return self._outputs[number].read_text()

    def wait_for(self, words: str, limit_s: float) -> None:
        """Wait until host 0, which has rank 0, prints `words`.

        Raises:
            RuntimeError: a host ended, or time is up.
        """
        ends = time.monotonic() + limit_s
        while words not in self.output(0):
            if time.monotonic() > ends or any(one.poll() is not None for one in self.processes):
                raise RuntimeError(f"no {words!r}:\n{self.output(0)[-2000:]}")
            time.sleep(0.1)

    def kill(self, number: int) -> None:
        """Kill a torchrun and its workers."""
        process = self.processes[number]
        for pid in [process.pid, *children_of(process.pid)]:
            os.kill(pid, signal.SIGKILL)
        process.wait()

    def writers(self) -> dict[str, list[int]]:
        """Return which ranks wrote each file of the shared folder."""
        found: dict[str, set[int]] = defaultdict(set)
        for notes in self._notes.parent.glob(f"{self._notes.name}*"):
            for path in notes.read_text().splitlines():
                rank = int(notes.name.removeprefix(self._notes.name))
                found[str(Path(path).relative_to(self.shared))].add(rank)
        return {path: sorted(ranks) for path, ranks in sorted(found.items())}

    def end(self) -> None:
        """Kill what is left."""
        for number, process in enumerate(self.processes):
            if process.poll() is None:
                self.kill(number)
