"""Run the recipes of padded_dispatch/megatron/RECIPES.md in a checkout of Megatron-LM.

    python -m tests.gpu.recipes --megatron-lm PATH --logs logs

It needs torchrun, Transformer Engine, TensorBoard and as many GPUs as `--gpus`. Each recipe of one
host runs as it stands on the page, but for the number of GPUs. After each of them its TensorBoard
file is read back: it must have our figures, with the values that are in Megatron's lines.

Each run leaves a log with its output and exit code. `summary.log` has a few lines of each run, and
what `tune` said; it is complete after every run.
"""

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.support.recipes import GRAPHS_016, GRAPHS_018, recipes

ROOT = Path(__file__).parents[2]
ONE_HOST = "one host"
TRACE = "trace"

# Figures that are in Megatron's lines and in its TensorBoard file.
FIGURES = ("moe/dropped", "moe/needed_factor", "moe/expert_overload")
_LINE = re.compile(r"iteration +(\d+)/ *(\d+) .*")
_FIGURE = re.compile(r"(moe/\w+): ([-+.\dEeinfa]+)")


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
    summaries, passed = given.logs / "summary.log", True
    summaries.write_text("")
    for name in ("eager", graphs, TRACE, ONE_HOST):
        if not given.recipes or name in given.recipes:
            wrong, text = run(name, graphs, given)
            passed &= not wrong
            sys.stdout.write(text.splitlines()[0] + "\n")
            sys.stdout.flush()
            with summaries.open("a") as file:
                file.write(f"== {text}\n")
    return 0 if passed else 1


def run(name: str, graphs: str, given: argparse.Namespace) -> tuple[list[str], str]:
    """Run a recipe, and write its log; return what is wrong, and its part of the summary.

    Args:
        name: of the recipe.
        graphs: the recipe that GRAPHS comes from.
        given: arguments of the command line.
    """
    file_name = re.sub("[^a-z0-9.]+", "_", name)
    events = (given.logs / f"{file_name}.tensorboard").absolute()
    shutil.rmtree(events, ignore_errors=True)  # Of a run before.
    blocks, num_gpus = recipes(), given.gpus if name == ONE_HOST else 1
    (array,) = re.findall(r"^GRAPHS=.*$", blocks[graphs], re.MULTILINE)
    written = f"ARGS+=(--tensorboard-dir {events})"
    block = blocks[name].replace("EP=8", f"EP={num_gpus}")
    block = f"rm -rf traces tune\n{block}" if name == TRACE else block
    mine = {
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(num_gpus))),
    }
    started, script = time.monotonic(), f"{blocks['args.sh']}\n{array}\n{written}\n{block}"
    done = subprocess.run(
        ["timeout", "-k", "10", str(given.limit), "bash", "-euxc", script],
        cwd=given.megatron_lm,
        env=os.environ | mine,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    output = f"{done.stdout}\nexit code {done.returncode}\n"
    (given.logs / f"{file_name}.log").write_text(output)
    wrong = [f"exit code {done.returncode}"] if done.returncode else []
    if not wrong:
        wrong = untrained(done.stdout) or differences(done.stdout, scalars(events))
    seconds = time.monotonic() - started
    verdict = f"FAILED: {'; '.join(wrong)}" if wrong else "ok"
    return wrong, f"{name}, {num_gpus} GPU(s), {seconds:.0f} s: {verdict}\n{summary(output)}"


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
