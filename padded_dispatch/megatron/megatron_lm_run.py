"""One training of a model in Megatron-LM's loop: what is done around its steps.

After each step a `CapacityWatch` reads what was dropped and changes factors. Figures go to
Megatron's line of a step, its TensorBoard and its W&B, under the names of
`padded_dispatch.megatron.telemetry.scalars`. In the line, Megatron prints what is in
`total_loss_dict`, divided by the steps since the last line; 0.16.1 leaves out zeros.

Where Megatron prints a line the host waits for the device, so a reading that has been started is
taken there: with `telemetry_every` a divisor of `--log-interval`, a line shows the steps that it is
about. Elsewhere the host does what telemetry does in any loop, and nothing else.

A changed factor holds from the next step on. The graphs are captured again before it: until then an
evaluation replays what the last step was. Factors that changed are kept in a file beside the
checkpoints, from which a resumed run takes them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import get_model_config

from padded_dispatch.megatron.config import padded_options
from padded_dispatch.megatron.factor_file import FactorFile
from padded_dispatch.megatron.graphs.recapture import recapture
from padded_dispatch.megatron.retry import Retry
from padded_dispatch.megatron.routing import record_routing
from padded_dispatch.megatron.telemetry import Snapshots, scalars
from padded_dispatch.megatron.watch import CapacityWatch
from padded_dispatch.recorder import TraceRecorder

# Figures in Megatron's line of a step.
_IN_LINE = ("dropped", "fill", "needed_factor", "expert_overload")
_TRACE_BYTES = 2**30


class Run:
    """One training of a model. All ranks must call all methods.

    Attributes:
        chunks: the model's chunks on this rank.

    Args:
        training: Megatron-LM's module `megatron.training.training`; its arguments, writers and
            `print_rank_0` are used.
        chunks: the model's chunks on this rank.
        step: steps done.
    """

    def __init__(self, training: Any, chunks: list[Any], *, step: int) -> None:
        self.chunks = chunks
        self._training = training
        self._args = args = training.get_args()
        config: Any = get_model_config(chunks[0])
        self._options = padded_options(config)
        self._file = FactorFile(args.load, args.save, step=step)
        self._watch = CapacityWatch(
            chunks,
            self._options,
            show=self._show,
            changed=self._follow_changes,
            step=step,
            factors=self._file.factors,
        )
        if self._file.factors:
            training.print_rank_0(f"capacity factors as {args.load} has them for step {step}")
        self._recorder = self._record(config, step)
        self._retry: Retry | None = None
        self._num_retried = 0
        self._line: dict[str, float] = {}
        self._must_recapture = False

    def before_step(self, forward_backward_func: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function for the passes of the next step; capture graphs again if due."""
        if self._must_recapture:
            recapture(self.chunks)
            self._must_recapture = False
        if self._options.on_overflow != "retry":
            return forward_backward_func
        if self._retry is None or self._retry.forward_backward_func is not forward_backward_func:
            self._retry = Retry(forward_backward_func, self.chunks)
            self._num_retried = 0
        return self._retry

    def after_step(self, step: int) -> None:
        """Do what follows a step.

        Args:
            step: steps done; Megatron-LM may have skipped some (`--iterations-to-skip`).

        Raises:
            RuntimeError: see `CapacityWatch.after_step`.
        """
        for _ in range(max(1, step - self._watch.step)):
            self._watch.after_step()
        if self._retry is not None and self._retry.num_retried > self._num_retried:
            self._num_retried = self._retry.num_retried
            # After figures of earlier steps: W&B takes no value of a step before the last one.
            self._write({"moe/retried_steps": self._num_retried}, step)
        if self._recorder is not None:
            self._recorder.step(step)

    def before_log(
        self, total_loss_dict: dict[str, Any], step: int, *, skipped: bool, first: bool
    ) -> None:
        """Put the last figures into Megatron's line of a step, if it is about to print one.

        Args:
            total_loss_dict: the sums of which the line has the means.
            step: steps done.
            skipped: the step updated no weights, so it does not count in the means.
            first: the first step, which always has a line.

        Raises:
            RuntimeError: see `CapacityWatch.read_pending`.
        """
        if step % self._args.log_interval != 0 and not first:
            return
        self._watch.read_pending()
        if self._retry is not None:
            self._line["moe/retried_steps"] = self._retry.num_retried
        num_steps = max(1, total_loss_dict.get("advanced iterations", 0) + (not skipped))
        for name, figure in self._line.items():
            total_loss_dict[name] = torch.tensor([figure * num_steps], dtype=torch.float64)

    def finish(self) -> None:
        """Show and check the last reading, after the last step.

        Raises:
            RuntimeError: see `CapacityWatch.finish`.
        """
        self._watch.finish()
        if writer := self._training.get_tensorboard_writer():
            writer.flush()

    def close(self) -> None:
        """Close what is open, also after an error; no other rank is needed."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def _show(self, snapshots: Snapshots) -> None:
        figures = snapshots.training.figures()
        self._line |= {f"moe/{name}": figures[name] for name in _IN_LINE if name in figures}
        per_layer = self._args.moe_per_layer_logging
        self._write(scalars(snapshots, per_layer=per_layer), snapshots.step)

    def _write(self, values: dict[str, float], step: int) -> None:
        """Write values to TensorBoard and W&B, which the last rank has."""
        if writer := self._training.get_tensorboard_writer():
            for name, value in values.items():
                writer.add_scalar(name, value, step)
        if wandb := self._training.get_wandb_writer():
            wandb.log(values, step)

    def _follow_changes(self, step: int, changes: list[str]) -> None:
        for change in changes:
            self._training.print_rank_0(f"after step {step}: {change}")
        self._file.add(step, self._watch.factors)
        self._must_recapture = True

    def _record(self, config: Any, step: int) -> TraceRecorder | None:
        """Start a trace if the options ask for one."""
        args, folder = self._args, self._options.trace
        if folder is None:
            return None
        # Tensor parallelism splits the tokens of MoE layers: Megatron wants sequence parallelism.
        parts = config.context_parallel_size * config.tensor_model_parallel_size
        return record_routing(
            self.chunks,
            Path(folder),
            num_microbatches=get_num_microbatches(),
            num_tokens=args.micro_batch_size * args.seq_length // parts,
            # A hundred steps tell what a thousand do.
            every=max(1, min(10, (args.train_iters - step) // 100)),
            steps_done=step,
            num_steps=args.train_iters,
            max_bytes=_TRACE_BYTES,
        )
