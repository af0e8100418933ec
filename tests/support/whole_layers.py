"""Layers of packed experts on every rank, and what the oracle finds for them.

A case is a pass through layers, one after the other: each adds its result to the tokens that it
was given. So an error of any layer reaches all gradients of those before.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from padded_dispatch import Activation, DispatchConfig, ExpertWeights, PaddedDispatcher
from padded_dispatch.experts.padded import ExpertInput
from padded_dispatch.experts.plain import activate
from padded_dispatch.experts.store import Store
from tests.support import reference
from tests.support.machines import ranks_on
from tests.support.reference import Arrays
from tests.support.routings import maps_of
from tests.support.threads import grid, poisoned_memory, run_on_threads

# What one source finds, by name: its output, and the gradients of its leaves (`OneRank.leaves`).
Found = dict[str, Any]
ROUTINGS = "thin", "full", "hot", "one rank", "idle rank", "idle source", "masked", "none"


@dataclass(frozen=True, kw_only=True)
class Layer:
    map_STE: NDArray
    probs_STE: NDArray
    weights: Arrays


@dataclass(frozen=True, kw_only=True)
class Case:
    """Layers with one config, tokens of all sources, and the gradient of what comes out.

    `machines`: a letter for the machine of each rank; "" for one machine.
    """

    config: DispatchConfig
    machines: str = ""
    activation: Activation
    layers: Sequence[Layer]
    tokens_STD: NDArray
    grad_STD: NDArray


# What torch's selective activation checkpointing saves of a pass, by name; it computes the rest.
SAVES: dict[str, Callable[[Any], bool]] = {
    "nothing": lambda op: False,
    "products": lambda op: op.name() in ("aten::mm", "aten::addmm", "aten::bmm"),
    "memory": lambda op: op.name().startswith(("aten::new_", "aten::empty", "aten::zeros")),
    "all": lambda op: not op._schema.is_mutable and not op.is_view,
}


def selective(saves: str) -> Callable[[], Any]:
    """Return the contexts of a checkpoint that saves results of these operations."""

    def policy(ctx: Any, op: Any, *args: Any, **given: Any) -> CheckpointPolicy:
        saved = SAVES[saves](op)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


def make_case(
    config: DispatchConfig,
    routings: Sequence[str],
    *,
    num_tokens: int = 7,
    hidden: int = 6,
    ffn: int = 5,
    activation: Activation | None = None,
    biased: bool = True,
    machines: str = "",
    seed: int = 0,
) -> Case:
    """Draw a case with a layer for each routing, one of those of `maps_of`.

    Or masked: some tokens, and all of source 0, are padding.
    """
    generator = np.random.default_rng(seed)
    activation = activation or Activation()
    sources, shards = config.num_sources, config.etp_size
    width = 2 * ffn if activation.gated else ffn
    shapes = {"fc1_LGD": (width, hidden), "fc2_LDF": (hidden, ffn)}
    if biased:
        shapes |= {"fc1_bias_LG": (width,), "fc2_bias_LD": (hidden,)}

    def normal(*shape: int, scale: float = 1.0) -> NDArray:
        """Draw numbers that fp32 has, so that layers in fp32 and in fp64 are given the same."""
        return np.float32(scale * generator.normal(size=shape)).astype(np.float64)

    def layer(routing: str) -> Layer:
        drawn = num_tokens, config.num_experts, config.top_k
        ranks = {"num_ranks": config.num_ranks, "num_sources": sources}
        map_STE = maps_of(routing, drawn, **ranks, seed=seed)
        if routing == "masked":
            map_STE[generator.random((sources, num_tokens)) < 0.3] = False
            map_STE[0] = False
        # Eighths have many ties.
        probs = generator.integers(0, 9, (sources, num_tokens, config.num_experts)) / 8
        return Layer(
            map_STE=map_STE,
            probs_STE=probs,
            weights={
                name: normal(shards, config.num_experts, *shape, scale=shape[-1] ** -0.5)
                for name, shape in shapes.items()
            },
        )

    tokens = sources, num_tokens, hidden
    return Case(
        config=config,
        machines=machines,
        activation=activation,
        layers=[layer(routing) for routing in routings],
        tokens_STD=normal(*tokens),
        grad_STD=normal(*tokens),
    )


class Sizes:
    def __init__(self, config: DispatchConfig, num_tokens: int) -> None:
        top_k, local, sources = config.top_k, config.num_local_experts, config.num_sources
        factor = config.capacity_factor
        self.drops = factor not in ("fit", math.inf)
        self.share = config.etp_size * num_tokens * top_k
        self.most = self.rows = sources * num_tokens * min(top_k, local)
        if self.drops:
            self.rows = min(self.most, math.ceil(self.share * factor))
        elif factor == math.inf:
            self.rows = min(self.most, math.ceil(self.share * 1.25))

        def capacity(factor: float) -> int:
            wanted = num_tokens * top_k / config.num_experts * (factor if self.drops else math.inf)
            slots = max(1, math.ceil(min(num_tokens, wanted)))
            while slots * sources % config.alignment:
                slots += 1
            return slots

        self.capacity = capacity(factor)


def rows_sent(case: Case, layer: Layer) -> NDArray:
    """Return the rows of every source that it sends to the ranks of their experts."""
    config, sizes = case.config, Sizes(case.config, case.tokens_STD.shape[1])
    cells = config.capacity_pool == "cells" and sizes.drops
    rows = []
    for map_TE, probs_TE in zip(layer.map_STE, layer.probs_STE, strict=True):
        capacity = sizes.capacity if cells else len(map_TE)
        given = dict(capacity=capacity, policy=config.policy)
        rows.append(reference.select(map_TE, probs_TE, **given))
    return np.stack(rows)


def expected(case: Case, *, keeps: bool = True) -> list[Found]:
    """Return what each source must find; `keeps`: in one store of all layers, else in scratch."""
    config, (_, num_tokens, _) = case.config, case.tokens_STD.shape
    ranks, sizes = config.num_ranks, Sizes(config, num_tokens)
    ranks_HG = reference.hosts(case.machines or "a" * config.num_sources)
    if config.capacity_pool == "cells" or config.etp_size > 1 or ranks_HG.shape[1] == 1:
        ranks_HG = np.arange(config.num_sources)[None]  # All ranks exchange with each other.
    num_layers = len(case.layers) if keeps else 1
    if config.capacity_pool == "cells":
        sizes.rows = sizes.most  # Sources chose them already.
    least = min(sizes.most, 5 * sizes.share) if sizes.drops else sizes.most
    rows = max(num_layers * sizes.rows, least)

    def new_stores() -> list[reference.Store]:
        return [reference.Store(rows) for _ in range(ranks)]

    stores, given, rows_Y = new_stores(), [case.tokens_STD], []
    for layer in case.layers:
        if not keeps:
            stores = new_stores()
        map_STE = reference.merged(rows_sent(case, layer), ranks_HG)
        levels = [stores[r].keep(reference.counts(map_STE, r, ranks)) for r in range(ranks)]
        map_STE = reference.found_room(map_STE, levels)
        rows_Y.append(reference.apart(map_STE, ranks_HG))
        of_layer = layer.probs_STE, rows_Y[-1], layer.weights, case.activation
        given.append(given[-1] + reference.layer(given[-1], *of_layer))
    grad_STD, backward = case.grad_STD, []
    for layer, rows_STE, tokens_STD in reversed(
        list(zip(case.layers, rows_Y, given[:-1], strict=True))
    ):
        of_layer = layer.probs_STE, rows_STE, layer.weights, case.activation
        grad, *grads = reference.layer_backward(tokens_STD, *of_layer, grad_STD)
        grad_STD = grad_STD + grad
        backward.insert(0, grads)
    found = []
    for source in range(config.num_sources):
        of_source = {"out": given[-1][source], "tokens": grad_STD[source]}
        for y, (probs_STE, grads) in enumerate(backward):
            of_source[f"probs {y}"] = probs_STE[source]
            shard = _shard(config, grads, source)
            of_source |= {f"{name} {y}": grad for name, grad in shard.items()}
        found.append(of_source)
    return found


def _shard(config: DispatchConfig, weights: Arrays, source: int) -> Arrays:
    i, r = divmod(source, config.num_ranks)
    local = config.num_local_experts
    return {name: value[i, r * local : (r + 1) * local] for name, value in weights.items()}


class OneRank:
    """The leaves of a case on this rank, on the CPU, and the gradient of what comes out."""

    def __init__(self, case: Case, dtype: Any = torch.float64, probs_dtype: Any = None) -> None:
        self.case = case
        self.source = dist.get_rank() if dist.is_initialized() else 0

        def leaf(value: NDArray, dtype: torch.dtype = dtype) -> Tensor:
            return torch.tensor(value, dtype=dtype, requires_grad=True)

        self.tokens_TD = leaf(case.tokens_STD[self.source])
        self.grad_TD = leaf(case.grad_STD[self.source]).detach()
        probs = [layer.probs_STE[self.source] for layer in case.layers]
        self.probs_YTE = [leaf(probs_TE, probs_dtype or dtype) for probs_TE in probs]
        self.maps_YTE = [torch.from_numpy(layer.map_STE[self.source]) for layer in case.layers]
        self.weights_Y: list[ExpertWeights] = []
        for layer in case.layers:
            shard = _shard(case.config, layer.weights, self.source)
            leaves = {name: leaf(value) for name, value in shard.items()}
            self.weights_Y.append(ExpertWeights(**leaves))

    def leaves(self) -> dict[str, Tensor]:
        """Return tokens, probabilities and weights by name and number of the layer."""
        leaves = {"tokens": self.tokens_TD}
        for y, weights in enumerate(self.weights_Y):
            leaves[f"probs {y}"] = self.probs_YTE[y]
            for name in self.case.layers[y].weights:
                leaves[f"{name} {y}"] = getattr(weights, name)
        return leaves

    def found(self, out_TD: Tensor) -> Found:
        out_TD.backward(self.grad_TD)
        grads = {name: leaf.grad for name, leaf in self.leaves().items()}
        return {"out": out_TD.detach()} | grads


def on_all_ranks(
    config: DispatchConfig, fn: Callable[..., Any], *args: Any, machines: str = ""
) -> list[Any]:
    """Call `fn(*args)` on every rank, with NaN in fresh memory."""
    with poisoned_memory(), ranks_on(machines):
        if config.num_sources == 1:
            return [fn(*args)]
        return run_on_threads(config.num_sources, fn, *args)


def assert_found(results: Sequence[Found], wanted: Sequence[Found]) -> None:
    """Compare all that all ranks found; NaN equals nothing."""
    for source, (result, want) in enumerate(zip(results, wanted, strict=True)):
        for name, value in want.items():
            assert result[name] is not None, name
            what = partial("source {}: {}: {}".format, source, name)
            exact = torch.from_numpy(np.asarray(value))
            torch.testing.assert_close(result[name], exact, rtol=1e-10, atol=1e-10, msg=what)


class _Poison(torch.autograd.Function):
    """NaN in rows that are not real: of the values, or of their gradient in backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, is_real_N: Tensor, forward: bool) -> Tensor:
        ctx.given = is_real_N, forward
        return _with_nan(values, is_real_N) if forward else values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        is_real_N, forward = ctx.given
        padded = grads[0][~is_real_N]
        assert not forward or torch.equal(padded, torch.zeros_like(padded)), "exactly zero"
        return (grads[0] if forward else _with_nan(grads[0], is_real_N)), None, None


