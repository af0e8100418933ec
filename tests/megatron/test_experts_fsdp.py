"""Experts of all kinds train in Megatron-FSDP as stock ones do, and in torch's; over gloo."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp, param_and_grad_buffer
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor
from torch.distributed import DeviceMesh, _coalescing_manager
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from padded_dispatch.megatron import dispatcher
from padded_dispatch.megatron.compat import iteration_graph, layer_graphs
from padded_dispatch.megatron.experts import require_weights_stay
from padded_dispatch.utils.patches import Patches
from tests.support import tiny
from tests.support.gpt import model_inputs
from tests.support.parity import megatron

LENGTH, VOCAB = 8, 64


class _Torch:
    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(*args: Any) -> torch.device:
        return torch.device("cpu")


def _rearrange(tensor: Tensor, pattern: str, **sizes: int) -> Tensor:
    """Stand in for einops: "(a b c) -> b a c", or "a b c -> (a c) b"."""
    before, after = pattern.split("->")
    names, order = (text.replace("(", " ").replace(")", " ").split() for text in (before, after))
    if "(" in before:
        tensor = tensor.view([sizes[name] for name in names])
    tensor = tensor.permute([names.index(name) for name in order])
    return tensor.reshape(-1, tensor.shape[-1]) if "(" in after else tensor


def _mesh(group: Any, device_type: str, **names: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", **names)


@contextmanager
def _waited(group: Any, **given: Any) -> Iterator[SimpleNamespace]:
    """Wait where a gather starts: no stream orders what follows, and others use the group too."""
    with _coalescing_manager(group):
        yield SimpleNamespace(wait=lambda: None)


@contextmanager
def fsdp_on_cpu() -> Iterator[None]:
    with Patches() as patches:
        for owner, name, value in (
            (mcore_fsdp_adapter, "HAVE_EINOPS", True),
            (mcore_fsdp_adapter, "einops", SimpleNamespace(rearrange=_rearrange)),
            (mcore_fsdp_adapter, "DeviceMesh", SimpleNamespace(from_group=_mesh)),
            (megatron_fsdp, "torch", _Torch()),
            (param_and_grad_buffer, "torch", _Torch()),
            (param_and_grad_buffer, "_coalescing_manager", _waited),
        ):
            patches.set(owner, name, value)
        yield


def losses(dispatcher: str, strategy: str, *, ep: int, steps: int, **given: Any) -> list[float]:
    """Train for some steps on this rank's tokens, the last on those of the first; return losses."""
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = tiny.config(
        dispatcher,
        num_layers=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.3,
        expert_model_parallel_size=ep,
        **given,
    )
    model = GPTModel(config, tiny.layer_spec(), VOCAB, LENGTH)
    ddp = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=strategy,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        gradient_reduce_div_fusion=False,  # gloo cannot.
    )
    sharded: Any = FullyShardedDataParallel(config, ddp, model, device=torch.device("cpu"))
    named = sharded.module.param_and_grad_buffer.optimizer_named_parameters
    optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=0.1)
    found = []
    for step in (*range(steps - 1), 0):
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        ids = torch.randint(VOCAB, (2, LENGTH + 1), generator=generator)
        sharded.zero_grad_buffer()
        loss = sharded(**model_inputs(ids)).mean()
        loss.backward()
        sharded.finish_grad_sync()
        optimizer.step()
        sharded.module.install_optimized_model_weights()
        found.append(loss.item())
    return found


@pytest.fixture(autouse=True)
def workers_end(pool2) -> Iterator[None]:
    """End the workers: caches of DTensor keep meshes, and those hold groups.

    Workers that other tests had used have died in Megatron-FSDP's collectives.
    """
    yield
    pool2.end()


