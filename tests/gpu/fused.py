"""Products that send rows home, and one after the other: equal bits, and speed.

    python -m tests.gpu.fused --out notebooks/results/fused.json --commit SHA

It uses two GPUs of one host. `--only TEXT` runs the parts whose names contain the text:

- "products": fc2 and the gradients of fc1's rows, bits and time beside the product, the way home,
  and both after another.
- "replays": 1,000 replays of a graph whose products send rows equal those of a graph with one after
  the other, bit by bit, in other routings; also where each rank sleeps before it sums its slots.
- "training": a model trains eagerly with one after the other, and in graphs of each kind with
  products that send rows; after each step everything is equal, bit by bit.

The results file is complete after each row. `--cpu N` tries the program on N processes over gloo,
where no product sends rows.
"""

import argparse
import dataclasses
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from padded_dispatch.bench.cases import MODELS, Case
from padded_dispatch.bench.layer import build, stock_flags
from padded_dispatch.bench.measure import Batch, Passes, batches
from padded_dispatch.exchange import fused
from padded_dispatch.exchange.direct import return_rows
from padded_dispatch.megatron.compat import training_stream
from padded_dispatch.ops.grouped import linear_by_expert, row_tiles
from tests.gpu.direct import graphed_us, my_gpu
from tests.gpu.situations import PARTIAL, WHOLE
from tests.gpu.situations import on_cpu as situation_on_cpu
from tests.support.direct_parity import Layer, direct_of, make_inputs
from tests.support.gpu_cases import ENVIRONMENT, run_cases
from tests.support.gpu_rows import parsed
from tests.support.graph_training import Findings, Situation, replays_equal_eager
from tests.support.parity import megatron

FUSED, SERIAL = "direct-graphed", "direct-serial-graphed"
_SLEEP = 1_000_000  # Clocks, the most that a rank sleeps between two replays.


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """A layer of `bench`. `number`: of replays. `late`: ranks sleep before they sum slots."""

    name: str
    model: str = "qwen3-30b-a3b"
    tokens: int = 4096
    capacity_factor: float = 1.25
    main_grad: Any = "none"
    number: int = 1000
    late: bool = False
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
        return batches(self.case(FUSED), seed=rank, dtype=dtype, device=self.where)


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
    """Both products of a layer that send rows home."""

    name: str
    model: str
    tokens: int
    ranks: int = 2


def products(case: Products) -> Findings:
    """Compare both ways, and time them."""
    shape, device, size = MODELS[case.model], my_gpu(), dist.get_world_size()
    layer = Layer(
        tokens=case.tokens,
        width=shape.hidden_size,
        top_k=shape.top_k,
        local_experts=shape.num_experts // size,
        microbatches_in_flight=1,
    )
    inputs, dispatcher = make_inputs(layer, "uniform", 0, device), layer.dispatcher("direct")
    sizes = dispatcher.config.sizes(case.tokens)
    us: dict[str, dict[str, float]] = {}
    differing = {}
    with torch.no_grad():
        sent = dispatcher.dispatch(inputs.tokens_TD, inputs.probs_TE, inputs.map_TE)
        plan = sent.plan
        del sent  # Its buffer is the next pass's, too.
        given = inputs.tokens_TD, inputs.probs_TE, plan, sizes.num_rows
        _, linears = fused.prepare(direct_of(dispatcher), *given)
        offsets_L = linears.home[0][:, -1].contiguous()
        tiles = row_tiles(offsets_L, sizes.num_rows)
        probs_N = torch.rand(sizes.num_rows, device=device)
        for name, width, beside in (
            ("fc2", shape.ffn_size, None),
            ("gradients of fc1's rows", 2 * shape.ffn_size, probs_N),
        ):
            weight_LOI = _drawn(layer.local_experts, layer.width, width)
            if beside is not None:
                weight_LOI = weight_LOI.transpose(1, 2).contiguous().transpose(1, 2)
            linear = _drawn(sizes.num_rows, width), weight_LOI, None, None, offsets_L, tiles
            both = *linear[:4], beside, *linear[4:], *linears.home
            out_ND = linear_by_expert(*linear)

            def after(linear: Any = linear, beside: Any = beside) -> tuple[Tensor, Tensor]:
                return return_rows(linear_by_expert(*linear), beside, *linears.home)

            calls: dict[str, Callable[[], object]] = {
                "product": lambda linear=linear: linear_by_expert(*linear),
                "home": lambda out=out_ND, beside=beside: return_rows(out, beside, *linears.home),
                "one after the other": after,
                "fused": lambda both=both: fused.return_product(*both),
            }
            for got, expected in zip(fused.return_product(*both), after(), strict=True):
                differs = int((got != expected).sum())
                if differs:
                    differing[name] = differs
            us[name] = {label: graphed_us(call) for label, call in calls.items()}
    return Findings(differing=differing, facts={"us": us})


