"""A skewed router's demand; expert bias reduces the skew with our dispatcher, not with stock."""

import contextlib
import io
import json

import pytest
import torch

from padded_dispatch.megatron import uninstall
from padded_dispatch.megatron.cpu import megatron_on_cpu
from padded_dispatch.train.arguments import parse
from padded_dispatch.train.loop import train
from padded_dispatch.train.model import RouterSkew
from tests.support import tiny

EXPERT_BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}


@pytest.mark.parametrize("settings", [{}, EXPERT_BIAS], ids=["softmax", "bias"])
def test_demand_is_what_the_routers_own_counters_see(settings):
    with tiny.one_process():
        fields = {"moe_expert_capacity_factor": 0.5, "moe_router_dtype": "fp32", **settings}
        layer = tiny.padded_layer(**fields)
        if settings:
            layer.router.expert_bias += torch.tensor([0.0, 0.3, 0.0, -0.2])
        plain = layer.router.gating(torch.ones(1, 1, tiny.HIDDEN))
        skew = RouterSkew([layer], 1, 2.0, seed=7)
        added_E = (layer.router.gating(torch.ones(1, 1, tiny.HIDDEN)) - plain).flatten()
        expected_E = 2.0 * torch.randn(4, generator=torch.Generator().manual_seed(8))
        assert torch.allclose(added_E, expected_E, atol=1e-6)
        skew.after_step()  # The first pass belongs to an earlier step.
        for seed in range(2):
            hidden = torch.randn(13, 2, tiny.HIDDEN, generator=torch.Generator().manual_seed(seed))
            layer(hidden)
            with torch.no_grad():
                layer(hidden)
            layer.eval()(hidden)
            layer.train()
        demand_E = layer.token_dispatcher.counters.demand_E
        skew.after_step()
        figures = skew.figures()
        assert figures["overload"][1] == pytest.approx(demand_E.max() / demand_E.float().mean())
        assert figures["bias_range"] == ([0.5] * 2 if settings else [0.0] * 2)


def _curves(path: str, dispatcher: str) -> None:
    flags = (
        "--seq-length 24 --micro-batch 3 --steps 12 --balancing expert-bias --router-skew 1 "
        f"--capacity-factor 1 --out {path} --dispatcher {dispatcher}"
    )
    with megatron_on_cpu(), contextlib.redirect_stdout(io.StringIO()):
        train(parse(flags.split()), torch.device("cpu"))
    uninstall()


def test_the_bias_moves_in_ours_and_stands_still_in_stock(pool2, tmp_path):
    for dispatcher in ("padded_alltoall", "alltoall-drop-pad"):
        pool2.run(_curves, str(tmp_path / "results.json"), dispatcher)
    [run] = json.loads((tmp_path / "results.json").read_text())["runs"]
    ours, stock = run["rows"]
    assert len(ours["overload"]) == len(stock["overload"]) == 12
    assert ours["overload"][0] == stock["overload"][0] > 2
    # Each step moves every expert's bias by 1e-3, up or down.
    assert ours["bias_range"] == pytest.approx([0.002 * (1 + step) for step in range(12)])
    assert stock["bias_range"] == [0.0] * 12
