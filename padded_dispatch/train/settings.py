"""The settings of a training run: one frozen value, which every worker gets.

Its groups are also the groups of flags on the command line (`padded_dispatch.train.arguments`), and
in the `flags` of a results row. All settings are resolved and checked in the process that the user
started, before any worker exists, so a mistake ends in one line without a traceback.

`PRESETS` holds model shapes by name, each with defaults for training it.
"""

# ruff: noqa: RUF009 `_option` makes a field, not a default.
import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from padded_dispatch.config import require
from padded_dispatch.megatron.options import PaddedOptions
from padded_dispatch.utils.flags import flag
from padded_dispatch.utils.results import require_folder
from padded_dispatch.utils.shapes import SHAPES, LayerShape

Device = Literal["cpu", "cuda"]
Balancing = Literal["aux-loss", "expert-bias", "forced"]
Fp8 = Literal["none", "tensorwise", "delayed", "blockwise"]
Graph = Literal["none", "partial", "layer", "full-iteration"]
DispatcherName = Literal["padded_alltoall", "allgather", "alltoall", "alltoall-drop-pad"]
DROPPING: tuple[DispatcherName, ...] = ("padded_alltoall", "alltoall-drop-pad")
# How much of the model can be captured with each of Megatron's own dispatchers; with ours, all.
_STOCK_GRAPHS: dict[DispatcherName, tuple[Graph, ...]] = {
    "allgather": ("none",),
    "alltoall": ("none", "partial"),
    "alltoall-drop-pad": ("none", "partial", "layer"),
}
VOCABULARY = 256  # bytes


def _option(text: str, default: Any = dataclasses.MISSING) -> Any:
    """Return a dataclass field that becomes a flag with this help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class ModelShape(LayerShape):
    """Sizes of one layer. All layers are alike, and all are Mixture-of-Experts layers.

    `gpt_oss`: biases everywhere, and a clamped SwiGLU with x * sigmoid(1.702 x) in place of SiLU.
    """

    num_heads: int
    num_kv_groups: int
    head_size: int
    qk_layernorm: bool = False
    gpt_oss: bool = False


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model's shape and the defaults of its recipe."""

    about: str
    model: ModelShape
    num_layers: int = 4
    seq_length: int = 4096
    micro_batch: int = 1
    steps: int = 100
    lr: float = 3e-4


