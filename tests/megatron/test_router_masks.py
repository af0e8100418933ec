"""A masked token is as if it were not there: in each combination of settings of a layer.

A layer runs over tokens of which some are masked, and over the others alone, with as many slots.
Outputs, counts and all gradients are equal. A masked token's row is exactly zero, in both
directions. Everything is in fp64, so sums in another order differ by less than the tolerance.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import tiny
from tests.support.parity import megatron

S, B = 7, 2
T, NUM_MASKED = S * B, 5
ROWS = ("output", "tokens")
LOSSES = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.1,
}

# Options, then fields of the config.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "auto": ({}, {}),
    "module": ({"experts": "module"}, {}),
    "packed": ({"experts": "packed", "capacity_pool": "cells"}, {}),
    "store": ({"experts": "packed"}, {"moe_expert_capacity_factor": None}),
    "position": ({"capacity_pool": "cells"}, {"moe_token_drop_policy": "position"}),
    "no factor": ({}, {"moe_expert_capacity_factor": None}),
    "shared experts": ({"capacity_pool": "cells"}, {"moe_shared_expert_intermediate_size": 16}),
    "recompute": ({"experts": "packed", "capacity_pool": "cells"}, tiny.RECOMPUTE),
    "expert bias": ({"capacity_pool": "cells"}, tiny.EXPERT_BIAS),
}


def layer_of(case: str, **sizes: Any) -> Any:
    options, fields = CASES[case]
    dtypes = {"params_dtype": torch.float64, "moe_router_dtype": "fp64"}
    # So few slots that most layers drop rows, and as many whatever T is.
    settings = {"moe_expert_capacity_factor": 0.01, **LOSSES, **dtypes, **sizes, **fields}
    return tiny.padded_layer(**{"experts": "auto"} | options, **settings)


def run(layer: Any, hidden: Tensor, mask_BS: Tensor | None = None) -> dict[str, Tensor]:
    found = tiny.results(layer, hidden, padding_mask=mask_BS)
    found |= {name: found[name].flatten(0, 1) for name in ROWS}
    counters = layer.token_dispatcher.counters
    for name in ("demand_E", "kept_E", "lost_tokens"):
        found[name] = getattr(counters, name).clone()
    if layer.router.enable_expert_bias:
        found["counts of the bias"] = layer.router.local_tokens_per_expert.clone()
    return found


def failures(case: str, **sizes: Any) -> list[str]:
    random = torch.Generator().manual_seed(11 + dist.get_rank())
    hidden = torch.randn(S, B, tiny.HIDDEN, generator=random, dtype=torch.float64)
    masked_T = torch.zeros(T, dtype=torch.bool)
    masked_T[torch.randperm(T, generator=random)[:NUM_MASKED]] = True
    mask_BS = masked_T.view(S, B).T
    masked = run(layer_of(case, **sizes), hidden, mask_BS)
    others = hidden.flatten(0, 1)[~masked_T][:, None]
    alone = run(layer_of(case, **sizes), others)
    found = []
    if "shared" not in case:  # Shared experts compute each token, as stock's do.
        found += [f"{case}: {name} is not zero" for name in ROWS if masked[name][masked_T].any()]
    for name, expected in alone.items():
        given = masked[name][~masked_T] if name in ROWS else masked[name]
        if "shared" in case and "shared" in name:
            continue
        # In fp32 are Megatron's sigmoid, and the number of tokens in losses with a mask.
        in_fp32 = case == "expert bias" or name == "router.weight"
        epsilon = 1e-6 if in_fp32 else 1e-9
        if (given - expected).abs().max() > epsilon * expected.abs().max():
            found.append(f"{case}: {name} differs")
    if (
        case not in ("auto", "no factor", "store")
        and alone["kept_E"].sum() == alone["demand_E"].sum()
    ):
        found.append(f"{case}: nothing was dropped")
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("one_process")
def test_a_masked_token_is_as_if_it_were_not_there(case):
    assert failures(case) == []


@pytest.mark.usefixtures("one_process")
def test_nothing_but_masked_tokens_is_zero():
    """Their share of the auxiliary loss is 0 / 0; no gradient may have it."""
    mask_BS = torch.ones(B, S, dtype=torch.bool)
    hidden = torch.randn(S, B, tiny.HIDDEN, dtype=torch.float64)
    for case in ("auto", "module", "packed", "store", "expert bias"):
        found = run(layer_of(case), hidden, mask_BS)
        assert [name for name, tensor in found.items() if (tensor != 0).any()] == []


@pytest.mark.usefixtures("one_process")
def test_a_mask_of_other_tokens_is_refused():
    """On later pipeline stages Megatron does not split it like the tokens."""
    layer, hidden = layer_of("module"), torch.randn(S, B, tiny.HIDDEN, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"padding_mask.shape must have one .* 14 tokens .*,"):
        layer(hidden, padding_mask=torch.zeros(B, 2 * S, dtype=torch.bool))


def failures_in_layout(sizes: dict[str, int]) -> list[str]:
    with megatron("cpu", **sizes):
        fields: dict[str, Any] = dict(sizes)
        if sizes.get("tensor_model_parallel_size", 1) > 1:
            fields["sequence_parallel"] = True
        return [text for case in CASES for text in failures(case, **fields)]


@pytest.mark.parametrize(
    "sizes",
    [
        {"expert_model_parallel_size": 2},
        {
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
        {"context_parallel_size": 2, "expert_model_parallel_size": 2},
    ],
    ids=["EP2", "TP2 with sequence parallel, EP2", "CP2, EP2"],
)
def test_a_masked_token_is_as_if_it_were_not_there_on_two_ranks(pool2, sizes):
    assert pool2.run(failures_in_layout, sizes) == [[], []]
