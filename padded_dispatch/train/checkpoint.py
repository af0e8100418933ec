"""Atomic checkpoints, from which a run resumes bit by bit.

A checkpoint is written under a temporary name and renamed when all ranks are done, so a run may be
stopped at any moment. It holds the weights with the experts' biases, the optimizer's state and the
random states. `run.json` beside them holds the number of steps done, from which the learning rate
and the position in the data follow (`padded_dispatch.train.data`), and the settings that decide the
run's numbers: a resumed run must have the same ones.

On CPUs the format is `torch.distributed.checkpoint` with every rank's own tensors, on GPUs
Megatron's `dist_checkpointing`. Either must be read by as many ranks as have written it.
"""

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.tensor_parallel import random
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from padded_dispatch.config import require
from padded_dispatch.train.integrity import checkpoints, require_whole
from padded_dispatch.train.model import unwrapped
from padded_dispatch.train.optimizer import MegatronAdam, TorchAdam
from padded_dispatch.train.settings import Settings

_DECISIVE = ("model", "recipe", "dispatch", "layout")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run: steps done, and the first step's loss."""

    step: int
    first_loss: float


def newest(run_dir: Path) -> Path:
    """Return the newest checkpoint in a run's folder.

    Raises:
        ValueError: there is none.
    """
    found = checkpoints(run_dir)
    require(found, "--run-dir", str(run_dir), "hold a checkpoint", "leave out --resume")
    return found[-1]


def check_resumable(settings: Settings) -> None:
    """Raise if the newest checkpoint is broken, has other settings, or has done all steps already.

    Raises:
        ValueError: names the broken file, or every setting that differs, with both values.
    """
    output = settings.output
    assert output.run_dir is not None
    found = newest(output.run_dir)
    about = require_whole(found)
    then, now = about["settings"], settings.as_json(*_DECISIVE)
    differing = [
        f"{name}={now[group].get(name)} (was {value})"
        for group in _DECISIVE
        for name, value in then[group].items()
        if now[group].get(name) != value
    ]
    require(
        not differing,
        "--resume",
        ", ".join(differing),
        f"repeat the settings of {found}",
        "give the values in brackets",
    )
    require(
        about["step"] < output.steps,
        "--steps",
        output.steps,
        f"exceed the {about['step']} steps that {found} has done",
        "give more, and --lr-decay as it was",
    )


def save(
    settings: Settings,
    progress: Progress,
    chunks: list[Any],
    optimizer: TorchAdam | MegatronAdam,
) -> None:
    """Write `RUN_DIR/checkpoints/step-N`. All ranks must call it."""
    assert settings.output.run_dir is not None
    folder = settings.output.run_dir / "checkpoints"
    temporary = folder / "unfinished"
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    if isinstance(optimizer, MegatronAdam):
        dist_checkpointing.save(_sharded(chunks, optimizer, loading=False), str(temporary))
    else:
        state_dict_saver.save(_state_of_rank(chunks, optimizer), checkpoint_id=temporary)
    dist.barrier()
    if first:
        about = dataclasses.asdict(progress)
        about["settings"] = settings.as_json(*_DECISIVE)
        (temporary / "run.json").write_text(json.dumps(about, indent=2))
        temporary.rename(folder / f"step-{progress.step:08d}")
    dist.barrier()


def load(checkpoint: Path, chunks: list[Any], optimizer: TorchAdam | MegatronAdam) -> Progress:
    """Load a checkpoint into the model and the optimizer. All ranks must call it."""
    optimizer.step(lr=0.0)  # Allocates Adam's state, which the checkpoint is read into.
    state: dict[str, Any]
    if isinstance(optimizer, MegatronAdam):
        sharded = _sharded(chunks, optimizer, loading=True)
        state = cast(dict[str, Any], dist_checkpointing.load(sharded, str(checkpoint)))
    else:
        saved = _state_of_rank(chunks, optimizer)
        state_dict_loader.load(saved, checkpoint_id=checkpoint)
        state = saved[f"rank{dist.get_rank()}"]
    for number, model in enumerate(unwrapped(chunks)):
        model.load_state_dict(state[f"chunk{number}"])
    optimizer.adam.load_state_dict(state["optimizer"])
    _set_random_states(state["random"])
    about = json.loads((checkpoint / "run.json").read_text())
    return Progress(step=about["step"], first_loss=about["first_loss"])


def _state_of_rank(chunks: list[Any], optimizer: TorchAdam) -> dict[str, Any]:
    # Ranks hold different experts under the same names. Without a key per rank,
    # torch.distributed.checkpoint would treat them as copies and keep one.
    state: dict[str, Any] = {"optimizer": optimizer.adam.state_dict(), "random": _random_states()}
    for number, model in enumerate(unwrapped(chunks)):
        state[f"chunk{number}"] = model.state_dict()
    return {f"rank{dist.get_rank()}": state}


def _sharded(chunks: list[Any], optimizer: MegatronAdam, *, loading: bool) -> dict[str, Any]:
    models = {f"chunk{n}": model.sharded_state_dict() for n, model in enumerate(unwrapped(chunks))}
    state: dict[str, Any] = dict(models)
    state["optimizer"] = optimizer.adam.sharded_state_dict(
        models,
        is_loading=loading,
        # Every rank writes its shard: the fastest format, readable by the same number of ranks.
        metadata={"distrib_optim_sharding_type": "dp_reshardable"},
    )
    ranks, rank = dist.get_world_size(), dist.get_rank()
    state["random"] = ShardedObject("random", _random_states(), (ranks,), (rank,))
    return state


def _random_states() -> dict[str, Any]:
    tracker: Any = random.get_cuda_rng_tracker()
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "megatron": tracker.get_states(),
    }


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    torch.cuda.set_rng_state(states["cuda"])
    tracker: Any = random.get_cuda_rng_tracker()
    tracker.set_states(states["megatron"])
