"""The training loop of one worker: process groups, steps, lines of progress, evaluations.

Micro-batches go through the model by Megatron's schedules (`get_forward_backward_func`): without a
pipeline, with one, and interleaved. `StepHooks` do the rest of what the options of the padded
dispatcher ask for: with `on_overflow="retry"` a step that dropped rows runs twice, and a trace
(`--trace`) holds the routers' choices, one file per rank, for `padded-dispatch tune`.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from torch.distributed import distributed_c10d

from padded_dispatch.megatron.compat import forget_moe_state
from padded_dispatch.megatron.graphs import IterationGraph, LayerGraphs
from padded_dispatch.megatron.record import Passes
from padded_dispatch.megatron.steps import StepHooks
from padded_dispatch.train.data import Windows, load_corpus
from padded_dispatch.train.metrics import (
    Board,
    Meter,
    Row,
    Step,
    Summary,
    means_over_ranks,
    record_event,
)
from padded_dispatch.train.model import (
    EAGER_STEPS,
    build_chunks,
    build_optimizer,
    learning_rate,
    moe_layers,
    release,
    transformer_config,
)
from padded_dispatch.train.settings import Layout, Settings
from padded_dispatch.utils.logs import show

# What was chosen for the run, in words, by the values of `PaddedTokenDispatcher.chosen`.
_CHOSEN = {
    "packed": "packed experts (they compute real rows only)",
    "module": "Megatron's experts (on padded rows)",
    "direct": "direct writes between GPUs",
    "alltoall": "collectives between ranks",
    "store": "one store for the rows of all layers",
    "cells": "cells of fixed size for each rank and expert",
}
_ENDS = signal.SIGTERM, signal.SIGINT  # Ctrl-C reaches a worker under torchrun only.
_EVALUATION_PASSES = 32  # most passes per rank, before rounding up to a multiple of `pp`


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run: a row for each printed line, the held-out loss by step, a summary."""

    rows: list[Row]
    evaluations: dict[int, float]
    summary: Summary


