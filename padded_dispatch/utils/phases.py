"""What the calling thread is in the middle of: a capture, a backward pass."""

import torch


def is_capturing() -> bool:
    """Return whether the current stream captures a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def in_backward() -> bool:
    """Return whether backward runs, as it does around a recomputed pass, which keeps nothing."""
    return torch._C._current_graph_task_id() != -1
