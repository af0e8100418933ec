"""Retry, telemetry and traces in Megatron-LM's own training loop, without a line of code.

Three functions of `megatron.training.training` are wrapped. `train_step` gets a `Retry` as its
forward-backward function if the options ask for one. `training_log` prints our figures in its line
of a step. `checkpoint_and_decide_exit` shows where a run ends, maybe before its last step.

`Telemetry` reads the counters after the first step, and then once per `--log-interval`. When
Megatron prints its line of a step, the host waits for the device. So the reading is taken there,
and its figures are in that line. Without a line it is taken a step later.

Megatron-LM repeats a step by itself when it looks for irreproducible results (its rerun state
machine). It zeroes gradients and rewinds the data before each attempt. So `Retry` counts each
attempt as a step, and telemetry counts all of them as one.
"""

import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import get_model_config

from padded_dispatch.config import require
from padded_dispatch.megatron.compat import MEGATRON_LM
from padded_dispatch.megatron.config import is_ours, last_layer
from padded_dispatch.megatron.retry import Retry
from padded_dispatch.megatron.stacked_linear import has_own_weights
from padded_dispatch.megatron.telemetry import Snapshots, Telemetry, padded_moe_layers, scalars
from padded_dispatch.recorder import RoutingBuffer, TraceRecorder, steps_apart
from padded_dispatch.trace import TracedRun, steps_before
from padded_dispatch.utils.flags import flag
from padded_dispatch.utils.logs import log_once
from padded_dispatch.utils.patches import PATCHED
from padded_dispatch.utils.results import require_folder

# Figures in Megatron's line of a step.
_SHOWN_FIGURES = ("dropped", "again", "fill", "needed_factor", "expert_overload")


