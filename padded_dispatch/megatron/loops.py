"""`StepHooks` in the loops of Megatron-LM and Megatron-Bridge, without a line of the user's.

Both have a module with a `train_step`, which is given the forward-backward function, and a
`training_log`, which prints a line every few steps. The two are wrapped: `train_step` gets a
`Retry` if the options ask for one, and `training_log` prints our figures in its line. When a loop
prints a line, the host waits for the device. So the reading is taken there, and its figures are in
that line. Without a line it is taken a step later. Steps behind the last line are read before the
last checkpoint, but not if a signal or a time limit ends the run: warnings come with a line.

A loop may repeat a step by itself when it looks for irreproducible results (Megatron's rerun state
machine). It zeroes gradients and rewinds the data before each attempt. So `Retry` counts each
attempt as a step, and the hooks count all of them as one.
"""

import argparse
import functools
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from padded_dispatch.config import require
from padded_dispatch.megatron.compat import BRIDGE, MEGATRON_LM
from padded_dispatch.megatron.config import is_ours
from padded_dispatch.megatron.record import Passes
from padded_dispatch.megatron.stacked_linear import has_own_weights
from padded_dispatch.megatron.steps import StepHooks
from padded_dispatch.megatron.telemetry import Snapshots, scalars
from padded_dispatch.utils.flags import flag
from padded_dispatch.utils.logs import log_once
from padded_dispatch.utils.patches import PATCHED

# Figures in a loop's line of a step.
_SHOWN_FIGURES = ("dropped", "recomputed", "fill", "needed_factor", "expert_overload")


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """The settings of a loop, and its writers, at one of its functions.

    Attributes:
        steps_done: steps before the next one.
        num_steps: steps at the end of the run.
        left_out: numbers of steps that are skipped.
        exit_interval: the run ends with a step whose number is a multiple; None without one.
        log_interval: steps between two lines.
        logs: whether the loop calls `training_log`.
        per_layer: whether writers get each layer's figures.
        batch_tokens: tokens of a micro-batch, before any split over ranks.
        tensorboard, wandb: writers, of the last rank alone.
        counting: objects whose numbers forward steps add to.
        flags: Megatron-LM's arguments; None in Megatron-Bridge.
    """

    steps_done: int
    num_steps: int
    left_out: list[int]
    exit_interval: int | None
    log_interval: int
    logs: bool = True
    per_layer: bool
    batch_tokens: int
    tensorboard: Any
    wandb: Any
    counting: tuple[Any, ...] = ()
    flags: argparse.Namespace | None = None

    def ends_with(self, step: int) -> bool:
        """Return whether the run ends with this step, as far as its settings show."""
        rest, every = range(step + 1, self.num_steps + 1), self.exit_interval
        # Megatron-LM 0.16 counts the steps to skip from 0. Where 1 is the first, this step, which
        # has run, is none of them.
        is_last = any(all(s - first in self.left_out for s in rest) for first in (0, 1))
        return is_last or (bool(every) and step % every == 0)


def _of_megatron_lm(module: ModuleType, arguments: dict[str, Any]) -> _Settings:
    args = module.get_args()
    return _Settings(
        steps_done=args.curr_iteration,
        num_steps=args.train_iters,
        left_out=args.iterations_to_skip,
        exit_interval=args.exit_interval,
        log_interval=args.log_interval,
        per_layer=args.moe_per_layer_logging,
        batch_tokens=args.micro_batch_size * args.seq_length,
        tensorboard=module.get_tensorboard_writer(),
        wandb=module.get_wandb_writer(),
        flags=args,
    )


def _of_bridge(module: ModuleType, arguments: dict[str, Any]) -> _Settings:
    state = arguments["global_state"]
    config, train = state.cfg, state.cfg.train
    return _Settings(
        steps_done=state.train_state.step,
        num_steps=train.train_iters,
        left_out=train.iterations_to_skip,
        exit_interval=train.exit_interval,
        log_interval=config.logger.log_interval,
        logs=not config.logger.skip_train_metrics_log,
        per_layer=getattr(config.model, "moe_per_layer_logging", False),
        batch_tokens=train.micro_batch_size * config.model.seq_length,
        tensorboard=state.tensorboard_logger,
        wandb=state.wandb_logger,
        counting=(state,),  # Sums of sequence lengths, for the count of operations.
    )


# How to read the settings of each module with a loop.
_LOOPS: dict[str, Callable[[ModuleType, dict[str, Any]], _Settings]] = {
    MEGATRON_LM: _of_megatron_lm,
    BRIDGE: _of_bridge,
}


