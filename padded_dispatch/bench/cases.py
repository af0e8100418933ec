"""Cases of the benchmark: model shapes, contenders, skews, and a case made of them."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from padded_dispatch.config import NO_DROP, CapacityPool, DispatchConfig, require
from padded_dispatch.utils.shapes import SHAPES, LayerShape

# Measured with SwiGLU experts without bias.
MODELS = {
    "tiny": LayerShape(hidden_size=32, num_experts=8, top_k=2, ffn_size=48),
    # The experts of DeepSeek-V3, without its shared expert and its groups of experts.
    "deepseek-v3": LayerShape(hidden_size=7168, num_experts=256, top_k=8, ffn_size=2048),
    **SHAPES,
}


Variant = Literal[
    "auto",
    "module",
    "packed",
    "batched",
    "direct",
    "direct serial",
    "direct each",
    "direct summed",
    "rank",
    "rank direct",
]

# Where gradients of parameters go. "none": nowhere, each pass starts without them. "separate": each
# is added to an fp32 buffer after the pass, as Megatron's DDP does; but eager experts of ours add
# theirs in their products. "fused": weight gradients of experts are added by their products, with
# `gradient_accumulation_fusion`; others as "separate".
MainGrad = Literal["none", "separate", "fused"]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to run the layer.

    Args:
        name: as in results files.
        dispatcher: Megatron's `moe_token_dispatcher_type`.
        drops: has a capacity; a contender without one runs once for all capacity factors.
        on_cpu: runs without a GPU.
        variant: which `PaddedOptions` ours has; see `layer.OPTIONS`.
        graph: as in results files.
        min_ep: smallest expert-parallel group that it runs on.
    """

    name: str
    dispatcher: str
    drops: bool = True
    on_cpu: bool = False
    variant: Variant | None = None
    graph: str = "none"
    min_ep: int = 1

    @property
    def exchange(self) -> str | None:
        """`PaddedOptions.exchange` of ours where the variant fixes it, else None."""
        if self.variant in (None, "auto"):
            return None
        return "direct" if self.variant in _DIRECT else "alltoall"

    @property
    def capacity_pool(self) -> CapacityPool:
        """`PaddedOptions.capacity_pool`; "expert" for stock, too."""
        return "rank" if self.variant in ("rank", "rank direct") else "expert"


_DIRECT = (
    "direct",
    "direct serial",
    "direct each",
    "direct summed",
    "rank direct",
)
_OURS: dict[str, Any] = {"name": "ours", "dispatcher": "padded_alltoall"}
_DROP_PAD: dict[str, Any] = {"name": "stock-drop-pad", "dispatcher": "alltoall"}

CONTENDERS = {
    "dropless": Contender(name="stock-dropless", dispatcher="alltoall", drops=False),
    "allgather": Contender(
        name="stock-allgather", dispatcher="allgather", drops=False, on_cpu=True
    ),
    "drop-pad": Contender(**_DROP_PAD, on_cpu=True),
    "drop-pad-graphed": Contender(**_DROP_PAD, graph="layer"),
    "auto": Contender(**_OURS, variant="auto", on_cpu=True),
    "auto-graphed": Contender(**_OURS, variant="auto", graph="layer"),
    "module": Contender(**_OURS, variant="module", on_cpu=True),
    "module-graphed": Contender(**_OURS, variant="module", graph="layer"),
    "packed": Contender(**_OURS, variant="packed", on_cpu=True),
    "packed-graphed": Contender(**_OURS, variant="packed", graph="layer"),
    "batched": Contender(**_OURS, variant="batched", on_cpu=True),
    "batched-graphed": Contender(**_OURS, variant="batched", graph="layer"),
    "direct": Contender(**_OURS, variant="direct", min_ep=2),
    "direct-graphed": Contender(**_OURS, variant="direct", graph="layer", min_ep=2),
    "direct-serial-graphed": Contender(**_OURS, variant="direct serial", graph="layer", min_ep=2),
    "direct-each-graphed": Contender(**_OURS, variant="direct each", graph="layer", min_ep=2),
    "direct-summed-graphed": Contender(**_OURS, variant="direct summed", graph="layer", min_ep=2),
    "rank-graphed": Contender(**_OURS, variant="rank", graph="layer"),
    "rank-direct-graphed": Contender(**_OURS, variant="rank direct", graph="layer", min_ep=2),
}

# Arguments of `routings.routing_scores`. With "idle-rank" the last rank's experts get no rows; with
# "rotating" every batch has another hot expert, the same on all ranks.
SKEWS: dict[str, dict[str, Any]] = {
    "uniform": {"skew": "uniform"},
    "lognormal-0.3": {"skew": "lognormal", "sigma": 0.3},
    "lognormal-0.6": {"skew": "lognormal", "sigma": 0.6},
    "topics-0.5": {"skew": "topics", "sigma": 0.5},
    "hot": {"skew": "hot"},
    "rotating": {"skew": "hot"},
    "idle-rank": {"skew": "uniform"},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement, which becomes one row: a contender on one shape, routing and layout.

    Args:
        model: a key of `MODELS`.
        ep: ranks in an expert-parallel group (R).
        tokens: per rank (T).
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
        config = self.dispatch_config()
        config.capacity(self.tokens)
        require(
            not self.num_idle or config.num_experts - self.num_idle >= config.top_k,
            "skew",
            self.skew,
            f"leave the other ranks at least top_k={config.top_k} experts with ep={self.ep}",
            "raise ep",
        )

    @property
    def shape(self) -> LayerShape:
        """The layer's shape."""
        return MODELS[self.model]

    @property
    def num_idle(self) -> int:
        """Number of experts, the last ones, that get no rows."""
        return self.shape.num_experts // self.ep if self.skew == "idle-rank" else 0

    def dispatch_config(self) -> DispatchConfig:
        """Return the capacity that stock and ours share; C = T where nothing is dropped."""
        factor = NO_DROP if self.capacity_factor is None else self.capacity_factor
        config = self.shape.dispatch_config(factor, self.ep)
        return dataclasses.replace(config, capacity_pool=CONTENDERS[self.contender].capacity_pool)


def sweep(
    *,
    models: list[str],
    eps: list[int],
    tokens: list[int],
    skews: list[str],
    capacity_factors: list[float],
    contenders: list[str],
    main_grads: Sequence[MainGrad] = ("none",),
) -> Iterator[Case]:
    """Yield every valid combination, the last argument varying fastest.

    A contender that does not drop comes once, with the first factor. One that needs a larger `ep`
    is left out.
    """
    for ep, model, num_tokens, skew in product(eps, models, tokens, skews):
        for i, factor in enumerate(capacity_factors):
            for contender, main_grad in product(contenders, main_grads):
                drops = CONTENDERS[contender].drops
                if (drops or i == 0) and ep >= CONTENDERS[contender].min_ep:
                    yield Case(
                        model=model,
                        ep=ep,
                        tokens=num_tokens,
                        skew=skew,
                        capacity_factor=factor if drops else None,
                        contender=contender,
                        main_grad=main_grad,
                    )
