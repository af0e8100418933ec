"""Checks of settings that need Megatron, the text or the disk, before any worker starts."""

from contextlib import nullcontext
from importlib.util import find_spec

from padded_dispatch.config import require
from padded_dispatch.megatron.config import dispatch_config
from padded_dispatch.megatron.cpu import megatron_on_cpu
from padded_dispatch.train import checkpoint
from padded_dispatch.train.data import Windows, load_corpus
from padded_dispatch.train.model import transformer_config
from padded_dispatch.train.settings import Settings
from padded_dispatch.tune.trace import record_bytes
from padded_dispatch.utils.results import require_results

_EXTRA = "run pip install 'padded-dispatch[train]'"


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
        checkpoint.check_resumable(settings)
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


def _check_trace_size(settings: Settings) -> None:
    """Raise if `--trace-gib` holds not even one step of a rank's layers."""
    recipe, layout, limit_gib = settings.recipe, settings.layout, settings.output.trace_gib
    num_tokens = recipe.micro_batch * recipe.seq_length // layout.tp
    passes = recipe.num_layers // layout.pp * settings.num_microbatches
    step_gib = passes * record_bytes(num_tokens, settings.model.top_k) / 2**30
    require(step_gib <= limit_gib, "--trace-gib", limit_gib, f"be at least {step_gib:.3g}")
