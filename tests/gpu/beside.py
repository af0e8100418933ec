"""Gradients home beside a weight gradient, and one after the other: equal bits, and speed.

    python -m tests.gpu.beside --out notebooks/results/beside.json --commit SHA

It uses two GPUs of one host. `--only TEXT` runs the parts whose names contain the text:

- "products": our product of weight gradients and torch's, bits and time, with programs left out.
- "room": milliseconds of a layer of `bench`, and the share of its exchange under products, for
  several numbers of programs of the two kernels, in turns with one after the other.
- "replays": 1,000 replays of a graph with the two beside each other equal those of a graph with
  one after the other, bit by bit, in other routings.
- "training": a model trains eagerly with one after the other, and in graphs of each kind with the
  two beside each other; after each step everything is equal, bit by bit.

The results file is complete after each row. `--cpu N` tries the program on N processes over gloo,
where nothing runs beside anything.
"""

import argparse
import dataclasses
import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from padded_dispatch.bench.cases import Case
from padded_dispatch.bench.layer import build, stock_flags
from padded_dispatch.bench.measure import (
    Batch,
    Passes,
    batches,
    hidden_share,
    kernels_ms,
    profiled,
    timed,
)
from padded_dispatch.bench.parts import torchs_outer
from padded_dispatch.exchange.beside import ROOM, Room
from padded_dispatch.megatron import experts as megatron_experts
from padded_dispatch.megatron.compat import training_stream
from padded_dispatch.ops import grouped
from tests.gpu.situations import PARTIAL, WHOLE
from tests.gpu.situations import on_cpu as situation_on_cpu
from tests.support.gpu_cases import ENVIRONMENT, run_cases
from tests.support.gpu_rows import parsed
from tests.support.graph_training import Findings, Situation, replays_equal_eager
from tests.support.parity import megatron

BESIDE, SERIAL = "direct-graphed", "direct-serial-graphed"
_SPARE = (0, 6, 11, 22)
_TRIED = ((132, 11), (132, 0), (264, 16), (132, 6))  # Stores, multiprocessors left; see `Room`.
_TURNS = 5
_SLEEP = 1_000_000  # Clocks, the most that a rank sleeps between two replays.


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """A layer of `bench`. `rooms`: those that are tried. `number`: of replays."""

    name: str
    model: str = "qwen3-30b-a3b"
    tokens: int = 4096
    capacity_factor: float = 1.25
    main_grad: Any = "none"
    rooms: tuple[Room, ...] = ()
    number: int = 1000
    device: str = "cuda"
    ranks: int = 2

    def case(self, contender: str) -> Case:
        """Return the case of `bench`; on a CPU of a contender that runs there."""
        return Case(
            model=self.model,
            ep=self.ranks,
            tokens=self.tokens,
            skew="uniform",
            capacity_factor=self.capacity_factor,
            contender=contender if self.device == "cuda" else "packed",
            main_grad=self.main_grad,
        )

    def layer(self, contender: str) -> nn.Module:
        """Return the layer; all have the same weights."""
        case = self.case(contender)
        flags = stock_flags(case, on_gpu=self.device == "cuda", router_fusion=False)
        return build(case, flags, self.where)

    @property
    def where(self) -> torch.device:
        """This rank's device."""
        on_gpu = self.device == "cuda"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def batches(self) -> list[Batch]:
        """Return the batches of `bench`."""
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        rank = dist.get_rank()
        return batches(self.case(BESIDE), seed=rank, dtype=dtype, device=self.where)


@contextmanager
def _world(case: LayerCase) -> Iterator[None]:
    """Set up Megatron's groups, on a stream that can be captured."""
    with megatron(case.device, expert_model_parallel_size=case.ranks):
        if case.device == "cuda":
            torch.cuda.set_stream(training_stream())
        yield
        gc.collect()  # Layers are cycles, and hold buffers of the groups that end here.


@dataclass(frozen=True, kw_only=True)
class Products:
    """Weight gradients of `counts` rows per expert: O outputs and I inputs of a linear."""

    name: str
    counts: tuple[int, ...]
    out: int
    width: int
    ranks: int = 1
    device: str = "cuda"


