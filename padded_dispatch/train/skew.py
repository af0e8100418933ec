"""`--router-skew`: routers that start out preferring some experts, and how fast that wears off.

To every expert's logit a fixed number is added, so that popularity is lognormal. What is then asked
for is counted in front of Megatron's own counting, from the same scores: a router that drops before
it counts would show what it kept.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class RouterSkew:
    """Skews the routers of a model, and counts what they are asked for in every step.

    Args:
        layers: this rank's MoE layers.
        num_layers: of the whole model.
        sigma: standard deviation of what is added to the logits.
        seed: equal seeds give equal popularities.
    """

    def __init__(self, layers: list[Any], num_layers: int, sigma: float, seed: int) -> None:
        self._num_layers = num_layers
        self._routers = [_SkewedRouter(layer.router, sigma, seed) for layer in layers]
        self._demand: list[list[Tensor]] = []
        self._bias: list[list[Tensor]] = []

    def after_step(self) -> None:
        """To be called after every step."""
        self._demand.append([router.take_demand() for router in self._routers])
        self._bias.append([router.bias_range() for router in self._routers])

    def figures(self) -> dict[str, list[float]]:
        """One number per step, of all ranks. To be called by all of them.

        `overload`: demand for the busiest expert over the mean. `bias_range`: largest minus
        smallest bias of the experts, 0 without bias. Both are means over the layers.
        """
        steps, num_experts = len(self._demand), len(self._demand[0][0])
        device = self._demand[0][0].device
        demand = torch.zeros(steps, self._num_layers, num_experts, device=device)
        bias = torch.zeros(steps, self._num_layers, device=device)
        for index, router in enumerate(self._routers):
            demand[:, router.number - 1] = torch.stack([of[index] for of in self._demand]).float()
            bias[:, router.number - 1] = torch.stack([of[index] for of in self._bias])
        dist.all_reduce(demand)
        dist.all_reduce(bias, dist.ReduceOp.MAX)
        overload = demand.amax(2) / demand.mean(2)
        return {"overload": overload.mean(1).tolist(), "bias_range": bias.mean(1).tolist()}


class _SkewedRouter:
    """Stands in front of one router's `gating`."""

    def __init__(self, router: Any, sigma: float, seed: int) -> None:
        self._router = router
        self.number: int = router.layer_number
        device, num_experts = router.weight.device, len(router.weight)
        generator = torch.Generator().manual_seed(seed + self.number)
        popularity_E = sigma * torch.randn(num_experts, generator=generator)
        self._popularity_E = popularity_E.to(device)
        self._demand_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self._gating = router.gating
        router.gating = self.gating

    def gating(self, input: Tensor) -> Tensor:
        """Logits, [..., E], with the popularity."""
        logits = self._gating(input)
        logits = logits + self._popularity_E.to(logits.dtype)
        # Recompute runs this twice, first without gradients.
        if self._router.training and torch.is_grad_enabled():
            self._count(logits.detach().flatten(0, -2))
        return logits

    def _count(self, logits_TE: Tensor) -> None:
        """As Megatron chooses: by sigmoid plus bias, or by softmax, which has the logits' order."""
        config, bias_E = self._router.config, self._router.expert_bias
        scores_TE = logits_TE
        if config.moe_router_score_function == "sigmoid":
            scores_TE = logits_TE.float().sigmoid()
        if bias_E is not None:
            scores_TE = scores_TE + bias_E
        chosen_TK = scores_TE.topk(config.moe_router_topk, dim=1).indices
        map_TE = torch.zeros_like(scores_TE, dtype=torch.int64).scatter(1, chosen_TK, 1)
        self._demand_E += map_TE.sum(0)

    def take_demand(self) -> Tensor:
        """Rows asked for since the last call, [E]."""
        taken_E = self._demand_E.clone()
        self._demand_E.zero_()
        return taken_E

    def bias_range(self) -> Tensor:
        """Largest minus smallest bias of the experts."""
        bias_E = self._router.expert_bias
        return self._popularity_E.new_zeros(()) if bias_E is None else bias_E.max() - bias_E.min()
