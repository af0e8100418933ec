"""What fp8 is tested by on GPUs: trainings with and without graphs, parity with stock, and time.

On a CPU nothing quantizes, and a stand-in takes the place of graphs: that tries the program only.
"""

import dataclasses
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from torch import Tensor, nn

from padded_dispatch.bench.cases import CONTENDERS, Case
from padded_dispatch.bench.layer import build, stock_flags
from padded_dispatch.bench.measure import Passes, batches, timed
from padded_dispatch.megatron.compat import training_stream
from padded_dispatch.megatron.graphs.capture import release
from padded_dispatch.megatron.graphs.selftest import first_microbatch
from tests.support.graph_training import Findings, bits
from tests.support.layer_parity import LayerCase, layer_parity
from tests.support.parity import megatron
from tests.support.retried_training import EAGER_STEPS, RetriedCase, Training, world

# Recipes that Hopper runs, and the numbers that Megatron's documentation gives for them.
RECIPES = {"tensorwise": "hybrid", "delayed": "hybrid", "blockwise": "e4m3"}


def fp8_fields(recipe: str | None) -> dict[str, Any]:
    """Return fields of Megatron's config; None is bf16."""
    return {} if recipe is None else {"fp8": RECIPES[recipe], "fp8_recipe": recipe}


@dataclass(frozen=True, kw_only=True)
class QuantizedCase(RetriedCase):
    """A model in fp8, and what is captured; with "layer" by `LayerGraphs` and by Megatron alone.

    `recipe`: Megatron's fp8_recipe. The steps are `EAGER_STEPS` eager ones and the replays.
    """

    recipe: str
    microbatches: int = 2
    dropout: float = 0.0
    factor: float = 1.25


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """The layer of a `LayerCase` with this recipe, without graphs, beside stock's dropless one."""

    name: str
    recipe: str
    ranks: int
    device: str = "cuda"
    sizes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SpeedCase:
    """A contender of `padded-dispatch bench` in fp8, or in bf16 if it has no recipe.

    Each pass is a step's first microbatch, which quantizes all weights.
    """

    name: str
    contender: str
    recipe: str | None
    ranks: int
    device: str = "cuda"
    model: str = "qwen3-30b-a3b"
    tokens: int = 4096
    capacity_factor: float = 1.25
    iterations: int = 20
    repeats: int = 5


def graphed_equals_eager(case: QuantizedCase) -> Findings:
    """Compare trainings with graphs to an eager one, step by step; runs on all `case.ranks`."""
    quantized = fp8_fields(case.recipe) if case.on_gpu else {}
    case = dataclasses.replace(case, fields=case.fields | quantized)
    with world(case), _fresh_scales():
        eager = Training(case, experts="module")
        graphed = {"LayerGraphs" if case.graph == "layer" else case.graph: _graphed(case)}
        helper: Any = None
        if case.graph == "layer":
            # What Megatron's own loop does; the training's LayerGraphs stay unused.
            graphed["Megatron"] = alone = _graphed(case)
            given = [] if alone.optimizer is None else [alone.optimizer]
            helper = TECudaGraphHelper(
                alone.chunks, alone.config, case.seq, case.batch, optimizers=given
            )
        report = None
        wanted: dict[str, Tensor] = {}
        differing: dict[str, Tensor] = {}
        for number in range(case.steps):
            if number == EAGER_STEPS and helper is not None:
                ours = graphed["LayerGraphs"].graphs
                assert ours is not None
                report = ours.capture()
                helper.create_cudagraphs()
            wanted = eager.step(number)
            for capture, training in graphed.items():
                given = training.step(number)
                assert given.keys() == wanted.keys()
                for name, tensor in wanted.items():
                    wrong = (bits(tensor) != bits(given[name])).any().long().to(case.device)
                    key = f"{name}, captured by {capture}"
                    differing[key] = differing[key] + wrong if key in differing else wrong
        counts = torch.stack(list(differing.values())).tolist()
        broken = ()
        if report is not None and report.unreproducible:
            broken = (f"eager runs differ: {', '.join(report.unreproducible)}",)
        facts = {
            "replays": case.steps - EAGER_STEPS,
            "tensors_per_step": len(wanted),
            "self_test": None if report is None else dataclasses.asdict(report),
            "loss": eager.losses,
        }
        if helper is not None:
            release(helper)
        for training in graphed.values():
            training.end()
        found = {name: n for name, n in zip(differing, counts, strict=True) if n}
        return Findings(differing=found, facts=facts, broken=broken)


def _graphed(case: QuantizedCase) -> Training:
    return Training(case, graphed=True, experts="module")


@contextmanager
def _fresh_scales() -> Iterator[None]:
    """Forget Transformer Engine's list of scales at the end, and its flag that replays read.

    With the flag, a capture of a whole iteration would ask it whether to quantize weights.
    """
    try:
        yield
    finally:
        if torch.cuda.is_available():
            quantization = importlib.import_module("transformer_engine.pytorch.fp8")
            quantization.FP8GlobalStateManager.reset()


def parity_with_stock(case: ParityCase) -> Findings:
    """Compare ours and stock's dropless layer with plain torch in fp64; runs on all ranks."""
    both = tuple(fp8_fields(case.recipe).items()) if case.device == "cuda" else ()
    dtype = torch.bfloat16 if case.device == "cuda" else torch.float32
    layer = LayerCase(
        name=case.name, device=case.device, dtype=dtype, ep=case.ranks, both=both, **case.sizes
    )
    with _fresh_scales():
        parity = layer_parity(layer)
    errors = {name: dataclasses.asdict(error) for name, error in parity.errors.items()}
    return Findings(facts={"errors": errors}, broken=tuple(parity.failures()))


def graphed_time(case: SpeedCase) -> Findings:
    """Time forward and backward of a graphed layer; runs on all ranks, which exchange rows."""
    contender = CONTENDERS[case.contender]
    measured = Case(
        model=case.model,
        ep=case.ranks,
        tokens=case.tokens,
        skew="uniform",
        capacity_factor=case.capacity_factor,
        contender=case.contender,
    )
    with megatron(case.device, expert_model_parallel_size=case.ranks), _fresh_scales():
        on_gpu = case.device == "cuda"
        if on_gpu:
            torch.cuda.set_stream(training_stream())
        device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
        flags = stock_flags(measured, on_gpu=on_gpu, router_fusion=False)
        layer = build(measured, flags | (fp8_fields(case.recipe) if on_gpu else {}), device)
        data = batches(
            measured,
            seed=parallel_state.get_expert_model_parallel_rank(),
            dtype=torch.bfloat16 if on_gpu else torch.float32,
            device=device,
        )
        passes = Passes(_FirstMicrobatch(layer), data, graphed=contender.graph == "layer")
        timing = timed(passes.run, iterations=case.iterations, repeats=case.repeats, device=device)
        chosen = getattr(layer.layer.token_dispatcher, "chosen", None)
        facts = {
            "ms": timing.ms,
            "samples_ms": timing.samples_ms,
            "host_ms": timing.host_ms,
            "chosen": None if chosen is None else dict(chosen),
            "flags": flags | fp8_fields(case.recipe),
        }
        return Findings(facts=facts)


class _FirstMicrobatch(nn.Module):
    """A routed layer in the context that Megatron's transformer block enters."""

    def __init__(self, routed: Any) -> None:
        super().__init__()
        self.routed = routed

    def forward(self, tokens: Tensor, logits: Tensor) -> Tensor:
        with first_microbatch(self.routed.layer):
            return self.routed(tokens, logits)