def _with_nan(values: Tensor, is_real_N: Tensor) -> Tensor:
    return torch.where(is_real_N.view(-1, *[1] * (values.ndim - 1)), values, torch.nan)


def _check_input(case: Case, layer: int, source: int, given: ExpertInput) -> None:
    """Compare what padded experts read, bit by bit; the oracle has the tokens of layer 0."""
    config, rank = case.config, source % case.config.num_ranks
    rows_STE = rows_sent(case, case.layers[layer])
    count_SL = reference.counts(rows_STE, rank, config.num_ranks)
    assert given.count_SL.dtype == torch.int32 and given.count_SL.tolist() == count_SL.tolist()
    capacity = len(given.rows_ND) // given.count_SL.numel()
    if config.fits:
        assert capacity - max(1, count_SL.max()) in range(config.alignment)
        assert capacity * config.num_sources % config.alignment == 0
    else:
        assert capacity == config.capacity(case.tokens_STD.shape[1])
    where = dict(capacity=capacity, rank=rank, num_ranks=config.num_ranks)
    cells = reference.cells(case.tokens_STD, case.layers[layer].probs_STE, rows_STE, **where)
    rows_ND, probs_N, is_real_N = (torch.from_numpy(part).flatten(0, 2) for part in cells)
    if layer == 0:
        assert torch.equal(given.rows_ND, rows_ND)
    assert torch.equal(given.probs_N, probs_N)
    assert not given.rows_ND[~is_real_N].any()


