"""The six methods, called as Megatron calls them."""

import logging

import pytest
import torch

from padded_dispatch import DispatchConfig
from padded_dispatch.megatron import PaddedOptions
from padded_dispatch.megatron.compat import layer_graphs
from padded_dispatch.megatron.config import log_once
from padded_dispatch.megatron.dispatcher import announce
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("one_process")


def routing(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and a map with two experts per token, few of them expert 3's."""
    probs_TE = torch.rand(num_tokens, 4, dtype=torch.float64) + torch.tensor([0.4, 0.3, 0.2, 0.0])
    return probs_TE, torch.zeros_like(probs_TE, dtype=torch.bool).scatter(
        1, probs_TE.topk(2).indices, True
    )


@pytest.mark.parametrize("shape", [(6, 2), (1, 1), (3, 5)])
def test_identity_experts_give_tokens_times_kept_probabilities(shape):
    dispatcher = tiny.padded_layer().token_dispatcher
    hidden = torch.randn(*shape, tiny.HIDDEN, dtype=torch.float64)
    probs_TE, map_TE = routing(hidden[..., 0].numel())
    rows, meta = dispatcher.dispatch_preprocess(hidden, map_TE, probs_TE)
    rows, meta = dispatcher.token_dispatch(rows, meta)
    rows_ND, rows_per_expert, probs_N = dispatcher.dispatch_postprocess(rows, meta)
    num_tokens = hidden[..., 0].numel()
    assert rows_per_expert.tolist() == [num_tokens] * 4
    assert rows_per_expert.device.type == "cpu" and rows_per_expert.dtype == torch.int64
    assert rows_ND.shape == (4 * num_tokens, tiny.HIDDEN)
    out = dispatcher.combine_preprocess(rows_ND * probs_N[:, None])
    out = dispatcher.combine_postprocess(dispatcher.token_combine(out))
    kept_probs_TE = torch.where(map_TE, probs_TE, 0)
    expected = hidden * kept_probs_TE.sum(1).view(*shape, 1)
    torch.testing.assert_close(out, expected, rtol=1e-15, atol=1e-15)


def test_padded_rows_are_zero_and_only_they():
    dispatcher = tiny.padded_layer().token_dispatcher
    hidden = torch.randn(4, 2, tiny.HIDDEN).abs() + 1
    probs_TE, map_TE = routing(8)
    rows, meta = dispatcher.dispatch_preprocess(hidden, map_TE, probs_TE.float())
    rows_ND, _, probs_N = dispatcher.dispatch_postprocess(rows, meta)
    real_N = (torch.arange(8) < map_TE.sum(0)[:, None]).flatten()
    assert torch.equal((rows_ND != 0).all(1), real_N)
    assert torch.equal((rows_ND != 0).any(1), real_N)
    assert torch.equal(probs_N != 0, real_N)


def test_no_tokens_raise():
    with pytest.raises(ValueError, match="num_tokens must be at least 1, got 0"):
        tiny.padded_layer()(torch.randn(0, 2, tiny.HIDDEN))


@pytest.mark.parametrize("captured", [False, True])
def test_what_evaluation_drops_is_named_once(caplog, monkeypatch, captured):
    log_once.cache_clear()
    moe = tiny.padded_layer(moe_expert_capacity_factor=0.5).eval()
    monkeypatch.setattr("megatron.core.transformer.cuda_graphs._IS_GRAPH_CAPTURING", captured)
    with caplog.at_level(logging.INFO, logger="padded_dispatch"), torch.no_grad():
        for length in (6, 9, 6):
            moe(torch.randn(length, 1, tiny.HIDDEN))
    lines = [r.message for r in caplog.records if "in evaluation" in r.message]
    expected = "as in training, because a CUDA graph" if captured else "needs, and drops nothing"
    assert len(lines) == 1 and expected in lines[0]
    counters = moe.token_dispatcher.eval_counters
    assert bool(counters.kept_E.sum() < counters.demand_E.sum()) == captured


def test_the_price_of_dropping_nothing_is_said_once(caplog):
    config = DispatchConfig(num_experts=8, top_k=2, num_ranks=4)
    tokens_TD = torch.empty(1000, 64, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING, logger="padded_dispatch"):
        for _ in range(3):
            announce(config, tokens_TD, packed=False, logs=True)
        dropping = DispatchConfig(num_experts=8, top_k=2, capacity_factor=1.0)
        announce(dropping, tokens_TD, packed=False, logs=True)
        announce(config, torch.cat([tokens_TD, tokens_TD]), packed=False, logs=False)
    (record,) = caplog.records
    assert "C = 1000 slots" in record.message
    assert "4.0 times a dropless one" in record.message
    assert "set moe_expert_capacity_factor" in record.message


def test_the_first_pass_of_recompute_is_not_counted():
    """It has no gradients; evaluation has none either, and is counted."""
    dispatcher = tiny.padded_layer(moe_expert_capacity_factor=0.5).token_dispatcher
    all_to_0 = torch.zeros(8, 4, dtype=torch.bool)
    all_to_0[:, 0] = True

    def one_pass() -> None:
        hidden, probs_TE = torch.randn(8, 1, tiny.HIDDEN), torch.rand(8, 4)
        rows, meta = dispatcher.dispatch_preprocess(hidden, all_to_0, probs_TE)
        dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(rows, meta))

    with torch.no_grad():
        one_pass()
    assert not dispatcher.counters.totals.any() and not dispatcher.eval_counters.totals.any()
    one_pass()
    assert dispatcher.counters.num_unplaced.item() == 8 - 2
    first_pass = dispatcher.counters.totals.clone()
    one_pass()
    assert torch.equal(dispatcher.counters.totals, 2 * first_pass)


def test_a_hybrid_stack_with_a_graph_behind_its_experts_takes_the_all_to_all():
    def no_direct(is_hybrid_model: bool) -> str:
        parts = layer_graphs("moe_router") | {"cuda_graph_impl": "local"}
        config = tiny.config(is_hybrid_model=is_hybrid_model)
        for name, value in parts.items():
            setattr(config, name, value)
        config.padded_dispatch = PaddedOptions(experts="packed")
        return tiny.padded_layer_of(config).token_dispatcher.exchanges.no_direct

    assert "no CUDA device" in no_direct(False)
    assert no_direct(True).startswith("the graph behind the experts of a hybrid stack would not")
