"""Train a GPT in pipeline stages with ours, with stock, and with stock in a more exact dtype.

There are two stages with two virtual stages each, and four microbatches. Several calls of one layer
are in flight at a time, and each backward pass must find the plan of its own forward pass. Losses
and every gradient are compared by `parity.compare`.

In fp32 the exact run is the stock model in fp64, with Megatron's local layers. In bf16 the exact
run is in fp32, and on GPUs the layers are Transformer Engine's. Rounding to bf16 would send tokens
to other experts from the second layer on, so in bf16 all runs share a routing drawn at random.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from tests.support.parity import Parity, compare, megatron
from tests.support.rows import Findings

SEED = 30
STAGES, CHUNKS, MICROBATCHES = 2, 2, 4


@dataclass(frozen=True, kw_only=True)
class PipelineCase:
    """A GPT of four layers on two stages of two chunks, without dropping.

    `dtype`: fp32 or bf16. `ep`: ranks per stage. `seq`, `batch`: sizes of one microbatch.
    """

    name: str
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    ep: int = 1
    num_experts: int = 4
    top_k: int = 2
    hidden: int = 16
    ffn: int = 12
    heads: int = 2
    vocab: int = 31
    seq: int = 9
    batch: int = 2

    @property
    def stock_type(self) -> str:
        """The stock dispatcher that does not drop and runs on this device."""
        return "allgather" if self.device == "cpu" else "alltoall"

    @property
    def exact_dtype(self) -> torch.dtype:
        """The dtype of the run that errors are measured against."""
        return torch.float64 if self.dtype == torch.float32 else torch.float32


def pipeline_agrees(case: PipelineCase) -> Findings:
    """Run `case` on every rank; return the errors, and those that break the rule."""
    return pipeline_parity(case).findings()


def pipeline_parity(case: PipelineCase) -> Parity:
    """Run `case` on every rank of the default process group, of which there are `2 * ep`.

    Returns:
        Errors of the losses (on the last stage) and of every kind of parameter's gradient.
    """
    sizes = {
        "pipeline_model_parallel_size": STAGES,
        "virtual_pipeline_model_parallel_size": CHUNKS,
        "expert_model_parallel_size": case.ep,
    }
    with megatron(case.device, **sizes):
        stock_model = _model(case, case.stock_type, case.dtype)
        ours_model = _model(case, "padded_alltoall", case.dtype)
        exact_model = _model(case, case.stock_type, case.exact_dtype)
        for model in (ours_model, exact_model):
            _copy_parameters(stock_model, model)
        ours = _run(case, ours_model)
        again = _run(case, ours_model)
        errors = compare(ours, _run(case, stock_model), _run(case, exact_model), case.dtype)
    repeats = all(torch.equal(ours[name], again[name]) for name in ours)
    return Parity(errors=errors, repeats=repeats)


def _copy_parameters(source: list[Any], target: list[Any]) -> None:
    with torch.no_grad():
        for given, taken in zip(source, target, strict=True):
            values = dict(given.named_parameters())
            for name, parameter in taken.named_parameters(remove_duplicate=False):
                parameter.copy_(values.pop(name))
            assert not values


def _model(case: PipelineCase, dispatcher: str, dtype: torch.dtype) -> list[Any]:
    """Build this rank's chunks of the model."""
    model_parallel_cuda_manual_seed(SEED)
    in_bf16 = case.dtype == torch.bfloat16
    fused = in_bf16 and case.device == "cuda"
    config = TransformerConfig(
        num_layers=STAGES * CHUNKS,
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        ffn_hidden_size=case.ffn,
        moe_ffn_hidden_size=case.ffn,
        num_moe_experts=case.num_experts,
        moe_router_topk=case.top_k,
        moe_router_load_balancing_type="none",
        moe_router_force_load_balancing=in_bf16,
        moe_router_dtype="fp64" if dtype == torch.float64 else "fp32",
        moe_token_dispatcher_type=dispatcher,
        moe_grouped_gemm=fused,
        pipeline_model_parallel_size=STAGES,
        virtual_pipeline_model_parallel_size=CHUNKS,
        expert_model_parallel_size=case.ep,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        init_method_std=case.hidden**-0.5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=fused,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        deterministic_mode=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    if fused:
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=case.num_experts, moe_grouped_gemm=True
        )
    else:
        # One layer in each chunk. The last norm is given, since Megatron's default is Transformer
        # Engine's wherever that is installed, and Transformer Engine has no fp64.
        layer = get_gpt_layer_local_spec(num_experts=case.num_experts, normalization="RMSNorm")
        spec = TransformerBlockSubmodules(layer_specs=[layer], layer_norm=WrappedTorchNorm)
    return [
        GPTModel(
            config,
            spec,
            vocab_size=case.vocab,
            max_sequence_length=case.seq,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=v),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=v),
            share_embeddings_and_output_weights=False,
            vp_stage=v,
        ).to(case.device, dtype)
        for v in range(CHUNKS)
    ]


def _run(case: PipelineCase, model: list[Any]) -> dict[str, Tensor]:
    """Run all microbatches forward and backward; return this rank's losses and gradients."""
    model_parallel_cuda_manual_seed(SEED)
    for chunk in model:
        chunk.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=[_batches(case) for _ in model],
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=case.seq,
        micro_batch_size=case.batch,
        forward_only=False,
    )
    found: dict[str, list[Tensor]] = {}
    for report in reports:
        found.setdefault("losses", []).append(report["loss"].flatten())
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            assert parameter.grad is not None, f"no gradient for {name}"
            # Numbers of layers and experts become *: one entry for each kind of parameter.
            kind = re.sub(r"\d+", "*", name)
            found.setdefault(f"grad {kind}", []).append(parameter.grad.flatten())
    return {name: torch.cat(parts) for name, parts in found.items()}


def _batches(case: PipelineCase) -> Iterator[Tensor]:
    """Yield token ids [B, S + 1], the same on every stage of a pipeline."""
    generator = torch.Generator().manual_seed(SEED + parallel_state.get_data_parallel_rank())
    for _ in range(MICROBATCHES):
        shape = (case.batch, case.seq + 1)
        yield torch.randint(case.vocab, shape, generator=generator).to(case.device)


def _forward_step(batches: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    ids = next(batches)
    num_ids = ids.shape[1] - 1
    positions = torch.arange(num_ids, device=ids.device).expand(ids.shape[0], -1)
    future = torch.ones(1, 1, num_ids, num_ids, dtype=torch.bool, device=ids.device).triu(1)
    return model(ids[:, :-1], positions, future), partial(_loss, ids[:, 1:])


def _loss(targets: Tensor, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    # Megatron's own loss computes in fp32 for every dtype.
    wide = torch.promote_types(logits.dtype, torch.float32)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten())
    return loss, {"loss": loss.detach()}
