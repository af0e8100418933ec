"""Train a GPT three times in lockstep: eager, eager again, and with CUDA graphs of its layers.

After every step all losses, gradients, parameters and counters of the three are compared bit by
bit on the device; the result is read once, at the end. The second eager run shows that eager runs
are reproducible. Layers are like GPT-OSS's: biases everywhere, a clamped SwiGLU, top-4 of 32.

On a CPU the layers are Megatron's local ones, with the stand-in of `graph_protocol` for graphs.
"""

import dataclasses
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.cuda_graphs import delete_cuda_graphs
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from padded_dispatch.config import CapacityFactor, CapacityPool, ExchangeKind
from padded_dispatch.megatron import PaddedOptions
from padded_dispatch.megatron.compat import iteration_graph, layer_graphs, training_stream
from padded_dispatch.megatron.graphs.capture import (
    IterationGraph,
    LayerGraphs,
    forget_iterations,
)
from tests.support.gpt import ddp_chunks, mean_loss, megatron_adam, model_inputs
from tests.support.graph_protocol import cuda_graphs_on_cpu
from tests.support.packed_sequences import (
    attention_of_each_rank,
    own_part,
    packed,
    packed_attention,
)
from tests.support.parity import megatron

SEED = 40
EAGER_STEPS = 2
NEVER_CHOSEN = -1e4  # a router bias that no logit outweighs
_EXPERT = re.compile(r"local_experts\.(\d+)\.|(?:weight|bias)(\d+)$")


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A model, how ranks share it, and what happens around its graphs.

    `impl`: Megatron's cuda_graph_impl; with "local" Megatron captures by itself at the end of the
    first step, and with "full_iteration" after `EAGER_STEPS`, both without a self-test. `scopes`:
    captured parts of each layer; () is the whole layer. `capacity_pool`, `exchange`: PaddedOptions.
    `dense`: numbers of layers without experts, from 0. `recompute`: Megatron's recompute_modules.
    `evaluates`: batch and length of an evaluation before every step. `idle`: experts that get no
    token, by a router bias: "rank" means those of the last expert-parallel rank in two of three
    steps, "expert" the last expert in all steps. `masked`: each microbatch has a padding mask of
    its own; it masks nothing in one of three, and all but one token of each sequence in another.
    `packed`: each microbatch is packed from sequences of other lengths.
    """

    name: str
    device: str = "cuda"
    ranks: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int = 1
    dispatcher: str = "padded_alltoall"
    impl: Literal["transformer_engine", "local", "full_iteration"] = "transformer_engine"
    capacity_pool: CapacityPool = "expert"
    exchange: ExchangeKind = "auto"
    scopes: tuple[str, ...] = ("attn", "moe")
    dense: tuple[int, ...] = ()
    recompute: tuple[str, ...] = ()
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    distributed_optimizer: bool = True
    evaluates: tuple[int, int] | None = None
    eval_factor: CapacityFactor | None = None
    idle: Literal["none", "rank", "expert"] = "none"
    replays: int = 5
    masked: bool = False
    packed: bool = False
    microbatches: int = 2
    batch: int = 1
    seq: int = 256
    num_layers: int = 2
    hidden: int = 576
    ffn: int = 576
    heads: int = 8
    groups: int = 4
    head_size: int = 64
    num_experts: int = 32
    top_k: int = 4
    vocab: int = 512

    @property
    def dp(self) -> int:
        """Data-parallel size of everything but the experts."""
        return self.ranks // (self.tp * self.cp * self.pp)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Findings of one rank.

    `differing`: tensors whose bits differ from eager, with the number of steps. `unreproducible`:
    the same for two eager runs. `facts`: figures for the row. `broken`: other failures.
    """

    differing: dict[str, int] = field(default_factory=dict)
    unreproducible: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    broken: tuple[str, ...] = ()

    def failures(self) -> list[str]:
        """Return all failures as text."""
        return [
            *(f"{name} differs from eager in {n} steps" for name, n in self.differing.items()),
            *(f"{name} differs between eager runs" for name in self.unreproducible),
            *self.broken,
        ]


