"""Set up a run in a worker: Megatron's process groups and its global state."""

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

from padded_dispatch.megatron.compat import forget_moe_state
from padded_dispatch.train.settings import Layout, Settings


def free_memory(device: torch.device) -> None:
    """Free what the last run in this process has left in memory."""
    gc.collect()  # DDP's hooks and the model reference each other.
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def model_parallel(layout: Layout) -> Iterator[None]:
    """Create Megatron's process groups over the default one, and destroy them at the end.

    Megatron only drops its references, but each group holds threads and, on GPUs, memory.
    Consecutive runs with the same layout share the groups: creating and destroying some 20 NCCL
    communicators took 11 of the 18 seconds of a short run on 4 H200.
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
    """Set Megatron's other globals for a run, inside `model_parallel`: seeds and batch sizes."""
    layout, recipe, graphs = settings.layout, settings.recipe, settings.output.graph != "none"
    # Transformer Engine reads it when attention is built; deterministic_mode requires it.
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = str(int(not recipe.deterministic))
    # Pipeline stages hold different layers, which must not start with the same weights.
    stage_seed = recipe.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage_seed)
    # CUDA graphs need Transformer Engine's RNG tracker. An earlier run in the same process may have
    # left the other one, hence the reset.
    model_parallel_cuda_manual_seed(stage_seed, te_rng_tracker=graphs, force_reset_rng=True)
    init_num_microbatches_calculator(
        dist.get_rank(), None, recipe.global_batch, recipe.micro_batch, layout.dp
    )
    forget_moe_state()
    yield
    unset_num_microbatches_calculator()
