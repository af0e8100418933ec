"""Train a GPT twice in lockstep: with repeated steps and little capacity, and never dropping.

Both start with the same weights. The one that never drops fits its sizes to the routing, as
repeated steps do: products of padded rows may depend on the number of rows. After every step the
losses, gradients, parameters, buffers, counts of demand, logged sums and random states of the two
are compared bit by bit. The batches are drawn from the generators that dropout draws from, as a
loader without worker processes may do.

With a graph, the training that never drops stays eager: the repeated steps of the other are eager,
too, so equal bits show that they left the graphs alone. On a CPU the layers are Megatron's local
ones, with the stand-in of `graph_protocol` for graphs.
"""

import functools
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.cuda_graphs import delete_cuda_graphs
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from padded_dispatch.config import FIT, CapacityFactor
from padded_dispatch.megatron import LayerGraphs, PaddedOptions, Retry
from padded_dispatch.megatron.compat import (
    iteration_graph,
    layer_graphs,
    logged_tensors,
    put_logged_back,
    training_stream,
)
from padded_dispatch.megatron.graphs import IterationGraph
from padded_dispatch.megatron.retry import RandomStates
from padded_dispatch.megatron.telemetry import padded_moe_layers
from tests.support.gpt import (
    ddp_chunks,
    loss_scaling,
    mean_loss,
    megatron_adam,
    model_inputs,
    sequence_parallel_norms,
    types_of_gpus,
)
from tests.support.graph_protocol import cuda_graphs_on_cpu
from tests.support.graph_training import Findings, bits
from tests.support.parity import megatron

SEED = 50
EAGER_STEPS = 2  # before a capture


@dataclass(frozen=True, kw_only=True)
class RetriedCase:
    """A model, how ranks share it, and what a repeated step has to take back.

    `mtp`: a layer of multi-token prediction. `graph`: what is captured: "layer", "local" (by
    Megatron's local graphs) or "full-iteration". `overlap_param_gather`: of a distributed
    optimizer, which all cases on GPUs have; on a CPU its place is taken by shards of plain SGD.
    `tp`: with sequence parallelism, each expert on one rank, and data on the first rank alone.
    `fp16`: losses are scaled by Megatron's dynamic scale, which starts so high that steps overflow.
    `factor`: of the training with repeated steps. `fields`: further fields of Megatron's config.
    """

    name: str
    device: str = "cpu"
    ranks: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    fp16: bool = False
    graph: Literal["none", "layer", "local", "full-iteration"] = "none"
    microbatches: int = 1
    dropout: float = 0.1
    expert_bias: bool = False
    recompute: bool = False
    mtp: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    factor: float = 0.5
    steps: int = 4
    batch: int = 2
    seq: int = 10
    num_layers: int = 2
    hidden: int = 16
    heads: int = 2
    ffn: int = 24
    num_experts: int = 4
    top_k: int = 2
    vocab: int = 32
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether the case runs on GPUs."""
        return self.device == "cuda"

    @property
    def in_bf16(self) -> bool:
        """Whether the model is in bf16, which captured layers must be."""
        return not self.fp16 and (self.on_gpu or self.graph != "none")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.in_bf16 else torch.float32

    @property
    def dp(self) -> int:
        """Data-parallel size of everything but the experts."""
        return self.ranks // (self.tp * self.pp)


def fitting(case: RetriedCase) -> dict[int, CapacityFactor]:
    """Return `layer_factors` with which no layer of a case drops anything."""
    return dict.fromkeys(range(1, case.num_layers + case.mtp + 1), FIT)


def retried_equals_never_dropping(case: RetriedCase) -> Findings:
    """Compare the two trainings. Runs on all `case.ranks` ranks of the default group."""
    with world(case):
        never = Training(case, layer_factors=fitting(case))
        retried = Training(case, on_overflow="retry")
        differing: dict[str, int] = {}
        for number in range(case.steps):
            if number == EAGER_STEPS and retried.graphs is not None:
                retried.graphs.capture()
            wanted, given = never.step(number), retried.step(number)
            for name in differing_names(wanted, given):
                differing[name] = differing.get(name, 0) + 1
            if never.random.generators.changed_since(retried.random.generators).states:
                differing["the random states"] = differing.get("the random states", 0) + 1
        assert retried.retry is not None
        facts = {
            "steps": retried.retry.num_steps,
            "retried": retried.retry.num_retried,
            "tensors_per_step": len(wanted),
            "loss": never.losses,
        }
        retried.end()
        num_retried = facts["retried"]
        # At factor 0.5 every step drops.
        enough = num_retried == facts["steps"] if case.factor == 0.5 else num_retried > 0
        broken = () if enough else (f"{num_retried} of {facts['steps']} steps were repeated",)
        return Findings(differing=differing, facts=facts, broken=broken)


def differing_names(wanted: dict[str, Tensor], given: dict[str, Tensor]) -> list[str]:
    """Return the names of the tensors whose bits differ."""
    assert wanted.keys() == given.keys()
    return [name for name in wanted if not torch.equal(bits(wanted[name]), bits(given[name]))]


@contextmanager
def world(case: RetriedCase) -> Iterator[None]:
    """Set up Megatron's groups and number of microbatches, on a stream that can be captured."""
    sizes = {
        "tensor_model_parallel_size": case.tp,
        "expert_tensor_parallel_size": 1,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp,
        "expert_model_parallel_size": case.ep,
    }
    with ExitStack() as stack:
        if case.on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_stream(training_stream())
        stack.enter_context(megatron(case.device, **sizes))
        if not case.on_gpu and case.graph != "none":
            stack.enter_context(cuda_graphs_on_cpu())
        if not case.on_gpu and case.tp > 1:
            stack.enter_context(sequence_parallel_norms())
        if not case.on_gpu and case.fp16:
            stack.enter_context(types_of_gpus())
        global_batch = case.microbatches * case.batch * case.dp
        init_num_microbatches_calculator(dist.get_rank(), None, global_batch, case.batch, case.dp)
        stack.callback(unset_num_microbatches_calculator)
        yield


