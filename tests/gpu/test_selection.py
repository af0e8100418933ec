"""Selection and plan of any size on a GPU, beside torch; `tests.gpu.test_static` replays them."""

import pytest
import torch
from torch import Tensor

from padded_dispatch.config import POLICIES
from padded_dispatch.kernels import plan as plan_kernels
from padded_dispatch.kernels.select import kept_map
from padded_dispatch.routing.plan import choice_probs, plan_in_torch
from padded_dispatch.routing.select import kept_map_in_torch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

EVERY_POLICY = pytest.mark.parametrize("policy", POLICIES)
SIZES = pytest.mark.parametrize(
    ("num_tokens", "num_experts"), [(4096, 128), (33000, 128), (131072, 512)]
)


def large(num_tokens: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return a map of eight experts for each token, one of which all tokens have, and scores."""
    generator = torch.Generator("cuda").manual_seed(0)
    probs_TE = torch.rand(num_tokens, num_experts, device="cuda", generator=generator)
    probs_TE[:, 3] += 1
    map_TE = torch.zeros_like(probs_TE, dtype=torch.bool)
    return map_TE.scatter_(1, probs_TE.topk(8).indices, True), probs_TE


@SIZES
@EVERY_POLICY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_selection_of_any_size_is_torchs(policy, dtype, num_tokens, num_experts):
    """With a hot expert."""
    map_TE, probs_TE = large(num_tokens, num_experts)
    arguments = map_TE, probs_TE.to(dtype), num_tokens * 8 // num_experts, policy
    found, expected = kept_map(*arguments), kept_map_in_torch(*arguments)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert (found[0] != map_TE).any()


@SIZES
@pytest.mark.parametrize("top_k", [8, 5])
def test_plan_of_any_size_is_torchs(num_tokens, num_experts, top_k):
    map_TE, probs_TE = large(num_tokens, num_experts)
    expected = plan_in_torch(map_TE.cpu(), top_k)
    for found, of_cpu in zip(plan_kernels.plan(map_TE, top_k), expected, strict=True):
        assert torch.equal(found.cpu(), of_cpu)
    expert_TK = expected[0].cuda()
    weight_TK = torch.rand(num_tokens, top_k, device="cuda")
    grads = []
    for device in ("cuda", "cpu"):
        leaf_TE = probs_TE.detach().to(device).requires_grad_()
        choice_probs(leaf_TE, expert_TK.to(device)).backward(weight_TK.to(device))
        grads.append(leaf_TE.grad)
    assert torch.equal(grads[0].cpu(), grads[1])
