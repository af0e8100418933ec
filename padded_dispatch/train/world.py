"""How a worker joins the others: its device, Megatron's process groups, the random seeds."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from padded_dispatch.megatron.cpu import megatron_on_cpu
from padded_dispatch.train.settings import Layout


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
        torch.cuda.set_stream(torch.cuda.Stream())
        dist.init_process_group("nccl", device_id=device)
        yield device
    else:
        dist.init_process_group("gloo")
        with megatron_on_cpu():
            yield torch.device("cpu")
    dist.destroy_process_group()


@contextmanager
def model_parallel(layout: Layout, seed: int) -> Iterator[None]:
    """Megatron's groups and random states, over an existing default process group."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    # Stages of a pipeline hold different layers, which must not start with the same weights.
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage_seed)
    model_parallel_cuda_manual_seed(stage_seed)
    yield
    parallel_state.destroy_model_parallel()
