"""A router that counts first and drops afterwards.

Megatron takes the map and the probabilities that leave the router for what will be dispatched, so
the drop belongs here. But in stock Megatron it comes before the counting: expert bias then sees the
map that was padded to capacity, in which every expert has exactly C tokens, and never moves. Here
losses, expert bias and logs see what the router asked for, and the cut is the last step.

The class of an existing router is swapped for a subclass, because specs may bring their own router.

Under policy "random" the router counts its draws, in a buffer that a replayed graph advances and a
checkpoint holds. Seed, layer and count make the draw: all ranks draw alike, and a resumed run goes
on as if it had not stopped. Megatron reads a checkpoint without the count (of another policy) with
`--dist-ckpt-strictness=log_unexpected`; a stock layer takes one with it where it is not strict.

The probability that each expert would have had: what rerouting needs of Megatron's router.

Megatron gives probabilities of the chosen experts only. Those of all follow from the logits as in
`topk_routing_with_score_function` (Megatron-Core 0.16.1 to 0.19.0), with the divisor of the token's
own request:

- softmax before top-k: the softmax over all experts;
- softmax after top-k: exp(logit) over the sum of exp of the chosen experts' logits;
- sigmoid, and sqrtsoftplus since 0.18: over the sum of the chosen experts' scores, as they are for
  K = 1;

each times the scaling factor. The expert bias decides which expert is next, and has no part in its
probability. With groups a token stays within those that its own request touches, so that the limit
on groups holds.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from torch import Tensor

from padded_dispatch.exchange.agreement import Agreement
from padded_dispatch.exchange.choose import agree_on_shapes
from padded_dispatch.megatron.config import LayerConfigs, padded_options
from padded_dispatch.ops.counters import RoutingObserver
from padded_dispatch.ops.overflow import select_with_remedy

# What chooses experts by more than logits and bias.
_OTHER_ROUTINGS = frozenset({"sinkhorn", "quantile_balancing"})


@dataclass(frozen=True, kw_only=True)
class AllScores:
    """For `ops.overflow.reroute`: `scores_TE` with gradient, `choice_TE` without."""

    scores_TE: Tensor
    choice_TE: Tensor


def check_reroute(config: Any) -> None:
    """Refuse routers whose next-best expert is not known.

    Raises:
        ValueError: names the field, its value and what to change.
    """
    routings = config.moe_router_load_balancing_type
    names = [routings] if isinstance(routings, str) else routings
    replays = config.moe_enable_routing_replay
    for name, value, refused in (
        ("moe_router_load_balancing_type", routings, not _OTHER_ROUTINGS.isdisjoint(names)),
        ("moe_enable_routing_replay", replays, replays),
    ):
        if refused:
            raise ValueError(
                f"{name}={value!r} is not possible with remedy='reroute': which expert comes next "
                "is not in the logits; set remedy='none' or 'renormalize'"
            )


def scores_of_all(router: Any, logits_TE: Tensor, map_TE: Tensor) -> AllScores:
    """Every expert's would-be probability.

    Args:
        router: a TopKRouter that `check_reroute` has passed.
        logits_TE: floating point [T, E], what the router chose by.
        map_TE: bool [T, E], the K experts that it chose for each token, padding tokens included.
    """
    config = router.config
    logits_TE = logits_TE.float()
    choice_TE = logits_TE.detach()
    if router.score_function == "softmax":
        chosen_TE = logits_TE
        if not config.moe_router_pre_softmax:
            chosen_TE = torch.where(map_TE, logits_TE, -torch.inf)
        scores_TE = (logits_TE - chosen_TE.logsumexp(1, keepdim=True)).exp()
    else:
        scores_TE = _raw_scores(router.score_function, logits_TE)
        choice_TE = scores_TE.detach()
        if router.expert_bias is not None:
            choice_TE = choice_TE + router.expert_bias
        if router.topk > 1:
            sum_T1 = torch.where(map_TE, scores_TE, 0).sum(1, keepdim=True)
            scores_TE = scores_TE / (sum_T1 + 1e-20)
    if config.moe_router_topk_scaling_factor:
        scores_TE = scores_TE * config.moe_router_topk_scaling_factor
    if config.moe_router_group_topk:
        in_groups_TGE = map_TE.unflatten(1, (config.moe_router_num_groups, -1))
        allowed_TE = in_groups_TGE.any(2, keepdim=True).expand_as(in_groups_TGE).flatten(1)
        choice_TE = torch.where(allowed_TE, choice_TE, -torch.inf)
    return AllScores(scores_TE=scores_TE, choice_TE=choice_TE)


def _raw_scores(score_function: str, logits_TE: Tensor) -> Tensor:
    if score_function == "sigmoid":
        return logits_TE.sigmoid()
    assert score_function == "sqrtsoftplus"
    return F.softplus(logits_TE).sqrt()


_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}

# Megatron-Core 0.16.1 to 0.19.0: `TransformerLayer._te_cuda_graph_capture` and
# `_te_cuda_graph_replay` call the MoE layer without it.
MASK_IS_LOST = (
    "Megatron drops it where cuda_graph_impl='transformer_engine' captures or replays a layer, and "
    "padding tokens would take slots and count in the losses; train without padding_mask, or set "
    "cuda_graph_impl='none'"
)


@dataclass(frozen=True, kw_only=True)
class Selector:
    """What a router needs to cut its map to capacity, and whom it tells.

    `observers` are told of training passes, `eval_observers` of those in evaluation mode; whoever
    wants to know of both is in both. What they do is captured with the router: append before.
    """

    configs: LayerConfigs
    agreement: Agreement
    observers: list[RoutingObserver] = field(default_factory=list)
    eval_observers: list[RoutingObserver] = field(default_factory=list)


def select_after_counting(router: Any, selector: Selector) -> None:
    """Turn a Megatron TopKRouter (or a subclass) into one that selects after it has counted.

    Raises:
        ValueError: the config's policy or remedy does not go with another of its settings.
    """
    selector.configs.follow(router)
    router.selector = selector
    router.saw_padding_mask = False
    router.protected_T = None
    router.was_captured = False
    num_draws = None
    if selector.configs.training.remedy == "reroute":
        check_reroute(router.config)
    if selector.configs.training.policy == "random":
        _check_random(router.config)
        # As Megatron's own buffers; the weight may still be on its way there.
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        num_draws = torch.zeros(1, dtype=torch.int64, device=device)
    # In checkpoints where there are draws, so that a resumed run goes on with the next one.
    router.register_buffer("num_draws", num_draws)
    router.__class__ = _selecting(type(router))


def protect(chunks: list[Any], keep: Tensor) -> None:
    """Let tokens come before all others in training passes, in every MoE layer, until changed.

    To be called before each forward pass whose tokens differ. With CUDA graphs call it once before
    the capture, if only with zeros: replays read the memory that the capture saw.

    Args:
        chunks: the model's chunks on this rank.
        keep: bool, shaped like the hidden states without their width, [S, B]: with sequence or
            context parallelism, this rank's part. All False protects nobody.

    Raises:
        ValueError: a graph was captured without such a mask, or with one of another size.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "protect"):
                module.protect(keep)


