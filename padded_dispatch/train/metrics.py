"""Figures of a run: loss, speed, memory, capacity, over all ranks.

`Meter` sums on the device and is read once per line of progress. `Recorder` keeps the time and the
loss of every step for the results file (`--out`) without slowing any: it reads the device's clock
from CUDA events, the host's beside them, and both only at the end. Both take losses, speed and
memory from the same functions.

FLOPs are the model's: what the mathematics needs, not what a program executes.

Letters: D hidden size, E experts, K experts per token, F expert ffn size, S bytes of a sequence.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.exchange import symmetric_memory
from padded_dispatch.ops.counters import Counters
from padded_dispatch.train.settings import VOCABULARY, ModelShape, Settings
from padded_dispatch.utils.results import about, append_run


def flops_per_token(model: ModelShape, num_layers: int, seq_length: int) -> int:
    """Return a training step's model FLOPs per token: forward, and twice as much backward.

    A multiplication and its addition count 2. Per layer and token, forward:

    - attention projections: `2 * D * head_size * (2 * heads + 2 * kv_groups)`
    - scores and their use: `4 * heads * head_size * S / 2`; attention is causal, and a token sees
      half of the S positions on average
    - router: `2 * D * E`
    - experts: `6 * D * F` for each of the K active ones, and once more with the shared width;
      idle experts, padded rows and dropped tokens change nothing

    and once `2 * D * 256` for the output layer. Norms, activations, the embedding, the optimizer
    and recomputation do not count.

    Example: D=4, 2 heads of size 2, 1 group, E=3, K=2, F=5, one layer, S=6 gives
    3 * (96 + 48 + 24 + 240 + 2048) = 7368.
    """
    width = model.hidden_size
    projections = 4 * width * model.head_size * (model.num_heads + model.num_kv_groups)
    scores = 2 * model.num_heads * model.head_size * seq_length
    router = 2 * width * model.num_experts
    active_ffn_size = model.top_k * model.ffn_size + (model.shared_ffn_size or 0)
    layer = projections + scores + router + 6 * width * active_ffn_size
    return 3 * (num_layers * layer + 2 * width * VOCABULARY)


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The work of one step over all ranks: tokens, and the model's FLOPs."""

    tokens: int
    flops: int

    @classmethod
    def of(cls, settings: Settings) -> "StepWork":
        """Return the work of a run's step."""
        recipe = settings.recipe
        tokens = recipe.global_batch * recipe.seq_length
        per_token = flops_per_token(settings.model, recipe.num_layers, recipe.seq_length)
        return cls(tokens=tokens, flops=tokens * per_token)

    def speed(self, step_s: float) -> dict[str, float]:
        """Return `tokens_per_s` over all ranks, and `tflops_per_gpu`, at `step_s` seconds a step.

        A CPU process counts as one GPU.
        """
        return {
            "tokens_per_s": self.tokens / step_s,
            "tflops_per_gpu": self.flops / step_s / dist.get_world_size() / 1e12,
        }


def peak_memory(device: torch.device) -> dict[str, Any]:
    """Return the peaks `allocated_gib` and `reserved_gib` of this rank's GPU; None on a CPU."""
    if device.type == "cpu":
        return {"allocated_gib": None, "reserved_gib": None}
    return {
        "allocated_gib": symmetric_memory.allocated_gib(),
        "reserved_gib": symmetric_memory.reserved_gib(),
    }


