"""The six methods of a Megatron token dispatcher, over the stages of an exchange.

Conforms to `megatron.core.transformer.moe.token_dispatcher.MoETokenDispatcher`. No arithmetic here.

The contract passes two tensors from method to method and leaves the rest to attributes. Ours are
the plan's tensors, and nothing else: no shape, no Python number, because a replayed CUDA graph sets
tensors by name (`cudagraph_attrs`) and runs no Python. T and C are read off their shapes. None of
them needs a gradient, no backward reads them, and they are dropped when the layer is done, so that
no graph memory stays pinned. (`offsets_LS` lives from the experts' input to the sum of their output,
and no capture of Megatron's begins or ends between, so no replay has to set it.)
"""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from padded_dispatch.config import DispatchConfig
from padded_dispatch.dispatcher import make_exchange
from padded_dispatch.exchange import Slots
from padded_dispatch.exchange.agreement import Agreement
from padded_dispatch.megatron.compat import SharedExpertOverlap
from padded_dispatch.megatron.config import LayerConfigs, check_config, padded_options
from padded_dispatch.megatron.experts import chosen_experts
from padded_dispatch.megatron.router import Selector
from padded_dispatch.ops.counters import Counters
from padded_dispatch.ops.plan import DispatchPlan, make_plan

# The tensors of `DispatchPlan`; the slots keep the shape that the tokens came in.
_PLAN_TENSORS = ("slot_of_SBK", "choice_of_slot_EC", "kept_E", "unplaced_E")

_log = logging.getLogger("padded_dispatch")


class PaddedAlltoAllTokenDispatcher(MoETokenDispatcher):
    """Static shapes: what `moe_token_dispatcher_type="padded_alltoall"` selects.

    Args:
        num_local_experts: experts on this rank (L).
        local_expert_indices: their ids; Megatron hands them to every dispatcher.
        config: the TransformerConfig. Read before the first pass; later changes have no effect.
        pg_collection: `ep` and `expt_tp` are used.

    Raises:
        ValueError: names every setting that the padded path does not support.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        check_config(config)
        options = padded_options(config)
        self.configs = LayerConfigs(config, options, num_ranks=self.ep_size, etp_size=self.tp_size)
        self.agreement = Agreement(self.ep_group, self.tp_group)
        self.exchange = make_exchange(
            options.exchange,
            self.agreement,
            num_local_experts,
            self.ep_group,
            self.tp_group,
            packed=chosen_experts(config) == "packed",
            microbatches_in_flight=options.microbatches_in_flight,
        )
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        self.counters = Counters(self.dispatch_config.num_experts, device)
        self.eval_counters = Counters(self.dispatch_config.num_experts, device)
        self.shared_overlap: SharedExpertOverlap | None = None
        self.slot_of_SBK: Tensor | None = None
        self.choice_of_slot_EC: Tensor | None = None
        self.kept_E: Tensor | None = None
        self.unplaced_E: Tensor | None = None
        self.offsets_LS: Tensor | None = None  # Where packed rows lie, until they are combined.
        self.cudagraph_attrs = list(_PLAN_TENSORS)
        # Of the ranks with this layer, of which rank 0 need not be one, the first speaks for all.
        replicas = getattr(pg_collection, "expt_dp", None)
        own = (self.ep_group, self.tp_group, replicas)
        self._speaks = all(group is None or group.rank() == 0 for group in own)

    @property
    def dispatch_config(self) -> DispatchConfig:
        """What decides the shapes of the next pass."""
        return self.configs.now

    @property
    def selector(self) -> Selector:
        """What this layer's router needs."""
        return Selector(
            configs=self.configs,
            agreement=self.agreement,
            observers=[self.counters],
            eval_observers=[self.eval_counters],
        )

    def _counters_now(self) -> Counters | None:
        """Those of the layer's mode; none in the first pass of recompute, which comes again."""
        if not self.configs.in_training:
            return self.eval_counters
        return self.counters if torch.is_grad_enabled() else None

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Run the shared experts beside the exchange (`moe_shared_expert_overlap`)."""
        super().set_shared_experts(shared_experts)
        self.shared_overlap = SharedExpertOverlap(shared_experts)
        self.cudagraph_attrs += self.shared_overlap.cudagraph_attrs

    def dispatch_preprocess(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens into slots.

        Args:
            tokens: floating point [S, B, D] (or any leading shape), T = S * B.
            routing_map: bool [T, E], at most C per column: what our router keeps.
            probs: floating point [T, E].

        Returns:
            Rows [E, C, D] and, at least fp32, their probabilities and counts [E, C + 1].
        """
        tokens_TD = tokens.view(-1, tokens.shape[-1])
        config = self.dispatch_config
        device, packed = str(tokens.device), self.exchange.packed
        announce(config, *tokens_TD.shape, tokens.element_size(), device, packed, self._speaks)
        if self.shared_overlap is not None:
            self.shared_overlap.start(tokens)
        capacity = config.capacity(tokens_TD.shape[0])
        plan = make_plan(routing_map, top_k=config.top_k, capacity=capacity)
        outgoing = self.exchange.prepare(tokens_TD, probs, plan)
        counters = self._counters_now()
        if counters is not None:
            counters.add_unplaced(plan.unplaced_E)
        self.slot_of_SBK = plan.slot_of_TK.view(*tokens.shape[:-1], -1)
        self.choice_of_slot_EC = plan.choice_of_slot_EC
        self.kept_E = plan.kept_E
        self.unplaced_E = plan.unplaced_E
        assert outgoing.meta_MC1 is not None
        return outgoing.rows_MCD, outgoing.meta_MC1

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Slots to the ranks of their experts: [E, ...] to [R * L, ...]."""
        if self.shared_overlap is not None:
            self.shared_overlap.wait()
        incoming = self.exchange.move(Slots(rows_MCD=hidden_states, meta_MC1=probs))
        if self.shared_overlap is not None:
            self.shared_overlap.fc1(incoming.rows_MCD)
        assert incoming.meta_MC1 is not None
        return incoming.rows_MCD, incoming.meta_MC1

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Slots in the experts' order.

        Returns:
            Rows [N, D], where each expert's lie, probabilities [N]. In the middle for a module of
            Megatron's: rows per local expert, int64 [L] on the host, S * C each, no matter how many
            are real. For `PackedExperts`: where they end, int32 [L] on the device.
        """
        arranged = self.exchange.arrange(Slots(rows_MCD=hidden_states, meta_MC1=probs))
        counters = self._counters_now()
        if counters is not None:
            counters.add_received(arranged.kept_SL)
        self.offsets_LS = arranged.offsets_LS
        if self.offsets_LS is not None:
            return arranged.rows_ND, self.offsets_LS[:, -1].contiguous(), arranged.probs_N
        num_rows = self.exchange.num_sources * hidden_states.shape[1]
        rows_per_expert = torch.full((self.exchange.num_local_experts,), num_rows)
        return arranged.rows_ND, rows_per_expert, arranged.probs_N

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The experts' output [N, D] in the order of the wire, [R * L, C, D]."""
        return self.exchange.disarrange(hidden_states, self.offsets_LS).rows_MCD

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Slots home to the ranks of their tokens: [R * L, C, D] to [E, C, D]."""
        if self.shared_overlap is not None:
            self.shared_overlap.wait()
        incoming = self.exchange.move_back(Slots(rows_MCD=hidden_states))
        if self.shared_overlap is not None:
            self.shared_overlap.fc2(incoming.rows_MCD)
        return incoming.rows_MCD

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """The sum of every token's slots in the shape that the tokens came in, [S, B, D]."""
        assert self.slot_of_SBK is not None and self.choice_of_slot_EC is not None
        assert self.kept_E is not None and self.unplaced_E is not None
        plan = DispatchPlan(
            slot_of_TK=self.slot_of_SBK.flatten(0, -2),
            choice_of_slot_EC=self.choice_of_slot_EC,
            kept_E=self.kept_E,
            unplaced_E=self.unplaced_E,
            capacity=self.choice_of_slot_EC.shape[1],
        )
        combined_TD = self.exchange.combine(Slots(rows_MCD=hidden_states), plan, self.offsets_LS)
        self.offsets_LS = None
        output = combined_TD.view(*self.slot_of_SBK.shape[:-1], -1)
        if self.shared_overlap is not None:
            output = output + self.shared_overlap.output()
        for name in _PLAN_TENSORS:
            setattr(self, name, None)
        return output


