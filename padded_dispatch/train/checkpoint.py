"""Checkpoints that are whole or not there, and from which a run goes on bit by bit.

A checkpoint is written under a temporary name and renamed when all ranks are done, so that a run
may be stopped at any moment. It holds weights with the experts' biases, the optimizer's state and
the random states. The learning rate and the position in the data follow from the number of steps
done (`padded_dispatch.train.data`), which lies beside them in `run.json`, together with the
settings that decide the run's numbers: a resumed run must have the same.

On CPUs it is one of `torch.distributed.checkpoint` with every rank's own tensors, on GPUs one of
Megatron's `dist_checkpointing`. Either can be read by as many ranks as have written it.
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

from padded_dispatch.megatron.options import Factor
from padded_dispatch.train.model import unwrapped
from padded_dispatch.train.optimizer import MegatronAdam, TorchAdam
from padded_dispatch.train.settings import Settings

_DECISIVE = ("model", "recipe", "dispatch", "layout")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is: steps done, the loss of the first, and each padded layer's factor."""

    step: int
    first_loss: float
    factors: dict[int, Factor]


def newest(out: Path) -> Path:
    """The newest whole checkpoint of a run's folder.

    Raises:
        ValueError: there is none.
    """
    found = sorted((out / "checkpoints").glob("step-*"))
    if not found:
        raise ValueError(f"resume=True is not possible: {out} holds no checkpoint; leave it out")
    return found[-1]


def check_resumable(settings: Settings) -> None:
    """Refuse to go on where there is nothing left to do, or with settings of another run.

    Raises:
        ValueError: names every setting that differs, with both values.
    """
    assert settings.output.out is not None
    found = newest(settings.output.out)
    about = json.loads((found / "run.json").read_text())
    then, now = about["settings"], _decisive(settings)
    differing = [
        f"{name}={now[group][name]} (was {value})"
        for group in _DECISIVE
        for name, value in then[group].items()
        if now[group][name] != value
    ]
    if differing:
        raise ValueError(
            f"resume=True is not possible with {', '.join(differing)}: give what {found} was "
            "written with"
        )
    if about["step"] >= settings.output.steps:
        raise ValueError(
            f"steps={settings.output.steps} is not possible: {found} has done {about['step']} "
            "already; give more, and --lr-decay as it was"
        )


def save(
    settings: Settings,
    progress: Progress,
    chunks: list[Any],
    optimizer: TorchAdam | MegatronAdam,
) -> None:
    """Write `OUT/checkpoints/step-N`. To be called by all ranks."""
    assert settings.output.out is not None
    folder = settings.output.out / "checkpoints"
    temporary = folder / "unfinished"
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    if isinstance(optimizer, MegatronAdam):
        dist_checkpointing.save(_sharded(chunks, optimizer, loading=False), str(temporary))
    else:
        state_dict_saver.save(_mine(chunks, optimizer), checkpoint_id=temporary)
    dist.barrier()
    if first:
        about = {**dataclasses.asdict(progress), "settings": _decisive(settings)}
        (temporary / "run.json").write_text(json.dumps(about, indent=2))
        temporary.rename(folder / f"step-{progress.step:08d}")
    dist.barrier()


def load(checkpoint: Path, chunks: list[Any], optimizer: TorchAdam | MegatronAdam) -> Progress:
    """Put a checkpoint's state in place. To be called by all ranks."""
    optimizer.step(lr=0.0)  # Makes Adam's state, for the checkpoint to be read into.
    state: dict[str, Any]
    if isinstance(optimizer, MegatronAdam):
        sharded = _sharded(chunks, optimizer, loading=True)
        state = cast(dict[str, Any], dist_checkpointing.load(sharded, str(checkpoint)))
    else:
        mine = _mine(chunks, optimizer)
        state_dict_loader.load(mine, checkpoint_id=checkpoint)
        state = mine[f"rank{dist.get_rank()}"]
    for number, model in enumerate(unwrapped(chunks)):
        model.load_state_dict(state[f"chunk{number}"])
    optimizer.adam.load_state_dict(state["optimizer"])
    _set_random_states(state["random"])
    about = json.loads((checkpoint / "run.json").read_text())
    factors = {int(number): factor for number, factor in about["factors"].items()}
    return Progress(step=about["step"], first_loss=about["first_loss"], factors=factors)


def _mine(chunks: list[Any], optimizer: TorchAdam) -> dict[str, Any]:
    # Ranks hold different experts under the same names; without a name of their own,
    # torch.distributed.checkpoint would take them for copies and keep one.
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
        # Every rank writes its own shard: the fastest, for as many ranks as have written it.
        metadata={"distrib_optim_sharding_type": "dp_reshardable"},
    )
    ranks, rank = dist.get_world_size(), dist.get_rank()
    state["random"] = ShardedObject("random", _random_states(), (ranks,), (rank,))
    return state


def _random_states() -> dict[str, Any]:
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "megatron": _tracker().get_states(),
    }


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    torch.cuda.set_rng_state(states["cuda"])
    _tracker().set_states(states["megatron"])


def _tracker() -> Any:
    return random.get_cuda_rng_tracker()


def _decisive(settings: Settings) -> dict[str, Any]:
    """The settings that decide a run's numbers, as JSON gives them back."""
    groups = {name: dataclasses.asdict(getattr(settings, name)) for name in _DECISIVE}
    return json.loads(json.dumps(groups))
