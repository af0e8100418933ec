"""Defects of stock drop-and-pad (Megatron-Core 0.16.1 to 0.19.0), and the padded path beside them.

One test per defect pins the behaviour of stock, so that the page's table stays true, then that of
the padded path. Stock is `alltoall` with `moe_expert_capacity_factor` and
`moe_pad_expert_input_to_capacity`. Only ours is tested where stock's half needs a GPU.
"""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import package_info, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.inference import utils as inference_utils
from megatron.core.transformer import transformer_config, transformer_layer
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

from padded_dispatch import DispatchConfig, kernels
from padded_dispatch.megatron import install, masks, uninstall
from padded_dispatch.megatron.compat import layer_graphs
from padded_dispatch.megatron.config import take_over
from padded_dispatch.routing import select
from tests.support import parity, tiny
from tests.support.graph_protocol import Tape
from tests.support.tiny import tokens

pytestmark = pytest.mark.usefixtures("one_process")

INSTALLED = (package_info.MAJOR, package_info.MINOR)


def dropless(**settings: Any) -> Any:
    return tiny.layer(tiny.config("allgather", **settings))


def stock(factor: float, **settings: Any) -> Any:
    settings |= {"moe_expert_capacity_factor": factor, "moe_pad_expert_input_to_capacity": True}
    return tiny.layer(tiny.config("alltoall", **settings))


def ours(factor: float | None, **settings: Any) -> Any:
    return tiny.padded_layer(dispatcher="alltoall", moe_expert_capacity_factor=factor, **settings)


# A recipe that asks for rows in multiples of 16; experts on a CPU compute as without it.
TENSORWISE = tiny.own_recipe("fp8", "tensorwise")


def alike(num_tokens: int) -> Tensor:
    """Return tokens [T, 1, D] that route alike but differ elsewhere."""
    x = tokens(num_tokens, 1)
    x[..., 0] = 1
    return x


