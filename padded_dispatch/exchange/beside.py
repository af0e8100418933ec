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
whatever their stream's priority. torch's product does that; ours is persistent, and may leave
multiprocessors out (`Room`). The product is launched first, and the side stream begins with a
barrier, so the product has its places before rows are stored; that also holds where all streams
share one queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`). Fewer programs store than alone: they share
multiprocessors.

What it costs. The product takes longer with fewer programs. The figures below are those of a
slower product, with two programs on a multiprocessor; instead of 11 multiprocessors it left 22
programs out. fc1's weight gradient on an H200, microseconds (commit eec4455):

                                      all programs   22 left out
    Qwen3, 64 experts of 512               444           487
    GPT-OSS, 16 experts of 1,024           966         1,068
    Qwen3, added to fp32                   707           799
    GPT-OSS, added to fp32               1,332         1,426

A layer's forward and backward pass in a graph, 2 H200, EP 2, one after the other and beside, with
11 multiprocessors left out and 132 programs that store, milliseconds (commit 80b3b2b):

    Qwen3, factor 1.0                   2.47   2.26      added to fp32   2.91   2.75
    Qwen3, factor 1.25                  2.59   2.41                      3.03   2.90
    Qwen3, factor 1.25, 512 tokens      0.90   0.88
    GPT-OSS, factor 1.0                 4.72   4.65
    GPT-OSS, factor 1.25                4.90   4.83

`pays` is the rule. With the slower product of commit eec4455 Qwen3 took 2.47 and 2.85 at 1.0,
with 11 programs left out 2.56 and 2.88, with 44 2.45 and 2.91, with none 2.58 and 2.99. With 22
left out, 66 programs that store took up to 0.03 longer, 264 and 528 up to 0.04 less or 0.02 more.

Sums that go home (`link_rows="summed"`) do not travel beside a product: a rank adds them before it
sends them, for which few programs are too slow. Qwen3 at factor 1.0 took 2.55 with 132 of them
beside the product, and 2.28 one after the other in another run (commit 7359668).

fc2's weight gradient does not wait: fc1's alone takes longer than the way home, and what waits
keeps its rows alive.

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
        spare: multiprocessors that the product leaves out.
    """

    stores: int = 132
    spare: int = 11


ROOM = Room()


_LINK = 285e3  # Bytes that travel home in a microsecond.
_FLOPS, _MEMORY = 700e6, 4.8e6  # Within 8 % of fc1's weight gradients in `kernels.gemm`.
_LOSS_ADDED, _LOSS_RETURNED = 0.13, 0.11  # Of the product's time, see the table above.
_MARGIN = 1.5  # Not all of the way home is hidden.


def pays(
    *, num_rows: int, width: int, out: int, num_experts: int, num_ranks: int, added: bool
) -> bool:
    """Return whether the way home takes clearly longer than what the product loses beside it.

    Args:
        num_rows: rows of this rank's experts, for uniform routing.
        width: D, of rows of 2 bytes.
        out: G, columns of fc1's result.
        num_experts: on this rank.
        num_ranks: of the expert-parallel group.
        added: the gradient is added to fp32 by its product.

    Example: Qwen3, EP 2, 4,096 tokens. 16,384 of 32,768 rows of 4 KiB cross in 235 us. The product
    takes 378 us, of which it loses 42 at most: it pays. GPT-OSS: 166 us, and 98 of 887 are lost, or
    159 of 1,219 where they are added, for which it does not pay.
    """
    home = num_rows * (num_ranks - 1) / num_ranks * 2 * width / _LINK
    weight_bytes = num_experts * out * width * (8 if added else 2)
    product = 2 * num_rows * width * out / _FLOPS + weight_bytes / _MEMORY
    return home > _MARGIN * product * (_LOSS_ADDED if added else _LOSS_RETURNED)


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
