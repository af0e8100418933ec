"""The settings of a training run: one frozen value, which every worker gets.

Its groups are the command line's groups of flags (`padded_dispatch.train.arguments`). The first
four decide every number of the run: a checkpoint keeps them, and a resumed run must repeat them.
`Output` may change. All settings are resolved and checked in the process that the user started,
before any worker exists: a mistake costs one line and no traceback.

`PRESETS` holds model shapes by name, each with defaults for training it.
"""

# ruff: noqa: RUF009 `_option` makes a field, not a default.
import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from padded_dispatch.config import require
from padded_dispatch.megatron.options import PaddedOptions, to_plain
from padded_dispatch.utils.results import require_folder
from padded_dispatch.utils.shapes import SHAPES, LayerShape

Device = Literal["cpu", "cuda"]
Balancing = Literal["aux-loss", "expert-bias", "forced"]
Graph = Literal["none", "partial", "layer", "full-iteration"]
AdamState = Literal["fp32", "bf16"]
DispatcherName = Literal["padded_alltoall", "allgather", "alltoall", "alltoall-drop-pad"]
DROPPING: tuple[DispatcherName, ...] = ("padded_alltoall", "alltoall-drop-pad")
# How much of the model can be captured with each of Megatron's own dispatchers; with ours, all.
_STOCK_GRAPHS: dict[DispatcherName, tuple[Graph, ...]] = {
    "allgather": ("none",),
    "alltoall": ("none", "partial"),
    "alltoall-drop-pad": ("none", "partial", "layer"),
}
VOCABULARY = 256  # bytes


