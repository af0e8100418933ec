"""Train a small GPT with experts on Megatron-Core, evaluate it, generate from it, and save it.

    torchrun --nproc-per-node 2 gpt_moe.py --save checkpoint
    torchrun --nproc-per-node 2 gpt_moe.py --load checkpoint --dispatcher stock

They run on GPUs, or all on CPUs. The second goes on for 20 steps with Megatron's dispatcher.
"""

import argparse
import os

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, distributed, optimizer, parallel_state
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from padded_dispatch.megatron import StepHooks, install, megatron_on_cpu
from padded_dispatch.train.model import HYBRID_MODEL, hybrid_stack

VOCABULARY, LENGTH, BATCH, PASSES = 64, 32, 8, 2  # PASSES: micro-batches of a step, on each rank.
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
PADDED = {"moe_token_dispatcher_type": "padded_alltoall", "moe_expert_capacity_factor": 1.25}
STOCK = {"moe_token_dispatcher_type": "alltoall" if ON_GPU else "allgather"}


def build(dispatcher):
    """Return the model in Megatron's DDP; nothing but the dispatcher differs from stock."""
    install()  # Before the config is made.
    # 0.19 calls GPTModel deprecated. In HybridModel attention (*) and experts (E) alternate.
    pattern = {"hybrid_layer_pattern": "*E*E"} if HYBRID_MODEL else {}
    layers = dict(num_layers=4 if pattern else 2, is_hybrid_model=bool(pattern))
    layers |= dict(hidden_size=64, num_attention_heads=4, normalization="RMSNorm")
    layers |= dict(add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0)
    experts = dict(num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=64)
    experts |= dict(gated_linear_unit=True, activation_func=torch.nn.functional.silu)
    experts |= dict(moe_aux_loss_coeff=1e-2, expert_model_parallel_size=dist.get_world_size())
    numbers = dict(bf16=ON_GPU, params_dtype=torch.bfloat16 if ON_GPU else torch.float32)
    numbers |= dict(moe_grouped_gemm=ON_GPU, use_cpu_initialization=not ON_GPU)
    config = TransformerConfig(**layers, **experts, **numbers, **dispatcher)
    config.finalize_model_grads_func = distributed.finalize_model_grads
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, ON_GPU, normalization="RMSNorm")
    spec = hybrid_stack(spec.layer_specs[0]) if HYBRID_MODEL else spec
    kind, rope = HYBRID_MODEL or GPTModel, {"position_embedding_type": "rope"}
    model = kind(config, spec, VOCABULARY, LENGTH, **rope, **pattern)
    model = Float16Module(config, model.cuda()) if ON_GPU else model
    settings = distributed.DistributedDataParallelConfig()
    return distributed.DistributedDataParallel(config, settings, model)


def batches(seed):
    """Yield tokens and labels without end; 5 x + 7, modulo 64, follows each token x."""
    draw = torch.Generator().manual_seed(seed * dist.get_world_size() + dist.get_rank())
    while True:
        text = [torch.randint(VOCABULARY, (BATCH,), generator=draw)]
        for _ in range(LENGTH):
            text.append((5 * text[-1] + 7) % VOCABULARY)
        text = torch.stack(text, 1).to(DEVICE)
        yield text[:, :-1].contiguous(), text[:, 1:].contiguous()


def run(model, data, *, forward_only=False):
    """Run the micro-batches of a step, backward too; return the mean loss of all ranks."""

    def forward_step(data, model):
        tokens, labels = next(data)
        positions = torch.arange(LENGTH, device=DEVICE).expand_as(tokens)
        losses = model(tokens, positions, None, labels=labels)
        # Two means, because Megatron divides the first by the number of micro-batches, in place.
        return losses, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})

    sizes = dict(num_microbatches=PASSES, seq_length=LENGTH, micro_batch_size=BATCH)
    what = dict(forward_step_func=forward_step, data_iterator=data, model=[model])
    losses = get_forward_backward_func()(**what, **sizes, forward_only=forward_only)
    loss = torch.stack([each["loss"] for each in losses]).mean()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


@torch.no_grad()
def generate(model, token, count):
    """Return a token and `count` greedy ones behind it. All ranks take part; no row is dropped."""
    tokens = torch.tensor([[token]], device=DEVICE)
    for length in range(1, count + 1):
        logits = model(tokens, torch.arange(length, device=DEVICE)[None], None)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    return tokens[0].tolist()


def main(given):
    """Train, evaluate and generate, from a checkpoint or from the start."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1234)
    model = build(PADDED if given.dispatcher == "padded" else STOCK)
    settings = optimizer.OptimizerConfig(lr=3e-3, bf16=ON_GPU)
    adam = optimizer.get_megatron_optimizer(settings, [model])
    if given.load:
        weights = model.module.sharded_state_dict()
        state = {"model": weights, "adam": adam.sharded_state_dict({"model": weights}, True)}
        state = dist_checkpointing.load(state, given.load)
        model.module.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
    after_step = StepHooks([model]).after_step if given.dispatcher == "padded" else lambda: None
    show, data = print if dist.get_rank() == 0 else id, batches(seed=1)
    for step in range(1, 21 if given.load else 61):
        model.zero_grad_buffer()
        adam.zero_grad()
        loss = run(model, data)
        adam.step()
        after_step()  # Warns of dropped rows.
        if step % 20 == 0:
            show(f"step {step}: loss {loss:.4f}")
    model.eval()
    show(f"held-out loss {run(model, batches(seed=2), forward_only=True):.4f}")
    show(f"generated {generate(model, 3, 8)}")
    if given.save:
        os.makedirs(given.save, exist_ok=True)
        weights = model.module.sharded_state_dict()
        state = {"model": weights, "adam": adam.sharded_state_dict({"model": weights})}
        dist_checkpointing.save(state, given.save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dispatcher", choices=["padded", "stock"], default="padded")
    parser.add_argument("--save", help="folder for a checkpoint")
    parser.add_argument("--load", help="folder of a checkpoint to go on with")
    dist.init_process_group("nccl" if ON_GPU else "gloo", device_id=DEVICE if ON_GPU else None)
    with torch.cuda.device(DEVICE) if ON_GPU else megatron_on_cpu():
        main(parser.parse_args())
    dist.destroy_process_group()
