"""Linears over packed rows: each expert's weights on its own rows only.

Expert l's rows end at `offsets_L[l]` and begin where those of the expert before end; the offsets
stay on the device. Rows behind the last one are never read, forward or backward, and are
unspecified in a result. An expert without rows has gradients of exact zeros.

On CUDA devices all products are those of `padded_dispatch.kernels.gemm`, in bf16, and sizes are
multiples of 8; others raise here. They take no bias: it is added in place, and its gradients have
kernels of their own. On CPUs plain loops are the specification, in any dtype.

A weight's gradient may instead be added to a buffer in fp32, `sums_LOI`, in the backward pass: it
is then never rounded to the weight's dtype. The gradient that autograd gets for the weight is
unspecified memory in this case, one block for all weights of a shape. On a GPU that saves the
gradient's way through memory, and in CUDA graphs a gradient per layer.

`delayed` keeps what a weight's gradient needs, instead of computing it in the backward pass. The
caller computes it later, with the same operations.

If all experts have equally many rows, padded ones among them, `batched_linear` does the same with
one `torch.bmm` per linear: per row it is faster, and it computes the padding.

I and O: width of an input and an output row. M: rows of each expert, if equal.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from padded_dispatch.config import require
from padded_dispatch.kernels import ROWS_OF_TILE, TILES_OF_GROUP

# Gradients of a weight [L, O, I] that wait, oldest first. Each call computes one, or adds it to the
# sums and returns unspecified memory.
Delayed = deque[Callable[[], Tensor]]


def grouped_linear(
    rows_NI: Tensor,
    weight_LOI: Tensor,
    offsets_L: Tensor,
    bias_LO: Tensor | None = None,
    probs_N: Tensor | None = None,
    sums_LOI: Tensor | None = None,
    delayed: Delayed | None = None,
    tiles: Tensor | None = None,
) -> Tensor:
    """Compute `rows @ weight[l].T + prob * bias[l]` for every expert's rows: [N, I] to [N, O].

    Args:
        rows_NI: floating point; bf16 on CUDA devices, and I and O multiples of 8.
        weight_LOI: same dtype.
        offsets_L: contiguous int32, ascending, the last at most N.
        bias_LO: same dtype; None adds nothing.
        probs_N: at least fp32; scales the bias only. Required with a bias.
        sums_LOI: contiguous fp32, to which backward adds the gradient of the weight.
        delayed: backward appends the gradient of the weight, uncomputed, and gives none to
            autograd. None computes it.
        tiles: `row_tiles` of these offsets and N; None finds them in each product.

    Raises:
        ValueError: on CUDA devices, for another dtype or size.
    """
    if delayed is None or not weight_LOI.requires_grad:
        return linear_by_expert(rows_NI, weight_LOI, bias_LO, probs_N, offsets_L, tiles, sums_LOI)
    given = weight_LOI.detach(), bias_LO, probs_N, offsets_L, tiles, None
    out_NO = linear_by_expert(rows_NI, *given)
    given = rows_NI, offsets_L, sums_LOI, weight_gradient, delayed
    return _WeightGradient.apply(out_NO, weight_LOI, *given)


def batched_linear(
    rows_NI: Tensor,
    weight_LOI: Tensor,
    offsets_L: Tensor,
    bias_LO: Tensor | None = None,
    probs_N: Tensor | None = None,
    sums_LOI: Tensor | None = None,
    delayed: Delayed | None = None,
) -> Tensor:
    """Compute `grouped_linear` for experts with equally many rows, N / L, as one batched product.

    The arguments are those of `grouped_linear` but `tiles`, in any dtype and size.
    Expert l's rows end at `offsets_L[l] = (l + 1) * N / L`.
    """
    rows_LMI = rows_NI.unflatten(0, (weight_LOI.shape[0], -1))
    out_NO = torch.bmm(rows_LMI, weight_LOI.detach().transpose(1, 2)).flatten(0, 1)
    if weight_LOI.requires_grad:
        given = rows_NI, offsets_L, sums_LOI, _batched_gradient, delayed
        out_NO = _WeightGradient.apply(out_NO, weight_LOI, *given)
    if bias_LO is None:
        return out_NO
    assert probs_N is not None
    by_expert = (bias_LO.shape[0], -1, 1)
    bias_LMO = (probs_N.view(by_expert) * bias_LO[:, None]).to(out_NO.dtype)
    return out_NO + bias_LMO.flatten(0, 1)


def experts_of_rows(offsets_L: Tensor) -> Tensor:
    """Return the expert of every real row, read on the host: int64 [offsets_L[-1]]."""
    counts_L = offsets_L.diff(prepend=offsets_L.new_zeros(1))
    return torch.arange(offsets_L.shape[0]).repeat_interleave(counts_L)


def _blocks(offsets_L: Tensor) -> list[slice]:
    """Return the rows of every expert, read on the host."""
    offsets = offsets_L.tolist()
    return [slice(start, end) for start, end in zip([0, *offsets], offsets, strict=False)]


@custom_op("padded_dispatch::linear_by_expert", mutates_args=())
def linear_by_expert(
    rows_NI: Tensor,
    weight_LOI: Tensor,
    bias_LO: Tensor | None,
    probs_N: Tensor | None,
    offsets_L: Tensor,
    tiles: Tensor | None,
    sums_LOI: Tensor | None = None,
) -> Tensor:
    """Compute `grouped_linear`; the gradient of the weight is not delayed."""
    out_NO = rows_NI.new_empty(rows_NI.shape[0], weight_LOI.shape[1])
    for expert, rows in enumerate(_blocks(offsets_L)):
        out = rows_NI[rows] @ weight_LOI[expert].T
        if bias_LO is not None:
            assert probs_N is not None
            out = out + probs_N[rows, None] * bias_LO[expert]
        out_NO[rows] = out
    return out_NO


@linear_by_expert.register_kernel("cuda")
def _(rows_NI, weight_LOI, bias_LO, probs_N, offsets_L, tiles, sums_LOI=None):
    from padded_dispatch.kernels import gemm, grouped

    check_on_gpu(rows_NI, weight_LOI)
    out_NO = gemm.rows_times_weights(rows_NI.contiguous(), weight_LOI, offsets_L, table=tiles)
    if bias_LO is not None:
        grouped.add_bias(out_NO, bias_LO.contiguous(), probs_N.contiguous(), offsets_L)
    return out_NO


@linear_by_expert.register_fake
def _(rows_NI, weight_LOI, bias_LO, probs_N, offsets_L, tiles, sums_LOI=None):
    return rows_NI.new_empty(rows_NI.shape[0], weight_LOI.shape[1])


@custom_op("padded_dispatch::row_tiles", mutates_args=())
def row_tiles(offsets_L: Tensor, num_rows: int) -> Tensor:
    """List the tiles of rows that products compute on CUDA devices: int32 [1 + most tiles, 4].

    The first line has how many tiles follow. The others have the expert; the group of tiles that it
    belongs to, at most `TILES_OF_GROUP` of one expert: its first tile and its number of tiles; and
    the first row of the group. Lines behind the last tile are unspecified.

    Example: `offsets = [3, 3, 133]` give the lines `[3, 0, 0, 0]`, `[0, 0, 1, 0]`, and twice
    `[2, 1, 2, 3]`.
    """
    lines = []
    for expert, rows in enumerate(_blocks(offsets_L)):
        starts = range(rows.start, rows.stop, ROWS_OF_TILE)
        first = len(lines)
        for number in range(len(starts)):
            before = number // TILES_OF_GROUP * TILES_OF_GROUP
            of_group = min(TILES_OF_GROUP, len(starts) - before)
            lines.append([expert, first + before, of_group, starts[before]])
    table = offsets_L.new_empty(_most_tiles(offsets_L, num_rows), 4)
    table[: 1 + len(lines)] = offsets_L.new_tensor([[len(lines), 0, 0, 0], *lines])
    return table


def _most_tiles(offsets_L: Tensor, num_rows: int) -> int:
    return 1 + num_rows // ROWS_OF_TILE + len(offsets_L)


@row_tiles.register_kernel("cuda")
def _(offsets_L, num_rows):
    from padded_dispatch.kernels import gemm

    return gemm.row_tiles(offsets_L, num_rows)


@row_tiles.register_fake
def _(offsets_L, num_rows):
    return offsets_L.new_empty(_most_tiles(offsets_L, num_rows), 4)


@custom_op("padded_dispatch::outer_by_expert", mutates_args=())
def outer_by_expert(grad_NO: Tensor, rows_NI: Tensor, offsets_L: Tensor) -> Tensor:
    """Compute every expert's weight gradient, `grad.T @ rows`: [L, O, I]."""
    products = [grad_NO[rows].T @ rows_NI[rows] for rows in _blocks(offsets_L)]
    return torch.stack(products)


