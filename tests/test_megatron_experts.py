"""Packed experts in Megatron's layer: the same numbers, the same checkpoints, refusals by name."""

from collections.abc import Iterator
from typing import Any

import parity
import pytest
import tiny
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from padded_dispatch.launch import WorkerPool
from padded_dispatch.megatron import PaddedOptions, install, padded_spec, uninstall
from padded_dispatch.megatron.compat import forget_moe_metrics
from padded_dispatch.megatron.experts import _FIELDS, PackedExperts

PACKED = PaddedOptions(experts="packed")
SHAPES = {"fc1": (48, tiny.HIDDEN), "fc2": (tiny.HIDDEN, 24)}


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    with tiny.one_process():
        yield


def layer(options: PaddedOptions = PACKED, **overrides: Any) -> Any:
    config = tiny.config(**overrides)
    config.padded_dispatch = options
    return tiny.layer(config, padded_spec(tiny.layer_spec()))


def by_expert(layer: Any, linear: str) -> list[Tensor]:
    """Weights, or their gradients, of SequentialMLP or PackedExperts."""
    if isinstance(layer.experts, PackedExperts):
        return list(getattr(layer.experts, linear).weight.grad)
    return [getattr(expert, linear).weight.grad for expert in layer.experts.local_experts]


def results(layer: Any, tokens: Tensor) -> dict[str, Tensor]:
    tokens = tokens.clone().requires_grad_()
    output, bias = layer(tokens)
    assert bias is None
    output.square().sum().backward()
    found = {"output": output, "tokens": tokens.grad, "router": layer.router.weight.grad}
    return found | {name: torch.stack(by_expert(layer, f"linear_{name}")) for name in SHAPES}


@pytest.mark.parametrize("factor", [None, 1.0, 0.3])
@pytest.mark.parametrize("shape", [(7, 3), (1, 1)])
def test_output_and_gradients_are_those_of_the_module_it_replaces(factor, shape):
    tokens = torch.randn(*shape, tiny.HIDDEN, dtype=torch.float64)
    settings = {"moe_expert_capacity_factor": factor}
    module, packed = (layer(options, **settings).double() for options in (PaddedOptions(), PACKED))
    assert type(packed.experts) is PackedExperts
    ours, expected = results(packed, tokens), results(module, tokens)
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-14, msg=name)


def test_experts_without_tokens_still_have_a_gradient():
    packed = layer()
    with torch.no_grad():
        packed.router.weight[2:] = -packed.router.weight[:1]
    results(packed, torch.randn(1, 1, tiny.HIDDEN))
    has_gradient = [bool(grad.any()) for grad in by_expert(packed, "linear_fc1")]
    assert has_gradient.count(True) == tiny.TOP_K


def test_checkpoints_have_the_keys_of_te_grouped_mlp():
    module, packed = layer(PaddedOptions()), layer()
    state = {key: value for key, value in packed.state_dict().items() if key.startswith("experts.")}
    experts = [
        (f"experts.linear_{name}.weight{i}", shape)
        for name, shape in SHAPES.items()
        for i in range(tiny.NUM_EXPERTS)
    ]
    empty = [(f"experts.linear_{name}._extra_state", (0,)) for name in SHAPES]
    assert {key: tuple(value.shape) for key, value in state.items()} == dict(experts + empty)
    for i, expert in enumerate(module.experts.local_experts):  # Built from the same seed.
        for name in SHAPES:
            weight = getattr(expert, f"linear_{name}").weight
            assert torch.equal(state[f"experts.linear_{name}.weight{i}"], weight)


@pytest.mark.parametrize("extra_state", [True, False])
def test_checkpoints_load(extra_state):
    packed = layer()
    state = {
        key: torch.randn_like(v) if v.dim() else v
        for key, v in packed.state_dict().items()
        if extra_state or "_extra_state" not in key
    }
    packed.load_state_dict(state)
    for key, value in packed.state_dict().items():
        assert "_extra_state" in key or torch.equal(value, state[key])
    assert torch.equal(packed.experts.linear_fc2.weight[3], state["experts.linear_fc2.weight3"])


