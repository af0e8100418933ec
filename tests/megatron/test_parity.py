"""Batched experts beside stock ones, and the rule of parity; more is in `tests.gpu.table`."""

import pytest
import torch

from padded_dispatch.megatron import PaddedOptions
from tests.support.layer_parity import LayerCase, layer_agrees
from tests.support.parity import Errors, compare

CASES = {
    "DP2": {},
    "EP2, bf16": {"ep": 2, "dtype": torch.bfloat16},
    "GPT-OSS": {"ep": 2, "bias": True, "gpt_oss": True},
    "a rank whose experts get nothing": {"ep": 2, "routing": "idle rank"},
    "TP2/ETP2": {"tp": 2, "etp": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_batched_experts_are_at_parity(pool2, name):
    case = LayerCase(name=name, options=PaddedOptions(experts="batched"), **CASES[name])
    assert [found.failures() for found in pool2.run(layer_agrees, case)] == [[], []]


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
