"""Defects of stock that need Transformer Engine; `tests/megatron/test_defects.py` has the rest."""

import pytest
import torch

from tests.support import tiny

pytestmark = pytest.mark.gpu


@pytest.fixture
def megatron(cuda):
    with tiny.one_process("cuda"):
        yield


def test_d21_router_bias_narrower_than_its_logits(megatron):
    """Stock 0.19.0 with Transformer Engine 2.20.2 reads the bias as fp32, beyond its end.

    Its result depends on the memory behind the bias, so only ours is asserted.
    """
    settings = {"bf16": True, "params_dtype": torch.bfloat16, "moe_router_dtype": "fp32"}
    settings |= {"dispatcher": "alltoall", "add_bias_linear": True}
    router = tiny.padded_layer(**settings).cuda().router
    memory = torch.full((4 * tiny.NUM_EXPERTS,), 7.0, dtype=torch.bfloat16, device="cuda")
    router.bias.data = memory[: tiny.NUM_EXPERTS]
    router.bias.data.normal_()
    x = torch.randn(64, 1, tiny.HIDDEN, dtype=torch.bfloat16, device="cuda")
    logits = router.gating(x)
    assert logits.dtype == torch.float32
    exact = x.double() @ router.weight.double().T + router.bias.double()
    plain = x.float() @ router.weight.float().T + router.bias.float()
    allowed = 2 * (plain - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
    assert (logits - exact).abs().max() <= allowed
    logits.sum().backward()
    assert router.bias.grad.tolist() == [64.0] * tiny.NUM_EXPERTS