class _Run:
    """The training of one model in Megatron-LM's loop. All ranks must call all methods.

    Args:
        training: Megatron-LM's module; its arguments and writers are used.
        chunks: the model's chunks on this rank.
        step: steps done before.
    """

    def __init__(self, training: Any, chunks: list[Any], *, step: int) -> None:
        self.chunks = chunks
        self._training = training
        self._args = args = training.get_args()
        config: Any = get_model_config(chunks[0])
        # It knows the layers of other stages, too, so what they do not support all ranks refuse.
        self._telemetry = Telemetry(chunks, every=args.log_interval, step=step)
        fixes = {"tokens_per_expert": "set --padded-trace FOLDER to record what routers choose"}
        if self._telemetry.settings.packed:
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
        self._options = self._telemetry.settings.options
        self._step = step
        self._num_microbatches = get_num_microbatches()
        self._recorder = self._record(config, step)
        if self._recorder is not None:  # Close it also after an error, and when the process ends.
            weakref.finalize(self, self._recorder.close)
        self._retry: Retry | None = None
        self._num_retried = 0
        self._shown: dict[str, float] = {}

    def before_step(self, forward_backward_func: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function for the passes of the next step."""
        if self._options.on_overflow != "retry":
            return forward_backward_func
        if self._retry is None:
            self._retry = Retry(forward_backward_func, self.chunks)
        self._retry.forward_backward_func = forward_backward_func
        return self._retry

    def after_step(self, step: int) -> None:
        """Count a step and those skipped before it (`--iterations-to-skip`), log and record it."""
        for _ in range(max(1, step - self._step)):
            self._step += 1
            if (reading := self._telemetry.step()) is not None:
                self._show(reading)
        if self._retry is not None and self._retry.num_retried > self._num_retried:
            self._num_retried = self._retry.num_retried
            # After figures of earlier steps: W&B takes no value of a step before the last one.
            self._write({"moe/retried_steps": self._num_retried}, step)
        if self._recorder is not None:
            self._recorder.step(step)
        # Rank 0 logs for all ranks, also without a layer to record.
        traced, recorded = self._options.trace is not None, self._num_microbatches
        if traced and get_num_microbatches() != recorded and dist.get_rank() == 0:
            kept = f"the trace has the last {recorded} micro-batches of each step"
            log_once(f"{kept}, as many as its first step had", logging.WARNING)

    def log(self, call: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        """Log a step by `call`, with the last figures in the line if Megatron is to print one.

        `arguments` are those of `training_log`. It prints `total_loss_dict`, sums since the last
        line, divided by the number of steps that updated weights; 0.16.1 leaves out zeros.
        """
        sums, skipped = arguments["total_loss_dict"], bool(arguments["skipped_iter"])
        for name, loss in arguments["loss_dict"].items():
            if not skipped and name not in sums:  # Megatron exports the first entry as the loss.
                sums[name] = torch.zeros_like(loss, dtype=torch.float32)
        is_first = arguments.get("is_first_iteration", False)  # It always has a line.
        if arguments["iteration"] % self._args.log_interval != 0 and not is_first:
            return call()
        reading = self._telemetry.take()
        self._show(reading)
        if self._retry is not None:
            self._shown["moe/retried_steps"] = self._retry.num_retried
        num_steps = max(1, sums.get("advanced iterations", 0) + (not skipped))
        for name, figure in self._shown.items():
            sums.pop(name, None)  # Stay behind a loss that comes after skipped steps.
            sums[name] = torch.tensor([figure * num_steps], dtype=torch.float64)
        result = call()
        self.follow(reading)
        return result

    def finish(self) -> None:
        """Show the last reading, after the last step."""
        reading = self._telemetry.take(now=True)
        if reading.num_steps or reading.evaluation.figures():
            self._show(reading)
        self.follow(reading)
        self._flush()

    def follow(self, reading: Snapshots) -> None:
        """Apply `on_overflow` to a reading; if it ends the run, flush all figures before."""
        try:
            self._telemetry.follow(reading)
        except RuntimeError:
            self._flush()
            raise

    def _flush(self) -> None:
        if writer := self._training.get_tensorboard_writer():
            writer.flush()

    def _show(self, snapshots: Snapshots) -> None:
        figures = snapshots.training.figures()
        self._shown |= {f"moe/{name}": figures[name] for name in _SHOWN_FIGURES if name in figures}
        per_layer = self._args.moe_per_layer_logging
        self._write(scalars(snapshots, per_layer=per_layer), snapshots.step)

    def _write(self, values: dict[str, float], step: int) -> None:
        """Write values to TensorBoard and W&B, whose writers the last rank alone has."""
        if writer := self._training.get_tensorboard_writer():
            for name, value in values.items():
                writer.add_scalar(name, value, step)
        if wandb := self._training.get_wandb_writer():
            wandb.log(values, step)

    def _record(self, config: Any, step: int) -> TraceRecorder | None:
        """Start a trace if the options ask for one."""
        args, folder = self._args, self._options.trace
        if folder is None:
            return None
        require_folder("trace", Path(folder))
        # Tensor parallelism splits the tokens: with MoE, Megatron requires sequence parallelism.
        parts = config.context_parallel_size * config.tensor_model_parallel_size
        return record_routing(
            self.chunks,
            Path(folder),
            num_microbatches=self._num_microbatches,
            num_tokens=args.micro_batch_size * args.seq_length // parts,
            # A trace of a hundred steps is enough for `tune`.
            every=max(1, min(10, (args.train_iters - step) // 100)),
            steps_done=step,
            num_steps=args.train_iters,
        )


def follow_training() -> None:
    """Wrap Megatron-LM's training loop; do nothing if it is not imported, or wrapped already."""
    training: Any = sys.modules.get(MEGATRON_LM)
    if training is None or getattr(training.__spec__, "_initializing", False):
        return  # Not imported, or only in part.
    loop = _Loop(training)
    for name in ("train_step", "training_log", "checkpoint_and_decide_exit"):
        if hasattr(training, name):
            PATCHED.wrap(training, name, functools.partial(_by_name, getattr(loop, name)))
        else:
            lost = "some figures, retries or traces are missing in Megatron-LM's loop, "
            log_once(f"{lost}because it has no {MEGATRON_LM}.{name}", logging.WARNING)


def _by_name(
    replacement: Callable[[Callable[[], Any], dict[str, Any]], Any], function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that runs `replacement` in place of `function`.

    `replacement` gets a callable that calls the function, and the arguments by name, to read or
    change.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def followed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        return replacement(lambda: function(*bound.args, **bound.kwargs), bound.arguments)

    return followed


class _Loop:
    """Replacements of the loop's functions in Megatron-LM's module; it has one run at a time."""

    def __init__(self, training: Any) -> None:
        self._training = training
        self._run: _Run | None = None
        self._chunks: list[Any] | None = None

    def train_step(self, call: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        """Run one step."""
        steps_done = self._training.get_args().curr_iteration
        run = self._run_of(arguments["model"], arguments["optimizer"], steps_done)
        if run is None:
            return call()
        arguments["forward_backward_func"] = run.before_step(arguments["forward_backward_func"])
        result = call()
        run.after_step(steps_done + 1)
        if result[3]:  # Megatron's rerun state machine ends the run behind this step.
            self._end()
        return result

    def training_log(self, call: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        """Log one step."""
        return call() if self._run is None else self._run.log(call, arguments)

    def checkpoint_and_decide_exit(self, call: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        """End the run before the checkpoint of its last step, or when the loop ends early."""
        args = self._training.get_args()
        rest = range(arguments["iteration"] + 1, args.train_iters + 1)
        if all(step in args.iterations_to_skip for step in rest):
            self._end()
        if ends := call():
            self._end()
        return ends

    def _end(self) -> None:
        run, self._run, self._chunks = self._run, None, None
        if run is not None:
            run.finish()

    def _run_of(self, chunks: list[Any], optimizer: Any, steps_done: int) -> _Run | None:
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
            run = None
            if any(are_ours):
                run = _Run(self._training, chunks, step=steps_done)
            self._run, self._chunks = run, chunks
        return self._run


def record_routing(
    chunks: list[Any],
    folder: Path,
    *,
    num_microbatches: int,
    num_tokens: int,
    every: int,
    steps_done: int,
    num_steps: int,
) -> TraceRecorder | None:
    """Attach a recorder to all padded layers of this rank. Call it before graphs are captured.

    From the names of files `load_traces` finds the steps that a resumed run has repeated. Files
    that begin at its checkpoint or later hold only such steps. They are deleted, also those of
    other ranks, because an earlier run may have had more ranks. All ranks come here before any
    writes a file.

    Args:
        chunks: the model's chunks on this rank.
        folder: the folder, which is created.
        num_microbatches: micro-batches of a step on this rank.
        num_tokens: tokens of a micro-batch that this rank routes (T).
        every: steps between two recorded ones; see `steps_apart`.
        steps_done: steps that a resumed run has done already, else 0.
        num_steps: steps at the end of the run.

    Returns:
        The recorder; None if this rank has no padded layer.

    Raises:
        ValueError: not even one step fits into the limit, or a layer has been captured already.
    """
    layers = padded_moe_layers(chunks)
    model: Any = get_model_config(chunks[0])
    for name, once in (("mlp_chunks_for_training", 1), ("mtp_use_repeated_layer", False)):
        times = getattr(model, name, None) or once
        rule = f"be {once} with a trace, which has a record of each layer and micro-batch"
        require(times == once, name, times, rule, "leave out one of the two")
    num_layers = -(-last_layer(model) // model.pipeline_model_parallel_size)
    apart = steps_apart(
        every,
        steps_done=steps_done,
        num_steps=num_steps,
        num_records=num_layers * num_microbatches,
        num_tokens=num_tokens,
        top_k=model.moe_router_topk,
    )
    if apart > every and dist.get_rank() == 0:  # Before the return: rank 0 may have no layer.
        words = f"one step in {apart} is traced, because a rank's trace has about 1 GiB at most"
        log_once(words, logging.WARNING)
    if not layers:
        return None
    captured = [m for c in chunks for m in c.modules() if getattr(m, "cuda_graphs", None)]
    rule = "start before layers are captured, because a graph holds what is recorded"
    fix = "set cuda_graph_warmup_steps to 1 or more"
    require(not captured, "trace", str(folder), rule, fix)
    dispatcher = next(iter(layers.values())).token_dispatcher
    config = dispatcher.configs.current
    num_sources = dispatcher.ep_size * dispatcher.tp_size
    run = TracedRun(
        num_tokens=num_tokens,
        top_k=config.top_k,
        num_experts=config.num_experts,
        num_ranks=num_sources,
        hidden_size=model.moe_latent_size or model.hidden_size,
        fc1_width=model.moe_ffn_hidden_size * (2 if model.gated_linear_unit else 1),
        capacity_pool=config.capacity_pool,
        etp_size=config.etp_size,
    )
    buffers = {}
    for number, layer in layers.items():
        device = layer.router.weight.device
        buffers[number] = RoutingBuffer(run, num_microbatches=num_microbatches, device=device)
        layer.token_dispatcher.observers.append(buffers[number])
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob("rank-*-step-*.npy"):
        before = steps_before(earlier)
        if before is not None and before >= steps_done:
            words = f"traces of steps after {steps_done}, of an earlier run, are deleted"
            log_once(f"{folder}: {words}", logging.WARNING)
            earlier.unlink(missing_ok=True)
    group: Any = parallel_state.get_expert_tensor_and_model_parallel_group()
    return TraceRecorder(
        folder / f"rank-{dist.get_rank():05d}-step-{steps_done:08d}.npy",
        run,
        buffers,
        rank=parallel_state.get_expert_data_parallel_rank() * num_sources + dist.get_rank(group),
        every=apart,
    )
