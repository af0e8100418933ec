"""The grouped MLP against one expert after the other, forward and every gradient."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import linear

from padded_dispatch import experts
from padded_dispatch.experts import ExpertWeights, grouped_mlp
from padded_dispatch.routing import activation as activation_module
from padded_dispatch.experts.activation import Activation
from tests.ops.test_activation import ALL, BIASED, EACH, FUNCTIONS
from tests.ops.test_grouped import CASES, offsets_of
from tests.support.grids import poisoned_memory

D, WIDTH = 6, 5

Found = dict[str, Tensor]


def inputs(
    counts: list[int],
    spare: int,
    activation: Activation,
    biased: bool,
    dtype: torch.dtype = torch.float64,
    width: tuple[int, int] = (D, WIDTH),
) -> Found:
    """Rows, of which the last `spare` are NaN, probabilities and weights; `width` is (D, F)."""
    D, WIDTH = width
    generator = torch.Generator().manual_seed(sum(counts) + len(counts))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    num_rows, L = sum(counts), len(counts)
    G = 2 * WIDTH if activation.gated else WIDTH
    made = {
        "rows_ND": draw(num_rows + spare, D),
        "probs_N": draw(num_rows + spare).abs().to(torch.promote_types(dtype, torch.float32)),
        "fc1_LGD": draw(L, G, D),
        "fc2_LDF": draw(L, D, WIDTH),
    }
    if biased:
        made |= {"fc1_bias_LG": draw(L, G), "fc2_bias_LD": draw(L, D)}
    for name in ("rows_ND", "probs_N"):
        made[name][num_rows:] = torch.nan
    return {name: value.requires_grad_() for name, value in made.items()}


def ours(
    rows_ND: Tensor,
    probs_N: Tensor,
    offsets_L: Tensor,
    activation: Activation,
    recompute: bool = False,
    **weights: Tensor,
) -> Tensor:
    stacked = ExpertWeights(**weights)
    return grouped_mlp(rows_ND, probs_N, offsets_L, stacked, activation, recompute=recompute)


def one_by_one(
    rows_ND: Tensor, probs_N: Tensor, offsets_L: Tensor, activation: Activation, **weights: Tensor
) -> Tensor:
    """The grouped MLP in plain torch, one expert after the other."""
    function, start, out = FUNCTIONS[activation.function], 0, []
    for expert, end in enumerate(offsets_L.tolist()):
        w = {name: stacked[expert] for name, stacked in weights.items()}
        prob = probs_N[start:end, None]
        x = linear(rows_ND[start:end], w["fc1_LGD"], w.get("fc1_bias_LG"))
        if activation.gated:
            gate, up = x.chunk(2, dim=1)
            up = up.clamp(-activation.clamp, activation.clamp) + activation.offset
            hidden = function(gate.clamp(max=activation.clamp)) * up
        else:
            hidden = function(x)
        found = linear((hidden * prob).to(rows_ND.dtype), w["fc2_LDF"])
        if "fc2_bias_LD" in w:
            found = (found + w["fc2_bias_LD"] * prob).to(rows_ND.dtype)
        out.append(found)
        start = end
    return torch.cat(out)


def results(
    function: Callable[..., Tensor], counts: list[int], activation: Activation, biased: bool
) -> Found:
    """Output and gradients; the gradient of the output is NaN where no row is."""
    given, offsets_L = inputs(counts, 3, activation, biased), offsets_of(counts)
    with poisoned_memory():
        out_ND = function(**given, offsets_L=offsets_L, activation=activation)
        grad_ND = torch.full_like(out_ND, torch.nan)
        grad_ND[: sum(counts)] = torch.linspace(-1, 1, sum(counts) * D).view(-1, D)
        out_ND.backward(grad_ND)
    found = {name: leaf.grad for name, leaf in given.items()} | {"out_ND": out_ND.detach()}
    return {name: v[: sum(counts)] if "_N" in name else v for name, v in found.items()}


def no_rows_no_gradient(counts: list[int], found: Found) -> None:
    for name in found:
        if "_L" in name:
            for count, grad in zip(counts, found[name], strict=True):
                assert grad.any() if count else torch.equal(grad, torch.zeros_like(grad)), name


@BIASED
@EACH
@CASES
def test_output_and_gradients(counts, name, biased):
    activation = Activation(**ALL[name])
    mine, expected = (results(f, counts, activation, biased) for f in (ours, one_by_one))
    assert mine.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(mine[key], value, rtol=1e-12, atol=1e-13, msg=key)
    no_rows_no_gradient(counts, mine)


@BIASED
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_fc2s_input_may_be_recomputed(monkeypatch, biased, recompute):
    """With `recompute`, it is freed between forward and backward, and no bit changes."""
    activation, counts, storages = Activation(**ALL["gpt-oss"]), [2, 0, 3], []

    def activate(*given: Any) -> Tensor:
        hidden_NF = activation_module.activate(*given)
        storages.append(StorageWeakRef(hidden_NF.untyped_storage()))
        return hidden_NF

    monkeypatch.setattr(experts, "activate", activate)
    function = functools.partial(ours, recompute=recompute)
    out_ND = function(
        **inputs(counts, 0, activation, biased), offsets_L=offsets_of(counts), activation=activation
    )
    assert storages[0].expired() == recompute
    out_ND.sum().backward()
    assert len(storages) == 1 + recompute
    found, expected = (results(f, counts, activation, biased) for f in (function, ours))
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", ["swiglu", "gpt-oss"])
def test_compiles_as_one_graph(name):
    activation = Activation(**ALL[name])
    given, offsets_L = inputs([2, 0, 3], 0, activation, biased=True), offsets_of([2, 0, 3])
    function = functools.partial(ours, offsets_L=offsets_L, activation=activation)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**given), function(**given))


# On a GPU, where only bf16 is computed.

LARGE = [[0, 300, 0, 1, 129, 0, 64, 7], [513], [0, 0, 0], [200] * 4]


def on_gpu(
    function, activation: Activation, given: Found, offsets_L: Tensor, grad_ND: Tensor
) -> Found:
    leaves = {name: value.detach().clone().requires_grad_() for name, value in given.items()}
    out_ND = function(**leaves, offsets_L=offsets_L, activation=activation)
    out_ND.backward(grad_ND[: out_ND.shape[0]])  # One by one there is nothing behind the rows.
    return {"out_ND": out_ND.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def random_case(
    counts: list[int], activation: Activation, biased: bool, cuda: torch.device
) -> tuple[Found, Tensor, Tensor]:
    """Inputs with NaN behind the last row, ends, and a gradient likewise.

    What goes into fc1 are whole numbers, so that what comes out is exact in bf16: else rounding
    would decide on which side of a clamp a value lies, and whether it has a gradient.
    """
    given = inputs(counts, 70, activation, biased, dtype=torch.bfloat16, width=(136, 72))
    for name in {"rows_ND", "fc1_LGD", "fc1_bias_LG"} & given.keys():
        given[name] = given[name].detach().round().requires_grad_()
    generator = torch.Generator().manual_seed(len(counts))
    grad_ND = torch.randn(given["rows_ND"].shape, generator=generator).to(torch.bfloat16)
    grad_ND[sum(counts) :] = torch.nan
    return (
        {name: v.to(cuda) for name, v in given.items()},
        offsets_of(counts).to(cuda),
        grad_ND.to(cuda),
    )


@pytest.mark.gpu
@BIASED
@EACH
@pytest.mark.parametrize("counts", LARGE, ids=str)
def test_bf16_is_as_exact_as_torch(cuda, counts, name, biased):
    """At most twice torch's error against fp64, plus a unit in the last place; memory is NaN."""
    activation = Activation(**ALL[name])
    given, offsets_L, grad_ND = random_case(counts, activation, biased, cuda)
    with poisoned_memory():
        mine = on_gpu(ours, activation, given, offsets_L, grad_ND)
        again = on_gpu(ours, activation, given, offsets_L, grad_ND)
    in_torch = on_gpu(one_by_one, activation, given, offsets_L, grad_ND)
    wide = {name: value.double() for name, value in given.items()}
    exact = on_gpu(one_by_one, activation, wide, offsets_L, grad_ND.double())
    for key, value in exact.items():
        real = slice(sum(counts)) if "_N" in key else slice(None)
        value = value[real]
        assert torch.equal(mine[key][real], again[key][real]), key
        if value.numel():
            error = (mine[key][real].double() - value).abs().max().item()
            allowed = 2 * (in_torch[key][real].double() - value).abs().max().item()
            largest = value.abs().max().item()
            if largest:
                allowed += torch.finfo(mine[key].dtype).eps * 2.0 ** math.floor(math.log2(largest))
            assert error <= allowed, key
    no_rows_no_gradient(counts, mine)
