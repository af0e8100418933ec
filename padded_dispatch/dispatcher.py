"""The dispatcher: the steps from a router's output to the sum of each token's expert outputs.

    run        select -> plan -> send tokens -> packed experts -> return and sum
    dispatch   select -> plan -> send tokens -> padded cells, for any other experts
    combine    return and sum

`run` keeps its rows in a store that all layers share; `dispatch` returns cells. `select` drops rows
beyond the C slots of a cell, if `capacity_pool` is "cells". The receiver drops rows that have no
room in a store.

`combine` does not apply routing weights; the experts must scale their output by `probs_N`. So
dispatch and combine are each other's transpose.
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch import experts
from padded_dispatch.config import DispatchConfig, ExchangeKind, require
from padded_dispatch.exchange import Exchange, Wire, choose
from padded_dispatch.exchange.agreement import Agreement, agree_on_shapes, require_returned
from padded_dispatch.experts import Activation, Call, ExpertWeights, padded
from padded_dispatch.experts.padded import DispatchState, ExpertInput
from padded_dispatch.experts.store import Store, room_of_pass
from padded_dispatch.routing import Selection, choice_probs, make_plan, select
from padded_dispatch.utils.phases import in_backward
from padded_dispatch.utils.tensors import is_dense, kind_of


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """The result of `dispatch`: what the experts read, and what `combine` needs to undo it.

    Attributes:
        expert_input: rows and probabilities for this rank's experts.
        selection: which rows kept a slot.
        state: what `combine` needs.
    """

    expert_input: ExpertInput
    selection: Selection
    state: DispatchState


_CELLS = object()  # The activation of experts that read padded cells, which have their own.


class PaddedDispatcher:
    """The dispatcher of one layer: send tokens to their experts, return the sums of their outputs.

    Creating one is a collective call on both groups.

    Args:
        config: its `num_ranks` and `etp_size` must be the groups' sizes.
        group: the expert-parallel process group; None for a single rank.
        etp_group: the group whose ranks split every expert's ffn; None if experts are not split.
        exchange: "alltoall" uses collectives of any backend. "direct" stores into the memory of
            other GPUs of the host, and serves `run` only. "auto" uses direct writes where they can
            work: see `padded_dispatch.exchange`.
        store: the store that all layers of a model share; create their dispatchers in the order in
            which a pass runs the layers. None creates a store for this layer alone.

    Attributes:
        store: where `run` keeps rows for backward.

    Raises:
        ValueError: if `exchange` or a size differs between ranks (on all ranks) or is invalid.
    """

    def __init__(
        self,
        config: DispatchConfig,
        *,
        group: dist.ProcessGroup | None = None,
        etp_group: dist.ProcessGroup | None = None,
        exchange: ExchangeKind = "auto",
        store: Store | None = None,
    ) -> None:
        is_config, rule = isinstance(config, DispatchConfig), "be a DispatchConfig"
        require(is_config, "config", type(config).__name__, rule)
        rule = "be a Store that dispatchers share, or None for one of its own"
        require(isinstance(store, Store | None), "store", store, rule)
        # The store reads the config here: if it held the dispatcher, which holds it, its memory
        # would stay until Python collects garbage.
        self._now = SimpleNamespace(config=config)
        self._last_config = config
        self._choose_args = group, etp_group, exchange
        rule = "be a process group that this rank is in, or None for one rank"
        for name, given in (("group", group), ("etp_group", etp_group)):
            require(given is None or isinstance(given, dist.ProcessGroup), name, given, rule)
        self.agreement = Agreement(group, etp_group)
        sizes = {"num_ranks": config.num_ranks, "etp_size": config.etp_size}
        self.agreement.check(exchange=exchange, **sizes)
        kinds = get_args(ExchangeKind)
        require(exchange in kinds, "exchange", exchange, f"be one of {', '.join(kinds)}")
        for (field, value), process_group in zip(sizes.items(), (group, etp_group), strict=True):
            size = process_group.size() if process_group is not None else 1
            require(value == size, field, value, f"be {size}, the size of its process group")
        self.store = Store() if store is None else store
        self._call_number = self.store.add(partial(getattr, self._now, "config"))
        self._exchanges: dict[tuple[bool, str, str], Exchange] = {}

    @property
    def config(self) -> DispatchConfig:
        """May be replaced between steps, on all ranks alike, to change the capacity factor."""
        return self._now.config

    @config.setter
    def config(self, config: DispatchConfig) -> None:
        self._now.config = config

    def run(
        self,
        tokens_TD: Tensor,
        probs_TE: Tensor,
        map_TE: Tensor,
        weights: ExpertWeights,
        activation: Activation,
    ) -> Tensor:
        """Compute the experts of every token: `sum of prob * (fc2(f(fc1(token))) + bias)`, [T, D].

        Passes without gradients, and recomputation inside of backward, keep no rows in the store.

        Args:
            tokens_TD: floating point [T, D], T the same on every rank; bf16 on CUDA devices.
            probs_TE: floating point [T, E], the router's weights.
            map_TE: bool [T, E], which experts each token asked for, at most K each; padding tokens
                have none.
            weights: of this rank's experts, in the dtype of the tokens.
            activation: between fc1 and fc2.

        Raises:
            ValueError: the same on all ranks, if shapes or rules differ between ranks or T is 0.
            AbsentRanksError: on all waiting ranks, if another rank does not make this call.
        """
        _, prob_TK, wire = self._begin(tokens_TD, probs_TE, map_TE, weights, activation)
        numbers = [self._call_number]
        inputs = tokens_TD, prob_TK, *weights.tensors().values()
        take_room = room_of_pass(self.config, len(tokens_TD), self.store, numbers, inputs)
        call = Call(wire=wire, take_room=take_room)
        return experts.run(tokens_TD, prob_TK, weights, activation, call)

    def dispatch(self, tokens_TD: Tensor, probs_TE: Tensor, map_TE: Tensor) -> Dispatched:
        """Send tokens to their experts, as rows of padded cells; arguments and errors as in `run`.

        Tokens may be of any floating point dtype of at least 16 bits, on any device.
        """
        selection, prob_TK, wire = self._begin(tokens_TD, probs_TE, map_TE)
        expert_input, state = padded.dispatch(tokens_TD, prob_TK, wire, self.config)
        return Dispatched(expert_input=expert_input, selection=selection, state=state)

    def combine(self, out_ND: Tensor, dispatched: Dispatched) -> Tensor:
        """Send the experts' output back and sum it per token: [N, D] to [T, D].

        Padded rows of `out_ND` may hold anything; they are never read. `dispatched` is what
        `dispatch` returned.
        """
        kind, rule = type(dispatched).__name__, "be what dispatch returned"
        require(isinstance(dispatched, Dispatched), "dispatched", kind, rule)
        return padded.combine(out_ND, dispatched.state)

    def _begin(
        self,
        tokens_TD: Tensor,
        probs_TE: Tensor,
        map_TE: Tensor,
        weights: Any = None,
        activation: Any = _CELLS,
    ) -> tuple[Selection, Tensor, Wire]:
        """Check and plan a pass; return its selection, its choices' probabilities and its wire."""
        config, packed = self.config, activation is not _CELLS
        values: dict[str, Any] = {"probs_TE": probs_TE, "map_TE": map_TE}
        if packed:
            is_whole = isinstance(weights, ExpertWeights)
            values |= weights.tensors() if is_whole else {"weights": weights}
        tensors = {name: one for name, one in values.items() if is_dense(one)}
        kinds = {name: kind_of(value) for name, value in values.items()}
        needing = [name for name, tensor in tensors.items() if tensor.requires_grad]
        # The text of other objects, `_CELLS` included, may be an address, which differs by rank.
        is_one = isinstance(activation, Activation)
        stays = not in_backward() or config == self._last_config
        rules = (
            ("packed", packed),
            ("probabilities need gradients", "probs_TE" in needing),
            ("any need gradients", bool(needing) or getattr(tokens_TD, "requires_grad", False)),
            ("activation", activation if is_one else kind_of(activation)),
            ("weights in e4m3", getattr(weights, "scaled", None) is not None),
            *kinds.items(),
        )
        broke_off = any(exchange.broke_off() for exchange in self._exchanges.values())
        state = {"stays": stays, "broke_off": broke_off}
        agree_on_shapes(self.agreement, config, tokens_TD, rules, **state)
        self._last_config = config
        for name, kind in kinds.items():
            is_right = name in tensors and name != "weights"
            require(is_right, name, kind, "be a tensor, or ExpertWeights of tensors")
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        in_cells = config.capacity_pool == "cells" and not config.fits
        pool, rule = config.capacity_pool, "be 'cells' with experts that read padded cells"
        has_room = packed or in_cells or config.fits
        require(has_room, "capacity_pool", pool, rule, "use run for a store")
        (num_tokens, width), device = tokens_TD.shape, tokens_TD.device
        of_map = num_tokens, config.num_experts
        wanted: dict[str, tuple[int, ...]] = {"probs_TE": of_map, "map_TE": of_map}
        if packed:
            require(is_one, "activation", activation, "be an Activation", "Activation() is SwiGLU")
            for name in [name for name in tensors if name not in wanted]:
                dtype, rule = (
                    tensors[name].dtype,
                    f"have the dtype of the tokens, {tokens_TD.dtype}",
                )
                require(dtype == tokens_TD.dtype, name, dtype, rule)
            local, ffn = config.num_local_experts, shapes["fc2_LDF"][-1]
            fc1_width = (1 + activation.gated) * ffn
            wanted |= {"fc1_LGD": (local, fc1_width, width), "fc2_LDF": (local, width, ffn)}
            wanted |= {"fc1_bias_LG": (local, fc1_width), "fc2_bias_LD": (local, width)}
        for name, shape in shapes.items():
            require(shape == wanted[name], name, shape, f"have shape {wanted[name]}")
            found, rule = tensors[name].device, f"be on the device of the tokens, {device}"
            require(found == device, name, str(found), rule, "move it there")
        dtype, rule = probs_TE.dtype, "be of a floating point dtype of at least 16 bits"
        is_wide = probs_TE.is_floating_point() and probs_TE.element_size() > 1
        require(is_wide, "probs_TE", dtype, rule)
        require(map_TE.dtype == torch.bool, "map_TE", map_TE.dtype, "be torch.bool", "use .bool()")
        key = packed, pool, device.type
        if key not in self._exchanges:
            self._exchanges[key], _ = choose(
                config, *self._choose_args, packed=packed, device=device
            )
            # The pass before may be that of another dispatcher, with which it shares buffers.
            broke_off = self._exchanges[key].broke_off()
            require_returned(self.agreement.largest(int(broke_off)) > 0)
        exchange = self._exchanges[key]
        capacity = config.capacity(num_tokens) if in_cells else num_tokens
        selection = select(map_TE, probs_TE, capacity=capacity, policy=config.policy)
        plan = make_plan(selection.kept_TE, top_k=config.top_k)
        prob_TK = choice_probs(selection.probs_TE, plan.expert_TK)
        sends_again = packed and config.sends_again(exchange.num_hosts)
        num_slots = config.wire_slots(num_tokens)
        wire = exchange.start(plan, tokens_TD, num_slots, sends_again=sends_again)
        return selection, prob_TK, wire