def _train(strategy: str, ep: int) -> dict[str, Any]:
    said: list[str] = []
    with megatron("cpu", expert_model_parallel_size=ep), fsdp_on_cpu(), Patches() as patches:
        patches.set(dispatcher, "log_once", lambda line, *_: said.append(line))
        how = {"ep": ep, "steps": 4}
        found: dict[str, Any] = {"stock": losses("allgather", strategy, **how)}
        for experts in ("module", "packed"):
            found[experts] = losses("padded_alltoall", strategy, experts=experts, **how)
        return found | {"said": said}


@pytest.mark.parametrize(
    ("strategy", "ep"), [("optim_grads_params", 1), ("optim_grads_params", 2), ("optim_grads", 2)]
)
def test_losses_are_those_of_stock(pool2, strategy, ep):
    lines: list[str] = []
    for found in pool2.run(_train, strategy, ep):
        stock = found.pop("stock")
        assert stock[-1] < stock[0] - 0.1  # It learned its first tokens.
        lines += found.pop("said")
        for experts, ours in found.items():
            assert ours == pytest.approx(stock, rel=1e-6), experts
    (said,) = {line for line in lines if "FSDP" in line}
    assert "cannot hold packed experts" in said and "experts='module'" in said


def _said(captured: dict[str, Any], experts: str) -> str:
    """Return what the first pass says of graphs of layers; "" where it trains."""
    with megatron("cpu", expert_model_parallel_size=2), fsdp_on_cpu():
        how = {"ep": 2, "steps": 1, "experts": experts, **captured}
        try:
            losses("padded_alltoall", "optim_grads_params", **how)
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("experts", ["module", "packed"])
def test_experts_in_graphs_of_layers_are_refused_on_all_ranks(pool2, experts):
    for scopes in (("attn", "moe"), ()):
        for said in pool2.run(_said, layer_graphs(*scopes), experts):
            assert "cuda_graph_impl must capture no experts of layers with Megatron-FSDP" in said
    parts = layer_graphs("attn", "moe_router", "moe_preprocess")
    assert pool2.run(_said, parts, experts) == ["", ""]


def test_a_graph_of_the_iteration_holds_what_gathers_weights():
    linear = torch.nn.Linear(1, 1)
    graphs, iteration = (SimpleNamespace(**f) for f in (layer_graphs("moe"), iteration_graph()))
    require_weights_stay(linear, graphs)
    vars(linear.weight)["__fsdp_param__"] = True
    require_weights_stay(linear, iteration)
    with pytest.raises(ValueError, match="got 'transformer_engine'; capture attn"):
        require_weights_stay(linear, graphs)


def _in_torch_fsdp() -> str:
    """Save and load packed experts, half of them on each rank; return what another format says."""
    with megatron("cpu", expert_model_parallel_size=1):
        layer = tiny.padded_layer(experts="packed")
        whole = {name: value.clone() for name, value in layer.named_parameters()}
        fully_shard(layer, mesh=_mesh(dist.group.WORLD, "cpu", mesh_dim_names=("dp",)))
        tokens = torch.randn(4, 1, tiny.HIDDEN)
        before = layer(tokens)[0]
        # Of DTensors each rank saves its own part.
        saved = {name: value.clone() for name, value in layer.state_dict().items()}
        for parameter in layer.parameters():
            torch.nn.init.zeros_(parameter)
        assert not layer(tokens)[0].any()
        layer.load_state_dict(saved)
        assert torch.equal(layer(tokens)[0], before)
        for name, value in layer.state_dict().items():
            if not name.endswith("_extra_state"):
                assert isinstance(value, DTensor)
                assert torch.equal(value.full_tensor(), whole[name])
        sharded = layer.experts.sharded_state_dict()
        try:
            sharded["linear_fc1.weight"].build()
        except ValueError as error:
            return str(error)
    return ""


def test_experts_in_torchs_fsdp_are_saved_as_they_lie(pool2):
    for said in pool2.run(_in_torch_fsdp):
        assert said.startswith("ckpt_format must be torch_dcp for packed experts in torch's FSDP")
