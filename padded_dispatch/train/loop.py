"""The training loop of one worker: steps, progress lines, evaluations, checkpoints.

With `on_overflow="retry"` a step that dropped rows runs twice (`padded_dispatch.megatron.retry`).

`run_passes` runs micro-batches through the model by Megatron's schedules
(`get_forward_backward_func`): without a pipeline, with one, and interleaved. A `Telemetry`
(`padded_dispatch.megatron.telemetry`) reads what was dropped.
`trace_recorder` (`--trace`) writes the routers' choices, one file per rank, for
`padded-dispatch tune`.
"""

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from padded_dispatch.exchange.mirror import absent_ranks_named
from padded_dispatch.megatron.megatron_lm import record_routing
from padded_dispatch.megatron.retry import Retry
from padded_dispatch.megatron.telemetry import Snapshots, Telemetry
from padded_dispatch.megatron.world import world
from padded_dispatch.train import checkpoint
from padded_dispatch.train.data import Windows, load_corpus
from padded_dispatch.train.display import Log
from padded_dispatch.train.graphs import TrainingGraphs
from padded_dispatch.train.metrics import (
    Meter,
    Recorder,
    Row,
    StepMarks,
    StepWork,
    mark,
    mean_over_ranks,
)
from padded_dispatch.train.model import (
    RouterSkew,
    build_chunks,
    moe_layers,
    release,
    transformer_config,
)
from padded_dispatch.train.optimizer import (
    MegatronAdam,
    TorchAdam,
    build_optimizer,
    learning_rate,
)
from padded_dispatch.train.settings import Output, Settings
from padded_dispatch.train.world import megatron_state, model_parallel
from padded_dispatch.tune.recorder import TraceRecorder


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The mean loss on held-out text after a step."""

    step: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run: the first step's loss, the rows of progress, the evaluations."""

    first_loss: float
    rows: tuple[Row, ...]
    evaluations: tuple[Evaluation, ...]

    @property
    def fell(self) -> bool | None:
        """True if the last row's mean loss is below the first step's; None after one step only."""
        last = self.rows[-1]
        return last.loss < self.first_loss if last.step > 1 else None

    def sentence(self) -> str:
        """Return, for example, "loss fell from 5.58 to 2.31"."""
        if self.fell is None:
            return f"loss {self.first_loss:.2f} in the only step"
        verb = "fell" if self.fell else "did not fall: it went"
        return f"loss {verb} from {self.first_loss:.2f} to {self.rows[-1].loss:.2f}"


