"""Gradients that travel home beside the product of a weight gradient, on two streams.

The backward pass of experts ends with fc1. Once it has the gradients of its rows they can travel
home, and the gradient of its weight is still to be computed. One needs links, the other needs the
tensor cores:

    stream of the pass  ... gradients of rows | fork | gradient of fc1's weight    | join | router
    side stream                               |      | barrier, rows, barrier, sum |

The gradient of the weight waits in a queue (`padded_dispatch.ops.grouped.Delayed`) that fc1 fills
in its backward pass and the push of the dispatch empties in its own. To autograd the weight is an
input of the push, which therefore gives it its gradient: once, when the product that computes it is
on the stream. Hooks, such as those of Megatron's DDP, run behind that and behind the join.

Why it is safe. Fork and join are in one node of autograd, so whatever graph captures the node holds
both, and all that other nodes do is ordered as if there were one stream. That is what
`padded_dispatch.exchange.direct` asks of the calls of a process. Memory: tensors of the pass that
the side stream reads live until the join. Tensors of the side stream are used behind the join, and
the next ones that may get their memory are made behind the next fork, which comes later on the
stream of the pass. So no tensor has to be recorded on a stream. The bits do not depend on the
streams.

Room. A product that fills the device keeps the programs that store rows waiting until its own end,
whatever their stream's priority. torch's product does that; ours is persistent, and a number of
programs may be left out (`Room`). The first kernel of the side stream is a barrier, so the product
has its places before rows are stored. Fewer programs store than alone: they share multiprocessors.

fc2's weight gradient does not wait: fc1's alone takes longer than the way home where experts are
wide enough to be worth it, and what waits keeps its rows alive.

Nothing of the forward pass runs beside a product. Rows come home when fc2 is done, and a layer has
no product behind it but that of shared experts: Megatron's option, see `exchange.direct`. Halves of
experts, each with an exchange of its own, gained too little for two streams through all stages.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from padded_dispatch.ops.grouped import Delayed

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Room:
    """Programs of the two kernels that share the device.

    Attributes:
        stores: the most programs that store rows, for each block of columns.
        spare: programs of the product that are left out, of two on each multiprocessor.
    """

    stores: int = 132
    spare: int = 22


ROOM = Room()


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A weight gradient that is computed while gradients of rows travel home.

    Attributes:
        weight: [L, out, in], of fc1.
        delayed: where fc1's backward pass leaves the gradient; one for each pass.
        room: what the two leave each other.
    """

    weight: Tensor
    delayed: Delayed
    room: Room

    def run(self, travel: Callable[[], _T], device: torch.device) -> tuple[_T, Tensor]:
        """Return what `travel` returns on the side stream, and the gradient of the weight."""
        assert len(self.delayed) == 1, "fc1's backward pass comes before that of the dispatch"
        gradient = functools.partial(self.delayed.popleft(), spare=self.room.spare)
        if device.type != "cuda":
            return travel(), gradient()
        return on_two_streams(travel, gradient, device)


def on_two_streams(
    travel: Callable[[], _T], compute: Callable[[], Tensor], device: torch.device
) -> tuple[_T, Tensor]:
    """Run `compute` on the current stream and `travel` on the side stream; return both results.

    The current stream waits for the side stream at the end, the host for neither.
    """
    stream, side = torch.cuda.current_stream(device), side_stream(device)
    side.wait_stream(stream)
    computed = compute()
    with torch.cuda.stream(side):
        travelled = travel()
    stream.wait_stream(side)
    return travelled, computed


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the side stream of a device, the same for all layers."""
    return torch.cuda.Stream(device, priority=-1)
