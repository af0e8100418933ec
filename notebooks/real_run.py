"""Megatron-LM's `pretrain_gpt.py` on Python text: ours beside stock's dispatchers, in one run.

    python notebooks/real_run.py --megatron-lm FOLDER --out notebooks/results/store.json

FOLDER holds Megatron-LM at core_v0.19.0. Each contender is a run of its own with a fresh router,
the same text and seed, and the switches of production recipes: fused router, permutation, cross
entropy and gradient accumulation, no checks that wait for the GPU, garbage collected by hand. Text,
logs and caches stay in `--folder`. With `--hosts` times mean nothing: it shows bits and drops.
"""

import argparse
import contextlib
import itertools
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from importlib.util import find_spec
from os import environ
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import torch

from padded_dispatch.train.settings import PRESETS
from padded_dispatch.utils.results import about, append_run, require_results

MODELS = "qwen3-30b-a3b", "gpt-oss-20b"
# Twins of recipes with static capacity, with attention in all layers: Gated DeltaNet and Mamba need
# kernels that Megatron-LM lacks. The first has the sizes of Hugging Face's config, the second those
# of Megatron-LM's examples/post_training/modelopt/conf/nvidia.
TWINS = {
    "qwen3.5-35b-a3b": "--hidden-size 2048 --num-attention-heads 16 --num-query-groups 2 "
    "--kv-channels 256 --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 512 "
    "--qk-layernorm --swiglu --attention-output-gate --moe-shared-expert-gate "
    "--moe-shared-expert-intermediate-size 512",
    "nemotron-3-super": "--hidden-size 4096 --num-attention-heads 32 --num-query-groups 2 "
    "--kv-channels 128 --num-experts 512 --moe-router-topk 22 --moe-ffn-hidden-size 2688 "
    "--squared-relu --moe-latent-size 1024 --moe-shared-expert-intermediate-size 5376 "
    "--moe-router-score-function sigmoid --moe-router-topk-scaling-factor 5.0 "
    "--moe-router-enable-expert-bias",
    # Small enough for ranks that share a GPU.
    "small": "--hidden-size 512 --num-attention-heads 8 --num-query-groups 4 --kv-channels 64 "
    "--num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 256 --swiglu",
}
EVERYWHERE = (
    "--group-query-attention --seq-length 4096 --max-position-embeddings 4096 "
    "--position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 --init-method-std 0.02 --transformer-impl transformer_engine --bf16 "
    "--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion --moe-router-dtype fp32 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --micro-batch-size 1 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --lr 3e-4 "
    "--lr-decay-style constant --lr-warmup-iters 10 --no-check-for-nan-in-loss-and-grad "
    "--manual-gc --cross-entropy-loss-fusion --eval-iters 0 --eval-interval 1000 --log-interval 1 "
    "--seed 1234 --tokenizer-type NullTokenizer --vocab-size 32768 --split 100,0,0"
)
GRAPHS = "--cuda-graph-impl transformer_engine --te-rng-tracker --cuda-graph-modules attn"
ALLTOALL = "--moe-token-dispatcher-type alltoall"
FACTOR = "--moe-expert-capacity-factor {factor}"
PADDED = f"--moe-token-dispatcher-type padded_alltoall {FACTOR}"
OURS = f"{PADDED} {GRAPHS} moe"
CONTENDERS = {
    "ours": OURS,
    "ours, fp8": f"{OURS} --fp8-format hybrid --fp8-recipe tensorwise",
    "ours, eager": PADDED,
    "ours, a step in one graph": f"{PADDED} --cuda-graph-impl full_iteration --te-rng-tracker",
    "stock drop-and-pad": f"{ALLTOALL} {FACTOR} --moe-pad-expert-input-to-capacity {GRAPHS} moe",
    "stock drop-and-pad, eager": f"{ALLTOALL} {FACTOR} --moe-pad-expert-input-to-capacity",
    "stock dropless, graphs of attention and router": f"{ALLTOALL} {GRAPHS} moe_router "
    "moe_preprocess",
    "stock dropless": ALLTOALL,
}
# Megatron-Core asks APEX for this module. Transformer Engine has the same product.
FUSED_MODULE = "fused_weight_gradient_mlp_cuda"
FUSED = """
from transformer_engine.pytorch.cpp_extensions import general_gemm

def wgrad_gemm_accum_fp32(rows, grad, main_grad):
    general_gemm(rows, grad, out_dtype=main_grad.dtype, layout="NT", out=main_grad,
                 accumulate=True, grad=True)

wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
"""
# Transformer Engine's Adam copies all moments to fp32 before it changes any. On Hopper it stores
# fp8 moments twice, once transposed, and one that is all zeros becomes NaN.
ADAM_IN_PARTS = """
from functools import partial
from transformer_engine.pytorch.optimizers import fused_adam

Adam = fused_adam.FusedAdam
step_all, store = Adam.step, Adam._apply_scale
fused_adam.Float8Quantizer = partial(fused_adam.Float8Quantizer, columnwise=False)

def step(self):
    groups = self.param_groups
    for group in groups:
        parts, size = {}, 0
        for param in group["params"]:
            parts.setdefault(size // 2**27, []).append(param)
            size += param.numel()
        of_parts = [group | {"params": part} for part in parts.values()]
        for part in of_parts:
            self.param_groups = [part]
            step_all(self)
        group["step"] = of_parts[0]["step"]
    self.param_groups = groups

def store_no_zeros(self, name, moment, *to):
    moment.view(-1)[:1].add_(1e-30)
    store(self, name, moment, *to)

Adam.step, Adam._apply_scale = step, store_no_zeros
"""
FIRST_STEP = 21  # Those before it compile, capture, and warm up.


