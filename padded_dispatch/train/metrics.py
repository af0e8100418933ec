"""Figures of a run over all ranks: lines of progress, its summary, and the row of a results file.

Losses and times of steps stay on the device, as tensors and CUDA events, until a line is due: no
step waits for the host between two lines.
"""

import itertools
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.exchange import symmetric_memory
from padded_dispatch.train.model import fusions
from padded_dispatch.train.settings import Settings
from padded_dispatch.utils.logs import show
from padded_dispatch.utils.results import about, append_run

_CONTENDERS = {
    "padded_alltoall": "ours",
    "allgather": "stock-allgather",
    "alltoall": "stock-dropless",
    "alltoall-drop-pad": "stock-drop-pad",
}


def record_event() -> torch.cuda.Event:
    """Return an event that is recorded now; on a CPU `megatron_on_cpu`'s, with the host's time."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step: losses of this rank's passes, its learning rate, and when it began and ended.

    `host_ms`: the host's time for the passes, without the optimizer, which waits for the device.
    `retried`: whether it ran twice; None if the run repeats no step.
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

    `loss`: mean per byte, in nats. `step_ms`: mean. `dropped`: share of all MoE layers' rows that
    were dropped, in the first run of a repeated step; None if the dispatcher does not count.
    `recomputed`: share that backward recomputes because the store was full; None without a store.
    `retried`: steps that ran twice because of drops; None if the run repeats none.
    """

    step: int
    loss: float
    lr: float
    step_ms: float
    tokens_per_s: float
    retried: int | None
    dropped: float | None = None
    recomputed: float | None = None

    def line(self, num_steps: int) -> str:
        """Return the row as text.

        Example: step 20/200 | loss 3.0123 | lr 5.0e-03 | 41.5 ms | 9,876 tokens/s | dropped 0.0% |
        recomputed 1.2%.
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
        if self.recomputed is not None:
            parts.append(f"recomputed {self.recomputed:.1%}")
        if self.retried is not None:
            parts.append(f"retried {self.retried}")
        return " | ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a run in single numbers.

    `first_loss`: of the first step. `loss`: mean of the last ten steps; None after one step.
    `held_out`: the last held-out loss. `ms`: median of the second half of the steps. `dropped`,
    `recomputed`: shares of all rows of the run, see `Row`. `gib`: peak of memory on a GPU.
    `seconds`: of the whole run, with its start.
    """

    num_steps: int
    first_loss: float
    loss: float | None
    held_out: float | None
    ms: float
    tokens_per_s: float
    dropped: float | None
    recomputed: float | None
    gib: float | None
    seconds: float

    def sentence(self) -> str:
        """Return the summary of a run of several steps in a sentence."""
        assert self.loss is not None
        verb = "fell" if self.loss < self.first_loss else "did not fall: it went"
        last = "the last ten steps" if self.num_steps > 10 else "all later steps"
        parts = [
            f"Loss {verb} from {self.first_loss:.2f} to {self.loss:.2f} (mean of {last}) in "
            f"{self.num_steps} steps and {self.seconds:.0f} seconds",
            f"{self.tokens_per_s:,.0f} tokens/s",
        ]
        if self.dropped is not None:
            parts.append(f"{_share(self.dropped)} of the rows dropped")
        if self.recomputed is not None:
            parts.append(f"{_share(self.recomputed)} recomputed in backward")
        return "; ".join(parts) + "."


def _share(share: float) -> str:
    """Format a share; only none at all is 0 %."""
    return f"{share:.2%}".replace("%", " %") if share else "0 %"


