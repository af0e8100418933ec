"""A tiny Qwen3-MoE that Megatron-Bridge takes from Hugging Face to Megatron and back, on a CPU.

`python -m tests.support.bridge_model EXPERTS RANK WORLD FOLDER` is one rank; it prints a
JSON object. It is a program of its own, because Bridge imports Transformer Engine: modules of that
name stand in for it, and must not reach other tests. Megatron-Core is imported before, so that it
takes its own layers.
"""

import copy
import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from padded_dispatch.megatron import PaddedOptions, install, megatron_on_cpu

NUM_EXPERTS = 6

# Kernels of Apex and Transformer Engine, or of GPUs; and what `megatron_on_cpu` needs.
ON_CPU = {
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
}


class _StandIn(types.ModuleType):
    """A module that has every name: a capital makes it a class, else it is a module."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].islower():
            return importlib.import_module(f"{self.__name__}.{name}")
        made = type(name, (_AnyModule,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what a decorator would, or the stand-in itself."""
        return args[0] if args and callable(args[0]) else self


class _AnyModule(torch.nn.Module):
    """A class that takes any arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of packages that are not installed, by the packages' names."""

    def __init__(self, *packages: str) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in self._packages:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _hugging_face(folder: Path) -> Any:
    """Write a model with random weights to `folder`, and return it."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        norm_topk_prob=True,
        torch_dtype="float32",
    )
    torch.manual_seed(1)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def _provider(bridge: Any, options: PaddedOptions, num_ranks: int) -> Any:
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.transformer_layer_spec = get_gpt_layer_local_spec(
        num_experts=NUM_EXPERTS, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    for name, value in ON_CPU.items():
        setattr(provider, name, value)
    provider.moe_token_dispatcher_type = "padded_alltoall"
    provider.expert_model_parallel_size = num_ranks
    provider.padded_dispatch = options
    provider.finalize()
    return provider


def _walks(provider: Any) -> dict[str, bool]:
    """Return whether the options survive what Bridge does with a config."""
    conversion: Any = importlib.import_module("megatron.bridge.models.conversion.utils")
    configs: Any = importlib.import_module("megatron.bridge.training.utils.config_utils")
    instantiate: Any = importlib.import_module("megatron.bridge.utils.instantiate_utils")
    options = provider.padded_dispatch
    cleaned = conversion.remove_non_pickleables(provider)
    run_config = configs._ConfigContainerBase._convert_value_to_dict(provider)
    run_config["transformer_layer_spec"] = None
    read = instantiate.instantiate(run_config)
    read.finalize()
    provider.finalize()
    return {
        "deepcopy": copy.deepcopy(provider).padded_dispatch == options,
        "setattr": cleaned is not provider and cleaned.padded_dispatch == options,
        "finalize": provider.padded_dispatch == options,
        "run_config": read.moe_token_dispatcher_type == provider.moe_token_dispatcher_type
        and read.padded_dispatch == PaddedOptions(eval_factor=2.0),
    }


def _round_trip(experts: Any, rank: int, world: int, folder: Path) -> Any:
    bridges: Any = importlib.import_module("megatron.bridge")
    own = folder / f"hf{rank}"
    stock = _hugging_face(own)
    bridge = bridges.AutoBridge.from_hf_pretrained(str(own))
    options = PaddedOptions(experts=experts, layer_factors={1: 2.0})
    provider = _provider(bridge, options, world)
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    model_parallel_cuda_manual_seed(3)
    model = provider.provide(pre_process=True, post_process=True).eval()
    bridge.load_hf_weights([model])
    tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(rank))
    mask = torch.ones(16, 16).triu(1).bool()[None, None]
    with torch.no_grad():
        expected, found = stock(tokens).logits, model(tokens, torch.arange(16).expand(2, 16), mask)
    exported = dict(bridge.export_hf_weights([model], cpu=True, show_progress=False))
    weights = stock.state_dict()
    return {
        "experts": type(model.decoder.layers[0].mlp.experts).__name__,
        "logits_off_by": (found - expected).abs().max().item(),
        "names": sorted(exported) == sorted(weights),
        "exact": all(torch.equal(weights[name], value) for name, value in exported.items()),
        "parameters": [name for name, _ in model.named_parameters() if "experts" in name],
        "walks": _walks(provider),
    }


def main(experts: str, rank: str, world: str, folder: str) -> None:
    """Print what a rank found."""
    sys.meta_path.append(StandIns("transformer_engine", "transformer_engine_torch"))
    number, count = int(rank), int(world)
    with megatron_on_cpu():
        store = dist.FileStore(f"{folder}/store", count)
        dist.init_process_group("gloo", store=store, rank=number, world_size=count)
        parallel_state.initialize_model_parallel(expert_model_parallel_size=count)
        install(PaddedOptions(eval_factor=2.0))
        try:
            found = _round_trip(experts, number, count, Path(folder))
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
