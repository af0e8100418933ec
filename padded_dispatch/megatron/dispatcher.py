"""The six methods of a Megatron token dispatcher, for packed experts and for Megatron's own.

Conforms to `megatron.core.transformer.moe.token_dispatcher.MoETokenDispatcher`. No arithmetic here.

`MoELayer` passes two tensors from method to method; all else travels in attributes of the
dispatcher. A captured part of the layer hands on the plan's tensors and nothing else, no shape and
no Python number, because a replayed CUDA graph sets tensors by name (`cudagraph_attrs`) and runs no
Python. No attribute needs a gradient. All become None at the end of the layer, so that they keep no
graph memory alive.

Packed experts do the whole exchange: the methods pass tokens on, and `dispatch_postprocess` stores
what the host has decided in `StackedExperts.call`. Megatron's own experts get padded cells:
`token_dispatch` sends the rows into cells, and `token_combine` returns the sums. No capture begins
or ends between these two.

Letters: T tokens as [S, B] (sequence, batch), K experts per token, E experts, L experts on this
rank, P slots of a source on the wire, D hidden size, N rows of this rank's experts.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from padded_dispatch.config import NO_DROP, DispatchConfig, require
from padded_dispatch.counters import Counters, RoutingObserver
from padded_dispatch.exchange import Wire, choose
from padded_dispatch.exchange.agreement import Agreement
from padded_dispatch.experts import Call, padded
from padded_dispatch.experts.padded import DispatchState
from padded_dispatch.experts.store import Store, room_of_pass
from padded_dispatch.megatron.chunks import Chunk, join
from padded_dispatch.megatron.compat import SharedExpertOverlap
from padded_dispatch.megatron.config import padded_options
from padded_dispatch.megatron.experts import (
    ChosenExperts,
    in_fp8,
    require_weights_stay,
)
from padded_dispatch.megatron.layer_configs import LayerConfigs
from padded_dispatch.memory import LayerMemory, gib
from padded_dispatch.recorder import RoutingBuffer
from padded_dispatch.routing import Plan, choice_probs, make_plan
from padded_dispatch.utils.logs import log_once
from padded_dispatch.utils.phases import trains

# The tensors of `Plan`; experts and places keep the shape that the tokens came in.
_PLAN_TENSORS = "expert_SBK", "place_SBK", "kept_E"


class PaddedAlltoAllTokenDispatcher(MoETokenDispatcher):
    """The dispatcher that `moe_token_dispatcher_type="padded_alltoall"` selects.

    Creating one is a collective call of its groups' members.

    Args:
        config: the TransformerConfig. Capacity and options are read here; other options raise in
            the first pass, other later changes have no effect.
        pg_collection: `ep` and `expt_tp` are used, and `tp`, `pp` and `expt_dp` if it has them.
        chosen: the result of `chosen_experts`.

    Attributes:
        packed: whether experts are `StackedExperts`.
        chosen: the experts, exchange and capacity pool in use, by the names of the options.
        tensor_rank: this rank's number in the tensor-parallel group of attention.
        store: the store of the layer's chunk, which holds the rows of training passes; None if each
            pass has memory of its own.
        counters, eval_counters: counts of passes in training mode, and in evaluation mode.
        observers: receivers of the router's selections in training passes, `counters` first. CUDA
            graphs capture the calls, so append before a capture.
        see_pass: function that the router calls in each training pass, before it routes; None with
            CUDA graphs, whose `guard` sees the passes instead.
    """

    store: Store | None = None
    see_pass: Callable[[], None] | None = None
    expert_SBK: Any = None
    place_SBK: Any = None
    kept_E: Any = None

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        chosen: ChosenExperts,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.packed = chosen.packed
        self.experts: Any = None  # Set by the layer.
        self._options = padded_options(config)
        self._pipeline = getattr(pg_collection, "pp", None)
        tp = getattr(pg_collection, "tp", None)
        self.tensor_rank = tp.rank() if tp else parallel_state.get_tensor_model_parallel_rank()
        sizes = {"num_ranks": self.ep_size, "etp_size": self.tp_size}
        self.configs = LayerConfigs(config, capacity_pool=chosen.pool, **sizes)
        groups = self.ep_group, self.tp_group
        wide = [group for group in groups if group is not None and group.size() > 1]
        is_fake = any(dist.get_backend(group) == "fake" for group in wide)
        rule = "be left out: a rank reads counts and places that its peers send"
        fix = "run on real ranks, or measure stock drop-and-pad"
        require(not is_fake, "--fake-process-group", True, rule, fix)
        self.agreement = Agreement(*groups)
        device = torch.device(torch.cuda.current_device())
        kind = self._options.exchange
        # Only some choices run collectives.
        chosen_by = {"exchange": kind, "experts_are_packed": self.packed, "device": device.type}
        self.agreement.check(**chosen_by, capacity_pool=chosen.pool)
        self.exchange, reason = choose(
            self.configs.current, *groups, kind, packed=self.packed, device=device
        )
        self.chosen = {"experts": "packed" if self.packed else "module"}
        self.chosen |= {"exchange": self.exchange.kind, "capacity_pool": chosen.pool}
        rank = self.ep_group.rank()
        self.counters = Counters(self.configs.training, device, rank=rank)
        self.eval_counters = Counters(self.configs.evaluation, device, rank=rank)
        self.observers: list[RoutingObserver] = [self.counters]
        self.shared_overlap: SharedExpertOverlap | None = None
        self.cudagraph_attrs = list(_PLAN_TENSORS)
        self._most_tokens: dict[tuple[bool, DispatchConfig], int] = {}
        # The first of the ranks with this layer logs; rank 0 of the job need not have the layer.
        groups = *groups, getattr(pg_collection, "expt_dp", None)
        self._logs = all(group is None or group.rank() == 0 for group in groups)
        if self._logs:
            asked, many = (self._options.experts, self._options.capacity_pool), 2**20
            has_room = self.packed or self.configs.training.capacity(many) >= many
            level, drops = logging.INFO, ""
            if asked == ("auto", "auto") and not has_room:  # A store would drop less, or nothing.
                level = logging.WARNING
                drops = (
                    "; each expert drops a rank's rows past its capacity: set "
                    "moe_expert_capacity_factor=None to drop none"
                )
            log_once(
                f"padded dispatch: experts={self.chosen['experts']} ({chosen.reason}), "
                f"capacity_pool={chosen.pool}, exchange={self.exchange.kind} ({reason}){drops}",
                level,
            )

    @property
    def shares_per_token(self) -> int:
        """Rows per token, in perfect balance, of all layers that share room; 0 for cells.

        A capacity factor is relative to this number.
        """
        config = self.configs.training
        if config.capacity_pool == "cells":
            return 0
        return config.share(1) if self.store is None else self.store.num_shares(1)

    @property
    def counts_kept(self) -> bool:
        """True if this rank's count of kept rows is used.

        Rows of a store are counted by the ranks of their experts. Ranks that split experts receive
        the same rows, so only the first of them counts.
        """
        return self.configs.training.capacity_pool == "cells" or self.tp_rank == 0

    def set_layer(self, number: int) -> None:
        """Set the layer's number in the model, which its router passes on."""
        self.agreement.name_layer(number)
        self.configs.find_factors(number)

    def _counters_now(self) -> Counters | None:
        """Return the counters of the layer's mode; None in the first pass of recompute."""
        if not self.configs.in_training:
            return self.eval_counters
        return self.counters if trains() else None

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Run the shared experts beside the exchange (`moe_shared_expert_overlap`)."""
        super().set_shared_experts(shared_experts)
        self.shared_overlap = SharedExpertOverlap(shared_experts)
        self.cudagraph_attrs += self.shared_overlap.cudagraph_attrs

    def dispatch_preprocess(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Plan each token's choices: the expert, and the place among this rank's rows for it.

        Args:
            tokens: floating point [S, B, D] (or any leading shape), T = S * B.
            routing_map: bool [T, E], as our router returns it.
            probs: floating point [T, E].

        Returns:
            The tokens, and the probability of each choice, [T, K], at least fp32.
        """
        config, shape = self.configs.current, tokens.shape[:-1]
        self._slots(config, tokens.flatten(0, -2))  # Checks a config's first pass.
        if self.shared_overlap is not None:
            self.shared_overlap.start(tokens)
        plan = make_plan(routing_map, top_k=config.top_k)
        self.expert_SBK = plan.expert_TK.view(*shape, -1)
        self.place_SBK = plan.place_TK.view(*shape, -1)
        self.kept_E = plan.kept_E
        return tokens, choice_probs(probs, plan.expert_TK)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Pass the experts' output on."""
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Return every token's sum in the shape that the tokens came in: [S, B, D]."""
        output = hidden_states.view(*self.expert_SBK.shape[:-1], -1)
        if self.shared_overlap is not None:
            output = output + self.shared_overlap.output()
        for name in _PLAN_TENSORS:
            setattr(self, name, None)
        return output

    def _start(self, config: DispatchConfig, tokens_TD: Tensor) -> Wire:
        """Start the exchange of a pass with the plan in the attributes."""
        plan = Plan(
            expert_TK=self.expert_SBK.flatten(0, -2),
            place_TK=self.place_SBK.flatten(0, -2),
            kept_E=self.kept_E,
        )
        num_slots = self._slots(config, tokens_TD)
        if config.fits and not self.configs.in_training:
            num_slots = self.agreement.largest(num_slots)  # Ranks may have different T here.
        sends_again = self.packed and config.sends_again(self.exchange.num_hosts)
        return self.exchange.start(plan, tokens_TD, num_slots, sends_again=sends_again)

    def _slots(self, config: DispatchConfig, tokens_TD: Tensor) -> int:
        """Return the slots that this rank has at each rank (P).

        Calls `_announce` in a config's first pass, and in each with more tokens than any before.
        """
        num_tokens, key = len(tokens_TD), (self.configs.in_training, config)
        if num_tokens > self._most_tokens.get(key, 0):
            self._announce(config, tokens_TD)
            self._most_tokens[key] = num_tokens
        return config.wire_slots(num_tokens)

    def _announce(self, config: DispatchConfig, tokens_TD: Tensor) -> None:
        """Run the checks for which the model must be complete, and log what the passes drop."""
        options = padded_options(self.config)
        rule = "be set before the model is built, whose layers read it only then"
        fix = "build the model again"
        require(options == self._options, "padded_dispatch", options, rule, fix)
        if self.configs.in_training:
            if self._logs and options.trace is not None and not self.configs.is_followed:
                log_once(
                    f"trace={options.trace!r} has no effect in a training loop without StepHooks; "
                    "make padded_dispatch.megatron.StepHooks(chunks, passes=Passes(...)) before "
                    "the first step",
                    logging.WARNING,
                )
            require_weights_stay(self.experts, self.config)
            if self._logs and config.capacity_factor == NO_DROP:
                self._warn_of_rows(config, tokens_TD)
            if self._logs and (num_away := self.exchange.num_away):
                block = config.wire_slots(len(tokens_TD)) * tokens_TD[0].nbytes
                log_once(
                    f"padded dispatch: {num_away * block / 2**20:.1f} MiB of tokens come to each "
                    "rank from other hosts in each layer, and as many of their sums go back"
                )
        elif self._logs and options.eval_factor is None and config == self.configs.training:
            log_once(
                "padded dispatch in evaluation: capacity and drops are as in training, because a "
                "CUDA graph captures evaluation; for another capacity set eval_factor"
            )

    def _warn_of_rows(self, config: DispatchConfig, tokens_TD: Tensor) -> None:
        """Log once how much memory it takes to drop nothing, if it is much."""
        num_tokens = len(tokens_TD)
        cells = config.num_local_experts * config.num_sources * num_tokens
        num_rows = config.max_rows(num_tokens) if self.packed else cells
        ratio = num_rows / config.share(num_tokens)
        size = num_rows * tokens_TD.shape[1] * tokens_TD.element_size() / 2**30
        if ratio > (5 if config.capacity_pool == "store" else 1):  # As `least_store_rows`.
            log_once(
                "a capacity factor of NO_DROP (moe_expert_capacity_factor=None) drops nothing and "
                f"has room for {num_rows} rows of a layer, {ratio:.1f} times as many as in perfect "
                f"balance: {size:.2f} GiB before fc1. To pay less, set "
                "moe_expert_capacity_factor, 1.5 for a start.",
                logging.WARNING,
            )


