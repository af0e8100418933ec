"""Choose a layer's exchange, and compare shapes and rules over the ranks before each pass.

The choice follows from settings and the kind of machine, and from nothing that the router decides.
It is alike on all ranks, and stays. `"auto"` takes direct stores where our packed experts compute,
experts are not split, and all ranks are GPUs of one host that reach each other over NVLink; else
collectives. With one rank nothing moves.
"""

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.config import DispatchConfig, ExchangeKind, require, require_tokens
from padded_dispatch.exchange.agreement import Agreement, Values
from padded_dispatch.exchange.collectives import Collectives, CollectiveWire
from padded_dispatch.exchange.direct import DirectStores, DirectWire

# The exchange of a layer, and of one pass of it, forward and backward.
Exchange = Collectives | DirectStores
Wire = CollectiveWire | DirectWire


def choose(
    config: DispatchConfig,
    group: dist.ProcessGroup | None,
    etp_group: dist.ProcessGroup | None,
    kind: ExchangeKind,
    *,
    packed: bool,
    device: torch.device,
) -> tuple[Exchange, str]:
    """Return the exchange of a layer and the reason, for the log; a collective call of `group`.

    Compare `kind` and `packed` over the ranks before: some choices run collectives, others do not.
    `device` is that of the tokens; groups are None for a single rank.

    Raises:
        ValueError: on all ranks, if "direct" was asked for and cannot work.
    """
    local = config.num_local_experts
    collectives = Collectives(local, group, etp_group, config.policy)
    reason = ""
    if not packed:
        reason = "direct stores need experts='packed'"
    elif collectives.etp_group is not None:
        size = collectives.etp_group.size()
        reason = f"direct stores need expert_tensor_parallel_size=1, got {size}"
    elif device.type != "cuda":
        reason = f"direct stores need tokens on GPUs, got {device.type}"
    require(kind != "direct" or not reason, "exchange", kind, "be auto or alltoall here", reason)
    if kind == "alltoall":
        reason = f'exchange="{kind}" was asked for'
    elif kind == "auto" and collectives.num_sources == 1:
        reason = "one rank"
    if reason:
        return collectives, reason
    try:
        direct = DirectStores(local, group, over_nvlink=kind == "auto")
    except ValueError as error:
        if kind == "direct":
            raise
        return collectives, str(error)
    return direct, f"the {direct.group.size()} ranks share a host and reach each other's GPUs"


def agree_on_shapes(
    agreement: Agreement,
    config: DispatchConfig,
    tokens_TD: Tensor,
    rules: Values,
    *,
    any_tokens: bool = False,
    **shapes: object,
) -> None:
    """Compare everything that decides a result over the ranks, before the routing is known.

    T = 0 is checked after the comparison, so every rank raises and none is left in a collective.

    Args:
        agreement: over the layer's groups.
        config: of the pass.
        tokens_TD: its D and dtype are read as well.
        rules: further values that must be equal on all ranks.
        any_tokens: ranks may have different T; for passes with `FIT`, which take as many slots as
            the largest T: see `Agreement.largest`.
        **shapes: as `rules`, of values that a CUDA graph captures.

    Raises as `Agreement.check` does, on all ranks.
    """
    num_tokens, hidden_size = tokens_TD.shape
    agreement.check(
        # Without gradients on one rank alone, backward would wait for it.
        (*vars(config).items(), *rules, ("gradients are enabled", torch.is_grad_enabled())),
        D=hidden_size,
        dtype=tokens_TD.dtype,
        **sizes_of(config, num_tokens, any_tokens),
        **shapes,
    )
    require_tokens(num_tokens)


@functools.cache
def sizes_of(config: DispatchConfig, num_tokens: int, any_tokens: bool) -> dict[str, object]:
    """Return the sizes of a pass that `agree_on_shapes` compares."""
    sized = num_tokens and not config.fits
    return {
        "T": "any but 0" if any_tokens and num_tokens else num_tokens,
        "C": config.capacity(num_tokens) if sized else 0,
        "rows": config.rows(num_tokens) if sized else 0,
    }
