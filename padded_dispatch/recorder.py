"""Record a trace while a model trains, also under CUDA graphs.

    for number, layer in ...:                   # before anything is captured
        buffers[number] = RoutingBuffer(...)
        layer.token_dispatcher.observers.append(buffers[number])
    recorder = TraceRecorder(path, run, buffers, ...)
    for step in ...:
        train()
        recorder.step(step)

Every forward pass of a layer writes its choices to a buffer of fixed size on the device; a CUDA
graph that captures the router captures these writes, too. After every n-th step the recorder copies
the buffers to pinned memory, in stream order, so before the next step changes them. One step later
the host writes the copies to the file. The size of the file is known before the recording starts;
`steps_apart` raises n if it would be too large.

Letters: M micro-batches of a step; T tokens; K experts per token; E experts.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from padded_dispatch.config import require
from padded_dispatch.routing import Selection, choice_probs, make_plan
from padded_dispatch.trace import HEADER_BYTES, Trace, TracedRun, append, record_bytes
from padded_dispatch.utils.logs import log_once

MAX_BYTES = 2**30  # of a rank's file; fewer steps are traced to fit


class RoutingBuffer:
    """The choices of one layer's router in its last M micro-batches, in order: a `RoutingObserver`.

    Args:
        run: its `num_tokens` is T of a micro-batch on this rank.
        num_microbatches: the most micro-batches of a step (M).
        device: device of the layer.

    Attributes:
        ids_MTK, probs_MTK: the choices, as in `Trace`.
        num_new: int64, micro-batches since the last step, which the recorder sets to zero.
    """

    def __init__(
        self, run: TracedRun, *, num_microbatches: int, device: torch.device | str | int
    ) -> None:
        shape = num_microbatches, run.num_tokens, run.top_k
        self.ids_MTK = torch.full(shape, -1, dtype=torch.int16, device=device)
        self.probs_MTK = torch.zeros(shape, dtype=torch.float32, device=device)
        self.num_new = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def observe(self, asked_TE: Tensor, probs_TE: Tensor, selection: Selection) -> None:
        """Append one micro-batch and discard the oldest: see `RoutingObserver`.

        A micro-batch with another T is recorded as padding tokens, since the factor that it needs
        is relative to its own T.
        """
        dtype, rule = probs_TE.dtype, "be at most float32, which a trace holds"
        fix = "set moe_router_dtype='fp32'"
        require(dtype != torch.float64, "probs_TE.dtype", dtype, rule, fix)
        num_tokens = self.ids_MTK.shape[1]
        if len(asked_TE) != num_tokens:
            line = f"the trace leaves out micro-batches that do not have {num_tokens} tokens"
            log_once(line, logging.WARNING)
            asked_TE, probs_TE = (t.new_zeros(num_tokens, t.shape[1]) for t in (asked_TE, probs_TE))
        expert_TK = make_plan(asked_TE, top_k=self.ids_MTK.shape[2]).expert_TK
        probs_TK = choice_probs(probs_TE, expert_TK)
        # Shift, since a capture or a warm-up would leave an index at the wrong value. The choices
        # that these passes append are shifted out within one step.
        self.ids_MTK.copy_(torch.cat((self.ids_MTK[1:], expert_TK[None].short())))
        self.probs_MTK.copy_(torch.cat((self.probs_MTK[1:], probs_TK[None])))
        self.num_new += 1

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the buffers that a recorder copies."""
        return self.ids_MTK, self.probs_MTK, self.num_new


