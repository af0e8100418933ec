"""How a worker joins the others: its device, Megatron's process groups, the random seeds."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed import distributed_c10d

from padded_dispatch.megatron.compat import forget_moe_state, training_stream
from padded_dispatch.megatron.cpu import megatron_on_cpu
from padded_dispatch.train.settings import Layout, Settings


@contextmanager
def world(layout: Layout) -> Iterator[torch.device]:
    """The default process group; this worker's device.

    After an error nothing is torn down: peers may be inside a collective, and leaving a group that
    they are in can block. The process ends anyway.
    """
    if layout.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        # DDP's AccumulateGrad nodes remember the stream that they were made on, and on the default
        # one no CUDA graph of a backward pass can be captured.
        torch.cuda.set_stream(training_stream())
        dist.init_process_group("nccl", device_id=device)
        yield device
    else:
        dist.init_process_group("gloo")
        with megatron_on_cpu():
            yield torch.device("cpu")
    dist.destroy_process_group()


def free_memory(device: torch.device) -> None:
    """Between two runs in one process: what the one before has left behind."""
    gc.collect()  # DDP's hooks and the model hold each other.
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def model_parallel(layout: Layout) -> Iterator[None]:
    """Megatron's process groups, over an existing default one.

    At the end they end, too: Megatron forgets them, and each holds threads, on GPUs memory. Runs
    that follow one another in one layout share them: with a communicator of NCCL's for each of some
    20, made and ended, they took 11 of the 18 seconds of a short run on 4 H200.
    """
    before = set(distributed_c10d._world.pg_map)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    yield
    parallel_state.destroy_model_parallel()
    for group in reversed([g for g in distributed_c10d._world.pg_map if g not in before]):
        dist.destroy_process_group(group)


@contextmanager
def megatron_state(settings: Settings) -> Iterator[None]:
    """What else a run finds in Megatron's globals, inside `model_parallel`: seeds and counts."""
    layout, recipe, graphs = settings.layout, settings.recipe, settings.output.graph != "none"
    # Read by Transformer Engine when attention is built; Megatron's deterministic_mode asks for it.
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = str(int(not recipe.deterministic))
    # Stages of a pipeline hold different layers, which must not start with the same weights.
    stage_seed = recipe.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage_seed)
    # Graphs can hold the states of Transformer Engine's tracker only. A run before this one in the
    # same process may have left the other.
    model_parallel_cuda_manual_seed(stage_seed, te_rng_tracker=graphs, force_reset_rng=True)
    init_num_microbatches_calculator(
        dist.get_rank(), None, recipe.global_batch, recipe.micro_batch, layout.dp
    )
    forget_moe_state()
    yield
    unset_num_microbatches_calculator()