def documents(sources: Path) -> list[list[int]]:
    """Return the tokens of Python sources, a token per word; 16 million characters, no more."""
    words_of, size = [], 0
    for path in sorted(sources.rglob("*.py")):
        text = path.read_text(errors="replace")
        words_of.append(re.findall(r"[A-Za-z_]+|\d|\n *| +|[^\w\s]", text))
        if (size := size + len(text)) > 16_000_000:
            break
    commonest = Counter(word for words in words_of for word in words).most_common(32_000)
    token_of = {word: token for token, (word, _) in enumerate(commonest, start=1)}
    return [[*(token_of.get(word, 0) for word in words), 32_767] for words in words_of]


def write_text(prefix: Path, sources: Path) -> None:
    """Write the documents as a dataset of Megatron's."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for tokens in documents(sources):
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")


def shape_flags(model: str) -> str:
    """Return the shape of a twin, or of a preset of `padded-dispatch train`, as flags."""
    if model in TWINS:
        return TWINS[model]
    shape = PRESETS[model].model
    return (
        f"--hidden-size {shape.hidden_size} --num-attention-heads {shape.num_heads} "
        f"--num-query-groups {shape.num_kv_groups} --kv-channels {shape.head_size} "
        f"--num-experts {shape.num_experts} --moe-router-topk {shape.top_k} "
        f"--moe-ffn-hidden-size {shape.ffn_size} --swiglu"
        f"{' --qk-layernorm' if shape.qk_layernorm else ''}"
    )


class Sample(NamedTuple):
    """What `nvidia-smi` says: the most MiB of a GPU, and the watts of all in the second before."""

    time: datetime
    mib: float
    watts: float


@contextlib.contextmanager
def gpu_samples() -> Iterator[list[Sample]]:
    """Yield a list that gets a sample every second. The first is of before."""
    query = ["nvidia-smi", "--query-gpu=memory.used,power.draw", "--format=csv,noheader,nounits"]
    if gpus := environ.get("CUDA_VISIBLE_DEVICES"):
        query += ["-i", gpus]  # Others may be at work on the rest.

    def sample() -> Sample:
        lines = subprocess.check_output(query, text=True).splitlines()
        mib, watts = zip(*(map(float, line.split(",")) for line in lines), strict=True)
        return Sample(datetime.now(), max(mib), sum(watts))

    samples, ended = [sample()], threading.Event()

    def watch() -> None:
        while not ended.wait(1):
            samples.append(sample())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield samples
    finally:
        ended.set()
        watcher.join()


def joules_of(log: str, median_ms: float | None, samples: list[Sample]) -> float | None:
    """Return the energy of a median step, by the samples of the time in which steps were kept."""
    if median_ms is None:
        return None
    ends = [
        datetime.fromisoformat(time)
        for time in re.findall(r"\[([-\d]+ [:.\d]+)\] iteration +\d+/", log)
    ]
    first = ends[FIRST_STEP - 2] + timedelta(seconds=1)  # Watts are of the second before.
    watts = [watts for time, _, watts in samples if first <= time <= ends[-1]]
    return median_ms / 1000 * fmean(watts) if watts else None


def row_of(log: str) -> dict[str, Any]:
    """Return the figures of Megatron's lines of steps that are kept."""
    figures: dict[str, list[float]] = {}
    for line in re.findall(r"iteration +\d+/.*", log):
        for name, number in re.findall(r"\| ([^|]+?): +(-?INF|NAN|[-+.\dE]+)", line):
            figures.setdefault(name, []).append(float(number))
    ms = figures.get("elapsed time per iteration (ms)", [])
    row: dict[str, Any] = {"iterations": len(ms), "ms": ms, "loss": figures.get("lm loss", [])}
    row["median_ms"] = median(ms[FIRST_STEP - 1 :]) if len(ms) >= FIRST_STEP else None
    for name in ("dropped", "recomputed", "expert_overload"):
        if f"moe/{name}" in figures:
            row[name] = figures[f"moe/{name}"]
    return row


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatron-lm", type=Path, required=True, help="its folder")
    parser.add_argument("--out", type=Path, required=True, help="results file")
    parser.add_argument("--commit", help="of the code")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=[*MODELS, *TWINS])
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--ep", type=int, default=1, help="GPUs, and ranks that share the experts")
    parser.add_argument("--hosts", type=int, help="let all ranks share one GPU, as if on N hosts")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step, on each GPU")
    parser.add_argument("--capacity-factor", type=float, default=1.25)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--text", type=Path, help="Python sources (default: those of torch)")
    parser.add_argument("--folder", type=Path, default=Path("runs/real_run"))
    parser.add_argument("--limit-s", type=int, default=180, help="of one contender")
    in_parts = "step Transformer Engine's Adam in parts, let the allocator's segments grow"
    parser.add_argument("--tight", action="store_true", help=f"for the largest models: {in_parts}")
    parser.add_argument("--more", default="", help="flags of Megatron-LM, for all contenders")
    given = parser.parse_args(argv)
    try:
        require_results("--out", given.out)
    except ValueError as error:
        parser.error(str(error))
    folder, megatron_lm = given.folder.absolute(), given.megatron_lm.absolute()
    if not (megatron_lm / "pretrain_gpt.py").exists():
        parser.error(f"--megatron-lm must hold pretrain_gpt.py, got {megatron_lm}")
    has_apex = find_spec(FUSED_MODULE) is not None
    if has_apex and given.tight:
        parser.error("--tight must be left out where APEX is installed; it hooks into its stand-in")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "text.idx").exists():
        sources = given.text or Path(torch.__file__).parent
        if not any(sources.rglob("*.py")):
            parser.error(f"--text must be a folder with Python files, got {sources}")
        write_text(folder / "text", sources)
    elif given.text:
        parser.error(f"--text must be left out, got {given.text}; {folder} has a text already")
    if not has_apex:
        (folder / f"{FUSED_MODULE}.py").write_text(FUSED + given.tight * ADAM_IN_PARTS)
    fsdp = "--use-megatron-fsdp" in given.more
    environment = {
        "PYTHONPATH": ":".join([str(megatron_lm), *sys.path, str(folder)]),
        # Megatron-FSDP refuses the 1 that Megatron-LM's own recipes set.
        "CUDA_DEVICE_MAX_CONNECTIONS": "8" if fsdp else "1",
    }
    if given.tight:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    command = " ".join(["notebooks/real_run.py", *(sys.argv[1:] if argv is None else argv)])
    run_about = about(num_gpus=1 if given.hosts else given.ep, command=command, commit=given.commit)
    launcher = ["timeout", "-k", "10", str(given.limit_s), sys.executable]
    launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.ep)]
    every = (
        f"{EVERYWHERE} --num-layers {given.layers} "
        f"--global-batch-size {given.micro_batches * given.ep} "
        f"--expert-model-parallel-size {given.ep} --train-iters {given.iterations} "
        f"--data-path {folder / 'text'} --data-cache-path {folder / 'cache'} {given.more}"
    )
    for model, name in itertools.product(given.models, given.only):
        flags = CONTENDERS[name].format(factor=given.capacity_factor)
        script = ["-m", "padded_dispatch.megatron.run"] if "padded" in flags else []
        script += [str(megatron_lm / "pretrain_gpt.py"), *shape_flags(model).split()]
        if given.hosts:
            script = ["-m", "tests.support.machines", str(given.hosts), *script]
        log = folder / f"{model}, {name}.log"
        with log.open("w") as output, gpu_samples() as samples:
            exit_code = subprocess.run(
                [*launcher, *script, *every.split(), *flags.split()],
                cwd=folder,
                env=environ | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            ).returncode
        text = log.read_text(errors="replace")
        figures = row_of(text)
        row: dict[str, Any] = {
            "kind": "pretrain_gpt",
            "model": f"{model}, {given.layers} layers{', Megatron-FSDP' if fsdp else ''}",
            "ep": given.ep,
            "hosts": given.hosts,
            "contender": name,
            "micro_batches": given.micro_batches,
            "flags": flags,
            "capacity_factor": given.capacity_factor if "factor" in flags else None,
            **figures,
            "peak_mib": max(sample.mib for sample in samples) - samples[0].mib,
            "joules": joules_of(text, figures["median_ms"], samples),
            "exit_code": exit_code,
        }
        append_run(given.out, run_about, [row])
        print(f"{row['model']}, {name}: {row['median_ms']} ms, exit code {exit_code}, {log}")


if __name__ == "__main__":
    main()
