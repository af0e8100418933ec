"""What `--results` keeps of a run: time and loss of every step, measured without slowing any.

The device's clock is read from CUDA events, the host's beside them, and both only at the end.
"""

import dataclasses
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch import peak
from padded_dispatch.train.flops import flops_per_token
from padded_dispatch.train.settings import Settings
from padded_dispatch.utils.results import about, append_run

_CONTENDERS = {
    "padded_alltoall": "ours",
    "allgather": "stock-allgather",
    "alltoall": "stock-dropless",
    "alltoall-drop-pad": "stock-drop-pad",
}
_IMPLS = {
    "none": None,
    "partial": "transformer_engine",
    "layer": "transformer_engine",
    "full-iteration": "full_iteration",
}


def identity(settings: Settings) -> dict[str, Any]:
    """What a row of a results file says first of a run: whose, of what, and captured how."""
    recipe, dispatch, graph = settings.recipe, settings.dispatch, settings.output.graph
    return {
        "model": settings.preset,
        "ep": settings.layout.ep,
        "tokens": recipe.micro_batch * recipe.seq_length,
        "capacity_factor": dispatch.capacity_factor,
        "skew": None,
        "contender": _CONTENDERS[dispatch.dispatcher],
        "graph": graph,
        "graph_impl": _IMPLS[graph],
    }


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A moment: on the host, and on the device once it comes to this point of its stream."""

    host_s: float
    event: torch.cuda.Event | None


def mark(device: torch.device) -> Mark:
    """Now."""
    event = None
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
    return Mark(host_s=time.perf_counter(), event=event)


@dataclass(frozen=True, kw_only=True)
class StepMarks:
    """Start of a step, end of its passes and of the gradients' reduction, end of the step."""

    start: Mark
    passed: Mark
    done: Mark


class Recorder:
    """Keeps every step of a run, and writes them down. All methods are for all ranks.

    To be made before the model: what is allocated by then is no part of the run, and the row says
    how much it is. Peaks are the run's own, from here on.

    Args:
        settings: with a `results` file.
        device: of the run.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self._marks: list[StepMarks] = []
        self._losses: list[Tensor] = []
        self._started = time.perf_counter()
        self._allocated_before_gib: float | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._allocated_before_gib = peak.allocated_gib()

    def add(self, marks: StepMarks, losses: list[Tensor]) -> None:
        """Keep a step. Ranks that compute no loss have none."""
        self._marks.append(marks)
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for loss in losses:
            sums += torch.stack([loss.double(), torch.ones_like(loss, dtype=torch.float64)])
        self._losses.append(sums)

    def write(self, **figures: Any) -> None:
        """Append the run as one row to the results file.

        Times are medians over the second half of the steps.

        Args:
            figures: what else is known of the run.
        """
        sums = torch.stack(self._losses)
        dist.all_reduce(sums)
        losses = (sums[:, 0] / sums[:, 1]).tolist()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        if dist.get_rank() == 0:
            path = self._settings.output.results
            assert path is not None
            append_run(path, self._about(), [self._row(losses) | figures])

    def _row(self, losses: list[float]) -> dict[str, Any]:
        settings = self._settings
        recipe, layout = settings.recipe, settings.layout
        steady = self._marks[len(self._marks) // 2 :]
        samples = [_device_ms(step.start, step.done) for step in steady]
        ms = statistics.median(samples)
        tokens_per_s = recipe.global_batch * recipe.seq_length / ms * 1e3
        flops = flops_per_token(settings.model, recipe.num_layers, recipe.seq_length)
        on_gpu = self._device.type == "cuda"
        return {
            **identity(settings),
            "variant": None,
            "flags": {
                group: dataclasses.asdict(getattr(settings, group))
                for group in ("recipe", "dispatch", "layout")
            },
            "ms": ms,
            "samples_ms": samples,
            "phases_ms": {
                "passes": statistics.median(_device_ms(s.start, s.passed) for s in steady),
                "optimizer": statistics.median(_device_ms(s.passed, s.done) for s in steady),
            },
            # Of the passes alone: the optimizer waits for the device.
            "host_ms": statistics.median((s.passed.host_s - s.start.host_s) * 1e3 for s in steady),
            "floor_ms": None,
            "tokens_per_s": tokens_per_s,
            "tflops_per_gpu": tokens_per_s * flops / layout.workers / 1e12,
            "allocated_before_gib": self._allocated_before_gib,
            "allocated_gib": peak.allocated_gib() if on_gpu else None,
            "reserved_gib": peak.reserved_gib() if on_gpu else None,
            "seconds": time.perf_counter() - self._started,
            "loss": losses,
        }

    def _about(self) -> dict[str, Any]:
        layout = self._settings.layout
        return about(
            num_gpus=layout.workers if layout.device == "cuda" else 0,
            command=" ".join(["padded-dispatch", *sys.argv[1:]]),
            commit=self._settings.output.commit,
        )


def _device_ms(start: Mark, end: Mark) -> float:
    """Between two moments on the device, where there is one."""
    if start.event is None or end.event is None:
        return (end.host_s - start.host_s) * 1e3
    return start.event.elapsed_time(end.event)
