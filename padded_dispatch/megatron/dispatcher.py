"""The six methods of a Megatron token dispatcher, over the stages of an exchange.

Conforms to `megatron.core.transformer.moe.token_dispatcher.MoETokenDispatcher`. No arithmetic here.

The contract passes two tensors from method to method and leaves the rest to attributes. Ours are
the plan's tensors, and nothing else: no shape and no Python number, because a replayed CUDA graph
sets tensors by name (`cudagraph_attrs`) and runs no Python. T, G and P are read off their shapes,
and with them which exchange serves the pass. No attribute needs a gradient, no backward reads one,
and all are dropped when the layer is done, so that no graph memory stays pinned. (`offsets_LS`
lives from the experts' input to the sum of their output, between which no capture begins or ends.
`FIT` passes are never replayed, so their sizes need not be tensors either.)

With `overlap_moe_expert_parallel_comm` Megatron calls the methods one by one, some on a stream of
their own; backward passes of other microbatches come between, forward passes do not, so the
attributes hold one pass. Megatron frees what went into a method once it has run, so a result that
shares memory with it is copied (`_apart`); the plan's tensors are kept until the other stream has
read them (`record_stream`); and direct stores must be in one order, so all of them are on the
communicating stream (`_store`).

Letters: T tokens as [S, B] (sequence, batch), K experts per token, E experts, L experts on this
rank, R ranks of the expert-parallel group, C capacity, G pools of P slots, of X experts each, D
hidden size, N rows of this rank's experts.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from padded_dispatch.config import NO_DROP, DispatchConfig, PoolSizes
from padded_dispatch.exchange import Exchange, ExpertInput, Slots, fused
from padded_dispatch.exchange.agreement import Agreement
from padded_dispatch.exchange.choose import Choice, LayerExchanges
from padded_dispatch.exchange.fit import fit
from padded_dispatch.megatron.compat import (
    SharedExpertOverlap,
    captures_dispatch_alone,
    splits_hybrid_layers,
)
from padded_dispatch.megatron.config import (
    check_config,
    check_pipeline,
    log_once,
    padded_options,
    passes_in_flight,
)
from padded_dispatch.megatron.experts import chosen_experts, require_gradients_arrive
from padded_dispatch.megatron.layer_configs import LayerConfigs
from padded_dispatch.megatron.router import Selector
from padded_dispatch.counters import Counters
from padded_dispatch.routing.plan import DispatchPlan, make_plan

# The tensors of `DispatchPlan`; slots and experts keep the shape that the tokens came in.
_PLAN_TENSORS = (
    "slot_of_SBK",
    "expert_of_SBK",
    "choice_of_slot_GP",
    "kept_E",
    "unplaced_E",
)

_EVALUATION_FITS = (
    "padded dispatch in evaluation: each pass has the sizes that its routing needs, and drops "
    "nothing; for another capacity set eval_factor"
)
_EVALUATION_IS_AS_TRAINING = (
    "padded dispatch in evaluation: capacity and drops are as in training, because a CUDA graph "
    "captures evaluation; for another capacity set eval_factor"
)

_LESS_TO_TRAIN = "set moe_expert_capacity_factor, 1.25 for a start"
_LESS_TO_GENERATE = "set eval_factor, 4 for a start, or capture graphs of fewer tokens"

_GENERATION_DROPS_NOTHING = (
    "padded dispatch in a CUDA graph of text generation: it drops nothing (C = T); to pay less "
    "memory in graphs of many tokens, set eval_factor to a number"
)

_SPLIT_LAYERS = (
    "the graph behind the experts of a hybrid stack would not learn where rows came from"
)
_OVERLAP_OF_STAGES = (
    "with overlap_moe_expert_parallel_comm and pipeline stages direct stores must be asked for by "
    "exchange='direct': they have run together on CPUs only"
)


class PaddedAlltoAllTokenDispatcher(MoETokenDispatcher):
    """The dispatcher that `moe_token_dispatcher_type="padded_alltoall"` selects.

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
        check_pipeline(config)
        options = padded_options(config)
        self.configs = LayerConfigs(config, options, num_ranks=self.ep_size, etp_size=self.tp_size)
        self.agreement = Agreement(self.ep_group, self.tp_group)
        self._experts = chosen_experts(config)
        self._options = options
        self._overlaps = config.overlap_moe_expert_parallel_comm
        # Graphs that end before the experts do not hold the linears. The combined schedule puts
        # returns of other passes between a push and its return, which a return inside of a product
        # forbids; it hides the way home itself.
        self._fuses = not self._overlaps and not captures_dispatch_alone(config)
        stages, why_not_direct = config.pipeline_model_parallel_size, ""
        if splits_hybrid_layers(config):
            why_not_direct = _SPLIT_LAYERS
        elif self._overlaps and stages > 1:
            why_not_direct = _OVERLAP_OF_STAGES
        self.exchanges = LayerExchanges(
            self.dispatch_config,
            self.agreement,
            self.ep_group,
            self.tp_group,
            layout=self._experts.layout or "padded",
            kind=options.exchange,
            why_not_direct=why_not_direct,
            microbatches_in_flight=passes_in_flight(config, _pipeline_rank(pg_collection)),
            num_layers=max(1, config.num_layers // stages),
            ffn_size=config.moe_ffn_hidden_size or 0,
        )
        # Whether `token_dispatch` makes direct stores; Megatron then keeps inputs.
        self.stores_late = self._overlaps and self.exchanges.direct is not None
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        self.counters = Counters(self.configs.training, device)
        self.eval_counters = Counters(self.configs.evaluation, device)
        self.shared_overlap: SharedExpertOverlap | None = None
        self.slot_of_SBK: Tensor | None = None
        self.expert_of_SBK: Tensor | None = None
        self.choice_of_slot_GP: Tensor | None = None
        self.kept_E: Tensor | None = None
        self.unplaced_E: Tensor | None = None
        self.offsets_LS: Tensor | None = None  # Where packed rows lie, until they are combined.
        self.experts: Any = None  # Set by the layer.
        self._experts_sum = False  # Whether the pass has `StackedExperts.linears`, likewise.
        self._choice: Choice | None = None
        self.cudagraph_attrs = list(_PLAN_TENSORS)
        # The first of the ranks with this layer logs; rank 0 of the job need not have the layer.
        replicas = getattr(pg_collection, "expt_dp", None)
        own = (self.ep_group, self.tp_group, replicas)
        self._logs = all(group is None or group.rank() == 0 for group in own)

    @property
    def dispatch_config(self) -> DispatchConfig:
        """The config that decides the shapes of the next pass."""
        return self.configs.now

    @property
    def selector(self) -> Selector:
        """The values that this layer's router needs."""
        return Selector(
            configs=self.configs,
            agreement=self.agreement,
            fit=self._fit,
            observers=[self.counters],
            eval_observers=[self.eval_counters],
        )

    @property
    def _exchange(self) -> Exchange:
        """The exchange of the pass whose plan the attributes hold."""
        if self.dispatch_config.fits:
            return self.exchanges.fitting(self.configs.fitted).exchange
        assert self.slot_of_SBK is not None and self.choice_of_slot_GP is not None
        num_tokens = self.slot_of_SBK.shape[:-1].numel()
        return self.exchanges.chosen(num_tokens, *self.choice_of_slot_GP.shape)

    def _choose(self, config: DispatchConfig, tokens_TD: Tensor, probs_TE: Tensor) -> Choice:
        """Return the exchange and the sizes of a pass, once its router knows them."""
        if config.fits:
            return self.exchanges.fitting(self.configs.fitted)
        return self.exchanges.choose(config, tokens_TD, probs_TE)

    def _fit(self, config: DispatchConfig, asked_TE: Tensor) -> PoolSizes:
        """Return the sizes of a pass that drops nothing; see `Selector`."""
        packed = self.exchanges.fits_packed
        return fit(config, asked_TE, self.ep_group, self.tp_group, packed=packed)

    def _counters_now(self) -> Counters | None:
        """Return the counters of the layer's mode; None in the first pass of recompute."""
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
        """Put tokens into slots.

        Args:
            tokens: floating point [S, B, D] (or any leading shape), T = S * B.
            routing_map: bool [T, E]: what our router keeps, for which there are slots.
            probs: floating point [T, E].

        Returns:
            Rows in pools [G, P, D] and, at least fp32, their probabilities and counts, [G, P + X];
            where rows are packed at once, [1, N, D] and what the exchange puts beside them; where
            `token_dispatch` stores them, tokens and probabilities.
        """
        tokens_TD = tokens.view(-1, tokens.shape[-1])
        config = self.dispatch_config
        choice = self._choose(config, tokens_TD, probs)
        if choice is not self._choice:
            if self._experts.layout is None and self.configs.in_training:
                require_gradients_arrive(self.experts, self.config)
            generates = config is self.configs.generation
            announce(
                config,
                tokens_TD,
                packed=choice.exchange.packed,
                logs=self._logs and not generates,
                fix=_LESS_TO_GENERATE if generates else _LESS_TO_TRAIN,
            )
            self._choice = choice
            fits = config.fits
            self._log_choice("that fits" if fits else f"at {len(tokens_TD)} tokens per rank")
        if self._logs and not self.configs.in_training:
            self._log_evaluation(config)
        if self.shared_overlap is not None:
            self.shared_overlap.start(tokens)
        self._experts_sum = False
        stacked = self.experts if self._experts.layout is not None else None
        if stacked is not None:
            stacked.linears = None
        plan = make_plan(routing_map, top_k=config.top_k, sizes=choice.sizes)
        given = tokens_TD, probs, plan, choice.sizes.num_rows
        if self._stores_late(choice.exchange):
            outgoing = Slots(rows_MPD=tokens, meta_MPX=probs)
        elif (
            self._fuses  # Products may then store rows at the tokens' ranks.
            and choice.exchange is self.exchanges.direct
            and stacked is not None
            and stacked.takes_linears
        ):
            assert self.exchanges.direct is not None
            outgoing, stacked.linears = fused.prepare(self.exchanges.direct, *given)
            self._experts_sum = True
        else:
            outgoing = choice.exchange.prepare(*given)
        counters = self._counters_now()
        if counters is not None:
            counters.add_unplaced(plan.unplaced_E)
        self.slot_of_SBK = plan.slot_of_TK.view(*tokens.shape[:-1], -1)
        self.expert_of_SBK = plan.expert_of_TK.view(*tokens.shape[:-1], -1)
        self.choice_of_slot_GP = plan.choice_of_slot_GP
        self.kept_E = plan.kept_E
        self.unplaced_E = plan.unplaced_E
        assert outgoing.meta_MPX is not None
        return outgoing.rows_MPD, outgoing.meta_MPX

    def _stores_late(self, exchange: Exchange) -> bool:
        """Return whether `token_dispatch` makes the direct stores of a pass."""
        return self.stores_late and exchange is self.exchanges.direct

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send slots to the ranks of their experts."""
        if self.shared_overlap is not None:
            self.shared_overlap.wait()
        exchange = self._exchange
        late = self._stores_late(exchange)
        incoming = (self._store if late else exchange.move)(
            Slots(rows_MPD=hidden_states, meta_MPX=probs)
        )
        if self.shared_overlap is not None:
            self.shared_overlap.fc1(incoming.rows_MPD)
        assert incoming.meta_MPX is not None
        rows_MPD = self._apart(incoming.rows_MPD, hidden_states)
        return rows_MPD, self._apart(incoming.meta_MPX, probs)

    def _store(self, given: Slots) -> Slots:
        """Store the rows of tokens, and their probabilities, at their experts.

        A replayed graph may end before it, so the sizes follow from the config and the tokens.

        Megatron's combined schedule runs the forward pass of one microbatch, F, beside the backward
        pass of another, B, and issues for each pair of layers (`TransformerLayerSchedulePlan.run`,
        0.16.1 to 0.20; dW: `delay_wgrad_compute`)

            communication  B combine                       F dispatch   B dispatch         F combine
            computation           F pre-dispatch, B experts          dW         F experts

        and then B pre-dispatch. Each microbatch has one event; a piece waits for it, and records it
        at its end; dW does neither. So all pushes and returns are on the communicating stream, in
        the order of the host, the same on all ranks. What the other one uses is in order with them:

        - F dispatch writes into a buffer again only behind its own F pre-dispatch, and so behind
          all computation issued before. The former owner's tensors live until its B dispatch
          (`next_receive_buffer` raises unless they are gone), which no host issues between F
          pre-dispatch and F dispatch. So its experts and dW were issued before.
        - Gradients of B combine are read by B experts and dW. The next B combine waits for the
          event of B pre-dispatch, behind dW; the first one for `record_current_stream`.
        - Evaluations and repeated passes run on the stream of computation, which waits for the
          other at the end of each schedule, as that does at the beginning of the next.

        Barriers and NCCL's kernels cannot block each other for ever: all ranks issue the same calls
        in the same order, both are small, and all other kernels end by themselves.
        """
        assert given.meta_MPX is not None
        tokens_TD, probs_TE = given.rows_MPD.flatten(0, -2), given.meta_MPX
        choice = self._choose(self.dispatch_config, tokens_TD, probs_TE)
        return choice.exchange.prepare(tokens_TD, probs_TE, self._plan(), choice.sizes.num_rows)

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Bring slots into the experts' order.

        Returns:
            See `_arguments_of_experts`.
        """
        counters = self._counters_now()
        arranged = self._exchange.arrange(Slots(rows_MPD=hidden_states, meta_MPX=probs))
        if counters is not None:
            counters.add_received(arranged.kept_SL)
        self.offsets_LS = arranged.offsets_LS
        rows_ND, rows_L, probs_N = _arguments_of_experts(arranged)
        return self._apart(rows_ND, hidden_states), rows_L, probs_N

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Bring the experts' output [N, D] back into slots; leave sums [T, D] as they are."""
        if self._experts_sum:
            return hidden_states
        return self._exchange.disarrange(hidden_states, self.offsets_LS).rows_MPD

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Send slots back to the ranks of their tokens."""
        if self.shared_overlap is not None:
            self.shared_overlap.wait()
        rows_MPD = self._exchange.move_back(Slots(rows_MPD=hidden_states)).rows_MPD
        if self.shared_overlap is not None:
            self.shared_overlap.fc2(rows_MPD)
        return rows_MPD

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Sum every token's slots, in the shape that the tokens came in: [S, B, D]."""
        output = self._combine(hidden_states)
        if self.shared_overlap is not None:
            output = output + self.shared_overlap.output()
        self.offsets_LS = None
        self._experts_sum = False
        for name in _PLAN_TENSORS:
            setattr(self, name, None)
        return output

    def _combine(self, hidden_states: Tensor) -> Tensor:
        assert self.slot_of_SBK is not None
        if self._experts_sum:
            return hidden_states.view(*self.slot_of_SBK.shape[:-1], -1)
        plan = self._plan()
        if self._overlaps:
            stream = torch.cuda.current_stream()
            for tensor in (*vars(plan).values(), self.offsets_LS):
                if tensor is not None:
                    tensor.record_stream(stream)
        combined_TD = self._exchange.combine(Slots(rows_MPD=hidden_states), plan, self.offsets_LS)
        return combined_TD.view(*self.slot_of_SBK.shape[:-1], -1)

    def _plan(self) -> DispatchPlan:
        """Return the plan that the attributes hold."""
        assert self.slot_of_SBK is not None and self.expert_of_SBK is not None
        assert self.choice_of_slot_GP is not None
        assert self.kept_E is not None and self.unplaced_E is not None
        return DispatchPlan(
            slot_of_TK=self.slot_of_SBK.flatten(0, -2),
            expert_of_TK=self.expert_of_SBK.flatten(0, -2),
            choice_of_slot_GP=self.choice_of_slot_GP,
            kept_E=self.kept_E,
            unplaced_E=self.unplaced_E,
        )

    def _apart(self, made: Tensor, given: Tensor) -> Tensor:
        """Return `made`, or a copy if the schedule frees the memory that it shares with `given`."""
        if not self._overlaps or self.stores_late:
            return made
        shares = made.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
        return made.clone() if shares else made

    @property
    def chosen(self) -> dict[str, str]:
        """Names of the experts and the exchange of the last pass that ran Python.

        Empty before the first one. A replayed CUDA graph keeps those of its capture.
        """
        if self._choice is None:
            return {}
        experts = "module"
        if self._experts.layout is not None:
            experts = "packed" if self._choice.exchange.packed else "batched"
        return {"experts": experts, "exchange": self._choice.kind}

    def _log_evaluation(self, config: DispatchConfig) -> None:
        """Log once what evaluation and text generation drop by default."""
        if config is self.configs.generation:
            log_once(_GENERATION_DROPS_NOTHING)
        elif self._options.eval_factor is None:
            log_once(_EVALUATION_FITS if config.fits else _EVALUATION_IS_AS_TRAINING)

    def _log_choice(self, which: str) -> None:
        if self._logs and self._choice is not None:
            log_once(
                f"padded dispatch {which}: "
                f"experts={self.chosen['experts']} ({self._experts.reason}), "
                f"exchange={self._choice.kind} ({self._choice.reason})"
            )


def _arguments_of_experts(arranged: ExpertInput) -> tuple[Tensor, Tensor, Tensor]:
    """Return what Megatron passes to an experts module: rows [N, D], counts [L], probabilities [N].

    For padded rows, the counts are rows per local expert, int64 on the host: N / L each, padded
    rows included. For packed rows, they are running counts of real rows, int32 on the device.
    """
    if arranged.offsets_LS is not None:
        return arranged.rows_ND, arranged.offsets_LS[:, -1].contiguous(), arranged.probs_N
    num_local_experts = arranged.kept_SL.shape[1]
    rows_per_expert = torch.full((num_local_experts,), len(arranged.rows_ND) // num_local_experts)
    return arranged.rows_ND, rows_per_expert, arranged.probs_N


def _pipeline_rank(pg_collection: Any) -> int:
    """Return this rank's pipeline stage; 0, which has most passes in flight, if it is not known."""
    if (pipeline := getattr(pg_collection, "pp", None)) is not None:
        return pipeline.rank()
    known = parallel_state.model_parallel_is_initialized()
    return parallel_state.get_pipeline_model_parallel_rank() if known else 0


def is_padded(module: Any) -> bool:
    """Return whether a module is a MoE layer with the padded dispatcher."""
    return isinstance(getattr(module, "token_dispatcher", None), PaddedAlltoAllTokenDispatcher)


@contextmanager
def counts_put_back(*models: torch.nn.Module) -> Iterator[None]:
    """Restore the counters and buffers of `models` when the block ends."""
    kept = [(tensor, tensor.clone()) for model in models for tensor in counting_tensors(model)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in kept:
                tensor.copy_(copy)


def counting_tensors(model: torch.nn.Module) -> Iterator[Tensor]:
    """Yield the buffers of a model, and the counters of its padded layers."""
    yield from model.buffers()
    for module in model.modules():
        if is_padded(module):
            dispatcher: Any = module.token_dispatcher
            yield from dispatcher.counters.tensors()
            yield from dispatcher.eval_counters.tensors()


def announce(
    config: DispatchConfig,
    tokens_TD: Tensor,
    *,
    packed: bool,
    logs: bool,
    fix: str = _LESS_TO_TRAIN,
) -> None:
    """Log once per shape what it costs to drop nothing, and raise if it cannot fit.

    Args:
        config: nothing happens unless its factor is `NO_DROP`.
        tokens_TD: [T, D].
        packed: the experts read packed rows.
        logs: this rank logs.
        fix: the setting that asks for fewer slots.

    Raises:
        ValueError: when one layer's buffers exceed the whole memory of the device; the same on all
            ranks, which have compared everything that decides it.
    """
    if config.capacity_factor != NO_DROP:
        return
    num_tokens, hidden_size = tokens_TD.shape
    sizes = num_tokens, hidden_size, tokens_TD.element_size()
    size = config.buffer_bytes(*sizes, packed=packed)
    capacity = config.capacity(num_tokens)
    ratio = config.num_experts * capacity / (num_tokens * config.top_k)
    cost = (
        "a capacity factor of NO_DROP (moe_expert_capacity_factor=None) drops nothing and costs "
        f"C = {capacity} slots per (source, expert): up to {size.total / 2**30:.2f} GiB of buffers "
        f"per layer, {ratio:.1f} times a dropless one"
    )
    if tokens_TD.is_cuda:
        memory = torch.cuda.get_device_properties(tokens_TD.device).total_memory
        if size.total > memory:
            raise ValueError(f"{cost}; the device has {memory / 2**30:.2f} GiB; {fix}")
    if logs:
        log_once(f"{cost}. To pay less, {fix}.", logging.WARNING)