def expert_inputs(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input of the layer's experts for `x`: rows [N, D], and their number per expert."""
    seen: list[Any] = []
    handle = layer.experts.register_forward_pre_hook(lambda module, args: seen.extend(args))
    layer(x)
    handle.remove()
    return seen[0].detach(), seen[1]


def assert_equal_up_to_rounding(a: Tensor, b: Tensor) -> None:
    """Compare fp64 results of the same sums over batches of other sizes."""
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_d1_capacity_above_the_number_of_tokens():
    """Stock raises, also at E / K, its documented factor for no dropping; here C is at most T.

    See `tests/test_config.py` for that factor.
    """
    x = tokens(4, 2).double()  # T = 8, C = 8 * 2 / 4 * 3 = 12
    with pytest.raises(RuntimeError, match=r"shape '\[4, 12\]' is invalid for input of size 32"):
        stock(3.0).double()(x)
    expected, _ = dropless().double()(x)
    for factor, experts in ((3.0, "module"), (1e308, "module"), (1e308, "packed")):
        output, _ = ours(factor, experts=experts).double()(x)
        assert_equal_up_to_rounding(output, expected)


def test_d1b_fused_permutation_above_the_number_of_tokens():
    """Stock's half needs Transformer Engine; here there is no permutation to fuse."""
    x = tokens(4, 2)
    fused = ours(3.0)
    fused.config.moe_permute_fusion = True  # past Megatron's check, which asks for the kernels
    assert torch.equal(fused(x)[0], ours(3.0)(x)[0])


def test_d2_position_drops_the_end_of_the_batch():
    """Stock documents this, but takes `topk` of zeros and ones, all ties; here it is exact."""
    random = torch.Generator().manual_seed(0)
    probs_TE, map_TE = moe_utils.topk_routing_with_score_function(
        torch.randn(4096, 8, generator=random), 2
    )
    config = DispatchConfig(num_experts=8, top_k=2, capacity_factor=0.5, policy="position")
    capacity = config.capacity(4096)
    first_TE = map_TE & (map_TE.cumsum(0) <= capacity)
    _, stock_TE = moe_utils.apply_router_token_dropping(
        probs_TE, map_TE, 2, 0.5, drop_policy="position"
    )
    assert (stock_TE != first_TE).any(0).all()  # every expert keeps a wrong set
    selection = select(map_TE, probs_TE, capacity=capacity, policy="position")
    assert torch.equal(selection.kept_TE, first_TE)


def test_d3_expert_bias_moves():
    """Stock counts the padded map, C for every expert, so the bias never moves."""
    x = alike(12)
    updates = []
    for layer in (stock(1.0, **tiny.EXPERT_BIAS), ours(1.0, **tiny.EXPERT_BIAS)):
        tiny.ask_for(layer, 0, 1)
        layer(x)
        router = layer.router
        updates.append(
            moe_utils.get_updated_expert_bias(
                router.local_tokens_per_expert, router.expert_bias, 0.5
            ).tolist()
        )
    assert updates == [[0, 0, 0, 0], [-0.5, -0.5, 0.5, 0.5]]


def test_d4_padding_tokens_take_no_slot():
    """Stock lets them compete; here real tokens get all 6 slots of the experts they ask for."""
    x = alike(12)
    x[:6, 0, 0] = 2  # padding tokens are surer of expert 0
    padding_mask = torch.zeros(12, 1, dtype=torch.bool)
    padding_mask[:6] = True
    kept = []
    for layer in (stock(1.0), ours(1.0)):
        tiny.ask_for(layer, 0, 1)
        probs_TE, _ = layer.router(x, padding_mask)
        kept.append((probs_TE > 0).split(6))
    (stock_padding, stock_real), (padding, real) = kept
    assert stock_padding[:, 0].all() and not stock_real[:, 0].any()
    assert not padding.any() and real[:, :2].all()


@pytest.mark.parametrize("num_tokens", [5, 4])
def test_d4b_expert_bias_with_a_padding_mask(num_tokens):
    """Up to 0.19 stock combines [T, E] with [T]: it raises, or counts wrong if T = E."""
    x = alike(num_tokens)
    padding_mask = torch.zeros(num_tokens, 1, dtype=torch.bool)
    padding_mask[-1] = True
    theirs, padded = dropless(**tiny.EXPERT_BIAS), ours(None, **tiny.EXPERT_BIAS)
    for layer in (theirs, padded):
        tiny.ask_for(layer, 0, 1)
    mended = package_info.MINOR >= 20
    if num_tokens == 4 or mended:
        theirs.router(x, padding_mask)
        counted = num_tokens - 1 if mended else 4
        assert theirs.router.local_tokens_per_expert.tolist() == [counted, counted, 0, 0]
    else:
        with pytest.raises(RuntimeError, match="must match the size of tensor b"):
            theirs.router(x, padding_mask)
    padded.router(x, padding_mask)
    assert padded.router.local_tokens_per_expert.tolist() == [num_tokens - 1, num_tokens - 1, 0, 0]


def test_d5_alignment_loses_no_token():
    """Stock aligns by adding tokens to a map that is full; `permute` then cuts real ones off."""
    random = torch.Generator().manual_seed(0)
    probs_TE, map_TE = moe_utils.topk_routing_with_score_function(
        torch.randn(64, 4, generator=random), 2
    )
    kept_TE, padded_TE = moe_utils.apply_router_token_dropping(
        probs_TE, map_TE, 2, 0.625, pad_to_capacity=True
    )
    aligned_TE = moe_utils.pad_routing_map(padded_TE.clone(), 16)
    rows = moe_utils.permute(
        tokens(64)[:, 0], aligned_TE, probs=kept_TE, num_out_tokens=20 * 4, drop_and_pad=True
    )
    assert (kept_TE > 0).sum() == 80 and (rows[1] > 0).sum() < 40

    layer = ours(0.625, **TENSORWISE)
    layer.config.moe_router_padding_for_quantization = True
    take_over(layer.config)
    assert layer.config.moe_router_padding_for_quantization is False
    layer(tokens(64, 1))
    counters = layer.token_dispatcher.counters
    assert torch.equal(counters.kept_E, counters.demand_E.clamp(max=32))  # C = 20, aligned to 32


def test_d6_probs_on_input_with_bias():
    """Stock's padded rows turn into bias and are added to real tokens, even if none is dropped."""
    settings = {
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_apply_probs_on_input": True,
        "add_bias_linear": True,
    }
    x = tokens(6, 2).double()
    outputs = []
    for layer in (dropless(**settings), stock(4.0, **settings), ours(4.0, **settings)):
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():  # Megatron adds the bias to a view in place
            for name, parameter in layer.experts.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(generator=random)
            outputs.append(layer.double()(x)[0])
    expected, stock_output, output = outputs
    assert (stock_output - expected).abs().max() > 1
    assert_equal_up_to_rounding(output, expected)


def test_d7_no_token_visits_an_expert_that_it_did_not_ask_for():
    """Stock pads with real tokens: an expert that overflows poisons tokens routed elsewhere."""
    x = alike(8)
    finite = {}
    for name, layer in {"dropless": dropless(), "stock": stock(1.0), "ours": ours(1.0)}.items():
        tiny.ask_for(layer, 0, 1)
        unused = layer.experts.local_experts[3]
        with torch.no_grad():
            unused.linear_fc1.weight.fill_(1e30)
        layer(x)[0].sum().backward()
        tensors = [layer(x)[0], *(parameter.grad for parameter in layer.parameters())]
        finite[name] = all(tensor.isfinite().all() for tensor in tensors)
    assert finite == {"dropless": True, "stock": False, "ours": True}


def test_d8_uneven_tokens_are_an_error_on_every_rank():
    """Stock's ranks enter an equal-split all-to-all with different numbers of rows.

    With gloo this kills a process, and with NCCL it may hang. So this test only compares stock's
    numbers of rows. Here they raise, by name, on every rank: `tests/exchange/test_agreement.py`.
    """
    dispatcher = stock(1.0).token_dispatcher
    probs_TE, map_TE = torch.ones(8, 4), torch.ones(8, 4, dtype=torch.bool)
    num_rows = []
    for num_tokens in (4, 8):
        given = tokens(num_tokens, 1), map_TE[:num_tokens], probs_TE[:num_tokens]
        num_rows.append(len(dispatcher.dispatch_preprocess(*given)[0]))
        assert dispatcher.input_splits is None and dispatcher.output_splits is None
    assert num_rows == [8, 16]


def test_d9_padding_stays_out_of_an_experts_statistics():
    """Stock pads with real tokens: an outlier raises the maximum of experts it was not routed to.

    The effect on quantization needs a GPU to show. Here padded rows are zeros.
    """
    x = alike(8)
    x[:5, 0, 1] = 100  # any C = 4 of the 8 tokens have an outlier among them
    maxima = []
    for layer in (stock(1.0), ours(1.0)):
        tiny.ask_for(layer, 0, 1)
        rows_ND, counts_L = expert_inputs(layer, x)
        maxima.append([rows.abs().max().item() for rows in rows_ND.split(counts_L.tolist())])
    (_, _, *stock_unused), (_, _, *unused) = maxima
    assert stock_unused == [100, 100]
    assert unused == [0, 0]


def test_d10_rows_per_expert_can_be_aligned():
    """Stock passes 20 rows per expert, which Transformer Engine copies to pad them to its tile."""
    x = tokens(40, 1)
    assert expert_inputs(stock(1.0), x)[1].tolist() == [20] * 4
    layer = ours(1.0, **TENSORWISE)
    assert expert_inputs(layer, x)[1].tolist() == [32] * 4


def test_d11_text_generation_leaves_training_as_it_was(monkeypatch):
    """Stock's toggle for decoding sets the factor to None at the end, and never restores it."""
    x = tokens(6, 2)
    num_rows, same = [], []
    for layer in (stock(0.5), ours(0.5)):
        monkeypatch.setattr(inference_utils, "moe_layer_cache", None)
        before = layer(x)[0]
        inference_utils.set_decode_expert_padding(layer, True, capacity_factor=2)
        inference_utils.set_decode_expert_padding(layer, False)
        num_rows.append(int(expert_inputs(layer, x)[1].sum()))
        same.append(torch.equal(layer(x)[0], before))
    assert layer.token_dispatcher.configs.current.capacity_factor == 0.5
    assert num_rows == [24, 12]  # dropless T * K; E * C
    assert same == [False, True]


class CapturedPart:
    config = tiny.config(**layer_graphs("moe_router"), num_layers=1)

    def _forward_mlp(self, hidden: Tensor, padding_mask: Tensor | None = None) -> Tensor | None:
        return padding_mask


def test_d12_a_padding_mask_reaches_a_graph():
    """Stock captures and replays a layer without the mask: losses change at the first replay.

    Here a capture reads a mask in memory of its own, and a replay writes there first.
    """
    capture = inspect.getsource(transformer_layer.TransformerLayer._te_cuda_graph_capture)
    assert "self._forward_mlp(hidden_states" in capture and "padding_mask" not in capture

    layer, hidden, mask_BS = CapturedPart(), alike(6), torch.arange(6)[None] % 2 == 0
    masks.note_mask(layer, mask_BS)
    with Tape() as graph, masks.captured(layer, hidden):
        read = layer._forward_mlp(hidden)
    assert not read.any()
    with masks.replayed(layer, mask_BS):
        graph.replay()
    assert torch.equal(read, mask_BS)


def named_tensors(dispatcher: Any) -> dict[str, Tensor]:
    """Return the attributes that a graph which ends after `preprocess` sets in every replay."""
    values = {name: getattr(dispatcher, name, None) for name in dispatcher.cudagraph_attrs}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def after_preprocess(layer: Any, hidden: Tensor, probs: Tensor) -> Tensor:
    dispatcher = layer.token_dispatcher
    rows, counts, probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(hidden, probs))
    output, _ = layer.experts(rows, counts, probs)
    output = dispatcher.token_combine(dispatcher.combine_preprocess(output))
    return dispatcher.combine_postprocess(output)