def is_padded(module: Any) -> bool:
    """Whether it is a MoE layer with the dispatcher above."""
    return isinstance(getattr(module, "token_dispatcher", None), PaddedAlltoAllTokenDispatcher)


@contextmanager
def counts_put_back(*models: torch.nn.Module) -> Iterator[None]:
    """Within it layers run without a trace in counters and buffers."""
    kept = [(tensor, tensor.clone()) for model in models for tensor in _counting_tensors(model)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in kept:
                tensor.copy_(copy)


def _counting_tensors(model: torch.nn.Module) -> Iterator[Tensor]:
    yield from model.buffers()
    for module in model.modules():
        if is_padded(module):
            dispatcher: Any = module.token_dispatcher
            yield from dispatcher.counters.tensors()
            yield from dispatcher.eval_counters.tensors()


@functools.cache
def announce(
    config: DispatchConfig,
    num_tokens: int,
    hidden_size: int,
    element_size: int,
    device: str,
    packed: bool,
    aloud: bool,
) -> None:
    """Without a factor: say once for each shape, if `aloud`, what it costs; what cannot fit raises.

    Raises:
        ValueError: when one layer's buffers exceed the whole memory of the device; the same on all
            ranks, which have agreed on everything that decides it.
    """
    if config.capacity_factor is not None:
        return
    size = config.buffer_bytes(num_tokens, hidden_size, element_size, packed=packed)
    ratio = config.num_experts * config.capacity(num_tokens) / (num_tokens * config.top_k)
    cost = (
        f"moe_expert_capacity_factor=None drops nothing and costs C = {config.capacity(num_tokens)}"
        f" slots per (source, expert): up to {size.total / 2**30:.2f} GiB of buffers per layer, "
        f"{ratio:.1f} times a dropless one"
    )
    remedy = "set moe_expert_capacity_factor, 1.25 for a start"
    if device.startswith("cuda"):
        memory = torch.cuda.get_device_properties(device).total_memory
        if size.total > memory:
            raise ValueError(f"{cost}; the device has {memory / 2**30:.2f} GiB: {remedy}")
    if aloud:
        _log.warning("%s. To pay less, %s.", cost, remedy)