def test_a_checkpoint_that_lacks_an_expert_is_refused():
    packed = layer()
    state = packed.state_dict()
    del state["experts.linear_fc1.weight2"]
    with pytest.raises(RuntimeError, match=r"experts.linear_fc1.weight"):
        packed.load_state_dict(state)


def test_distributed_checkpoints_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match="--ckpt-format torch"):
        layer().sharded_state_dict()


REFUSED = {
    "add_bias_linear": True,
    "gated_linear_unit": False,
    "activation_func": F.gelu,
    "activation_func_clamp_value": 7.0,
    "activation_func_fp8_input_store": True,
    "glu_linear_offset": 1.0,
    "use_te_activation_func": True,
    "moe_mlp_glu_interleave_size": 32,
    "moe_apply_probs_on_input": True,
    "moe_latent_size": 8,
    "expert_tensor_parallel_size": 2,
    "fp16": True,
    "recompute_modules": ["moe_act"],
    "offload_modules": ["moe_act"],
}


def test_every_refusal_is_tried():
    assert [row.name for row in _FIELDS] == list(REFUSED)


@pytest.mark.parametrize("row", _FIELDS, ids=lambda row: row.name)
def test_what_it_does_not_compute_is_refused_by_name(row):
    config = tiny.config()
    experts = layer(PaddedOptions()).experts
    PackedExperts(config, experts)
    setattr(config, row.name, REFUSED[row.name])  # Some versions lack some of the fields.
    with pytest.raises(ValueError) as error:
        PackedExperts(config, experts)
    complaint, line = str(error.value).splitlines()
    assert complaint == 'PaddedOptions(experts="packed") does not support'
    assert line.startswith(f"  {row.name}=")
    assert line.endswith('Remedy: PaddedOptions(experts="module").')


def _attributes() -> list[dict[str, Any]]:
    """Of fc1's and fc2's weights, of the module and of ours."""
    with parity.megatron("cpu", expert_model_parallel_size=2):
        found = []
        for options in (PaddedOptions(), PACKED):
            experts = layer(options, expert_model_parallel_size=2).experts
            mlp = experts if options is PACKED else experts.local_experts[0]
            found += [vars(mlp.linear_fc1.weight), vars(mlp.linear_fc2.weight)]
        return found


def test_parameters_keep_megatrons_attributes(pool2: WorkerPool):
    """Above all which ranks reduce their gradients; a dimension in front moves the others."""
    for fc1, fc2, packed_fc1, packed_fc2 in pool2.run(_attributes):
        assert fc1["allreduce"] is False and fc1["partition_dim"] == 0
        assert packed_fc1 == fc1 | {"partition_dim": 1}
        assert packed_fc2 == fc2 | {"partition_dim": 2}


def _trained(options: PaddedOptions) -> list[Tensor]:
    """Losses and parameters of a small GPT."""
    forget_moe_metrics()  # Of layers of other tests.
    install(options)
    try:
        config = tiny.config(
            num_layers=2,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            moe_expert_capacity_factor=1.0,
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=0.01,
        )
        torch.manual_seed(3)
        model_parallel_cuda_manual_seed(3)
        gpt = GPTModel(config, tiny.layer_spec(), 32, max_sequence_length=9).double()
    finally:
        uninstall()
    optimizer = torch.optim.SGD(gpt.parameters(), lr=0.5)
    tokens = torch.randint(32, (2, 10), generator=torch.Generator().manual_seed(4))
    losses = []
    for _ in range(3):
        mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).triu(1)
        loss = gpt(tokens[:, :-1], torch.arange(9).expand(2, -1), mask, labels=tokens[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses), gpt.embedding.word_embeddings.weight.detach()]


def test_training_is_that_of_the_module_it_replaces():
    ours, expected = _trained(PACKED), _trained(PaddedOptions())
    assert expected[0][0] > expected[0][-1]
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
