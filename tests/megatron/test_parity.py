"""Our MoE layer without dropping against Megatron's stock one: output and every gradient."""

import pytest
import torch

from padded_dispatch.megatron import PaddedOptions
from tests.support.layer_parity import LayerCase, layer_parity
from tests.support.parity import Errors, compare
from tests.support.pipeline_parity import PipelineCase, pipeline_parity

OVERLAP = (("moe_shared_expert_overlap", True),)
RECOMPUTE = (("recompute_granularity", "selective"), ("recompute_modules", ["moe"]))

PACKED = PaddedOptions(experts="packed")
BATCHED = PaddedOptions(experts="batched")

# Two ranks. 'dp' has each expert twice; the token counts are odd.
TWO = (
    LayerCase(name="dp"),
    LayerCase(name="ep", ep=2),
    LayerCase(name="ep, one local expert", ep=2, num_experts=2, top_k=1),
    LayerCase(name="ep, one token", ep=2, seq=1, batch=1),
    LayerCase(name="ep, bf16", ep=2, dtype=torch.bfloat16),
    LayerCase(name="tp", tp=2),
    LayerCase(name="etp", tp=2, etp=2),
    LayerCase(name="ep over tp", tp=2, ep=2),
    LayerCase(name="bias", ep=2, bias=True),
    LayerCase(name="a rank whose experts get nothing", ep=2, routing="idle rank"),
    LayerCase(name="every token to one expert", ep=2, top_k=1, routing="one expert"),
    LayerCase(name="recompute", ep=2, ours=RECOMPUTE),
    LayerCase(name="packed, dp", options=PACKED),
    LayerCase(name="packed", ep=2, options=PACKED),
    LayerCase(name="packed, bf16", ep=2, dtype=torch.bfloat16, options=PACKED),
    LayerCase(name="packed, one token", ep=2, seq=1, batch=1, options=PACKED),
    LayerCase(name="packed, a rank gets nothing", ep=2, routing="idle rank", options=PACKED),
    LayerCase(name="packed, one expert", ep=2, top_k=1, routing="one expert", options=PACKED),
    LayerCase(name="packed, bias", ep=2, bias=True, options=PACKED),
    LayerCase(name="packed, GPT-OSS", ep=2, bias=True, gpt_oss=True, options=PACKED),
    LayerCase(name="packed, ep over tp", tp=2, ep=2, options=PACKED),
    LayerCase(name="packed, recompute", ep=2, ours=RECOMPUTE, options=PACKED),
    LayerCase(name="packed, etp", tp=2, etp=2, options=PACKED),
    LayerCase(name="batched, etp", tp=2, etp=2, options=BATCHED),
    LayerCase(name="batched, dp", options=BATCHED),
    LayerCase(name="batched, bf16", ep=2, dtype=torch.bfloat16, options=BATCHED),
    LayerCase(name="batched, GPT-OSS", ep=2, bias=True, gpt_oss=True, options=BATCHED),
    LayerCase(name="batched, a rank gets nothing", ep=2, routing="idle rank", options=BATCHED),
    LayerCase(name="shared experts", tp=2, ep=2, shared_ffn=6),
    LayerCase(name="shared experts, overlap", tp=2, ep=2, shared_ffn=6, ours=OVERLAP),
    LayerCase(name="shared score", ep=2, shared_ffn=5, shared_score=True),
    LayerCase(name="shared score, overlap", ep=2, shared_ffn=5, shared_score=True, ours=OVERLAP),
)
FOUR = (
    LayerCase(name="ep"),
    LayerCase(name="tp and ep", tp=2, ep=2),
    LayerCase(name="tp, ep and etp", tp=2, ep=2, etp=2),
    LayerCase(name="tp, ep, etp, overlap", tp=2, ep=2, etp=2, shared_ffn=6, ours=OVERLAP),
    LayerCase(name="packed, tp, ep and etp", tp=2, ep=2, etp=2, options=PACKED),
    LayerCase(
        name="packed, a rank gets nothing", tp=2, ep=2, etp=2, routing="idle rank", options=PACKED
    ),
    LayerCase(name="batched, tp, ep and etp", tp=2, ep=2, etp=2, options=BATCHED),
    LayerCase(name="ep, one local expert", ep=4, num_experts=4),
)


@pytest.mark.parametrize("case", TWO, ids=lambda case: case.name)
def test_two_ranks(pool2, case):
    assert [parity.failures() for parity in pool2.run(layer_parity, case)] == [[], []]


@pytest.mark.parametrize("case", FOUR, ids=lambda case: case.name)
def test_four_ranks(pool4, case):
    assert [parity.failures() for parity in pool4.run(layer_parity, case)] == [[]] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_pipeline_stages_of_two_chunks(pool2, dtype):
    case = PipelineCase(name="pp", dtype=dtype)
    assert [parity.failures() for parity in pool2.run(pipeline_parity, case)] == [[], []]


def test_pipeline_stages_with_expert_parallelism(pool4):
    case = PipelineCase(name="pp and ep", ep=2)
    assert [parity.failures() for parity in pool4.run(pipeline_parity, case)] == [[]] * 4


def _compared(ours: float) -> Errors:
    """Compare `ours` with stock, which is off by 0.25 where the exact value is 5."""
    values = {"ours": ours, "stock": 5.25, "exact": 5.0}
    found = {who: {"x": torch.tensor([1.0, value])} for who, value in values.items()}
    return compare(**found, dtype=torch.float32)["x"]


def test_the_rule_can_fail(pool2):
    ulp_of_5 = 2.0**-21
    for ours in (5.0, 5.5, 4.5, 5.5 + ulp_of_5):
        assert all(errors.passed for errors in pool2.run(_compared, ours))
    for ours in (5.5 + 2 * ulp_of_5, 4.49, torch.nan, torch.inf):
        assert not any(errors.passed for errors in pool2.run(_compared, ours))