PRESETS = {
    "tiny": Preset(
        about="two small layers of 8 experts, about a minute on two CPU cores",
        model=ModelShape(
            hidden_size=128,
            num_heads=4,
            num_kv_groups=2,
            head_size=32,
            num_experts=8,
            top_k=2,
            ffn_size=256,
        ),
        num_layers=2,
        seq_length=64,
        micro_batch=8,
        steps=400,
        lr=5e-3,
    ),
    "qwen3-30b-a3b": Preset(
        about="layers of Qwen3-30B-A3B",
        model=ModelShape(
            **vars(SHAPES["qwen3-30b-a3b"]),
            num_heads=32,
            num_kv_groups=4,
            head_size=128,
            qk_layernorm=True,
        ),
    ),
    "small": Preset(
        about="16 layers of 64 small experts, 0.9 billion parameters",
        model=ModelShape(
            hidden_size=1024,
            num_heads=16,
            num_kv_groups=4,
            head_size=64,
            num_experts=64,
            top_k=8,
            ffn_size=256,
            qk_layernorm=True,
        ),
        num_layers=16,
        seq_length=2048,
        micro_batch=8,
        steps=1000,
    ),
    "gpt-oss-20b": Preset(
        about="layers like GPT-OSS-20B's, without attention sinks and sliding windows",
        model=ModelShape(
            **vars(SHAPES["gpt-oss-20b"]), num_heads=64, num_kv_groups=8, head_size=64, gpt_oss=True
        ),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The training recipe."""

    num_layers: int = _option("layers of the model")
    seq_length: int = _option("bytes per sequence")
    micro_batch: int = _option("sequences per rank and pass")
    global_batch: int = _option("sequences per step over all ranks (default: pp passes per rank)")
    lr: float = _option("peak learning rate of Adam; it rises over 20 steps and falls to a tenth")
    balancing: Balancing = _option(
        "how tokens are spread over experts; forced: random routing, for measuring times",
        default="aux-loss",
    )
    text: str | None = _option(
        "folder whose Python files to train on, and .md, .rst and .txt files to evaluate on "
        "(default: Python's standard library, one file in twenty to evaluate on)",
        default=None,
    )
    fp8: Fp8 = _option("Megatron's recipe of fp8, on GPUs", default="none")
    seed: int = _option("seed of the weights and of the order of the data", default=1234)
    deterministic: bool = _option(
        "the same bits in every run, at some cost in speed", default=False
    )


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """The dispatcher and its settings."""

    dispatcher: DispatcherName = _option(
        "ours, or one of Megatron's; a CPU runs all but alltoall, a GPU runs all",
        default="padded_alltoall",
    )
    capacity_factor: float | None = _option(
        "room for rows relative to perfect balance; 'none' drops nothing "
        "(default: 1.25 if the dispatcher drops)"
    )
    padded: PaddedOptions = field(default_factory=PaddedOptions)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which processes share the work, and how."""

    device: Device = _option("device to run on (default: cuda if there is a GPU)")
    workers: int = _option("processes (default: 2 on a CPU, one per GPU)")
    tp: int = _option("tensor and sequence parallel size", default=1)
    pp: int = _option("pipeline parallel size", default=1)
    vpp: int | None = _option("model chunks per pipeline stage", default=None)
    ep: int = _option(
        "expert parallel size (default: the most that divides workers / (etp * pp) and the experts)"
    )
    etp: int = _option("expert tensor parallel size", default=1)

    @property
    def dp(self) -> int:
        """Data parallel size of everything but the experts."""
        return self.workers // (self.tp * self.pp)


@dataclass(frozen=True, kw_only=True)
class Output:
    """Length of the run, and what it prints and stores."""

    steps: int = _option("steps in all")
    graph: Graph = _option(
        "what to capture as CUDA graphs after three eager steps: partial: each layer up to the "
        "exchange; layer: each layer; full-iteration: all passes of a step as one graph",
        default="none",
    )
    log_every: int = _option("steps between two lines, for which the host waits", default=20)
    eval_every: int | None = _option("steps between two evaluations on held-out text", default=None)
    out: Path | None = _option("results file (JSON) to which the run adds one row", default=None)
    tensorboard: Path | None = _option("folder for TensorBoard", default=None)
    commit: str | None = _option("commit of the code, for --out", default=None)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A training run.

    Raises:
        ValueError: names the flag, its rule, its value and what to set.
    """

    preset: str
    model: ModelShape
    recipe: Recipe
    dispatch: Dispatch
    layout: Layout
    output: Output

    @property
    def num_microbatches(self) -> int:
        """Passes per rank and step."""
        return self.recipe.global_batch // (self.recipe.micro_batch * self.layout.dp)

    def flags(self) -> dict[str, Any]:
        """Return the settings that decide the figures of the run, for its row in a results file."""
        groups = ("recipe", "layout", "dispatch")
        flags = {name: dataclasses.asdict(getattr(self, name)) for name in groups}
        return flags | {"steps": self.output.steps}

    def __post_init__(self) -> None:
        for group in (self.output, self.recipe, self.layout):
            for name, value in vars(group).items():
                if name == "seed":
                    require(0 <= value < 2**63, flag(name), value, "be from 0 to 2**63 - 1")
                elif isinstance(value, int | float) and not isinstance(value, bool):
                    require(0 < value < math.inf, flag(name), value, "be above 0 and finite")
        self._check_layout()
        self._check_dispatch()
        self._check_output()

    def _check_layout(self) -> None:
        model, recipe, layout = self.model, self.recipe, self.layout
        of_pass = recipe.micro_batch * layout.dp  # sequences, over all ranks
        for name, value, factors, product in (
            ("--workers", layout.workers, "tp * pp", layout.tp * layout.pp),
            ("--workers", layout.workers, "etp * pp * ep", layout.etp * layout.pp * layout.ep),
            ("--num-layers", recipe.num_layers, "pp * vpp", layout.pp * (layout.vpp or 1)),
            ("--global-batch", recipe.global_batch, "micro_batch * data parallel size", of_pass),
        ):
            require(value % product == 0, name, value, f"be a multiple of {factors}={product}")
        rule = f"divide the {model.num_experts} experts"
        require(model.num_experts % layout.ep == 0, "--ep", layout.ep, rule, "leave it out")
        if layout.vpp is not None:
            require(layout.pp > 1, "--vpp", layout.vpp, "be left out at --pp 1")
            of_round = of_pass * layout.pp
            rule = f"be a multiple of {of_round}, pp passes per rank, with --vpp"
            fits = recipe.global_batch % of_round == 0
            require(fits, "--global-batch", recipe.global_batch, rule)
        if layout.device == "cpu":
            require(recipe.fp8 == "none", "--fp8", recipe.fp8, "be none on a CPU")
            rule = "be 1 on a CPU, where Megatron's layer norm has no sequence parallelism"
            require(layout.tp == 1, "--tp", layout.tp, rule)

    def _check_dispatch(self) -> None:
        dispatch, on_gpu = self.dispatch, self.layout.device == "cuda"
        dispatcher, factor, padded = dispatch.dispatcher, dispatch.capacity_factor, dispatch.padded
        if dispatcher != "padded_alltoall":
            defaults, fix = PaddedOptions(), "in compare, give it behind the --vs of ours"
            for option in dataclasses.fields(padded):
                value = getattr(padded, option.name)
                same = value == getattr(defaults, option.name)
                rule = f"be left out with --dispatcher {dispatcher}"
                require(same, flag(f"padded_{option.name}"), value, rule, fix)
        rule = "be a number above 0, or 'none' to drop nothing"
        require(factor is None or 0 < factor < math.inf, "--capacity-factor", factor, rule)
        rule = f"be left out with --dispatcher {dispatcher}, which drops nothing"
        require(factor is None or dispatcher in DROPPING, "--capacity-factor", factor, rule)
        if dispatcher == "alltoall-drop-pad":
            most = self.model.num_experts / self.model.top_k
            rule = f"be at most {most:g}, which drops nothing, with --dispatcher {dispatcher}"
            fits = factor is not None and factor <= most
            require(fits, "--capacity-factor", "none" if factor is None else factor, rule)
        rule, fix = "be another one on a CPU", "run on a GPU"
        require(on_gpu or dispatcher != "alltoall", "--dispatcher", dispatcher, rule, fix)
        require(
            padded.exchange != "direct" or (on_gpu and self.layout.ep > 1),
            "--padded-exchange",
            padded.exchange,
            "be auto or alltoall without several GPUs, between which direct writes go",
            "run on several GPUs, with an --ep of at least 2",
        )

    def _check_output(self) -> None:
        output, dispatcher = self.output, self.dispatch.dispatcher
        if output.graph != "none":
            on_gpu = self.layout.device == "cuda"
            require(on_gpu, "--graph", output.graph, "be none on a CPU", "run on a GPU")
            accepted = _STOCK_GRAPHS.get(dispatcher, (output.graph,))
            rule = f"be {' or '.join(accepted)} with --dispatcher {dispatcher}"
            require(output.graph in accepted, "--graph", output.graph, rule)
        if (folder := self.dispatch.padded.trace) is not None:
            require_folder("--trace", Path(folder))
            unused, rule = not any(Path(folder).glob("*.np*")), "hold no earlier trace"
            require(unused, "--trace", folder, rule, "choose another folder")
