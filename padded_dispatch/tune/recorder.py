"""Recording a trace while a model trains, also under CUDA graphs.

    for number, layer in ...:                   # before anything is captured
        buffers[number] = RoutingBuffer(...)
        layer.router.selector.observers.append(buffers[number])
    recorder = TraceRecorder(path, buffers, ...)
    for step in ...:
        train()
        recorder.step(step)

Every pass of a layer leaves its choices in memory of fixed size on the device: that is captured
with the router and costs a few small kernels per pass, recorded or not. After every n-th step they
are copied to pinned memory, in stream order, so before the next step changes them; the host takes
them one step later, when they have arrived long since. What a recording may grow to is known before
it starts: where it would grow beyond, n is raised.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from padded_dispatch.ops.select import Selection
from padded_dispatch.tune.trace import Trace, TraceWriter, record_bytes


class RoutingBuffer:
    """What one layer's router asked for in its last P passes, in order: a `RoutingObserver`.

    Args:
        num_passes: passes of a step (P).
        num_tokens: tokens of a pass on this rank (T).
        top_k: most experts of a token (K).
        device: of the layer.
    """

    def __init__(
        self, *, num_passes: int, num_tokens: int, top_k: int, device: torch.device | str | int
    ) -> None:
        shape = num_passes, num_tokens, top_k
        self.ids_PTK = torch.full(shape, -1, dtype=torch.int16, device=device)
        self.probs_PTK = torch.zeros(shape, dtype=torch.float32, device=device)

    @torch.no_grad()
    def observe(
        self, asked_TE: Tensor, probs_TE: Tensor, selection: Selection, capacity: int
    ) -> None:
        """Keep one pass as the last, and forget the first: see `RoutingObserver`.

        Raises:
            ValueError: probabilities that fp32 cannot hold, or another number of tokens.
        """
        _, num_tokens, top_k = self.ids_PTK.shape
        if probs_TE.dtype == torch.float64:
            raise ValueError(
                "probs_TE.dtype=float64 is not possible: a trace has float32; set "
                "moe_router_dtype='fp32'"
            )
        if asked_TE.shape[0] != num_tokens:
            raise ValueError(
                f"num_tokens={asked_TE.shape[0]} is not possible: the buffer was made for "
                f"{num_tokens}; record passes of one size"
            )
        ids_TK, probs_TK = choices(asked_TE, probs_TE, top_k)
        # No place to count on: what a capture or a warm-up left here is gone after one step.
        self.ids_PTK.copy_(torch.cat((self.ids_PTK[1:], ids_TK[None])))
        self.probs_PTK.copy_(torch.cat((self.probs_PTK[1:], probs_TK[None])))

    def tensors(self) -> tuple[Tensor, Tensor]:
        """All that a reader copies."""
        return self.ids_PTK, self.probs_PTK


def choices(asked_TE: Tensor, probs_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """A routing map as a trace has it: ids int16 and probabilities fp32, [T, K] each.

    Static, and nothing is read on the host: the k-th expert of a token is the first at which its
    running count reaches k + 1, found by binary search as in `padded_dispatch.ops.plan`.

    Example: `asked = [[0, 1, 1]]`, `probs = [[.1, .2, .7]]`, K = 3 give `[[1, 2, -1]]` and
    `[[.2, .7, 0]]`.
    """
    num_tokens, num_experts = asked_TE.shape
    running_TE = asked_TE.cumsum(1, dtype=torch.int32)
    nth_TK = torch.arange(1, top_k + 1, device=asked_TE.device, dtype=torch.int32)
    expert_TK = torch.searchsorted(running_TE, nth_TK.expand(num_tokens, -1).contiguous())
    valid_TK = expert_TK < num_experts
    ids_TK = torch.where(valid_TK, expert_TK, -1).to(torch.int16)
    here_TK = expert_TK.clamp(max=num_experts - 1)
    probs_TK = torch.where(valid_TK, probs_TE.gather(1, here_TK).float(), 0)
    return ids_TK, probs_TK


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What is recorded, and how much of it may be.

    `num_experts` (E), `num_ranks`: sources that share an expert-parallel group, `rank`: this one
    among all sources, see `Trace`. `every`: steps between two records of a layer. `num_steps`:
    until the end. `max_bytes`: of the file.
    """

    num_experts: int
    num_ranks: int
    rank: int
    every: int
    num_steps: int
    max_bytes: int


class TraceRecorder:
    """Writes what this rank's layers asked for to one file.

    Args:
        path: a file that is there is replaced.
        buffers: of the layers, by number. All have one shape.
        recording: see there.

    Attributes:
        every: steps between two records of a layer: a multiple of what was asked for, and more
            than that where the file would become too large.

    Raises:
        ValueError: not even one step fits into `max_bytes`.
    """

    def __init__(
        self, path: Path, buffers: Mapping[int, RoutingBuffer], recording: Recording
    ) -> None:
        num_passes, num_tokens, top_k = next(iter(buffers.values())).ids_PTK.shape
        per_step = len(buffers) * num_passes * record_bytes(num_tokens, top_k)
        most_steps = recording.max_bytes // per_step
        if most_steps < 1:
            raise ValueError(
                f"max_bytes={recording.max_bytes} is not possible: one step has {per_step}; raise "
                "it"
            )
        self.every = recording.every * max(
            1, -(-(recording.num_steps // recording.every) // most_steps)
        )
        self._recording = recording
        self._buffers = buffers
        self._writer = TraceWriter(path)
        # On a CPU, a copy is a copy at once.
        pinned = next(iter(buffers.values())).ids_PTK.is_cuda
        self._copies = {
            number: [torch.empty_like(t, device="cpu", pin_memory=pinned) for t in b.tensors()]
            for number, b in buffers.items()
        }
        self._arrived = torch.cuda.Event() if pinned else None
        self._pending: int | None = None  # the step that the copies are of

    def step(self, number: int) -> None:
        """To be called after each training step, on its stream."""
        self._take()
        if number % self.every == 0:
            for layer, buffer in self._buffers.items():
                for copy, tensor in zip(self._copies[layer], buffer.tensors(), strict=True):
                    copy.copy_(tensor, non_blocking=True)
            if self._arrived is not None:
                self._arrived.record()
            self._pending = number

    def close(self) -> None:
        """Write what is pending; to be called once, after the last step."""
        self._take()
        self._writer.close()

    def _take(self) -> None:
        if self._pending is None:
            return
        if self._arrived is not None:
            self._arrived.synchronize()
        for layer, (ids_PTK, probs_PTK) in self._copies.items():
            num_passes = len(ids_PTK)
            self._writer.append(
                Trace(
                    num_experts=self._recording.num_experts,
                    top_k=ids_PTK.shape[2],
                    num_ranks=self._recording.num_ranks,
                    steps=np.full(num_passes, self._pending, np.int64),
                    layers=np.full(num_passes, layer, np.int32),
                    ranks=np.full(num_passes, self._recording.rank, np.int32),
                    ids_NTK=ids_PTK.numpy(),
                    probs_NTK=probs_PTK.numpy(),
                )
            )
        self._pending = None
