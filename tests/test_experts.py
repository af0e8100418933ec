"""The grouped MLP against one expert after the other, forward and every gradient."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from grids import poisoned_memory
from torch import Tensor
from torch.library import opcheck

from padded_dispatch import experts

# Rows of each expert: none in front, between and behind; one; everything in one expert; nothing.
COUNTS = [[0, 3, 0, 5, 1, 0], [1], [0, 7, 0], [0, 0], [4, 4]]
CASES = pytest.mark.parametrize("counts", COUNTS, ids=str)
D, WIDTH = 6, 5

Found = dict[str, Tensor]


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).int()


def inputs(
    counts: list[int],
    spare: int,
    dtype: torch.dtype = torch.float64,
    width: tuple[int, int] = (D, WIDTH),
) -> dict[str, Tensor]:
    """Rows, of which the last `spare` are NaN, probabilities and weights; `width` is (D, F)."""
    D, WIDTH = width
    generator = torch.Generator().manual_seed(sum(counts) + len(counts))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    num_rows, num_experts = sum(counts), len(counts)
    made = {
        "rows_ND": draw(num_rows + spare, D),
        "probs_N": draw(num_rows + spare).abs().to(torch.promote_types(dtype, torch.float32)),
        "fc1_LGD": draw(num_experts, 2 * WIDTH, D),
        "fc2_LDF": draw(num_experts, D, WIDTH),
    }
    for name in ("rows_ND", "probs_N"):
        made[name][num_rows:] = torch.nan
    return {name: value.requires_grad_() for name, value in made.items()}


def one_by_one(
    rows_ND: Tensor, probs_N: Tensor, fc1_LGD: Tensor, fc2_LDF: Tensor, ends_L: Tensor
) -> Tensor:
    """What the grouped MLP is to compute, in plain torch."""
    out, start = [], 0
    for expert, end in enumerate(ends_L.tolist()):
        gate, up = F.linear(rows_ND[start:end], fc1_LGD[expert]).chunk(2, dim=1)
        weighted = F.silu(gate) * up * probs_N[start:end, None]
        out.append(F.linear(weighted.to(rows_ND.dtype), fc2_LDF[expert]))
        start = end
    return torch.cat(out)


def results(function: Callable[..., Tensor], counts: list[int], spare: int) -> dict[str, Tensor]:
    """Output and gradients; the gradient of the output is NaN where no row is."""
    given, ends_L = inputs(counts, spare), ends_of(counts)
    with poisoned_memory():
        out_ND = function(**given, ends_L=ends_L)
        grad_ND = torch.full_like(out_ND, torch.nan)
        grad_ND[: sum(counts)] = torch.linspace(-1, 1, sum(counts) * D).view(-1, D)
        out_ND.backward(grad_ND)
    found = {name: leaf.grad for name, leaf in given.items()} | {"out_ND": out_ND.detach()}
    return {name: v[: sum(counts)] if "_N" in name else v for name, v in found.items()}


@CASES
def test_output_and_gradients(counts):
    ours, expected = (results(f, counts, spare=3) for f in (experts.swiglu_experts, one_by_one))
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-13, msg=name)


@CASES
def test_experts_without_rows_have_a_gradient_of_zero(counts):
    found = results(experts.swiglu_experts, counts, spare=2)
    for count, *grads in zip(counts, found["fc1_LGD"], found["fc2_LDF"], strict=True):
        for grad in grads:
            assert grad.any() if count else not grad.any()


def test_gradients_are_those_of_the_function():
    given, ends_L = inputs([2, 0, 3], spare=0), ends_of([2, 0, 3])
    assert torch.autograd.gradcheck(
        lambda *values: experts.swiglu_experts(*values, ends_L), tuple(given.values())
    )


def test_bf16_rounds_between_the_stages_only():
    """Weights of one, rows of ones: sums that fp32 holds and bf16 does not, rounded at the end."""
    rows_ND, ones = torch.ones(2, 257, dtype=torch.bfloat16), torch.ones(1, 1, 257)
    out = experts.grouped_linear(rows_ND, ones.bfloat16(), ends_of([1]))
    assert out[0].item() == 256.0  # 257 rounds to even


def test_all_are_sound_custom_ops():
    # Every row is real, since opcheck compares every element.
    given, ends_L = inputs([2, 0, 3], spare=0), ends_of([2, 0, 3])
    rows_ND, probs_N, fc1_LGD, _ = given.values()
    fc1_NG = torch.randn(5, 2 * WIDTH, dtype=torch.float64)
    grad_NF = torch.randn(5, WIDTH, dtype=torch.float64)
    opcheck(experts._grouped_linear, (rows_ND, fc1_LGD, ends_L))
    opcheck(experts._grouped_outer, (fc1_NG, rows_ND.detach(), ends_L))
    opcheck(experts._swiglu, (fc1_NG.requires_grad_(), probs_N, ends_L))
    opcheck(experts._swiglu_backward, (grad_NF, fc1_NG.detach(), probs_N.detach(), ends_L))


def test_compiles_as_one_graph():
    given, ends_L = inputs([2, 0, 3], spare=0), ends_of([2, 0, 3])
    compiled = torch.compile(experts.swiglu_experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(
        compiled(**given, ends_L=ends_L), experts.swiglu_experts(**given, ends_L=ends_L)
    )


# On a GPU, where only bf16 is computed.

LARGE = [[0, 300, 0, 1, 129, 0, 64, 7], [513], [0, 0, 0], [200] * 4]


@pytest.fixture
def cuda() -> str:
    assert torch.cuda.is_available(), "this test was asked for and needs a CUDA device"
    return "cuda"


def on_gpu(
    function, given: dict[str, Tensor], ends_L: Tensor, grad_ND: Tensor
) -> dict[str, Tensor]:
    leaves = {name: value.detach().clone().requires_grad_() for name, value in given.items()}
    out_ND = function(**leaves, ends_L=ends_L)
    out_ND.backward(grad_ND[: out_ND.shape[0]])  # One by one there is nothing behind the rows.
    return {"out_ND": out_ND.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def random_case(counts: list[int], cuda: str) -> tuple[Found, Tensor, Tensor]:
    """Inputs with NaN behind the last row, ends, and a gradient likewise."""
    given = inputs(counts, spare=70, dtype=torch.bfloat16, width=(136, 72))
    grad_ND = torch.randn_like(given["rows_ND"])
    grad_ND[sum(counts) :] = torch.nan
    return (
        {name: v.to(cuda) for name, v in given.items()},
        ends_of(counts).to(cuda),
        grad_ND.to(cuda),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("counts", LARGE, ids=str)
def test_bf16_is_as_exact_as_torch(cuda, counts):
    """At most twice torch's error against fp64, plus a unit in the last place; memory is NaN."""
    given, ends_L, grad_ND = random_case(counts, cuda)
    with poisoned_memory():
        ours = on_gpu(experts.swiglu_experts, given, ends_L, grad_ND)
        again = on_gpu(experts.swiglu_experts, given, ends_L, grad_ND)
    in_torch = on_gpu(one_by_one, given, ends_L, grad_ND)
    wide = {name: value.double() for name, value in given.items()}
    exact = on_gpu(one_by_one, wide, ends_L, grad_ND.double())
    for name, value in exact.items():
        real = slice(sum(counts)) if "_N" in name else slice(None)
        value = value[real]
        assert torch.equal(ours[name][real], again[name][real]), name
        if value.numel():
            error = (ours[name][real].double() - value).abs().max().item()
            allowed = 2 * (in_torch[name][real].double() - value).abs().max().item()
            largest = value.abs().max().item()
            if largest:
                allowed += torch.finfo(ours[name].dtype).eps * 2.0 ** math.floor(math.log2(largest))
            assert error <= allowed, name
    for count, *grads in zip(counts, ours["fc1_LGD"], ours["fc2_LDF"], strict=True):
        assert all(grad.any() if count else not grad.any() for grad in grads)


