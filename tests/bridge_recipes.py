"""Count which of Megatron-Bridge's recipes a padded dispatcher accepts, for FIELDS.md.

    python -m tests.bridge_recipes

Every MoE recipe of the installed Bridge is built on the CPU: its precision and its overlap are
applied as Bridge's training does, the dispatcher's word and a capacity factor of 1.25 are set, and
the config is checked. Nothing is trained. What recipes read from Hugging Face is stood in for: the
settings of a recipe are its own, the sizes of its model are not. Packages that only train stand in
as well, Transformer Engine among them.

A recipe counts as one of experts if its name is one of such a model (`MOE_MODELS`).
"""

import collections
import copy
import importlib
import inspect
import re
import sys
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.models.mamba.mamba_layer_specs  # noqa: F401
import torch
from packaging.version import Version

from padded_dispatch.megatron import install, megatron_on_cpu
from padded_dispatch.megatron.config import check_config, notes, take_over
from tests.support.bridge_model import StandIns

# The library first: performance recipes import it, without its `__init__`.
_PACKAGES = (
    ("library", "megatron.bridge.recipes"),
    ("performance", "megatron.bridge.perf_recipes"),
)
STATES = "accepted", "accepted, noted", "refused", "not built"
_RECIPE = re.compile(r"(?!_)\w+_config")
_REFUSED = "the padded dispatcher does not support"

MOE_MODELS = re.compile(
    r"a\d+b|deepseek|gpt_oss|kimi|moonlight|glm|olmoe|minimax|step3|stepfun|moe|mixtral|llama4"
    r"|nemotron_3_(nano(?!_4b)|super|ultra)|exaone_moe|k_exaone"
)