class Training:
    """One of the two trainings.

    Args:
        case: sizes of the model.
        graphed: it captures what `case.graph` names.
        options: options of the padded dispatcher. With `on_overflow="retry"` it repeats steps, and
            captures what `case.graph` names.
    """

    def __init__(self, case: RetriedCase, *, graphed: bool = False, **options: Any) -> None:
        self.case = case
        model_parallel_cuda_manual_seed(SEED, te_rng_tracker=case.on_gpu, force_reset_rng=True)
        torch.manual_seed(SEED)
        random.seed(SEED)
        np.random.seed(SEED)
        retry = options.get("on_overflow") == "retry"
        graph = case.graph if retry or graphed else "none"
        self.config = _config(case, graph)
        # On GPUs "auto" could choose other experts for other sizes; a CPU has only the spec's.
        experts = "packed" if case.in_bf16 and case.on_gpu else "auto"
        options = {"experts": experts, **options}
        self.config.padded_dispatch = PaddedOptions(**options)
        ddp = _ddp(case, self.config)
        self.chunks = ddp_chunks(self.config, ddp, vocab=case.vocab, seq=case.seq)
        # Plain SGD takes the place of Megatron's optimizer on a CPU.
        self.optimizer: Any = None
        if case.on_gpu or case.fp16:
            self.optimizer = megatron_adam(self.chunks, ddp)
        if case.fp16:
            self.config.grad_scale_func = self.optimizer.scale_loss
        self.graphs: LayerGraphs | None = None
        self._iteration: IterationGraph | None = None
        if graph == "layer":
            given = () if self.optimizer is None else (self.optimizer,)
            self.graphs = LayerGraphs(
                self.chunks, seq_length=case.seq, micro_batch=case.batch, optimizers=given
            )
        if graph == "full-iteration":
            self._iteration = IterationGraph(self.config)
        self.schedule = self._iteration or get_forward_backward_func()
        self.retry = Retry(self.schedule, self.chunks) if retry else None
        self.random = RandomStates.now()
        self._logged: dict[str, Tensor] = {}
        self.losses: list[float] = []

    def step(self, number: int) -> dict[str, Tensor]:
        """Run a step with this training's own random states; return results by name."""
        self.random.restore()
        put_logged_back(self._logged)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        reports = self.passes()
        self.random = RandomStates.now()
        self._logged = {name: tensor.clone() for name, tensor in logged_tensors().items()}
        results = {f"the loss of pass {i}": r["loss"].clone() for i, r in enumerate(reports)}
        if reports:
            self.losses.append(torch.stack([report["loss"] for report in reports]).mean().item())
        results |= {f"logged {name}": tensor for name, tensor in self._logged.items()}
        gradients = {
            f"the gradient of {name}": parameter.main_grad.clone()
            for name, parameter in self._parameters()
        }
        self.update()
        results |= gradients | {name: p.data for name, p in self._parameters()}
        for index, chunk in enumerate(self.chunks):
            buffers = chunk.module.named_buffers()
            results |= {f"{name} of chunk {index}": buffer for name, buffer in buffers}
        for layer_number, layer in padded_moe_layers(self.chunks).items():
            results[f"demand of layer {layer_number}"] = layer.token_dispatcher.counters.demand_E
        return results | (loss_scaling(self.optimizer) if self.case.fp16 else {})

    def passes(self, batches: Any = None) -> list[dict[str, Tensor]]:
        """Run forward and backward of all microbatches."""
        case = self.case
        iterators = [batches or self.batches() for _ in self.chunks]
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        return (self.retry or self.schedule)(
            forward_step_func=functools.partial(_shared, case) if case.tp > 1 else forward,
            data_iterator=iterators if first else None,
            model=self.chunks,
            num_microbatches=case.microbatches,
            seq_length=case.seq,
            micro_batch_size=case.batch,
            forward_only=False,
        )

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Return an iterator over the microbatches of the next step, for one chunk."""
        return draws(self.case)

    def end(self) -> None:
        """Delete the graphs; call it before the process groups are destroyed."""
        if self.graphs is not None:
            self.graphs.delete()
        if self._iteration is not None:
            self._iteration.delete()
        if self.case.graph == "local":
            delete_cuda_graphs()  # Megatron keeps local graphs in a class attribute.

    def update(self) -> None:
        """Change the parameters by their gradients."""
        if self.optimizer is not None:
            self.optimizer.step()
            return
        with torch.no_grad():
            if self.case.overlap_param_gather:
                self._update_shards()
            else:
                for _, parameter in self._parameters():
                    parameter -= 0.5 * parameter.main_grad

    def _update_shards(self) -> None:
        """Update this rank's part of each bucket; the next forward passes gather the others."""
        for chunk in self.chunks:
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                size = group.intra_distributed_optimizer_instance_size
                rank = group.intra_distributed_optimizer_instance_rank
                for bucket in group.buckets:
                    own = bucket.param_data.chunk(size)[rank]
                    own -= 0.5 * bucket.grad_data.chunk(size)[rank]
                group.param_gather_dispatched = False

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        for index, chunk in enumerate(self.chunks):
            for name, parameter in chunk.module.named_parameters():
                yield f"{name} of chunk {index}", parameter


