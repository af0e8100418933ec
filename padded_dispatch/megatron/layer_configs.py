"""The configs of one layer, and which one applies now."""

import dataclasses
from typing import Any

import torch

from padded_dispatch.config import FIT, NO_DROP, DispatchConfig
from padded_dispatch.megatron.compat import captures_iteration, capturing
from padded_dispatch.megatron.config import dispatch_config, padded_options


class LayerConfigs:
    """The `DispatchConfig`s of one layer.

    Router and dispatcher share one object. The router's train/eval mode decides which config
    applies; it is set also if a CUDA graph replays the layer.

    Attributes:
        training: the config of training passes.
        evaluation: the config of evaluation passes.
        fitting: the config of eager passes that drop nothing (`FIT`).
        has_context: whether the layer was last called with an `inference_context`.
        has_telemetry: whether a `Telemetry` reads what this layer drops.
        has_retry: whether a `Retry` repeats steps in which this layer drops.
        router: the router of the layer; None before the layer has one.

    Args:
        config, sizes: see `dispatch_config`.
    """

    def __init__(self, config: Any, **sizes: Any) -> None:
        self._config, self._sizes, self._options = config, sizes, padded_options(config)
        self.has_telemetry = self.has_retry = self.has_context = False
        self.router: Any = None
        self.find_factors(0)  # The layer has no number yet.

    def find_factors(self, layer_number: int) -> None:
        """Look up the factors of the layer with this number in the model.

        Without `eval_factor`, sizes of evaluation passes follow from the routing (`FIT`), unless
        graphs of a full iteration capture evaluation, too. Graphs of layers are replayed in
        training only (for `local` ones `guard` ensures it).
        """
        config = dispatch_config(self._config, **self._sizes)
        factor = self._options.layer_factors.get(layer_number, config.capacity_factor)
        eval_factor = self._options.eval_factor
        if eval_factor is None:
            eval_factor = factor if captures_iteration(self._config) else FIT
        self.training = dataclasses.replace(config, capacity_factor=factor)
        self.evaluation = dataclasses.replace(config, capacity_factor=eval_factor)
        self._generation = dataclasses.replace(config, capacity_factor=NO_DROP)
        self.fitting = dataclasses.replace(config, capacity_factor=FIT)

    @property
    def current(self) -> DispatchConfig:
        """The config for the layer's current mode.

        Text generation drops nothing unless `eval_factor` is a number: sizes of eager passes follow
        from the routing, and a CUDA graph, in which the host can read nothing, has room for every
        routing. Without `eval_factor`, evaluation in a graph has the config of training.
        """
        eval_factor = self._options.eval_factor
        if self.in_training:
            return self.training
        if eval_factor in (None, FIT) and self.generates:
            return self._generation if capturing() else self.fitting
        return self.training if eval_factor is None and capturing() else self.evaluation

    @property
    def in_training(self) -> bool:
        """True while the layer is in training mode, and before it has a router."""
        return self.router is None or self.router.training

    @property
    def generates(self) -> bool:
        """True while the layer generates text.

        It then gets an `inference_context`, or runs in torch's inference mode, as in Megatron's
        engines, where a rank without a request computes for its peers without a context.
        """
        return not self.in_training and (self.has_context or torch.is_inference_mode_enabled())

    def check_on_overflow(self) -> None:
        """Raise if `on_overflow` asks for an object that is missing.

        Raises:
            ValueError: names the option.
        """
        if self._options.on_overflow == "error" and not self.has_telemetry:
            raise ValueError(
                "a training loop must have a Telemetry to follow on_overflow='error', got none; "
                "make a padded_dispatch.megatron.Telemetry of the model before the first step and "
                "call its step() after each one, or leave the option out"
            )
        if self._options.on_overflow == "retry" and not self.has_retry:
            raise ValueError(
                "a training loop must repeat steps with on_overflow='retry', got one without "
                "padded_dispatch.megatron.Retry; wrap the forward-backward function in it. For "
                "Megatron-LM's pretrain(), start the script with python -m "
                "padded_dispatch.megatron.run, or call install() after it has imported pretrain"
            )