def means_over_ranks(losses: list[list[Tensor]], device: torch.device) -> list[float]:
    """Return the mean of each list over all ranks; some ranks may have empty ones."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    sums = torch.stack([torch.stack((sum(some, zero), zero + len(some))) for some in losses])
    dist.all_reduce(sums)
    return (sums[:, 0] / sums[:, 1]).tolist()


class Meter:
    """Records the steps of a run.

    Construct it before the model: it resets the peaks of memory on a GPU.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._settings, self._device = settings, device
        self._started = time.perf_counter()
        self._unread: list[Step] = []
        self._read: list[tuple[float, float, float]] = []  # loss, ms and host_ms of each step
        if device.type == "cuda":
            symmetric_memory.reset_peaks()

    def add(self, step: Step) -> None:
        """Record a step."""
        self._unread.append(step)

    def read(self) -> Row:
        """Return the figures since the last call, the same on all ranks, which must all call this.

        It waits for the device.
        """
        steps, self._unread = self._unread, []
        steps[-1].done.synchronize()
        samples_ms = [step.start.elapsed_time(step.done) for step in steps]
        losses = means_over_ranks([step.losses for step in steps], self._device)
        self._read += zip(losses, samples_ms, [step.host_ms for step in steps], strict=True)
        step_ms = statistics.mean(samples_ms)
        retried = [step.retried for step in steps if step.retried is not None]
        return Row(
            step=len(self._read),
            loss=statistics.mean(losses),
            lr=steps[-1].lr,
            step_ms=step_ms,
            tokens_per_s=_tokens(self._settings) / step_ms * 1e3,
            retried=sum(retried) if retried else None,
        )

    def summary(self, rows: list[Row], evaluations: dict[int, float]) -> Summary:
        """Return the summary of all steps read so far."""
        losses, samples_ms, _ = zip(*self._read, strict=True)
        ms = statistics.median(samples_ms[len(losses) // 2 :])
        steps = [now - last for last, now in itertools.pairwise([0, *(row.step for row in rows)])]

        def share(name: str) -> float | None:
            found = [getattr(row, name) for row in rows]
            if not found or None in found:
                return None
            return sum(of * n for of, n in zip(found, steps, strict=True)) / sum(steps)

        return Summary(
            num_steps=len(losses),
            first_loss=losses[0],
            loss=statistics.mean(losses[1:][-10:]) if len(losses) > 1 else None,
            held_out=evaluations[max(evaluations)] if evaluations else None,
            ms=ms,
            tokens_per_s=_tokens(self._settings) / ms * 1e3,
            dropped=share("dropped"),
            recomputed=share("recomputed"),
            gib=symmetric_memory.allocated_gib() if self._device.type == "cuda" else None,
            seconds=time.perf_counter() - self._started,
        )

    def write(self, rows: list[Row], evaluations: dict[int, float], pool: str | None) -> None:
        """Append all steps read so far as one row to the results file; `pool`: the capacity pool.

        `loss` has every step; `step` and the shares are those of the lines of progress, and times
        are of the second half of the steps. A run that was stopped, or failed, is `ended_early`.
        """
        settings = self._settings
        recipe, dispatch, output = settings.recipe, settings.dispatch, settings.output
        if dist.get_rank() != 0 or output.out is None or not self._read:
            return
        losses, samples_ms, host_ms = zip(*self._read, strict=True)
        steady = slice(len(losses) // 2, None)
        ms, on_gpu = statistics.median(samples_ms[steady]), self._device.type == "cuda"
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
            "samples_ms": samples_ms[steady],
            "host_ms": statistics.median(host_ms[steady]),
            "tokens_per_s": _tokens(settings) / ms * 1e3,
            "allocated_gib": symmetric_memory.allocated_gib() if on_gpu else None,
            "loss": losses,
            **{
                name: [getattr(r, name) for r in rows] for name in ("step", "dropped", "recomputed")
            },
            "held_out": {"step": list(evaluations), "loss": list(evaluations.values())},
        }
        if any(r.retried is not None for r in rows):
            row["retried"] = sum(r.retried or 0 for r in rows)
        if len(losses) < output.steps:
            row["ended_early"] = True
            show(f"ended early: {len(losses)} of {output.steps} steps are in {output.out}")
        run = about(
            num_gpus=settings.layout.workers if on_gpu else 0,
            command=shlex.join(["padded-dispatch", *sys.argv[1:]]),
            commit=output.commit,
        )
        append_run(output.out, run, [row])


def _tokens(settings: Settings) -> int:
    """Return the tokens of a step, over all ranks."""
    return settings.recipe.global_batch * settings.recipe.seq_length


class Board:
    """TensorBoard's files of a run, written by rank 0; nothing without a folder."""

    def __init__(self, folder: Any) -> None:
        self._writer: Any = None
        if folder is not None and dist.get_rank() == 0:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(folder)

    def add(self, row: Row) -> None:
        """Write a line of progress."""
        names = "loss", "lr", "step_ms", "tokens_per_s", "dropped", "recomputed", "retried"
        for name in names if self._writer else ():
            if (value := getattr(row, name)) is not None:
                self._writer.add_scalar(name, value, row.step)

    def add_held_out(self, step: int, loss: float) -> None:
        """Write a held-out loss."""
        if self._writer:
            self._writer.add_scalar("held-out loss", loss, step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer:
            self._writer.close()
