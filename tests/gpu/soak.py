"""Train for 10,000 steps on GPUs with everything switched on, resume from half, write results rows.

    python -m tests.gpu.soak --out notebooks/results/reliability.json --commit SHA

One run on one GPU and, where there are two, one with direct stores: CUDA graphs of layers, growing
factors, telemetry, evaluation every 500 steps, a checkpoint at half. A copy of the run's folder
then goes on from that checkpoint. No step is lost, both runs write the same lines but for times and
memory, and the memory of the GPU and of all processes is flat over the second half.
The results file is complete after every run. `--cpu N` tries the program on N processes.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.support.gpu_rows import Rows, parsed, wants

# They differ from run to run.
_MEASURED = ("step_ms", "tokens_per_s", "tflops_per_gpu", "allocated_gib", "reserved_gib")
# Of all processes together: caches of the allocators fill slowly.
_HOST_GROWTH = 1.05
_SAMPLE_S = 2.0


def main() -> int:
    """Make all runs; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000, help="in all")
    parser.add_argument("--preset", default="tiny", help="of padded-dispatch train")
    arguments = parsed(parser)
    rows = Rows(arguments, arguments.num_gpus, {})
    rank_counts = [arguments.cpu] if arguments.cpu else [1, 2]
    for num_ranks in rank_counts:
        exchange = "direct" if num_ranks > 1 and not arguments.cpu else "auto"
        name = f"soak, EP{num_ranks}, {exchange}"
        if num_ranks <= arguments.num_ranks and wants(arguments, name):
            rows.add(_soaked(name, num_ranks, exchange, arguments))
    return rows.exit_code()


def _soaked(
    name: str, num_ranks: int, exchange: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Train, resume from half, and return the row of both runs."""
    steps = arguments.steps
    device = "cpu" if arguments.cpu else "cuda"
    graph = "none" if arguments.cpu else "layer"
    flags = (
        # With 128 positions attention has the same kernels in a graph and eagerly.
        f"--preset {arguments.preset} --seq-length 128 --steps {steps} --workers {num_ranks} "
        f"--device {device} --graph {graph} --padded-exchange {exchange} --deterministic "
        f"--log-every 1 --eval-every {max(1, steps // 20)} --save-every {steps // 2} "
        "--padded-on-overflow grow --padded-overflow-threshold 0.02 --padded-telemetry-every 10"
    ).split()
    row: dict[str, Any] = {"check": "soak", "name": name}
    row |= {"flags": flags, "steps": steps, "failures": [], "facts": None}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        whole, resumed = Path(folder, "whole"), Path(folder, "resumed")
        host_gib = _train([*flags, "--run-dir", str(whole)], row["failures"])
        half = f"step-{steps // 2:08}"
        if not row["failures"]:
            shutil.copytree(whole, resumed)
            for checkpoint in (resumed / "checkpoints").iterdir():
                if checkpoint.name != half:
                    shutil.rmtree(checkpoint)
            _train([*flags, "--run-dir", str(resumed), "--resume"], row["failures"])
        if not row["failures"]:
            row["facts"] = _compare(_lines(whole), _lines(resumed), steps, host_gib, row)
    passed = not row["failures"]
    return row | {"passed": passed, "seconds": round(time.monotonic() - started, 1)}


def _train(flags: list[str], failures: list[str]) -> list[float]:
    """Run `padded-dispatch train`; return the GiB of its processes, sampled."""
    command = [sys.executable, "-m", "padded_dispatch.cli", "train", *flags]
    with tempfile.TemporaryFile("w+") as output:
        job = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        samples: list[float] = []
        ended = threading.Event()
        sampler = threading.Thread(target=_sample, args=(job.pid, samples, ended))
        sampler.start()
        code = job.wait()
        ended.set()
        sampler.join()
        if code:
            output.seek(0)
            failures.append(f"exit code {code}\n" + output.read()[-2000:])
    return samples


def _sample(session: int, samples: list[float], ended: threading.Event) -> None:
    """Append the resident GiB of all processes of a session until the job has ended."""
    while not ended.wait(_SAMPLE_S):
        pages = 0
        for process in Path("/proc").glob("[0-9]*"):
            try:
                # The fields after the name, which may hold blanks: state, parent, group, session.
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session:
                    pages += int((process / "statm").read_text().split()[1])
            except (OSError, ValueError):
                continue  # It ended meanwhile.
        samples.append(pages * 4096 / 2**30)


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _compare(
    whole: list[dict[str, Any]],
    resumed: list[dict[str, Any]],
    steps: int,
    host_gib: list[float],
    row: dict[str, Any],
) -> dict[str, Any]:
    """Append what is wrong to the row's failures; return the facts of the run."""
    failures = row["failures"]
    trained = [line for line in whole if line["kind"] == "train"]
    if [line["step"] for line in trained] != list(range(1, steps + 1)):
        failures.append(f"steps 1 to {steps} must have one line each, got {len(trained)} lines")
    compared = [
        [{name: x for name, x in line.items() if name not in _MEASURED} for line in lines]
        for lines in (whole, resumed)
    ]
    differing = [a for a, b in zip(*compared, strict=False) if a != b]
    if len(whole) != len(resumed) or differing:
        failures.append(
            f"both runs must write the same lines, got {len(whole)} and {len(resumed)}, "
            f"the first that differs: {differing[:1]}"
        )
    second_half = trained[steps // 2 :]
    gpu_gib = sorted({line["allocated_gib"] for line in second_half})
    if len(gpu_gib) > 1:
        failures.append(f"the GPU's memory must be flat in the second half, got GiB {gpu_gib[:9]}")
    # The last sample may see workers that have ended already.
    middle, end = host_gib[len(host_gib) // 2], host_gib[-2]
    if end > middle * _HOST_GROWTH:
        failures.append(f"the host's memory must be flat, got {middle:.3f} and {end:.3f} GiB")
    return {
        "lines": len(whole),
        "evaluations": sum(line["kind"] == "held-out" for line in whole),
        "first_loss": trained[0]["loss"],
        "last_loss": trained[-1]["loss"],
        "largest_dropped": max(line["dropped"] for line in trained),
        "last_dropped": trained[-1]["dropped"],
        "gpu_gib": gpu_gib,
        "host_gib": [round(middle, 3), round(end, 3)],
        "median_step_ms": sorted(line["step_ms"] for line in trained)[steps // 2],
    }


if __name__ == "__main__":
    sys.exit(main())
