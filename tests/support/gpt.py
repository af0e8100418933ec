"""What trainings of a small GPT share: chunks in Megatron's DDP, optimizer, microbatch."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def ddp_chunks(
    config: TransformerConfig, ddp: DistributedDataParallelConfig, *, vocab: int, seq: int
) -> list[Any]:
    """Build this rank's chunks, each in Megatron's DDP; on GPUs, if there are any.

    Args:
        config: of the model; its stages, precision and layers of multi-token prediction count.
        ddp: of all chunks.
        vocab: size of the vocabulary.
        seq: largest length of a sequence.
    """
    on_gpu, vpp = not config.use_cpu_initialization, config.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(vpp or 1):
        vp_stage = stage if vpp else None
        where: dict[str, Any] = {"ignore_virtual": False, "vp_stage": vp_stage}
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=on_gpu, normalization="RMSNorm", vp_stage=vp_stage
        )
        mtp = None
        if config.mtp_num_layers:
            mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=on_gpu)
        model: Any = GPTModel(
            config,
            spec,
            vocab_size=vocab,
            max_sequence_length=seq,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            mtp_block_spec=mtp,
            vp_stage=vp_stage,
        )
        if not on_gpu:
            _without_last_bias(model)
        if config.bf16:
            model = Float16Module(config, model.cuda() if on_gpu else model)
        chunk = DistributedDataParallel(config, ddp, model, disable_bucketing=stage > 0)
        chunk.broadcast_params()
        chunks.append(chunk.train())
    if ddp.overlap_grad_reduce:
        # Like Megatron's training: gradients are reduced in the last microbatch only.
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if vpp else no_sync[0]
    return chunks


def _without_last_bias(model: Any) -> None:
    """Remove fc2 biases, which SequentialMLP adds in place to a view; CPU autograd rejects this."""
    for name, module in model.named_modules():
        if ".local_experts." in name and name.endswith("linear_fc2"):
            module.register_parameter("bias", None)


def megatron_adam(chunks: list[Any], ddp: DistributedDataParallelConfig) -> Any:
    """Return Megatron's Adam in bf16, which needs a GPU."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        clip_grad=1.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=ddp.use_distributed_optimizer,
        overlap_param_gather=ddp.overlap_param_gather,
    )
    return get_megatron_optimizer(config, chunks)


def model_inputs(ids: Tensor) -> dict[str, Tensor | None]:
    """Return the arguments of `GPTModel` for tokens [batch, length + 1], the last only a label."""
    batch, length = ids.shape[0], ids.shape[1] - 1
    # Transformer Engine's attention is causal without a mask. Without one, Megatron passes zeros to
    # a graph, which its local attention would read as a mask.
    future = None
    if ids.device.type == "cpu":
        future = torch.ones(batch, 1, length, length, dtype=torch.bool).triu(1)
    return {
        "input_ids": ids[:, :-1].contiguous(),
        "position_ids": torch.arange(length, device=ids.device).expand(batch, -1),
        "attention_mask": future,
        "labels": ids[:, 1:].contiguous(),
    }


def mean_loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean of a microbatch's losses, and what Megatron's schedule reports."""
    loss = losses.float().mean()
    # Megatron divides the loss in place by the number of microbatches.
    return loss, {"loss": loss.detach().clone()}