class PackedTokenDispatcher(PaddedAlltoAllTokenDispatcher):
    """The dispatcher of packed experts, which do the exchange themselves."""

    _chunk: Chunk | None = None  # Lives as long as its layers.
    _numbers: Sequence[int] = ()  # of the layer's calls in the store, see `join`

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Pass the tokens on; the experts send them."""
        if self.shared_overlap is not None:
            self.shared_overlap.wait()
            self.shared_overlap.fc1(None)  # The tokens are the layer's input: nothing moved yet.
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Set the experts' `call`; return tokens [T, D], kept rows [E] and probabilities [T, K]."""
        config, tokens_TD = self.configs.current, hidden_states.flatten(0, -2)
        store = self.store if self.configs.in_training else None
        inputs = tokens_TD, probs, self.experts.linear_fc1.weight, self.experts.linear_fc2.weight
        self.experts.call = Call(
            wire=self._start(config, tokens_TD),
            take_room=room_of_pass(config, len(tokens_TD), store, self._numbers, inputs),
            counters=self._counters_now(),
        )
        return tokens_TD, self.kept_E, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Pass the experts' output on; raise if the experts did not run."""
        rule = "be 'module' where a dispatcher's steps run without its layer's experts"
        fix = "packed experts do the exchange; set PaddedOptions(experts='module')"
        require(self.experts.call is None, "experts", "packed", rule, fix)
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Pass on the sum of every token's rows, [T, D], which the experts have returned."""
        if self.shared_overlap is not None:
            self.shared_overlap.wait()
            self.shared_overlap.fc2(hidden_states)
        return hidden_states

    def set_layer(self, number: int) -> None:
        """Set the layer's number, and join the chunk of layers that share a store."""
        super().set_layer(number)
        self.experts.in_fp8 = in_fp8(self.config, number)
        if self._chunk is None:
            training = partial(getattr, self.configs, "training")
            name = self.configs.router.layer_name
            self._chunk, self._numbers = join(
                self.config, number, training, self._pipeline, self.ep_group, name
            )
            self.store = self._chunk.store if self._numbers else None

    def _announce(self, config: DispatchConfig, tokens_TD: Tensor) -> None:
        super()._announce(config, tokens_TD)
        require(
            # Megatron sets this attribute for these optimizers.
            not getattr(self.experts.linear_fc1.weight, "expert_tp", False),
            "experts",
            self._options.experts,
            "be 'module' with Muon and Megatron's other emerging optimizers, which leave weights "
            "of three dimensions to Adam",
            "set PaddedOptions(experts='module')",
        )
        if self._logs and hasattr(self.experts.linear_fc1.weight, "__fsdp_param__"):
            log_once(
                "checkpoints of Megatron-FSDP cannot hold packed experts; to save or load any, set "
                "PaddedOptions(experts='module')",
                logging.WARNING,
            )
        policy = config.policy
        if self._logs and policy != "probs" and config.capacity_pool == "store":
            words = "has no effect with a store; set PaddedOptions(capacity_pool='cells')"
            log_once(f"moe_token_drop_policy={policy!r} {words}", logging.WARNING)
        if self._logs and self.configs.in_training and not config.fits and self.store:
            num_tokens, width = tokens_TD.shape
            layer = LayerMemory(
                config=config,
                num_tokens=num_tokens,
                hidden_size=width,
                fc1_width=self.experts.linear_fc1.weight.shape[1],
                direct=self.exchange.kind == "direct",
                num_hosts=self.exchange.num_hosts,
                element_size=tokens_TD.element_size(),
            )
            sizes = self.store.sizes(num_tokens)
            num_layers, rows = len(sizes.max_rows), sizes.num_rows
            drops, in_cells = [], config.capacity_pool == "cells"
            if in_cells and (capacity := config.capacity(num_tokens)) < num_tokens:
                drops.append(f"rows of a rank for an expert past {capacity}")
            if rows < config.max_rows(num_tokens):
                drops.append(f"rows of a layer past {rows}")
            log_once(
                f"padded dispatch: {num_layers} layers at {num_tokens} tokens per rank share a "
                f"store of {rows} rows, {gib(layer.store(rows))} GiB for each micro-batch in "
                f"flight, and keep {gib(num_layers * layer.kept_tokens)} GiB of tokens that "
                f"arrived and {gib(layer.plans_kept(sizes))} GiB of their plans; what is dropped: "
                f"{' and '.join(drops) or 'nothing'}"
            )


