"""The dispatcher: the order of the stages, and no state between calls.

    select -> plan -> gather -> exchange -> regroup -> experts -> regroup -> exchange -> combine

Combine never weights. Whoever computes the experts multiplies their rows by `probs_N`, so that
dispatch and combine stay each other's transpose.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.config import DispatchConfig
from padded_dispatch.exchange import Exchange, ExpertInput
from padded_dispatch.exchange.agreement import Agreement
from padded_dispatch.exchange.alltoall import AllToAllExchange
from padded_dispatch.exchange.direct import DirectExchange
from padded_dispatch.exchange.local import LocalExchange
from padded_dispatch.ops.overflow import select_with_remedy
from padded_dispatch.ops.plan import DispatchPlan, make_plan
from padded_dispatch.ops.select import Selection

ExchangeKind = Literal["alltoall", "direct"]


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """The result of `dispatch`: what the experts read, and what `combine` needs to undo it."""

    expert_input: ExpertInput
    plan: DispatchPlan
    selection: Selection


class PaddedDispatcher:
    """Sends every token's rows to its experts and brings their outputs back, in static shapes.

    Args:
        config: its `num_ranks` and `etp_size` must be the groups' sizes.
        group: the expert-parallel process group; None for a single rank.
        etp_group: the group whose ranks split every expert's ffn; None where none do.
        packed: give the experts packed rows, see `ExpertInput`.
        exchange: "alltoall", any backend's all-to-all; or "direct", stores between the GPUs of one
            host, see `padded_dispatch.exchange.direct`; it needs `packed`.
        microbatches_in_flight: with "direct": the most passes that wait for their backward pass.

    Creating one is a collective call of both groups' members.
    """

    def __init__(
        self,
        config: DispatchConfig,
        *,
        group: dist.ProcessGroup | None = None,
        etp_group: dist.ProcessGroup | None = None,
        packed: bool = False,
        exchange: ExchangeKind = "alltoall",
        microbatches_in_flight: int = 1,
    ) -> None:
        for field, given in (("num_ranks", group), ("etp_size", etp_group)):
            size = given.size() if given is not None else 1
            if getattr(config, field) != size:
                raise ValueError(
                    f"{field}={getattr(config, field)} is not possible: its process group has "
                    f"{size} ranks; give both the same size"
                )
        self.config = config
        self.agreement = Agreement(group, etp_group)
        self.exchange = make_exchange(
            exchange,
            self.agreement,
            config.num_local_experts,
            group,
            etp_group,
            packed=packed,
            microbatches_in_flight=microbatches_in_flight,
        )

    def dispatch(
        self,
        tokens_TD: Tensor,
        probs_TE: Tensor,
        map_TE: Tensor,
        mask_T: Tensor | None = None,
        *,
        scores_TE: Tensor | None = None,
        protected_T: Tensor | None = None,
        draw: Tensor | None = None,
    ) -> Dispatched:
        """Rows to their experts.

        Args:
            tokens_TD: floating point [T, D], T the same on every rank.
            probs_TE: floating point [T, E], the router's weights.
            map_TE: bool [T, E], which experts each token asked for, at most K each.
            mask_T: bool [T], True for padding tokens, which take no slot.
            scores_TE: floating point [T, E], for remedy "reroute": see
                `padded_dispatch.ops.overflow.reroute`.
            protected_T: bool [T], True for tokens that come before all others.
            draw: int64 scalar, for policy "random": see `padded_dispatch.ops.select`.

        Raises:
            ValueError: the same on all ranks, when they disagree or T is 0.
        """
        capacity = check_facts(self.agreement, self.config, tokens_TD)
        selection = select_with_remedy(
            self.config,
            capacity,
            map_TE,
            probs_TE,
            scores_TE,
            mask_T=mask_T,
            protected_T=protected_T,
            draw=draw,
        )
        plan = make_plan(selection.kept_TE, top_k=self.config.top_k, capacity=capacity)
        outgoing = self.exchange.prepare(tokens_TD, selection.probs_TE, plan)
        expert_input = self.exchange.arrange(self.exchange.move(outgoing))
        return Dispatched(expert_input=expert_input, plan=plan, selection=selection)

    def combine(self, out_ND: Tensor, dispatched: Dispatched) -> Tensor:
        """The experts' output home, summed per token: [N, D] to [T, D].

        Rows of `out_ND` where no token is may hold anything; they are never read.
        """
        outgoing = self.exchange.disarrange(out_ND, dispatched.expert_input.offsets_LS)
        incoming = self.exchange.move_back(outgoing)
        return self.exchange.combine(incoming, dispatched.plan, dispatched.expert_input.offsets_LS)


def make_exchange(
    kind: ExchangeKind,
    agreement: Agreement,
    num_local_experts: int,
    group: dist.ProcessGroup | None,
    etp_group: dist.ProcessGroup | None,
    *,
    packed: bool,
    microbatches_in_flight: int,
) -> Exchange:
    """The exchange of this kind; a collective call of both groups' members.

    Raises:
        ValueError: on all ranks, where they disagree about it or it is not possible, with the
            reason.
    """
    # Before it is built: building the direct one is a conversation of the ranks.
    facts = {
        "direct": int(kind == "direct"),
        "packed": int(packed),
        "microbatches_in_flight": microbatches_in_flight,
    }
    agreement.check(dtype=torch.float32, **facts)
    if kind not in get_args(ExchangeKind):
        raise ValueError(f"exchange={kind!r} is not possible: choose one of alltoall, direct")
    if kind == "alltoall":
        if packed and all(other is None or other.size() == 1 for other in (group, etp_group)):
            return LocalExchange(num_local_experts)
        return AllToAllExchange(num_local_experts, group, etp_group, packed=packed)
    if not packed:
        raise ValueError(
            "exchange='direct' is not possible with padded rows: take packed ones, or "
            "exchange='alltoall'"
        )
    return DirectExchange(
        num_local_experts, group, etp_group, microbatches_in_flight=microbatches_in_flight
    )


def check_facts(
    agreement: Agreement, config: DispatchConfig, tokens_TD: Tensor, **facts: int
) -> int:
    """Agree on everything that decides a shape, and on `facts`; the capacity for these tokens.

    A rank without tokens raises only after all ranks know of it, so that none waits for it.
    """
    num_tokens, hidden_size = tokens_TD.shape
    agreement.check(
        dtype=tokens_TD.dtype,
        T=num_tokens,
        D=hidden_size,
        E=config.num_experts,
        K=config.top_k,
        C=config.capacity(num_tokens) if num_tokens else 0,
        **facts,
    )
    return config.capacity(num_tokens)
