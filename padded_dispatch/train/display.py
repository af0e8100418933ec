"""Progress on the terminal, metrics.jsonl and TensorBoard.

Rank 0 writes; the other ranks have a `Log` without outputs. On a terminal, progress is one line
that is overwritten; anywhere else it is one line per row. A resumed run appends to the files of the
earlier one, after dropping the rows past its checkpoint.
"""

import dataclasses
import json
import sys
from typing import Any, Self, TextIO

from padded_dispatch.megatron.telemetry import Snapshots
from padded_dispatch.train.metrics import Row
from padded_dispatch.train.rows import open_rows
from padded_dispatch.train.settings import Output


class Log:
    """Shows and stores the rows of a run.

    Args:
        output: which outputs to write, and where.
        steps_done: steps that a resumed run has done already, else 0.
        stream: stream for progress.
    """

    def __init__(self, output: Output, steps_done: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._num_steps = output.steps
        self._as_json = output.json
        self._live = self._stream.isatty() and not output.json
        self._open_line = False
        self._file: TextIO | None = None
        self._tensorboard: Any = None
        if output.run_dir is not None:
            output.run_dir.mkdir(parents=True, exist_ok=True)
            self._file = open_rows(output.run_dir / "metrics.jsonl", steps_done)
        if output.tensorboard:
            # Imported here, since it takes a second or two.
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(
                str(output.run_dir), purge_step=steps_done + 1 if steps_done else None
            )

    def row(self, row: Row) -> None:
        """Show and store one row."""
        self._store({"kind": "train", **dataclasses.asdict(row)})
        if not self._as_json:
            self._show(progress_line(row, self._num_steps), passing=True)

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
            self._show(text, passing=False)

    def _show(self, text: str, *, passing: bool) -> None:
        """Write a line; on a terminal, a passing line overwrites the passing line before it."""
        if self._open_line:
            self._stream.write("\r\x1b[K" if passing else "\n")
        self._open_line = self._live and passing
        self._stream.write(text if self._open_line else f"{text}\n")
        self._stream.flush()

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
        if self._open_line:
            self._stream.write("\n")
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def progress_line(row: Row, num_steps: int) -> str:
    """Return a row as text.

    Example: step 20/200  loss 3.0123  9,876 tokens/s  24 GFLOP/s per process  fill 62.1%.
    """
    width = len(str(num_steps))
    parts = [
        f"step {row.step:>{width}}/{num_steps}",
        f"loss {row.loss:.4f}",
        f"{row.tokens_per_s:,.0f} tokens/s",
        f"{row.tflops_per_gpu:.3g} TFLOP/s per GPU"
        if row.allocated_gib is not None
        else f"{row.tflops_per_gpu * 1e3:.3g} GFLOP/s per process",
    ]
    if row.fill is not None and row.dropped is not None:
        parts += [f"fill {row.fill:.1%}", f"dropped {row.dropped:.1%}"]
    if row.allocated_gib is not None:
        parts += [f"{row.allocated_gib:.1f} GiB"]
    return "  ".join(parts)