def padded_experts(given: ExpertInput, weights: ExpertWeights, activation: Activation) -> Tensor:
    """Compute experts that read padded rows, and leave NaN in their output and gradients."""
    num_sources, num_experts = given.count_SL.shape
    c_C = torch.arange(len(given.rows_ND) // given.count_SL.numel())
    is_real_N = (c_C < given.count_SL.T.reshape(num_experts, num_sources, 1)).flatten()
    rows_ND = _Poison.apply(given.rows_ND, is_real_N, False)
    probs_N = _Poison.apply(given.probs_N, is_real_N, False)
    out = []
    by_expert = zip(rows_ND.chunk(num_experts), probs_N.chunk(num_experts), strict=True)
    for e, (rows, probs) in enumerate(by_expert):
        biases = weights.fc1_bias_LG, weights.fc2_bias_LD
        fc1_bias, fc2_bias = (None if bias is None else bias[e] for bias in biases)
        hidden = activate(rows @ weights.fc1_LGD[e].T, probs, activation, fc1_bias)
        product = hidden @ weights.fc2_LDF[e].T
        out.append(product if fc2_bias is None else product + probs[:, None] * fc2_bias)
    return _Poison.apply(torch.cat(out), is_real_N, True)


def stacks_are_empty(store: Store) -> bool:
    return all(stack.last == -1 and stack.top[0] == 0 for stack in store._stacks)


class Model:
    """Dispatchers of all layers of a case, on this rank."""

    def __init__(self, case: Case, pool: str) -> None:
        self.case, self.pool, self.store = case, pool, Store()
        group, etp_group, _ = grid(case.config.num_ranks, case.config.etp_size)
        given = dict(group=group, etp_group=etp_group, store=self.store)
        self.dispatchers = [PaddedDispatcher(case.config, **given) for _ in case.layers]

    def layer(self, rank: OneRank, layer: int, tokens_TD: Tensor) -> Tensor:
        dispatcher, weights = self.dispatchers[layer], rank.weights_Y[layer]
        given = tokens_TD, rank.probs_YTE[layer], rank.maps_YTE[layer]
        if self.pool != "padded":
            return dispatcher.run(*given, weights, self.case.activation)
        sent = dispatcher.dispatch(*given)
        _check_input(self.case, layer, rank.source, sent.expert_input)
        out_ND = padded_experts(sent.expert_input, weights, self.case.activation)
        return dispatcher.combine(out_ND, sent)

    def forward(self, rank: OneRank, recompute: str = "") -> Tensor:
        tokens_TD = rank.tokens_TD
        for layer in range(len(self.case.layers)):
            given = rank, layer, tokens_TD
            if recompute:
                how: dict[str, Any] = {"use_reentrant": recompute == "reentrant"}
                if recompute in SAVES:
                    how["context_fn"] = selective(recompute)
                add: Any = checkpoint(self.layer, *given, **how)
                assert stacks_are_empty(self.store)
            else:
                add = self.layer(*given)
            # A layer's output can be changed in place, unless selective recompute has saved it.
            tokens_TD = add + tokens_TD if recompute in SAVES else add.add_(tokens_TD)
        return tokens_TD


def one_pass(case: Case, pool: str, recompute: str = "") -> tuple[Found, bool]:
    model, rank = Model(case, pool), OneRank(case)
    found = rank.found(model.forward(rank, recompute))
    return found, stacks_are_empty(model.store)


def check(case: Case, pool: str, recompute: str = "") -> None:
    """Compare a pass of the dispatcher on all ranks with the oracle.

    `pool`: "padded" for experts that read padded cells; else our packed experts compute.
    `recompute`: "reentrant" or "other", or a name in `SAVES`, if backward computes layers again.
    """
    given = case, pool, recompute
    results = on_all_ranks(case.config, one_pass, *given, machines=case.machines)
    assert_found([found for found, _ in results], expected(case, keeps=not recompute))
    assert all(is_empty for _, is_empty in results)