@outer_by_expert.register_kernel("cuda")
def _(grad_NO, rows_NI, offsets_L):
    from padded_dispatch.kernels import gemm

    return gemm.weight_gradients(grad_NO.contiguous(), rows_NI.contiguous(), offsets_L)


@outer_by_expert.register_fake
def _(grad_NO, rows_NI, offsets_L):
    return rows_NI.new_empty(offsets_L.shape[0], grad_NO.shape[1], rows_NI.shape[1])


@custom_op("padded_dispatch::add_outer_by_expert", mutates_args=("sums_LOI",))
def add_outer_by_expert(
    grad_NO: Tensor, rows_NI: Tensor, offsets_L: Tensor, sums_LOI: Tensor
) -> None:
    """Add every expert's weight gradient, `grad.T @ rows`, to `sums_LOI`."""
    for expert, rows in enumerate(_blocks(offsets_L)):
        sums_LOI[expert] += grad_NO[rows].to(sums_LOI.dtype).T @ rows_NI[rows].to(sums_LOI.dtype)


@add_outer_by_expert.register_kernel("cuda")
def _(grad_NO, rows_NI, offsets_L, sums_LOI):
    from padded_dispatch.kernels import gemm

    gemm.add_weight_gradients(grad_NO.contiguous(), rows_NI.contiguous(), offsets_L, sums_LOI)


