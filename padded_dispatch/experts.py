"""A grouped SwiGLU MLP over packed rows: what is not there is not computed.

    fc1 -> silu(gate) * up * prob -> fc2

Expert l's rows end at `ends_L[l]` and begin where the ones before end; the ends stay on the device.
Rows behind the last one are never read, forward or backward, and those of a result are unspecified.
An expert without rows has a weight gradient of exact zeros.

On CUDA devices the linears are `torch._grouped_mm` in bf16, its one fast path, which needs neither
the host nor a copy: 2D x 3D for rows, 2D x 2D for weight gradients. Everything else it would
compute in a loop over ends that it copies to the host, so everything else is refused. On CPUs plain
loops say what is meant, in any dtype.

G = 2F: gate and up side by side.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op


def swiglu_experts(
    rows_ND: Tensor, probs_N: Tensor, fc1_LGD: Tensor, fc2_LDF: Tensor, ends_L: Tensor
) -> Tensor:
    """Every expert's MLP on its rows, weighted: `prob * fc2(silu(gate) * up)`.

    Args:
        rows_ND: floating point [N, D]; bf16 on CUDA devices.
        probs_N: at least fp32.
        fc1_LGD: the rows of gate before those of up.
        fc2_LDF: on CUDA devices D and F are multiples of 8.
        ends_L: contiguous int32, ascending, the last at most N.

    Returns:
        [N, D]; rows from `ends_L[-1]` on are unspecified, as are those of the gradients.
    """
    hidden_NF = _swiglu(grouped_linear(rows_ND, fc1_LGD, ends_L), probs_N, ends_L)
    return grouped_linear(hidden_NF, fc2_LDF, ends_L)


def grouped_linear(rows_NI: Tensor, weight_LOI: Tensor, ends_L: Tensor) -> Tensor:
    """`rows @ weight[l].T` for every expert's rows: [N, I] to [N, O].

    Raises:
        ValueError: on CUDA devices for a dtype other than bf16.
    """
    return _grouped_linear(rows_NI, weight_LOI, ends_L)


def _blocks(ends_L: Tensor) -> list[slice]:
    """The rows of every expert, read on the host."""
    ends = ends_L.tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


@custom_op("padded_dispatch::grouped_linear", mutates_args=())
def _grouped_linear(rows_NI: Tensor, weight_LOI: Tensor, ends_L: Tensor) -> Tensor:
    out_NO = rows_NI.new_empty(rows_NI.shape[0], weight_LOI.shape[1])
    for rows, weight_OI in zip(_blocks(ends_L), weight_LOI, strict=True):
        out_NO[rows] = rows_NI[rows] @ weight_OI.T
    return out_NO


@_grouped_linear.register_kernel("cuda")
def _(rows_NI, weight_LOI, ends_L):
    return _grouped_mm(rows_NI.contiguous(), weight_LOI.transpose(1, 2), ends_L)


@_grouped_linear.register_fake
def _(rows_NI, weight_LOI, ends_L):
    return rows_NI.new_empty(rows_NI.shape[0], weight_LOI.shape[1])


@custom_op("padded_dispatch::grouped_outer", mutates_args=())
def _grouped_outer(grad_NO: Tensor, rows_NI: Tensor, ends_L: Tensor) -> Tensor:
    """`grad.T @ rows` of every expert: its weight gradient, [L, O, I]."""
    products = [grad_NO[rows].T @ rows_NI[rows] for rows in _blocks(ends_L)]
    return torch.stack(products)


@_grouped_outer.register_kernel("cuda")
def _(grad_NO, rows_NI, ends_L):
    # Column-major times row-major: the one combination that takes experts without rows.
    return _grouped_mm(grad_NO.contiguous().T, rows_NI.contiguous(), ends_L)


@_grouped_outer.register_fake
def _(grad_NO, rows_NI, ends_L):
    return rows_NI.new_empty(ends_L.shape[0], grad_NO.shape[1], rows_NI.shape[1])


def _grouped_mm(a: Tensor, b: Tensor, ends_L: Tensor) -> Tensor:
    if a.dtype != torch.bfloat16:
        raise ValueError(
            f"dtype={a.dtype} is not possible: packed experts compute in bfloat16 on a GPU; train "
            "in bf16, or take an experts module on the padded layout"
        )
    # Private until torch 2.10, which calls it `torch.nn.functional.grouped_mm`.
    return torch._grouped_mm(a, b, offs=ends_L)  # pyright: ignore[reportPrivateImportUsage]


@custom_op("padded_dispatch::swiglu", mutates_args=())
def _swiglu(fc1_NG: Tensor, probs_N: Tensor, ends_L: Tensor) -> Tensor:
    real = slice(int(ends_L[-1]))
    gate, up = fc1_NG[real].to(_wide(fc1_NG)).chunk(2, dim=1)
    out_NF = fc1_NG.new_empty(fc1_NG.shape[0], fc1_NG.shape[1] // 2)
    out_NF[real] = (F.silu(gate) * up * probs_N[real, None]).to(fc1_NG.dtype)
    return out_NF


@_swiglu.register_kernel("cuda")
def _(fc1_NG, probs_N, ends_L):
    from padded_dispatch.kernels import activation

    return activation.swiglu(fc1_NG, probs_N.contiguous(), ends_L)


@_swiglu.register_fake
def _(fc1_NG, probs_N, ends_L):
    return fc1_NG.new_empty(fc1_NG.shape[0], fc1_NG.shape[1] // 2)


@custom_op("padded_dispatch::swiglu_backward", mutates_args=())
def _swiglu_backward(
    grad_NF: Tensor, fc1_NG: Tensor, probs_N: Tensor, ends_L: Tensor
) -> tuple[Tensor, Tensor]:
    real = slice(int(ends_L[-1]))
    wide = _wide(fc1_NG)
    gate, up = fc1_NG[real].to(wide).chunk(2, dim=1)
    grad, prob = grad_NF[real].to(wide), probs_N[real, None]
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    of_gate = grad * prob * up * sigmoid * (1 + gate * (1 - sigmoid))
    of_up = grad * prob * silu
    grad_fc1_NG, grad_probs_N = torch.empty_like(fc1_NG), torch.empty_like(probs_N)
    grad_fc1_NG[real] = torch.cat([of_gate, of_up], dim=1).to(fc1_NG.dtype)
    grad_probs_N[real] = (grad * silu * up).sum(1)
    return grad_fc1_NG, grad_probs_N


@_swiglu_backward.register_kernel("cuda")
def _(grad_NF, fc1_NG, probs_N, ends_L):
    from padded_dispatch.kernels import activation

    return activation.swiglu_backward(grad_NF.contiguous(), fc1_NG, probs_N.contiguous(), ends_L)


@_swiglu_backward.register_fake
def _(grad_NF, fc1_NG, probs_N, ends_L):
    return torch.empty_like(fc1_NG), torch.empty_like(probs_N)


def _wide(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


def _save_inputs(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_linear_backward(ctx, grad_NO):
    rows_NI, weight_LOI, ends_L = ctx.saved_tensors
    needs_rows, needs_weight, _ = ctx.needs_input_grad
    grad_NI = _grouped_linear(grad_NO, weight_LOI.transpose(1, 2), ends_L) if needs_rows else None
    grad_LOI = _grouped_outer(grad_NO, rows_NI, ends_L) if needs_weight else None
    return grad_NI, grad_LOI, None


_grouped_linear.register_autograd(_grouped_linear_backward, setup_context=_save_inputs)
_swiglu.register_autograd(
    lambda ctx, grad_NF: (*_swiglu_backward(grad_NF, *ctx.saved_tensors), None),
    setup_context=_save_inputs,
)
