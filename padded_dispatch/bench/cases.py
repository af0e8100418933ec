"""Cases of the benchmark, and the flags that choose them: model shapes, contenders, skews.

This module does not import torch, so `--help` and a typo need not wait for it. `command.resolve`
adds the defaults that depend on the machine.
"""

import argparse
import dataclasses
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import NO_DROP, DispatchConfig
from padded_dispatch.megatron.options import PaddedOptions
from padded_dispatch.utils.flags import Parser
from padded_dispatch.utils.shapes import SHAPES, LayerShape

# Measured with SwiGLU experts without bias.
MODELS = {
    "tiny": LayerShape(hidden_size=32, num_experts=8, top_k=2, ffn_size=48),
    # A quarter of DeepSeek-V3's experts, which at EP 2 have as many rows each as at EP 8, without
    # its shared expert and its groups of experts.
    "deepseek-v3-quarter": LayerShape(hidden_size=7168, num_experts=64, top_k=8, ffn_size=2048),
    **SHAPES,
}

# Variants of our dispatcher. "auto" has default options, "cells" the same with cells in place of a
# store. The other two fix the experts, and exchange rows over collectives.
OPTIONS = {
    "auto": PaddedOptions(),
    "cells": PaddedOptions(capacity_pool="cells"),
    "module": PaddedOptions(experts="module", exchange="alltoall"),
    "packed": PaddedOptions(experts="packed", exchange="alltoall"),
}

# Variants of stock, as fields of TransformerConfig, and Transformer Engine's switches for them. The
# operation fuser multiplies all experts at once, with counts on the device. It takes Megatron-Core
# 0.19 and, on Hopper, cuBLAS 13.4. The other two add dispatchers whose ranks have a budget of rows:
# HybridEP is of DeepEP's branch hybrid-ep, NCCL EP takes a Megatron-Core newer than 0.19, NCCL
# 2.30.4 and two ranks. NCCL EP's budget also has to hold the rows that fill each expert to a
# multiple of 256: with experts of 512 rows, as Qwen3's at EP 2, 1.274 times the mean.
_FUSER = {"use_transformer_engine_op_fuser": True, "moe_single_grouped_weight": True}
_BUDGET = {"moe_token_dispatcher_type": "flex", "moe_expert_rank_capacity_factor": 1.25}
STOCK: dict[str, dict[str, Any]] = {
    "fuser": _FUSER,
    "hybridep": _FUSER | _BUDGET | {"moe_flex_dispatcher_backend": "hybridep"},
    "ncclep": _FUSER
    | _BUDGET
    | {"moe_flex_dispatcher_backend": "ncclep", "moe_expert_rank_capacity_factor": 1.3},
}
STOCK_SWITCHES = {
    "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1",  # Megatron asks for it also where its kernels do not run
    "NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1",
}

