"""Log what steps drop, in a training loop that has no `Telemetry`.

Routers, or guards of graphs, call `see_pass` for each pass, so a loop needs no line for it. A step
ends when the first layer's input gets its last gradient, or after the replay of a CUDA graph of the
whole step; if neither is seen, when the next step begins. Then the counters are read, and summed
over the ranks of these layers' expert-parallel and expert-tensor-parallel groups, which make the
same passes. Of several replicas, the first logs its own counts. The host looks at the copy once it
has arrived, in a later pass or at the end of the process, so nothing waits for it.
"""

import atexit
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches

from padded_dispatch.megatron.chunks import num_repeats
from padded_dispatch.megatron.compat import captures_iteration, capturing
from padded_dispatch.megatron.telemetry import (
    Copy,
    LayerSettings,
    Reader,
    by_number,
    padded_moe_layers,
)
from padded_dispatch.utils.phases import trains


class Watch:
    """Reader of the drops of layers with the same groups, over the ranks of these groups.

    Args:
        first: the MoELayer whose passes make up the steps; others may join in its first step.
    """

    def __init__(self, first: Any) -> None:
        self.layers = [first]
        self.num_steps = 0
        self._num_left: int | None = None  # passes of the step that are still to begin
        self._input: Callable[[], Any] = lambda: None
        self._reader: Reader | None = None
        self._pending: deque[Copy] = deque()

    def __del__(self) -> None:
        self.log_arrived()

    def accepts(self, layer: Any) -> bool:
        """Return whether a layer may join, in the first step: one behind the first in its model.

        Its config and group are the same, and its number is larger. Another model may have been
        deleted without a whole step; ranks do not collect it at the same time.
        """
        first, ep_group = self.layers[0], layer.token_dispatcher.ep_group
        same = layer.config is first.config and ep_group is first.token_dispatcher.ep_group
        later = min(by_number([layer])) > min(by_number([first]))
        return same and later and self.num_steps == 0

    def see_pass(self, hidden_states: Any) -> None:
        """Count a training pass of the first layer; of a recomputed pass, only the second run.

        A pass may be announced twice, with the same input.
        """
        if self._input() is hidden_states or capturing() or not trains():
            return
        self._end_step_of_passes()
        self._input = weakref.ref(hidden_states)
        self._num_left = (self._num_left or _num_passes(self.layers[0])) - 1
        if self._num_left == 0 and hidden_states.requires_grad:
            # A graph keeps its input, and a layer its graph. A hook that kept the layer would keep
            # all three alive, and NCCL would wait forever for the end of a graph that captured it.
            watch_ref = weakref.ref(self)

            def end_step(grad: Any) -> None:
                if (watch := watch_ref()) is not None:
                    watch._end_step_of_passes()

            hidden_states.register_hook(end_step)
        self.log_arrived()

    def _end_step_of_passes(self) -> None:
        """End the step, if all its passes have begun and it has not ended yet."""
        if self._num_left == 0:
            self.end_step()

    def end_step(self) -> None:
        """Start a read of what the step dropped, unless the loop applies `on_overflow` itself."""
        self.num_steps += 1
        self._num_left, self._input = None, lambda: None
        dispatcher = self.layers[0].token_dispatcher
        if dispatcher._options.on_overflow != "warn" or dispatcher.configs.has_telemetry:
            return
        if self._reader is None:
            # Replicas are left out: they may run another number of micro-batches.
            groups = dispatcher.ep_group, dispatcher.tp_group
            local = by_number(self.layers)
            self._reader = Reader(
                local,
                {number: LayerSettings.of(layer) for number, layer in sorted(local.items())},
                [group for group in groups if group is not None and group.size() > 1],
                dispatcher.counters.totals.device,
                logs=dispatcher._logs,
            )
        self._pending.append(self._reader.start(self.num_steps))
        self.log_arrived()

    def log_arrived(self) -> None:
        """Log the readings that have arrived and have drops."""
        while self._pending:
            arrived = self._pending[0].arrived
            if arrived is not None and not arrived.query():
                return
            assert self._reader is not None
            self._reader.follow(self._reader.finish(self._pending.popleft()))


# All watches, in the order of their creation. Dispatchers keep them. The next layer may join the
# last one.
_watches: "weakref.WeakKeyDictionary[Watch, None]" = weakref.WeakKeyDictionary()


def see_pass(moe: Any, hidden_states: Any) -> None:
    """Let a `Watch` see a pass of a MoE layer, eager or replayed, before it runs."""
    watch: Watch | None = vars(moe.token_dispatcher).get("watch")
    if watch is None:
        watch = next(reversed(list(_watches)), None)
        if watch is None or not watch.accepts(moe):
            watch = Watch(moe)
            _watches[watch] = None
        else:
            watch.layers.append(moe)
        vars(moe.token_dispatcher)["watch"] = watch
    if moe is watch.layers[0]:
        watch.see_pass(hidden_states)


def see_iteration(model: Any) -> None:
    """End the step of a model's watches after the replay of its graph of a whole step.

    Reading is collective, so it leaves out deleted models, which ranks collect at different times.
    """
    layers = padded_moe_layers(model if isinstance(model, list) else [model]).values()
    for watch in dict.fromkeys(vars(layer.token_dispatcher).get("watch") for layer in layers):
        if watch is not None and captures_iteration(watch.layers[0].config):
            if watch._num_left == 0:  # The eager step before, if no hook has ended it.
                watch.num_steps += 1
            watch.end_step()


@atexit.register
def _log_last() -> None:
    for watch in list(_watches):
        watch.log_arrived()


def _num_passes(layer: Any) -> int:
    """Return the passes of a layer in a step; 1 if the loop has not set Megatron's calculator.

    If a layer takes a sequence in parts, its router sees each part, and a guard only the layer.
    """
    config, (number,) = layer.config, by_number([layer])
    parts = getattr(config, "mlp_chunks_for_training", 1)
    try:
        passes = get_num_microbatches() * num_repeats(config, number)
        return passes * (parts if config.cuda_graph_impl == "none" else 1)
    except AttributeError:
        return 1
