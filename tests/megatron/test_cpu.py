"""Megatron-Core on a CPU: tensors, random state, a model with recomputation; all is restored."""

import pytest
import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer import transformer_block
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from padded_dispatch.megatron.cpu import check_device, megatron_on_cpu

PATCHED = {
    torch.cuda: ("current_device", "synchronize", "Stream", "stream", "current_stream"),
    random: ("_get_cuda_rng_state", "_set_cuda_rng_state"),
    moe_utils: ("te_general_gemm",),
    transformer_block: ("LayerNormImpl",),
}


def test_tensors_meant_for_cuda_are_made_on_the_cpu():
    with megatron_on_cpu():
        x = torch.arange(3, device="cuda")
        assert torch.equal(x, torch.arange(3))
        assert torch.full((2,), 7, device=torch.device("cuda", 1)).tolist() == [7, 7]
        assert torch.ones(1, device=torch.cuda.current_device()).device.type == "cpu"
        assert x.cuda() is x
        assert x.to("cuda", torch.float32).tolist() == x.to(torch.float32).tolist() == [0, 1, 2]
        assert torch.nn.Linear(1, 1).to(torch.device("cuda", 0)).weight.device.type == "cpu"
        assert torch.zeros(2, device="meta").device.type == "meta"


def test_leaving_restores_everything(monkeypatch):
    # Transformer Engine's norm, the default where it is installed, needs a GPU.
    monkeypatch.setattr(transformer_block, "LayerNormImpl", object)

    def attributes():
        return [getattr(owner, name, None) for owner, names in PATCHED.items() for name in names]

    before = attributes()
    with pytest.raises(RuntimeError, match="inside"), megatron_on_cpu():
        assert all(a is not b for a, b in zip(attributes(), before, strict=True) if b is not None)
        assert transformer_block.LayerNormImpl is WrappedTorchNorm
        raise RuntimeError("inside")
    assert all(a is b for a, b in zip(attributes(), before, strict=True))
    assert not torch.overrides._get_current_function_mode_stack()


def test_inside_and_outside_are_told_apart(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with megatron_on_cpu():
        check_device()
    with pytest.raises(ValueError, match=r"^PyTorch must see a GPU, got 'none'; .*megatron_on_cpu"):
        check_device()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_device()
