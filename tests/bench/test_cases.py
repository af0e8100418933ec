"""The cases of a sweep, and invalid ones."""

import pytest

from padded_dispatch.bench.cases import CONTENDERS, MODELS, Case, sweep

CASE = {"model": "tiny", "ep": 2, "tokens": 64, "skew": "uniform", "contender": "module"}


def test_a_sweep_is_every_combination_and_those_that_do_not_drop_once():
    cases = list(
        sweep(
            models=["tiny", "qwen3-30b-a3b"],
            eps=[2, 1],
            tokens=[64],
            skews=["uniform"],
            capacity_factors=[1.0, 2.0],
            contenders=["dropless", "module"],
        )
    )
    found = [(c.ep, c.model, c.contender, c.capacity_factor) for c in cases]
    assert found == [
        (ep, model, contender, factor)
        for ep in (2, 1)
        for model in ("tiny", "qwen3-30b-a3b")
        for contender, factor in [("dropless", None), ("module", 1.0), ("module", 2.0)]
    ]


def test_capacity_is_the_dispatchers():
    case = Case(**CASE, capacity_factor=1.25)
    assert case.dispatch_config().capacity(64) == 20  # 64 * 2 / 8 * 1.25
    assert Case(**CASE, capacity_factor=None).dispatch_config().capacity(64) == 64


def test_idle_experts_are_those_of_the_last_rank():
    assert Case(**CASE, capacity_factor=1.0).num_idle == 0
    assert Case(**(CASE | {"skew": "idle-rank"}), capacity_factor=1.0).num_idle == 4


def test_a_rank_cannot_be_idle_alone():
    with pytest.raises(
        ValueError, match=r"skew must leave .* top_k=2 .* ep=1, got 'idle-rank'; raise ep"
    ):
        Case(**(CASE | {"skew": "idle-rank", "ep": 1}), capacity_factor=1.0)


def test_experts_must_split_evenly():
    with pytest.raises(ValueError, match=r"num_experts must .*, got 8"):
        Case(**(CASE | {"ep": 3}), capacity_factor=1.0)


def test_contenders_have_their_names_variants_and_graphs():
    found = {key: (who.name, who.variant, who.graph) for key, who in CONTENDERS.items()}
    assert found == {
        "dropless": ("stock-dropless", None, "none"),
        "allgather": ("stock-allgather", None, "none"),
        "drop-pad": ("stock-drop-pad", None, "none"),
        "drop-pad-graphed": ("stock-drop-pad", None, "layer"),
        "auto": ("ours", "auto", "none"),
        "auto-graphed": ("ours", "auto", "layer"),
        "megatron-router-graphed": ("ours", "megatron router", "layer"),
        "module": ("ours", "module", "none"),
        "module-graphed": ("ours", "module", "layer"),
        "packed": ("ours", "packed", "none"),
        "packed-graphed": ("ours", "packed", "layer"),
        "batched": ("ours", "batched", "none"),
        "batched-graphed": ("ours", "batched", "layer"),
        "direct": ("ours", "direct", "none"),
        "direct-graphed": ("ours", "direct", "layer"),
        "direct-serial-graphed": ("ours", "direct serial", "layer"),
        "direct-each-graphed": ("ours", "direct each", "layer"),
        "direct-summed-graphed": ("ours", "direct summed", "layer"),
        "rank-graphed": ("ours", "rank", "layer"),
        "rank-direct-graphed": ("ours", "rank direct", "layer"),
        "receiver-graphed": ("ours", "receiver", "layer"),
    }


def test_contenders_have_their_pools():
    found = {key: who.capacity_pool for key, who in CONTENDERS.items()}
    pooled = {key: pool for key, pool in found.items() if pool != "expert"}
    assert pooled == {
        "rank-graphed": "rank",
        "rank-direct-graphed": "rank",
        "receiver-graphed": "receiver",
    }


def test_direct_stores_need_another_rank():
    sizes = {"models": ["tiny"], "tokens": [8], "skews": ["uniform"], "capacity_factors": [1.0]}
    cases = list(sweep(eps=[1, 2], contenders=["direct-graphed"], **sizes))
    assert [case.ep for case in cases] == [2]


def test_shapes_are_those_of_the_models():
    qwen = MODELS["qwen3-30b-a3b"]
    assert (qwen.hidden_size, qwen.num_experts, qwen.top_k, qwen.ffn_size) == (2048, 128, 8, 768)
    gpt = MODELS["gpt-oss-20b"]
    assert (gpt.hidden_size, gpt.num_experts, gpt.top_k, gpt.ffn_size) == (2880, 32, 4, 2880)
    deep = MODELS["deepseek-v2-lite"]
    assert (deep.hidden_size, deep.num_experts, deep.top_k, deep.ffn_size) == (2048, 64, 6, 1408)