@add_outer_by_expert.register_fake
def _(grad_NO, rows_NI, offsets_L, sums_LOI):
    return None


def check_on_gpu(rows_NI: Tensor, weight_LOI: Tensor) -> None:
    """Raise if the products of CUDA devices do not compute such rows and weights."""
    fix = "use an experts module on the padded layout"
    require(
        rows_NI.dtype == torch.bfloat16,
        "dtype",
        rows_NI.dtype,
        "be torch.bfloat16 for packed experts on a GPU",
        f"train in bf16, or {fix}",
    )
    sizes = tuple(weight_LOI.shape[1:])
    require(
        sizes[0] % 8 == 0 and sizes[1] % 8 == 0,
        "hidden and ffn sizes",
        sizes,
        "be multiples of 8 for packed experts on a GPU",
        fix,
    )


@custom_op("padded_dispatch::sum_rows_by_expert", mutates_args=())
def sum_rows(rows_NO: Tensor, weights_N: Tensor | None, offsets_L: Tensor) -> Tensor:
    """Sum each expert's rows, weighted if there are weights: [L, O]."""
    wide = rows_NO.to(torch.promote_types(rows_NO.dtype, torch.float32))
    if weights_N is not None:
        wide = wide * weights_N[:, None]
    return torch.stack([wide[rows].sum(0) for rows in _blocks(offsets_L)]).to(rows_NO.dtype)


@sum_rows.register_kernel("cuda")
def _(rows_NO, weights_N, offsets_L):
    from padded_dispatch.kernels import grouped

    weights_N = weights_N.contiguous() if weights_N is not None else None
    return grouped.sum_rows(rows_NO.contiguous(), weights_N, offsets_L)


@sum_rows.register_fake
def _(rows_NO, weights_N, offsets_L):
    return rows_NO.new_empty(offsets_L.shape[0], rows_NO.shape[1])


@custom_op("padded_dispatch::dot_rows_by_expert", mutates_args=())
def _dot_rows(rows_NO: Tensor, vectors_LO: Tensor, like_N: Tensor, offsets_L: Tensor) -> Tensor:
    """Compute `rows @ vectors[l]` for every expert's rows, [N], in the dtype of `like_N`."""
    dots_N = torch.empty_like(like_N)
    for rows, vector_O in zip(_blocks(offsets_L), vectors_LO.to(like_N.dtype), strict=True):
        dots_N[rows] = rows_NO[rows].to(like_N.dtype) @ vector_O
    return dots_N


@_dot_rows.register_kernel("cuda")
def _(rows_NO, vectors_LO, like_N, offsets_L):
    from padded_dispatch.kernels import grouped

    return grouped.dot_rows(rows_NO.contiguous(), vectors_LO.contiguous(), offsets_L).to(
        like_N.dtype
    )


@_dot_rows.register_fake
def _(rows_NO, vectors_LO, like_N, offsets_L):
    return torch.empty_like(like_N)


