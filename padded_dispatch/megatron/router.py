"""A router that counts what the tokens asked for, and drops afterwards.

With cells, a source drops rows before it sends them. Megatron dispatches the map and the
probabilities that its router returns, so the router drops them. Stock `TopKRouter.routing` (0.16.1
to 0.20) drops before it counts. Its expert bias then sees the map that was padded to capacity, in
which every expert has exactly C tokens, and never moves. Here losses, expert bias and logs see the
map before dropping; selection is the router's last step. With a store, the receiver finds room for
rows, and the router drops nothing.

`SelectAfterCounting` holds this behaviour. A spec may bring its own subclass of `TopKRouter`, so
`select_after_counting` gives an existing router a class that combines the two.

Letters: T tokens on this rank; K experts per token; E experts in all; D hidden size.
"""

import functools
import itertools
import weakref
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.overrides import TorchFunctionMode

from padded_dispatch.config import FIT, require
from padded_dispatch.exchange.agreement import NamedValues, agree_on_shapes
from padded_dispatch.megatron.compat import capturing, number_in_model
from padded_dispatch.megatron.dispatcher import PaddedAlltoAllTokenDispatcher
from padded_dispatch.megatron.layer_configs import settings_of
from padded_dispatch.routing import select
from padded_dispatch.utils.phases import require_first_derivatives, trains, unseen, untraced

_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
_GATING = TopKRouter.gating  # Others may patch it later.


def select_after_counting(
    router: Any, dispatcher: PaddedAlltoAllTokenDispatcher, layer_name: str = ""
) -> None:
    """Turn a Megatron TopKRouter (or a subclass) into a `SelectAfterCounting`.

    Raises:
        ValueError: if the router is of another class.
    """
    rule = "be a TopKRouter or a subclass of it"
    fix = "give the layer's spec such a router"
    require(isinstance(router, TopKRouter), "router", type(router).__name__, rule, fix)
    router.__class__ = _combined(type(router))
    router.dispatcher, router.layer_name = dispatcher, layer_name
    dispatcher.configs.router = weakref.proxy(router)  # A cycle would keep deleted weights.


