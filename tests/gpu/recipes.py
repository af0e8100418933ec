"""Run the recipes of padded_dispatch/megatron/RECIPES.md in a checkout of Megatron-LM.

    python -m tests.gpu.recipes --megatron-lm PATH --logs logs

It needs torchrun, Transformer Engine, TensorBoard and as many GPUs as `--gpus`. Each recipe of one
host runs as it stands on the page, but for the number of GPUs. The block that `padded-dispatch
tune` printed about the recorded trace is then pasted and run. After each of them its TensorBoard
file is read back: it must have our figures, with the values that are in Megatron's lines.

With two GPUs or more, recipes for one GPU run in two lanes, each on a GPU of its own; every run has
a port of its own. Each leaves a log with its output and exit code. `summary.log` has a few lines of
each run, and what `tune` said; it is complete after every run.
"""

import argparse
import html
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.support.recipes import GRAPHS_016, GRAPHS_018, recipes

ROOT = Path(__file__).parents[2]
PASTED = "pasted"
ONE_HOST = "one host"
TRACE = "trace"

# Figures that are in Megatron's lines and in its TensorBoard file.
FIGURES = ("moe/dropped", "moe/fill", "moe/needed_factor", "moe/expert_overload")
_LINE = re.compile(r"iteration +(\d+)/ *(\d+) .*")
_FIGURE = re.compile(r"(moe/\w+): ([-+.\dEeinfa]+)")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A recipe, and the GPUs that it may see."""

    name: str
    gpus: tuple[int, ...]


def main(argv: list[str]) -> int:
    """Run the recipes; return 0 if all of them trained to their last iteration."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.recipes", description=__doc__)
    parser.add_argument("--megatron-lm", type=Path, required=True, help="checkout of Megatron-LM")
    parser.add_argument("--logs", type=Path, required=True, help="folder for the logs")
    parser.add_argument("--gpus", type=int, default=1, help="of the recipe for one host")
    parser.add_argument("--limit", type=int, default=150, help="seconds that a run may take")
    parser.add_argument("--recipes", nargs="+", help="names (None: those for its version)")
    given = parser.parse_args(argv)
    given.logs.mkdir(parents=True, exist_ok=True)
    config = given.megatron_lm / "megatron" / "core" / "transformer" / "transformer_config.py"
    graphs = GRAPHS_018 if "cuda_graph_modules" in config.read_text() else GRAPHS_016
    runs = _Runs(given, graphs)
    for lanes in schedule(graphs, given.gpus, given.recipes):
        with ThreadPoolExecutor(len(lanes)) as pool:
            list(pool.map(runs.lane, lanes))
    return 0 if runs.passed else 1


def schedule(graphs: str, num_gpus: int, only: list[str] | None) -> list[list[list[Job]]]:
    """Return stages, one after the other; each has lanes beside each other, of jobs in their order.

    Args:
        graphs: the recipe with graphs of the version.
        num_gpus: of the recipe for one host.
        only: names; None for all.
    """
    second = min(1, num_gpus - 1)
    lanes = [
        [Job(name=name, gpus=(0,)) for name in ("eager", graphs)],
        [Job(name=name, gpus=(second,)) for name in (TRACE, PASTED)],
    ]
    if num_gpus == 1:
        lanes = [lanes[0] + lanes[1]]
    stages = [lanes, [[Job(name=ONE_HOST, gpus=tuple(range(num_gpus)))]]]
    wanted = [[[j for j in lane if not only or j.name in only] for lane in s] for s in stages]
    return [found for stage in wanted if (found := [lane for lane in stage if lane])]


