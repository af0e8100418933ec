"""Adam: PyTorch's on CPUs; on GPUs Megatron's, with its state sharded over the ranks."""

import math
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from padded_dispatch.train.settings import Recipe, Settings

_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.1
_MAX_GRAD_NORM = 1.0


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the rate of step 1, 2, ...: a linear rise, a cosine down to a tenth, then constant.

    Example: lr 1.0, warmup 2, decay 10 gives 0.5, 1.0 at steps 1 and 2, 0.55 at 6, 0.1 from 10 on.
    """
    if step < recipe.lr_warmup:
        return recipe.lr * step / recipe.lr_warmup
    left = 1 - (step - recipe.lr_warmup) / max(1, recipe.lr_decay - recipe.lr_warmup)
    return recipe.lr * (0.55 - 0.45 * math.cos(math.pi * max(0.0, left)))


class TorchAdam:
    """`torch.optim.AdamW` over the gradients that Megatron's DDP keeps in `main_grad`.

    Gradients are not clipped: that would need their norm over all ranks.
    """

    def __init__(self, chunks: list[Any], lr: float) -> None:
        self.params = [p for chunk in chunks for p in chunk.parameters()]
        self.adam = torch.optim.AdamW(
            self.params, lr=lr, betas=_BETAS, weight_decay=_WEIGHT_DECAY, foreach=True
        )

    def zero_grad(self) -> None:
        """Clear the last step's gradients."""
        self.adam.zero_grad()

    def step(self, lr: float) -> None:
        """Update the weights."""
        for param in self.params:
            param.grad = param.main_grad
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()


def optimizer_config(recipe: Recipe) -> OptimizerConfig:
    """Return Megatron's config of `MegatronAdam`."""
    state: dict[str, Any] = {}
    if recipe.adam_state == "bf16":
        state = {
            "use_precision_aware_optimizer": True,
            "store_param_remainders": True,
            "exp_avg_dtype": torch.bfloat16,
            "exp_avg_sq_dtype": torch.bfloat16,
        }
    return OptimizerConfig(
        optimizer="adam",
        lr=recipe.lr,
        weight_decay=_WEIGHT_DECAY,
        adam_beta1=_BETAS[0],
        adam_beta2=_BETAS[1],
        clip_grad=_MAX_GRAD_NORM,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        **state,
    )


class MegatronAdam:
    """Megatron's distributed optimizer: Adam's state sharded over data parallel ranks.

    An expert's state is sharded over the ranks that hold this expert: at EP = ranks it is whole.
    """

    def __init__(self, chunks: list[Any], recipe: Recipe) -> None:
        self.adam: Any = get_megatron_optimizer(optimizer_config(recipe), chunks)

    def zero_grad(self) -> None:
        """Clear the last step's gradients."""
        self.adam.zero_grad()

    def step(self, lr: float) -> float | Tensor | None:
        """Update the weights; return the gradients' norm before they were clipped to norm 1."""
        for group in self.adam.param_groups:
            group["lr"] = lr
        _, grad_norm, _ = self.adam.step()
        return grad_norm


def build_optimizer(settings: Settings, chunks: list[Any]) -> TorchAdam | MegatronAdam:
    """Return the optimizer for the run's device."""
    if settings.layout.device == "cuda":
        return MegatronAdam(chunks, settings.recipe)
    return TorchAdam(chunks, settings.recipe.lr)