def follow_loops() -> None:
    """Wrap the loops whose modules are imported; do nothing with those wrapped already."""
    for name, read in _LOOPS.items():
        module = sys.modules.get(name)
        if module is None or getattr(module.__spec__, "_initializing", False):
            continue  # Not imported, or only in part.
        loop = _Loop(functools.partial(read, module))
        for function in ("train_step", "training_log"):
            if hasattr(module, function):
                PATCHED.wrap(module, function, functools.partial(_by_name, getattr(loop, function)))
            else:
                lost = "some figures, retries or traces are missing in a training loop, "
                log_once(f"{lost}because it has no {name}.{function}", logging.WARNING)


def _by_name(
    replacement: Callable[[Callable[[], Any], dict[str, Any]], Any], function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that runs `replacement` in place of `function`.

    `replacement` gets a callable that calls the function, and the arguments by name, to read or
    change.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def followed(*args: object, **kwargs: object) -> Any:
        bound = signature.bind(*args, **kwargs)
        return replacement(lambda: function(*bound.args, **bound.kwargs), bound.arguments)

    return followed


class _Loop:
    """Replacements of the functions of a module with a loop; it has one run at a time."""

    def __init__(self, read: Callable[[dict[str, Any]], _Settings]) -> None:
        self._read = read
        self._run: _Run | None = None
        self._chunks: list[Any] | None = None

    def train_step(self, call: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        """Run one step."""
        settings = self._read(arguments)
        run = self._run_of(arguments["model"], arguments["optimizer"], settings)
        if run is None:
            return call()
        wrapped = run.hooks.wrap(arguments["forward_backward_func"], *settings.counting)
        arguments["forward_backward_func"] = wrapped
        result = call()
        step = settings.steps_done + 1
        run.after_step(step, settings)
        # Megatron's rerun state machine ends the run behind this step, or no line follows.
        if result[3] or (not settings.logs and settings.ends_with(step)):
            self._end(settings)
        return result

    def training_log(self, call: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        """Log one step."""
        if self._run is None:
            return call()
        settings = self._read(arguments)
        step = arguments.get("iteration", settings.steps_done)  # Bridge has counted it by now.
        result = self._run.log(call, arguments, step, settings)
        if settings.ends_with(step):
            self._end(settings)
        return result

    def _end(self, settings: _Settings) -> None:
        run, self._run, self._chunks = self._run, None, None
        if run is not None:
            run.finish(settings)

    def _run_of(self, chunks: list[Any], optimizer: object, settings: _Settings) -> "_Run | None":
        """Return the run of a model, a new one for another model; None without padded layers.

        A dense model may have our dispatcher's name in its config. The config of a pipeline stage
        without a padded layer need not show the others', so ranks exchange it.
        """
        if self._chunks is not chunks:
            config: Any = get_model_config(chunks[0])
            ours = config.num_moe_experts is not None and is_ours(config)
            found = [(False, False)] * dist.get_world_size()
            dist.all_gather_object(found, (ours, has_own_weights(chunks, optimizer)))
            are_ours, have_own_weights = zip(*found, strict=True)
            require(  # Also without a layer of ours: stock's experts may follow packed ones.
                all(have_own_weights),
                "optimizer",
                "those of other experts",
                "hold the weights of the model's experts, and so must the checkpoint's buffers, "
                "which others wrote, packed or Megatron's own",
                "load them with those, write a checkpoint with "
                "--dist-ckpt-optim-fully-reshardable and load that, or give --no-load-optim",
            )
            self._run = None  # A model has one run at a time, and so has a run that raised.
            self._run = _Run(chunks, settings) if any(are_ours) else None
            self._chunks = chunks
        return self._run


class _Run:
    """The training of one model in a loop. All ranks must call all methods."""

    def __init__(self, chunks: list[Any], settings: _Settings) -> None:
        config: Any = get_model_config(chunks[0])
        step, self._num_microbatches = settings.steps_done, get_num_microbatches()
        # Tensor parallelism splits the tokens: with MoE, Megatron requires sequence parallelism.
        parts = config.context_parallel_size * config.tensor_model_parallel_size
        passes = Passes(
            num_microbatches=self._num_microbatches,
            num_tokens=settings.batch_tokens // parts,
            num_steps=settings.num_steps,
            # A trace of a hundred steps is enough for `tune`.
            every=max(1, min(10, (settings.num_steps - step) // 100)),
        )
        # They know the layers of other stages, too, so what they do not support all ranks refuse.
        every = settings.log_interval
        self.hooks = StepHooks(chunks, every=every, steps_done=step, passes=passes)
        self._step, self._num_retried = step, 0
        self._shown: dict[str, float] = {}
        if settings.flags is not None:
            _check_flags(settings.flags, config, packed=self.hooks.settings.packed)

    def after_step(self, step: int, settings: _Settings) -> None:
        """Count a step and those skipped before it, log and record it."""
        skipped, self._step = max(0, step - self._step - 1), step
        if (reading := self.hooks.after_step(skipped=skipped)) is not None:
            self._show(reading, settings)
        if self.hooks.num_retried > self._num_retried:
            self._num_retried = self.hooks.num_retried
            # After figures of earlier steps: W&B takes no value of a step before the last one.
            self._write({"moe/retried_steps": self._num_retried}, step, settings)
        # Rank 0 logs for all ranks, also without a layer to record.
        traced, recorded = self.hooks.settings.options.trace is not None, self._num_microbatches
        if traced and get_num_microbatches() != recorded and dist.get_rank() == 0:
            kept = f"the trace has the last {recorded} micro-batches of each step"
            log_once(f"{kept}, as many as its first step had", logging.WARNING)

    def log(
        self, call: Callable[[], Any], arguments: dict[str, Any], step: int, settings: _Settings
    ) -> Any:
        """Log a step by `call`, with the last figures in the line if the loop is to print one.

        `arguments` are those of `training_log`. It prints `total_loss_dict`, sums since the last
        line, divided by the number of steps that updated weights; 0.16.1 leaves out zeros.
        """
        sums, skipped = arguments["total_loss_dict"], bool(arguments["skipped_iter"])
        for name, loss in arguments["loss_dict"].items():
            if not skipped and name not in sums:  # Megatron exports the first entry as the loss.
                sums[name] = torch.zeros_like(loss, dtype=torch.float32)
        is_first = arguments.get("is_first_iteration", False)  # Megatron-LM's always has a line.
        if step % settings.log_interval != 0 and not is_first:
            return call()
        reading = self.hooks.take()
        self._show(reading, settings)
        if self.hooks.retry is not None:
            self._shown["moe/retried_steps"] = self.hooks.num_retried
        num_steps = max(1, sums.get("advanced iterations", 0) + (not skipped))
        for name, figure in self._shown.items():
            sums.pop(name, None)  # Stay behind a loss that comes after skipped steps.
            sums[name] = torch.tensor([figure * num_steps], dtype=torch.float64, device="cpu")
        result = call()
        self._follow(reading, settings)
        return result

    def finish(self, settings: _Settings) -> None:
        """Show the last reading, after the last step."""
        reading = self.hooks.take(now=True)
        if reading.num_steps or reading.evaluation.figures():
            self._show(reading, settings)
        self._follow(reading, settings)
        _flush(settings)

    def _follow(self, reading: Snapshots, settings: _Settings) -> None:
        """Apply `on_overflow` to a reading; if it ends the run, flush all figures before."""
        try:
            self.hooks.follow(reading)
        except RuntimeError:
            _flush(settings)
            raise

    def _show(self, snapshots: Snapshots, settings: _Settings) -> None:
        figures = snapshots.training.figures()
        self._shown |= {f"moe/{name}": figures[name] for name in _SHOWN_FIGURES if name in figures}
        written = scalars(snapshots, per_layer=settings.per_layer)
        self._write(written, snapshots.step, settings)

    def _write(self, values: dict[str, float], step: int, settings: _Settings) -> None:
        if settings.tensorboard:
            for name, value in values.items():
                settings.tensorboard.add_scalar(name, value, step)
        if settings.wandb:
            settings.wandb.log(values, step)


def _flush(settings: _Settings) -> None:
    if settings.tensorboard:
        settings.tensorboard.flush()


def _check_flags(args: argparse.Namespace, config: TransformerConfig, *, packed: bool) -> None:
    """Raise if a flag of Megatron-LM's cannot work with padded layers, or with packed experts."""
    fixes = {"tokens_per_expert": "set --padded-trace FOLDER to record what routers choose"}
    if packed:
        fix, field = "set --padded-experts module", "rl_inference_expert_model_parallel_size"
        fixes |= {"activations": fix, "dgrads": fix}
        size = getattr(args, field, None)
        rule = "be that of training: Megatron copies packed experts to inference as one tensor"
        require(size in (None, config.expert_model_parallel_size), flag(field), size, rule, fix)
        rule = "be left out: it masks TEGroupedMLP, and finds none in packed experts"
        require(not getattr(args, "flextron", False), "--flextron", True, rule, fix)
        found, name = getattr(args, "modelopt_enabled", False), "modelopt_enabled"
        rule = "be False: ModelOpt quantizes Megatron's linears, and leaves packed experts out"
        require(not found, name, found, rule, fix)
    frozen, fix = getattr(args, "freeze_all_layers", False), "use Megatron's own dispatcher"
    rule = "be left out: without gradients, no drop of a pass in training mode is counted"
    require(not frozen, "--freeze-all-layers", True, rule, fix)
    for name, fix in fixes.items():
        field = f"save_{name}_interval"
        interval = getattr(args, field, None)
        rule = "be left out: it reads the rows of experts' linears, which are padded or none"
        require(interval is None, flag(field), interval, rule, fix)
