"""What is measured: model shapes, contenders, skews, and one case as a frozen value."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from padded_dispatch.config import DispatchConfig


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """D, E, K and F of one MoE layer; its experts are SwiGLU without bias."""

    hidden_size: int
    num_experts: int
    top_k: int
    ffn_size: int


MODELS = {
    "tiny": LayerShape(hidden_size=32, num_experts=8, top_k=2, ffn_size=48),
    "qwen3-30b-a3b": LayerShape(hidden_size=2048, num_experts=128, top_k=8, ffn_size=768),
    "gpt-oss-20b": LayerShape(hidden_size=2880, num_experts=32, top_k=4, ffn_size=2880),
    "deepseek-v2-lite": LayerShape(hidden_size=2048, num_experts=64, top_k=6, ffn_size=1408),
}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to run the layer.

    `name`, `variant`, `graph`: as in results files; ours has a variant for each value of
    `PaddedOptions.experts`, and one more for `exchange="direct"`. `dispatcher`: Megatron's config
    word. `drops`: has a capacity; the others run once for all capacity factors. `on_cpu`: runs
    without a GPU. `min_ep`: ranks in an expert-parallel group that it needs.
    """

    name: str
    dispatcher: str
    drops: bool = True
    on_cpu: bool = False
    variant: Literal["module", "packed", "batched", "direct"] | None = None
    graph: str = "none"
    min_ep: int = 1

    @property
    def exchange(self) -> str | None:
        """`PaddedOptions.exchange` of ours; None for Megatron's own."""
        if self.name != "ours":
            return None
        return "direct" if self.variant == "direct" else "alltoall"


_OURS: dict[str, Any] = {"name": "ours", "dispatcher": "padded_alltoall"}
_DROP_PAD: dict[str, Any] = {"name": "stock-drop-pad", "dispatcher": "alltoall"}

CONTENDERS = {
    "dropless": Contender(name="stock-dropless", dispatcher="alltoall", drops=False),
    "allgather": Contender(
        name="stock-allgather", dispatcher="allgather", drops=False, on_cpu=True
    ),
    "drop-pad": Contender(**_DROP_PAD, on_cpu=True),
    "drop-pad-graphed": Contender(**_DROP_PAD, graph="layer"),
    "module": Contender(**_OURS, variant="module", on_cpu=True),
    "module-graphed": Contender(**_OURS, variant="module", graph="layer"),
    "packed": Contender(**_OURS, variant="packed", on_cpu=True),
    "packed-graphed": Contender(**_OURS, variant="packed", graph="layer"),
    "batched": Contender(**_OURS, variant="batched", on_cpu=True),
    "batched-graphed": Contender(**_OURS, variant="batched", graph="layer"),
    "direct": Contender(**_OURS, variant="direct", min_ep=2),
    "direct-graphed": Contender(**_OURS, variant="direct", graph="layer", min_ep=2),
}

# Arguments of `routings.routing_scores`; in "idle-rank" the last rank's experts get nothing.
SKEWS: dict[str, dict[str, Any]] = {
    "uniform": {"skew": "uniform"},
    "lognormal-0.3": {"skew": "lognormal", "sigma": 0.3},
    "lognormal-0.6": {"skew": "lognormal", "sigma": 0.6},
    "hot": {"skew": "hot"},
    "idle-rank": {"skew": "uniform"},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row to be: a contender on one shape, routing and layout.

    Args:
        model: a key of `MODELS`.
        ep: ranks in an expert-parallel group (R).
        tokens: per rank (T).
        skew: a key of `SKEWS`.
        capacity_factor: None for a contender that does not drop.
        contender: a key of `CONTENDERS`.

    Raises:
        ValueError: names the field, its value and what to change.
    """

    model: str
    ep: int
    tokens: int
    skew: str
    capacity_factor: float | None
    contender: str

    def __post_init__(self) -> None:
        config = self.dispatch_config()
        config.capacity(self.tokens)
        if self.num_idle and config.num_experts - self.num_idle < config.top_k:
            raise ValueError(
                f"skew='idle-rank' is not possible with ep={self.ep}: the other ranks have fewer "
                f"than top_k={config.top_k} experts; raise ep"
            )

    @property
    def shape(self) -> LayerShape:
        """Of the layer."""
        return MODELS[self.model]

    @property
    def num_idle(self) -> int:
        """Last experts that nobody asks for."""
        return self.shape.num_experts // self.ep if self.skew == "idle-rank" else 0

    def dispatch_config(self) -> DispatchConfig:
        """The capacity that stock and ours have alike; C = T where nothing is dropped."""
        return DispatchConfig(
            num_experts=self.shape.num_experts,
            top_k=self.shape.top_k,
            capacity_factor=self.capacity_factor,
            num_ranks=self.ep,
        )


def sweep(
    *,
    models: list[str],
    eps: list[int],
    tokens: list[int],
    skews: list[str],
    capacity_factors: list[float],
    contenders: list[str],
) -> Iterator[Case]:
    """Every combination that there is, the last argument varying fastest, those that do not drop
    only once."""
    for ep, model, num_tokens, skew in product(eps, models, tokens, skews):
        for i, factor in enumerate(capacity_factors):
            for contender in contenders:
                drops = CONTENDERS[contender].drops
                if (drops or i == 0) and ep >= CONTENDERS[contender].min_ep:
                    yield Case(
                        model=model,
                        ep=ep,
                        tokens=num_tokens,
                        skew=skew,
                        capacity_factor=factor if drops else None,
                        contender=contender,
                    )
