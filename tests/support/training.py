"""Train a small GPT in several ways that must agree bit by bit: one harness for CPUs and GPUs.

`train(model)` returns all losses, gradients, parameters, buffers, logged sums and counts of each
step. A row of `tests.gpu.table` has a model and its ways: eager twice and with CUDA graphs; never
dropping and with repeated steps. On a CPU, sizes are small, layers are Megatron's local ones, and
`graph_protocol` stands in for CUDA graphs.
"""

import dataclasses
import hashlib
import importlib
import os
import random
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import cuda_graphs
from torch import Tensor

from padded_dispatch.megatron import LayerGraphs, StepHooks
from padded_dispatch.megatron.compat import (
    forget_moe_state,
    iteration_graph,
    layer_graphs,
    logged_tensors,
    put_logged_back,
    training_stream,
)
from padded_dispatch.megatron.graphs import IterationGraph, release
from padded_dispatch.megatron.guard import forget_iterations
from padded_dispatch.megatron.retry import RandomStates, Retry, without_graphs
from padded_dispatch.megatron.telemetry import padded_moe_layers
from padded_dispatch.utils.patches import Patches
from tests.support import tiny
from tests.support.gpt import (
    Sizes,
    ddp_chunks,
    gpt_name,
    loss_scaling,
    mean_loss,
    megatron_adam,
    model_inputs,
    sequence_parallel_norms,
)
from tests.support.graph_protocol import cuda_graphs_on_cpu
from tests.support.machines import ranks_on
from tests.support.packed_sequences import own_part, packed, packed_attention
from tests.support.parity import megatron
from tests.support.pool import forget_models

SEED = 50
EAGER_STEPS = 2  # before a capture, on GPUs
NEVER_CHOSEN = -1e4  # a router bias that no logit outweighs
Graph = Literal["none", "layer", "helper", "iteration"]


@dataclass(frozen=True, kw_only=True)
class Model(Sizes):
    """A GPT, and how it is trained.

    `graph`: what is captured: each layer, or the parts `scopes` of it, by `LayerGraphs`, or by
    Megatron's own "helper"; or a whole "iteration". `options`: of the padded dispatcher. `fields`,
    `ddp`: further fields of Megatron's configs. `never_drops`: it fits its sizes to the routing.
    `gpt_oss`: biases everywhere and a clamped activation. `idle`: whose experts no token chooses in
    two of three steps: the last "rank" or the "others" than the first. `mixed`: each second step is
    eager. `masked`: each microbatch has a padding mask of its own. `packed`: it is packed from two
    sequences of other lengths. `evaluates`: batch and length of an evaluation before every step.
    `draws`: batches are drawn from the generators that dropout draws from, on the first
    tensor-parallel rank alone, as Megatron-LM's loaders do. `counts`: the layers' counters are
    compared.
    """

    graph: Graph = "none"
    scopes: tuple[str, ...] = ("attn", "moe")
    options: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    never_drops: bool = False
    dtype: torch.dtype = torch.bfloat16
    gpt_oss: bool = False
    idle: Literal["none", "rank", "others"] = "none"
    mixed: bool = False
    masked: bool = False
    packed: bool = False
    evaluates: tuple[int, int] | None = None
    draws: bool = False
    counts: bool = True
    dropout: float = 0.0
    factor: float = 1.25
    steps: int = 3
    microbatches: int = 2
    batch: int = 2
    seq: int = 10

    def __post_init__(self) -> None:
        assert self.gpt_oss or self.idle == "none", "only GPT-OSS has a bias in its router"


# For steps that are repeated: every step drops, and everything that draws, draws.
RETRIED = Model(
    dtype=torch.float32,
    draws=True,
    fields={"init_method_std": 0.2},  # so that tokens differ in what they ask for
    counts=False,  # Those of a step that is repeated are of its first run.
    factor=0.5,
    dropout=0.1,
    microbatches=1,
)


def ways_agree(model: Model, ways: dict[str, dict[str, Any]]) -> list[str]:
    """Train in each way, a change of the model; return what differs from the first, and failures.

    Runs on all ranks.
    """
    broken, first = [], None
    changed = {name: with_changes(model, changes) for name, changes in ways.items()}
    with world(*changed.values()):
        for name, way in changed.items():
            steps, failures = train(way)
            first = first or steps
            differing = same_bits(first, steps)
            broken += [f"{name}: {n} differs in {k} steps" for n, k in differing.items()]
            broken += [f"{name}: {text}" for text in failures]
            if way.on_gpu:
                forget_models()  # They would hold memory that the next ones need.
    return broken


