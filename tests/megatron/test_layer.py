"""`PaddedMoELayer` and `padded_spec`: the padded path without `install()`."""

import dataclasses
import functools
import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.mamba import mamba_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.graph import saved_tensors_hooks

from padded_dispatch.megatron import PaddedMoELayer, StepHooks, padded_spec
from padded_dispatch.megatron.dispatcher import PaddedAlltoAllTokenDispatcher, counting_tensors
from padded_dispatch.megatron.layer import build
from padded_dispatch.megatron.telemetry import by_number
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("one_process")


def test_layer_needs_no_install_and_no_config_word():
    for dispatcher in ("padded_alltoall", "alltoall"):
        layer = tiny.padded_layer(dispatcher=dispatcher)
        assert type(layer) is PaddedMoELayer
        assert isinstance(layer.token_dispatcher, PaddedAlltoAllTokenDispatcher)
        assert layer.config.moe_token_dispatcher_type == dispatcher


def test_spec_of_a_subclass_of_the_moe_layer():
    """What it overrides stays; its own constructor runs, and so does a second `padded_spec`."""

    class Doubled(MoELayer):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            self.factor = 2.0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output, bias = super().forward(*args, **kwargs)
            return self.factor * output, bias

    spec = tiny.layer_spec()
    mlp = spec.submodules.mlp
    if isinstance(mlp, functools.partial):
        spec.submodules.mlp = functools.partial(Doubled, *mlp.args, **mlp.keywords)
    else:
        mlp.module = Doubled
    plain, stock = tiny.padded_layer(), tiny.layer(tiny.config("allgather"))
    for padded in (padded_spec(spec), padded_spec(padded_spec(spec))):
        torch.manual_seed(5)
        layer = tiny.build(padded.submodules.mlp, tiny.config(experts="module"))
        layer.set_layer_number(1)
        for one, kinds in ((plain, (True, False)), (stock, (False, False)), (layer, (True, True))):
            # In turn: an abstract class remembers the answer for a class, and for its equals.
            assert (isinstance(one, PaddedMoELayer), isinstance(one, Doubled)) == kinds
        assert isinstance(layer.token_dispatcher, PaddedAlltoAllTokenDispatcher)
        tokens = tiny.tokens(5)
        assert torch.equal(layer(tokens)[0], 2 * plain(tokens)[0])


def test_block_spec_with_dense_layers_between():
    config = tiny.config(num_layers=3, moe_layer_freq=[0, 1, 1], normalization="RMSNorm")
    spec = padded_spec(get_gpt_decoder_block_spec(config, use_transformer_engine=False))
    built = [build_module(layer, config=config).mlp for layer in spec.layer_specs]
    assert [type(mlp).__name__ for mlp in built] == ["MLP", "PaddedMoELayer", "PaddedMoELayer"]


def test_spec_of_multi_token_prediction():
    config = tiny.config(num_layers=1, mtp_num_layers=2, normalization="RMSNorm")
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    spec = padded_spec(get_gpt_mtp_block_spec(config, block, use_transformer_engine=False))
    for layer in spec.layer_specs:
        inner = getattr(layer.submodules, "mtp_model_layer", None)
        inner = inner or layer.submodules.transformer_layer
        assert type(build_module(inner, config=config).mlp) is PaddedMoELayer
    assert len(spec.layer_specs) == 2


def test_spec_of_a_hybrid_stack():
    """Megatron's own one, whose layers need Transformer Engine, and one that can be built here."""
    # Renamed in 0.18.
    stack: Any = getattr(mamba_layer_specs, "hybrid_stack_spec", None)
    stack = stack or mamba_layer_specs.mamba_stack_spec
    layers = padded_spec(stack).submodules
    mlp = layers.moe_layer.submodules.mlp
    assert getattr(mlp, "func", getattr(mlp, "module", None)) is PaddedMoELayer
    assert layers.attention_layer is stack.submodules.attention_layer
    local = padded_spec(dataclasses.replace(stack.submodules, moe_layer=tiny.layer_spec()))
    assert type(build_module(local.moe_layer, config=tiny.config()).mlp) is PaddedMoELayer


def test_a_name_tells_where_a_layer_of_a_hybrid_stack_is(monkeypatch):
    """Here in one of "E|E|EE|EEEE/*E", two stages of two parts."""
    init = MoELayer.__init__
    monkeypatch.setattr(MoELayer, "__init__", lambda *args, name, **more: init(*args, **more))
    later = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    }
    config = tiny.config(num_layers=8, mtp_num_layers=1, experts="packed", later=later)
    made = []
    for number, name in ((1, "0"), (3, "0"), (4, "1"), (2, "1")):
        stack = "mtp.layers.1.mtp_model_layer" if number == 2 else "decoder"
        named = functools.partial(build, name=f"{stack}.layers.{name}.mlp")
        monkeypatch.setattr("padded_dispatch.megatron.layer.build", named)
        made.append(tiny.layer(config, number, padded=True))
    assert list(by_number(made)) == [1, 3, 4, 10]
    first, *last = [one.token_dispatcher._chunk for one in made]
    assert len({first, *last}) == 2 and last == [last[0]] * 3
    assert [one.token_dispatcher._numbers for one in made] == [[], [], [0], [1]]


