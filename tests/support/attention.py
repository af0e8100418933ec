"""Attention in a plain CUDA graph: where a graph of a step refuses it, its gradients are wrong."""

import itertools
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from padded_dispatch.megatron import guard


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Transformer Engine's attention with a causal mask, for each of these sequence lengths."""

    lengths: tuple[int, ...] = (64, 96, 128, 192)
    batch: int = 2
    heads: int = 4
    groups: int = 2
    size: int = 32


def refusal_is_exact(case: Attention) -> list[str]:
    """Return the lengths that the guard refuses although replays are right, or the reverse.

    A replay may end in a fault of the GPU, so each length has a process of its own.
    """
    with ProcessPoolExecutor(
        len(case.lengths), mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        return [found for found in pool.map(_broken, itertools.repeat(case), case.lengths) if found]


def _broken(case: Attention, length: int) -> str | None:
    """Say how the guard's refusal and replays of this length disagree, if they do."""
    import transformer_engine.pytorch as engine  # No CPU has it.

    model: Any = nn.Sequential(
        engine.DotProductAttention(
            num_attention_heads=case.heads,
            kv_channels=case.size,
            num_gqa_groups=case.groups,
            attn_mask_type="causal",
            attention_dropout=0.0,
        )
    )
    model.config = SimpleNamespace(context_parallel_size=1)
    try:
        guard._check_attention([model], length)
        refused = False
    except ValueError:
        refused = True
    with torch.cuda.stream(torch.cuda.Stream()):
        right = _replays_as_eager(model[0], case, length)
    if refused != right:
        return None
    return f"{length} positions: refused {refused}, replays right {right}"


def _replays_as_eager(attention: nn.Module, case: Attention, length: int) -> bool:
    """Return whether the sums of all gradients of a replay are an eager run's to 1 %."""
    generator = torch.Generator("cuda").manual_seed(length)
    inputs = [
        torch.randn(
            *(length, case.batch, heads, case.size),
            device="cuda",
            dtype=torch.bfloat16,
            generator=generator,
            requires_grad=True,
        )
        for heads in (case.heads, case.groups, case.groups)
    ]

    def run() -> torch.Tensor:
        for one in inputs:
            one.grad = None
        out = attention(*inputs)
        out.backward(torch.ones_like(out))
        return torch.stack([one.grad.float().abs().sum() for one in inputs if one.grad is not None])

    for _ in range(2):
        run()
    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        found = run()
    try:
        for _ in range(3):
            graph.replay()
        return bool(torch.allclose(found, expected, rtol=0.01))
    except torch.AcceleratorError:  # It reads memory that is not its own.
        return False
