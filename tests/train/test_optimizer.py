"""The learning rate, and Adam over the gradients that Megatron's DDP keeps."""

from itertools import pairwise

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from torch import nn

from padded_dispatch.train import optimizer as optimizer_module
from padded_dispatch.train.optimizer import TorchAdam, learning_rate, optimizer_config
from padded_dispatch.train.settings import Recipe


def recipe(**given):
    sizes = {"num_layers": 1, "seq_length": 1, "micro_batch": 1, "global_batch": 1}
    return Recipe(**sizes, **given)


def test_the_docstring_example():
    schedule = recipe(lr=1.0, lr_warmup=2, lr_decay=10)
    rates = [learning_rate(schedule, step) for step in (1, 2, 6, 10, 30)]
    assert rates == pytest.approx([0.5, 1.0, 0.55, 0.1, 0.1], rel=1e-15)


def test_without_warmup_it_starts_at_the_top_and_only_falls():
    schedule = recipe(lr=0.2, lr_warmup=0, lr_decay=7)
    rates = [learning_rate(schedule, step) for step in range(0, 9)]
    assert rates[0] == pytest.approx(0.2, rel=1e-15)
    assert all(a > b for a, b in pairwise(rates[:8]))


def test_it_stays_low_when_warmup_is_as_long_as_the_run():
    schedule = recipe(lr=1.0, lr_warmup=5, lr_decay=5)
    assert [learning_rate(schedule, s) for s in (4, 5, 6)] == pytest.approx([0.8, 1.0, 0.1])


def test_adam_steps_along_main_grad():
    torch.manual_seed(0)
    ours, reference = nn.Linear(5, 3), nn.Linear(5, 3)
    reference.load_state_dict(ours.state_dict())
    adam = torch.optim.AdamW(reference.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = TorchAdam([ours], lr=0.1)
    for lr in (0.3, 0.02):
        for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
            mine.main_grad = torch.randn_like(mine)
            theirs.grad = mine.main_grad.clone()
        optimizer.zero_grad()
        assert optimizer.step(lr) is None
        adam.param_groups[0]["lr"] = lr
        adam.step()
        for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_adam_state_sets_megatrons_fields(monkeypatch):
    # The real one requires Transformer Engine unless the state is fp32.
    monkeypatch.setattr(optimizer_module, "OptimizerConfig", dict)
    full = optimizer_config(recipe(lr=0.1, lr_decay=9))
    small = optimizer_config(recipe(lr=0.1, lr_decay=9, adam_state="bf16"))
    assert {k: v for k, v in small.items() if k not in full} == {
        "use_precision_aware_optimizer": True,
        "store_param_remainders": True,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
    }
    assert small.keys() <= OptimizerConfig.__dataclass_fields__.keys()
    assert full["lr"] == 0.1 and full["use_distributed_optimizer"] is True