def replay_after_evaluation(layer: Any, x: Tensor) -> Tensor:
    """Return the output if a graph of `preprocess` replays after an eager pass of another shape.

    A replay sets tensors by name and runs no Python.
    """
    hidden, probs = layer.preprocess(x, *layer.route(x))
    captured = named_tensors(layer.token_dispatcher)
    with torch.no_grad():
        layer.eval()(tokens(5, 1))
    layer.train()
    for name, value in captured.items():
        setattr(layer.token_dispatcher, name, value)
    return after_preprocess(layer, hidden, probs)


def test_d13_evaluation_of_another_shape_between_replays():
    """Stock keeps C and the shape as Python numbers, which evaluation has changed by then."""
    x = tokens(6, 2)
    with pytest.raises(RuntimeError, match=r"shape .* is invalid for input of size"):
        replay_after_evaluation(stock(1.0), x)
    layer = ours(1.0)
    assert torch.equal(replay_after_evaluation(layer, x), layer(x)[0])


def call_after_partial_capture(layer: Any, x: Tensor) -> Tensor:
    layer.preprocess(x, *layer.route(x))
    return layer(x)[0]


def test_d14_shared_expert_overlap_after_a_partial_capture():
    """Stock's state machine (new in 0.18) stays where the capture ended: the next call raises."""
    shared = {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_overlap": True}
    x = tokens(6, 2)
    if INSTALLED >= (0, 18):
        with pytest.raises(AssertionError, match="must be called from IDLE state"):
            call_after_partial_capture(stock(1.0, **shared), x)
    for experts in ("module", "packed"):
        layer = ours(1.0, experts=experts, **shared)
        expected = layer(x)[0]
        assert torch.equal(call_after_partial_capture(layer, x), expected)


def test_d16_ties_go_to_the_first_token():
    """Stock breaks ties in the order of `topk`; equal probabilities are common in bf16."""
    map_TE = torch.ones(4096, 3, dtype=torch.bool)
    probs_TE = torch.full((4096, 3), 0.5, dtype=torch.bfloat16)
    _, stock_TE = moe_utils.apply_router_token_dropping(probs_TE, map_TE, 1, 0.3)
    capacity = moe_utils.get_capacity(4096, 3, 0.3)
    assert not stock_TE[:capacity].all()
    kept_TE = select(map_TE, probs_TE, capacity=capacity).kept_TE
    assert kept_TE[:capacity].all() and not kept_TE[capacity:].any()


# These add with atomics on CUDA (torch.use_deterministic_algorithms lists them).
ATOMIC = {"aten::scatter_add_", "aten::scatter_add", "aten::index_add_", "aten::index_add"}


def test_d17_no_sum_depends_on_the_order_of_threads():
    """Stock's unfused path scatters with atomics; kernels here add in a fixed order.

    Only CUDA runs atomics, but the operations that use them show on the CPU, too. The only kernel
    here with atomics adds whole numbers. The rest are tested on GPUs: two runs have equal bits.
    """
    x = tokens(6, 2).requires_grad_()
    with torch.profiler.profile() as profile:
        stock(1.0)(x)[0].sum().backward()
    assert ATOMIC & {event.key for event in profile.key_averages()}
    sources = Path(kernels.__file__).parent.glob("*.py")
    assert [one.stem for one in sources if "tl.atomic" in one.read_text()] == ["counters"]


def test_d18_drops_are_counted():
    """Stock does not count what it drops: its logging gets no entry."""
    before = set(moe_utils.get_moe_layer_wise_logging_tracker())
    stock(0.5)(tokens(6, 2))
    assert set(moe_utils.get_moe_layer_wise_logging_tracker()) == before
    layer = ours(0.5)
    tiny.ask_for(layer, 0, 1)
    layer(alike(12))
    counters = layer.token_dispatcher.counters
    dropped_E = counters.demand_E - counters.kept_E
    assert dropped_E.tolist() == [9, 9, 0, 0]  # C = 12 * 2 / 4 * 0.5 = 3
    assert int(counters.num_slots) == 12


def test_d19_a_router_without_transformer_engine(monkeypatch):
    """Stock 0.16 raises in any MoE forward pass; our CPU module provides the missing name."""
    if INSTALLED == (0, 16) and not moe_utils.HAVE_TE:
        with monkeypatch.context() as without:
            without.delattr(moe_utils, "te_general_gemm")
            with pytest.raises(NameError, match="te_general_gemm"):
                dropless()(tokens(3, 1))
    assert ours(None)(tokens(3, 1))[0].isfinite().all()


def test_d20_padding_for_quantization_is_replaced(monkeypatch, request):
    """Stock tests the old name of the field only, and so accepts a graph that it means to refuse.

    A graph of scope `moe_preprocess` cannot hold the all-to-all dispatcher's changing counts. Ours
    do not change.
    """
    monkeypatch.setattr(transformer_config, "is_te_min_version", lambda *args, **kwargs: True)
    settings = {"fp8": "hybrid", **layer_graphs("moe_router", "moe_preprocess")}
    with pytest.raises(AssertionError, match="moe_preprocess cuda graph is not supported"):
        tiny.config("alltoall", moe_router_padding_for_fp8=True, **settings)
    tiny.config("alltoall", moe_router_padding_for_quantization=True, **settings)
    request.addfinalizer(uninstall)
    install()
    for name in ("moe_router_padding_for_fp8", "moe_router_padding_for_quantization"):
        config = tiny.config(**{name: True}, **settings)
        assert not config.moe_router_padding_for_fp8
        assert not config.moe_router_padding_for_quantization


def test_d24_a_microbatch_of_padding_alone():
    """Stock's auxiliary loss is 0 / 0 there, and all gradients before it become NaN."""
    losses = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    gradients = []
    for router in (dropless(**losses).router, ours(1.0, **losses).router):
        probs_TE, _ = router(alike(6), torch.ones(6, 1, dtype=torch.bool))
        (probs_TE * 0).sum().backward()
        gradients.append(router.weight.grad)
    assert gradients[0].isnan().all()
    assert not gradients[1].any()


def test_d25_both_passes_of_recompute_round_alike():
    """From 0.18 on, stock leaves chosen experts unsorted in passes without gradients."""
    hidden, many = tokens(100, 1), {"num_moe_experts": 64, "moe_router_topk": 8}
    found = []
    for layer in (dropless(**many), ours(None, **many)):
        with torch.no_grad():
            first, _ = layer.router(hidden)
        found.append((first, layer.router(hidden)[0]))
    (first, second), (our_first, our_second) = found
    torch.testing.assert_close(first, second)
    assert torch.equal(first, second) == (INSTALLED < (0, 18))
    assert torch.equal(our_first, our_second) and torch.equal(our_second, second)


def _reduced(sizes: dict[str, int], kind: str) -> list[bool]:
    """Whether DDP sums each gradient of experts over just the ranks that hold the same ones."""
    with parity.megatron("cpu", **sizes):
        shared = {**sizes, "sequence_parallel": sizes["tensor_model_parallel_size"] > 1}
        made = dropless(**shared) if kind == "stock" else tiny.padded_layer(experts=kind, **shared)
        experts = [name for name, _ in made.named_parameters() if name.startswith("experts.")]
        given, right = tokens(10, 1), []
        own = tiny.results(made, given)
        made.zero_grad()
        ddp = DistributedDataParallel(made.config, DistributedDataParallelConfig(), made)
        ddp.zero_grad_buffer()
        output, _ = ddp(given.clone().requires_grad_())
        output.backward(output.detach().cos())
        ddp.finish_grad_sync()
        for name in experts:
            wanted = own[name].clone()
            dist.all_reduce(wanted, group=parallel_state.get_expert_data_parallel_group())
            wanted /= parallel_state.get_data_parallel_world_size()
            right.append(torch.allclose(made.get_parameter(name).main_grad, wanted, atol=1e-6))
        return right


@pytest.mark.parametrize(("tp", "etp"), [(2, 1), (1, 2), (2, 2)])
def test_d27_gradients_of_experts_are_summed_where_they_are_the_same(pool2, tp, etp):
    """Without expert parallelism stock, up to 0.18, sums over attention's data parallelism."""
    sizes = {"tensor_model_parallel_size": tp, "expert_tensor_parallel_size": etp}
    for kind in ("packed", "module"):
        assert all(all(right) for right in pool2.run(_reduced, sizes, kind))
    stock = [all(right) for right in pool2.run(_reduced, sizes, "stock")]
    assert stock == [tp == etp or INSTALLED >= (0, 19)] * 2