class CellTokenDispatcher(PaddedAlltoAllTokenDispatcher):
    """The dispatcher of Megatron's own experts, which read padded cells."""

    _dispatch_state: DispatchState | None = None  # From `token_dispatch` to `token_combine`.

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send tokens to the ranks of their experts, in padded cells."""
        if self.shared_overlap is not None:
            self.shared_overlap.wait()
        config, tokens_TD = self.configs.current, hidden_states.flatten(0, -2)
        wire = self._start(config, tokens_TD)
        expert_input, self._dispatch_state = padded.dispatch(tokens_TD, probs, wire, config)
        if self.shared_overlap is not None:
            self.shared_overlap.fc1(expert_input.rows_ND)
        return expert_input.rows_ND, expert_input.probs_N

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows [N, D], rows per local expert, int64 on the host, and probabilities [N].

        Every expert has N / L rows, padded ones included.
        """
        num_local_experts = self.configs.training.num_local_experts
        num_rows = len(hidden_states) // num_local_experts
        rows_L = torch.full((num_local_experts,), num_rows, device="cpu")
        return hidden_states, rows_L, probs

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Return the sum of every token's rows, [T, D]."""
        if self.shared_overlap is not None:
            self.shared_overlap.wait()
        state, self._dispatch_state = self._dispatch_state, None
        assert state is not None
        sum_TD = padded.combine(hidden_states, state)
        if self.shared_overlap is not None:
            self.shared_overlap.fc2(sum_TD)
        return sum_TD