class Trainer:
    """This rank's part of the model, with its optimizer, data and graphs."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        recipe = settings.recipe
        self.settings, self.device = settings, device
        config = transformer_config(settings)
        self.chunks = build_chunks(settings, config)
        self.optimizer = build_optimizer(settings, self.chunks)
        text, held_out = load_corpus(recipe.text)
        self.text = Windows(text, recipe.seq_length, recipe.seed)
        self.held_out = Windows(held_out, recipe.seq_length, 0)
        self.graphs: IterationGraph | LayerGraphs | None = None
        self.schedule: Callable[..., list[Any]] = get_forward_backward_func()
        if settings.output.graph == "full-iteration":
            self.graphs = self.schedule = IterationGraph(config)
        elif settings.output.graph != "none":
            sizes = {"seq_length": recipe.seq_length, "micro_batch": recipe.micro_batch}
            # A capture clears the gradients of the optimizer.
            self.graphs = LayerGraphs(self.chunks, optimizers=(self.optimizer,), **sizes)
        self.hooks: StepHooks | None = None

    def follow_steps(self) -> None:
        """Warn of drops, raise, repeat steps, or record them, as the options say."""
        settings, recipe = self.settings, self.settings.recipe
        if settings.dispatch.dispatcher != "padded_alltoall":
            return
        passes = Passes(
            num_microbatches=settings.num_microbatches,
            # Sequence parallelism splits the tokens.
            num_tokens=recipe.micro_batch * recipe.seq_length // settings.layout.tp,
            num_steps=settings.output.steps,
        )
        self.hooks = StepHooks(self.chunks, every=settings.output.log_every, passes=passes)
        self.schedule = self.hooks.wrap(self.schedule)

    def step(self, number: int) -> Step:
        """Run step 1, 2, ...: forward, backward and an update of the weights."""
        settings = self.settings
        retry = self.hooks.retry if self.hooks else None
        num_before = retry.num_retried if retry else 0
        if isinstance(self.graphs, LayerGraphs) and number == EAGER_STEPS + 1:
            self.graphs.capture()  # An iteration graph captures by itself.
        host_start, start = time.perf_counter(), record_event()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        first = (number - 1) * settings.recipe.global_batch
        losses = self._run_passes(self.text, first, settings.num_microbatches)
        host_ms = (time.perf_counter() - host_start) * 1e3
        lr = learning_rate(settings.recipe.lr, number, settings.output.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        retried = retry.num_retried > num_before if retry else None
        done = record_event()
        return Step(losses=losses, lr=lr, retried=retried, start=start, done=done, host_ms=host_ms)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the first held-out samples, which are always the same."""
        recipe, layout = self.settings.recipe, self.settings.layout
        num_available = math.ceil(self.held_out.num_windows / (recipe.micro_batch * layout.dp))
        # Megatron's interleaved schedule runs micro-batches in groups of as many as stages.
        num_passes = math.ceil(min(_EVALUATION_PASSES, num_available) / layout.pp) * layout.pp
        for chunk in self.chunks:
            chunk.eval()
        losses = self._run_passes(self.held_out, 0, num_passes, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        return means_over_ranks([losses], self.device)[0]

    def _run_passes(
        self, windows: Windows, first: int, num_passes: int, *, forward_only: bool = False
    ) -> list[Tensor]:
        """Run `num_passes` micro-batches per rank, forward and backward, and reduce the gradients.

        The ranks read consecutive micro-batches of `windows` from sample `first` on.

        Returns:
            The mean loss of each pass on ranks of the last pipeline stage; nothing on other ranks.
        """
        recipe = self.settings.recipe

        def batches() -> Iterator[dict[str, Tensor]]:
            rank, ranks = parallel_state.get_data_parallel_rank(), self.settings.layout.dp
            for number in range(num_passes):
                start = first + (number * ranks + rank) * recipe.micro_batch
                batch = windows.batch(start, recipe.micro_batch, self.device)
                # Megatron's full-iteration graph requires a dict.
                yield {"tokens": batch[:, :-1].contiguous(), "labels": batch[:, 1:].contiguous()}

        schedule = get_forward_backward_func() if forward_only else self.schedule
        results = schedule(
            forward_step_func=_forward,
            data_iterator=[batches() for _ in self.chunks],
            model=self.chunks,
            num_microbatches=num_passes,
            seq_length=recipe.seq_length,
            micro_batch_size=recipe.micro_batch,
            forward_only=forward_only,
        )
        # The next replay of a graph overwrites its results.
        return [result["loss"].clone() for result in results]


def train(settings: Settings, device: torch.device) -> Outcome:
    """Train inside `model_parallel` of the same layout. All ranks must call it."""
    with megatron_state(settings):
        meter = Meter(settings, device)
        trainer = Trainer(settings, device)
        rows: list[Row] = []
        evaluations: dict[int, float] = {}
        # The experts, exchange and pool in use; Megatron's dispatchers lack the attribute.
        chosen = getattr(moe_layers(trainer.chunks)[0].token_dispatcher, "chosen", {})
        if chosen:
            known = [_CHOSEN[value] for value in chosen.values() if value in _CHOSEN]
            show("; ".join(known))  # One rank has no exchange.
        with ExitStack() as cleanup:
            if dist.get_rank() == 0:
                for ends in _ENDS:
                    cleanup.callback(signal.signal, ends, signal.signal(ends, _stop))
            # Write also the figures of a run that ends early.
            pool = chosen.get("capacity_pool")
            cleanup.callback(meter.write, rows, evaluations, pool)
            _run(trainer, meter, rows, evaluations, cleanup)
        if trainer.graphs:
            trainer.graphs.delete()  # Process groups cannot be destroyed while graphs exist.
        release(trainer.chunks)
        summary = meter.summary(rows, evaluations)
    return Outcome(rows=rows, evaluations=evaluations, summary=summary)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    for ends in _ENDS:
        signal.signal(ends, signal.SIG_IGN)  # A second one must not stop the writing.
    raise SystemExit(128 + number)


def _run(
    trainer: Trainer,
    meter: Meter,
    rows: list[Row],
    evaluations: dict[int, float],
    cleanup: ExitStack,
) -> None:
    """Run all steps; add to `rows` and `evaluations` what is printed."""
    trainer.follow_steps()
    output, hooks = trainer.settings.output, trainer.hooks
    board = Board(output.tensorboard)
    cleanup.callback(board.close)
    if hooks and hooks.recorder:
        cleanup.callback(hooks.recorder.close)  # Also after a step that ends the run.
    for number in range(1, output.steps + 1):
        meter.add(trainer.step(number))
        if hooks:
            hooks.after_step()
        is_last = number == output.steps
        if number == 1 or is_last or number % output.log_every == 0:
            row = meter.read()
            snapshots = hooks.take() if hooks else None
            if snapshots:
                figures = snapshots.training.figures()
                shares = {name: figures.get(name) for name in ("dropped", "recomputed")}
                row = replace(row, **shares)
            rows.append(row)
            board.add(row)
            show(row.line(output.steps))
            if hooks and snapshots:
                hooks.follow(snapshots)  # It may end the run.
        if output.eval_every and (is_last or number % output.eval_every == 0):
            loss = evaluations[number] = trainer.evaluate()
            board.add_held_out(number, loss)
            show(f"step {number} | held-out loss {loss:.4f}")


def _forward(batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    batch = next(batches)
    tokens, labels = batch["tokens"], batch["labels"]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    # No mask: attention is causal, and the text has no padding.
    return model(tokens, positions, None, labels=labels), _mean


def _mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.float().mean()
    # A copy, because Megatron divides the loss in place by the number of passes.
    return loss, {"loss": loss.detach().clone()}


@contextmanager
def model_parallel(layout: Layout) -> Iterator[None]:
    """Create Megatron's process groups over the default one, and destroy them at the end.

    Megatron's `destroy_model_parallel` only drops references; groups hold threads and GPU memory.
    """
    before = set(distributed_c10d._world.pg_map)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    yield
    parallel_state.destroy_model_parallel()
    for group in reversed([g for g in distributed_c10d._world.pg_map if g not in before]):
        dist.destroy_process_group(group)


@contextmanager
def megatron_state(settings: Settings) -> Iterator[None]:
    """Set Megatron's other globals for a run, inside `model_parallel`: seeds and batch sizes."""
    layout, recipe, graphs = settings.layout, settings.recipe, settings.output.graph != "none"
    # Transformer Engine reads it when attention is built; deterministic_mode requires it.
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = str(int(not recipe.deterministic))
    # Pipeline stages hold different layers, which must not start with the same weights.
    stage_seed = recipe.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage_seed)
    # CUDA graphs need Transformer Engine's RNG tracker. An earlier run in the same process may have
    # left the other one, hence the reset.
    model_parallel_cuda_manual_seed(stage_seed, te_rng_tracker=graphs, force_reset_rng=True)
    init_num_microbatches_calculator(
        dist.get_rank(), None, recipe.global_batch, recipe.micro_batch, layout.dp
    )
    forget_moe_state()
    yield
    unset_num_microbatches_calculator()
