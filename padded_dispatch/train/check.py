"""Checks of settings that need Megatron, the text or the disk, before any worker starts."""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec

from padded_dispatch.config import require
from padded_dispatch.megatron.config import dispatch_config
from padded_dispatch.megatron.cpu import megatron_on_cpu
from padded_dispatch.trace import record_bytes
from padded_dispatch.train import checkpoint
from padded_dispatch.train.data import Windows, load_corpus
from padded_dispatch.train.model import transformer_config
from padded_dispatch.train.rows import kept_rows
from padded_dispatch.train.settings import Settings
from padded_dispatch.utils.lock import only_job
from padded_dispatch.utils.results import require_results, require_space

_EXTRA = "run pip install 'padded-dispatch[train]'"
_BYTES_PER_WEIGHT = 8  # of a checkpoint, at least: the weight and Adam's two moments


def check(settings: Settings) -> None:
    """Raise if a run with these settings could not start.

    Raises:
        ValueError: names the flag or Megatron's field, its rule, its value and what to set.
    """
    output, recipe, layout = settings.output, settings.recipe, settings.layout
    Windows(load_corpus().held_out, recipe.seq_length, recipe.seed)  # The shorter text.
    if output.out is not None:
        require_results("--out", output.out)
    if output.resume:
        assert output.run_dir is not None
        checkpoint.newest(output.run_dir)
    require(
        not output.tensorboard or find_spec("tensorboard"),
        "--tensorboard",
        output.tensorboard,
        "come with the package tensorboard",
        _EXTRA,
    )
    keeps = output.resume or output.save_every is not None
    require(
        not keeps or layout.device == "cpu" or find_spec("psutil"),
        "--save-every",
        output.save_every,
        "come with the package psutil, for Megatron's checkpoints",
        _EXTRA,
    )
    if output.trace is not None:
        _check_trace_size(settings)
    # As in the workers: without a GPU, `install` would warn.
    with megatron_on_cpu() if layout.device == "cpu" else nullcontext():
        config = transformer_config(settings)
    if settings.dispatch.dispatcher == "padded_alltoall":
        options = settings.dispatch.padded
        dispatch_config(config, options, num_ranks=layout.ep, etp_size=layout.etp)


@contextmanager
def held_folders(settings: Settings) -> Iterator[None]:
    """Hold the folders that a run writes to until the block ends, and check what they hold.

    Under torchrun only rank 0 holds them; the other ranks wait for it when they join.

    Raises:
        ValueError: a folder cannot be written, its disk is full, another job holds it, or the run
            cannot continue what it holds.
    """
    with ExitStack() as held:
        run_dir = settings.output.run_dir
        if settings.output.resume and run_dir is not None and not run_dir.exists():
            checkpoint.newest(run_dir)  # It raises; a lock would make the mistyped folder.
        if os.environ.get("RANK", "0") == "0":
            _hold(settings, held)
        if settings.output.resume:
            assert settings.output.run_dir is not None
            checkpoint.check_resumable(settings)
            kept_rows(settings.output.run_dir / "metrics.jsonl", 0)
        yield


def _hold(settings: Settings, held: ExitStack) -> None:
    output, folders = settings.output, {}
    if output.trace is not None:
        folders[output.trace.absolute()] = "--trace", 2**20
    if output.run_dir is not None:
        saves = _least_checkpoint_bytes(settings) if output.save_every else 0
        folders[output.run_dir.absolute()] = "--run-dir", max(2**20, saves)
    for folder, (option, num_bytes) in folders.items():
        require_space(option, folder, num_bytes)
        held.enter_context(only_job(option, folder))
    if folders:
        dataclasses.replace(settings)  # Checks them again: another job may have ended there.


def _least_checkpoint_bytes(settings: Settings) -> int:
    """Return the bytes of the experts' weights in a checkpoint, with Adam's moments."""
    model = settings.model
    weights = 3 * model.hidden_size * model.ffn_size * model.num_experts
    return _BYTES_PER_WEIGHT * weights * settings.recipe.num_layers


def _check_trace_size(settings: Settings) -> None:
    """Raise if `--trace-gib` holds not even one step of a rank's layers."""
    recipe, layout, limit_gib = settings.recipe, settings.layout, settings.output.trace_gib
    num_tokens = recipe.micro_batch * recipe.seq_length // layout.tp
    passes = recipe.num_layers // layout.pp * settings.num_microbatches
    step_gib = passes * record_bytes(num_tokens, settings.model.top_k) / 2**30
    require(step_gib <= limit_gib, "--trace-gib", limit_gib, f"be at least {step_gib:.3g}")
