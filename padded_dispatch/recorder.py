"""Record a trace while a model trains, also under CUDA graphs.

    for number, layer in ...:                   # before anything is captured
        buffers[number] = RoutingBuffer(...)
        layer.router.selector.observers.append(buffers[number])
    recorder = TraceRecorder(path, buffers, ...)
    for step in ...:
        train()
        recorder.step(step)

Every forward pass of a layer writes the rows that it asks of each expert to memory of fixed size on
the device; the writes are captured with the router. After a step they are copied to pinned memory,
in stream order and so before the next step changes them. The host takes them one step later. About
a thousand steps tell what more would: of a longer run, only each n-th is recorded.

Letters: M micro-batches of a step; Y layers; E experts.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from padded_dispatch.config import CapacityPool
from padded_dispatch.routing.select import Selection
from padded_dispatch.trace import record_dtype

_MOST_STEPS = 1000


class RoutingBuffer:
    """The rows that one layer's router asked for in its last M micro-batches, in order.

    It is a `RoutingObserver`.

    Args:
        num_microbatches: of a step (M).
        num_experts: experts in all (E).
        device: of the layer.
    """

    def __init__(
        self, *, num_microbatches: int, num_experts: int, device: torch.device | str | int
    ) -> None:
        shape = num_microbatches, num_experts
        self.rows_ME = torch.zeros(shape, dtype=torch.int32, device=device)

    @torch.no_grad()
    def observe(
        self, asked_TE: Tensor, probs_TE: Tensor, selection: Selection, kept_here: bool
    ) -> None:
        """Append one micro-batch and discard the first: see `RoutingObserver`."""
        rows_E = asked_TE.sum(0, dtype=torch.int32)
        # Shifting needs no index, which a capture or a warm-up would leave at the wrong value. The
        # counts that these leave are shifted out within one step.
        self.rows_ME.copy_(torch.cat((self.rows_ME[1:], rows_E[None])))


class TraceRecorder:
    """A recorder that writes what this rank's layers asked for to one file.

    Args:
        path: of the file, which the first recorded step creates.
        buffers: of the layers, by number. All have one shape.
        num_tokens: of a source in a micro-batch (T).
        top_k: most experts of a token (K).
        num_ranks: sources that share an expert-parallel group.
        rank: this one among all sources, see `record_dtype`.
        capacity_pool: of the run.
        num_steps: at the end of the run.
    """

    def __init__(
        self,
        path: Path,
        buffers: Mapping[int, RoutingBuffer],
        *,
        num_tokens: int,
        top_k: int,
        num_ranks: int,
        rank: int,
        capacity_pool: CapacityPool,
        num_steps: int,
    ) -> None:
        self._path, self._buffers = path, list(buffers.values())
        self._every = max(1, num_steps // _MOST_STEPS)
        num_microbatches, num_experts = self._buffers[0].rows_ME.shape
        self._records_YM = np.zeros((len(buffers), num_microbatches), record_dtype(num_experts))
        self._records_YM["layer"] = np.array([*buffers])[:, None]
        self._records_YM["rank"], self._records_YM["num_ranks"] = rank, num_ranks
        self._records_YM["num_tokens"], self._records_YM["top_k"] = num_tokens, top_k
        self._records_YM["pool"] = capacity_pool
        # Copies on a CPU are synchronous and need neither pinned memory nor an event.
        pinned = self._buffers[0].rows_ME.is_cuda
        shape = len(buffers), num_microbatches, num_experts
        self._rows_YME = torch.empty(shape, dtype=torch.int32, pin_memory=pinned)
        self._arrived = torch.cuda.Event() if pinned else None
        self._pending: int | None = None  # the step of the copy

    def step(self, number: int) -> None:
        """Record a training step; call it after each step, on its stream."""
        self.close()
        if number % self._every == 0:
            for rows_ME, buffer in zip(self._rows_YME, self._buffers, strict=True):
                rows_ME.copy_(buffer.rows_ME, non_blocking=True)
            if self._arrived is not None:
                self._arrived.record()
            self._pending = number

    def close(self) -> None:
        """Write the pending step, if any; call it after the last step."""
        if self._pending is None:
            return
        if self._arrived is not None:
            self._arrived.synchronize()
        self._records_YM["step"], self._pending = self._pending, None
        self._records_YM["counts"] = self._rows_YME.numpy()
        with self._path.open("ab") as file:
            np.save(file, self._records_YM, allow_pickle=False)