@pytest.mark.gpu
def test_one_capture_serves_all_counts_without_a_look_at_the_host(cuda):
    """Replay equals eager bit by bit, also where experts have no rows; nothing synchronizes."""
    num_rows = 500
    given, ends_L, grad_ND = random_case([50, 60, 70, 320], cuda)
    given = {n: v.detach()[:num_rows] if "_N" in n else v.detach() for n, v in given.items()}
    grad_ND = grad_ND[:num_rows]
    eager = on_gpu(experts.swiglu_experts, given, ends_L, grad_ND)  # Compiles the kernels.
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        on_gpu(experts.swiglu_experts, given, ends_L, grad_ND)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_gpu(experts.swiglu_experts, given, ends_L, grad_ND)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = on_gpu(experts.swiglu_experts, given, ends_L, grad_ND)
    for counts in ([50, 60, 70, 320], [0, 500, 0, 0], [0, 0, 0, 0], [1, 2, 0, 3], [200, 0, 100, 0]):
        ends_L.copy_(ends_of(counts))
        graph.replay()
        eager = on_gpu(experts.swiglu_experts, given, ends_L, grad_ND)
        for name, value in eager.items():
            real = slice(sum(counts)) if "_N" in name else slice(None)
            assert torch.equal(replayed[name][real], value[real]), (counts, name)


@pytest.mark.gpu
def test_other_dtypes_are_refused_on_gpus(cuda):
    rows_ND, weight_LOI = torch.ones(8, 8, device=cuda), torch.ones(1, 8, 8, device=cuda)
    with pytest.raises(ValueError, match="bfloat16"):
        experts.grouped_linear(rows_ND, weight_LOI, ends_of([8]).to(cuda))
