"""One store for the rows of all layers of a model chunk, and what a pass has instead of it.

(To be written by the owner of the store; this is its interface.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """Rows that backward needs. Row n of each belongs together.

    Attributes:
        rows_MD: what fc1 reads.
        fc1_MG: its result; backward overwrites it with its gradient.
        prob_M: fp32.
        home_M: int64, see `exchange.Layout`.
    """

    rows_MD: Tensor
    fc1_MG: Tensor
    prob_M: Tensor
    home_M: Tensor


@dataclass(frozen=True, kw_only=True)
class Room:
    """The room of one pass of one layer.

    Attributes:
        top: int32 [2] on the device: rows in use, and rows that would be if all had found room;
            None where rows begin at 0 and nothing stays.
        first: whether rows begin at 0 whatever `top` says.
        limit: the row that must not be reached, of the store.
        most: the most rows of this pass (N).
        later: rows that the passes which follow are sure to have, for the figure of need.
        entry: the host's mark on the stack; None without a stack. `done` is called behind backward.
    """

    top: Tensor | None
    first: bool
    limit: int
    most: int
    later: int
    entry: Any

    def buffers(self, width: int, fc1_width: int, dtype: torch.dtype, device: torch.device) -> Buffers:
        """Return the memory of the rows."""
        ...


class Rooms(Protocol):
    """Where the rows of a pass may lie: a stack of a store, or memory of the pass itself."""

    def take(self, count_SL: Tensor) -> Room:
        """Return the room of the pass that begins."""
        ...
