"""Megatron-Bridge's own `pretrain()` on one GPU: ours beside the recipe's dispatcher, in one run.

    python notebooks/bridge_run.py --out notebooks/results/store.json

Recipes of Bridge, cut to a few layers, train on its mock data; each case is a process of its own.
Bridge reads sizes from Hugging Face's hub: `write_hub` writes a cache that has them, so no network
is needed. Weights are random. Logs, checkpoints and traces stay in `--folder`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from bridge_stand_ins import importable
from real_run import FUSED, FUSED_MODULE, row_of

from padded_dispatch.utils.results import about, append_run, require_results

HUB = {
    "models--Qwen--Qwen3-30B-A3B": dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        vocab_size=151936,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        router_aux_loss_coef=1e-3,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
    ),
    "models--openai--gpt-oss-20b": dict(
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        hidden_size=2880,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=2880,
        num_local_experts=32,
        num_experts_per_tok=4,
        vocab_size=201088,
        max_position_embeddings=131072,
        sliding_window=128,
        rms_norm_eps=1e-5,
        rope_theta=150000,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        attention_bias=True,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
    ),
}
QWEN, GPT_OSS = (
    "qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config",
    "gpt_oss_20b_pretrain_16gpu_h100_bf16_config",
)


# What Bridge writes into a run config, and cannot make again.
UNREADABLE = ("dataset", "tokenizer"), ("model", "timers"), ("optimizer", "timers")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of `pretrain()`.

    `steps`: to train for. `options`: ours; None takes the recipe's dispatcher. `graphs`: parts of
    layers that are captured. `saves`: after how many steps a checkpoint is written, of a smaller
    model. `continues`: the case whose checkpoint and run config are loaded.
    """

    recipe: str = QWEN
    steps: int = 60
    factor: float | None = 1.25
    options: dict[str, Any] | None = field(default_factory=dict)
    graphs: tuple[str, ...] = ("attn", "moe")
    saves: int | None = None
    continues: str | None = None