class SelectAfterCounting(TopKRouter):
    """A router that counts the map that the tokens asked for, and returns the map that is kept.

    Attributes:
        dispatcher: the layer's dispatcher.
        layer_name: like "mtp.layers.1.mtp_model_layer.layers.0.mlp" in hybrid stacks from 0.18 on.
    """

    dispatcher: PaddedAlltoAllTokenDispatcher
    layer_name: str = ""
    _settings: NamedValues | None = None
    _has_begun = False  # Whether `forward` runs.

    def set_layer_number(self, layer_number: int) -> None:
        """Set the layer's number, here and in the dispatcher."""
        super().set_layer_number(layer_number)
        self.dispatcher.set_layer(number_in_model(self))

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> Any:
        """Begin the pass, then run `TopKRouter.forward`."""
        self._begin(input, padding_mask)
        self._has_begun = True
        try:
            return super().forward(input, padding_mask)
        finally:
            self._has_begun = False

    @untraced
    def _begin(self, input: Tensor, padding_mask: Tensor | None) -> None:
        """Compare shapes over the ranks, and take note of a training pass.

        This is the layer's first step, so ranks that differ raise before any exchange. In
        evaluation passes that fit, ranks may differ in T, as in Megatron's dynamic engine.
        """
        configs, tokens_TD = self.dispatcher.configs, input.flatten(0, -2)
        config = configs.current
        if self._settings is None:  # Options and Megatron's fields are read once.
            self._settings = settings_of(self.config)
        captures = self.config.cuda_graph_impl == "transformer_engine"
        num_tokens = len(tokens_TD)
        mask_fits = padding_mask is None or padding_mask.numel() == num_tokens
        tensors = itertools.chain((input, self.weight), self.dispatcher.experts.parameters())
        agree_on_shapes(
            self.dispatcher.agreement,
            config,
            tokens_TD,
            # Further values with which one rank would raise later, with its peers in the exchange.
            (
                *self._settings,
                ("moe_expert_capacity_factor now", self.config.moe_expert_capacity_factor),
                ("layer has StepHooks", configs.hooks is not None),
                ("layer has a Retry", configs.has_retry),
                ("layer lacks StepHooks", configs.lacks_hooks),
                ("padding_mask has an entry for each token", mask_fits),
                ("padding_mask is given", captures and padding_mask is not None),
                # In backward a rank whose output needs none would leave its peers in the exchange.
                ("router needs gradients", self.weight.requires_grad),
                ("dtype of experts", next(self.dispatcher.experts.parameters()).dtype),
                ("any need gradients", any(tensor.requires_grad for tensor in tensors)),
            ),
            stays=configs.stays(),
            broke_off=self.dispatcher.exchange.broke_off(),
            any_tokens=config.fits and not self.training,
            # Compare the mode, too: with equal capacities the shapes do not show it, and the
            # ranks' next calls would differ.
            training=int(self.training),
        )
        if self.training:
            configs.check_factor()
            configs.check_on_overflow()
            if self.dispatcher.see_pass is not None:
                self.dispatcher.see_pass()
        require(
            mask_fits,
            "padding_mask.shape",
            None if padding_mask is None else list(padding_mask.shape),
            f"have one entry for each of the {num_tokens} tokens of this rank",
            "with sequence parallelism, split the mask like the tokens on later pipeline stages; "
            "Megatron does so on the first one only",
        )

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits; fp32 ones of bf16 tokens and weight have `_Gradients` as backward.

        The `gating` of a subclass runs as it is. Else the bias gets the dtype of the logits. Up to
        0.19, `RouterGatingLinearFunction` passes it to Transformer Engine's GEMM as it is, which
        reads it in the dtype of the output. Seen with 0.19.0 and Transformer Engine 2.20.2: a bf16
        bias and `moe_router_dtype="fp32"` give logits that are off by 8.8, and that change with the
        memory behind the bias.
        """
        dtype = _ROUTER_DTYPES.get(self.config.moe_router_dtype or "", input.dtype)
        logits = super().gating
        if logits.__func__ is not _GATING:  # What it computes is not known.
            return logits(input)
        if self.bias is not None and self.bias.dtype != dtype:
            fixed = {"weight": self.weight, "bias": self.bias.to(dtype), "router_dtype": dtype}
            logits = functools.partial(router_gating_linear, **fixed)
        if input.dtype == self.weight.dtype == torch.bfloat16 and dtype == torch.float32:
            return _Gradients.apply(input, self.weight, self.bias, logits)
        return logits(input)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        """Run `TopKRouter.routing`, then, with cells, keep at most C rows per expert.

        Megatron-Bridge's adapter of a router (LoRA) calls `gating` and this, and no `forward`.

        Returns:
            Probabilities [T, E], exactly 0 where not kept, and the kept map, bool [T, E].
        """
        if not self._has_begun:
            self._begin(logits, padding_mask)
        if padding_mask is not None:
            # Cut off the gradients of masked rows. An auxiliary loss divides by the number of
            # tokens: if all are masked its gradient is NaN, which a product with 0 would keep.
            masked = padding_mask.reshape(*logits.shape[:-1], 1)
            logits = logits.masked_fill(masked, 0)
        recomputes = self.training and not torch.is_grad_enabled()
        sorts = _SortedChoices() if recomputes else nullcontext()
        # Hide the factor, with which `TopKRouter.routing` would drop before it counts. It has no
        # other use there. A copy of the config would miss what training loops write to it.
        fields, name = vars(self.config), "moe_expert_capacity_factor"
        factor, fields[name] = fields[name], None
        try:
            with sorts:
                probs_TE, map_TE = super().routing(logits, padding_mask)
        finally:
            fields[name] = factor
        if padding_mask is not None:
            map_TE = map_TE & ~padding_mask.reshape(-1, 1)
        config, num_tokens = self.dispatcher.configs.current, map_TE.shape[0]
        rule = "be a number in a CUDA graph, because the host reads the sizes of a pass that fits"
        fix = "set a number or no-drop where graphs are captured"
        require(not (config.fits and capturing()), "capacity_factor", FIT, rule, fix)
        selects = config.capacity_pool == "cells" and not config.fits
        capacity = config.capacity(num_tokens) if selects else num_tokens
        selection = select(map_TE, probs_TE, capacity=capacity, policy=config.policy)
        # Each pass is counted once: recompute runs the router twice.
        observers = self.dispatcher.observers if trains() else []
        with unseen():
            for observer in observers if self.training else [self.dispatcher.eval_counters]:
                observer.observe(map_TE, probs_TE.detach(), selection)
        return selection.probs_TE, selection.kept_TE

    @unseen()
    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        # Replaces stock's, which (0.16.1 to 0.19.0) combines [T, E] with a mask [T], and raises.
        if self.enable_expert_bias and trains():
            if padding_mask is not None:
                routing_map = routing_map & ~padding_mask[:, None]
            assert self.local_tokens_per_expert is not None
            self.local_tokens_per_expert += routing_map.sum(dim=0)


class _Gradients(torch.autograd.Function):
    """The router's logits in fp32, with the gradients of its bf16 tokens and weight.

    Backward splits the gradient of the logits into a sum of two bf16 numbers, which hold 16 bits of
    it. Megatron converts tokens and weight to fp32, and multiplies in TF32, which has 11 bits.
    """

    @staticmethod
    def forward(ctx: Any, input, weight_ED, bias, logits):
        ctx.save_for_backward(input, weight_ED, bias)
        return logits(input)

    @staticmethod
    def backward(ctx: Any, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        require_first_derivatives()
        input, weight_ED, bias = ctx.saved_tensors
        grad_TE, tokens_TD = grad.flatten(0, -2), input.flatten(0, -2)
        both_T2E = tokens_TD.new_empty(len(grad_TE), 2, grad_TE.shape[1])
        high_TE, low_TE = both_T2E.unbind(1)
        torch.sub(grad_TE, high_TE.copy_(grad_TE), out=low_TE)
        needs_tokens, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_input = grad_ED = grad_bias = None
        if needs_tokens:
            twice_2ED = torch.cat([weight_ED, weight_ED])
            grad_input = (both_T2E.flatten(1) @ twice_2ED).view_as(input)
        if needs_weight:  # No part is rounded before both are added.
            of_both_ET = both_T2E.flatten(1).T
            if grad.is_cuda:
                of_both_ED = torch.mm(of_both_ET, tokens_TD, out_dtype=torch.float32)
            else:
                of_both_ED = of_both_ET.float() @ tokens_TD.float()
            grad_ED = of_both_ED.unflatten(0, (2, -1)).sum(0).to(weight_ED)
        if needs_bias:
            grad_bias = grad_TE.sum(0).to(bias.dtype)
        return grad_input, grad_ED, grad_bias, None


@functools.cache
def _combined(base: type) -> type:
    """Return a class that puts `SelectAfterCounting` in front of `base`, under the names of `base`.

    Cached, so that routers of one class still share a class. The names stay, because other tools
    look a router's class up by its name.
    """
    names = {"__qualname__": base.__qualname__, "__module__": base.__module__}
    return type(base)(base.__name__, (SelectAfterCounting, base), names)


class _SortedChoices(TorchFunctionMode):
    """A mode in which `torch.topk` sorts its results, as Megatron does in a pass with gradients.

    From 0.18 on `topk_routing_with_score_function` leaves a token's experts unsorted in a pass
    without gradients. A softmax over them then sums in another order. So the first pass of
    recompute would give another output than the second, whose gradients train, and than a graph.
    """

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.topk:
            kwargs["sorted"] = True
        return func(*args, **kwargs)