def with_changes(model: Model, changes: dict[str, Any]) -> Model:
    merged = {n: getattr(model, n) | v if isinstance(v, dict) else v for n, v in changes.items()}
    return dataclasses.replace(model, **merged)


def train(model: Model) -> tuple[list[dict[str, Tensor]], list[str]]:
    """Train for all steps, inside of `world`; capture after the eager ones.

    Return a hash of the bits of each tensor by name, for each step, and failures.
    """
    training = Training(model)
    steps = []
    for number in range(model.steps):
        if number == (EAGER_STEPS if model.on_gpu else 1):
            training.capture()
        eager = without_graphs(training.chunks) if model.mixed and number % 2 else nullcontext()
        with eager:
            results = training.step(number)
        # Some states are on the host.
        steps.append({name: digest(tensor).to(model.device) for name, tensor in results.items()})
    retry = training.retry
    broken = []
    if model.graph != "none" and training.num_graphs() == 0:
        broken.append("nothing was captured")
    if retry is not None and not (model.steps if model.factor == 0.5 else 1) <= retry.num_retried:
        broken.append(f"{retry.num_retried} of {retry.num_steps} steps were repeated")
    training.end()
    return steps, broken


def same_bits(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> dict[str, int]:
    """Return the names of tensors that ever differ, with the number of steps."""
    found: dict[str, int] = {}
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        differs = (torch.stack(list(a.values())) != torch.stack(list(b.values()))).tolist()
        for name in (name for name, d in zip(a, differs, strict=True) if d):
            found[name] = found.get(name, 0) + 1
    return found


def digest(tensor: Tensor) -> Tensor:
    """Return a hash of a tensor's bits, int64 on its device: another element changes it."""
    data = bits(tensor)
    words = F.pad(data, (0, -len(data) % 8)).view(torch.int64)
    # Odd factors have an inverse modulo 2^64, so no change of one word is lost.
    place = torch.arange(1, len(words) + 1, device=words.device)
    return (words * (place * -0x61C8864680B583EB | 1)).sum() + len(data)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def differing_names(wanted: dict[str, Tensor], given: dict[str, Tensor]) -> list[str]:
    assert wanted.keys() == given.keys()
    return [name for name in wanted if not torch.equal(bits(wanted[name]), bits(given[name]))]


def memory_is_flat(model: Model) -> list[str]:
    """Train with graphs; memory after a tenth of the steps is all that is needed."""
    with world(model):
        training = Training(model)
        taken: dict[str, list[int]] = {"allocated": [], "reserved": []}
        for number in range(model.steps):
            if number == EAGER_STEPS:
                training.capture()
            training.step(number)
            if number >= EAGER_STEPS and number % max(1, model.steps // 10) == 0:
                taken["allocated"].append(torch.cuda.memory_allocated())
                taken["reserved"].append(torch.cuda.memory_reserved())
        training.end()
    grew = {name: values for name, values in taken.items() if max(values) > values[0]}
    return [f"{name} grew from {v[0]} to {max(v)} bytes" for name, v in grew.items()]


def replays_do_not_wait(model: Model) -> list[str]:
    """Train while calls that wait for the GPU raise in replays; profile five steps."""
    with world(model):
        training = Training(model)
        hooks, reads = StepHooks(training.chunks, every=7), 0
        for number in range(model.steps):
            if number == EAGER_STEPS:
                training.capture()
                torch.cuda.set_sync_debug_mode("error")
            replays = number >= EAGER_STEPS
            training.step(number, outside=_waiting_allowed if replays else nullcontext)
            reads += hooks.after_step() is not None
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for number in range(5):
                training.passes(number=number)
        counts: dict[str, int] = {}
        for event in profile.events() or ():
            if re.search(r"Memcpy|Synchronize|GraphLaunch", event.name):
                counts[event.name] = counts.get(event.name, 0) + 1
        training.end()
    broken = [f"{n} x {name} in 5 steps" for name, n in counts.items() if "DtoH" in name]
    if not reads:
        broken.append("the hooks read nothing")
    if not any("GraphLaunch" in name for name in counts):
        broken.append("the profiler saw no launch of a graph")
    return broken


@contextmanager
def _waiting_allowed() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("error")


@contextmanager
def world(*models: Model) -> Iterator[None]:
    """Set up Megatron for models that share their groups, with the stand-ins that they need."""
    model = models[0]
    with ExitStack() as stack:
        if model.on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_stream(training_stream())
            # Transformer Engine has a list of scales, and a flag that replays read.
            engine = importlib.import_module("transformer_engine.pytorch.fp8")
            stack.callback(engine.FP8GlobalStateManager.reset)
        stack.enter_context(ranks_on(model.machines))
        stack.enter_context(megatron(model.device, **model.groups))
        patches = stack.enter_context(Patches())
        # Without Apex, Megatron's own linears cannot add to `main_grad`; those of TE can.
        patches.set(layers, "_grad_accum_fusion_available", True)
        if not model.on_gpu:
            stack.enter_context(packed_attention())
            if any(one.graph != "none" for one in models):
                stack.enter_context(cuda_graphs_on_cpu())
            if model.tp > 1:
                stack.enter_context(sequence_parallel_norms())
        batches = model.microbatches * model.batch * model.dp
        init_num_microbatches_calculator(dist.get_rank(), None, batches, model.batch, model.dp)
        stack.callback(unset_num_microbatches_calculator)
        yield


class Training:
    """One training; all start with the same weights. `options`: more of the dispatcher."""

    def __init__(self, model: Model, **options: Any) -> None:
        self.model = model
        forget_moe_state()  # A HybridModel has more layers.
        model_parallel_cuda_manual_seed(SEED, te_rng_tracker=model.on_gpu, force_reset_rng=True)
        torch.manual_seed(SEED)
        random.seed(SEED)
        np.random.seed(SEED)
        default = {"experts": "auto" if model.on_gpu else "module"}
        self.config: Any = _config(model, **default | model.options | options)
        ddp = DistributedDataParallelConfig(
            **{
                "grad_reduce_in_fp32": True,
                "use_distributed_optimizer": model.on_gpu,
                **model.ddp,
            }
        )
        sizes: dict[str, Any] = {"vocab": model.vocab, "seq": model.seq}
        self.chunks = ddp_chunks(self.config, ddp, pattern=model.pattern, **sizes)
        for module in (module for chunk in self.chunks for module in chunk.modules()):
            if isinstance(module, layers.ColumnParallelLinear):
                module.gradient_accumulation_fusion = False
        self.moe = list(padded_moe_layers(self.chunks).items())
        if model.pattern:  # Count as in a GPTModel.
            self.moe = [((number + 1) // 2, layer) for number, layer in self.moe]
        if model.never_drops:
            for _, layer in self.moe:
                configs = layer.token_dispatcher.configs
                configs.training = configs.fitting
        self.optimizer = megatron_adam(self.chunks, ddp)
        if model.dtype == torch.float16:
            self.config.grad_scale_func = self.optimizer.scale_loss
        self.graphs: LayerGraphs | None = None
        self._helper: Any = None
        self._iteration: IterationGraph | None = None
        if model.graph == "layer":
            sizes = {"seq_length": model.seq, "micro_batch": model.batch}
            self.graphs = LayerGraphs(self.chunks, **sizes, optimizers=(self.optimizer,))
        elif model.graph == "helper":  # What Megatron's own loop does.
            self._helper = cuda_graphs.TECudaGraphHelper(
                self.chunks, self.config, model.seq, model.batch, optimizers=[self.optimizer]
            )
        elif model.graph == "iteration":
            self._iteration = IterationGraph(self.config)
        self.schedule = self._iteration or get_forward_backward_func()
        retries = self.config.padded_dispatch.on_overflow == "retry"
        self.retry = Retry(self.schedule, self.chunks) if retries else None
        self.random = RandomStates()
        self._logged: dict[str, Tensor] = {}

    def capture(self) -> None:
        if self._helper is not None:
            try:
                self._helper.create_cudagraphs()
            finally:
                cuda_graphs._set_capture_end()  # Megatron does not call it if a layer raises.
        if self.graphs is not None:
            self.graphs.capture()

    def end(self) -> None:
        """Delete the graphs; call it before the process groups are destroyed."""
        if self.graphs is not None:
            self.graphs.delete()
        if self._helper is not None:
            release(self._helper)
        if self._iteration is not None:
            forget_iterations()

    def num_graphs(self) -> int:
        """Return the number of graphs of all layers; forward and backward count as one."""
        modules = [module for chunk in self.chunks for module in chunk.modules()]
        if self._iteration is not None:
            return int(FullCudaGraphWrapper.cuda_graph["training"] is not None)
        return sum(len(getattr(module, "cuda_graphs", ())) for module in modules)

    def step(self, number: int, outside: Any = nullcontext) -> dict[str, Tensor]:
        """Run a step with this training's own random states; return results by name.

        `outside` wraps everything but the passes.
        """
        results: dict[str, Tensor] = {}
        with outside():
            self.random.restore()
            put_logged_back(self._logged)
            self._make_idle(number)
            if self.model.evaluates:
                results |= self._evaluate(number, *self.model.evaluates)
        reports = self.passes(number=number)
        with outside():
            self.random = RandomStates()
            self._logged = {name: tensor.clone() for name, tensor in logged_tensors().items()}
            results |= {f"the loss of pass {i}": r["loss"].clone() for i, r in enumerate(reports)}
            # Those of layers with experts.
            results |= {f"logged {name}": sums[sums != 0] for name, sums in self._logged.items()}
            results |= {
                f"the gradient of {name}": parameter.main_grad.clone()
                for name, parameter in self._parameters()
            }
            self.optimizer.step()
            results |= {name: parameter.data for name, parameter in self._parameters()}
            for index, chunk in enumerate(self.chunks):
                buffers = chunk.module.named_buffers()
                results |= {f"{self._named(n)} of chunk {index}": each for n, each in buffers}
            for layer_number, layer in self.moe:
                counters = layer.token_dispatcher.counters
                if self.model.counts:
                    results[f"counts of layer {layer_number}"] = counters.totals
            if self.model.draws:
                results["the random states"] = _generators()
            if self.model.dtype == torch.float16:
                results |= loss_scaling(self.optimizer)
        return results

    def passes(self, batches: Any = None, *, number: int = 0) -> list[dict[str, Tensor]]:
        """Zero the gradients; run forward and backward of all microbatches."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        size = self.model.batch, self.model.seq
        return self._run(self.retry or self.schedule, number, *size, batches=batches)

    def losses_of(
        self, number: int, *, batch: int | None = None, seq: int | None = None, **given: Any
    ) -> Tensor:
        """Run one forward pass of the first chunk; `given` replaces arguments of the model."""
        inputs = next(self._batches(number, batch or self.model.batch, seq or self.model.seq))
        return forward(iter([inputs | given]), self.chunks[0])[0]

    @torch.no_grad()
    def _evaluate(self, number: int, batch: int, seq: int) -> dict[str, Tensor]:
        for chunk in self.chunks:
            chunk.eval()
        schedule = get_forward_backward_func()
        reports = self._run(schedule, 1000 + number, batch, seq, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        return {f"the loss of evaluation {i}": r["loss"] for i, r in enumerate(reports)}

    def _run(
        self,
        schedule: Any,
        number: int,
        batch: int,
        seq: int,
        *,
        forward_only: bool = False,
        batches: Any = None,
    ) -> list[dict[str, Tensor]]:
        model = self.model
        if model.draws:
            made = [batches or draws(model) for _ in self.chunks]
        else:
            made = [self._batches(number, batch, seq) for _ in self.chunks]
        shared = model.draws and model.tp > 1
        reads = not shared or parallel_state.get_tensor_model_parallel_rank() == 0
        return schedule(
            forward_step_func=partial(_shared, model) if shared else forward,
            data_iterator=made if reads else None,
            model=self.chunks,
            num_microbatches=model.microbatches,
            seq_length=seq,
            micro_batch_size=batch,
            forward_only=forward_only,
        )

    def _batches(self, number: int, batch: int, seq: int) -> Iterator[dict[str, Any]]:
        """Yield token ids [B, S + 1], drawn on the device: a copy from the host would wait.

        Megatron's graph of an iteration needs a dict. The other entries are arguments of the model.
        """
        model, device = self.model, self.model.device
        draw = torch.Generator(device)
        draw.manual_seed(number * model.dp + parallel_state.get_data_parallel_rank())
        for index in range(model.microbatches):
            shape = (batch, seq + 1)
            ids = torch.randint(model.vocab, shape, generator=draw, device=device)
            given: dict[str, Any] = {"ids": ids}
            if model.masked:  # Nothing, some tokens, all but one of each sequence.
                share = (0.4, 0, 1)[(number + index) % 3]
                chances = torch.rand(batch, seq, generator=draw, device=device)
                given["padding_mask"] = chances < share
                given["padding_mask"][:, 0] = False
            if model.packed:
                first = (2 * number + index) % (seq - 1) + 1
                given["packed_seq_params"] = packed([first, seq - first], device)
            yield given

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        for index, chunk in enumerate(self.chunks):
            for name, parameter in chunk.module.named_parameters():
                yield f"{self._named(name)} of chunk {index}", parameter

    def _named(self, name: str) -> str:
        return gpt_name(name) if self.model.pattern else name

    @torch.no_grad()
    def _make_idle(self, number: int) -> None:
        """Let no token choose some experts in two of three steps."""
        model = self.model
        of_rank = model.num_experts // model.ep
        num_idle = {"none": 0, "rank": of_rank, "others": model.num_experts - of_rank}[model.idle]
        for _, layer in self.moe if num_idle else ():
            layer.router.bias[-num_idle:] = NEVER_CHOSEN if number % 3 else 0


def layers_of(training: Training) -> list[Any]:
    decoders = (chunk.module.module.decoder for chunk in training.chunks)
    return [layer for decoder in decoders for layer in decoder.layers]


def draws(model: Model) -> Iterator[dict[str, Tensor]]:
    """Yield batches drawn from three global generators."""
    while True:
        shift = random.randrange(model.vocab) + np.random.randint(model.vocab)
        ids = (torch.randint(model.vocab, (model.batch, model.seq + 1)) + shift) % model.vocab
        yield {"ids": ids.to(model.device)}


def _generators() -> Tensor:
    state: Any = np.random.get_state()
    name, keys, *place = state
    states = [torch.get_rng_state(), torch.cuda.get_rng_state()]
    text = repr((random.getstate(), name, place)).encode() + keys.tobytes()
    text += b"".join(state.cpu().numpy().tobytes() for state in states)
    return torch.frombuffer(bytearray(hashlib.blake2b(text).digest()), dtype=torch.uint8)


def forward(batches: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
    """Run a microbatch: Megatron's `forward_step_func`."""
    given = dict(next(batches))
    inputs: dict[str, Any] = model_inputs(given.pop("ids")) | given
    if parallel_state.get_context_parallel_world_size() > 1:
        dims = {"input_ids": (1,), "position_ids": (1,), "labels": (1,), "padding_mask": (1,)}
        for name, own in (dims | {"attention_mask": (2, 3)}).items():
            for dim in own if inputs.get(name) is not None else ():
                inputs[name] = own_part(inputs[name], dim)
    return model(**inputs), mean_loss


def _shared(model: Model, batches: Any, chunk: Any) -> tuple[Any, Any]:
    """Run a microbatch that the first tensor-parallel rank reads, as Megatron-LM's scripts do."""
    if batches is None:
        shape = (model.batch, model.seq + 1)
        ids = torch.empty(shape, dtype=torch.int64, device=model.device)
    else:
        (one,) = batches if isinstance(batches, list) else [batches]
        ids = next(one)["ids"]
    source = parallel_state.get_tensor_model_parallel_src_rank()
    dist.broadcast(ids, source, group=parallel_state.get_tensor_model_parallel_group())
    return forward(iter([{"ids": ids}]), chunk)


def _config(model: Model, **options: Any) -> Any:
    fields: dict[str, Any] = {
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_z_loss_coeff": 1e-3,
        "moe_expert_capacity_factor": model.factor,
        "normalization": "RMSNorm",
        "init_method_std": 0.02 if model.on_gpu else 0.2,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.dropout,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": model.on_gpu,
        "pipeline_dtype": model.dtype,
        "deterministic_mode": True,
        "finalize_model_grads_func": finalize_model_grads,
    }
    if model.gpt_oss:
        fields |= {
            "add_bias_linear": model.etp == 1,  # Megatron's experts have no bias otherwise.
            "add_qkv_bias": True,
            **tiny.gpt_oss(7.0),
        }
    if model.graph in ("layer", "helper"):
        fields |= layer_graphs(*model.scopes)
    elif model.graph == "iteration":
        fields |= {**iteration_graph(), "cuda_graph_warmup_steps": EAGER_STEPS}
    return model.config(**fields | model.fields, **options)
