"""What a training run is: one frozen value that travels to every worker.

Its groups become groups of flags (`padded_dispatch.train.arguments`). The first four decide every
number of the run, so a checkpoint keeps them and a resumed run must have the same ones; `Output`
may change. Everything is resolved and checked in the process that the user started, before there
are workers, so that a mistake is one line and no traceback.

Model shapes by name, with what it takes to train them by default.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from padded_dispatch.config import require
from padded_dispatch.megatron.options import PaddedOptions
from padded_dispatch.utils.results import require_folder

Device = Literal["cpu", "cuda"]
Balancing = Literal["aux-loss", "expert-bias", "forced"]
Graph = Literal["none", "partial", "layer", "full-iteration"]
AdamState = Literal["fp32", "bf16"]
DispatcherName = Literal["padded_alltoall", "allgather", "alltoall", "alltoall-drop-pad"]
DROPPING: tuple[DispatcherName, ...] = ("padded_alltoall", "alltoall-drop-pad")
# What each of Megatron's own dispatchers can be captured in; ours in all of them.
_STOCK_GRAPHS: dict[DispatcherName, tuple[Graph, ...]] = {
    "allgather": ("none",),
    "alltoall": ("none", "partial"),
    "alltoall-drop-pad": ("none", "partial", "layer"),
}
VOCABULARY = 256  # bytes


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """One layer of the model. All layers are alike, and all are Mixture-of-Experts layers.

    `gpt_oss`: biases everywhere, and a clamped SwiGLU with x * sigmoid(1.702 x) in place of SiLU.
    """

    hidden_size: int
    num_heads: int
    num_kv_groups: int
    head_size: int
    num_experts: int
    top_k: int
    expert_ffn_size: int
    shared_ffn_size: int | None = None
    qk_layernorm: bool = False
    gpt_oss: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the model is trained."""

    num_layers: int = field(metadata=_help("layers of the model"))
    seq_length: int = field(metadata=_help("bytes per sequence"))
    micro_batch: int = field(metadata=_help("sequences per rank and pass"))
    global_batch: int = field(
        metadata=_help("sequences per step, over all ranks (default: pp passes per rank)")
    )
    lr: float = field(metadata=_help("largest learning rate of Adam"))
    lr_warmup: int = field(default=20, metadata=_help("steps over which the learning rate rises"))
    lr_decay: int = field(
        metadata=_help("step at which it has fallen to a tenth, on a cosine (default: --steps)")
    )
    adam_state: AdamState = field(
        default="fp32",
        metadata=_help(
            "what Adam keeps: 12 bytes per parameter, or 6 with moments in bf16 and of the fp32 "
            "weights only the bits that bf16 ones lack; its owner's share on each GPU"
        ),
    )
    balancing: Balancing = field(
        default="aux-loss",
        metadata=_help(
            "what spreads tokens over experts; forced: random routing, to measure times with"
        ),
    )
    router_skew: float = field(
        default=0.0,
        metadata=_help(
            "start from routers that prefer some experts: standard deviation of what is added to "
            "the experts' logits; --results then has max/mean demand of every step"
        ),
    )
    seed: int = field(default=1234, metadata=_help("of weights and of the order of the data"))
    deterministic: bool = field(
        default=False, metadata=_help("the same bits in every run, at the price of some speed")
    )


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """How tokens reach their experts."""

    dispatcher: DispatcherName = field(
        default="padded_alltoall",
        metadata=_help(
            "ours, or one of Megatron's own: CPUs run allgather and alltoall-drop-pad, GPUs run all"
        ),
    )
    capacity_factor: float | None = field(
        metadata=_help(
            "slots per (source rank, expert) relative to perfect balance; 'none' drops nothing "
            "(default: 1.25 where the dispatcher drops)"
        )
    )
    drop_policy: Literal["probs", "position"] = field(
        default="probs",
        metadata=_help("who keeps a slot, for all dispatchers; --padded-policy has more"),
    )
    shared_overlap: bool = field(
        default=False,
        metadata=_help("shared experts, of models that have some, beside the exchange"),
    )
    padded: PaddedOptions = field(default_factory=PaddedOptions)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which processes share the work, and how."""

    device: Device = field(metadata=_help("what to run on (default: cuda where there is a GPU)"))
    workers: int = field(metadata=_help("processes (default: 2 on a CPU, one per GPU)"))
    tp: int = field(default=1, metadata=_help("tensor parallel size"))
    pp: int = field(default=1, metadata=_help("pipeline parallel size"))
    vpp: int | None = field(default=None, metadata=_help("model chunks per pipeline stage"))
    ep: int = field(metadata=_help("expert parallel size (default: workers / (etp * pp))"))
    etp: int = field(default=1, metadata=_help("expert tensor parallel size"))
    sequence_parallel: bool = field(
        default=False, metadata=_help("split activations along the sequence")
    )

    @property
    def dp(self) -> int:
        """Data parallel size of everything but the experts."""
        return self.workers // (self.tp * self.pp)


@dataclass(frozen=True, kw_only=True)
class Output:
    """What is run, shown and kept."""

    steps: int = field(metadata=_help("steps in all"))
    graph: Graph = field(
        default="none",
        metadata=_help(
            "what to capture as CUDA graphs: of each layer what comes before the exchange "
            "(partial) or everything (layer), or a step's passes as one (full-iteration)"
        ),
    )
    graph_timeout: float = field(
        default=300.0,
        metadata=_help("seconds after which a capture or a step with graphs ends the process"),
    )
    log_every: int = field(default=10, metadata=_help("steps between two lines of progress"))
    eval_every: int | None = field(
        default=None, metadata=_help("steps between two evaluations on held-out text")
    )
    eval_passes: int = field(default=8, metadata=_help("passes per evaluation"))
    out: Path | None = field(
        default=None, metadata=_help("folder for metrics.jsonl and checkpoints")
    )
    save_every: int | None = field(
        default=None, metadata=_help("steps between two checkpoints in --out")
    )
    resume: bool = field(default=False, metadata=_help("go on from the newest checkpoint in --out"))
    tensorboard: bool = field(
        default=False, metadata=_help("write TensorBoard's format to --out, too")
    )
    json: bool = field(default=False, metadata=_help("print metrics as JSON lines"))
    results: Path | None = field(
        default=None, metadata=_help("JSON file to which the run's figures are added")
    )
    commit: str | None = field(default=None, metadata=_help("commit of the code, for --results"))
    trace: Path | None = field(
        default=None,
        metadata=_help("folder for what the routers ask for, one file per rank, to tune with"),
    )
    trace_every: int = field(default=10, metadata=_help("steps between two that are traced"))
    trace_gib: float = field(
        default=1.0,
        metadata=_help("most that each rank's file may grow to; beyond, fewer steps are traced"),
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A training run.

    Raises:
        ValueError: names the field, its value and what to change.
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

    def __post_init__(self) -> None:
        for group in (self.output, self.recipe, self.layout):
            for name, value in vars(group).items():
                if name in ("seed", "lr_warmup", "router_skew"):
                    require(value >= 0, name, value, "give 0 or more")
                elif isinstance(value, int | float) and value is not False:
                    require(value > 0, name, value, "give a number above 0")
        require(
            self.recipe.adam_state == "fp32" or self.layout.device == "cuda",
            "adam_state",
            self.recipe.adam_state,
            "only Transformer Engine's Adam keeps less than fp32, on a GPU; give fp32",
        )
        seed = self.recipe.seed
        require(seed < 2**63, "seed", seed, "give less than 2**63")
        self._check_layout()
        self._check_dispatch()
        self._check_graph()
        self._check_output()
        self._check_trace()

    def _check_layout(self) -> None:
        model, recipe, layout = self.model, self.recipe, self.layout
        workers, per_step = layout.workers, recipe.micro_batch * layout.dp
        for name, product in (
            ("tp * pp", layout.tp * layout.pp),
            ("etp * pp * ep", layout.etp * layout.pp * layout.ep),
        ):
            require(
                workers % product == 0,
                "workers",
                workers,
                f"make it a multiple of {name}={product}",
            )
        for name, total, divisor in (
            ("ep", model.num_experts, layout.ep),
            ("tp", model.num_heads, layout.tp),
            ("tp", model.num_kv_groups, layout.tp),
            ("tp", recipe.seq_length, layout.tp),
        ):
            require(total % divisor == 0, name, divisor, f"it must divide {total}")
        stages = layout.pp * (layout.vpp or 1)
        require(
            recipe.num_layers % stages == 0,
            "num_layers",
            recipe.num_layers,
            f"make it a multiple of pp * vpp={stages}",
        )
        require(
            recipe.global_batch % per_step == 0,
            "global_batch",
            recipe.global_batch,
            f"make it a multiple of micro_batch * data parallel size={per_step}",
        )
        if layout.vpp is not None:
            require(layout.pp > 1, "vpp", layout.vpp, "it needs pp > 1")
            require(
                self.num_microbatches % layout.pp == 0,
                "vpp",
                layout.vpp,
                f"it needs a multiple of pp={layout.pp} passes per step, not "
                f"{self.num_microbatches}: change global_batch",
            )
        if layout.tp > 1:
            require(
                layout.device == "cuda",
                "tp",
                layout.tp,
                "on a CPU, Megatron's layer norm knows no sequence parallelism; give 1",
            )
            require(
                layout.sequence_parallel,
                "tp",
                layout.tp,
                "Megatron trains experts under tensor parallelism only with --sequence-parallel",
            )

    def _check_dispatch(self) -> None:
        dispatch, layout = self.dispatch, self.layout
        ours = dispatch.dispatcher == "padded_alltoall"
        for name, default in vars(PaddedOptions()).items():
            value = getattr(dispatch.padded, name)
            require(
                ours or value == default,
                f"padded_{name}",
                value,
                f"dispatcher={dispatch.dispatcher} has no such option; leave it out, and in "
                "compare give it to each contender of ours, behind its --vs",
            )
        for number in dispatch.padded.factor_of_layer:
            require(
                number <= self.recipe.num_layers,
                "padded_layer_factors",
                dispatch.padded.layer_factors,
                f"there is no layer {number}; give numbers up to "
                f"num_layers={self.recipe.num_layers}",
            )
        require(
            dispatch.dispatcher != "alltoall" or layout.device == "cuda",
            "dispatcher",
            dispatch.dispatcher,
            "Megatron's needs a GPU; on a CPU choose padded_alltoall, allgather or "
            "alltoall-drop-pad",
        )
        require(
            dispatch.padded.exchange != "direct" or (layout.device == "cuda" and layout.ep > 1),
            "padded_exchange",
            dispatch.padded.exchange,
            "GPUs of one host store to each other; it needs --device cuda and --ep of at least 2",
        )
        has_shared = self.model.shared_ffn_size is not None
        require(
            not dispatch.shared_overlap or (has_shared and dispatch.dispatcher != "allgather"),
            "shared_overlap",
            dispatch.shared_overlap,
            "it needs a model with shared experts, such as --preset deepseek-v2-lite, and another "
            "dispatcher than allgather",
        )
        require(
            dispatch.dispatcher in DROPPING or dispatch.capacity_factor is None,
            "capacity_factor",
            dispatch.capacity_factor,
            f"dispatcher={dispatch.dispatcher} drops nothing; leave it out",
        )
        require(
            dispatch.dispatcher in DROPPING or dispatch.drop_policy == "probs",
            "drop_policy",
            dispatch.drop_policy,
            f"dispatcher={dispatch.dispatcher} drops nothing; leave it out",
        )
        require(
            dispatch.capacity_factor is None or 0 < dispatch.capacity_factor < math.inf,
            "capacity_factor",
            dispatch.capacity_factor,
            "give a number above 0, or 'none' to drop nothing",
        )
        require(
            dispatch.dispatcher != "alltoall-drop-pad" or dispatch.capacity_factor is not None,
            "capacity_factor",
            dispatch.capacity_factor,
            "alltoall-drop-pad needs a number",
        )

    def _check_graph(self) -> None:
        graph, dispatcher = self.output.graph, self.dispatch.dispatcher
        if graph != "none":
            require(self.layout.device == "cuda", "graph", graph, "CUDA graphs need a GPU")
            possible = _STOCK_GRAPHS.get(dispatcher, (graph,))
            require(
                graph in possible,
                "graph",
                graph,
                f"dispatcher={dispatcher} can be captured as {' or '.join(possible)}",
            )

    def _check_output(self) -> None:
        output = self.output
        if output.out is None:
            for name in ("save_every", "resume", "tensorboard"):
                value = getattr(output, name)
                require(not value, name, value, "it needs a folder; give --out")
            return
        require_folder("out", output.out)
        if not output.resume:
            resumable = any((output.out / "checkpoints").glob("step-*"))
            held = "add --resume to go on with it" if resumable else "delete its metrics.jsonl"
            require(
                not (output.out / "metrics.jsonl").exists(),
                "out",
                str(output.out),
                f"it holds a run already; {held}, or choose another folder",
            )

    def _check_trace(self) -> None:
        output = self.output
        if output.trace is None:
            return
        require_folder("trace", output.trace)
        require(
            self.dispatch.dispatcher == "padded_alltoall",
            "trace",
            str(output.trace),
            f"dispatcher={self.dispatch.dispatcher} is not watched; choose padded_alltoall",
        )
        require(
            output.resume or not list(output.trace.glob("*.npy")),
            "trace",
            str(output.trace),
            "it holds a trace already; choose another folder",
        )
        require(
            output.trace_every <= output.steps,
            "trace_every",
            output.trace_every,
            f"with steps={output.steps} no step would be traced",
        )


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model's shape and defaults of its recipe.

    `device`: the only one that it can run on; None for any.
    """

    about: str
    model: ModelShape
    num_layers: int = 4
    seq_length: int = 4096
    micro_batch: int = 1
    steps: int = 100
    lr: float = 3e-4
    device: Device | None = "cuda"


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
            expert_ffn_size=256,
        ),
        num_layers=2,
        seq_length=64,
        micro_batch=8,
        steps=400,
        lr=5e-3,
        device=None,
    ),
    "qwen3-30b-a3b": Preset(
        about="layers of Qwen3-30B-A3B",
        model=ModelShape(
            hidden_size=2048,
            num_heads=32,
            num_kv_groups=4,
            head_size=128,
            num_experts=128,
            top_k=8,
            expert_ffn_size=768,
            qk_layernorm=True,
        ),
    ),
    "gpt-oss-20b": Preset(
        about="layers like GPT-OSS-20B's: no attention sinks, no sliding windows",
        model=ModelShape(
            hidden_size=2880,
            num_heads=64,
            num_kv_groups=8,
            head_size=64,
            num_experts=32,
            top_k=4,
            expert_ffn_size=2880,
            gpt_oss=True,
        ),
    ),
    "deepseek-v2-lite": Preset(
        about="layers like DeepSeek-V2-Lite's: two shared experts, but ordinary attention",
        model=ModelShape(
            hidden_size=2048,
            num_heads=16,
            num_kv_groups=16,
            head_size=128,
            num_experts=64,
            top_k=6,
            expert_ffn_size=1408,
            shared_ffn_size=2816,
        ),
    ),
}
