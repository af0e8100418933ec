"""What trainings of a small GPT share: chunks in Megatron's DDP, optimizer, microbatch."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor

from padded_dispatch.megatron.compat import HYBRID_MODEL
from padded_dispatch.train.model import hybrid_stack
from tests.support import tiny

# So high that some gradients of the first steps overflow in fp16.
LOSS_SCALE = 2.0**18


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A small GPT, where it runs, and how ranks share it.

    `machines`: a letter for the machine of each rank; "" for one machine. `pattern`: of a
    HybridModel in place of a GPTModel.
    """

    device: str = "cpu"
    machines: str = ""
    dtype: torch.dtype = torch.float32
    ranks: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int = 1
    num_layers: int = 2
    pattern: str = ""
    hidden: int = 16
    heads: int = 2
    ffn: int = 24
    num_experts: int = 4
    top_k: int = 2
    vocab: int = 32

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.cp * self.pp)

    @property
    def groups(self) -> dict[str, int | None]:
        return {
            "tensor_model_parallel_size": self.tp,
            "context_parallel_size": self.cp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
        }

    def config(self, dispatcher: str = "padded_alltoall", **more: Any) -> Any:
        """Return Megatron's config for these sizes, with `more` fields and padded options."""
        fields: dict[str, Any] = {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "ffn_hidden_size": self.ffn,
            "moe_ffn_hidden_size": self.ffn,
            "num_moe_experts": self.num_experts,
            "moe_router_topk": self.top_k,
            "moe_grouped_gemm": self.on_gpu,
            "use_cpu_initialization": not self.on_gpu,
            "sequence_parallel": self.tp > 1,
            "params_dtype": self.dtype,
            "bf16": self.dtype == torch.bfloat16,
            "fp16": self.dtype == torch.float16,
            **self.groups,
        }
        if self.pattern:
            layers, *later = self.pattern.split("/")
            fields |= {"num_layers": len(layers.replace("|", "")), "is_hybrid_model": True}
            fields |= {"mtp_num_layers": len(later)} if later else {}
        return tiny.config(dispatcher, **fields | more)


def ddp_chunks(
    config: TransformerConfig,
    ddp: DistributedDataParallelConfig,
    *,
    vocab: int,
    seq: int,
    pattern: str = "",
) -> list[Any]:
    """Build this rank's chunks, each in Megatron's DDP; on GPUs, if there are any."""
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
        kind, more = GPTModel, {"mtp_block_spec": mtp}
        if pattern:
            kind, more = HYBRID_MODEL, {"hybrid_layer_pattern": pattern}
            spec = hybrid_stack(spec.layer_specs[0])
            spec.submodules.mtp_block_spec = mtp
        model: Any = kind(
            config,
            spec,
            vocab_size=vocab,
            max_sequence_length=seq,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            position_embedding_type="rope",
            vp_stage=vp_stage,
            **more,
        )
        if not on_gpu:
            _without_last_bias(model)
        for parameter in model.parameters():  # As Megatron-LM's training does.
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if config.bf16 or config.fp16:
            model = Float16Module(config, model.cuda() if on_gpu else model)
        chunk = DistributedDataParallel(config, ddp, model, disable_bucketing=stage > 0)
        chunk.broadcast_params()
        chunks.append(chunk.train())
    if ddp.overlap_grad_reduce:
        # Like Megatron's training: gradients are reduced in the last microbatch only.
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if vpp else no_sync[0]
    return chunks


def gpt_name(name: str) -> str:
    """Return the name in a GPTModel of what a HybridModel of "*E*E" has in layer 2 i or 2 i + 1."""

    def of_pair(layer: re.Match[str]) -> str:
        return f"decoder.layers.{int(layer[1]) // 2}."

    name = name.replace("mtp_model_layer.layers.0.", "mtp_model_layer.")
    name = name.replace("mtp_model_layer.layers.1.", "mtp_model_layer.")
    return re.sub(r"decoder\.layers\.(\d+)\.", of_pair, name).replace(
        "final_norm", "final_layernorm"
    )


def _without_last_bias(model: Any) -> None:
    """Remove fc2 biases, which SequentialMLP adds in place to a view; CPU autograd rejects this."""
    for name, module in model.named_modules():
        if ".local_experts." in name and name.endswith("linear_fc2"):
            module.register_parameter("bias", None)


def megatron_adam(chunks: list[Any], ddp: DistributedDataParallelConfig) -> Any:
    """Return Megatron's Adam; on a CPU steps are long.

    In fp16 the scale of losses starts too high, is halved after each step that overflows, and is
    doubled after each other one.
    """
    config: Any = get_model_config(chunks[0])
    optimizer = OptimizerConfig(
        optimizer="adam",
        lr=0.1 if config.use_cpu_initialization else 1e-3,
        clip_grad=1.0,
        bf16=config.bf16,
        fp16=config.fp16,
        initial_loss_scale=LOSS_SCALE,
        loss_scale_window=1,
        hysteresis=1,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=ddp.use_distributed_optimizer,
        overlap_param_gather=ddp.overlap_param_gather,
    )
    return get_megatron_optimizer(optimizer, chunks)


def loss_scaling(optimizer: Any) -> dict[str, Tensor]:
    state = {}
    for index, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        scaler = part.grad_scaler
        state |= {
            f"loss scale {index}": scaler.scale.clone(),
            f"steps to a larger loss scale {index}": torch.tensor(scaler._growth_tracker),
            f"steps to a smaller loss scale {index}": torch.tensor(scaler._hysteresis_tracker),
            f"found_inf {index}": part.found_inf.clone(),
        }
    return state


@contextmanager
def sequence_parallel_norms() -> Iterator[None]:
    """Let the local layer specs have RMS norms under sequence parallelism inside the block."""

    def norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        made = torch.nn.RMSNorm(hidden_size, eps=eps)
        # Megatron sums gradients of what has this attribute over the tensor-parallel group.
        vars(made.weight)["sequence_parallel"] = config.sequence_parallel
        return made

    with patch.object(WrappedTorchNorm, "__new__", norm):
        yield


def model_inputs(ids: Tensor) -> dict[str, Tensor | None]:
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