def _drawn(*shape: int) -> Tensor:
    return 0.02 * torch.randn(shape, device=my_gpu(), dtype=torch.bfloat16)


class Again(nn.Module):
    """A module around a layer, to be captured by itself: capturing replaces its forward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Return what the layer returns."""
        return self.layer(tokens, logits)


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


@contextmanager
def _late_sums() -> Iterator[None]:
    """Capture a sleep before each sum of slots, of another length on each rank."""
    draw, sums = torch.Generator().manual_seed(dist.get_rank()), fused.received

    def late(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        torch.cuda._sleep(int(torch.randint(_SLEEP, (), generator=draw)))
        return sums(*args, **kwargs)

    with patch.object(fused, "received", late):
        yield


def replays(case: LayerCase) -> Findings:
    """Replay two graphs, and compare outputs, gradients and sums after each replay."""
    with _world(case):
        on_gpu = case.device == "cuda"
        layers = [case.layer(contender) for contender in (FUSED, SERIAL)]
        data = Drawn(case.batches()[0], case.number)
        both = []
        for layer in layers:
            torch.manual_seed(7)  # The gradient of the output is drawn.
            with _late_sums() if case.late else nullcontext():
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
    """Compare eager training, one after the other, with graphs whose products send rows."""
    return replays_equal_eager(case)


def situations() -> Iterator[Situation]:
    """Yield trainings whose products send rows home, in each kind of graph."""
    two: dict[str, Any] = {"ranks": 2, "ep": 2, "exchange": "direct"}
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
    for model in ("qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3"):
        for tokens in (4096, 512):
            case = Products(name=f"products, {model}, {tokens} tokens", model=model, tokens=tokens)
            yield "products that send rows equal one after the other", products, case
    case = Products(name="products, tiny, 67 tokens", model="tiny", tokens=67)
    yield "products that send rows equal one after the other", products, case
    for main_grad in ("none", "fused"):
        name = f"replays, Qwen3, main_grad {main_grad}"
        case = LayerCase(name=name, main_grad=main_grad, tokens=1024)
        yield "replays equal replays of one after the other", replays, case
    case = LayerCase(name="replays, Qwen3, late sums", late=True, tokens=1024)
    yield "replays equal replays of one after the other", replays, case
    for situation in situations():
        yield "graphs equal eager training of one after the other", training, situation


def on_cpu(case: Any) -> Any:
    """Return a small version of a case for the CPU; None if Megatron needs a GPU for it."""
    if isinstance(case, Situation):
        return situation_on_cpu(case)
    if isinstance(case, Products) or case.main_grad == "fused" or case.late:
        return None
    return dataclasses.replace(case, device="cpu", model="tiny", tokens=16, number=10)


def main() -> int:
    """Run all parts; return 1 if one failed."""
    arguments = parsed(argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]))
    wanted = (
        (check, run, on_cpu(case) if arguments.cpu else case) for check, run, case in checks()
    )
    return run_cases(arguments, ENVIRONMENT, wanted)


if __name__ == "__main__":
    sys.exit(main())
