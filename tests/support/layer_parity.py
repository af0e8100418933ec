"""Compute one MoE layer three ways: ours, Megatron's stock layer, and plain torch in fp64.

Every rank draws the whole weights from one seed. A layer takes its shards of them. Its gradients
are put back into whole tensors and summed over all ranks, so one comparison serves every mix of
parallelism, over gloo (SequentialMLP, stock `allgather`) and NCCL (TEGroupedMLP, `alltoall`).

Shape suffixes: T tokens, E experts, D hidden size, I width of the experts' rows (the latent size or
D), F expert ffn size. In comments, S and B are sequence and batch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from padded_dispatch.megatron import PaddedOptions
from tests.support import tiny
from tests.support.gpt import Sizes
from tests.support.machines import ranks_on
from tests.support.parity import megatron, too_far

SEED = 20
# Draws of weights and tokens that are judged together: the largest error of the 16 elements of a
# bias gradient depends much on chance, that of 64 less.
DRAWS = 4
MODULE = PaddedOptions(experts="module", exchange="alltoall")


@dataclass(frozen=True, kw_only=True)
class LayerCase(Sizes):
    """One MoE layer in one mix of parallelism, without dropping.

    `seq` and `batch` are per tensor-parallel group: with sequence parallelism a rank holds
    `seq / tp` positions. `routing`: "random"; "idle rank" (the last rank's experts get no rows);
    "one expert" (expert 3 gets every token; needs top_k = 1). `shared_score`: weight the shared
    experts' output by a sigmoid of the token. `gpt_oss`: use GPT-OSS's activation, clamped at 1.
    `latent`: width to which the layer projects tokens for its experts, by Transformer Engine.
    `both`: further fields of TransformerConfig; with `fp8` among them the rule compares two
    computations in fp8. `ours`: further fields for the padded layer only. `options`: its
    PaddedOptions, by default Megatron's experts and the all-to-all.
    """

    num_layers: int = 1
    num_experts: int = 8
    hidden: int = 12
    ffn: int = 10
    shared_ffn: int | None = None
    shared_score: bool = False
    bias: bool = False
    gpt_oss: bool = False
    latent: int | None = None
    seq: int = 14
    batch: int = 3
    routing: str = "random"
    both: tuple[tuple[str, Any], ...] = ()
    ours: tuple[tuple[str, Any], ...] = ()
    options: PaddedOptions = MODULE


def layer_agrees(case: LayerCase) -> list[str]:
    """Run `case` on every rank; return which results break the rule."""
    with ranks_on(case.machines), megatron(case.device, **case.groups):
        dropless = "alltoall" if case.on_gpu else "allgather"
        kinds = {"ours": "padded_alltoall", "again": "padded_alltoall", "stock": dropless}
        layers = {run: build_layer(case, kind) for run, kind in kinds.items()}
        draws = [_draw(case, layers, number) for number in range(DRAWS)]
    ours, again, stock, exact = (
        {name: torch.stack([draw[run][name] for draw in draws]) for name in draws[0][run]}
        for run in draws[0]
    )
    broken = too_far(ours, stock, exact, case.dtype)
    if not all(torch.equal(ours[name], again[name]) for name in ours):
        broken.append("two runs of ours differ")
    return broken


def _draw(case: LayerCase, layers: dict[str, Any], number: int) -> dict[str, dict[str, Tensor]]:
    """Return output and gradients of each layer, and exact ones, for a draw of weights."""
    weights = _weights(case, number)
    tokens, grad = _tokens(case, number)
    maps, found = [], {}
    for run, layer in layers.items():
        found[run], map_TE = _run(layer, weights, tokens, grad)
        maps.append(map_TE)
    assert torch.equal(maps[0], maps[2]), "both routers must choose the same experts"
    return found | {"exact": in_fp64(case, weights, tokens, grad, maps[0])}


def _weights(case: LayerCase, number: int) -> dict[str, Tensor]:
    """Return whole weights, the same on all ranks; feature 0 of tokens is 1, to steer routing."""
    generator = torch.Generator().manual_seed(SEED + 100 * number)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return drawn.to(case.device, case.dtype)

    E, D, F = case.num_experts, case.hidden, case.ffn
    router = draw(E, D)
    if case.routing == "idle rank":
        router[-E // case.ep :, 0] = -50
    elif case.routing == "one expert":
        router[3, 0] = 50
    weights = {"router": router}
    if case.latent is not None:
        weights |= {"into": draw(case.latent, D), "out_of": draw(D, case.latent)}
    width = case.latent or D
    weights |= {"gate": draw(E, F, width), "up": draw(E, F, width), "down": draw(E, width, F)}
    if case.bias:
        weights |= {"gate_bias": draw(E, F), "up_bias": draw(E, F), "down_bias": draw(E, D)}
        weights["router_bias"] = draw(E)
    if case.shared_ffn is not None:
        F = case.shared_ffn
        weights |= {"shared_gate": draw(F, D), "shared_up": draw(F, D), "shared_down": draw(D, F)}
    if case.shared_score:
        weights["shared_score"] = draw(1, D)
    return weights


def _tokens(case: LayerCase, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED + 100 * number + 1 + dist.get_rank())
    shape = (case.seq // case.tp, case.batch, case.hidden)
    tokens = torch.randn(shape, generator=generator)
    tokens[..., 0] = 1
    grad = torch.randn(shape, generator=generator)
    return tokens.to(case.device, case.dtype), grad.to(case.device, case.dtype)


def _run(
    layer: Any, weights: dict[str, Tensor], tokens: Tensor, grad: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    layer.zero_grad()
    with torch.no_grad():
        for whole, where, part in _shards(layer, "data"):
            part.copy_(weights[whole][where])
    layer.set_is_first_microbatch()  # They are to be quantized.
    maps: list[Tensor] = []
    hook = layer.router.register_forward_hook(lambda module, inputs, out: maps.append(out[1]))
    tokens = tokens.clone().requires_grad_()
    with get_fp8_context(layer.config):  # Megatron's transformer block does this.
        output = layer(tokens)[0]
    hook.remove()
    output.backward(grad)
    found = {"output": output.detach(), "grad tokens": tokens.grad}
    wholes = {
        name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in weights.items()
    }
    for whole, where, part in _shards(layer, "grad"):
        wholes[whole][where] += part
    return found | _summed(wholes), maps[0]


def _summed(wholes: dict[str, Tensor]) -> dict[str, Tensor]:
    flat = torch.cat([whole.flatten() for whole in wholes.values()])
    dist.all_reduce(flat)
    parts = flat.split([whole.numel() for whole in wholes.values()])
    return {
        f"grad {name}": part.view_as(whole)
        for (name, whole), part in zip(wholes.items(), parts, strict=True)
    }


def build_layer(case: LayerCase, dispatcher: str) -> Any:
    """Build a MoE layer in training mode with this rank's share of the experts."""
    model_parallel_cuda_manual_seed(SEED)
    config = case.config(
        dispatcher,
        moe_shared_expert_intermediate_size=case.shared_ffn,
        moe_shared_expert_gate=case.shared_score,
        moe_latent_size=case.latent,
        moe_router_pre_softmax=case.top_k == 1,
        # Stock 0.19.0 with Transformer Engine 2.20.2 reads a bf16 bias as fp32: see D21.
        moe_router_dtype=None if case.bias and case.dtype == torch.bfloat16 else "fp32",
        **(tiny.gpt_oss(1.0) if case.gpt_oss else {}),
        add_bias_linear=case.bias,
        bias_activation_fusion=case.on_gpu,
        deterministic_mode=True,
        **dict(case.both),
        **(dict(case.ours) if dispatcher == "padded_alltoall" else {}),
    )
    if dispatcher == "padded_alltoall":
        config.padded_dispatch = case.options
    experts = {"num_experts": case.num_experts, "moe_grouped_gemm": case.on_gpu}
    layer = tiny.build(get_moe_module_spec(use_te=case.on_gpu, **experts), config).to(case.device)
    layer.set_layer_number(1)
    return layer


_REPLICATED = {
    "router.weight": "router",
    "router.bias": "router_bias",
    "shared_experts.gate_weight": "shared_score",
    "fc1_latent_proj.weight": "into",
    "fc2_latent_proj.weight": "out_of",
}
_EXPERT = re.compile(r"experts\.(?:local_experts\.(\d+)\.)?linear_fc([12])\.(weight|bias)(\d*)")


_Shard = tuple[str, tuple[Any, ...], Tensor]


def _shards(layer: Any, kind: str) -> Iterator[_Shard]:
    """Yield all parameters of a layer, their "data" or "grad": (whole, where in it, the part)."""
    for name, parameter in layer.named_parameters():
        tensor = getattr(parameter, kind)
        assert tensor is not None, f"no gradient for {name}"
        if name in _REPLICATED:
            yield _REPLICATED[name], (), tensor
        elif name.startswith("shared_experts."):
            rank = parallel_state.get_tensor_model_parallel_rank()
            yield from _split("linear_fc1" in name, "shared_{}", (), rank, tensor)
        else:
            found = _EXPERT.fullmatch(name)
            assert found is not None, f"unknown parameter {name}"
            rank = parallel_state.get_expert_tensor_parallel_rank()
            suffix = "_bias" if found[3] == "bias" else ""
            number = found[1] or found[4]
            if number:
                of_experts = {int(number): tensor}
            else:  # The weights of all experts are one tensor, and so are their biases.
                rows = tensor.unflatten(0, (layer.num_local_experts, -1)) if suffix else tensor
                of_experts = dict(enumerate(rows))
            for local, part in of_experts.items():
                where = (layer.local_expert_indices[local],)
                yield from _split(found[2] == "1", "{}" + suffix, where, rank, part)


def _split(
    is_fc1: bool, whole: str, where: tuple[Any, ...], rank: int, tensor: Tensor
) -> Iterator[_Shard]:
    """Yield the shards of one linear layer.

    fc1 holds this rank's rows of gate above those of up, fc2 this rank's columns of down.
    """
    if is_fc1:
        for name, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
            rows = slice(rank * len(part), (rank + 1) * len(part))
            yield whole.format(name), (*where, rows), part
    else:
        width = tensor.shape[-1]
        columns = slice(rank * width, (rank + 1) * width)
        across = (slice(None), columns) if tensor.dim() == 2 else ()
        yield whole.format("down"), (*where, *across), tensor


def in_fp64(
    case: LayerCase, weights: dict[str, Tensor], tokens: Tensor, grad: Tensor, map_TE: Tensor
) -> dict[str, Tensor]:
    """Compute the layer in plain torch, in fp64, for a given choice of experts.

    Every expert computes every token, weighted with 0 where it was not chosen.
    """
    w = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    leaf = tokens.double().requires_grad_()
    x_TD = leaf.flatten(0, 1)
    scores_TE = x_TD @ w["router"].T
    if case.bias:
        scores_TE = scores_TE + w["router_bias"]
    if case.top_k == 1:  # softmax over all experts, then the choice
        probs_TE = torch.where(map_TE, scores_TE.softmax(-1), 0)
    else:  # the choice, then softmax over the chosen
        probs_TE = torch.where(map_TE, scores_TE, -torch.inf).softmax(-1)
    rows_TI = x_TD if case.latent is None else x_TD @ w["into"].T
    out_TI = torch.zeros_like(rows_TI)
    for e in range(case.num_experts):
        gate_TF, up_TF = rows_TI @ w["gate"][e].T, rows_TI @ w["up"][e].T
        if case.bias:
            gate_TF, up_TF = gate_TF + w["gate_bias"][e], up_TF + w["up_bias"][e]
        if case.gpt_oss:
            gate_TF, up_TF = gate_TF.clamp(max=1), up_TF.clamp(-1, 1) + 1
            hidden_TF = gate_TF * (1.702 * gate_TF).sigmoid() * up_TF
        else:
            hidden_TF = torch.nn.functional.silu(gate_TF) * up_TF
        result_TI = hidden_TF @ w["down"][e].T
        if case.bias:
            result_TI = result_TI + w["down_bias"][e]
        out_TI = out_TI + probs_TE[:, e, None] * result_TI
    out_TD = out_TI if case.latent is None else out_TI @ w["out_of"].T
    if case.shared_ffn is not None:
        shared_TF = torch.nn.functional.silu(x_TD @ w["shared_gate"].T) * (x_TD @ w["shared_up"].T)
        shared_TD = shared_TF @ w["shared_down"].T
        if case.shared_score:
            shared_TD = shared_TD * (x_TD @ w["shared_score"].T).sigmoid()
        out_TD = out_TD + shared_TD
    out_TD.backward(grad.double().flatten(0, 1))
    found = {"output": out_TD.detach().view_as(tokens), "grad tokens": leaf.grad}
    # An expert without tokens has a gradient of zero, not None.
    return found | _summed({name: weight.grad for name, weight in w.items()})