def replays_equal_eager(case: Situation) -> Findings:
    """Compare replayed with eager training. Runs on all `case.ranks` ranks of the default group."""
    with _world(case):
        eager, again, graphed = (Training(case, graphs=graphs) for graphs in (False, False, True))
        unreproducible, differing = _Comparison(), _Comparison()
        report, captured_bytes = None, None
        for number in range(EAGER_STEPS + case.replays):
            if number == EAGER_STEPS and case.impl == "transformer_engine":
                before = torch.cuda.memory_allocated()
                report = graphed.capture()
                captured_bytes = torch.cuda.memory_allocated() - before
            results = [training.step(number) for training in (eager, again, graphed)]
            unreproducible.add(results[0], results[1])
            differing.add(results[0], results[2])
        facts = {
            "graphs": graphed.num_graphs(),
            "tensors_per_step": differing.num_tensors(),
            "captured_bytes": captured_bytes,
            "self_test": None if report is None else dataclasses.asdict(report),
            "loss": graphed.losses(),
        }
        broken = graphed.idle_failures()
        if facts["graphs"] == 0:
            broken.append("nothing was captured")
        graphed.delete_graphs()
        return Findings(
            differing=differing.read(),
            unreproducible=unreproducible.read(),
            facts=facts,
            broken=tuple(broken),
        )


