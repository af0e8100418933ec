"""A router that counts what the tokens asked for, and drops afterwards.

Megatron treats the map and the probabilities that leave the router as what will be dispatched, so
rows must be dropped in the router. Stock Megatron drops before it counts. Its expert bias then sees
the map that was padded to capacity, in which every expert has exactly C tokens, and never moves.
Here losses, expert bias and logs see the map before dropping; selection is the router's last step.

`SelectAfterCounting` holds this behaviour. A spec may bring its own subclass of `TopKRouter`, so
`select_after_counting` gives an existing router a class that combines the two.

Under policy "random" the router counts its draws in the buffer `num_draws`, which replayed graphs
advance and checkpoints hold. Seed, layer number and count determine a draw. So all ranks draw
alike, and a resumed run continues with the next draw. A checkpoint that was written under another
policy lacks the buffer: Megatron reads it with `--dist-ckpt-strictness=log_unexpected`. A stock
layer loads a checkpoint that has the buffer if loading is not strict.

Letters: T tokens on this rank; K experts per token; E experts in all; D hidden size.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.overrides import TorchFunctionMode

from padded_dispatch.config import DispatchConfig, PoolSizes, require
from padded_dispatch.exchange import Exchange
from padded_dispatch.exchange.agreement import Agreement, Values
from padded_dispatch.exchange.choose import agree_on_shapes
from padded_dispatch.exchange.fit import Fitted, require_eager
from padded_dispatch.megatron.compat import capturing, number_in_model
from padded_dispatch.megatron.config import settings_of
from padded_dispatch.megatron.layer_configs import LayerConfigs
from padded_dispatch.megatron.routed import routed, say, why_not
from padded_dispatch.megatron.router_scores import check_reroute, scores_of_all
from padded_dispatch.ops.counters import RoutingObserver
from padded_dispatch.ops.overflow import select_with_remedy

_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class Selector:
    """The parts of a layer that its router needs to cut its map to capacity.

    `observers` are called in training passes, `eval_observers` in evaluation mode; an observer of
    both is in both lists. A CUDA graph captures the calls, so append observers before the capture.

    Attributes:
        configs: configs of the layer.
        agreement: over its groups.
        fit: finds the sizes of a pass whose factor is `FIT`, from its config and the map that was
            asked for; a collective call.
        exchange: finds the exchange of a pass from its config, tokens and probabilities; for pool
            "receiver".
        source: number of this rank among the sources of its experts.
        take_kept: takes the rows that each source keeps, `Selection.kept_SE`.
        observers, eval_observers: see above.
    """

    configs: LayerConfigs
    agreement: Agreement
    fit: Callable[[DispatchConfig, Tensor], Fitted]
    exchange: Callable[[DispatchConfig, Tensor, Tensor], Exchange]
    source: int
    take_kept: Callable[[Tensor | None], None]
    observers: list[RoutingObserver] = field(default_factory=list)
    eval_observers: list[RoutingObserver] = field(default_factory=list)


def select_after_counting(router: Any, selector: Selector) -> None:
    """Turn a Megatron TopKRouter (or a subclass) into one that selects after it has counted.

    Raises:
        ValueError: if the router is of another class, or if the policy or the remedy conflicts with
            another setting; the message names both.
    """
    require(
        isinstance(router, TopKRouter),
        "router",
        type(router).__name__,
        "be a TopKRouter or a subclass of it",
        "give the layer's spec such a router",
    )
    router.__class__ = _combined(type(router))
    router.attach(selector)


def protect(chunks: Iterable[Any], keep: Tensor) -> None:
    """Give the marked tokens slots before all others, in training passes of every MoE layer.

    The mask holds until the next call. Call this before each forward pass whose tokens differ. With
    CUDA graphs, call it once before the capture, if only with zeros: replays read the memory that
    was captured.

    Args:
        chunks: the model's chunks on this rank.
        keep: bool, shaped like the hidden states without their width, [S, B]; with sequence or
            context parallelism, this rank's part. All False protects no token.

    Raises:
        ValueError: if a graph was captured without such a mask, or with one of another size.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, SelectAfterCounting):
                module.protect(keep)


