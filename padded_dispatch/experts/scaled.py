"""Experts in e4m3: rows with a scale each, weights with a scale for each output channel.

    fc1             rows of tokens    weight [L, G, D]    rows quantized by the receiver, per token
    fc2             hidden rows       weight [L, D, F]    by the activation
    fc2, backward   gradient rows     weight [L, F, D]    by the receiver, per token
    fc1, backward   fc1's gradient    weight [L, D, G]    by the activation's backward

Tokens, sums and the store stay in bf16. The gradients of weights read bf16 rows, never a quantized
value. A product is scaled and rounded after its sum. Scales are powers of two (`kernels.Scaled`),
so the error of a product is that of rounding both operands to e4m3, 2**-4 of a value at most, and
that of the tensor cores' sums.

A weight is quantized in both orientations, since 8-bit tensor cores need the inner dimension
contiguous; the two take as many bytes as the weight in bf16. A step of any torch optimizer
marks weights stale, and the next pass quantizes stale weights. The flag is on the device, so a
replayed CUDA graph acts as an eager pass does.
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
    amax = wide.abs().amax(-1)
    # 448 = 1.75 * 2**8: the scale has the exponent of `amax` less 8, plus 1 if its mantissa > 1.75.
    exponent = (((amax.view(torch.int32) + 0x1FFFFF) >> 23) - 8).clamp(min=1)
    scales = (exponent << 23).view(torch.float32).where(amax.isfinite(), torch.nan)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    values = (wide * inverse[..., None]).to(torch.float8_e4m3fn)
    return Scaled(values=values, scales=scales, dtype=rows.dtype)


def widen(scaled: Scaled, dtype: torch.dtype) -> Tensor:
    """Return the rows that a `Scaled` stands for."""
    return scaled.values.to(dtype) * scaled.scales[..., None].to(dtype)


class ScaledWeights:
    """Both weights of a layer in e4m3, in the orientations of a pass.

    Call `refresh` before each forward pass. It quantizes the weights if they are stale; new ones
    are.

    Args:
        fc1_LGD, fc2_LDF: contiguous; their shapes, dtype and device are read.

    Attributes:
        fc1_LGD, fc2_LDF: for forward, scaled along D and F.
        fc1_LDG, fc2_LFD: for backward, scaled along G and D.
    """

    def __init__(self, fc1_LGD: Tensor, fc2_LDF: Tensor) -> None:
        (num_experts, fc1_width, width), ffn_width = fc1_LGD.shape, fc2_LDF.shape[2]
        with torch.inference_mode(False):  # Training passes could not change inference tensors.
            self.fc1_LGD = Scaled.empty(num_experts, fc1_width, width, like=fc1_LGD)
            self.fc1_LDG = Scaled.empty(num_experts, width, fc1_width, like=fc1_LGD)
            self.fc2_LDF = Scaled.empty(num_experts, width, ffn_width, like=fc2_LDF)
            self.fc2_LFD = Scaled.empty(num_experts, ffn_width, width, like=fc2_LDF)
            self._stale = torch.ones(1, dtype=torch.int32, device=fc1_LGD.device)
        self.__setstate__({})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state, and have each optimizer step mark the weights stale, also a copy's."""
        vars(self).update(state)
        _live.add(self)
        _follow_optimizers()

    def mark_stale(self) -> None:
        """Make the next `refresh` quantize; call it if weights change without an optimizer step."""
        self._stale.fill_(1)

    @torch.no_grad()
    def refresh(self, fc1_LGD: Tensor, fc2_LDF: Tensor) -> None:
        """Quantize the weights if they are stale; on a GPU the host does not read whether."""
        for weight_LOI, form, back in (
            (fc1_LGD, self.fc1_LGD, self.fc1_LDG),
            (fc2_LDF, self.fc2_LDF, self.fc2_LFD),
        ):
            if weight_LOI.is_cuda:
                from padded_dispatch.kernels.scaled import quantize_weight

                quantize_weight(weight_LOI, self._stale, form, back)
            elif self._stale:
                for target, rows in ((form, weight_LOI), (back, weight_LOI.transpose(1, 2))):
                    quantized = quantize(rows)
                    target.values.copy_(quantized.values)
                    target.scales.copy_(quantized.scales)
        self._stale.zero_()


_live: WeakSet[ScaledWeights] = WeakSet()


@functools.cache
def _follow_optimizers() -> None:
    """Mark all weights stale after each optimizer step from now on, in one launch."""
    untyped_torch: Any = torch

    def mark_all_stale(*_: Any) -> None:
        if flags := [weights._stale for weights in _live]:
            untyped_torch._foreach_add_(flags, 1)

    register_optimizer_step_post_hook(mark_all_stale)