def draws(case: RetriedCase) -> Iterator[dict[str, Tensor]]:
    """Yield batches drawn from three global generators."""
    while True:
        shift = random.randrange(case.vocab) + np.random.randint(case.vocab)
        ids = (torch.randint(case.vocab, (case.batch, case.seq + 1)) + shift) % case.vocab
        yield {"ids": ids.to(case.device)}


def _config(case: RetriedCase, graph: str) -> TransformerConfig:
    captured: dict[str, Any] = {}
    if graph == "layer":
        captured = layer_graphs("attn", "moe")
    elif graph == "local":
        captured = {**layer_graphs(), "cuda_graph_impl": "local"}
    elif graph == "full-iteration":
        captured = {**iteration_graph(), "cuda_graph_warmup_steps": EAGER_STEPS}
    if case.recompute:
        captured |= {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    balancing: dict[str, Any] = {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
    }
    if case.expert_bias:
        balancing |= {
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        }
    return TransformerConfig(
        num_layers=case.num_layers,
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        ffn_hidden_size=case.ffn,
        moe_ffn_hidden_size=case.ffn,
        num_moe_experts=case.num_experts,
        moe_router_topk=case.top_k,
        moe_router_dtype="fp32",
        moe_z_loss_coeff=1e-3,
        moe_expert_capacity_factor=case.factor,
        moe_token_dispatcher_type="padded_alltoall",
        moe_grouped_gemm=case.on_gpu,
        tensor_model_parallel_size=case.tp,
        sequence_parallel=case.tp > 1,
        expert_tensor_parallel_size=1,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        expert_model_parallel_size=case.ep,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        init_method_std=0.2,
        hidden_dropout=case.dropout,
        attention_dropout=case.dropout,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=case.on_gpu,
        **{"gradient_accumulation_fusion": False, **case.fields},
        use_cpu_initialization=not case.on_gpu,
        bf16=case.in_bf16,
        fp16=case.fp16,
        params_dtype=case.dtype,
        pipeline_dtype=case.dtype,
        deterministic_mode=True,
        finalize_model_grads_func=finalize_model_grads,
        mtp_num_layers=1 if case.mtp else None,
        **balancing,
        **captured,
    )


def _ddp(case: RetriedCase, config: TransformerConfig) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=case.on_gpu or case.overlap_param_gather,
        overlap_grad_reduce=case.overlap_grad_reduce,
        overlap_param_gather=case.overlap_param_gather,
        delay_wgrad_compute=config.delay_wgrad_compute,
    )


def forward(
    batches: Iterator[dict[str, Tensor]], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """Run a microbatch, or plan it: Megatron's `forward_step_func`."""
    given = next(batches)
    masks = {name: given[name] for name in given.keys() & {"padding_mask"}}
    run = model.build_schedule_plan if return_schedule_plan else model
    return run(**model_inputs(given["ids"]), **masks), mean_loss


def _shared(case: RetriedCase, batches: Any, model: Any) -> tuple[Any, Any]:
    """Run a microbatch that the first tensor-parallel rank reads, as Megatron-LM's scripts do."""
    if batches is None:
        ids = torch.empty(case.batch, case.seq + 1, dtype=torch.int64, device=case.device)
    else:
        (one,) = batches if isinstance(batches, list) else [batches]
        ids = next(one)["ids"]
    source = parallel_state.get_tensor_model_parallel_src_rank()
    dist.broadcast(ids, source, group=parallel_state.get_tensor_model_parallel_group())
    return forward(iter([{"ids": ids}]), model)