# Imported by Bridge's modules, used in training only.
_STANDING_IN = (
    "datasets",
    "diffusers",
    "megatron",
    "modelopt",
    "open_clip",
    "peft",
    "timm",
    "transformer_engine",
    "transformer_engine_torch",
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one recipe.

    Attributes:
        kind: the set of recipes that it is of: performance or library.
        name: of the function.
        notes: what stands in the place of settings for another dispatcher.
        refusals: the settings that are refused, each with its reason.
        error: why the recipe could not be built; empty if it was.
        precision: what its layers compute in.
    """

    kind: str
    name: str
    precision: str = "unknown"
    notes: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    error: str = ""

    @property
    def state(self) -> str:
        """One of `STATES`."""
        if self.error:
            return "not built"
        return "refused" if self.refusals else "accepted, noted" if self.notes else "accepted"


class _Model:
    """Stands in for `AutoBridge`: a model of experts with sizes that every layout divides."""

    def __init__(self, name: str) -> None:
        self._name = name

    @classmethod
    def from_hf_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> "_Model":
        return cls(str(name))

    from_hf_config = from_hf_pretrained

    def to_megatron_provider(self, *args: Any, **kwargs: Any) -> Any:
        providers = importlib.import_module("megatron.bridge.models.gpt_provider")
        provider = providers.GPTModelProvider(
            moe_token_dispatcher_type="alltoall",
            num_layers=64,
            hidden_size=4096,
            num_attention_heads=64,
            num_moe_experts=256,
            moe_router_topk=8,
            moe_ffn_hidden_size=1536,
            moe_grouped_gemm=True,
            add_bias_linear=False,
            gated_linear_unit=True,
            vocab_size=128256,
        )
        provider.to_text_provider = lambda *args, **kwargs: provider
        return provider

    get_model_config = to_megatron_provider
    hf_pretrained = types.SimpleNamespace()


def modules_of(package: str) -> list[Any]:
    """Import all modules below a package, except its own `__init__`, which imports all of them."""
    (folder,) = importlib.import_module(package.rpartition(".")[0]).__path__
    folder = Path(folder) / package.rpartition(".")[2]
    empty = types.ModuleType(package)
    empty.__path__ = [str(folder)]
    sys.modules[package] = empty
    found = []
    for path in sorted(folder.rglob("*.py")):
        inner = ".".join(path.relative_to(folder).with_suffix("").parts)
        name = f"{package}.{inner.removesuffix('.__init__')}"
        try:
            found.append(importlib.import_module(name))
        except Exception as error:  # Models of other kinds need more than stands in.
            sys.stderr.write(f"{name} cannot be imported: {type(error).__name__}: {error}\n")
    return found


def recipes_of(package: str) -> dict[str, Any]:
    """Return the recipes of a package by name."""
    found = {}
    for module in modules_of(package):
        for name, function in vars(module).items():
            own = getattr(function, "__module__", "") == module.__name__
            if own and inspect.isfunction(function) and _RECIPE.fullmatch(name):
                found[name] = function
    return found


def check(kind: str, name: str, recipe: Any) -> Outcome | None:
    """Return the outcome of a recipe; None if its model has no experts.

    Megatron's own checks, which run first, may ask for sizes that the model here does not have; the
    config is then checked without them.
    """
    try:
        model = _prepared(recipe())
    except NotImplementedError:  # A name without a recipe behind it.
        return None
    except Exception as error:  # Whatever a recipe needs that this machine lacks.
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Outcome(kind=kind, name=name, error=reason) if MOE_MODELS.search(name) else None
    if not MOE_MODELS.search(name) and (model.expert_model_parallel_size or 1) == 1:
        return None
    model.moe_token_dispatcher_type = "padded_alltoall"
    model.moe_expert_capacity_factor = 1.25
    noted, precision = notes(model), _precision(model)
    try:
        try:
            copy.deepcopy(model).finalize()
        except (AssertionError, ValueError) as error:
            if str(error).startswith(_REFUSED):
                raise
            sys.stderr.write(f"{name}: checked without Megatron: {str(error).strip()[:200]}\n")
            take_over(model)
            check_config(_parsed(model))
    except ValueError as error:
        lines = tuple(line.strip() for line in str(error).removeprefix(_REFUSED).splitlines())
        refused = tuple(filter(None, lines))
        return Outcome(kind=kind, name=name, precision=precision, refusals=refused)
    return Outcome(kind=kind, name=name, precision=precision, notes=tuple(noted))


def _precision(model: Any) -> str:
    """Return the number format of a model's products, with its recipe."""
    own = ", `quant_recipe`" if getattr(model, "quant_recipe", None) else ""
    for name in ("fp8", "fp4"):
        if getattr(model, name, None):
            recipe = getattr(model, f"{name}_recipe")
            return f"{name}, {getattr(recipe, 'value', recipe)}{own}"
    return f"bf16{own}"


def _prepared(config: Any) -> Any:
    """Apply precision and overlap as Bridge's training does, and return the model's config."""
    precisions = importlib.import_module("megatron.bridge.training.mixed_precision")
    precision, overlap, model = config.mixed_precision, config.comm_overlap, config.model
    if isinstance(precision, str):
        precision = precisions.get_mixed_precision_config(precision)
    if precision is not None:
        precision.finalize()
        precision.setup(model, config.optimizer, config.ddp)
    if overlap is not None:
        overlap.data_parallel_size = 1
        overlap.finalize()
        overlap.setup(model, config.optimizer, config.ddp)
    return model


def _parsed(model: Any) -> Any:
    """Return a config whose CUDA graphs are written as Megatron writes them."""
    for name in ("cuda_graph_modules", "cuda_graph_scope"):
        scopes = getattr(model, name, None)
        if isinstance(scopes, str):
            setattr(model, name, [] if scopes == "full" else scopes.split(","))
    if getattr(model, "external_cuda_graph", False):
        model.cuda_graph_impl = "transformer_engine"
    return model


def summary(outcomes: list[Outcome]) -> str:
    """Return the counts by kind of recipe and by precision, each refusal, and each note's count."""
    lines = []
    for key in ("kind", "precision"):
        counted: dict[str, collections.Counter[str]] = {}
        for one in outcomes:
            counted.setdefault(getattr(one, key), collections.Counter())[one.state] += 1
        for name, states in sorted(counted.items()):
            numbers = ", ".join(f"{states[state]} {state}" for state in STATES)
            lines.append(f"{name}: {states.total()} in all: {numbers}")
    for one in outcomes:
        lines += [f"{one.name}: {line}" for line in (*one.refusals, one.error) if line]
    notes = collections.Counter(line.partition("=")[0] for one in outcomes for line in one.notes)
    return "\n".join([*lines, *(f"{num} note {name}" for name, num in notes.most_common())]) + "\n"


def stand_in() -> None:
    """Let packages and models stand in that no config needs."""
    vars(typing).setdefault("override", lambda function: function)  # New in Python 3.12.
    sys.meta_path.append(StandIns(*_STANDING_IN))
    vars(importlib.import_module("megatron.core.utils"))["get_te_version"] = lambda: Version("2.20")
    # Recipes ask for the GPU to choose kernels.
    hopper = types.SimpleNamespace(major=9, minor=0, name="NVIDIA H100", total_memory=80 << 30)
    vars(torch.cuda)["get_device_properties"] = lambda *args: hopper
    vars(torch.cuda)["get_device_capability"] = lambda *args: (hopper.major, hopper.minor)
    bridge = importlib.import_module("megatron.bridge")
    conversion = importlib.import_module("megatron.bridge.models.conversion.auto_bridge")
    for module in (bridge, conversion):
        vars(module)["AutoBridge"] = _Model


def main() -> None:
    """Check all recipes and print what came of them."""
    stand_in()
    install()
    found = {kind: recipes_of(package) for kind, package in _PACKAGES}
    with megatron_on_cpu():
        outcomes = [
            check(kind, name, recipe)
            for kind, recipes in found.items()
            for name, recipe in sorted(recipes.items())
        ]
    sys.stdout.write(summary([one for one in outcomes if one is not None]))


if __name__ == "__main__":
    main()
