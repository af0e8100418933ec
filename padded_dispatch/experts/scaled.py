"""Experts in e4m3: rows with a scale each, weights with a scale for each output channel.

    fc1         rows of tokens       weight [L, G, D]    quantized by the receiver, once per token
    fc2         hidden rows          weight [L, D, F]    by the activation
    its back    gradient rows        weight [L, F, D]    by the receiver, once per token
    fc1's back  fc1's gradient       weight [L, D, G]    by the activation's backward

Tokens and sums travel in bf16, and the store keeps rows in bf16, which the gradients of weights
read: these see no quantized value. A product is scaled and rounded at its end. Scales are powers of
two (`kernels.Scaled`), so its error is that of rounding both operands to e4m3, 2**-4 of a value at
most, and of the tensor cores' sums.

A weight is quantized in both orientations, since 8-bit tensor cores need the inner dimension
contiguous: as many bytes again as in bf16. A pass quantizes stale weights only, once per optimizer
step: a step of any optimizer of torch marks them. The flag is on the device, so that replays of
CUDA graphs act as eager passes do.
"""

import functools
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from padded_dispatch.kernels import Scaled


def quantize(rows: Tensor) -> Scaled:
    """Quantize rows [..., I], as the kernels do: see `kernels.Scaled`."""
    wide = rows.float()
    most = wide.abs().amax(-1)
    # 448 = 1.75 * 2**8: the exponent less 8, and one more where the mantissa is above 1.75.
    exponent = (((most.view(torch.int32) + 0x1FFFFF) >> 23) - 8).clamp(min=1)
    scales = (exponent << 23).view(torch.float32).where(most.isfinite(), torch.nan)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    values = (wide * inverse[..., None]).to(torch.float8_e4m3fn)
    return Scaled(values=values, scales=scales, dtype=rows.dtype)


def widen(scaled: Scaled, dtype: torch.dtype) -> Tensor:
    """Return the rows that a `Scaled` stands for."""
    return scaled.values.to(dtype) * scaled.scales[..., None].to(dtype)


class ScaledWeights:
    """Both weights of a layer in e4m3, in the orientations of a pass.

    `refresh` goes in front of each forward pass. It quantizes if the weights are stale, as they are
    at first.

    Args:
        fc1_LGD, fc2_LDF: contiguous; their shapes, dtype and device are read.

    Attributes:
        fc1_LGD, fc2_LDF: for forward, scaled along D and F.
        fc1_LDG, fc2_LFD: for backward, scaled along G and D.
    """

    def __init__(self, fc1_LGD: Tensor, fc2_LDF: Tensor) -> None:
        (num_experts, fc1_width, width), ffn_width = fc1_LGD.shape, fc2_LDF.shape[2]
        with torch.inference_mode(False):  # Passes of training change them, too.
            self.fc1_LGD = Scaled.empty(num_experts, fc1_width, width, like=fc1_LGD)
            self.fc1_LDG = Scaled.empty(num_experts, width, fc1_width, like=fc1_LGD)
            self.fc2_LDF = Scaled.empty(num_experts, width, ffn_width, like=fc2_LDF)
            self.fc2_LFD = Scaled.empty(num_experts, ffn_width, width, like=fc2_LDF)
            self._stale = torch.ones(1, dtype=torch.int32, device=fc1_LGD.device)
        self.__setstate__({})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Mark weights behind each step of an optimizer, those of copies as well."""
        vars(self).update(state)
        _live.add(self)
        _follow_optimizers()

    def mark_stale(self) -> None:
        """Let the next `refresh` quantize; call it when weights have changed in another way."""
        self._stale.fill_(1)

    @torch.no_grad()
    def refresh(self, fc1_LGD: Tensor, fc2_LDF: Tensor) -> None:
        """Quantize the weights, if they are stale, without the host's knowing."""
        for weight_LOI, form, back in (
            (fc1_LGD, self.fc1_LGD, self.fc1_LDG),
            (fc2_LDF, self.fc2_LDF, self.fc2_LFD),
        ):
            if weight_LOI.is_cuda:
                from padded_dispatch.kernels.scaled import quantize_weight

                quantize_weight(weight_LOI, self._stale, form, back)
            elif self._stale:
                for to, rows in ((form, weight_LOI), (back, weight_LOI.transpose(1, 2))):
                    found = quantize(rows)
                    to.values.copy_(found.values)
                    to.scales.copy_(found.scales)
        self._stale.zero_()


_live: WeakSet[ScaledWeights] = WeakSet()


@functools.cache
def _follow_optimizers() -> None:
    """Mark all weights behind each step of an optimizer from now on, in one launch."""
    private: Any = torch

    def stepped(*given: Any) -> None:
        if flags := [weights._stale for weights in _live]:
            private._foreach_add_(flags, 1)

    register_optimizer_step_post_hook(stepped)