@functools.cache
def _selecting(base: type) -> type:
    """A subclass of `base` with the methods below; one per base, so that types compare equal."""

    class SelectingRouter(base):
        """See the module's docstring."""

        selector: Selector
        saw_padding_mask: bool
        num_draws: Tensor | None
        protected_T: Tensor | None
        was_captured: bool

        def set_layer_number(self, layer_number: int) -> None:
            """As `Router.set_layer_number`; the layer may have a capacity factor of its own."""
            super().set_layer_number(layer_number)
            self.selector.configs.find_factors()

        def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> Any:
            """As `TopKRouter.forward`; the first point at which this layer's ranks could differ."""
            config, tokens_TD = self.selector.configs.now, input.flatten(0, -2)
            # Ranks of different modes may have the same capacity, but no longer the same next call.
            agree_on_shapes(self.selector.agreement, config, tokens_TD, training=int(self.training))
            if self.training:
                self.selector.configs.check_controlled()
            if self.training and self.config.cuda_graph_impl == "transformer_engine":
                if self.saw_padding_mask and padding_mask is None:
                    raise ValueError(
                        "padding_mask=None is not possible after a training step that had a mask: "
                        + MASK_IS_LOST
                    )
                self.saw_padding_mask = padding_mask is not None
            return super().forward(input, padding_mask)

        def protect(self, keep: Tensor) -> None:
            """See the function of this name."""
            protected_T = self.protected_T
            if protected_T is None or protected_T.numel() != keep.numel():
                if self.was_captured:
                    raise ValueError(
                        f"keep of shape {list(keep.shape)} is not possible: a CUDA graph was "
                        "captured without a mask of this size; call protect() before the capture"
                    )
                device = self.weight.device
                protected_T = self.protected_T = torch.empty(
                    keep.numel(), dtype=torch.bool, device=device
                )
            protected_T.copy_(keep.flatten())

        def gating(self, input: Tensor) -> Tensor:
            """As `Router.gating`, also where the bias is narrower than the logits.

            Megatron-Core hands the bias to Transformer Engine's GEMM as it is, which reads it in
            the dtype of the output. Seen with 0.19.0 and 2.20.2: a bf16 bias and
            `moe_router_dtype="fp32"` give logits that are off by 8.8 and change with the memory
            behind the bias.
            """
            dtype = _ROUTER_DTYPES.get(self.config.moe_router_dtype, input.dtype)
            if self.bias is None or self.bias.dtype == dtype:
                return super().gating(input)
            return router_gating_linear(input, self.weight, self.bias.to(dtype), dtype)

        def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
            """As `TopKRouter.routing`: probs [T, E] and map [T, E], but of the kept rows only."""
            with _no_stock_dropping(self.config):
                probs_TE, map_TE = super().routing(logits, padding_mask)
            config = self.selector.configs.now
            scores_TE = choice_TE = None
            if config.remedy == "reroute":
                scores = scores_of_all(self, logits.flatten(0, -2), map_TE)
                scores_TE, choice_TE = scores.scores_TE, scores.choice_TE
            if padding_mask is not None:
                map_TE = map_TE & ~padding_mask.reshape(-1, 1)
            capacity = config.capacity(map_TE.shape[0])
            selection = select_with_remedy(
                config,
                capacity,
                map_TE,
                probs_TE,
                scores_TE,
                choice_TE,
                protected_T=self._protected(map_TE.shape[0]),
                draw=self._draw(),
            )
            self._count_draw()
            for observer in self._observers():
                observer.observe(map_TE, probs_TE.detach(), selection, capacity)
            return selection.probs_TE, selection.kept_TE

        def _protected(self, num_tokens: int) -> Tensor | None:
            """Who comes first in this pass; nobody in evaluation, whose tokens are others."""
            self.was_captured |= _capturing()
            if self.protected_T is None or not self.training:
                return None
            if self.protected_T.numel() != num_tokens:
                raise ValueError(
                    f"keep of {self.protected_T.numel()} tokens is not possible: this pass has "
                    f"{num_tokens}; call protect() with a mask of its tokens"
                )
            return self.protected_T

        def _draw(self) -> Tensor | None:
            """The number of this pass's draw: seed and layer above, draws so far below 2**32."""
            if self.num_draws is None:
                return None
            own = padded_options(self.config).seed * 1_000_003 + (self.layer_number or 0)
            return self.num_draws[0] + ((own % 2**31) << 32)

        def _count_draw(self) -> None:
            # Only now, and only here: the pass without gradients that recompute makes first has
            # the same draw as this one, and evaluation has whatever comes next.
            if self.num_draws is not None and self.training and torch.is_grad_enabled():
                self.num_draws += 1

        def _load_from_state_dict(
            self, state_dict: dict[str, Any], prefix: str, *args: Any
        ) -> None:
            # What was written under another policy has no draws: go on with ours. And they mean
            # nothing to another policy.
            if self.num_draws is not None:
                state_dict.setdefault(f"{prefix}num_draws", self.num_draws)
            else:
                state_dict.pop(f"{prefix}num_draws", None)
            super()._load_from_state_dict(state_dict, prefix, *args)

        def _observers(self) -> list[RoutingObserver]:
            """Who is told of a pass: each pass once."""
            if not self.training:
                return self.selector.eval_observers
            # Recompute runs the router twice, first without gradients.
            return self.selector.observers if torch.is_grad_enabled() else []

        def _apply_expert_bias(
            self, routing_map: Tensor, padding_mask: Tensor | None = None
        ) -> None:
            # Not by way of super(): stock combines [T, E] with [T] (0.16.1 to 0.19.0), and raises.
            if self.enable_expert_bias and torch.is_grad_enabled():
                if padding_mask is not None:
                    routing_map = routing_map & ~padding_mask[:, None]
                self.local_tokens_per_expert += routing_map.sum(dim=0)

    SelectingRouter.__name__ = SelectingRouter.__qualname__ = f"Selecting{base.__name__}"
    return SelectingRouter


def _capturing() -> bool:
    """Whether what runs now is captured: by Megatron's helpers, or as a whole iteration."""
    return is_graph_capturing() or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )


def _check_random(config: Any) -> None:
    """Refuse schedules in which recompute would see another draw than the pass that it repeats."""
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
    if recomputes and calls_ahead:
        raise ValueError(
            f"policy='random' is not possible with {' and '.join(calls_ahead)} and a MoE layer "
            "that is recomputed: several passes wait for their recompute, which would see the "
            "draws of later ones; take 'moe' out of the recompute, or another policy"
        )


@contextmanager
def _no_stock_dropping(config: Any) -> Iterator[None]:
    """Hide the capacity factor from `TopKRouter.routing`, which would drop before it counts."""
    factor = config.moe_expert_capacity_factor
    config.moe_expert_capacity_factor = None
    try:
        yield
    finally:
        config.moe_expert_capacity_factor = factor