def is_padded(module: object) -> bool:
    """Return whether a module is a MoE layer with the padded dispatcher."""
    return isinstance(getattr(module, "token_dispatcher", None), PaddedAlltoAllTokenDispatcher)


def is_chunks(chunks: object) -> bool:
    """Return whether `chunks` is a list with a module for each chunk of a model."""
    if not isinstance(chunks, list | tuple) or len(chunks) == 0:
        return False
    return all(isinstance(chunk, torch.nn.Module) for chunk in chunks)


def require_chunks(chunks: object) -> None:
    """Raise unless `is_chunks`.

    Raises:
        ValueError: names the argument.
    """
    shown = chunks if isinstance(chunks, list | tuple) else type(chunks).__name__
    rule = "be a list of the model's chunks on this rank, at least one"
    fix = "give [model] if the model is one module"
    require(is_chunks(chunks), "chunks", shown, rule, fix)


def device_of(chunks: list[Any]) -> torch.device:
    """Return a model's device; chunks that a pipeline's layout leaves empty have no parameters."""
    devices = (parameter.device for chunk in chunks for parameter in chunk.parameters())
    return next(devices, None) or torch.device(torch.cuda.current_device())


def counting_tensors(model: torch.nn.Module) -> Iterator[Tensor]:
    """Yield the buffers of a model, and what its padded layers and their traces count."""
    yield from model.buffers()
    for module in model.modules():
        if is_padded(module):
            dispatcher: Any = module.token_dispatcher
            yield from dispatcher.counters.tensors()
            yield from dispatcher.eval_counters.tensors()
            traced = [one for one in dispatcher.observers if isinstance(one, RoutingBuffer)]
            yield from (buffer.num_new for buffer in traced)


class Copies:
    """Copies of tensors, such as `counting_tensors`, as they are when the object is made."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._copies = [torch.empty_like(tensor) for tensor in self._tensors]
        self._copy(self._tensors, self._copies)

    def restore(self) -> None:
        """Set the tensors back to the values of the copies."""
        self._copy(self._copies, self._tensors)

    @torch.no_grad()
    def _copy(self, sources: list[Tensor], targets: list[Tensor]) -> None:
        """Copy in one launch for each dtype."""
        pairs: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for target, source in zip(targets, sources, strict=True):
            pairs.setdefault(target.dtype, []).append((target, source))
        for pairs_of_dtype in pairs.values():
            to, copied = zip(*pairs_of_dtype, strict=True)
            torch._foreach_copy_(to, copied)  # pyright: ignore[reportPrivateImportUsage]
