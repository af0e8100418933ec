"""Warn of the rows that this rank dropped, in a training loop that has no `StepHooks`.

Layers announce their training passes with `see_pass`; routers call it, or the guards of CUDA
graphs. When a layer comes again, the layers of its model before it make up a group, whose
counters are copied to pinned memory in the first passes of each later round. A layer with another
config, or with the number of one of the group, is of another model. A round does not copy
while a copy is still under way, and the host reads it in a later pass, once it has arrived, or at
the end of the process. So no loop needs a line for it, nothing waits, and no rank calls another.

A group keeps its layers' counters, and no layer: what a loop deletes is freed at once.
"""

import atexit
import contextlib
import weakref
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer

from padded_dispatch.megatron.compat import capturing, number_in_model
from padded_dispatch.megatron.layer_configs import LayerConfigs
from padded_dispatch.megatron.telemetry import (
    Copy,
    LayerSettings,
    Reader,
    by_number,
)
from padded_dispatch.utils.phases import trains, unseen


class Drops:
    """The drops of this rank in the layers of a group, which run one after another.

    Attributes:
        members: weak references to the MoE layers.
        first: that of the layer that begins a round; None while layers still join.
    """

    def __init__(self) -> None:
        self.members: list[weakref.ref[Any]] = []
        self.first: weakref.ref[Any] | None = None
        self._reader: Reader | None = None
        self._read: list[Any] = []  # The members of the last reader: those without hooks.
        self._pending: Copy | None = None
        # At the end of the process its groups may have ended.
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._is_told = False  # Whether what is read first has been told, or hooks followed it.

    @property
    def layers(self) -> list[Any]:
        """The layers that are left."""
        return [layer for member in self.members if (layer := member()) is not None]

    def takes(self, layer: Any) -> bool:
        """Return whether a layer may be of the same model as these."""
        number, layers = _number_of(layer), self.layers
        is_new = number is None or number not in map(_number_of, layers)
        return is_new and bool(layers) and layers[0].config is layer.config

    @unseen()  # A pass that is selectively recomputed looks in one of its two runs alone.
    def look(self, *, now: bool = False) -> None:
        """Log what has arrived, and start a copy; `now` waits for it."""
        if self._pending is not None:
            arrived = self._pending.arrived
            if arrived is not None and not arrived.query():
                return
            self._log(self._pending)
            self._pending = None
        if present := self.layers:
            self._choose([layer for layer in present if not _configs_of(layer).is_followed])
        if self._reader is None:
            return
        copy = self._reader.start(0)
        if now:
            self._log(copy)
        else:
            self._pending = copy

    def _choose(self, layers: list[Any]) -> None:
        """Read these layers from now on, unless the loop follows what they drop."""
        if not layers or _configs_of(layers[0]).on_overflow != "warn":
            self._reader = None
            return
        members = [*map(weakref.ref, layers)]
        if self._reader is None or members != self._read:
            local = by_number(layers)
            settings = {number: LayerSettings.of(layer) for number, layer in sorted(local.items())}
            device = layers[0].token_dispatcher.counters.totals.device
            self._reader = Reader(local, settings, [], device, logs=True)
            had_hooks = any(_configs_of(layer).hooks is not None for layer in layers)
            self._is_told, self._read = had_hooks or bool(self._read), members

    def _log(self, copy: Copy) -> None:
        assert self._reader is not None
        training = self._reader.finish(copy).training
        is_told, self._is_told = self._is_told, False
        if is_told:
            return
        num_passes = training.counts["num_passes"].max()
        when = f"on rank {self._rank} in {num_passes} passes"
        self._reader.follow(training, when)


def _configs_of(layer: Any) -> LayerConfigs:
    return layer.token_dispatcher.configs


def _number_of(layer: Any) -> int | None:
    router = _configs_of(layer).router
    return None if router.layer_number is None else number_in_model(router)


# All of this process that have layers, and those that lost them since the last one began; the next
# new layer may join the last.
_groups: list[Drops] = []


def see_pass(layer: MoELayer | None) -> None:
    """Take note of a training pass of a MoE layer, eager or replayed, before it runs.

    Of a pass that backward recomputes, the second run is noted. A capture is no pass. `layer`: None
    where a router runs whose layer was deleted.
    """
    if layer is None or capturing() or not trains():
        return
    kept = vars(layer.token_dispatcher)  # A dispatcher is no module.
    group: Drops | None = kept.get("drops")
    if group is None:
        group = _groups[-1] if _groups else None
        if group is None or group.first is not None or not group.takes(layer):
            for ended in [one for one in _groups if not one.layers]:
                ended.look(now=True)  # Of the last passes of a deleted model.
                _groups.remove(ended)
            group = Drops()
            _groups.append(group)
        kept["drops"] = group
        group.members.append(weakref.ref(layer))
        return
    if group.first is None or group.first() is None:
        group.first = weakref.ref(layer)
    if group.first() is layer:
        group.look()


def see_iteration(layers: list[Any]) -> None:
    """Take note of the replay of a graph of a whole step, which runs no Python of its layers."""
    groups = (vars(layer.token_dispatcher).get("drops") for layer in layers)
    for group in dict.fromkeys(groups):
        if group is not None:
            group.first = group.first or group.members[0]
            group.look()


@atexit.register
def _look_last() -> None:
    """Log the drops of the last passes, unless the device is still at work, or has failed."""
    for group in list(_groups):
        with contextlib.suppress(RuntimeError):
            if not torch.cuda.is_initialized() or torch.cuda.current_stream().query():
                group.look(now=True)