def test_experts_are_built_without_the_op_fuser(monkeypatch):
    """Transformer Engine's fused experts take counts on the device; dense layers stay fused."""
    seen, init = [], SequentialMLP.__init__

    def recording(self: Any, *args: Any, **kwargs: Any) -> None:
        given = next(a for a in (*args, *kwargs.values()) if isinstance(a, TransformerConfig))
        seen.append(vars(given)["use_transformer_engine_op_fuser"])
        init(self, *args, **kwargs)

    monkeypatch.setattr(SequentialMLP, "__init__", recording)
    config: Any = tiny.config()
    for fuses in (True, False):
        config.use_transformer_engine_op_fuser = fuses  # Some versions lack it.
        layer = tiny.layer(config, padded=True)
        assert layer.config.use_transformer_engine_op_fuser is fuses
    assert seen == [False, False]


def test_spec_without_experts_is_refused():
    with pytest.raises(ValueError, match=r"^spec must contain a MoELayer, got 'ModuleSpec'; "):
        padded_spec(get_gpt_layer_local_spec())


def test_a_stage_of_a_pipeline_may_have_dense_layers_only():
    config = tiny.config(num_layers=1, moe_layer_freq=[0], normalization="RMSNorm")
    dense = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    assert padded_spec(dense) == dense
    assert padded_spec(get_gpt_mtp_block_spec(config, dense, use_transformer_engine=False)) is None


def test_transformer_layer_passes_its_process_groups():
    """Needs `_EqualsMoELayer`: 0.16 and 0.17 test for the exact class."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.ep = torch.distributed.new_group([0])
    config = tiny.config()
    layer = build_module(padded_spec(tiny.layer_spec()), config=config, pg_collection=groups)
    assert layer.mlp.token_dispatcher.ep_group is groups.ep
    assert groups.ep is not parallel_state.get_expert_model_parallel_group()


def test_checkpoints_have_stock_keys():
    stock = tiny.layer(tiny.config("allgather"))
    padded = tiny.padded_layer()
    assert stock.state_dict().keys() == padded.state_dict().keys()
    padded.load_state_dict(stock.state_dict())


class Offloaded(saved_tensors_hooks):
    """Offloading as Transformer Engine does it: copies come back, and memory has other owners.

    Parameters stay. `overwrite` gives the memory of what was saved to others; not that of `kept`.
    """

    def __init__(self) -> None:
        self._saved: list[torch.Tensor] = []
        super().__init__(self._pack, lambda copy: copy)

    def _pack(self, saved: torch.Tensor) -> torch.Tensor:
        if isinstance(saved, torch.nn.Parameter):
            return saved
        self._saved.append(saved.detach())
        return saved.detach().clone()

    def overwrite(self, kept: list[torch.Tensor]) -> int:
        spared = {tensor.untyped_storage().data_ptr() for tensor in kept}
        gone = [one for one in self._saved if one.untyped_storage().data_ptr() not in spared]
        for one in gone:
            one.fill_(-9 if one.dtype.is_signed else True)
        return len(gone)


OFFLOADED = {
    "module": {},
    "packed": {},
    "packed, biases": {"add_bias_linear": True},
    "packed, shared": {"moe_shared_expert_intermediate_size": 8},
}


@pytest.mark.parametrize("name", OFFLOADED)
def test_backward_reads_saved_tensors_only(name):
    """So `cpu_offloading` may move all of them; attributes hold none."""
    settings = {"experts": name.partition(",")[0], **OFFLOADED[name]}
    made = tiny.padded_layer(moe_expert_capacity_factor=0.8, **settings).double()
    hidden, results = torch.randn(9, 2, tiny.HIDDEN, dtype=torch.float64), []
    for offloads in (False, True):
        made.zero_grad()
        given, hooks = hidden.clone().requires_grad_(), Offloaded()
        with hooks if offloads else nullcontext():
            output, _ = made(given)
        if offloads:
            kept = [given, output, *made.parameters(), *counting_tensors(made)]
            assert hooks.overwrite(kept) > 10
        output.backward(torch.ones_like(output).cumsum(0))
        gradients = {what: one.grad.clone() for what, one in made.named_parameters()}
        results.append({"output": output, "tokens": given.grad, **gradients})
    plain, offloaded = results
    # Products on a CPU round by the alignment of memory, and copies have another one.
    for what, wanted in plain.items():
        torch.testing.assert_close(offloaded[what], wanted, rtol=1e-12, atol=1e-13, msg=what)


@pytest.mark.parametrize("kind", ["stock", "module", "packed", "cells", "hooks"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_deleted_layer_frees_its_weights_at_once(kind, steps):
    """As stock does; a notebook that builds its model again would find no memory otherwise."""
    options: dict[str, Any] = {"experts": "module" if kind == "module" else "packed"}
    options |= {"capacity_pool": "cells"} if kind == "cells" else {}
    gc.collect()
    gc.disable()
    try:
        stock = kind == "stock"
        layer = tiny.layer(tiny.config("alltoall")) if stock else tiny.padded_layer(**options)
        hooks = StepHooks([layer]) if kind == "hooks" else None
        for _ in range(steps):
            tiny.results(layer, tiny.tokens(5))
        layer.eval()(tiny.tokens(5))
        weights = [weakref.ref(parameter) for parameter in layer.parameters()]
        del layer, hooks
        assert [weight() for weight in weights] == [None] * len(weights)
    finally:
        gc.enable()
