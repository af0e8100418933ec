"""Text generation drops nothing, and ranks may have other numbers of tokens.

That Megatron's static engine generates as with stock layers is in the table of `tests.gpu.table`.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer import cuda_graphs
from torch import Tensor

from padded_dispatch.config import FIT, NO_DROP
from padded_dispatch.megatron import PaddedOptions
from padded_dispatch.megatron.compat import iteration_graph
from tests.support import tiny
from tests.support.parity import megatron


def _hidden(num_tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, 1, tiny.HIDDEN, generator=generator)


def _layer(options: PaddedOptions, **settings: Any) -> Any:
    made = tiny.padded_layer(options, moe_expert_capacity_factor=0.5, **settings)
    with torch.no_grad():
        made.router.weight[0] += 3 * made.router.weight[1]  # Expert 0 is busy.
    return made.eval()


def _mismatch(training: bool, lengths: tuple[int, int]) -> str:
    with megatron("cpu", expert_model_parallel_size=2):
        made = _layer(PaddedOptions()).train(training)
        try:
            made(_hidden(lengths[dist.get_rank()], 0))
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("training", "lengths", "line"),
    [
        (True, (4, 5), "T is 4 on rank 0, 5 on rank 1"),
        (False, (0, 5), "T is 0 on rank 0, any but 0 on rank 1"),
    ],
    ids=["training", "a rank without tokens"],
)
def test_ranks_that_cannot_go_on_raise_alike(pool2, training, lengths, line):
    first, second = pool2.run(_mismatch, training, lengths)
    assert first == second
    assert line in first


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("fields", [{}, iteration_graph()], ids=["no graph", "full iterations"])
def test_factors_in_text_generation(monkeypatch, fields):
    """In torch's inference mode, as in Megatron's engines; C = T where a pass is captured."""
    factors = {}
    for option in (None, FIT, 2.0):
        configs = _layer(PaddedOptions(eval_factor=option), **fields).token_dispatcher.configs
        eager = []
        for flag in (False, True):
            monkeypatch.setattr(cuda_graphs, "_IS_GRAPH_WARMUP", flag)
            with torch.inference_mode():
                eager.append(configs.now.capacity_factor)
        factors[option] = eager
    assert factors == {None: [FIT, NO_DROP], FIT: [FIT, NO_DROP], 2.0: [2.0, 2.0]}