def products(case: Products) -> Findings:
    """Compare our product with torch's, and time both."""
    torch.manual_seed(0)
    offsets_L = torch.tensor(case.counts, device=case.device).cumsum(0).int()
    num_rows = sum(case.counts) + 100  # Rows behind the last one are never read.
    dtype = torch.bfloat16 if case.device == "cuda" else torch.float32
    grad_NO = torch.randn(num_rows, case.out, device=case.device, dtype=dtype)
    rows_NI = torch.randn(num_rows, case.width, device=case.device, dtype=dtype)
    for tensor in (grad_NO, rows_NI):
        tensor[-100:] = torch.nan
    given = grad_NO, rows_NI, offsets_L
    expected = torchs_outer(*given)
    ours = grouped.outer_by_expert(*given, 11)
    facts: dict[str, Any] = {"equal_elements": (ours == expected).double().mean().item()}
    sums_LOI = torch.zeros(expected.shape, device=case.device)
    grouped.add_outer_by_expert(*given, sums_LOI)
    spared_LOI = torch.zeros_like(sums_LOI)
    grouped.add_outer_by_expert(*given, spared_LOI, 11)
    broken = []
    if not torch.equal(sums_LOI, spared_LOI):
        broken.append("sums depend on the programs")
    if not torch.equal(ours, grouped.outer_by_expert(*given, 0)):
        broken.append("products depend on the programs")
    if case.device == "cuda":
        calls: dict[str, Callable[[], object]] = {"torch": lambda: torchs_outer(*given)}
        for spare in _SPARE:
            calls[f"spare {spare}"] = lambda spare=spare: grouped.outer_by_expert(*given, spare)
            calls[f"added, spare {spare}"] = lambda spare=spare: grouped.add_outer_by_expert(
                *given, sums_LOI, spare
            )
        facts["us"] = {name: _us(call) for name, call in calls.items()}
    return Findings(facts=facts, broken=tuple(broken))


