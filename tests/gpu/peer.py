"""Measure the direct exchange and torchtitan's MinimalAsyncEP, which does the same job.

    git clone https://github.com/pytorch/torchtitan && git -C torchtitan checkout b5bcd76
    python -m tests.gpu.peer --torchtitan torchtitan --out runs/direct.json --commit SHA

Both take tokens, their experts and probabilities, write real rows into the memory of peers, packed
by expert, and return them to be summed. Experts return their rows unchanged, so only the exchange
is measured: forward alone, and forward with backward (gradients of tokens and probabilities),
inside a CUDA graph. MinimalAsyncEP drops no rows; our rows state the capacity factor. Our time
includes selection and the plan; its counts per expert are computed outside of the measured time.
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

from padded_dispatch import NO_DROP
from padded_dispatch.bench.cases import MODELS
from padded_dispatch.dispatcher import Dispatched
from tests.gpu.direct import ENVIRONMENT, graphed_us, run_part
from tests.support.direct_parity import Layer, make_inputs, my_gpu
from tests.support.gpu_rows import Rows, add_results
from tests.support.pool import WorkerPool

FACTORS = (1.0, 1.25, 2.0, NO_DROP)
_TOKENS = 4096


def measured(both_ways: Callable[[bool], object]) -> dict[str, float]:
    """Return microseconds; `both_ways(backward)` runs forward and optionally backward."""
    with torch.no_grad():
        forward = graphed_us(lambda: both_ways(False))
    return {"forward_us": forward, "forward_backward_us": graphed_us(lambda: both_ways(True))}


def ours(layer: Layer) -> dict[str, Any]:
    """Measure the direct exchange, on every rank."""
    given = make_inputs(layer, "uniform", 0, my_gpu())
    dispatcher = layer.dispatcher("direct")
    inputs = given.tokens_TD, given.probs_TE

    def both_ways(backward: bool) -> Dispatched:
        sent = dispatcher.dispatch(*inputs, given.map_TE)
        probs_N = sent.expert_input.probs_N
        out_TD = dispatcher.combine(sent.expert_input.rows_ND, sent)
        if backward:
            grads = given.grad_TD, torch.ones_like(probs_N)
            torch.autograd.grad((out_TD, probs_N), inputs, grads)
        return sent

    num_sent = int(both_ways(True).plan.kept_E.sum())
    return measured(both_ways) | {"sent": num_sent, "asked_for": int(given.map_TE.sum())}


def peer(layer: Layer, checkout: str) -> dict[str, Any]:
    """Measure MinimalAsyncEP, on every rank, after a check of its result for identity experts."""
    device, size = my_gpu(), dist.get_world_size()
    api = _minimal_async_ep(checkout)
    given = make_inputs(layer, "uniform", 0, device)
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

    def both_ways(backward: bool) -> torch.Tensor:
        rows, *maps, e_to_t, t_to_e, _ = api.dispatch_op(
            given.tokens_TD, expert_of_TK, counts_E, received, size
        )
        scores_N = scores_TK.view(-1)
        out_TD, _ = api.combine_op(rows, *maps, t_to_e, e_to_t, scores_N, layer.tokens, layer.top_k)
        if backward:
            torch.autograd.grad(out_TD, inputs, given.grad_TD)
        return out_TD

    with torch.no_grad():  # A live autograd graph would tie the capture to this stream.
        wanted_TD = given.tokens_TD.double() * scores_TK.double().sum(1, keepdim=True)
        error = (both_ways(False).double() - wanted_TD).abs().max() / wanted_TD.abs().max()
    assert error < 2**-7, f"MinimalAsyncEP's result differs by {error:.3g} of the largest value"
    return measured(both_ways) | {"sent": int(counts_E.sum()), "asked_for": int(counts_E.sum())}


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
        cases: list[tuple[dict[str, Any], Callable[..., Any], tuple[Any, ...]]] = [
            ({"contender": "torchtitan-minimal-async-ep"}, peer, (layer, arguments.torchtitan))
        ]
        for factor in FACTORS:
            shown = None if factor == NO_DROP else factor  # JSON has no infinity.
            row = {"contender": "ours", "variant": "direct", "capacity_factor": shown}
            cases.append((row, ours, (dataclasses.replace(layer, factor=factor),)))
        # MinimalAsyncEP has one buffer per process, of one shape.
        with WorkerPool(size, backend="nccl") as pool:
            for row, fn, args in cases:
                row = {"measure": "exchange beside a peer", "model": model, "ep": size, **row}
                rows.add(run_part(pool, row | {"tokens": _TOKENS}, fn, args))
    return rows.exit_code()


if __name__ == "__main__":
    sys.exit(main())
