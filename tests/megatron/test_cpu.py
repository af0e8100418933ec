"""Megatron-Core on a CPU: tensors, random state, a model with recomputation; all is restored."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import random
from megatron.core.transformer import transformer_block
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from padded_dispatch.megatron.cpu import check_device, is_on_cpu, megatron_on_cpu

PATCHED = {
    torch.cuda: ("current_device", "synchronize", "Stream", "stream", "current_stream"),
    random: ("_get_cuda_rng_state", "_set_cuda_rng_state"),
    moe_utils: ("te_general_gemm",),
}


def test_tensors_meant_for_cuda_are_made_on_the_cpu():
    with megatron_on_cpu():
        x = torch.arange(3, device="cuda")
        assert torch.equal(x, torch.arange(3))
        assert torch.full((2,), 7, device=torch.device("cuda", 1)).tolist() == [7, 7]
        assert torch.ones(1, device=torch.cuda.current_device()).device.type == "cpu"
        assert x.cuda() is x
        assert torch.zeros(2, device="meta").device.type == "meta"


def test_leaving_restores_everything():
    def attributes():
        return [getattr(owner, name, None) for owner, names in PATCHED.items() for name in names]

    before = attributes()
    with pytest.raises(RuntimeError, match="inside"), megatron_on_cpu():
        assert all(a is not b for a, b in zip(attributes(), before, strict=True) if b is not None)
        raise RuntimeError("inside")
    assert all(a is b for a, b in zip(attributes(), before, strict=True))
    assert not torch.overrides._get_current_function_mode_stack()


def test_inside_and_outside_are_told_apart(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not is_on_cpu()
    with megatron_on_cpu():
        assert is_on_cpu()
        check_device()
    with pytest.raises(ValueError, match=r"^PyTorch must see a GPU, got 'none'; .*megatron_on_cpu"):
        check_device()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_device()


def test_the_last_norm_is_from_torch(monkeypatch):
    """Transformer Engine's norm, the default where it is installed, needs a GPU."""
    monkeypatch.setattr(transformer_block, "LayerNormImpl", object)
    with megatron_on_cpu():
        assert transformer_block.LayerNormImpl is WrappedTorchNorm
    assert transformer_block.LayerNormImpl is object


def _gradients(recompute):
    random.model_parallel_cuda_manual_seed(3)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=24,
        num_attention_heads=3,
        ffn_hidden_size=40,
        num_moe_experts=4,
        moe_ffn_hidden_size=40,
        moe_router_topk=2,
        moe_token_dispatcher_type="allgather",
        expert_model_parallel_size=2,
        add_bias_linear=False,
        hidden_dropout=0.3,
        attention_dropout=0.3,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        **recompute,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False),
        vocab_size=17,
        max_sequence_length=7,
        position_embedding_type="rope",
    )
    tokens = torch.arange(14).view(2, 7) % 17
    future = torch.triu(torch.ones(1, 1, 7, 7, dtype=torch.bool), diagonal=1)
    positions = torch.arange(7).expand(2, 7)
    loss = model(tokens, positions, future, labels=tokens.roll(-1, 1)).mean()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _differing_gradients():
    with megatron_on_cpu():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
        plain = _gradients({})
        again = _gradients(
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        )
        parallel_state.destroy_model_parallel()
    assert len(plain) == len(again) > 20
    return [name for name in plain if not torch.equal(plain[name], again[name])]


def test_recomputation_draws_the_same_dropout(pool2):
    assert pool2.run(_differing_gradients) == [[], []]
