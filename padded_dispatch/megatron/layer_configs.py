"""The configs of one layer, and which one holds now."""

import dataclasses
import functools
from typing import Any

import torch

from padded_dispatch.config import FIT, NO_DROP, DispatchConfig, PoolSizes
from padded_dispatch.megatron.compat import capturing, number_in_model
from padded_dispatch.megatron.config import dispatch_config, fitting
from padded_dispatch.megatron.options import PaddedOptions


class LayerConfigs:
    """The `DispatchConfig`s of one layer, and the sizes of a pass.

    Router and dispatcher share one object. The router's mode decides which of the two configs
    holds; a layer that is replayed from a CUDA graph has a mode, too.

    Attributes:
        training: the config of training passes.
        evaluation: the config of evaluation passes.
        generation: the config of text generation in a CUDA graph; eager, its passes fit.
        given_context: whether the layer was last called with an `inference_context`.
        fitted: the sizes that the router found for its last pass with `FIT`.
        controlled: whether a `Telemetry` reads what this layer drops.
        retried: whether a `Retry` repeats steps in which this layer drops.

    Args:
        config, options, num_ranks, etp_size: see `dispatch_config`.
    """

    fitted: PoolSizes

    def __init__(
        self, config: Any, options: PaddedOptions, *, num_ranks: int, etp_size: int
    ) -> None:
        self._translate = functools.partial(
            dispatch_config, config, options, num_ranks=num_ranks, etp_size=etp_size
        )
        self._eval_by_default = options.eval_factor is None
        self._generates_without_drops = options.eval_factor in (None, FIT)
        self._on_overflow = options.on_overflow
        self.controlled = False
        self.retried = False
        self.given_context = False
        self._router: Any = None
        self._set(self._translate(), self._translate(training=False))

    def _set(self, training: DispatchConfig, evaluation: DispatchConfig) -> None:
        self.training, self.evaluation = training, evaluation
        self.generation = dataclasses.replace(training, capacity_factor=NO_DROP)
        self._fits = evaluation if evaluation.fits else fitting(training)

    @property
    def now(self) -> DispatchConfig:
        """The config for the layer's current mode.

        Text generation drops nothing unless `eval_factor` is a number: a pass fits, and in a CUDA
        graph, where the host can read nothing, C = T. Evaluation in a graph is as training.
        """
        if self.in_training:
            return self.training
        if self._generates_without_drops and self.generates:
            return self.generation if capturing() else self._fits
        if self._eval_by_default and capturing():
            return self.training
        return self.evaluation

    def sizes(self, num_tokens: int) -> PoolSizes:
        """Return the sizes of the pass that the router routed last.

        Only a pass with `FIT` depends on what the router found: a replayed router runs no Python.
        """
        now = self.now
        return self.fitted if now.fits else now.sizes(num_tokens)

    @property
    def in_training(self) -> bool:
        """True while the layer is in training mode, and before it has a router."""
        return self._router is None or self._router.training

    @property
    def generates(self) -> bool:
        """True while the layer generates text.

        Then it gets an `inference_context`, or runs in torch's inference mode, as in Megatron's
        engines. A rank without a request computes for its peers without a context.
        """
        return not self.in_training and (self.given_context or torch.is_inference_mode_enabled())

    def check_controlled(self) -> None:
        """Raise if `on_overflow` asks for an object that is missing.

        Raises:
            ValueError: names the option.
        """
        if self._on_overflow == "error" and not self.controlled:
            raise ValueError(
                "a training loop must have a Telemetry to follow on_overflow='error', got none; "
                "make a padded_dispatch.megatron.Telemetry of the model before the first step and "
                "call its step() after each one, or leave the option out"
            )
        if self._on_overflow == "retry" and not self.retried:
            raise ValueError(
                "a training loop must repeat steps with on_overflow='retry', got one without "
                "padded_dispatch.megatron.Retry; wrap the forward-backward function in it. For "
                "Megatron-LM's pretrain(), start the script with python -m "
                "padded_dispatch.megatron.run, or call install() after it has imported pretrain"
            )

    def follow(self, router: Any) -> None:
        """Take the mode from `router` from now on."""
        self._router = router
        if router.layer_number is not None:
            self.find_factors()

    def find_factors(self) -> None:
        """Look up the factors of this layer, now that it has a number."""
        layer_number = number_in_model(self._router)
        self._set(
            self._translate(layer_number=layer_number),
            self._translate(layer_number=layer_number, training=False),
        )