def sum_of_losses(losses: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum and the number of this rank's losses, fp64 [2] on `device`, without a wait."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for loss in losses:
        total += loss
    return torch.stack((total, torch.full_like(total, len(losses))))


def mean_over_ranks(losses: list[Tensor], device: torch.device) -> float:
    """Return the mean loss over all ranks; some ranks may have no losses."""
    sums = sum_of_losses(losses, device)
    dist.all_reduce(sums)
    loss_sum, num_losses = sums.tolist()
    return loss_sum / num_losses


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of progress: figures of the steps since the line before.

    `loss`: mean per byte, in nats. `step_ms`: mean. `tokens_per_s`, `tflops_per_gpu`: see
    `StepWork.speed`. `fill`: kept rows per slot, and `dropped`: share of rows without a slot, over
    all MoE layers; None if the dispatcher does not count. `unplaced`: rows that a plan lost, which
    must be 0. `retried`: steps that ran twice because of drops; None if the run repeats none.
    `allocated_gib`, `reserved_gib`: peaks on rank 0's GPU.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    step_ms: float
    tokens_per_s: float
    tflops_per_gpu: float
    fill: float | None
    dropped: float | None
    unplaced: int | None
    retried: int | None
    allocated_gib: float | None
    reserved_gib: float | None


class Meter:
    """Collects the figures of a `Row`. Its clock runs from the start, except inside `paused()`.

    Args:
        layers: this rank's MoE layers.
        device: device of the losses.
        work: work of one step.
    """

    def __init__(self, layers: list[Any], device: torch.device, work: StepWork) -> None:
        dispatchers = [layer.token_dispatcher for layer in layers]
        self._counters: list[Counters] = [d.counters for d in dispatchers if hasattr(d, "counters")]
        self._seen = torch.zeros(4, dtype=torch.float64, device=device)
        self._device = device
        self._work = work
        self._losses: list[Tensor] = []
        self._num_steps = 0
        self._num_retried: int | None = None
        self._seconds = 0.0
        self._started = time.perf_counter()

    def add(self, losses: list[Tensor], retried: bool | None = None) -> None:
        """Count a step.

        Args:
            losses: those of this rank's passes, which may be none.
            retried: whether it ran twice; None if the run repeats no step.
        """
        self._num_steps += 1
        self._losses += losses
        if retried is not None:
            self._num_retried = (self._num_retried or 0) + retried

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock once the device has finished its work."""
        self._wait()
        self._seconds += time.perf_counter() - self._started
        yield
        self._wait()
        self._started = time.perf_counter()

    def read(self, step: int, lr: float, grad_norm: float | Tensor | None) -> Row:
        """Return the figures since the last call; all ranks get the same, except for memory."""
        with self.paused():
            loss_sum, num_losses, demand, kept, slots, unplaced = self._sums()
            step_s = self._seconds / self._num_steps
            counts = demand > 0
            retried = self._num_retried
            self._losses.clear()
            self._num_steps, self._num_retried, self._seconds = 0, None, 0.0
        return Row(
            step=step,
            loss=loss_sum / num_losses,
            lr=lr,
            # Megatron-Core 0.19 returns a tensor that has not been waited for.
            grad_norm=None if grad_norm is None else float(grad_norm),
            step_ms=step_s * 1e3,
            **self._work.speed(step_s),
            fill=kept / slots if counts else None,
            dropped=1 - kept / demand if counts else None,
            unplaced=int(unplaced) if counts else None,
            retried=retried,
            **peak_memory(self._device),
        )

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _sums(self) -> list[float]:
        """Sum loss, number of losses, demand, kept, slots, unplaced over all layers and ranks.

        Whole numbers up to 2**53 are exact in fp64.
        """
        now = torch.zeros_like(self._seen)
        for c in self._counters:
            now += torch.stack((c.demand_E.sum(), c.kept_E.sum(), c.num_slots, c.num_unplaced))
        sums = torch.cat((sum_of_losses(self._losses, self._device), now - self._seen))
        self._seen = now
        dist.all_reduce(sums)
        return sums.tolist()


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
    """Return the columns of a results row that name the contender, its model and its graph."""
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


def about_run(settings: Settings, *, num_jobs: int = 1) -> dict[str, Any]:
    """Return the metadata of a results file for `num_jobs` such runs side by side."""
    layout = settings.layout
    num_gpus = layout.workers if layout.device == "cuda" else 0
    if num_jobs > 1:  # All of them are on this machine, and may share its GPUs.
        num_gpus = min(num_gpus * num_jobs, torch.cuda.device_count())
    return about(
        num_gpus=num_gpus,
        command=" ".join(["padded-dispatch", *sys.argv[1:]]),
        commit=settings.output.commit,
    )


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A moment on the host, and the same point of the device's stream."""

    host_s: float
    event: torch.cuda.Event | None


def mark(device: torch.device) -> Mark:
    """Record host time and, on a GPU, a CUDA event."""
    event = None
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
    return Mark(host_s=time.perf_counter(), event=event)


@dataclass(frozen=True, kw_only=True)
class StepMarks:
    """Start of a step, end of its passes with the gradients' reduction, end of the step."""

    start: Mark
    passed: Mark
    done: Mark


class Recorder:
    """Records every step of a run and writes one row. All ranks must call all methods.

    Construct it before the model: the row reports the memory allocated by then, which is no part
    of the run, and the run's own peaks from then on.

    Args:
        settings: settings with a results file (`out`).
        device: device of the run.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self._marks: list[StepMarks] = []
        self._losses: list[Tensor] = []
        self._started = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._allocated_before_gib = peak_memory(device)["allocated_gib"]

    def add(self, marks: StepMarks, losses: list[Tensor]) -> None:
        """Record a step. A rank that computes no loss passes none."""
        self._marks.append(marks)
        self._losses.append(sum_of_losses(losses, self._device))

    def write(self, **figures: Any) -> None:
        """Append the run as one row to the results file.

        Times are medians over the second half of the steps.

        Args:
            figures: further columns.
        """
        sums = torch.stack(self._losses)
        dist.all_reduce(sums)
        losses = (sums[:, 0] / sums[:, 1]).tolist()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        if dist.get_rank() == 0:
            settings = self._settings
            assert settings.output.out is not None
            append_run(settings.output.out, about_run(settings), [self._row(losses) | figures])

    def _row(self, losses: list[float]) -> dict[str, Any]:
        settings = self._settings
        steady = self._marks[len(self._marks) // 2 :]
        samples = [_device_ms(step.start, step.done) for step in steady]
        ms = statistics.median(samples)
        return {
            **identity(settings),
            "variant": None,
            "flags": settings.as_json("recipe", "dispatch", "layout"),
            "ms": ms,
            "samples_ms": samples,
            "phases_ms": {
                "passes": statistics.median(_device_ms(s.start, s.passed) for s in steady),
                "optimizer": statistics.median(_device_ms(s.passed, s.done) for s in steady),
            },
            # Of the passes alone: the optimizer waits for the device.
            "host_ms": statistics.median((s.passed.host_s - s.start.host_s) * 1e3 for s in steady),
            "floor_ms": None,
            **StepWork.of(settings).speed(ms / 1e3),
            "allocated_before_gib": self._allocated_before_gib,
            **peak_memory(self._device),
            "seconds": time.perf_counter() - self._started,
            "loss": losses,
        }


def _device_ms(start: Mark, end: Mark) -> float:
    """Return milliseconds between two marks, by the device's clock if there is one."""
    if start.event is None or end.event is None:
        return (end.host_s - start.host_s) * 1e3
    return start.event.elapsed_time(end.event)