def steps_apart(
    every: int, *, steps_done: int, num_steps: int, num_records: int, num_tokens: int, top_k: int
) -> int:
    """Return the n for which recording every n-th step gives a file of at most `MAX_BYTES`.

    Args:
        every: the least n; the result is a multiple of it.
        steps_done: steps before the recording.
        num_steps: steps at the end of the run.
        num_records: records of one rank in a step; equal on all ranks, so that n is, too.
        num_tokens: tokens of a record (T).
        top_k: most experts of a token (K).

    Raises:
        ValueError: not even one step fits.
    """
    step_bytes = num_records * record_bytes(num_tokens, top_k) + HEADER_BYTES
    rule = f"have at most {MAX_BYTES} bytes for each step and rank"
    max_steps = MAX_BYTES // step_bytes
    require(max_steps >= 1, "trace", step_bytes, rule, "set trace=None")
    return next(n for n in count(every, every) if num_steps // n - steps_done // n <= max_steps)


class TraceRecorder:
    """A recorder that writes the choices of this rank's layers to one file.

    Args:
        path: path of the file, which the first recorded step creates; an existing one is replaced.
        run: sizes and settings that the file holds.
        buffers: the buffer of each layer, by the layer's number. All have one shape.
        rank: number of this rank among all sources.
        every: steps whose number is a multiple of this are recorded; see `steps_apart`.

    Attributes:
        ended: whether it records no more.
    """

    def __init__(
        self,
        path: Path,
        run: TracedRun,
        buffers: Mapping[int, RoutingBuffer],
        *,
        rank: int,
        every: int,
    ) -> None:
        self.every = every
        self.path, self._run, self._rank = path, run, rank
        self._buffers = buffers
        self._file: BinaryIO | None = None
        self.ended = False
        # Copies on a CPU are synchronous and need neither pinned memory nor an event.
        pinned = next(iter(buffers.values())).ids_MTK.is_cuda
        self._copies = [
            [torch.empty_like(t, device="cpu", pin_memory=pinned) for t in buffer.tensors()]
            for buffer in buffers.values()
        ]
        self._arrived = torch.cuda.Event() if pinned else None
        self._pending: int | None = None  # the step in the copies, if it is not yet in the file

    def step(self, number: int) -> None:
        """Copy the buffers if the step is recorded; call it after each step, on its stream."""
        self._write_pending()
        if number % self.every == 0 and not self.ended:
            for copies, buffer in zip(self._copies, self._buffers.values(), strict=True):
                for copy, tensor in zip(copies, buffer.tensors(), strict=True):
                    copy.copy_(tensor, non_blocking=True)
            if self._arrived is not None:
                self._arrived.record()
            self._pending = number
        counts = [buffer.num_new for buffer in self._buffers.values()]
        torch._foreach_zero_(counts)  # pyright: ignore[reportPrivateImportUsage]

    def close(self) -> None:
        """Write the pending step, close the file, and record no more."""
        self._write_pending()
        self.ended = True
        if self._file is not None:
            self._file.close()

    def _write_pending(self) -> None:
        """Write the pending step; if that fails, as on a full disk, end the trace and not the run.

        Nothing may follow a part of a step in a file: see `padded_dispatch.trace`.
        """
        if self._pending is None:
            return
        number, self._pending = self._pending, None
        if self._arrived is not None:
            self._arrived.synchronize()
        # If a step had fewer than M micro-batches, the others in the buffers are of earlier steps.
        nums = [min(len(ids_MTK), int(num_new)) for ids_MTK, _, num_new in self._copies]
        if not any(nums):
            return
        of_step = [
            [buffer[len(buffer) - num :] for buffer in buffers]
            for (*buffers, _), num in zip(self._copies, nums, strict=True)
        ]
        ids_NTK, probs_NTK = (torch.cat(parts).numpy() for parts in zip(*of_step, strict=True))
        wrong_NT = ~((probs_NTK >= 0) & (probs_NTK < np.inf)).all(-1)
        if wrong_NT.any():  # As of a router whose input is NaN, in a step that the loop skips.
            line = "the trace leaves out tokens whose probabilities are not finite, or negative"
            log_once(line, logging.WARNING)
            ids_NTK[wrong_NT], probs_NTK[wrong_NT] = -1, 0
        num_records = len(ids_NTK)
        layers = np.repeat(np.array([*self._buffers], np.int32), nums)
        step = Trace(
            run=self._run,
            steps=np.full(num_records, number, np.int64),
            layers=layers,
            ranks=np.full(num_records, self._rank, np.int32),
            ids_NTK=ids_NTK,
            probs_NTK=probs_NTK,
        )
        try:
            if self._file is None:
                self._file = self.path.open("wb")
            append(step, self._file)
        except OSError as error:
            with suppress(OSError):
                self.close()
            line = f"the trace ends before step {number}: {self.path} cannot be written ({error})"
            log_once(line, logging.WARNING)
