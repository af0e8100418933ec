"""One rank's exchange: the same bits as the all-to-all's without peers, forward and backward."""

import pytest
import torch
from torch import Tensor

from padded_dispatch.config import DispatchConfig
from padded_dispatch.exchange import Exchange
from padded_dispatch.exchange.alltoall import AllToAllExchange
from padded_dispatch.exchange.local import LocalExchange
from padded_dispatch.ops.plan import make_plan
from tests.support.grids import poisoned_memory

T, K, D = 5, 2, 4


def asked(which: str, num_experts: int) -> Tensor:
    map_TE = torch.zeros(T, num_experts, dtype=torch.bool)
    if which == "some":
        map_TE[1:, 0] = True
        map_TE[1, -1] = map_TE[4, -1] = map_TE[3, 1] = True
    elif which == "one expert":
        map_TE[:, 1] = True
    return map_TE


def passed(exchange: Exchange, config: DispatchConfig, map_TE: Tensor) -> dict[str, Tensor]:
    """Run all stages with experts that add their row's place, and return values and gradients."""
    generator = torch.Generator().manual_seed(3)
    tokens_TD = torch.randn(T, D, generator=generator).requires_grad_()
    probs_TE = torch.rand(map_TE.shape, generator=generator).requires_grad_()
    sizes = config.sizes(T)
    plan = make_plan(map_TE, top_k=K, sizes=sizes)
    outgoing = exchange.prepare(tokens_TD, probs_TE, plan, sizes.num_rows)
    given = exchange.arrange(exchange.move(outgoing))
    assert given.offsets_LS is not None
    num_rows = int(given.offsets_LS[-1, -1])
    assert given.rows_ND.shape == (sizes.num_rows, D) and given.probs_N.shape == (sizes.num_rows,)
    out_ND = given.rows_ND * given.probs_N[:, None]
    is_real_N = torch.arange(sizes.num_rows) < num_rows
    out_ND = torch.where(is_real_N[:, None], out_ND, torch.nan)
    back = exchange.move_back(exchange.disarrange(out_ND, given.offsets_LS))
    out_TD = exchange.combine(back, plan, given.offsets_LS)
    out_TD.backward(torch.arange(T * D).view(T, D).float())
    assert tokens_TD.grad is not None and probs_TE.grad is not None
    return {
        "rows": given.rows_ND[:num_rows].detach(),
        "probs": given.probs_N[:num_rows].detach(),
        "kept": given.kept_SL,
        "offsets": given.offsets_LS,
        "out": out_TD.detach(),
        "grad_tokens": tokens_TD.grad,
        "grad_probs": probs_TE.grad,
    }


@pytest.mark.parametrize("num_experts", [2, 3])
@pytest.mark.parametrize("pool", ["expert", "rank"])
@pytest.mark.parametrize("which", ["some", "one expert", "none"])
def test_it_is_the_all_to_all_without_peers(which, pool, num_experts):
    config = DispatchConfig(num_experts=num_experts, top_k=K, capacity_pool=pool)
    map_TE, per_pool = asked(which, num_experts), config.sizes(T).experts_per_pool
    all_to_all = AllToAllExchange(num_experts, packed=True, experts_per_pool=per_pool)
    with poisoned_memory():
        found = passed(LocalExchange(), config, map_TE)
        expected = passed(all_to_all, config, map_TE)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert found["kept"].tolist() == [map_TE.sum(0).tolist()]