@functools.cache
def _block(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _unspecified(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return unspecified memory that must not be written, the same for all equal arguments."""
    # Autograd takes a gradient as it is only if nothing else refers to its tensor, else a copy.
    return _block(shape, dtype, device).detach()


def _save_inputs(ctx, inputs, output) -> None:
    # Not among the saved tensors, which must not change before backward: the passes of other
    # micro-batches add to the sums in the meantime.
    rows_NI, *saved, ctx.sums_LOI = inputs
    # Rows are for the gradient of the weight only, which is not asked for where it is delayed.
    ctx.save_for_backward(rows_NI if ctx.needs_input_grad[1] else None, *saved)


def weight_gradient(
    grad_NO: Tensor, rows_NI: Tensor, offsets_L: Tensor, sums_LOI: Tensor | None
) -> Tensor:
    """Return the gradient of a weight, or add it to the sums and return unspecified memory."""
    if sums_LOI is None:
        return outer_by_expert(grad_NO, rows_NI, offsets_L)
    return _add_gradient(grad_NO, rows_NI, offsets_L, sums_LOI)


def _batched_gradient(
    grad_NO: Tensor, rows_NI: Tensor, offsets_L: Tensor, sums_LOI: Tensor | None
) -> Tensor:
    if sums_LOI is None:
        grad_LMO = grad_NO.unflatten(0, (offsets_L.shape[0], -1))
        return torch.bmm(grad_LMO.transpose(1, 2), rows_NI.unflatten(0, grad_LMO.shape[:2]))
    return _add_gradient(grad_NO, rows_NI, offsets_L, sums_LOI)


def _add_gradient(grad_NO: Tensor, rows_NI: Tensor, offsets_L: Tensor, sums_LOI: Tensor) -> Tensor:
    add_outer_by_expert(grad_NO, rows_NI, offsets_L, sums_LOI)
    return _unspecified(sums_LOI.shape, rows_NI.dtype, rows_NI.device)


def linear_gradients(
    needs: Sequence[bool],
    grad_NO: Tensor,
    rows_NI: Tensor | None,
    weight_LOI: Tensor,
    bias_LO: Tensor | None,
    probs_N: Tensor | None,
    offsets_L: Tensor,
    tiles: Tensor | None,
    sums_LOI: Tensor | None,
) -> list[Tensor | None]:
    """Return the gradients of a linear's rows, weight, bias and probabilities that are needed.

    The arguments are those of `grouped_linear`; `rows_NI` is read for the weight's only.
    """
    needs_rows, needs_weight, needs_bias, needs_probs, *_ = needs
    grad_NI = grad_LOI = grad_LO = grad_N = None
    if needs_rows:
        transposed_LIO = weight_LOI.transpose(1, 2)
        grad_NI = linear_by_expert(grad_NO, transposed_LIO, None, None, offsets_L, tiles)
    if needs_weight:
        assert rows_NI is not None
        grad_LOI = weight_gradient(grad_NO, rows_NI, offsets_L, sums_LOI)
    if needs_bias:
        grad_LO = sum_rows(grad_NO, probs_N, offsets_L)
    if needs_probs and bias_LO is not None:
        assert probs_N is not None
        grad_N = _dot_rows(grad_NO, bias_LO, probs_N, offsets_L)
    return [grad_NI, grad_LOI, grad_LO, grad_N]


def _linear_backward(ctx, grad_NO):
    rows_NI, *given = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grads = linear_gradients(needs, grad_NO, rows_NI, *given, sums_LOI=ctx.sums_LOI)
    return *grads, None, None, None


class _WeightGradient(torch.autograd.Function):
    """Hand on a linear's result; backward computes its weight's gradient, or keeps it for later.

    The weight is an input, so that backward comes here also where no other input has a gradient.
    """

    @staticmethod
    def forward(ctx, out_NO, weight_LOI, rows_NI, offsets_L, sums_LOI, gradient, delayed):
        ctx.save_for_backward(rows_NI, offsets_L)
        ctx.kept = sums_LOI, gradient, delayed
        return out_NO

    @staticmethod
    def backward(ctx, grad_NO):  # pyright: ignore[reportIncompatibleMethodOverride]
        rows_NI, offsets_L = ctx.saved_tensors
        sums_LOI, gradient, delayed = ctx.kept
        compute = functools.partial(gradient, grad_NO, rows_NI.detach(), offsets_L, sums_LOI)
        grad_LOI = None
        if delayed is None:
            grad_LOI = compute()
        else:
            delayed.append(compute)
        return grad_NO, grad_LOI, *(None,) * 5


linear_by_expert.register_autograd(_linear_backward, setup_context=_save_inputs)
