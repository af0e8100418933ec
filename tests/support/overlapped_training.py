"""Train a GPT twice in lockstep: with Megatron's combined schedule, and with its plain one.

`overlap_moe_expert_parallel_comm` runs the forward pass of a microbatch beside the backward pass of
the one before, in pieces of layers, and frees what goes into a piece. Losses, gradients,
parameters, buffers, logged sums and counts are compared bit by bit after each step.

With pipeline stages the combined schedule runs forward passes in another order, so batches have a
generator of their own.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import utils as schedule_streams
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor

from padded_dispatch.megatron.options import Experts
from padded_dispatch.utils.patches import Patches
from tests.support.graph_training import Findings
from tests.support.retried_training import RetriedCase, Training, differing_names, world


@dataclass(frozen=True, kw_only=True)
class OverlapCase(RetriedCase):
    """A model, and what its schedule overlaps.

    `experts`: the option. `delay_wgrad`: gradients of weights are computed after those of rows.
    `shared_ffn`: width of shared experts, if there are any. `padded`: the last tokens are padding.
    """

    ranks: int = 2
    ep: int = 2
    microbatches: int = 3
    dropout: float = 0.0
    factor: float = 1.25
    steps: int = 2
    experts: Experts = "module"
    delay_wgrad: bool = False
    shared_ffn: int | None = None
    padded: bool = False

    @property
    def in_bf16(self) -> bool:
        """True: Megatron's combined schedule needs it."""
        return True


class OverlapTraining(Training):
    """A training whose batches follow from the number of the step."""

    def step(self, number: int) -> dict[str, Tensor]:
        """Run step `number`; see `Training`."""
        self._number = number
        return super().step(number)

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Return an iterator over the step's microbatches, the same for all chunks."""
        case, generator = self.case, torch.Generator().manual_seed(self._number)
        while True:
            ids = torch.randint(case.vocab, (case.batch, case.seq + 1), generator=generator)
            mask = torch.arange(case.seq).expand(case.batch, -1) >= case.seq - 3
            padding = {"padding_mask": mask.to(case.device)} if case.padded else {}
            yield {"ids": ids.to(case.device), **padding}


def overlapped_equals_plain(case: OverlapCase, **options: Any) -> Findings:
    """Compare the two trainings. Runs on all `case.ranks` ranks of the default group.

    Args:
        case: the model.
        options: further options of the padded dispatcher, of both.
    """
    # Megatron keeps the streams of its first combined schedule.
    schedule_streams._COMP_STREAM = schedule_streams._COMM_STREAM = None
    shared = {"moe_shared_expert_intermediate_size": case.shared_ffn, **case.fields}
    overlap = {
        "overlap_moe_expert_parallel_comm": True,
        "delay_wgrad_compute": case.delay_wgrad,
    }
    options = {"experts": case.experts, **options}
    with world(case), ExitStack() as stack:
        if not hasattr(RowParallelLinear, "backward_dw"):  # 0.16 calls it, and does not have it.
            patches = stack.enter_context(Patches())
            patches.set(RowParallelLinear, "backward_dw", lambda linear: None)
        plain = OverlapTraining(dataclasses.replace(case, fields=shared), **options)
        overlapped = OverlapTraining(dataclasses.replace(case, fields=shared | overlap), **options)
        differing: dict[str, int] = {}
        for number in range(case.steps):
            wanted, given = plain.step(number), overlapped.step(number)
            for name in differing_names(wanted, given):
                differing[name] = differing.get(name, 0) + 1
        facts = {"tensors_per_step": len(wanted), "loss": plain.losses}
        return Findings(differing=differing, facts=facts)
