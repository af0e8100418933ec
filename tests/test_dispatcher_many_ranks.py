"""64 expert-parallel ranks as threads of one process, with a real all-to-all between them."""

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from padded_dispatch import DispatchConfig, PaddedDispatcher
from padded_dispatch.megatron import padded_spec
from padded_dispatch.megatron.cpu import _CudaMeansCpu, megatron_on_cpu
from tests import test_dispatcher
from tests.support import tiny
from tests.support.grids import Grid, poisoned_memory
from tests.support.threads import run_on_threads
from tests.test_dispatcher import Batch, OneRank, _Step, assert_is_reference, config_of, make_batch

RANKS = 64


def one_step(config: DispatchConfig, batch: Batch) -> OneRank:
    dispatcher, step = PaddedDispatcher(config, group=dist.group.WORLD), _Step(config, batch)
    return step.finish(dispatcher, step.dispatch(dispatcher))


def whole_world(num_ranks: int, etp_size: int) -> Grid:
    return Grid(r=dist.get_rank(), i=0, group=dist.group.WORLD, etp_group=None)


@pytest.mark.parametrize("routing", ["thin", "hot", "same", "idle", "masked"])
def test_sixty_four_ranks_are_the_reference(monkeypatch, routing):
    monkeypatch.setattr(test_dispatcher, "grid", whole_world)
    config = config_of(RANKS)
    batch = make_batch(config, routing)
    with poisoned_memory():
        results = run_on_threads(RANKS, one_step, config, batch)
    assert_is_reference(config, batch, results)


class _Alone:
    """A group of one rank, for Megatron, which reads only the size and rank of such groups."""

    group_name = "alone"

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class LayerRun:
    """Output and gradients of a rank; gradients of its experts by expert id."""

    out_TD: Tensor
    grad_tokens_TD: Tensor
    grad_experts: dict[int, list[Tensor]]


def layer_config(num_ranks: int) -> TransformerConfig:
    """Return a config in which nothing rounds: whole numbers, ReLU, two equal scores per token."""
    return tiny.config(
        num_moe_experts=RANKS,
        hidden_size=RANKS,
        moe_ffn_hidden_size=3,
        gated_linear_unit=False,
        activation_func=F.relu,
        expert_model_parallel_size=num_ranks,
        moe_router_dtype="fp64",
        params_dtype=torch.float64,
    )


def layer_run(tokens_RTD: Tensor) -> LayerRun:
    """Run a step of Megatron's MoE layer; the tokens are split over the ranks."""
    group: Any = dist.group.WORLD
    alone = ("tp", "cp", "expt_tp", "expt_dp", "tp_cp", "tp_dp_cp", "dp", "dp_cp")
    groups = ProcessGroupCollection(ep=group, tp_ep=group, **{name: _Alone() for name in alone})
    spec = padded_spec(tiny.layer_spec()).submodules.mlp
    make = spec if callable(spec) else functools.partial(build_module, spec)
    with _CudaMeansCpu():
        layer = make(config=layer_config(group.size()), pg_collection=groups)
        layer.set_layer_number(1)
        layer.double().train()
        _set_weights(layer)
        mine_RTD = tokens_RTD.chunk(group.size())[group.rank()]
        tokens_TD = mine_RTD.flatten(0, 1).clone().requires_grad_()
        out_TD = layer(tokens_TD[:, None])[0][:, 0]
        out_TD.backward(tokens_TD.detach().roll(1, -1))
    assert tokens_TD.grad is not None
    return LayerRun(
        out_TD=out_TD.detach(),
        grad_tokens_TD=tokens_TD.grad,
        grad_experts={
            expert: [parameter.grad for parameter in layer.experts.local_experts[i].parameters()]
            for i, expert in enumerate(layer.local_expert_indices)
        },
    )


def _set_weights(layer: Any) -> None:
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(RANKS))
        for i, expert in enumerate(layer.local_expert_indices):
            draw = torch.Generator().manual_seed(expert)
            for parameter in layer.experts.local_experts[i].parameters():
                parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=draw))


def test_a_megatron_layer_on_sixty_four_ranks_equals_one_rank():
    draw = torch.Generator().manual_seed(3)
    tokens_RTD = torch.randint(-3, 4, (RANKS, 5, RANKS), generator=draw).double()
    chosen_RTK = torch.rand(RANKS, 5, RANKS, generator=draw).topk(2, dim=-1).indices
    chosen_RTK[:, :2] = torch.tensor([7, 11])  # two busy experts
    tokens_RTD.scatter_(2, chosen_RTK, 8.0)
    with megatron_on_cpu():
        (alone,) = run_on_threads(1, layer_run, tokens_RTD)
        ranks = run_on_threads(RANKS, layer_run, tokens_RTD)
    assert torch.equal(torch.cat([run.out_TD for run in ranks]), alone.out_TD)
    assert torch.equal(torch.cat([run.grad_tokens_TD for run in ranks]), alone.grad_tokens_TD)
    for run in ranks:
        for expert, grads in run.grad_experts.items():
            for grad, wanted in zip(grads, alone.grad_experts[expert], strict=True):
                assert torch.equal(grad, wanted), expert
    assert sum(len(run.grad_experts) for run in ranks) == RANKS
    assert all(grad.any() for grad in alone.grad_experts[7])


def test_an_error_names_the_rank_with_another_shape():
    def work() -> None:
        num_tokens = 5 + (dist.get_rank() == 63)
        config = config_of(RANKS)
        dispatcher = PaddedDispatcher(config, group=dist.group.WORLD)
        map_TE = torch.ones(num_tokens, config.num_experts, dtype=torch.bool)
        dispatcher.dispatch(torch.ones(num_tokens, 2), map_TE.float(), map_TE)

    with pytest.raises(RuntimeError) as error:
        run_on_threads(RANKS, work)
    assert "T is 5 on rank 0" in str(error.value.__cause__)
    assert "6 on rank 63" in str(error.value.__cause__)
