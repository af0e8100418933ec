"""Training in fp8 by Megatron's schedules: when weights are quantized, and that none is stale."""

from typing import Any

import pytest
import torch
from torch import Tensor

from padded_dispatch.experts.scaled import ScaledWeights
from tests.support.training import Model, train, world

FP8: dict[str, Any] = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}

pytestmark = pytest.mark.usefixtures("alone")


def test_training_never_sees_a_stale_weight(monkeypatch):
    """Steps of two micro-batches with evaluation between, beside passes that all quantize."""
    marks = {
        "fields": FP8,
        "options": {"experts": "packed"},
        "hidden": 32,
        "ffn": 48,
        "evaluates": (2, 10),
    }
    model = Model(**marks)
    with world(model):
        found = train(model)
        refresh, quantized = ScaledWeights.refresh, []

        def always(scaled: ScaledWeights, *weights: Tensor) -> None:
            scaled.mark_stale()
            quantized.append(scaled)
            refresh(scaled, *weights)

        monkeypatch.setattr(ScaledWeights, "refresh", always)
        expected = train(model)
        bf16 = train(Model(**marks | {"fields": {}}))
    assert len(quantized) == model.num_layers * model.steps * 2 * model.microbatches
    for one, other in zip(found.steps, expected.steps, strict=True):
        for name, value in other.items():
            assert torch.equal(one[name], value), name
    assert found.steps[0].keys() == bf16.steps[0].keys()
    assert found.losses != bf16.losses
