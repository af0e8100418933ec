"""Figures of a run over all ranks: the lines of progress, and the row of a results file.

Losses and times of steps stay on the device, as tensors and CUDA events, until a line is due: no
step waits for the host between two lines.
"""

import statistics
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.exchange import symmetric_memory
from padded_dispatch.train.model import fusions
from padded_dispatch.train.settings import Settings
from padded_dispatch.utils.results import about, append_run

_CONTENDERS = {
    "padded_alltoall": "ours",
    "allgather": "stock-allgather",
    "alltoall": "stock-dropless",
    "alltoall-drop-pad": "stock-drop-pad",
}


def now() -> torch.cuda.Event:
    """Return an event of now; on a CPU the one of `megatron_on_cpu`, which has the host's time."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step: losses of this rank's passes, its learning rate, and when it began and ended.

    `host_ms`: of the passes alone: the optimizer waits for the device. `retried`: whether it ran
    twice; None if the run repeats no step.
    """

    losses: list[Tensor]
    lr: float
    retried: bool | None
    start: torch.cuda.Event
    done: torch.cuda.Event
    host_ms: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """Figures of the steps since the row before, over all ranks.

    `loss`: mean per byte, in nats. `step_ms`: mean. `dropped`: share of rows without a slot over
    all MoE layers, of a step before it was repeated; None if the dispatcher does not count.
    `retried`: steps that ran twice because of drops; None if the run repeats none.
    """

    step: int
    loss: float
    lr: float
    step_ms: float
    tokens_per_s: float
    retried: int | None
    dropped: float | None = None

    def line(self, num_steps: int) -> str:
        """Return the row as text.

        Example: step 20/200 | loss 3.0123 | lr 5.0e-03 | 41.5 ms | 9,876 tokens/s | dropped 4.1%.
        """
        parts = [
            f"step {self.step:>{len(str(num_steps))}}/{num_steps}",
            f"loss {self.loss:.4f}",
            f"lr {self.lr:.1e}",
            f"{self.step_ms:.1f} ms",
            f"{self.tokens_per_s:,.0f} tokens/s",
        ]
        if self.dropped is not None:
            parts.append(f"dropped {self.dropped:.1%}")
        if self.retried is not None:
            parts.append(f"retried {self.retried}")
        return " | ".join(parts)


def mean_over_ranks(losses: list[Tensor], device: torch.device) -> float:
    """Return the mean loss over all ranks; some ranks may have no losses."""
    sums = _sums(losses, device)
    dist.all_reduce(sums)
    loss_sum, num_losses = sums.tolist()
    return loss_sum / num_losses


def _sums(losses: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum and the number of this rank's losses, fp64 [2] on `device`, without a wait."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack((sum(losses, zero), zero + len(losses)))


class Meter:
    """Records the steps of a run. All ranks must call all methods.

    Construct it before the model, whose peaks of memory are counted from then on.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._settings, self._device = settings, device
        self._steps: list[Step] = []
        self._num_read = 0
        if device.type == "cuda":
            symmetric_memory.reset_peaks()

    def add(self, step: Step) -> None:
        """Record a step."""
        self._steps.append(step)

    def read(self) -> Row:
        """Return the figures since the last call, the same on all ranks; waits for the device."""
        steps, self._num_read = self._steps[self._num_read :], len(self._steps)
        steps[-1].done.synchronize()
        step_ms = statistics.mean(step.start.elapsed_time(step.done) for step in steps)
        retried = [step.retried for step in steps if step.retried is not None]
        return Row(
            step=len(self._steps),
            loss=mean_over_ranks([loss for step in steps for loss in step.losses], self._device),
            lr=steps[-1].lr,
            step_ms=step_ms,
            tokens_per_s=_tokens(self._settings) / step_ms * 1e3,
            retried=sum(retried) if retried else None,
        )

    def write(self, rows: list[Row], evaluations: dict[int, float], pool: str | None) -> None:
        """Append the run as one row to its results file; `pool`: which rows shared room.

        `loss` has every step; `step` and `dropped` are those of the lines of progress, and times
        are of the second half of the steps.
        """
        sums = torch.stack([_sums(step.losses, self._device) for step in self._steps])
        dist.all_reduce(sums)
        losses = (sums[:, 0] / sums[:, 1]).tolist()
        settings = self._settings
        recipe, dispatch, output = settings.recipe, settings.dispatch, settings.output
        if dist.get_rank() != 0 or output.out is None:
            return
        steady = self._steps[len(self._steps) // 2 :]
        samples = [step.start.elapsed_time(step.done) for step in steady]
        ms, on_gpu = statistics.median(samples), self._device.type == "cuda"
        row = {
            "model": settings.preset,
            "ep": settings.layout.ep,
            "tokens": recipe.micro_batch * recipe.seq_length,
            "capacity_factor": dispatch.capacity_factor,
            "contender": _CONTENDERS[dispatch.dispatcher],
            "graph": output.graph,
            "seed": recipe.seed,
            "flags": settings.flags(),
            "fusions": fusions(settings),
            "pool": pool,
            "ms": ms,
            "samples_ms": samples,
            "host_ms": statistics.median(step.host_ms for step in steady),
            "tokens_per_s": _tokens(settings) / ms * 1e3,
            "allocated_gib": symmetric_memory.allocated_gib() if on_gpu else None,
            "loss": losses,
            **{name: [getattr(r, name) for r in rows] for name in ("step", "dropped")},
            "held_out": {"step": list(evaluations), "loss": list(evaluations.values())},
        }
        if any(r.retried is not None for r in rows):
            row["retried"] = sum(r.retried or 0 for r in rows)
        run = about(
            num_gpus=settings.layout.workers if on_gpu else 0,
            command=" ".join(["padded-dispatch", *sys.argv[1:]]),
            commit=output.commit,
        )
        append_run(output.out, run, [row])


def _tokens(settings: Settings) -> int:
    """Return the tokens of a step, over all ranks."""
    return settings.recipe.global_batch * settings.recipe.seq_length
