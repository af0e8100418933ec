"""Settings that spoil CUDA graphs, named before anything is captured.

Megatron's training script looks at most of them while it reads its arguments; a plain loop has no
such place. What Megatron's config itself refuses (scopes that exclude each other, full recompute
with graphs of layers, CPU offloading) is not repeated here.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor


def check_random_states(device: torch.device) -> None:
    """Refuse a random state tracker that sets states from host memory, as Megatron's own does.

    Raises:
        ValueError: on a GPU, where such a state is inside a capture.
    """
    tracker: Any = get_cuda_rng_tracker()
    states = tracker.get_states().values()
    if device.type == "cuda" and any(isinstance(state, Tensor) for state in states):
        raise ValueError(
            "te_rng_tracker=False is not possible with CUDA graphs: random states must be "
            "generators that a graph can hold; call model_parallel_cuda_manual_seed(seed, "
            "te_rng_tracker=True) before the model is built"
        )


def check_gradients_are_not_read(chunks: list[Any]) -> None:
    """Refuse checks of gradients that wait for their outcome within a step.

    Args:
        chunks: the model's, each in Megatron's DistributedDataParallel.

    Raises:
        ValueError: names the settings of its config.
    """
    for name in ("check_for_nan_in_grad", "check_for_large_grads"):
        if any(getattr(chunk.ddp_config, name) for chunk in chunks):
            raise ValueError(
                f"{name}=True is not possible with one CUDA graph of a whole step: it reads every "
                "norm on the host; set it to False in DistributedDataParallelConfig, or capture "
                "layers"
            )
