"""Measure the direct exchange and torchtitan's MinimalAsyncEP, which does the same job.

    git clone https://github.com/pytorch/torchtitan && git -C torchtitan checkout b5bcd76
    python -m tests.gpu.peer --torchtitan torchtitan --out runs/direct.json --commit SHA

Both take tokens, their experts and probabilities, write real rows into the memory of peers, packed
by expert, and return them to be summed. Experts return their rows unchanged, so only the exchange
is measured: until rows are at their experts, forward, and forward with backward (gradients of
tokens and probabilities), inside a CUDA graph, for even and for skewed routing. MinimalAsyncEP
drops no rows; our rows state the capacity factor. Our time includes selection and the plan; its
counts per expert are computed outside of the measured time. Beside them, our exchange by the
all-to-all, with packed and with padded rows.
"""

import argparse
import dataclasses
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from padded_dispatch import NO_DROP, PaddedDispatcher
from padded_dispatch.bench.cases import MODELS
from padded_dispatch.dispatcher import Dispatched
from tests.gpu.direct import ENVIRONMENT, graphed_us, run_part
from tests.support.direct_parity import Layer, make_inputs, my_gpu
from tests.support.gpu_rows import Rows, add_results
from tests.support.pool import WorkerPool

SKEWS = "uniform", "lognormal"
# Name, exchange, whether rows are packed, and factors. All slots travel by the all-to-all.
VARIANTS = (
    ("direct", "direct", True, (1.0, 1.25, 2.0, NO_DROP)),
    ("alltoall", "alltoall", True, (1.25,)),
    ("alltoall, padded rows", "alltoall", False, (1.25,)),
)
_TOKENS = 4096


def measured(out: Callable[[], object], both_ways: Callable[[bool], object]) -> dict[str, float]:
    """Return microseconds; `both_ways(backward)` runs forward and optionally backward."""
    with torch.no_grad():
        found = {"out_us": graphed_us(out), "forward_us": graphed_us(lambda: both_ways(False))}
    return found | {"forward_backward_us": graphed_us(lambda: both_ways(True))}


def ours(layer: Layer, skew: str, exchange: Any, packed: bool) -> dict[str, Any]:
    """Measure our exchange, on every rank."""
    given = make_inputs(layer, skew, 0, my_gpu())
    dispatcher = layer.dispatcher(exchange)
    if not packed:
        group = dist.group.WORLD
        dispatcher = PaddedDispatcher(dispatcher.config, group=group, exchange=exchange)
    inputs = given.tokens_TD, given.probs_TE

    def out() -> Dispatched:
        return dispatcher.dispatch(*inputs, given.map_TE)

    def both_ways(backward: bool) -> Dispatched:
        sent = out()
        probs_N = sent.expert_input.probs_N
        out_TD = dispatcher.combine(sent.expert_input.rows_ND, sent)
        if backward:
            grads = given.grad_TD, torch.ones_like(probs_N)
            torch.autograd.grad((out_TD, probs_N), inputs, grads)
        return sent

    num_sent = int(both_ways(True).plan.kept_E.sum())
    found = measured(out, both_ways)
    return found | {"sent": num_sent, "asked_for": int(given.map_TE.sum())}


def peer(layer: Layer, skew: str, checkout: str) -> dict[str, Any]:
    """Measure MinimalAsyncEP, on every rank, after a check of its result for identity experts."""
    device, size = my_gpu(), dist.get_world_size()
    api = _minimal_async_ep(checkout)
    given = make_inputs(layer, skew, 0, device)
    expert_of_TK = given.map_TE.int().topk(layer.top_k).indices
    scores_TK = given.probs_TE.detach().gather(1, expert_of_TK).requires_grad_()
    counts_E = given.map_TE.sum(0)
    api.init_buffer(
        group=dist.group.WORLD,
        hidden_dim=layer.width,
        num_max_tokens_per_rank=layer.tokens,
        num_local_experts=layer.local_experts,
        top_k=layer.top_k,
        dtype=layer.dtype,
        device=device,
    )
    received = size * layer.tokens * min(layer.top_k, layer.local_experts)
    inputs = given.tokens_TD, scores_TK

    def out() -> Any:
        return api.dispatch_op(given.tokens_TD, expert_of_TK, counts_E, received, size)

    def both_ways(backward: bool) -> torch.Tensor:
        rows, *maps, e_to_t, t_to_e, _ = out()
        scores_N = scores_TK.view(-1)
        out_TD, _ = api.combine_op(rows, *maps, t_to_e, e_to_t, scores_N, layer.tokens, layer.top_k)
        if backward:
            torch.autograd.grad(out_TD, inputs, given.grad_TD)
        return out_TD

    with torch.no_grad():  # A live autograd graph would tie the capture to this stream.
        wanted_TD = given.tokens_TD.double() * scores_TK.double().sum(1, keepdim=True)
        error = (both_ways(False).double() - wanted_TD).abs().max() / wanted_TD.abs().max()
    assert error < 2**-7, f"MinimalAsyncEP's result differs by {error:.3g} of the largest value"
    num_sent = int(counts_E.sum())
    return measured(out, both_ways) | {"sent": num_sent, "asked_for": num_sent}


def _minimal_async_ep(checkout: str) -> Any:
    """Import its module without the packages above it, which import much that it does not need."""
    for name in ("torchtitan", "torchtitan.distributed"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(checkout, *name.split(".")))]
        sys.modules.setdefault(name, package)
    from torchtitan.distributed.minimal_async_ep import api

    return api


def main() -> int:
    """Measure all cases; return exit code 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torchtitan", required=True, help="a checkout")
    add_results(parser)
    arguments = parser.parse_args()
    size = torch.cuda.device_count()
    rows = Rows(arguments, size, ENVIRONMENT)
    for model in ("qwen3-30b-a3b", "gpt-oss-20b"):
        shape = MODELS[model]
        layer = Layer(
            tokens=_TOKENS,
            width=shape.hidden_size,
            top_k=shape.top_k,
            local_experts=shape.num_experts // size,
        )
        cases: list[tuple[dict[str, Any], Callable[..., Any], tuple[Any, ...]]] = []
        for skew in SKEWS:
            row = {"skew": skew, "contender": "torchtitan-minimal-async-ep"}
            cases.append((row, peer, (layer, skew, arguments.torchtitan)))
            for variant, exchange, packed, factors in VARIANTS:
                for factor in factors:
                    shown = None if factor == NO_DROP else factor  # JSON has no infinity.
                    row = {"skew": skew, "contender": "ours", "variant": variant}
                    given = dataclasses.replace(layer, factor=factor), skew, exchange, packed
                    cases.append((row | {"capacity_factor": shown}, ours, given))
        # MinimalAsyncEP has one buffer per process, of one shape.
        with WorkerPool(size, backend="nccl") as pool:
            for row, fn, args in cases:
                row = {"measure": "exchange beside a peer", "model": model, "ep": size, **row}
                rows.add(run_part(pool, row | {"tokens": _TOKENS}, fn, args))
    return rows.exit_code()


if __name__ == "__main__":
    sys.exit(main())
