"""A step that dropped rows runs again, and nothing shows that it ran before."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.support.retried_training import RetriedCase, retried_equals_never_dropping

CASES = [
    RetriedCase(name="one microbatch"),
    RetriedCase(name="three microbatches", microbatches=3),
    RetriedCase(name="EP2", ranks=2, ep=2, microbatches=3, policy="random", expert_bias=True),
    RetriedCase(name="PP2", ranks=2, pp=2, microbatches=3),
    RetriedCase(name="PP2/VPP2", ranks=2, pp=2, vpp=2, num_layers=4, microbatches=4),
    RetriedCase(name="overlapped reduction", ranks=2, microbatches=3, overlap_grad_reduce=True),
    RetriedCase(
        name="overlapped gathering",
        ranks=2,
        microbatches=3,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    ),
    RetriedCase(name="recompute", recompute=True),
    RetriedCase(name="graphs of layers", ranks=2, ep=2, graph="layer", dropout=0.0),
]


@pytest.fixture
def alone() -> Iterator[None]:
    """Provide a default group of this process alone, without Megatron's groups."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bits_are_those_of_a_training_that_never_drops(on_ranks, alone, case):
    found = on_ranks(case.ranks, retried_equals_never_dropping, case)
    for findings in found:
        assert findings.failures() == []
        assert (findings.facts["steps"], findings.facts["retried"]) == (case.steps, case.steps)
