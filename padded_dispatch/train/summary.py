"""Words around a run: what it will do, how to resume it, and what to try next.

Everything follows from the settings, before torch or Megatron is imported.
"""

import os
import shlex
import textwrap
from collections.abc import Sequence

from padded_dispatch.train.settings import DROPPING, VOCABULARY, ModelShape, Settings

# Flags of files, which another run would overwrite.
_FILES = ("--run-dir", "--save-every", "--resume", "--out", "--tensorboard")
_LABEL = 12  # columns of "  dispatcher"


def header(settings: Settings, columns: int) -> str:
    """Return the lines that describe a run: model, devices, dispatcher, work, files."""
    lines = ["padded-dispatch train"]
    for label, text in _rows(settings):
        lines += textwrap.wrap(
            text,
            width=max(40, columns),
            initial_indent=f"  {label:{_LABEL}}",
            subsequent_indent=" " * (_LABEL + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def _rows(settings: Settings) -> list[tuple[str, str]]:
    model, recipe, output = settings.model, settings.recipe, settings.output
    shared = f", shared experts of size {model.shared_ffn_size:,}" if model.shared_ffn_size else ""
    every, active = num_parameters(model, recipe.num_layers)
    rows = [
        (
            "model",
            f"{settings.preset}: {_many(recipe.num_layers, 'layer')}, hidden size "
            f"{model.hidden_size:,}, top {model.top_k} of {model.num_experts} experts of size "
            f"{model.ffn_size:,}{shared}",
        ),
        ("parameters", f"{_millions(every)}, of which a token uses {_millions(active)}"),
        ("devices", _devices(settings)),
        ("dispatcher", _dispatcher(settings)),
        (
            "work",
            f"{_many(output.steps, 'step')} of {_many(recipe.global_batch, 'sequence')} of "
            f"{recipe.seq_length:,} bytes, from Python's own source",
        ),
    ]
    if output.graph != "none":
        rows.append(("CUDA graphs", output.graph))
    if files := _files(settings):
        rows.append(("files", files))
    return rows


def _devices(settings: Settings) -> str:
    layout = settings.layout
    where = "a CPU" if layout.device == "cpu" else _many(layout.workers, "GPU")
    parts = [f"{_many(layout.workers, 'process')} on {where}"]
    sizes = {
        "expert parallel": layout.ep,
        "expert tensor parallel": layout.etp,
        "tensor parallel": layout.tp,
        "pipeline parallel": layout.pp,
    }
    parts += [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return ", ".join(parts)


def _dispatcher(settings: Settings) -> str:
    dispatch = settings.dispatch
    factor, padded = dispatch.capacity_factor, dispatch.padded
    parts = [dispatch.dispatcher]
    if dispatch.dispatcher in DROPPING:
        parts.append("no row is dropped" if factor is None else f"capacity factor {factor:g}")
    if dispatch.dispatcher == "padded_alltoall":
        parts.append(f"policy {dispatch.drop_policy}")
        # What "auto" chooses is shown after the first step.
        chosen = {"experts": padded.experts, "exchange": padded.exchange}
        parts += [f"{name} {value}" for name, value in chosen.items() if value != "auto"]
    return ", ".join(parts)


def _files(settings: Settings) -> str:
    output, parts = settings.output, []
    if output.run_dir:
        saved = f", a checkpoint every {output.save_every} steps" if output.save_every else ""
        parts.append(f"{output.run_dir}: metrics.jsonl{saved}")
    if output.trace:
        parts.append(f"{output.trace}: routing traces")
    if output.out:
        parts.append(f"{output.out}: results")
    return "; ".join(parts)


def num_parameters(model: ModelShape, num_layers: int) -> tuple[int, int]:
    """Return the parameters of the whole model, and those that one token uses."""
    width, attention_size = model.hidden_size, model.num_heads * model.head_size
    projected = attention_size + 2 * model.num_kv_groups * model.head_size
    shared_size = model.shared_ffn_size or 0
    attention = width * (projected + attention_size) + 2 * model.head_size * model.qk_layernorm
    norms, router, shared = 2 * width, width * model.num_experts, 3 * width * shared_size
    expert = 3 * width * model.ffn_size
    if model.gpt_oss:  # Biases everywhere.
        attention += projected + width
        router += model.num_experts
        expert += 2 * model.ffn_size + width
    ends = 2 * VOCABULARY * width + width  # embedding, output layer, last norm

    def of(num_experts: int) -> int:
        layer = attention + norms + router + shared + num_experts * expert
        return num_layers * layer + ends

    return of(model.num_experts), of(model.top_k)


def how_to_resume(settings: Settings, argv: Sequence[str]) -> str | None:
    """Return how a run that was ended early can go on, or what would have kept it.

    Under torchrun, which has a command line of its own, nothing.

    Args:
        settings: the run.
        argv: the flags that the user gave.
    """
    output = settings.output
    if "WORLD_SIZE" in os.environ:
        return None
    if output.save_every is None or output.run_dir is None:
        return "nothing was saved; --run-dir PATH --save-every N keep checkpoints to resume from"
    if not list((output.run_dir / "checkpoints").glob("step-*")):
        return f"no checkpoint yet; the first one comes after step {output.save_every}"
    flags = [word for word in argv if word not in ("--resume", "--no-resume")]
    return f"to resume: {_command('train', *flags, '--resume')}"


def next_steps(settings: Settings, argv: Sequence[str]) -> list[tuple[str, str]]:
    """Return what to try after a run: pairs of purpose and command."""
    output, model = settings.output, settings.model
    found = []
    if settings.dispatch.dispatcher == "padded_alltoall":
        sizes = ("--hidden-size", str(model.hidden_size), "--ffn-size", str(model.ffn_size))
        if output.trace is None:
            command = _command("train", *_without(argv, *_FILES), "--trace", "traces")
            found.append(("record what the routers ask for", command))
        folder = str(output.trace or "traces")
        found.append(("choose a capacity factor from it", _command("tune", folder, *sizes)))
    if output.save_every is not None:
        flags = _without(argv, "--steps", "--lr-decay", "--resume")
        steps = ("--steps", str(2 * output.steps), "--lr-decay", str(settings.recipe.lr_decay))
        found.append(("train on", _command("train", *flags, *steps, "--resume")))
    found.append(("see all flags", _command("train", "--help")))
    return found


def _without(argv: Sequence[str], *names: str) -> list[str]:
    """Return the flags without those named, and without their values."""
    kept, skipping = [], False
    for word in argv:
        if word.startswith("--"):
            skipping = word.partition("=")[0] in names
        if not skipping:
            kept.append(word)
    return kept


def _command(*words: str) -> str:
    return shlex.join(["padded-dispatch", *words])


def _many(count: int, thing: str) -> str:
    """Return, for example, "1 step" or "2 processes"."""
    plural = f"{thing}es" if thing.endswith("s") else f"{thing}s"
    return f"{count:,} {thing if count == 1 else plural}"


def _millions(count: int) -> str:
    return f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"
