"""Progress on the terminal, metrics.jsonl and TensorBoard.

Rank 0 writes; the other ranks have a `Log` without outputs. On a terminal, progress is a block of
lines at the bottom that is redrawn; anywhere else it is one line per row. A resumed run appends to
the files of the earlier one, after dropping the rows past its checkpoint.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any, Self, TextIO

from padded_dispatch.megatron.telemetry import Snapshots
from padded_dispatch.train.metrics import Row
from padded_dispatch.train.rows import kept_rows, open_rows
from padded_dispatch.train.screen import (
    Screen,
    bar,
    curve,
    duration,
    needs_ascii,
    stop_waiting,
    width,
)
from padded_dispatch.train.settings import Output

_COLUMNS = 60  # the widest bar and curve


class Log:
    """Shows and stores the rows of a run.

    Args:
        output: which outputs to write, and where.
        steps_done: steps that a resumed run has done already, else 0.
        stream: stream for progress.
        clock: clock in seconds, for the time that is left.
    """

    def __init__(
        self,
        output: Output,
        steps_done: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stdout
        self._screen = Screen(self._stream)
        self._pace = Pace(output.steps, clock)
        self._losses: list[float] = []
        self._num_steps = output.steps
        self._as_json = output.json
        self._file: TextIO | None = None
        self._tensorboard: Any = None
        if output.run_dir is not None:
            output.run_dir.mkdir(parents=True, exist_ok=True)
            path = output.run_dir / "metrics.jsonl"
            kept = map(json.loads, kept_rows(path, steps_done).splitlines())
            self._losses += [row["loss"] for row in kept if row["kind"] == "train"]
            self._file = open_rows(path, steps_done)
        if output.tensorboard:
            # Imported here, since it takes a second or two.
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(
                str(output.run_dir), purge_step=steps_done + 1 if steps_done else None
            )
        if steps_done:
            self.message(f"resuming at step {steps_done} of {output.steps}")

    def row(self, row: Row) -> None:
        """Show and store one row."""
        self._store({"kind": "train", **dataclasses.asdict(row)})
        self._losses.append(row.loss)
        left_s = self._pace.left_s(row.step)
        if self._as_json:
            return
        stop_waiting()
        if self._screen.is_live:
            ascii_only = needs_ascii(self._stream)
            self._screen.block(block(row, self._num_steps, self._losses, left_s, ascii_only))
            if row.step == self._num_steps:
                self._screen.close()
        else:
            self._screen.line(progress_line(row, self._num_steps, left_s))

    def evaluation(self, step: int, loss: float) -> None:
        """Show and store the loss on held-out text."""
        self._store({"kind": "held-out", "step": step, "loss": loss})
        self.message(f"step {step:>{len(str(self._num_steps))}}  held-out loss {loss:.4f}")

    def capacity(self, snapshots: Snapshots) -> None:
        """Store the snapshots of training, and of evaluation if there was any."""
        phases = {"moe": snapshots.training, "moe-held-out": snapshots.evaluation}
        for kind, seen in phases.items():
            if figures := seen.figures():
                self._store(
                    {
                        "kind": kind,
                        "step": snapshots.step,
                        "steps": snapshots.num_steps,
                        **figures,
                        "layers": seen.figures_of_layers(),
                    }
                )

    def message(self, text: str) -> None:
        """Show a line of text, unless `--json`."""
        if not self._as_json:
            stop_waiting()
            self._screen.line(text)

    def _store(self, figures: dict[str, Any]) -> None:
        line = json.dumps(figures)
        if self._as_json:
            self._stream.write(f"{line}\n")
            self._stream.flush()
        if self._file is not None:
            self._file.write(f"{line}\n")
            self._file.flush()
        if self._tensorboard is not None:
            for name, value in figures.items():
                if isinstance(value, int | float) and name not in ("step", "steps"):
                    tag = f"{figures['kind']}/{name}"
                    self._tensorboard.add_scalar(tag, value, figures["step"])
            self._tensorboard.flush()  # It would keep them for two minutes, which a kill loses.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        stop_waiting()
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


class Pace:
    """The time that is left, from the steps since the first row: earlier ones compile and capture.

    Args:
        num_steps: steps in all.
        clock: clock in seconds.
    """

    def __init__(self, num_steps: int, clock: Callable[[], float]) -> None:
        self._num_steps, self._clock = num_steps, clock
        self._first: tuple[int, float] | None = None

    def left_s(self, step: int) -> float | None:
        """Return the seconds that are left after a step; None after the first row and the last."""
        now = self._clock()
        if self._first is None:
            self._first = step, now
        first_step, started = self._first
        if step in (first_step, self._num_steps):
            return None
        return (now - started) / (step - first_step) * (self._num_steps - step)


def block(
    row: Row, num_steps: int, losses: list[float], left_s: float | None, ascii_only: bool
) -> list[str]:
    """Return the lines of progress on a terminal: a bar, the curve of the loss, the figures.

    The curve shares its columns with the bar, and grows with it.
    """
    share, end = row.step / num_steps, f" {row.step / num_steps:4.0%}"
    start, loss = _step(row, num_steps), f"loss {row.loss:.4f}"
    labels = max(len(start), len(loss)) + 2
    if left_s is not None:
        end += f"  {duration(left_s)} left"
    columns = max(10, min(_COLUMNS, width() - labels - len(" 100%  1:00:00 left") - 1))
    curved = curve(losses, max(1, int(share * columns)), ascii_only=ascii_only)
    return [
        f"{start:{labels}}{bar(share, columns, ascii_only=ascii_only)}{end}",
        f"{loss:{labels}}{curved}",
        "  ".join(_figures(row)),
    ]


def progress_line(row: Row, num_steps: int, left_s: float | None) -> str:
    """Return a row as text.

    Example: step 20/200  loss 3.0123  9,876 tokens/s  24 GFLOP/s per process  0:42 left.
    """
    parts = [_step(row, num_steps), f"loss {row.loss:.4f}", *_figures(row)]
    if left_s is not None:
        parts.append(f"{duration(left_s)} left")
    return "  ".join(parts)


def _step(row: Row, num_steps: int) -> str:
    return f"step {row.step:>{len(str(num_steps))}}/{num_steps}"


def _figures(row: Row) -> list[str]:
    """Return speed, capacity and memory of a row, as texts."""
    parts = [
        f"{row.tokens_per_s:,.0f} tokens/s",
        f"{row.tflops_per_gpu:.3g} TFLOP/s per GPU"
        if row.allocated_gib is not None
        else f"{row.tflops_per_gpu * 1e3:.3g} GFLOP/s per process",
    ]
    if row.fill is not None and row.dropped is not None:
        parts += [f"fill {row.fill:.1%}", f"dropped {row.dropped:.1%}"]
    if row.retried is not None:
        parts += [f"retried {row.retried}"]
    if row.allocated_gib is not None:
        parts += [f"{row.allocated_gib:.1f} GiB"]
    return parts