class SelectAfterCounting(TopKRouter):
    """A router that counts the map that the tokens asked for, and returns the map that is kept.

    `selector`: capacity, agreement and observers of the layer.
    `num_draws`: int64 [1], the draws so far; a buffer under policy "random", else None.
    `protected_T`: bool [T], the tokens that get slots first; None before the first `protect`.
    `was_captured`: whether a CUDA graph holds a pass of this router.
    """

    selector: Selector
    num_draws: Tensor | None
    protected_T: Tensor | None
    was_captured: bool
    _tokens_TD: Tensor | None
    _settings: Values | None

    def attach(self, selector: Selector) -> None:
        """Set the attributes of this class, and hide the capacity factor from the router."""
        if selector.configs.training.remedy == "reroute":
            check_reroute(self.config)
        num_draws = None
        if selector.configs.training.policy == "random":
            _check_random(self.config)
            # On the device of Megatron's own buffers; the weight may not be there yet.
            device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
            num_draws = torch.zeros(1, dtype=torch.int64, device=device)
        # A buffer, so that checkpoints hold it.
        self.register_buffer("num_draws", num_draws)
        self.protected_T = None
        self.was_captured = False
        self._tokens_TD = None
        self._settings = None
        self.selector = selector
        self.config = _without_factor(self.config)
        selector.configs.follow(self)
        if self.layer_number is not None:
            selector.agreement.layer = number_in_model(self)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the number, and look up the capacity factors that the options give this layer."""
        super().set_layer_number(layer_number)
        self.selector.configs.find_factors()
        self.selector.agreement.layer = number_in_model(self)

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> Any:
        """Compare shapes over the ranks, then run `TopKRouter.forward`.

        This is the layer's first step, so ranks that differ raise before any exchange. Evaluation
        that fits takes another T on each rank, as Megatron's dynamic engine has it.
        """
        config, tokens_TD = self.selector.configs.now, input.flatten(0, -2)
        # The mode is compared, too: training and evaluation may have the same capacity here, but
        # the ranks' next calls would differ.
        agree_on_shapes(
            self.selector.agreement,
            config,
            tokens_TD,
            self._rules(padding_mask),
            any_tokens=config.fits and not self.training,
            training=int(self.training),
        )
        if self.training:
            self.selector.configs.check_controlled()
        num_tokens = tokens_TD.shape[0]
        require(
            padding_mask is None or padding_mask.numel() == num_tokens,
            "padding_mask.shape",
            None if padding_mask is None else list(padding_mask.shape),
            f"have one entry for each of the {num_tokens} tokens of this rank",
            "with sequence parallelism, split the mask like the tokens on later pipeline stages; "
            "Megatron does so on the first one only",
        )
        self._tokens_TD = tokens_TD
        try:
            return super().forward(input, padding_mask)
        finally:
            self._tokens_TD = None

    def _rules(self, padding_mask: Tensor | None) -> Values:
        """Return everything that decides this pass, except for what `agree_on_shapes` compares.

        Options and Megatron's fields are read once. The others decide whether a rank raises later
        in this pass, when its peers are in the exchange.
        """
        if self._settings is None:
            self._settings = settings_of(self.config)
        captures = self.config.cuda_graph_impl == "transformer_engine"
        protected_T = self.protected_T if self.training else None
        return (
            *self._settings,
            ("layer has a Telemetry", self.selector.configs.controlled),
            ("tokens of protect()", None if protected_T is None else protected_T.numel()),
            ("padding_mask is given", captures and padding_mask is not None),
        )

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits, also where the bias is narrower than they are.

        Megatron-Core passes the bias to Transformer Engine's GEMM as it is, and the GEMM reads it
        in the dtype of the output. Seen with 0.19.0 and 2.20.2: a bf16 bias and
        `moe_router_dtype="fp32"` give logits that are off by 8.8 and change with the memory behind
        the bias.
        """
        dtype = _ROUTER_DTYPES.get(self.config.moe_router_dtype, input.dtype)
        if self.bias is None or self.bias.dtype == dtype:
            return super().gating(input)
        return router_gating_linear(input, self.weight, self.bias.to(dtype), dtype)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        """Do what `TopKRouter.routing` does, then keep at most C rows per expert.

        Returns:
            Probabilities [T, E], exactly 0 where not kept, and the kept map, bool [T, E].
        """
        if padding_mask is not None:
            # Without gradients of masked rows: an auxiliary loss divides by the number of tokens,
            # and if all are masked its gradient is NaN, which a product with 0 would keep.
            masked = padding_mask.reshape(*logits.shape[:-1], 1)
            logits = logits.masked_fill(masked, 0)
        probs_TE, map_TE = self._asked(logits, padding_mask)
        config = self.selector.configs.now
        scores_TE = choice_TE = None
        if config.remedy == "reroute" and not config.fits:
            scores_TE, choice_TE = scores_of_all(self, logits.flatten(0, -2), map_TE)
        if padding_mask is not None:
            map_TE = map_TE & ~padding_mask.reshape(-1, 1)
        sizes, demands = self._sizes(config, map_TE), self._demands(config, probs_TE)
        selection = select_with_remedy(
            config,
            sizes,
            map_TE,
            probs_TE,
            scores_TE,
            choice_TE,
            protected_T=self._protected(map_TE.shape[0]),
            draw=self._draw(),
            all_demands=demands,
            source=self.selector.source,
        )
        self.selector.take_kept(selection.kept_SE)
        if demands is not None:
            selection = dataclasses.replace(selection, demand_SE=demands.first)
        self._count_draw()
        for observer in self._observers():
            observer.observe(map_TE, probs_TE.detach(), selection, sizes)
        return selection.probs_TE, selection.kept_TE

    def _asked(self, logits: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what `TopKRouter.routing` returns, in fewer launches where that is possible."""
        reason = why_not(self, logits, padding_mask)
        say(reason)
        if not reason:
            return routed(self, logits)
        recomputes = self.training and not torch.is_grad_enabled()
        with _SortedChoices() if recomputes else nullcontext():
            return super().routing(logits, padding_mask)

    def _sizes(self, config: DispatchConfig, asked_TE: Tensor) -> PoolSizes:
        """Return the sizes of this pass; with `FIT`, find them and leave them to the dispatcher."""
        if not config.fits:
            return config.sizes(asked_TE.shape[0])
        require_eager(capturing())
        fitted = self.selector.fit(config, asked_TE)
        self.selector.configs.fitted = fitted
        return fitted.sizes_of_pass

    def _demands(self, config: DispatchConfig, probs_TE: Tensor) -> "_Demands | None":
        """Return how this source learns the demands of all; None unless they share slots."""
        if not config.shares_receivers:
            return None
        assert self._tokens_TD is not None
        return _Demands(self.selector.exchange(config, self._tokens_TD, probs_TE))

    def protect(self, keep: Tensor) -> None:
        """Give the marked tokens slots first; see the function `protect`."""
        if self.protected_T is None or self.protected_T.numel() != keep.numel():
            require(
                not self.was_captured,
                "keep.shape",
                list(keep.shape),
                "be that of the mask that the CUDA graph was captured with",
                "call protect() before the capture",
            )
            device = self.weight.device
            self.protected_T = torch.empty(keep.numel(), dtype=torch.bool, device=device)
        self.protected_T.copy_(keep.flatten())

    def _protected(self, num_tokens: int) -> Tensor | None:
        """Return the mask for this pass; None in evaluation, which has other tokens."""
        self.was_captured |= capturing()
        if self.protected_T is None or not self.training:
            return None
        require(
            self.protected_T.numel() == num_tokens,
            "keep.numel()",
            self.protected_T.numel(),
            f"be {num_tokens}, the number of tokens in this pass",
            "call protect() with a mask of these tokens",
        )
        return self.protected_T

    def _draw(self) -> Tensor | None:
        """Return the int64 of this pass's draw: seed and layer above, `num_draws` below 2**32."""
        if self.num_draws is None:
            return None
        return self.num_draws[0] + ((self.layer_number or 0) << 32)

    def _count_draw(self) -> None:
        # Only in training passes with gradients. Recompute runs a pass without gradients first,
        # which needs the same draw as the second; and evaluation must not disturb training.
        if self.num_draws is not None and self.training and torch.is_grad_enabled():
            self.num_draws += 1

    def _observers(self) -> list[RoutingObserver]:
        """Return the observers of this pass, so that each pass is counted once."""
        if not self.training:
            return self.selector.eval_observers
        # Recompute runs the router twice, first without gradients.
        return self.selector.observers if torch.is_grad_enabled() else []

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        # Does not call super(): stock combines [T, E] with [T] (0.16.1 to 0.19.0), and raises.
        if self.enable_expert_bias and torch.is_grad_enabled():
            if padding_mask is not None:
                routing_map = routing_map & ~padding_mask[:, None]
            assert self.local_tokens_per_expert is not None
            self.local_tokens_per_expert += routing_map.sum(dim=0)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A checkpoint of another policy has no draws: keep ours. Other policies ignore theirs.
        if self.num_draws is not None:
            state_dict.setdefault(f"{prefix}num_draws", self.num_draws)
        else:
            state_dict.pop(f"{prefix}num_draws", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


@functools.cache
def _combined(base: type) -> type:
    """Return a class that puts `SelectAfterCounting` in front of `base`, under the names of `base`.

    Cached, so that routers of one class still share a class. The names stay, because other tools
    look a router's class up by its name.
    """
    names = {"__qualname__": base.__qualname__, "__module__": base.__module__}
    return type(base)(base.__name__, (SelectAfterCounting, base), names)


class _SortedChoices(TorchFunctionMode):
    """Let `topk` sort what it finds, as in a pass with gradients.

    From 0.18 on Megatron leaves a token's chosen experts unsorted in a pass without gradients. A
    softmax over them then rounds in another order, also in the first pass of recompute: its output
    differs from that of the second pass, whose gradients train, and from a CUDA graph's.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.topk:
            kwargs["sorted"] = True
        return func(*args, **kwargs)


class _Demands:
    """Exchange of the demands of all sources; `first` is the first table, int32 [S, E]."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.first: Tensor | None = None

    def __call__(self, demand_E: Tensor) -> Tensor:
        demand_SE = self._exchange.all_demands(demand_E)
        if self.first is None:
            self.first = demand_SE
        return demand_SE


def _without_factor(config: Any) -> Any:
    """Return a view of `config` in which the capacity factor reads as None.

    `TopKRouter.routing` drops before it counts if the router's config has a factor. No other code
    reads the factor there (Megatron-Core 0.16.1 to 0.19.0).

    The view shares the attributes of `config`, so any other field reads alike in both, and a write
    to either reaches both. A copy would miss later writes: training loops change the model's config
    (`moe_aux_loss_coeff`), `toggle_cuda_graphs` sets its `cuda_graph_impl`, and
    `set_decode_expert_padding` writes a factor to each router's own config for text generation.
    """
    view = object.__new__(_view_class(type(config)))
    view.__dict__ = config.__dict__
    return view


@functools.cache
def _view_class(base: type) -> type:
    """Return a subclass of a config class with a capacity factor that reads as None."""
    name = "moe_expert_capacity_factor"

    def write(config: Any, factor: float | None) -> None:
        vars(config)[name] = factor

    hidden = property(lambda config: None, write)
    return type(base)(f"{base.__name__}WithoutFactor", (base,), {name: hidden})


def _check_random(config: Any) -> None:
    """Raise if a recomputed pass could see another draw than the pass that it repeats."""
    recomputes = config.recompute_granularity == "full" or (
        config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ())
    )
    calls_ahead = [
        f"{name}={value!r}"
        for name, value in (
            ("pipeline_model_parallel_size", config.pipeline_model_parallel_size),
            ("mtp_use_repeated_layer", getattr(config, "mtp_use_repeated_layer", False)),
        )
        if value > 1 or value is True
    ]
    require(
        not (recomputes and calls_ahead),
        "policy",
        "random",
        f"not draw with {' and '.join(calls_ahead)} and a MoE layer that is recomputed",
        "several passes wait for their recompute, which would see the draws of later passes: take "
        "'moe' out of the recompute, or choose another policy",
    )
