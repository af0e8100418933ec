"""What is measured: summed on the device, read once per line of progress, over all ranks.

Model FLOPs: what the mathematics needs, not what a program spends on it.

What `--results` keeps of a run: time and loss of every step, measured without slowing any.

The device's clock is read from CUDA events, the host's beside them, and both only at the end.
"""

import dataclasses
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

from padded_dispatch.exchange import symmetric_memory as peak
from padded_dispatch.ops.counters import Counters
from padded_dispatch.train.settings import VOCABULARY, ModelShape, Settings
from padded_dispatch.utils.results import about, append_run


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of progress: figures of the steps since the line before.

    `loss`: mean per byte, in nats. `step_ms`: mean. `tokens_per_s`: over all ranks.
    `tflops_per_gpu`: the model's; a CPU process counts as one GPU. `fill`: kept rows per slot, and
    `dropped`: the share of rows that got no slot, over all MoE layers; None for dispatchers that do
    not count. `overflow`: rows that a plan lost; other than 0 it is a bug. `allocated_gib`,
    `reserved_gib`: peaks on rank 0's GPU.
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
    overflow: int | None
    allocated_gib: float | None
    reserved_gib: float | None


class Meter:
    """Collects what a `Row` needs. Its clock runs from the start, except inside `paused()`.

    Args:
        layers: this rank's MoE layers.
        device: where the losses are.
        tokens_per_step: over all ranks.
        flops_per_token: see `padded_dispatch.train.metrics`.
    """

    def __init__(
        self, layers: list[Any], device: torch.device, tokens_per_step: int, flops_per_token: int
    ) -> None:
        dispatchers = [layer.token_dispatcher for layer in layers]
        self._counters: list[Counters] = [d.counters for d in dispatchers if hasattr(d, "counters")]
        self._seen = torch.zeros(4, dtype=torch.float64, device=device)
        self._device = device
        self._tokens_per_step = tokens_per_step
        self._flops_per_token = flops_per_token
        self._losses: list[Tensor] = []
        self._num_steps = 0
        self._seconds = 0.0
        self._started = time.perf_counter()

    def add(self, losses: list[Tensor]) -> None:
        """Count a step: the losses of its passes, none on ranks that do not compute them."""
        self._num_steps += 1
        self._losses += losses

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock, once the device has done its work."""
        self._wait()
        self._seconds += time.perf_counter() - self._started
        yield
        self._wait()
        self._started = time.perf_counter()

    def read(self, step: int, lr: float, grad_norm: float | Tensor | None) -> Row:
        """The figures since the last call, the same on all ranks but for their memory."""
        with self.paused():
            loss_sum, num_losses, demand, kept, slots, overflow = self._sums()
            step_s = self._seconds / self._num_steps
            tokens_per_s = self._tokens_per_step / step_s
            flops_per_s = tokens_per_s * self._flops_per_token
            counts, on_gpu = demand > 0, self._device.type == "cuda"
            self._losses.clear()
            self._num_steps, self._seconds = 0, 0.0
        return Row(
            step=step,
            loss=loss_sum / num_losses,
            lr=lr,
            # A tensor from Megatron-Core 0.19, which leaves the wait for it to us.
            grad_norm=None if grad_norm is None else float(grad_norm),
            step_ms=step_s * 1e3,
            tokens_per_s=tokens_per_s,
            tflops_per_gpu=flops_per_s / dist.get_world_size() / 1e12,
            fill=kept / slots if counts else None,
            dropped=1 - kept / demand if counts else None,
            overflow=int(overflow) if counts else None,
            allocated_gib=peak.allocated_gib() if on_gpu else None,
            reserved_gib=peak.reserved_gib() if on_gpu else None,
        )

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _sums(self) -> list[float]:
        """Loss, number of losses, demand, kept, slots, overflow: of all layers and ranks.

        Whole numbers up to 2**53 are exact in fp64.
        """
        sums = torch.zeros(6, dtype=torch.float64, device=self._device)
        for loss in self._losses:
            sums[0] += loss
        sums[1] = len(self._losses)
        now = torch.zeros_like(self._seen)
        for c in self._counters:
            now += torch.stack((c.demand_E.sum(), c.kept_E.sum(), c.num_slots, c.num_unplaced))
        sums[2:] = now - self._seen
        self._seen = now
        dist.all_reduce(sums)
        return sums.tolist()


def mean_over_ranks(losses: list[Tensor], device: torch.device) -> float:
    """The mean of all ranks' losses; some may have none."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for loss in losses:
        sums[0] += loss
    sums[1] = len(losses)
    dist.all_reduce(sums)
    loss_sum, num_losses = sums.tolist()
    return loss_sum / num_losses


def flops_per_token(model: ModelShape, num_layers: int, seq_length: int) -> int:
    """FLOPs of one training step per token: forward, and twice as much backward.

    A multiplication and its addition count 2. Per layer and token, forward:

    - attention projections: `2 * D * head_size * (2 * heads + 2 * kv_groups)`
    - scores and their use: `4 * heads * head_size * S / 2`; causal attention counts half, since a
      token sees half of the S positions on average
    - router: `2 * D * E`
    - experts: `6 * D * F` for each of the K active ones, and once more with the shared width; the
      others, padded rows and dropped tokens count nothing and change nothing

    and once `2 * D * 256` for the output layer. Norms, activations, the embedding and the optimizer
    are left out. Nothing is recomputed.

    Example: D=4, 2 heads of size 2, 1 group, E=3, K=2, F=5, one layer, S=6 gives
    3 * (96 + 48 + 24 + 240 + 2048) = 7368.
    """
    width = model.hidden_size
    projections = 4 * width * model.head_size * (model.num_heads + model.num_kv_groups)
    scores = 2 * model.num_heads * model.head_size * seq_length
    router = 2 * width * model.num_experts
    active_ffn_size = model.top_k * model.expert_ffn_size + (model.shared_ffn_size or 0)
    layer = projections + scores + router + 6 * width * active_ffn_size
    return 3 * (num_layers * layer + 2 * width * VOCABULARY)


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
