"""The dispatcher: the order of the stages, and no state between calls.

    select -> plan -> gather -> exchange -> regroup -> experts -> regroup -> exchange -> combine

`combine` does not apply routing weights; the experts must scale their output by `probs_N`. So
dispatch and combine are each other's transpose.

Letters: T tokens on this rank, K experts per token, E experts, D hidden size, N rows of this
rank's experts.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from padded_dispatch.config import DispatchConfig, ExchangeKind, require
from padded_dispatch.exchange import Exchange, ExpertInput
from padded_dispatch.exchange.agreement import Agreement
from padded_dispatch.exchange.choose import Choice, LayerExchanges, agree_on_shapes
from padded_dispatch.exchange.fit import fit
from padded_dispatch.routing.plan import DispatchPlan, make_plan
from padded_dispatch.routing.select import Selection, select


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """The result of `dispatch`: what the experts read, and what `combine` needs to undo it.

    Attributes:
        expert_input: rows and probabilities for this rank's experts.
        plan: where each row lies.
        selection: which rows kept a slot.
        exchange: the exchange that moved the rows.
    """

    expert_input: ExpertInput
    plan: DispatchPlan
    selection: Selection
    exchange: Exchange


class PaddedDispatcher:
    """Sends every token's rows to its experts and brings their outputs back, in static shapes.

    Creating one is a collective call of both groups' members.

    Args:
        config: its `num_ranks` and `etp_size` must be the groups' sizes.
        group: the expert-parallel process group; None for a single rank.
        etp_group: the group whose ranks split every expert's ffn; None where none do.
        packed: give the experts packed rows, see `ExpertInput`; experts that share slots need it.
        exchange: "alltoall", any backend's; "direct", stores between the GPUs of one host, which
            needs `packed`; or "auto", direct where it can work: see `exchange.choose`.
        microbatches_in_flight: with direct stores, the most passes that wait for their backward
            pass.

    Raises:
        ValueError: on all ranks, when they differ in an argument or one cannot work.
    """

    def __init__(
        self,
        config: DispatchConfig,
        *,
        group: dist.ProcessGroup | None = None,
        etp_group: dist.ProcessGroup | None = None,
        packed: bool = False,
        exchange: ExchangeKind = "auto",
        microbatches_in_flight: int = 1,
    ) -> None:
        for field, given in (("num_ranks", group), ("etp_size", etp_group)):
            size = given.size() if given is not None else 1
            value = getattr(config, field)
            require(value == size, field, value, f"be {size}, the size of its process group")
        self.config = config
        self._groups = group, etp_group
        self.agreement = Agreement(group, etp_group)
        self.exchanges = LayerExchanges(
            config,
            self.agreement,
            group,
            etp_group,
            layout="packed" if packed else "padded",
            kind=exchange,
            microbatches_in_flight=microbatches_in_flight,
        )

    def dispatch(
        self, tokens_TD: Tensor, probs_TE: Tensor, map_TE: Tensor, mask_T: Tensor | None = None
    ) -> Dispatched:
        """Send rows to their experts.

        Args:
            tokens_TD: floating point [T, D], T the same on every rank.
            probs_TE: floating point [T, E], the router's weights.
            map_TE: bool [T, E], which experts each token asked for, at most K each.
            mask_T: bool [T], True for padding tokens, which take no slot.

        Raises:
            ValueError: the same on all ranks, when their shapes or rules differ or T is 0.
            AbsentRanksError: on all ranks that wait, when one does not come.
        """
        # What is given is compared as well, so that all ranks raise if one lacks an argument.
        rules = (
            ("dtype of probabilities", probs_TE.dtype),
            ("shape of probs_TE", tuple(probs_TE.shape)),
            ("shape of map_TE", tuple(map_TE.shape)),
        )
        agree_on_shapes(self.agreement, self.config, tokens_TD, rules)
        choice = self._choose(tokens_TD, probs_TE, map_TE, mask_T)
        exchange = choice.exchange
        selection = select(
            map_TE, probs_TE, sizes=choice.sizes, policy=self.config.policy, mask_T=mask_T
        )
        plan = make_plan(selection.kept_TE, top_k=self.config.top_k, sizes=choice.sizes)
        outgoing = exchange.prepare(tokens_TD, selection.probs_TE, plan, choice.sizes.num_rows)
        expert_input = exchange.arrange(exchange.move(outgoing))
        return Dispatched(
            expert_input=expert_input, plan=plan, selection=selection, exchange=exchange
        )

    def _choose(
        self, tokens_TD: Tensor, probs_TE: Tensor, map_TE: Tensor, mask_T: Tensor | None
    ) -> Choice:
        if not self.config.fits:
            return self.exchanges.choose(self.config, tokens_TD, probs_TE)
        asked_TE = map_TE if mask_T is None else map_TE & ~mask_T[:, None]
        packed = self.exchanges.fits_packed
        sizes = fit(self.config, asked_TE, *self._groups, packed=packed)
        return self.exchanges.fitting(sizes)

    def combine(self, out_ND: Tensor, dispatched: Dispatched) -> Tensor:
        """Send the experts' output back and sum it per token: [N, D] to [T, D].

        Padded rows of `out_ND` may hold anything; they are never read.
        """
        exchange, offsets_LS = dispatched.exchange, dispatched.expert_input.offsets_LS
        incoming = exchange.move_back(exchange.disarrange(out_ND, offsets_LS))
        return exchange.combine(incoming, dispatched.plan, offsets_LS)