CELLS = {"experts": "module"}
CASES = {
    "ours": Case(options={"trace": "trace"}),
    "the recipe's dispatcher": Case(options=None, graphs=()),
    "GPT-OSS": Case(recipe=GPT_OSS, steps=203),
    "ours, retry": Case(factor=0.5, options={**CELLS, "on_overflow": "retry"}, steps=20),
    "ours, error": Case(factor=0.5, options={**CELLS, "on_overflow": "error"}),
    "ours, saved": Case(saves=10, steps=20),
    "ours, continued": Case(continues="ours, saved", steps=20),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the runs. `tiny`: experts and widths for a test on a CPU."""

    layers: int = 4
    seq_length: int = 4096
    micro_batches: int = 2
    vocab: int = 32768
    tiny: bool = False


def write_hub(cache: Path) -> None:
    """Write the configs of the recipes' models as a cache of the hub, without weights."""
    from megatron.bridge.recipes.qwen.h100 import qwen3_moe

    revision = qwen3_moe._QWEN3_30B_A3B_MODEL_REVISION
    for name, config in HUB.items():
        (snapshot := cache / name / "snapshots" / revision).mkdir(parents=True, exist_ok=True)
        (snapshot / "config.json").write_text(json.dumps(config))
        (cache / name / "refs").mkdir(exist_ok=True)
        (cache / name / "refs" / "main").write_text(revision)


def run_config(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"iter_{step:07d}" / "run_config.yaml"


def config_of(case: Case, sizes: Sizes, folder: Path, *, ep: int = 1) -> Any:
    """Return Bridge's config of a case; install our dispatcher before it is made."""
    import megatron.bridge.recipes.gpt_oss.h100 as gpt_oss
    import megatron.bridge.recipes.qwen.h100 as qwen
    import yaml
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.bridge.training.config import ConfigContainer
    from megatron.training.config.instantiate_utils import InstantiationMode

    from padded_dispatch.megatron import PaddedOptions, install

    options = dict(case.options or {})
    if "trace" in options:
        options["trace"] = str(folder / options["trace"])
    if case.continues:
        # Options come from the run config that the earlier case has saved, which loads, too.
        earlier = CASES[case.continues]
        assert earlier.saves is not None
        before = folder.parent / case.continues
        saved = yaml.safe_load(run_config(before, earlier.saves).read_text())
        options = saved["model"]["padded_dispatch"] | options
        for part, name in UNREADABLE:
            saved[part].pop(name, None)
        install()
        loaded = ConfigContainer.from_dict(saved, InstantiationMode.LENIENT)  # as from_yaml's
        assert loaded.model.moe_token_dispatcher_type == "padded_alltoall"
    if case.options is not None:
        install(PaddedOptions(**options))
    config = getattr(qwen if case.recipe == QWEN else gpt_oss, case.recipe)()
    model = config.model
    model.num_layers = sizes.layers
    if case.saves or case.continues:
        model.num_layers, model.num_moe_experts = 2, 16
    model.tensor_model_parallel_size = model.pipeline_model_parallel_size = 1
    model.expert_model_parallel_size, model.sequence_parallel = ep, False
    model.recompute_granularity = model.recompute_method = model.recompute_num_layers = None
    model.seq_length = config.dataset.seq_length = sizes.seq_length
    # The recipe's flex back end, DeepEP, is a package of its own; without it Bridge takes this.
    model.moe_token_dispatcher_type, model.moe_flex_dispatcher_backend = "alltoall", None
    if case.options is not None:
        model.moe_token_dispatcher_type = "padded_alltoall"
        model.moe_expert_capacity_factor = case.factor
    if case.graphs:
        model.cuda_graph_impl, model.cuda_graph_scope = "transformer_engine", [*case.graphs]
        model.use_te_rng_tracker = config.rng.te_rng_tracker = True
    config.tokenizer.tokenizer_type, config.tokenizer.tokenizer_model = "NullTokenizer", None
    config.tokenizer.hf_tokenizer_kwargs = {}
    config.tokenizer.vocab_size = model.vocab_size = sizes.vocab
    config.dataset.num_workers = 1
    train = config.train
    train.train_iters, train.micro_batch_size = case.steps, 1
    train.global_batch_size = sizes.micro_batches * ep
    config.scheduler.lr_warmup_iters, config.scheduler.lr_decay_iters = 10, 1000
    config.validation.eval_iters, config.validation.eval_interval = 0, 100_000
    config.logger.log_interval = config.logger.tensorboard_log_interval = 1
    config.logger.tensorboard_dir = str(folder / "tensorboard")
    config.checkpoint.load = config.checkpoint.save = None
    config.checkpoint.save_interval = None
    if case.continues:
        config.checkpoint.load = str(folder.parent / case.continues / "checkpoints")
        config.checkpoint.ckpt_step = CASES[case.continues].saves
        config.checkpoint.load_optim = not sizes.tiny  # Torch's Adam, on a CPU, has no state yet.
    if case.saves:
        config.checkpoint.save = str(folder / "checkpoints")
        config.checkpoint.save_interval = case.saves
    if sizes.tiny:
        model.hidden_size, model.ffn_hidden_size, model.moe_ffn_hidden_size = 64, 64, 64
        model.num_attention_heads, model.num_query_groups, model.kv_channels = 4, 2, 16
        model.num_moe_experts, model.moe_router_topk = 8, 2
        model.transformer_layer_spec, model.transformer_impl = local_layer_spec, "local"
        model.persist_layer_norm = model.moe_permute_fusion = model.moe_grouped_gemm = False
        model.cuda_graph_impl, model.gradient_accumulation_fusion = "none", False
        model.masked_softmax_fusion = model.apply_rope_fusion = model.bias_activation_fusion = False
        model.cross_entropy_fusion_impl, model.bf16 = "native", False
        model.use_te_rng_tracker = config.rng.te_rng_tracker = False
        config.dist.distributed_backend = "gloo"
    return config


def work(name: str, sizes: Sizes, folder: Path, *, ep: int = 1) -> None:
    """Train a case in this process."""
    # Hugging Face reads these when it is imported.
    os.environ.update(HF_HUB_CACHE=str(folder.parent / "hub"), HF_HUB_OFFLINE="1")
    with importable():
        from megatron.bridge.training.gpt_step import forward_step
        from megatron.bridge.training.pretrain import pretrain

        folder.mkdir(parents=True, exist_ok=True)
        write_hub(folder.parent / "hub")
        pretrain(config_of(CASES[name], sizes, folder, ep=ep), forward_step)


def written(folder: Path) -> dict[str, list[float]]:
    """Return our figures in TensorBoard, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[float]] = {}
    for events in sorted((folder / "tensorboard").glob("**/events*")):
        reader = EventAccumulator(str(events), size_guidance={"scalars": 0})
        reader.Reload()
        for tag in reader.Tags()["scalars"]:
            if tag.startswith(("moe/", "moe-held-out/")):
                found.setdefault(tag, []).extend(one.value for one in reader.Scalars(tag))
    return found


def row(name: str, sizes: Sizes, folder: Path, log: str, exit_code: int, ep: int) -> dict[str, Any]:
    """Return the row of a case that has run."""
    case = CASES[name]
    result: dict[str, Any] = {
        "kind": "bridge",
        "contender": name,
        "model": f"{case.recipe}, {sizes.layers} layers",
        "ep": ep,
        "micro_batches": sizes.micro_batches,
        "dispatcher": "alltoall" if case.options is None else "padded_alltoall",
        "graphs": [*case.graphs],
        "options": case.options,
        "capacity_factor": None if case.options is None else case.factor,
        **row_of(log),
        "tensorboard": {tag: values[-1] for tag, values in written(folder).items()},
        "exit_code": exit_code,
    }
    ms = result["ms"]
    result["median_ms"] = median(ms[len(ms) // 3 :]) if len(ms) > 9 else None
    if exit_code:
        errors = re.findall(r"\b[A-Z]\w*Error: .+", log)
        result["error"] = errors[0] if errors else log[-200:]
        result["traceback"] = log[max(log.find("Traceback (most recent"), 0) :][:20_000]
    if case.options and "trace" in case.options:
        command = [sys.executable, "-m", "padded_dispatch.cli", "tune", str(folder / "trace")]
        tuned = subprocess.run(command, capture_output=True, text=True)
        lines = tuned.stdout.strip().splitlines()
        result["tune"] = {
            "exit_code": tuned.returncode,
            "says": lines[:3],
            "of": tuned.stderr[-200:],
        }
    return result


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="results file")
    parser.add_argument("--commit", help="of the code")
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts")
    parser.add_argument("--launch", default="", help="program of torchrun, for ranks on one GPU")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("runs/bridge_run"))
    parser.add_argument("--limit-s", type=int, default=120, help="of one case")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    sizes, folder = Sizes(layers=given.layers), given.folder.absolute()
    if given.worker:
        work(given.worker, sizes, folder / given.worker, ep=given.ep)
        return
    require_results("--out", given.out)
    command = " ".join(["notebooks/bridge_run.py", *(sys.argv[1:] if argv is None else argv)])
    run_about = about(num_gpus=1, command=command, commit=given.commit)
    launcher = ["timeout", "-k", "10", str(given.limit_s), sys.executable]
    launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.ep)]
    launcher += ["--no-python", given.launch] if given.launch else []
    folder.mkdir(parents=True, exist_ok=True)
    path = [*sys.path[1:]]
    if find_spec(FUSED_MODULE) is None:  # The output layer asks APEX for this product.
        (folder / f"{FUSED_MODULE}.py").write_text(FUSED)
        path.append(str(folder))
    environment = {"PYTHONPATH": ":".join(path), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    for name in given.only:
        (folder / name).mkdir(parents=True, exist_ok=True)
        log = folder / name / "log.txt"
        script = [__file__, "--worker", name, "--folder", str(folder), "--ep", str(given.ep)]
        with log.open("w") as output:
            exit_code = subprocess.run(
                [*launcher, *script, "--layers", str(given.layers)],
                env=os.environ | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            ).returncode
        text = log.read_text(errors="replace")
        try:
            made = row(name, sizes, folder / name, text, exit_code, given.ep)
        except Exception:  # The cases after this one still run.
            made = {"kind": "bridge", "contender": name, "traceback": traceback.format_exc()}
        append_run(given.out, run_about, [made])
        steps, ms = made.get("iterations"), made.get("median_ms")
        print(f"{name}: {steps} steps, {ms} ms, exit code {exit_code}", flush=True)
        if "traceback" in made:
            print(made["traceback"][-2500:], flush=True)


if __name__ == "__main__":
    main()