def flag(name: str) -> str:
    """Return the flag of a field: `--num-layers` for `num_layers`."""
    return f"--{name.replace('_', '-')}"


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
    shared_ffn_size: int | None = None
    qk_layernorm: bool = False
    gpt_oss: bool = False


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model's shape and the defaults of its recipe.

    `device`: the only device that can run it; None for any.
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
            ffn_size=256,
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
            **vars(SHAPES["qwen3-30b-a3b"]),
            num_heads=32,
            num_kv_groups=4,
            head_size=128,
            qk_layernorm=True,
        ),
    ),
    "gpt-oss-20b": Preset(
        about="layers like GPT-OSS-20B's, without attention sinks and sliding windows",
        model=ModelShape(
            **vars(SHAPES["gpt-oss-20b"]), num_heads=64, num_kv_groups=8, head_size=64, gpt_oss=True
        ),
    ),
    "deepseek-v2-lite": Preset(
        about="layers like DeepSeek-V2-Lite's: two shared experts, ordinary attention",
        model=ModelShape(
            **vars(SHAPES["deepseek-v2-lite"]),
            num_heads=16,
            num_kv_groups=16,
            head_size=128,
            shared_ffn_size=2816,
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
    lr: float = _option("peak learning rate of Adam")
    lr_warmup: int = _option("steps over which the learning rate rises", default=20)
    lr_decay: int = _option("step at which a cosine ends at a tenth of --lr (default: --steps)")
    adam_state: AdamState = _option(
        "Adam's state: fp32 takes 12 bytes per parameter; bf16 takes 6: moments in bf16, and "
        "of the fp32 weights only the bits that bf16 lacks. Each GPU holds its shard",
        default="fp32",
    )
    balancing: Balancing = _option(
        "how tokens are spread over experts; forced: random routing, for measuring times",
        default="aux-loss",
    )
    router_skew: float = _option(
        "start with routers that prefer some experts: standard deviation of a constant added "
        "to each expert's logit; --out then has max/mean demand of every step",
        default=0.0,
    )
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
        "slots per (source rank, expert) relative to perfect balance; 'none' drops nothing "
        "(default: 1.25 if the dispatcher drops)"
    )
    drop_policy: Literal["probs", "position"] = _option(
        "which rows keep a slot, for every dispatcher", default="probs"
    )
    shared_overlap: bool = _option(
        "run shared experts, if the model has them, beside the exchange", default=False
    )
    padded: PaddedOptions = field(default_factory=PaddedOptions)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which processes share the work, and how."""

    device: Device = _option("device to run on (default: cuda if there is a GPU)")
    workers: int = _option("processes (default: 2 on a CPU, one per GPU)")
    tp: int = _option("tensor parallel size", default=1)
    pp: int = _option("pipeline parallel size", default=1)
    vpp: int | None = _option("model chunks per pipeline stage", default=None)
    ep: int = _option("expert parallel size (default: workers / (etp * pp))")
    etp: int = _option("expert tensor parallel size", default=1)
    sequence_parallel: bool = _option("split activations along the sequence", default=False)

    @property
    def dp(self) -> int:
        """Data parallel size of everything but the experts."""
        return self.workers // (self.tp * self.pp)


@dataclass(frozen=True, kw_only=True)
class Output:
    """Length of the run, and what it prints and stores."""

    steps: int = _option("steps in all")
    graph: Graph = _option(
        "what to capture as CUDA graphs: partial: each layer up to the exchange; layer: each "
        "layer; full-iteration: all passes of a step as one graph",
        default="none",
    )
    graph_timeout: float = _option(
        "seconds after which a capture or a step with graphs ends the process", default=300.0
    )
    log_every: int = _option("steps between two lines of progress", default=10)
    eval_every: int | None = _option("steps between two evaluations on held-out text", default=None)
    eval_passes: int = _option("passes per evaluation", default=8)
    run_dir: Path | None = _option("folder for metrics.jsonl and checkpoints", default=None)
    save_every: int | None = _option("steps between two checkpoints in --run-dir", default=None)
    resume: bool = _option("continue from the newest checkpoint in --run-dir", default=False)
    tensorboard: bool = _option("write TensorBoard files to --run-dir as well", default=False)
    json: bool = _option("print metrics as JSON lines", default=False)
    out: Path | None = _option("results file (JSON) to which the run adds one row", default=None)
    commit: str | None = _option("commit of the code, for --out", default=None)
    trace: Path | None = _option(
        "folder for routing traces, one file per rank, for padded-dispatch tune", default=None
    )
    trace_every: int = _option("steps between two traced steps", default=10)
    trace_gib: float = _option(
        "largest size of each rank's trace file; fewer steps are traced to fit", default=1.0
    )


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

    def as_json(self, *groups: str) -> dict[str, Any]:
        """Return the named groups as `json.loads` would read them back from a file."""
        values = {group: dataclasses.asdict(getattr(self, group)) for group in groups}
        if "dispatch" in values:
            values["dispatch"]["padded"] = to_plain(self.dispatch.padded)
        return json.loads(json.dumps(values))

    def __post_init__(self) -> None:
        for group in (self.output, self.recipe, self.layout):
            for name, value in vars(group).items():
                if name in ("seed", "lr_warmup", "router_skew"):
                    require(value >= 0, flag(name), value, "be 0 or more")
                elif isinstance(value, int | float) and value is not False:
                    require(value > 0, flag(name), value, "be above 0")
        state, seed = self.recipe.adam_state, self.recipe.seed
        fits = state == "fp32" or self.layout.device == "cuda"
        require(fits, "--adam-state", state, "be fp32 on a CPU", "leave it out")
        require(seed < 2**63, "--seed", seed, "be below 2**63")
        self._check_layout()
        self._check_dispatch()
        self._check_graph()
        self._check_run_dir()
        self._check_trace()

    def _check_layout(self) -> None:
        model, recipe, layout = self.model, self.recipe, self.layout
        for name, value, factors, product in (
            ("--workers", layout.workers, "tp * pp", layout.tp * layout.pp),
            ("--workers", layout.workers, "etp * pp * ep", layout.etp * layout.pp * layout.ep),
            ("--num-layers", recipe.num_layers, "pp * vpp", layout.pp * (layout.vpp or 1)),
            (
                "--global-batch",
                recipe.global_batch,
                "micro_batch * data parallel size",
                recipe.micro_batch * layout.dp,
            ),
        ):
            require(value % product == 0, name, value, f"be a multiple of {factors}={product}")
        for name, value, total, things in (
            ("--ep", layout.ep, model.num_experts, "experts"),
            ("--tp", layout.tp, model.num_heads, "attention heads"),
            ("--tp", layout.tp, model.num_kv_groups, "key-value groups"),
            ("--tp", layout.tp, recipe.seq_length, "bytes of a sequence"),
        ):
            require(total % value == 0, name, value, f"divide the {total} {things}")
        if layout.vpp is not None:
            require(layout.pp > 1, "--vpp", layout.vpp, "be left out at --pp 1")
            product = recipe.micro_batch * layout.dp * layout.pp
            rule = f"be a multiple of micro_batch * data parallel size * pp={product} with --vpp"
            require(recipe.global_batch % product == 0, "--global-batch", recipe.global_batch, rule)
        if layout.tp > 1:
            rule = "be 1 on a CPU, where Megatron's layer norm has no sequence parallelism"
            require(layout.device == "cuda", "--tp", layout.tp, rule)
            rule = "come with --sequence-parallel, without which Megatron trains no experts"
            require(layout.sequence_parallel, "--tp", layout.tp, rule, "add it")

    def _check_dispatch(self) -> None:
        dispatch, on_gpu = self.dispatch, self.layout.device == "cuda"
        dispatcher, factor, padded = dispatch.dispatcher, dispatch.capacity_factor, dispatch.padded
        if dispatcher != "padded_alltoall":
            fix = "in compare, give it to each padded contender, behind its --vs"
            for name, default in to_plain(PaddedOptions()).items():
                value = getattr(padded, name)
                rule = f"be left out with --dispatcher {dispatcher}"
                require(value == default, flag(f"padded_{name}"), value, rule, fix)
        if dispatcher not in DROPPING:
            policy = dispatch.drop_policy
            rule = f"be left out with --dispatcher {dispatcher}, which drops nothing"
            require(factor is None, "--capacity-factor", factor, rule)
            require(policy == "probs", "--drop-policy", policy, rule)
        for number in padded.layer_factors:
            require(
                number <= self.recipe.num_layers,
                "--padded-layer-factors",
                padded.layer_factors,
                f"name layers from 1 to num_layers={self.recipe.num_layers}",
                f"leave out layer {number}",
            )
        require(
            on_gpu or dispatcher != "alltoall",
            "--dispatcher",
            dispatcher,
            "be padded_alltoall, allgather or alltoall-drop-pad on a CPU",
            "add --device cuda for Megatron's alltoall",
        )
        require(
            padded.exchange != "direct" or (on_gpu and self.layout.ep > 1),
            "--padded-exchange",
            padded.exchange,
            "be auto or alltoall without several GPUs, between which direct stores go",
            "add --device cuda and an --ep of at least 2",
        )
        has_shared = self.model.shared_ffn_size is not None
        require(
            not dispatch.shared_overlap or (has_shared and dispatcher != "allgather"),
            "--shared-overlap",
            dispatch.shared_overlap,
            "be left out without shared experts and with --dispatcher allgather",
            "use --preset deepseek-v2-lite, which has shared experts",
        )
        rule = "be a number above 0, or 'none' to drop nothing"
        require(factor is None or 0 < factor < math.inf, "--capacity-factor", factor, rule)
        rule = "be a number with --dispatcher alltoall-drop-pad"
        fits = dispatcher != "alltoall-drop-pad" or factor is not None
        require(fits, "--capacity-factor", "none", rule)

    def _check_graph(self) -> None:
        graph, dispatcher = self.output.graph, self.dispatch.dispatcher
        if graph != "none":
            on_gpu = self.layout.device == "cuda"
            require(on_gpu, "--graph", graph, "be none on a CPU", "add --device cuda")
            accepted = _STOCK_GRAPHS.get(dispatcher, (graph,))
            rule = f"be {' or '.join(accepted)} with --dispatcher {dispatcher}"
            require(graph in accepted, "--graph", graph, rule)

    def _check_run_dir(self) -> None:
        output = self.output
        if output.run_dir is None:
            for name in ("save_every", "resume", "tensorboard"):
                value = getattr(output, name)
                require(not value, flag(name), value, "come with a folder", "give --run-dir")
            return
        require_folder("--run-dir", output.run_dir)
        if not output.resume:
            resumable = any((output.run_dir / "checkpoints").glob("step-*"))
            fix = "add --resume to continue that run" if resumable else "delete its metrics.jsonl"
            require(
                not (output.run_dir / "metrics.jsonl").exists(),
                "--run-dir",
                str(output.run_dir),
                "hold no earlier run",
                f"{fix}, or choose another folder",
            )

    def _check_trace(self) -> None:
        output, dispatcher = self.output, self.dispatch.dispatcher
        folder = self.dispatch.padded.trace
        rule = "be None, because it is for Megatron-LM's own loop"
        require(folder is None, "padded.trace", folder, rule, "set --trace")
        if output.trace is None:
            return
        require_folder("--trace", output.trace)
        folder, every, steps = str(output.trace), output.trace_every, output.steps
        traced = dispatcher == "padded_alltoall"
        rule = "be padded_alltoall with --trace"
        require(traced, "--dispatcher", dispatcher, rule, "leave out one of the two")
        unused = output.resume or not list(output.trace.glob("*.npy"))
        require(unused, "--trace", folder, "hold no earlier trace", "choose another folder")
        rule = f"be at most steps={steps}, to trace at least one"
        require(every <= steps, "--trace-every", every, rule)
