"""One rank of 64 on one GPU: kernels and memory with the slots of 64 sources.

    python -m tests.gpu.many_sources --out notebooks/results/hosts.json --commit SHA

The process group is fake, and an all-to-all hands back what it was given: the experts of this rank
compute the rows that they would get from 64 like it, and what they return goes to its own tokens.
Tokens are small whole numbers and probabilities powers of two, so that nothing rounds, and the
output and its gradients must be exact. The peak of memory must be within what `buffer_bytes`
predicts, beside the tokens, their gradients and copies that live within a stage.

`--cpu N` tries the program on the CPU with small sizes; there is no peak of memory then.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import fake_pg

from padded_dispatch import DispatchConfig, PaddedDispatcher
from padded_dispatch.exchange import agreement
from tests.support.gpu_rows import Rows, parsed, wants
from tests.support.host_copies import MODELS, Model
from tests.support.routings import routing_map

RANKS = 64


class _Alone:
    """In place of a mirror: the other ranks are not there."""

    def __init__(self, *_: Any) -> None:
        self.num_agreements = 0
        self.ranks = list(range(RANKS))

    def is_same(self, *_: Any) -> bool:
        return True


def _handed_back(received: Tensor, given: Tensor, group: Any = None) -> None:
    received.copy_(given)


@contextmanager
def one_of_many() -> Iterator[None]:
    """Be rank 0 of 64 that are not there."""
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=RANKS)
    try:
        with (
            patch.object(agreement, "mirror_of", _Alone),
            patch.object(dist, "all_to_all_single", _handed_back),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _step(
    dispatcher: PaddedDispatcher, tokens_TD: Tensor, probs_TE: Tensor, map_TE: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the rows kept of each expert that the experts see, and the output."""
    sent = dispatcher.dispatch(tokens_TD, probs_TE, map_TE)
    given = sent.expert_input
    out_ND = given.rows_ND * given.probs_N[:, None].to(given.rows_ND.dtype)
    return given.kept_SL, dispatcher.combine(out_ND, sent)


def exact(
    model: Model, num_tokens: int, *, packed: bool, device: torch.device
) -> tuple[list[str], dict[str, Any]]:
    """Return what is wrong with a step, and what was measured."""
    config = DispatchConfig(
        num_experts=model.num_experts,
        top_k=model.top_k,
        capacity_factor=1.25,
        policy="position",
        num_ranks=RANKS,
    )
    dispatcher = PaddedDispatcher(
        config, group=dist.group.WORLD, packed=packed, exchange="alltoall"
    )
    draw = torch.Generator().manual_seed(1)
    map_TE = torch.from_numpy(
        routing_map(num_tokens, model.num_experts, model.top_k, skew="lognormal")
    ).to(device)
    shape = num_tokens, model.width
    tokens_TD = torch.randint(-3, 4, shape, generator=draw).to(device, torch.bfloat16)
    tokens_TD.requires_grad_()
    powers_TE = torch.randint(-3, 0, map_TE.shape, generator=draw)
    probs_TE = (2.0**powers_TE).to(device).requires_grad_()
    grad_TD = torch.ones_like(tokens_TD)
    kept_TE = map_TE & (map_TE.cumsum(0) <= config.capacity(num_tokens))
    share_T1 = torch.where(kept_TE, probs_TE.detach(), 0).sum(1, keepdim=True)
    # Gradients of probabilities come from a product in bf16, which rounds their sums once.
    sums_T1 = tokens_TD.detach().float().sum(1, keepdim=True).bfloat16().float()
    failures = []
    for number in range(3):  # The first one compiles kernels.
        tokens_TD.grad = probs_TE.grad = None
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        kept_SL, out_TD = _step(dispatcher, tokens_TD, probs_TE, map_TE)
        out_TD.backward(grad_TD)
        wanted = {
            "output": (out_TD, (tokens_TD * share_T1).to(out_TD.dtype)),
            "gradient of tokens": (tokens_TD.grad, share_T1.expand(shape).to(out_TD.dtype)),
            "gradient of probabilities": (
                probs_TE.grad,
                torch.where(kept_TE, sums_T1, 0.0),
            ),
            "rows of each expert": (kept_SL.flatten().long(), kept_TE.sum(0)),
        }
        failures += [
            f"step {number}: {name}"
            for name, (found, right) in wanted.items()
            if not torch.equal(found, right)
        ]
    measured: dict[str, Any] = {"seconds_of_a_step": time.perf_counter() - start}
    if device.type == "cuda":
        sizes = num_tokens, model.width, 2
        buffers = config.buffer_bytes(*sizes, packed=packed)
        measured["predicted_gib"] = buffers.total / 2**30
        measured["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        # The output, both gradients, and products of rows and probabilities, forward and backward.
        rows = config.sizes(num_tokens).num_rows * model.width * 2
        beside = 4 * num_tokens * model.width * 4 + 4 * rows
        if measured["peak_gib"] > measured["predicted_gib"] + beside / 2**30:
            failures.append(f"memory: {measured}")
    return failures, measured


def main() -> int:
    """Run all cases; return exit code 1 if one failed."""
    arguments = parsed(argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]))
    device = torch.device("cpu" if arguments.cpu else "cuda")
    rows = Rows(arguments, 0 if arguments.cpu else 1, {})
    with one_of_many():
        for model in MODELS:
            if model.num_experts % RANKS:
                continue
            for packed in (True, False):
                layout = "packed" if packed else "padded"
                check = f"one rank of {RANKS} on one GPU: {layout}, {model.name}"
                if not wants(arguments, check):
                    continue
                case, num_tokens = model, 4096
                if arguments.cpu:
                    case, num_tokens = dataclasses.replace(model, width=16), 100
                failures, measured = exact(case, num_tokens, packed=packed, device=device)
                row = {"check": check, "passed": not failures, "failures": failures}
                rows.add(row | measured)
    return rows.exit_code()


if __name__ == "__main__":
    sys.exit(main())