# Where gradients of parameters go. "none": into `grad`, and each pass starts without them. "fused":
# into fp32 buffers; with `gradient_accumulation_fusion` the experts' GEMMs add theirs, and the
# others are added after the pass, as by Megatron's DDP. "first": the same in a step's first
# micro-batch, in which packed experts store theirs instead of adding them.
MainGrad = Literal["none", "fused", "first"]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to run the layer.

    Args:
        name: its name in results files.
        variant: a key of `OPTIONS`, for stock of `STOCK`; None for stock without.
        graph: "layer" if the layer runs in a CUDA graph, else "none".
        fp8: whether it computes in fp8, recipe tensorwise; quantizing weights is not measured.
    """

    name: Literal["stock-dropless", "stock-drop-pad", "ours"]
    variant: str | None = None
    graph: Literal["none", "layer"] = "none"
    fp8: bool = False

    @property
    def drops(self) -> bool:
        """True if it has a capacity; a contender without one runs once for all factors."""
        return self.name != "stock-dropless"

    @property
    def on_cpu(self) -> bool:
        """True if it runs without a GPU."""
        return self.drops and self.graph == "none"

    @property
    def by_default(self) -> bool:
        """True if it runs on a GPU with every version that this package supports, in bf16."""
        return self.variant not in STOCK and not self.fp8

    @property
    def keeps_counts(self) -> bool:
        """True if stock's dispatcher leaves its counts on the device, as no release does.

        On one rank only the experts read them.
        """
        in_graph = self.name == "stock-dropless" and self.graph == "layer"
        return in_graph and self.variant in (None, "fuser")


CONTENDERS = {
    "dropless": Contender(name="stock-dropless"),
    "drop-pad": Contender(name="stock-drop-pad"),
    **{key: Contender(name="stock-dropless", variant=key) for key in STOCK},
    **{key: Contender(name="ours", variant=key) for key in OPTIONS},
}
CONTENDERS |= {
    f"{key}-graphed": dataclasses.replace(CONTENDERS[key], graph="layer")
    for key in ("drop-pad", *STOCK, *OPTIONS)
}
CONTENDERS |= {
    f"{key}-fp8-graphed": dataclasses.replace(CONTENDERS[f"{key}-graphed"], fp8=True)
    for key in ("drop-pad", "auto", "packed")
}

# The standard deviation of the experts' log popularity, which is the same on all ranks. With "hot",
# popularity is equal, but every token asks for expert 0.
SKEWS = {"uniform": 0.0, "lognormal-0.6": 0.6, "lognormal-1.0": 1.0, "hot": 0.0}

# The flags that measure the table of the top README.
README_FLAGS: dict[str, Any] = {
    "models": ["qwen3-30b-a3b", "gpt-oss-20b"],
    "tokens": [4096],
    "skews": ["uniform"],
    "capacity_factors": [1.25],
    "contenders": ["auto-graphed", "packed-graphed", "drop-pad-graphed"],
    "main_grad": ["none", "fused"],
}


def read_bench(argv: list[str]) -> argparse.Namespace:
    """Return the flags of `padded-dispatch bench`, and the whole command line as `command`."""
    parser = Parser(
        prog="padded-dispatch bench",
        usage="padded-dispatch bench [FLAGS]",
        description="Measure forward and backward of one MoE layer, ours beside Megatron-Core's.",
    )
    sweeps = parser.add_argument_group("what to measure (every combination)")
    sweeps.add_argument(
        "--ep",
        nargs="+",
        type=int,
        help="expert-parallel sizes; the largest is the number of processes "
        "(default: the number of GPUs; without a GPU 2)",
    )
    sweeps.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        metavar="NAME",
        help=f"{', '.join(MODELS)} (default: qwen3-30b-a3b and gpt-oss-20b; without a GPU tiny)",
    )
    sweeps.add_argument(
        "--tokens", nargs="+", type=int, help="per rank (default: 4096; without a GPU 64)"
    )
    sweeps.add_argument(
        "--skews",
        nargs="+",
        choices=SKEWS,
        metavar="NAME",
        default=["uniform"],
        help=f"how uneven the routing is: {', '.join(SKEWS)}",
    )
    sweeps.add_argument(
        "--capacity-factors",
        nargs="+",
        type=float,
        default=[1.0, 1.25, 2.0],
        help="slots relative to perfect balance",
    )
    sweeps.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        metavar="NAME",
        help="dropless and drop-pad are Megatron's, fuser is dropless with Transformer Engine's "
        "operation fuser (cuBLAS 13.4; -graphed without the dispatcher's wait, on one rank), "
        "hybridep and ncclep are the same over DeepEP's HybridEP and NCCL EP with a budget of 1.25 "
        "and 1.3 times the mean, auto is ours by default options, the others are explicit choices; "
        f"-graphed: in a CUDA graph: {', '.join(CONTENDERS)} (default: all that the device runs in "
        "bf16 with every version)",
    )
    sweeps.add_argument(
        "--main-grad",
        nargs="+",
        choices=get_args(MainGrad),
        metavar="NAME",
        default=["none"],
        help="parameter gradients: none: left where they are; fused: added to fp32 buffers, as by "
        "Megatron's DDP with gradient_accumulation_fusion; first: likewise in a step's first "
        "micro-batch",
    )
    sweeps.add_argument(
        "--readme",
        action="store_true",
        help="measure the table of the README, whatever else the flags say but for --ep, print it, "
        "and what is different from the run there",
    )
    how = parser.add_argument_group("how to measure")
    how.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="device to run on (default: cuda if there is a GPU)",
    )
    how.add_argument(
        "--iterations", type=int, default=20, help="passes of a sample; the median of five counts"
    )
    kept = parser.add_argument_group("results")
    kept.add_argument(
        "--out", type=Path, help="results file to write; each row is added when measured"
    )
    kept.add_argument(
        "--kernels", action="store_true", help="add the longest kernels to them (GPUs only)"
    )
    kept.add_argument("--commit", help="commit of the code, for the results")
    given = parser.parse_args(argv)
    given.command = shlex.join(["padded-dispatch", "bench", *argv])
    return given


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement, which becomes one row: a contender on one shape, routing and layout.

    Args:
        model: a key of `MODELS`.
        ep: ranks in an expert-parallel group (R).
        tokens: tokens per rank (T).
        skew: a key of `SKEWS`.
        capacity_factor: None for a contender that does not drop.
        contender: a key of `CONTENDERS`.
        main_grad: see `MainGrad`.

    Raises:
        ValueError: names the field, its rule, its value and the fix.
    """

    model: str
    ep: int
    tokens: int
    skew: str
    capacity_factor: float | None
    contender: str
    main_grad: MainGrad = "none"

    def __post_init__(self) -> None:
        self.dispatch_config().capacity(self.tokens)

    @property
    def shape(self) -> LayerShape:
        """The layer's shape."""
        return MODELS[self.model]

    def dispatch_config(self) -> DispatchConfig:
        """Return the config of stock's cells; C = T if nothing is dropped."""
        return DispatchConfig(
            num_experts=self.shape.num_experts,
            top_k=self.shape.top_k,
            capacity_factor=NO_DROP if self.capacity_factor is None else self.capacity_factor,
            num_ranks=self.ep,
        )


def routing_scores(
    num_tokens: int, num_experts: int, *, skew: str, seed: int
) -> NDArray[np.float64]:
    """Return router logits [T, E]; the K largest of a token are its experts.

    `skew`: a key of `SKEWS`. `seed`: seed of the noise, different on each rank.
    """
    popularity_E = SKEWS[skew] * np.random.default_rng(num_experts).normal(size=num_experts)
    if skew == "hot":
        popularity_E[0] = 100.0  # It outweighs the noise.
    # Gumbel noise: the K largest of a token are K weighted draws without replacement.
    noise_TE = np.random.default_rng(seed).gumbel(size=(num_tokens, num_experts))
    return popularity_E + noise_TE


def sweep(given: argparse.Namespace) -> Iterator[Case]:
    """Yield every valid combination of the flags, contenders and `--main-grad` varying fastest.

    A contender that does not drop comes once, with the first factor.
    """
    for ep, model, num_tokens, skew in product(given.ep, given.models, given.tokens, given.skews):
        for i, factor in enumerate(given.capacity_factors):
            for contender, main_grad in product(given.contenders, given.main_grad):
                drops = CONTENDERS[contender].drops
                if drops or i == 0:
                    yield Case(
                        model=model,
                        ep=ep,
                        tokens=num_tokens,
                        skew=skew,
                        capacity_factor=factor if drops else None,
                        contender=contender,
                        main_grad=main_grad,
                    )
