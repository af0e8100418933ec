"""Megatron-Core on a CPU: tensors, random state, a model with recomputation; all is restored."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import (
    random,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import transformer_block
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from padded_dispatch.megatron.cpu import check_device, megatron_on_cpu
from tests.support import tiny

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


@pytest.mark.parametrize("distributed", [False, True])
def test_megatrons_optimizer_steps(distributed):
    """With its defaults: it clips gradients, and asks for tensors' types by their names on GPUs."""
    with tiny.one_process():
        model = tiny.padded_layer(experts="packed")
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
        chunk = DistributedDataParallel(model.config, ddp, model)
        for parameter in chunk.parameters():  # As Megatron-LM's training does.
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        given = OptimizerConfig(optimizer="adam", lr=0.5, use_distributed_optimizer=distributed)
        optimizer = get_megatron_optimizer(given, [chunk])
        before = {name: one.detach().clone() for name, one in model.named_parameters()}
        chunk.zero_grad_buffer()
        model(tiny.tokens(6))[0].square().sum().backward()
        chunk.finish_grad_sync()
        stepped, norm, _ = optimizer.step()
        sums = [one.main_grad.double().square().sum() for one in model.parameters()]
        assert stepped and norm == pytest.approx(torch.stack(sums).sum().sqrt().item())
        assert all(not torch.equal(one, before[name]) for name, one in model.named_parameters())
        assert torch.ones(1).type(torch.float64).dtype == torch.float64


def test_inside_and_outside_are_told_apart(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with megatron_on_cpu():
        check_device()
    with pytest.raises(ValueError, match=r"^PyTorch must see a GPU, got 'none'; .*megatron_on_cpu"):
        check_device()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_device()
