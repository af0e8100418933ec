"""What is measured: summed on the device, read once per line of progress, over all ranks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch import peak
from padded_dispatch.ops.counters import Counters


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
        flops_per_token: see `padded_dispatch.train.flops`.
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
            now += torch.stack((c.demand_E.sum(), c.kept_E.sum(), c.num_slots, c.num_overflow))
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
