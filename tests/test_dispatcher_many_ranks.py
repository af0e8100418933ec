"""64 expert-parallel ranks as threads of one process, with a real all-to-all between them.

Ranks of whole jobs start the same collectives in every situation. `python -m tests.hosts` does it
with 64 and 256 ranks and 200 steps.
"""

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
from tests.support.collectives import recorded
from tests.support.grids import Grid, poisoned_memory
from tests.support.many_ranks import Alone, Steps, World, train
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
    config = config_of("padded", RANKS)
    batch = make_batch(config, routing)
    with poisoned_memory():
        results = run_on_threads(RANKS, one_step, config, batch)
    assert_is_reference(config, batch, results)


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
    groups = ProcessGroupCollection(ep=group, tp_ep=group, **{name: Alone() for name in alone})
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
    wanted = "none" if group.size() == 1 else "alltoall"
    assert layer.token_dispatcher.chosen["exchange"] == wanted
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
        config = config_of("padded", RANKS)
        dispatcher = PaddedDispatcher(config, group=dist.group.WORLD)
        map_TE = torch.ones(num_tokens, config.num_experts, dtype=torch.bool)
        dispatcher.dispatch(torch.ones(num_tokens, 2), map_TE.float(), map_TE)

    with pytest.raises(RuntimeError) as error:
        run_on_threads(RANKS, work)
    assert "T is 5 on rank 0" in str(error.value.__cause__)
    assert "6 on rank 63" in str(error.value.__cause__)


def test_all_ranks_of_a_job_start_the_same_collectives():
    world = World(name="all", ep=4, etp=2, pp=2, vpp=2)
    records, steps = train(world, seed=1, num_steps=4)
    assert steps == Steps(made=4, trained=3, repeated=1)
    assert records.differing() == []
    assert [records.differing_orders(stage) for stage in world.stages()] == [[], []]
    started = {(name, len(group)) for name, group, _ in records.of_rank[0]}
    assert started >= {("all_to_all_single", 4), ("all_gather_single", 2), ("allreduce", 16)}
    assert ("reduce_scatter_single", 2) in started


def _one_differs(how: str) -> None:
    dist.all_reduce(torch.zeros(2))
    if dist.get_rank() < 2 or how == "size":
        dist.all_reduce(torch.zeros(2 + dist.get_rank() // 2))
    elif how == "collective":
        dist.barrier()


@pytest.mark.parametrize(
    ("how", "started", "error"),
    [
        ("size", "[('allreduce', (0, 1, 2), ((torch.float32, torch.Size([3])),))]", "equal size"),
        (
            "collective",
            "[('barrier', (0, 1, 2), ())]",
            "rank 0 started allreduce, ranks [2] barrier",
        ),
        ("nothing", "[]", "no rank is left that could join those that wait: ['[0, 1] in allreduce"),
    ],
)
def test_a_rank_that_starts_another_collective_is_found(how, started, error):
    with recorded(3) as records, pytest.raises(RuntimeError) as raised:
        run_on_threads(3, _one_differs, how)
    assert error in str(raised.value.__cause__)
    line = records.differing()[-1]
    assert line.startswith(f"collective 1 in group of 3: rank 2 started {started}, rank 0 [('allre")