class _Runs:
    """Runs of recipes, some of them beside each other.

    Attributes:
        passed: all runs so far trained to their end, and wrote what they should.

    Args:
        given: arguments of the command line.
        graphs: the recipe that GRAPHS comes from.
    """

    def __init__(self, given: argparse.Namespace, graphs: str) -> None:
        self.passed = True
        self._given = given
        self._graphs = graphs
        self._writing = threading.Lock()
        self._summary = given.logs / "summary.log"
        self._summary.write_text("")

    def lane(self, jobs: list[Job]) -> None:
        """Run jobs, one after the other."""
        for job in jobs:
            self._run(job)

    def _run(self, job: Job) -> None:
        name, logs = re.sub("[^a-z0-9.]+", "_", job.name), self._given.logs
        events = logs / f"{name}.tensorboard"
        shutil.rmtree(events, ignore_errors=True)  # Of a run before.
        started = time.monotonic()
        try:
            script = self._script(job, events.absolute())
        except FileNotFoundError as error:  # `trace` has failed.
            self._report(job, [f"no settings to paste: {error}"], "", 0.0)
            return
        gpus = ",".join(map(str, job.gpus))
        mine = {
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "CUDA_VISIBLE_DEVICES": gpus,
            "PET_MASTER_PORT": str(_free_port()),  # What torchrun takes for --master-port.
        }
        done = subprocess.run(
            ["timeout", "-k", "10", str(self._given.limit), "bash", "-euxc", script],
            cwd=self._given.megatron_lm,
            env=os.environ | mine,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        output = f"{done.stdout}\nexit code {done.returncode}\n"
        (logs / f"{name}.log").write_text(output)
        wrong = [f"exit code {done.returncode}"] if done.returncode else []
        if not wrong:
            wrong = untrained(done.stdout) or differences(done.stdout, scalars(events))
        self._report(job, wrong, output, time.monotonic() - started)

    def _script(self, job: Job, events: Path) -> str:
        """Return what bash runs: the arrays of the page, where TensorBoard writes, the recipe."""
        blocks = recipes()
        (array,) = re.findall(r"^GRAPHS=.*$", blocks[self._graphs], re.MULTILINE)
        if job.name == PASTED:
            block = _pasted(self._given.megatron_lm)
        else:
            block = blocks[job.name].replace("EP=8", f"EP={self._given.gpus}")
        if job.name == TRACE:
            block = f"rm -rf traces tune\n{block}"
        written = f"ARGS+=(--tensorboard-dir {events})"
        return f"{blocks['args.sh']}\n{array}\n{written}\n{block}"

    def _report(self, job: Job, wrong: list[str], output: str, seconds: float) -> None:
        """Print a job's result, and add it to the summary."""
        with self._writing:
            self.passed &= not wrong
            verdict = f"FAILED: {'; '.join(wrong)}" if wrong else "ok"
            text = f"{job.name}, {len(job.gpus)} GPU(s), {seconds:.0f} s: {verdict}\n"
            sys.stdout.write(text)
            sys.stdout.flush()
            with self._summary.open("a") as file:
                file.write(f"== {text}{summary(output)}\n")


def summary(output: str) -> str:
    """Return the first, middle and last line of a step, what `tune` said, and the exit code."""
    lines = [line.strip() for line in output.splitlines()]
    steps = [line for line in lines if _LINE.search(line)]
    kept = [steps[i] for i in sorted({0, len(steps) // 2, len(steps) - 1})] if steps else []
    starts = [i for i, line in enumerate(lines) if line.startswith("+ padded-dispatch tune")]
    kept += lines[starts[0] : -1] if starts else []
    return "".join(f"{line}\n" for line in [*kept, *lines[-1:]])


def untrained(output: str) -> list[str]:
    """Return what is wrong if a run did not log its last iteration; else nothing."""
    found = _LINE.findall(output)
    if found and found[-1][0] == found[-1][1]:
        return []
    return [f"the last iteration in the log is {found[-1] if found else None}"]


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return what TensorBoard finds in a folder: values by name and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}


def differences(output: str, found: dict[str, dict[int, float]]) -> list[str]:
    """Compare a TensorBoard file with Megatron's lines; return what is wrong.

    A reading has a value in the file at the step that it is about. The lines from there on have
    it, too, with seven digits, until the next one; 0.16.1 leaves out zeros.

    Args:
        output: of the run.
        found: the result of `scalars`.
    """
    missing = [name for name in FIGURES if not found.get(name)]
    if missing:
        return [f"not in the TensorBoard file: {missing}"]
    wrong, current = [], dict.fromkeys(FIGURES, math.nan)
    for line in _LINE.finditer(output):
        step, shown = int(line[1]), dict(_FIGURE.findall(line[0]))
        for name in FIGURES:
            current[name] = found[name].get(step, current[name])
            if not math.isnan(current[name]):
                given = float(shown.get(name, 0))
                if not math.isclose(given, current[name], rel_tol=1e-6):
                    wrong.append(f"{name} of step {step}: {given} in the line, {current[name]}")
    return wrong[:5]


def _pasted(checkout: Path) -> str:
    """Return the block for Megatron-LM that `padded-dispatch tune` wrote, as it stands."""
    text = (checkout / "tune.html").read_text()
    return html.unescape(re.findall(r"<pre>(.*?)</pre>", text, re.DOTALL)[0])


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