@dataclass(frozen=True, kw_only=True)
class Step:
    """The results of a step: losses of this rank's passes, learning rate, gradient norm, times.

    `retried`: whether the step ran twice; None if the run repeats no step.
    """

    losses: list[Tensor]
    retried: bool | None
    lr: float
    grad_norm: float | Tensor | None
    marks: StepMarks


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """This rank's part of the model, with its optimizer, data and graphs."""

    settings: Settings
    device: torch.device
    chunks: list[Any]
    optimizer: TorchAdam | MegatronAdam
    text: Windows
    held_out: Windows
    graphs: TrainingGraphs | None
    retry: Retry | None
    skew: RouterSkew | None

    def step(self, number: int) -> Step:
        """Run step 1, 2, ...: forward, backward and an update of the weights."""
        recipe, num_before = self.settings.recipe, self.retry.num_retried if self.retry else 0
        with self.graphs.step() if self.graphs else nullcontext():
            start = mark(self.device)
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = run_passes(
                self.settings,
                self.chunks,
                self.text,
                self.device,
                first_sample=(number - 1) * recipe.global_batch,
                num_passes=self.settings.num_microbatches,
                schedule=self.retry or (self.graphs.schedule if self.graphs else None),
            )
            passed = mark(self.device)
            lr = learning_rate(recipe, number)
            grad_norm = self.optimizer.step(lr)
            marks = StepMarks(start=start, passed=passed, done=mark(self.device))
        retried = self.retry.num_retried > num_before if self.retry else None
        return Step(losses=losses, retried=retried, lr=lr, grad_norm=grad_norm, marks=marks)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the first held-out samples, which are always the same."""
        for chunk in self.chunks:
            chunk.eval()
        losses = run_passes(
            self.settings,
            self.chunks,
            self.held_out,
            self.device,
            first_sample=0,
            num_passes=self.settings.output.eval_passes,
            forward_only=True,
        )
        for chunk in self.chunks:
            chunk.train()
        return mean_over_ranks(losses, self.device)


def work(settings: Settings) -> Outcome:
    """Run a worker from start to end: join the process group, train, leave it."""
    with world(settings.layout.device) as device:
        return train(settings, device)


def train(settings: Settings, device: torch.device) -> Outcome:
    """Train over the default process group. All ranks must call it."""
    with model_parallel(settings.layout), absent_ranks_named():
        return train_in_groups(settings, device)


def train_in_groups(settings: Settings, device: torch.device) -> Outcome:
    """Train inside `model_parallel` of the same layout. All ranks must call it."""
    with megatron_state(settings):
        recorder = Recorder(settings, device) if settings.output.out else None
        trainer = _build(settings, device)
        start = checkpoint.Progress(step=0, first_loss=math.nan)
        if settings.output.resume:
            assert settings.output.run_dir is not None
            newest = checkpoint.newest(settings.output.run_dir)
            start = checkpoint.load(newest, trainer.chunks, trainer.optimizer)
        with _log(settings.output, start.step) as log:
            outcome = _run(trainer, start, log, recorder)
            log.message(outcome.sentence())
        if trainer.graphs:
            trainer.graphs.delete()
        release(trainer.chunks)
    return outcome


def _build(settings: Settings, device: torch.device) -> Trainer:
    recipe, corpus = settings.recipe, load_corpus()
    config = transformer_config(settings)
    chunks = build_chunks(settings, config)
    optimizer = build_optimizer(settings, chunks)
    skew = None
    if recipe.router_skew:
        layers = moe_layers(chunks)
        skew = RouterSkew(layers, recipe.num_layers, recipe.router_skew, recipe.seed)
    graphs = None
    if settings.output.graph != "none":
        assert isinstance(optimizer, MegatronAdam)
        graphs = TrainingGraphs(settings, config, chunks, optimizer)
    retry = None
    if settings.dispatch.padded.on_overflow == "retry":
        passes = (graphs and graphs.schedule) or get_forward_backward_func()
        retry = Retry(passes, chunks, counts=skew.counts() if skew else ())
    return Trainer(
        settings=settings,
        device=device,
        chunks=chunks,
        optimizer=optimizer,
        text=Windows(corpus.train, recipe.seq_length, recipe.seed),
        held_out=Windows(corpus.held_out, recipe.seq_length, recipe.seed),
        graphs=graphs,
        retry=retry,
        skew=skew,
    )


def _show_choice(chunks: list[Any], log: Log) -> None:
    """Show the experts and the exchange that the options came to, if this rank has a MoE layer."""
    for layer in moe_layers(chunks)[:1]:
        chosen = layer.token_dispatcher.chosen
        log.message(f"experts: {chosen['experts']}, exchange: {chosen['exchange']}")


def _run(
    trainer: Trainer, start: checkpoint.Progress, log: Log, recorder: Recorder | None
) -> Outcome:
    settings, output = trainer.settings, trainer.settings.output
    meter = Meter(moe_layers(trainer.chunks), trainer.device, StepWork.of(settings))
    tracer, watch = _tracer(trainer, start, log), _watch(trainer, start)
    first_loss, rows, evaluations = start.first_loss, [], []
    for number in range(start.step + 1, output.steps + 1):
        step = trainer.step(number)
        if watch and number == start.step + 1:
            _show_choice(trainer.chunks, log)
        meter.add(step.losses, step.retried)
        if recorder:
            recorder.add(step.marks, step.losses)
        if tracer:
            tracer.step(number)
        last = number == output.steps
        if number == 1 or last or number % output.log_every == 0:
            rows.append(meter.read(number, step.lr, step.grad_norm))
            log.row(rows[-1])
            first_loss = rows[-1].loss if number == 1 else first_loss
        if watch:
            _show(watch.step(), log)
        if trainer.skew:
            trainer.skew.after_step()
        if output.eval_every and (last or number % output.eval_every == 0):
            with meter.paused():
                evaluations.append(Evaluation(step=number, loss=trainer.evaluate()))
                log.evaluation(number, evaluations[-1].loss)
        if output.save_every and (last or number % output.save_every == 0):
            with meter.paused():
                progress = checkpoint.Progress(
                    step=number,
                    first_loss=first_loss,
                )
                checkpoint.save(settings, progress, trainer.chunks, trainer.optimizer)
    if tracer:
        tracer.close()
    if watch:
        last_reading = watch.read()
        _show(last_reading if last_reading.num_steps else None, log)
    retried = {}
    if trainer.retry:
        retried = {"retried": trainer.retry.num_retried}
        log.message(f"retried steps: {trainer.retry.num_retried} of {trainer.retry.num_steps}")
    if recorder:
        memory = trainer.graphs.memory_gib if trainer.graphs else None
        skewed = trainer.skew.figures() if trainer.skew else {}
        recorder.write(
            fill=rows[-1].fill, dropped=rows[-1].dropped, memory_gib=memory, **retried, **skewed
        )
    return Outcome(first_loss=first_loss, rows=tuple(rows), evaluations=tuple(evaluations))


def _tracer(trainer: Trainer, start: checkpoint.Progress, log: Log) -> TraceRecorder | None:
    output = trainer.settings.output
    if not output.trace:
        return None
    tracer = trace_recorder(trainer.settings, trainer.chunks, steps_done=start.step)
    if tracer and tracer.every > output.trace_every:
        log.message(
            f"--trace-every raised to {tracer.every}, to keep each trace file below "
            f"--trace-gib {output.trace_gib:g}"
        )
    return tracer


def _watch(trainer: Trainer, start: checkpoint.Progress) -> Telemetry | None:
    if trainer.settings.dispatch.dispatcher != "padded_alltoall":
        return None
    every = trainer.settings.output.log_every
    return Telemetry(trainer.chunks, every=every, step=start.step)


def _show(snapshots: Snapshots | None, log: Log) -> None:
    if snapshots is not None:
        log.capacity(snapshots)


def _log(output: Output, steps_done: int) -> Log:
    if dist.get_rank() == 0:
        return Log(output, steps_done, sys.stdout)
    silent = dataclasses.replace(output, run_dir=None, tensorboard=False)
    return Log(silent, steps_done, open(os.devnull, "w"))


def run_passes(
    settings: Settings,
    chunks: list[Any],
    windows: Windows,
    device: torch.device,
    *,
    first_sample: int,
    num_passes: int,
    forward_only: bool = False,
    schedule: Callable[..., list[Any]] | None = None,
) -> list[Tensor]:
    """Run `num_passes` micro-batches per rank, forward and backward, and reduce the gradients.

    Args:
        settings: settings of the run.
        chunks: the model.
        windows: samples of the text.
        device: device of the batches.
        first_sample: number of the first sample; the ranks read consecutive micro-batches from it.
        num_passes: micro-batches per rank.
        forward_only: leave out the backward pass.
        schedule: replacement of Megatron's schedule.

    Returns:
        The mean loss of each pass on ranks of the last pipeline stage; nothing on other ranks.
    """
    recipe = settings.recipe

    def batches() -> Iterator[dict[str, Tensor]]:
        rank, ranks = parallel_state.get_data_parallel_rank(), settings.layout.dp
        for number in range(num_passes):
            start = first_sample + (number * ranks + rank) * recipe.micro_batch
            batch = windows.batch(start, recipe.micro_batch, device)
            # Megatron's full-iteration graph requires a dict.
            yield {"tokens": batch[:, :-1].contiguous(), "labels": batch[:, 1:].contiguous()}

    results = (schedule or get_forward_backward_func())(
        forward_step_func=_forward,
        data_iterator=[batches() for _ in chunks],
        model=chunks,
        num_microbatches=num_passes,
        seq_length=recipe.seq_length,
        micro_batch_size=recipe.micro_batch,
        forward_only=forward_only,
    )
    # The next replay of a graph overwrites its results.
    return [result["loss"].clone() for result in results]


def _forward(batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    batch = next(batches)
    tokens, labels = batch["tokens"], batch["labels"]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    # No mask: attention is causal, and the text has no padding.
    return model(tokens, positions, None, labels=labels), _mean


def _mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.float().mean()
    # Megatron divides the first in place by the number of passes.
    return loss, {"loss": loss.detach().clone()}


def trace_recorder(
    settings: Settings, chunks: list[Any], *, steps_done: int
) -> TraceRecorder | None:
    """Attach a recorder to all padded layers of this rank. Call it before graphs are captured.

    Args:
        settings: settings with a folder for `trace`, which is created.
        chunks: the model.
        steps_done: steps that a resumed run has done already, else 0.

    Raises:
        ValueError: not even one step fits into the limit.
    """
    output, recipe = settings.output, settings.recipe
    assert output.trace is not None
    return record_routing(
        chunks,
        output.trace,
        num_microbatches=settings.num_microbatches,
        # Tensor parallelism comes with sequence parallelism here, which splits the tokens.
        num_tokens=recipe.micro_batch * recipe.seq_length // settings.layout.tp,
        every=output.trace_every,
        steps_done=steps_done,
        num_steps=output.steps,
        max_bytes=int(output.trace_gib * 2**30),
    )
