"""Our configs of one layer while it runs: which one applies now, and what ranks compare of it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from padded_dispatch.config import FIT, NO_DROP, DispatchConfig, require
from padded_dispatch.megatron.compat import captures_iteration, capturing
from padded_dispatch.megatron.config import dispatch_config, padded_options
from padded_dispatch.utils.phases import in_backward

# Fields that decide what a rank computes of its peers' tokens, so ranks must have the same: those
# that begin so, and others.
_BEGIN = "moe_", "activation_func", "fp4", "fp8", "glu_linear_"
_COMPARED = (
    "add_bias_linear",
    "bf16",
    "bias_activation_fusion",
    "cuda_graph_impl",
    "cuda_graph_modules",
    "cuda_graph_scope",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "first_last_layers_bf16",
    "fp16",
    "gated_linear_unit",
    "hidden_size",
    "mlp_chunks_for_training",
    "num_layers_at_end_in_bf16",
    "num_layers_at_start_in_bf16",
    "num_moe_experts",
    "params_dtype",
    "quant_recipe",
    "recompute_granularity",
    "recompute_modules",
    "sequence_parallel",
    "transformer_impl",
    "use_te_activation_func",
)


class LayerConfigs:
    """The `DispatchConfig`s of one layer.

    Router and dispatcher share one object. The router's train/eval mode decides which config
    applies; it is set also if a CUDA graph replays the layer.

    Attributes:
        training: the config of training passes.
        evaluation: the config of evaluation passes.
        fitting: the config of eager passes that drop nothing (`FIT`).
        has_context: whether the layer was last called with an `inference_context`.
        hooks: a weak reference to the last `StepHooks` of this layer, which may have ended; None if
            it has had none.
        retry: the same of the `Retry` that repeats steps in which this layer drops.
        router: a weak proxy of the layer's router; None before the layer has one.

    Args:
        config, sizes: see `dispatch_config`.
    """

    def __init__(self, config: TransformerConfig, **sizes: Any) -> None:
        self._config, self._sizes, self._options = config, sizes, padded_options(config)
        self.has_context = False
        self.hooks: Callable[[], Any] | None = None
        self.retry: Callable[[], Any] | None = None
        # Of the last training pass, and of the last one in evaluation that came later, by mode.
        self._of_pass: dict[bool, DispatchConfig] = {}
        self.router: Any = None
        self.find_factors(0)  # The layer has no number yet.

    def find_factors(self, layer_number: int) -> None:
        """Look up the factors of the layer with this number in the model.

        Without `eval_factor`, sizes of evaluation passes follow from the routing (`FIT`), unless
        graphs of a full iteration capture evaluation, too. Graphs of layers are replayed in
        training only.
        """
        self._factor = self._config.moe_expert_capacity_factor
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
        routing. It has an `inference_context`, or torch's inference mode: in Megatron's engines a
        rank without a request computes for its peers without a context. Without `eval_factor`,
        evaluation in a graph has the config of training.
        """
        eval_factor = self._options.eval_factor
        if self.in_training:
            return self.training
        generates = self.has_context or torch.is_inference_mode_enabled()
        if eval_factor in (None, FIT) and generates:
            return self._generation if capturing() else self.fitting
        return self.training if eval_factor is None and capturing() else self.evaluation

    def stays(self) -> bool:
        """Return whether a pass that backward recomputes has the mode and config of its first run.

        Call it once in each pass. It compares with the last pass outside of backward. Evaluation
        may come in between.
        """
        if not in_backward():
            if self.in_training:
                self._of_pass.clear()
            self._of_pass[self.in_training] = self.current
        return self._of_pass.get(self.in_training) == self.current

    def check_factor(self) -> None:
        """Raise if a loop has set another `moe_expert_capacity_factor` than the layer has read.

        None, which Megatron's text generation leaves in the config, is not one.
        """
        name, factor = "moe_expert_capacity_factor", self._config.moe_expert_capacity_factor
        rule, fix = f"stay {self._factor} in a model that is built", "build the model again"
        require(factor in (None, self._factor), name, factor, rule, fix)

    @property
    def in_training(self) -> bool:
        """True while the layer is in training mode, and before it has a router."""
        return self.router is None or self.router.training

    @property
    def is_followed(self) -> bool:
        """True while `StepHooks` follow what this layer drops."""
        return self.hooks is not None and self.hooks() is not None

    @property
    def has_retry(self) -> bool:
        """True while a `Retry` repeats steps in which this layer drops."""
        return self.retry is not None and self.retry() is not None

    @property
    def on_overflow(self) -> str:
        """The option of this name."""
        return self._options.on_overflow

    @property
    def lacks_hooks(self) -> bool:
        """True if `on_overflow` asks for hooks that are missing."""
        has = {"error": self.is_followed, "retry": self.has_retry}
        return not has.get(self.on_overflow, True)

    def check_on_overflow(self) -> None:
        """Raise if `on_overflow` asks for hooks that are missing; call it in each training pass.

        Raises:
            ValueError: names the option.
        """
        if self.lacks_hooks:
            raise ValueError(
                f"a training loop must have StepHooks to follow on_overflow={self.on_overflow!r}, "
                "got none; make padded_dispatch.megatron.StepHooks of the model before the first "
                "step, call its after_step() after each one, and run the passes by its wrap(), or "
                "leave the option out. pretrain() of Megatron-LM and of Megatron-Bridge has them, "
                "if it is imported before the model's config is made"
            )


def settings_of(config: TransformerConfig) -> tuple[tuple[str, object], ...]:
    """Return all options and the fields of `config` that act on the padded path, as text by name.

    They must be equal on all ranks of a layer.
    """
    names = (name for name in TransformerConfig.__dataclass_fields__ if name.startswith(_BEGIN))
    fields = {name: getattr(config, name, None) for name in (*names, *_COMPARED)}
    if (recipe := fields["quant_recipe"]) is not None:  # Its text lacks the configs.
        matchers = [(type(matcher).__name__, vars(matcher)) for matcher in recipe.matchers]
        fields["quant_recipe"] = recipe.configs, matchers
    values = dataclasses.asdict(padded_options(config)) | fields
    return tuple((name, _text_of(value)) for name, value in values.items())


def _text_of(value: object) -> str:
    """Return the text of a value; of a function its name, since an address differs by rank."""
    if not callable(value):
        return str(value)
    function = getattr(value, "func", value)  # of a partial
    return getattr(function, "__qualname__", type(function).__qualname__)
