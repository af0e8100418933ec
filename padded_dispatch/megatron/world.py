"""Join a worker to the default process group, for jobs of one process per device."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist

from padded_dispatch.megatron.compat import training_stream
from padded_dispatch.megatron.cpu import megatron_on_cpu


@contextmanager
def world(device_type: Literal["cpu", "cuda"]) -> Iterator[torch.device]:
    """Join the default process group (NCCL or gloo) and yield this worker's device.

    "cuda" takes the GPU numbered LOCAL_RANK. After an error nothing is torn down: peers may be
    inside a collective, and leaving a group that they are in can block.
    """
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        # DDP's AccumulateGrad nodes keep the stream that they were created on, and on the default
        # stream no CUDA graph of a backward pass can be captured.
        torch.cuda.set_stream(training_stream())
        dist.init_process_group("nccl", device_id=device)
        yield device
    else:
        dist.init_process_group("gloo")
        with megatron_on_cpu():
            yield torch.device("cpu")
    dist.destroy_process_group()