def memory_is_flat(case: Situation) -> Findings:
    """Train `case.replays` steps with graphs; memory after a tenth of them is all that is needed.

    The facts have the bytes that torch's allocator had allocated and reserved, ten times.
    """
    with _world(case):
        training = Training(case, graphs=True)
        for number in range(EAGER_STEPS):
            training.step(number)
        if case.impl == "transformer_engine":
            training.capture()
        allocated, reserved = [], []
        for number in range(EAGER_STEPS, EAGER_STEPS + case.replays):
            training.step(number)
            training.forget()
            if (number - EAGER_STEPS + 1) % max(1, case.replays // 10) == 0:
                allocated.append(torch.cuda.memory_allocated())
                reserved.append(torch.cuda.memory_reserved())
        loss = training.last_loss()
        training.delete_graphs()
        broken = [
            f"{name} grew from {steps[0]} to {max(steps)} bytes"
            for name, steps in (("allocated", allocated), ("reserved", reserved))
            if max(steps) > steps[0]
        ]
        facts = {"allocated": allocated, "reserved": reserved, "loss": loss}
        return Findings(facts=facts, broken=tuple(broken))


def replays_do_not_wait(case: Situation) -> Findings:
    """Train with graphs while calls that wait for the GPU raise within a replayed step's passes.

    Five more steps run under the profiler; the facts count their copies, waits and graph launches.
    """
    with _world(case):
        training = Training(case, graphs=True)
        for number in range(EAGER_STEPS):
            training.step(number)
        training.capture()
        torch.cuda.set_sync_debug_mode("error")
        for number in range(EAGER_STEPS, EAGER_STEPS + case.replays):
            training.step(number, outside=_waiting_allowed)
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for number in range(5):
                training.passes(number)
        counts = _counted(profile, r"Memcpy|Synchronize|GraphLaunch")
        training.delete_graphs()
        broken = [f"{n} x {name} in 5 steps" for name, n in counts.items() if "DtoH" in name]
        if not any("GraphLaunch" in name for name in counts):
            broken.append("the profiler saw no launch of a graph")
        return Findings(facts={"steps": case.replays, "profiled": counts}, broken=tuple(broken))


def _counted(profile: Any, pattern: str) -> dict[str, int]:
    """Count events by name, of names that contain the pattern."""
    counts: dict[str, int] = {}
    for event in profile.events():
        if re.search(pattern, event.name):
            counts[event.name] = counts.get(event.name, 0) + 1
    return counts


@contextmanager
def _waiting_allowed() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("error")


@contextmanager
def _world(case: Situation) -> Iterator[None]:
    """Set up Megatron's groups and number of microbatches, on a stream that can be captured."""
    sizes = {
        "tensor_model_parallel_size": case.tp,
        "context_parallel_size": case.cp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.etp,
    }
    with ExitStack() as stack:
        if case.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_stream(training_stream())
        stack.enter_context(megatron(case.device, **sizes))
        if case.device == "cpu":
            stack.enter_context(cuda_graphs_on_cpu())
            stack.enter_context(packed_attention())
            stack.enter_context(attention_of_each_rank())
        global_batch = case.microbatches * case.batch * case.dp
        init_num_microbatches_calculator(dist.get_rank(), None, global_batch, case.batch, case.dp)
        stack.callback(unset_num_microbatches_calculator)
        yield


class Training:
    """One of the three trainings; all start with the same weights."""

    def __init__(self, case: Situation, *, graphs: bool) -> None:
        self._case = case
        self._on_gpu = case.device == "cuda"
        model_parallel_cuda_manual_seed(SEED, te_rng_tracker=self._on_gpu, force_reset_rng=True)
        torch.manual_seed(SEED)
        self._config = _config(case, graphs)
        self._chunks = ddp_chunks(self._config, _ddp(case), vocab=case.vocab, seq=case.seq)
        self._moe = [m for c in self._chunks for m in c.modules() if isinstance(m, MoELayer)]
        self._optimizer = _optimizer(case, self._chunks)
        self._graphs = None
        self._schedule = None
        if graphs and case.impl == "full_iteration":
            self._schedule = IterationGraph(self._config)
        if graphs and case.impl == "transformer_engine":
            self._graphs = LayerGraphs(
                self._chunks,
                seq_length=case.seq,
                micro_batch=case.batch,
                optimizers=(self._optimizer,),
            )
        self._losses: list[Tensor] = []
        # Numbers of nonzero elements in gradients of idle experts and of the others.
        self._idle_nonzero: list[Tensor] = []
        self._busy_nonzero: list[Tensor] = []

    def capture(self) -> Any:
        """Capture, and return the self-test's result."""
        assert self._graphs is not None
        return self._graphs.capture()

    def delete_graphs(self) -> None:
        """Delete the graphs; call it before the process groups are destroyed."""
        if self._case.impl == "full_iteration":
            forget_iterations()
        elif self._graphs is None:
            delete_cuda_graphs()  # Megatron keeps local graphs in a class attribute.
        else:
            self._graphs.delete()

    def num_graphs(self) -> int:
        """Return the number of graphs of all layers; forward and backward count as one."""
        layers = [module for chunk in self._chunks for module in chunk.modules()]
        if self._case.impl == "full_iteration":
            return int(FullCudaGraphWrapper.cuda_graph["training"] is not None)
        if self._case.impl == "local":
            managers = [m.cudagraph_manager for m in layers if hasattr(m, "cudagraph_manager")]
            return sum(len(manager.cudagraph_runners) for manager in managers)
        return sum(len(getattr(layer, "cuda_graphs", ())) for layer in layers)

    def losses(self) -> list[float]:
        """Return the mean loss of every step, on ranks that compute it."""
        return [loss.item() for loss in self._losses]

    def last_loss(self) -> float | None:
        """Return the mean loss of the last step, on ranks that compute it."""
        return self._losses[-1].item() if self._losses else None

    def forget(self) -> None:
        """Forget all losses but the last, and what was noted of gradients."""
        del self._losses[:-1], self._idle_nonzero[:], self._busy_nonzero[:]

    def step(self, number: int, outside: Any = nullcontext) -> dict[str, Tensor]:
        """Run a step; return results by name. `outside` wraps everything but the passes."""
        results: dict[str, Tensor] = {}
        with outside():
            idle = self._make_idle(number)
            if self._case.evaluates:
                results |= self._evaluate(number, *self._case.evaluates)
        losses = self.passes(number)
        with outside():
            if losses:
                self._losses.append(torch.stack(losses).mean())
            results |= {f"the loss of pass {i}": loss for i, loss in enumerate(losses)}
            self._note_idle(idle)
            self._update()
            for name, parameter in self._parameters():
                results[f"the gradient of {name}"] = parameter.main_grad
                results[name] = parameter.data
            for index, layer in enumerate(self._moe):
                for number_of, counter in enumerate(layer.token_dispatcher.counters.tensors()):
                    results[f"counter {number_of} of MoE layer {index}"] = counter
        return results

    def passes(self, number: int) -> list[Tensor]:
        """Run forward and backward of all microbatches; return losses on ranks with losses."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        return self._run(number, self._case.batch, self._case.seq, forward_only=False)

    @torch.no_grad()
    def _evaluate(self, number: int, batch: int, seq: int) -> dict[str, Tensor]:
        for chunk in self._chunks:
            chunk.eval()
        losses = self._run(1000 + number, batch, seq, forward_only=True)
        for chunk in self._chunks:
            chunk.train()
        return {f"the loss of evaluation {i}": loss for i, loss in enumerate(losses)}

    def _run(self, number: int, batch: int, seq: int, *, forward_only: bool) -> list[Tensor]:
        schedule = None if forward_only else self._schedule
        reports = (schedule or get_forward_backward_func())(
            forward_step_func=_forward,
            data_iterator=[self._batches(number, batch, seq) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=self._case.microbatches,
            seq_length=seq,
            micro_batch_size=batch,
            forward_only=forward_only,
        )
        return [report["loss"] for report in reports]

    def _batches(self, number: int, batch: int, seq: int) -> Iterator[dict[str, Any]]:
        """Yield token ids [B, S + 1], drawn on the device: a copy from the host would wait.

        Megatron's graph of an iteration needs a dict. The other entries are arguments of the model.
        """
        draw = torch.Generator(self._case.device)
        draw.manual_seed(number * self._case.dp + parallel_state.get_data_parallel_rank())
        for index in range(self._case.microbatches):
            shape = (batch, seq + 1)
            device = self._case.device
            ids = torch.randint(self._case.vocab, shape, generator=draw, device=device)
            given: dict[str, Any] = {"ids": ids}
            if self._case.masked:
                share = (0.4, 0, 1)[(number + index) % 3]
                chances = torch.rand(batch, seq, generator=draw, device=device)
                given["padding_mask"] = chances < share
                given["padding_mask"][:, 0] = False
            if self._case.packed:
                first = (2 * number + index) % (seq - 1) + 1
                given["packed_seq_params"] = packed([first, seq - first], device)
            yield given

    def _update(self) -> None:
        if not self._on_gpu:
            for _, parameter in self._parameters():
                parameter.grad = parameter.main_grad.to(parameter.dtype)
        self._optimizer.step()

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        for index, chunk in enumerate(self._chunks):
            for name, parameter in chunk.module.named_parameters():
                yield f"{name} of chunk {index}", parameter

    def _make_idle(self, number: int) -> list[int]:
        """Let no token choose some experts in this step; return their ids."""
        case = self._case
        if case.idle == "none" or (case.idle == "rank" and number % 3 == 0):
            return []
        num_idle = case.num_experts // case.ep if case.idle == "rank" else 1
        with torch.no_grad():
            for layer in self._moe:
                layer.router.bias[-num_idle:] = NEVER_CHOSEN
        return list(range(case.num_experts - num_idle, case.num_experts))

    def _note_idle(self, idle: list[int]) -> None:
        for layer in self._moe:
            for name, parameter in layer.experts.named_parameters():
                for local, grad in _grads_of_experts(layer, name, parameter):
                    expert = layer.local_expert_indices[local]
                    notes = self._idle_nonzero if expert in idle else self._busy_nonzero
                    notes.append(grad.count_nonzero())

    def idle_failures(self) -> list[str]:
        """Check that gradients of idle experts are zero and that some of the others are not."""
        if self._case.idle == "none":
            return []
        idle, busy = (
            [count.item() for count in notes] for notes in (self._idle_nonzero, self._busy_nonzero)
        )
        broken = []
        if any(idle):
            broken.append("an expert without a token has a gradient that is not zero")
        if not any(busy):
            broken.append("no expert has a gradient")
        last_rank = parallel_state.get_expert_model_parallel_rank() == self._case.ep - 1
        if last_rank and not idle:
            broken.append("no expert was idle")
        return broken


def _grads_of_experts(layer: Any, name: str, parameter: Any) -> Iterator[tuple[int, Tensor]]:
    """Yield the gradient of each local expert in a parameter, which holds one expert or all."""
    found = _EXPERT.search(name)
    if found is not None:
        yield int(found[1] or found[2]), parameter.main_grad
    else:
        num_experts = len(layer.local_expert_indices)
        yield from enumerate(parameter.main_grad.unflatten(0, (num_experts, -1)))


class _Comparison:
    """The number of steps in which each tensor's bits differed, on the device."""

    def __init__(self) -> None:
        self._steps: dict[str, Tensor] = {}

    def add(self, one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
        assert one.keys() == other.keys()
        for name in one:
            differs = (bits(one[name]) != bits(other[name])).any().long()
            self._steps[name] = self._steps[name] + differs if name in self._steps else differs

    def num_tensors(self) -> int:
        return len(self._steps)

    def read(self) -> dict[str, int]:
        """Return the numbers of the tensors that ever differed."""
        counts = torch.stack(list(self._steps.values())).tolist()
        return {name: n for name, n in zip(self._steps, counts, strict=True) if n}


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _config(case: Situation, graphs: bool) -> TransformerConfig:
    on_gpu = case.device == "cuda"
    recompute: dict[str, Any] = {}
    if case.recompute:
        recompute = {
            "recompute_granularity": "selective",
            "recompute_modules": list(case.recompute),
        }
    config = TransformerConfig(
        num_layers=case.num_layers,
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        num_query_groups=case.groups,
        kv_channels=case.head_size,
        ffn_hidden_size=case.ffn,
        moe_ffn_hidden_size=case.ffn,
        num_moe_experts=case.num_experts,
        moe_layer_freq=[int(n not in case.dense) for n in range(case.num_layers)],
        moe_router_topk=case.top_k,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        moe_expert_capacity_factor=1.25,
        moe_token_dispatcher_type=case.dispatcher,
        moe_grouped_gemm=on_gpu,
        tensor_model_parallel_size=case.tp,
        sequence_parallel=case.tp > 1,
        context_parallel_size=case.cp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        add_bias_linear=case.etp == 1,  # Megatron's experts have no bias otherwise.
        add_qkv_bias=True,
        gated_linear_unit=True,
        activation_func=quick_gelu,
        activation_func_clamp_value=7.0,
        glu_linear_offset=1.0,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=on_gpu,
        use_cpu_initialization=not on_gpu,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        deterministic_mode=True,
        finalize_model_grads_func=finalize_model_grads,
        **recompute,
        **(_graph_fields(case) if graphs else {}),
    )
    if case.dispatcher == "padded_alltoall":
        config.padded_dispatch = PaddedOptions(
            capacity_pool=case.capacity_pool,
            exchange=case.exchange,
            eval_factor=case.eval_factor,
        )
    return config


def _graph_fields(case: Situation) -> dict[str, Any]:
    if case.impl == "full_iteration":
        return {"cuda_graph_warmup_steps": EAGER_STEPS, **iteration_graph()}
    return {**layer_graphs(*case.scopes), "cuda_graph_impl": case.impl}


def _ddp(case: Situation) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=case.distributed_optimizer,
        overlap_grad_reduce=case.overlap_grad_reduce,
        overlap_param_gather=case.overlap_param_gather,
    )


def _optimizer(case: Situation, chunks: list[Any]) -> Any:
    if case.device == "cpu":
        return torch.optim.AdamW([p for chunk in chunks for p in chunk.parameters()], lr=1e-2)
    return megatron_adam(chunks, _ddp(case))


def _forward(batches: Iterator[dict[str, Any]], model: Any) -> tuple[Tensor, Any]:
    given = dict(next(batches))
    inputs: dict[str, Any] = model_inputs(given.pop("ids")) | given
    if parallel_state.get_context_parallel_world_size() > 1:
        dims = {"input_ids": (1,), "position_ids": (1,), "labels": (1,), "padding_mask": (1,)}
        for name, own in (dims | {"attention_mask": (2, 3)}).items():
            for dim in own if inputs.get(name) is not None else ():
                inputs[name] = own_part(inputs[name], dim)
    return model(**inputs), mean_loss
