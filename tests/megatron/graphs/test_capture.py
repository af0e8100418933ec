"""The padded layer in Megatron's own capture and replay code, over the stand-in for CUDA graphs.

A run trains a GPT of two layers in bf16: two eager steps, a capture, two replayed steps with an
evaluation of another batch shape before each, and one eager step after the graphs are deleted. Its
losses, gradients and counts must equal those of a run without graphs in every step, bit by bit.
"""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from padded_dispatch.megatron import PaddedOptions, install, uninstall
from padded_dispatch.megatron.compat import layer_graphs
from padded_dispatch.megatron.dispatcher import _PLAN_TENSORS
from tests.support import parity, tiny
from tests.support.graph_protocol import Tape, cuda_graphs_on_cpu
from tests.support.pool import WorkerPool

VOCAB, SEQUENCE, BATCH, MICROBATCHES = 32, 7, 2, 2
OTHER_SEQUENCE, OTHER_BATCH = 5, 3  # of an evaluation
NUM_TOKENS = SEQUENCE * BATCH

Scope = tuple[str, ...]
Results = dict[str, Tensor]

WHOLE: tuple[Scope, ...] = (("moe",), ("attn", "moe"), ())  # () is the whole layer
PARTIAL: tuple[Scope, ...] = (
    ("moe_router",),
    ("moe_router", "moe_preprocess"),
    ("attn", "moe_router", "moe_preprocess"),
)
CASES: dict[str, dict[str, Any]] = {
    "no shared experts": {},
    "overlap, dropping, expert bias": {
        "moe_shared_expert_intermediate_size": 16,
        "moe_shared_expert_overlap": True,
        "moe_shared_expert_gate": True,
        "moe_expert_capacity_factor": 1.0,
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
    },
}
ALL = "overlap, dropping, expert bias"
STOCK_DROP_AND_PAD: dict[str, Any] = {
    "moe_token_dispatcher_type": "alltoall",
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
}


