"""The patch in .github/upstream applies to the installed Megatron-Core, and does what it says."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

from tests.support import tiny

PATCH = Path(__file__).parents[1] / ".github" / "upstream" / "token-dispatchers.patch"
CORE = Path(next(iter(megatron.core.__path__)))
LAYER = "megatron/core/transformer/moe/moe_layer.py"
FILES = LAYER, "megatron/core/transformer/transformer_config.py"


@pytest.fixture
def patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's module of the MoE layer with the patch, beside the installed one."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CORE.parents[1] / name, tmp_path / name)
    apply = ["git", "apply", "-C1", "--include=megatron/*", str(PATCH)]
    subprocess.run(apply, cwd=tmp_path, check=True)
    spec: Any = importlib.util.spec_from_file_location("patched_moe_layer", tmp_path / LAYER)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "patched_moe_layer", module)
    spec.loader.exec_module(module)
    return module


def test_a_layer_has_the_dispatcher_that_a_package_adds(patched):
    class Other(MoEAllGatherTokenDispatcher):
        pass

    def layer(dispatcher: str) -> Any:
        torch.manual_seed(1)
        mlp = tiny.layer_spec().submodules.mlp
        submodules = getattr(mlp, "submodules", None) or mlp.keywords["submodules"]
        config = tiny.config("allgather", later={"moe_token_dispatcher_type": dispatcher})
        return patched.MoELayer(config, submodules)

    with tiny.one_process():
        with pytest.raises(ValueError, match="Unsupported token dispatcher type: other"):
            layer("other")
        patched.TOKEN_DISPATCHERS["other"] = Other
        stock, other = layer("allgather"), layer("other")
        assert type(stock.token_dispatcher) is MoEAllGatherTokenDispatcher
        assert type(other.token_dispatcher) is Other
        tokens = tiny.tokens(6)
        assert torch.equal(other(tokens)[0], stock(tokens)[0])