def _us(call: Callable[[], object]) -> float:
    """Return microseconds of a call: the median of 20 after 5."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(25)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return round(sorted(start.elapsed_time(end) for start, end in events[5:])[10] * 1e3, 1)


class Again(nn.Module):
    """A module around a layer, to be captured by itself: capturing replaces its forward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Return what the layer returns."""
        return self.layer(tokens, logits)


@contextmanager
def _always(room: Room = ROOM) -> Iterator[None]:
    """Let gradients travel beside products with this room, whatever the sizes are."""
    with (
        patch.object(megatron_experts, "ROOM", room),
        patch.object(megatron_experts, "pays", lambda **sizes: True),
    ):
        yield


def rooms(case: LayerCase) -> Findings:
    """Time the layer with each room, in turns with one after the other."""
    tried = []
    with _world(case):
        on_gpu, how = case.device == "cuda", {"main_grad": case.main_grad}
        data, beside = case.batches(), case.layer(BESIDE)
        serial = Passes(Again(case.layer(SERIAL)), data, graphed=on_gpu, **how)
        for room in case.rooms:
            with _always(room):
                passes = Passes(Again(beside), data, graphed=on_gpu, **how)
            samples: dict[str, list[float]] = {"serial_ms": [], "beside_ms": []}
            for _ in range(_TURNS):
                for name, one in zip(samples, (serial, passes), strict=True):
                    timing = timed(one.run, iterations=20, repeats=1, device=case.where)
                    samples[name].append(timing.ms)
            row: dict[str, Any] = {"room": dataclasses.asdict(room), **samples}
            row["of_serial"] = statistics.median(samples["beside_ms"])
            row["of_serial"] /= statistics.median(samples["serial_ms"])
            if on_gpu:
                for name, one in (("serial", serial), ("beside", passes)):
                    kernels = profiled(one.run, case.where)
                    row[f"{name}_hidden_share"] = hidden_share(kernels)
                    row[f"{name}_kernels_ms"] = dict(list(kernels_ms(kernels).items())[:12])
            tried.append(row)
            del passes
            gc.collect()
        del serial
    return Findings(facts={"tried": tried})


class Drawn(list[Batch]):
    """Batches by number, each with a routing of its own, drawn on the device."""

    def __init__(self, first: Batch, number: int) -> None:
        super().__init__([first])
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, number: Any) -> Any:
        tokens, logits = list.__getitem__(self, 0).tokens, list.__getitem__(self, 0).logits
        draw = torch.Generator(tokens.device)
        draw.manual_seed(number * dist.get_world_size() + dist.get_rank())
        drawn = torch.randn(logits.shape, generator=draw, device=logits.device)
        drawn *= (0.1, 1, 4)[number % 3]
        if number % 5 == 4:  # All tokens want one expert, and the last experts get none.
            drawn[..., number % drawn.shape[-1]] += 100
            drawn[..., -(drawn.shape[-1] // 2) :] -= 200
        tokens = torch.randn(tokens.shape, generator=draw, device=tokens.device).to(tokens.dtype)
        return Batch(tokens=tokens, logits=drawn)


def replays(case: LayerCase) -> Findings:
    """Replay two graphs, and compare outputs, gradients and sums after each replay."""
    with _world(case):
        on_gpu = case.device == "cuda"
        layers = [case.layer(contender) for contender in (BESIDE, SERIAL)]
        data = Drawn(case.batches()[0], case.number)
        both = []
        for layer in layers:
            torch.manual_seed(7)  # The gradient of the output is drawn.
            with _always():
                both.append(Passes(Again(layer), data, graphed=on_gpu, main_grad=case.main_grad))
        paces = torch.Generator().manual_seed(dist.get_rank())
        differing: dict[str, Tensor] = {}
        for number in range(case.number):
            results = []
            for passes in both:
                if on_gpu:
                    torch.cuda._sleep(
                        int(torch.randint(_SLEEP, (), generator=paces)) * (number % 3)
                    )
                results.append(_results(passes, number))
            for name, value in results[0].items():
                differs = (_bits(value) != _bits(results[1][name])).any().long()
                differing[name] = differing.get(name, 0) + differs
        counts = {name: int(count) for name, count in differing.items()}
    return Findings(
        differing={name: count for name, count in counts.items() if count},
        facts={"replays": case.number, "tensors": len(counts)},
    )


def _results(passes: Passes, number: int) -> dict[str, Tensor]:
    for parameter in passes._parameters:
        if hasattr(parameter, "main_grad"):
            parameter.main_grad.zero_()
    results = {"output": passes.run(number).detach().clone()}
    assert passes._tokens.grad is not None
    results["gradient of tokens"] = passes._tokens.grad
    fused = passes._main_grad != "none"
    for index, parameter in enumerate(passes._parameters):
        results[f"gradient {index} {tuple(parameter.shape)}"] = (
            parameter.main_grad if fused else parameter.grad
        )
    return results


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def training(case: Situation) -> Findings:
    """Compare eager training, one after the other, with graphs, beside each other."""
    with _always():
        return replays_equal_eager(case)


def situations() -> Iterator[Situation]:
    """Yield trainings in which gradients travel home beside products, in each kind of graph."""
    two: dict[str, Any] = {"ranks": 2, "ep": 2, "exchange": "direct", "eager_home": "after"}
    two |= {"microbatches": 4}
    for scopes in (WHOLE, PARTIAL, ("attn", "moe_router")):
        yield Situation(name=f"training, graphs of {'+'.join(scopes)}", scopes=scopes, **two)
    yield Situation(name="training, local graphs", impl="local", scopes=(), **two)
    plain = {"distributed_optimizer": False, **two}
    yield Situation(name="training, graph of iterations", impl="full_iteration", **plain)
    for module in ("moe", "moe_act"):
        yield Situation(name=f"training, recompute of {module}", recompute=(module,), **two)
    overlap: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    yield Situation(name="training, all overlapped", **overlap, **two)
    yield Situation(name="training, a rank without tokens", idle="rank", replays=8, **two)
    pooled = {"capacity_pool": "receiver", **two}
    yield Situation(name="training, pool receiver", **pooled)
    deep = {"pp": 2, "num_layers": 4, **two, "ranks": 4}
    yield Situation(name="training, PP2", **deep)


def checks() -> Iterator[tuple[str, Callable[[Any], Any], Any]]:
    """Yield all parts: name, function of a rank, case."""
    generator = torch.Generator().manual_seed(1)
    for name, experts, mean, out, width in (
        ("Qwen3", 64, 512, 1536, 2048),
        ("GPT-OSS", 16, 1024, 5760, 2880),
    ):
        counts = torch.randint(mean // 2, mean * 3 // 2, (experts,), generator=generator).tolist()
        counts[3] = 0
        case = Products(name=f"products, {name}", counts=tuple(counts), out=out, width=width)
        yield "our product beside torch's", products, case
    few = tuple(Room(stores=stores, spare=spare) for stores, spare in _TRIED)
    for main_grad in ("none", "fused"):
        for model, name in (("qwen3-30b-a3b", "Qwen3"), ("gpt-oss-20b", "GPT-OSS")):
            for tokens, factor in ((4096, 1.0), (4096, 1.25), (512, 1.25)):
                case = LayerCase(
                    name=f"room, {name}, main_grad {main_grad}, factor {factor}, {tokens} tokens",
                    model=model,
                    main_grad=main_grad,
                    tokens=tokens,
                    capacity_factor=factor,
                    rooms=few if factor == 1.25 and tokens == 4096 else few[:1],
                )
                yield "milliseconds by room", rooms, case
    for main_grad in ("none", "fused"):
        name = f"replays, Qwen3, main_grad {main_grad}"
        case = LayerCase(name=name, main_grad=main_grad, tokens=1024)
        yield "replays beside equal replays after", replays, case
    for situation in situations():
        yield "graphs with both beside equal eager training with one after", training, situation


def on_cpu(case: Any) -> Any:
    """Return a small version of a case for the CPU; None if Megatron needs a GPU for it."""
    if isinstance(case, Situation):
        return situation_on_cpu(case)
    if isinstance(case, Products):
        counts = tuple(count % 5 for count in case.counts)
        return dataclasses.replace(case, device="cpu", counts=counts, out=8, width=16)
    if case.main_grad == "fused":
        return None
    small = {"model": "tiny", "tokens": 16, "number": 10, "rooms": case.rooms[:2]}
    return dataclasses.replace(case, device="cpu", **small)


def main() -> int:
    """Run all parts; return 1 if one failed."""
    arguments = parsed(argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]))
    wanted = (
        (check, run, on_cpu(case) if arguments.cpu else case) for check, run, case in checks()
    )
    return run_cases(arguments, ENVIRONMENT, wanted)


if __name__ == "__main__":
    sys.exit(main())