class Training:
    """A GPT in Megatron's DDP with AdamW, on random tokens; scope None means no graphs."""

    def __init__(self, scope: Scope | None, **settings: Any) -> None:
        graphs: dict[str, Any] = {}
        if scope is not None:
            graphs = layer_graphs(*scope)
        self.config = tiny.config(
            num_layers=2,
            bf16=True,
            params_dtype=torch.bfloat16,
            attention_dropout=0.0,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=0.01,
            moe_router_dtype="fp32",
            expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
            # Megatron wants ten warm-up passes; these eager steps leave two for the capture.
            cuda_graph_warmup_steps=4,
            **graphs,
            **{"hidden_dropout": 0.0, **settings},
        )
        torch.manual_seed(7)
        gpt = GPTModel(self.config, tiny.layer_spec(), VOCAB, max_sequence_length=SEQUENCE)
        self.moe_layers: list[Any] = [layer.mlp for layer in gpt.decoder.layers]
        self.model = DistributedDataParallel(
            self.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            Float16Module(self.config, gpt),
        )
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.helper: Any = None

    def forward(self, batch: int, sequence: int, seed: int, **inputs: Any) -> Tensor:
        """Return the mean loss of random tokens, which differ between ranks."""
        random = torch.Generator().manual_seed(seed * dist.get_world_size() + dist.get_rank())
        tokens = torch.randint(VOCAB, (batch, sequence + 1), generator=random)
        positions = torch.arange(sequence).expand(batch, -1)
        # If there is no attention mask, Megatron passes zeros to the graph.
        future = torch.ones(batch, 1, sequence, sequence, dtype=torch.bool).triu(1)
        losses = self.model(tokens[:, :-1], positions, future, labels=tokens[:, 1:], **inputs)
        return losses.mean()

    def step(self, number: int, **inputs: Any) -> Results:
        """Run microbatches and an update; return losses, gradients and counts by name."""
        self.model.zero_grad_buffer()
        results = {}
        for microbatch in range(MICROBATCHES):
            loss = self.forward(BATCH, SEQUENCE, number * MICROBATCHES + microbatch, **inputs)
            loss.backward()
            results[f"loss of microbatch {microbatch}"] = loss.detach()
        self.model.finish_grad_sync()
        for name, param in self.model.named_parameters():
            results[name] = param.main_grad.clone()
            param.grad = param.main_grad.to(param.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for index, layer in enumerate(self.moe_layers):
            for name, count in counts(layer).items():
                results[f"{name} of layer {index}"] = count.clone()
                count.zero_()
        return results

    @torch.no_grad()
    def evaluate(self, number: int) -> None:
        """Run a forward in evaluation mode, which is eager, with another batch shape."""
        self.model.eval()
        self.forward(OTHER_BATCH, OTHER_SEQUENCE, seed=1000 + number)
        self.model.train()

    def capture(self) -> None:
        """Capture with Megatron's helper, as a training loop does."""
        self.helper = cuda_graphs.TECudaGraphHelper([self.model], self.config, SEQUENCE, BATCH)
        try:
            self.helper.create_cudagraphs()
        finally:
            cuda_graphs._set_capture_end()  # Megatron does not call it if a layer raises.

    def pinned(self) -> list[str]:
        """Return names of the dispatchers' attributes that hold a plan's tensors."""
        dispatchers = [layer.token_dispatcher for layer in self.moe_layers]
        return [n for n in _PLAN_TENSORS for d in dispatchers if getattr(d, n) is not None]


def counts(layer: Any) -> Results:
    """Return the layer's counters: ours, and Megatron's for the expert bias."""
    counters, router = layer.token_dispatcher.counters, layer.router
    counted = {
        name: getattr(counters, name)
        for name in ("demand_E", "kept_E", "num_unplaced", "num_slots")
    }
    if router.enable_expert_bias:
        counted["local_tokens_per_expert"] = router.local_tokens_per_expert
    return counted


def unreachable(*args: object, **kwargs: object) -> None:
    raise AssertionError("a replay ran Python of the layer")


@contextmanager
def no_python(training: Training, scope: Scope) -> Iterator[None]:
    """Let Python functions that the scope captures raise when they are called."""
    with ExitStack() as stack:
        for layer in training.moe_layers:
            captured = [(layer.router, "routing")]
            if "moe_router" not in scope:
                captured.append((layer.experts, "forward"))
            if scope != ("moe_router",):
                captured.append((layer.token_dispatcher, "dispatch_preprocess"))
            for owner, name in captured:
                stack.enter_context(patch.object(owner, name, unreachable))
        yield


@functools.cache
def eager_run(case: str) -> list[Results]:
    training = Training(None, **CASES[case])
    return [training.step(number) for number in range(5)]


def graphed_run(scope: Scope, **settings: Any) -> list[Results]:
    training = Training(scope, **settings)
    steps = [training.step(0), training.step(1)]
    training.capture()
    for number in (2, 3):
        training.evaluate(number)
        with no_python(training, scope):
            steps.append(training.step(number))
        assert training.pinned() == []
    training.helper.delete_cuda_graphs()
    steps.append(training.step(4))
    return steps


def differences(eager: list[Results], graphed: list[Results]) -> list[str]:
    return [
        f"{name} in step {number}"
        for number, (one, other) in enumerate(zip(eager, graphed, strict=True))
        for name in one
        if not torch.equal(one[name], other[name])
    ]


@contextmanager
def graphs() -> Iterator[None]:
    """Set up random states, microbatches, `install()` and the stand-in for CUDA graphs."""
    model_parallel_cuda_manual_seed(1)
    num_ranks = parallel_state.get_data_parallel_world_size()
    init_num_microbatches_calculator(0, None, MICROBATCHES * BATCH * num_ranks, BATCH, num_ranks)
    install()
    try:
        with cuda_graphs_on_cpu():
            yield
    finally:
        uninstall()
        unset_num_microbatches_calculator()


def test_tape_replays_ops_and_nothing_else():
    static, count, calls = torch.tensor([1.0, 2.0]), torch.zeros(()), []
    with Tape() as tape:
        tripled = (static * 3).view(2, 1)
        count += static.sum()
        calls.append(float(static[0]))
    static.copy_(torch.tensor([5.0, 7.0]))
    tape.replay()
    assert tripled.tolist() == [[15.0], [21.0]]
    assert count.item() == 3.0 + 12.0
    assert calls == [1.0]


@pytest.mark.parametrize("scope", [*WHOLE, *PARTIAL], ids=lambda scope: "+".join(scope) or "layer")
def test_replay_equals_eager(megatron, scope):
    eager = eager_run(ALL)
    assert differences(eager, graphed_run(scope, **CASES[ALL])) == []
    for step in eager:
        assert step["kept_E of layer 0"].sum() < step["demand_E of layer 0"].sum()


def test_replay_equals_eager_with_recompute(megatron):
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    graphed = graphed_run(("moe",), **recompute)
    assert differences(eager_run("no shared experts"), graphed) == []


def ep2_differences(scope: Scope) -> list[str]:
    with parity.megatron("cpu", expert_model_parallel_size=2), graphs():
        return differences(eager_run(ALL), graphed_run(scope, **CASES[ALL]))


@pytest.mark.parametrize("scope", [WHOLE[0], PARTIAL[2]], ids="+".join)
def test_replay_equals_eager_on_two_ranks(pool2: WorkerPool, scope):
    assert pool2.run(ep2_differences, scope) == [[], []]


def pools_differences(scope: Scope) -> list[str]:
    with parity.megatron("cpu", expert_model_parallel_size=2), graphs():
        install(PaddedOptions(capacity_pool="rank"))
        settings = {"moe_expert_capacity_factor": 0.5}
        training = Training(None, **settings)
        eager = [training.step(number) for number in range(5)]
        for step in eager:
            assert step["kept_E of layer 0"].sum() < step["demand_E of layer 0"].sum()
        return differences(eager, graphed_run(scope, **settings))


def test_replay_equals_eager_with_pools_on_two_ranks(pool2: WorkerPool):
    """Whole layers are for GPUs: on CPUs, rows are packed by ops whose shapes follow the values."""
    assert pool2.run(pools_differences, PARTIAL[2]) == [[], []]


def test_capture_of_the_whole_layer_pins_no_plan(megatron):
    training = Training(())
    training.capture()
    assert training.pinned() == []


def test_capture_puts_back_the_counts_of_its_own_passes(megatron):
    training = Training(("moe",))
    training.forward(BATCH, SEQUENCE, seed=3)
    before = [{n: count.clone() for n, count in counts(m).items()} for m in training.moe_layers]
    training.capture()
    # Two warm-up passes and the capture, on inputs of ones, would each have counted all tokens.
    for layer, kept in zip(training.moe_layers, before, strict=True):
        assert kept["demand_E"].sum() == NUM_TOKENS * tiny.TOP_K
        after = counts(layer)
        assert [name for name in kept if not torch.equal(kept[name], after[name])] == []
