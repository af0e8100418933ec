"""The table of cases that CPUs and GPUs share: what is computed in several ways, and must agree.

A `Row` names a check and a case. On a CPU it runs as it stands; on GPUs with the changes `gpu`. The
tests of `tests.gpu.test_rows` run each row that the machine has devices for, and
`python -m tests.gpu` writes a results row of each.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import package_info

from padded_dispatch.megatron import PaddedOptions
from tests.support.attention import Attention, refusal_is_exact
from tests.support.direct_parity import Layer, eager_differs, replay_differs
from tests.support.generation import GenerationCase, generates_as_stock
from tests.support.layer_parity import LayerCase, layer_agrees
from tests.support.passes import AllPasses, passes_differ
from tests.support.tiny import EXPERT_BIAS, RECOMPUTE
from tests.support.training import (
    EAGER_STEPS,
    RETRIED,
    Model,
    memory_is_flat,
    replays_do_not_wait,
    ways_agree,
    with_changes,
)

WHOLE, PARTIAL = ("attn", "moe"), ("attn", "moe_router", "moe_preprocess")
VERSION = (package_info.MAJOR, package_info.MINOR)

EAGER = "replay equals eager training"
HYBRID = "a HybridModel trains as its GPTModel"
RETRY = "repeated steps equal training that never drops"
MEMORY = "memory is flat"
WAITS = "replays do not wait"
LAYER = "a layer is at parity with stock"
ROOM = "rows in room for all layers equal rows in room of their own"
TEXT = "text generation equals stock"
ATTENTION = "a graph of a step refuses attention whose gradients would be wrong"
DIRECT = "direct stores equal an oracle"
REPLAYS = "replays of direct stores equal an oracle"
PASSES = "recomputed and partial passes over direct stores equal plain ones"

TRAINING: dict[str, Any] = {
    "device": "cuda",
    "batch": 1,
    "seq": 256,
    "hidden": 512,
    "heads": 8,
    "ffn": 512,
    "num_experts": 32,
    "top_k": 4,
    "vocab": 512,
    "steps": EAGER_STEPS + 5,
}
_OSS: dict[str, Any] = {
    "hidden": 2880,
    "ffn": 2880,
    "heads": 64,
    "fields": {"num_query_groups": 8, "kv_channels": 64},
    "steps": EAGER_STEPS + 3,
}
_SHARED: dict[str, Any] = {
    "moe_shared_expert_intermediate_size": 16,
    "moe_shared_expert_overlap": True,
    "moe_shared_expert_gate": True,
    **EXPERT_BIAS,
}
_LAYER = {"num_experts": 16, "top_k": 4, "hidden": 256, "ffn": 192, "seq": 130}
_TEXT: dict[str, Any] = {
    "device": "cuda",
    "prompts": (96, 32, *(48, 64) * 3),
    "new_tokens": 24,
    "num_layers": 3,
    "hidden": 512,
    "heads": 8,
    "ffn": 256,
    "num_experts": 32,
    "top_k": 4,
    "vocab": 512,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case of a check. `run` gets the case, then `more`, on each of `ranks` ranks.

    `gpu`: what is different on GPUs. `cpu`: whether a CPU runs it; Megatron needs a GPU for some.
    """

    check: str
    name: str
    run: Callable[..., Any]
    case: Any
    more: tuple[Any, ...] = ()
    ranks: int = 1
    gpu: dict[str, Any] = field(default_factory=dict)
    cpu: bool = True

    def on(self, device: str) -> tuple[Any, ...]:
        """Return the arguments of `run`."""
        if device == "cuda":
            return with_changes(self.case, self.gpu), *self.more
        # A CPU always computes the same.
        ways = ({n: w for n, w in one.items() if n != "eager again"} for one in self.more)
        return (self.case, *ways) if self.run is ways_agree else (self.case, *self.more)


def table(replays: int = 1000) -> list[Row]:
    """Return all rows, those with few ranks first; those of direct stores have `replays`."""
    rows = [*_replayed(), *_retried(), *_quantized(), *_flat()]
    rows += [*_hybrid()] if VERSION >= (0, 19) else []
    rows += [*_in_flight(), *_generating(), *_at_parity()]
    rows += [*_stored_directly(replays), *_across_hosts(replays)]
    given: dict[str, Any] = {"run": refusal_is_exact, "case": Attention(), "cpu": False}
    rows.append(Row(check=ATTENTION, name="64, 96, 128 and 192 positions", **given))
    assert len({(row.check, row.name) for row in rows}) == len(rows), "each row has its own name"
    return sorted(rows, key=lambda row: row.ranks)


def _trained(
    check: str, name: str, ways: dict[str, Any], of: Model | None = None, **changes: Any
) -> Row:
    """Return a row of trainings; `gpu` and `cpu` as in a row, the rest changes the model."""
    gpu, cpu = TRAINING | changes.pop("gpu", {}), changes.pop("cpu", True)
    model = with_changes(of or Model(), changes)
    where: dict[str, Any] = {"ranks": model.ranks, "gpu": gpu, "cpu": cpu}
    return Row(check=check, name=name, run=ways_agree, case=model, more=(ways,), **where)


def _replay(name: str, graph: str = "layer", scopes: Any = WHOLE, **changes: Any) -> Row:
    ways = {"eager": {}, "eager again": {}, "graphs": {"graph": graph, "scopes": scopes}}
    if changes.get("cpu") and (not scopes or "moe" in scopes):
        # Shapes of packed experts follow the routing on CPUs.
        changes["options"] = {"experts": "module", **changes.get("options", {})}
        changes["gpu"] = {"options": {"experts": "auto"}, **changes.get("gpu", {})}
    return _trained(EAGER, name, ways, **{"cpu": False, **changes})


def _replayed() -> Iterator[Row]:
    """Yield trainings with graphs of each kind, beside eager ones."""
    two: dict[str, Any] = {"ranks": 2, "ep": 2}
    four: dict[str, Any] = {"ranks": 4, "ep": 2}
    yield _replay("4 microbatches", microbatches=4)
    for module in ("moe", "moe_act", "layernorm"):
        again = {"recompute_granularity": "selective", "recompute_modules": [module]}
        yield _replay(f"recompute {module}", fields=again, scopes=("moe",), cpu=module == "moe")
    yield _replay("evaluation between steps", evaluates=(2, 10), gpu={"evaluates": (1, 256)})
    for scopes in (WHOLE, PARTIAL):
        other = {"evaluates": (3, 5), "gpu": {"evaluates": (3, 160)}}
        yield _replay(f"evaluation of another shape, {'+'.join(scopes)}", scopes=scopes, **other)
    for sizes, name in ((two, "EP2"), (four, "EP2, two replicas")):
        reduce, gather = {"overlap_grad_reduce": True}, {"overlap_param_gather": True}
        plain = {"use_distributed_optimizer": False}
        yield _replay(f"{name}: distributed optimizer", **sizes)
        yield _replay(f"{name}: DDP, overlapped reduce", gpu={"ddp": plain | reduce}, **sizes)
        yield _replay(f"{name}: all overlapped", gpu={"ddp": reduce | gather}, **sizes)
    for scopes in (WHOLE, PARTIAL):
        gpu = {"steps": EAGER_STEPS + 200}
        yield _replay(f"200 replays, {'+'.join(scopes)}", scopes=scopes, gpu=gpu, **two)
    for graph, ranks in itertools.product(("helper", "iteration"), (1, 2)):
        gpu = {"ddp": {"use_distributed_optimizer": False}} if graph == "iteration" else {}
        small = graph == "helper" and ranks == 1
        yield _replay(
            f"EP{ranks}, {graph} graphs", graph, ranks=ranks, ep=ranks, gpu=gpu, cpu=small
        )
    dense = {"num_layers": 3, "fields": {"moe_layer_freq": [1, 0, 1]}, "gpt_oss": True, **two}
    yield _replay("dense and MoE layers", scopes=("attn", "mlp", "moe"), cpu=True, **dense)
    deep: dict[str, Any] = {"pp": 2, "num_layers": 4, "microbatches": 4}
    yield _replay("PP2", **deep, ranks=2)
    yield _replay("PP2/VPP2", cpu=True, vpp=2, **deep, ranks=2)
    yield _replay("PP2/EP2/VPP2", vpp=2, **deep, **four)
    yield from _layouts()
    yield from _starved()
    yield from _pools()
    yield from _crowded()
    yield from _masked()


def _layouts() -> Iterator[Row]:
    """Yield parallel layouts of a model with GPT-OSS's width."""
    layouts: dict[str, dict[str, Any]] = {
        "EP2": {"ranks": 2, "ep": 2},
        "TP2/EP2/ETP1": {"ranks": 2, "tp": 2, "ep": 2},
        "TP2/EP2/ETP2": {"ranks": 4, "tp": 2, "ep": 2, "etp": 2},
        "TP4/EP2/ETP2": {"ranks": 4, "tp": 4, "ep": 2, "etp": 2},
        "TP4/EP4/ETP1": {"ranks": 4, "tp": 4, "ep": 4},
        "EP4": {"ranks": 4, "ep": 4},
        "TP4/EP2/ETP4": {"ranks": 8, "tp": 4, "ep": 2, "etp": 4},
        "EP8": {"ranks": 8, "ep": 8},
    }
    for (name, sizes), scopes in itertools.product(layouts.items(), (WHOLE, PARTIAL)):
        full_name = f"GPT-OSS {name}, {'+'.join(scopes)}"
        yield _replay(full_name, scopes=scopes, gpt_oss=True, gpu=_OSS, **sizes)


def _starved() -> Iterator[Row]:
    """Yield cases in which a rank's experts get no tokens in two of three steps."""
    how: dict[str, Any] = {"gpt_oss": True, "ddp": {"overlap_grad_reduce": True}}
    for ranks, scopes in itertools.product((2, 4), (WHOLE, PARTIAL)):
        name = f"EP{ranks}: a rank without tokens in some steps, {'+'.join(scopes)}"
        sizes = {"ranks": ranks, "ep": ranks, "steps": 4, "idle": "rank"}
        small = ranks == 2 and scopes == WHOLE
        yield _replay(name, scopes=scopes, cpu=small, **sizes, **how)


def _chosen(ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield options by name: cells and a store, with each exchange."""
    for pool in ("cells", "store"):
        for exchange in ("alltoall", "direct") if ranks > 1 else ("alltoall",):
            name = f"EP{ranks}, pool {pool}, {exchange}"
            options = {"capacity_pool": pool, "exchange": exchange, "experts": "packed"}
            yield name, {"ranks": ranks, "ep": ranks, "options": options}


def _pools() -> Iterator[Row]:
    """Yield cells and stores with each exchange, in each kind of graph."""
    for ranks in (1, 2, 4):
        for name, chosen in _chosen(ranks):
            for scopes in (WHOLE, PARTIAL, ("attn", "moe_router")):
                full_name = f"{name}, graphs of {'+'.join(scopes)}"
                yield _replay(full_name, scopes=scopes, microbatches=4, **chosen)
            plain = {"ddp": {"use_distributed_optimizer": False}}
            yield _replay(f"{name}, graph of iterations", "iteration", gpu=plain, **chosen)
            again = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
            yield _replay(f"{name}, recompute of moe_act", fields=again, **chosen)
            if ranks == 2:
                deep = {"pp": 2, "num_layers": 4, "microbatches": 4, **chosen, "ranks": 4}
                yield _replay(f"{name}, PP2", **deep)


def _crowded() -> Iterator[Row]:
    """Yield stores that overflow, in one layer after the other and in recompute, and busy ranks."""
    store: dict[str, Any] = {"options": {"capacity_pool": "store", "experts": "packed"}}
    for ranks in (2, 4, 8):
        how: dict[str, Any] = {"ranks": ranks, "ep": ranks, **store}
        for factor in (0.3, 0.9):
            name = f"EP{ranks}, a store at factor {factor} of 4 layers that overflow"
            yield _replay(name, factor=factor, num_layers=4, microbatches=3, **how)
        for scopes in (WHOLE, PARTIAL):
            name = f"EP{ranks}, all rows to one rank, {'+'.join(scopes)}"
            yield _replay(name, scopes=scopes, idle="others", gpt_oss=True, num_layers=4, **how)
        name = f"EP{ranks}, all rows to one rank, recompute moe"
        yield _replay(name, scopes=("moe",), idle="others", gpt_oss=True, fields=RECOMPUTE, **how)
        name = f"EP{ranks}, replayed and eager steps in turn"
        yield _replay(name, mixed=True, factor=0.9, microbatches=3, num_layers=4, **how)
        stages = {"pp": 2, "num_layers": 6, "microbatches": 4, **how, "ranks": 2 * ranks}
        yield _replay(f"EP{ranks}, PP2, a store of 3 layers that overflow", factor=0.9, **stages)


def _masked() -> Iterator[Row]:
    """Yield padding masks that change, and packed sequences, in each kind of graph."""
    kinds: dict[str, tuple[str, Any]] = {
        "experts": ("module", (("moe",), WHOLE, ())),
        "parts": ("packed", (("attn",), PARTIAL[1:2], PARTIAL[1:], PARTIAL)),
    }
    for ranks in (1, 2):
        sizes: dict[str, Any] = {"ranks": ranks, "ep": ranks}
        for kind, (experts, captured) in kinds.items():
            ways: dict[str, Any] = {"eager": {}, "eager again": {}}
            ways |= {
                f"graphs of {scopes}": {"graph": "layer", "scopes": scopes} for scopes in captured
            }
            how = {"masked": True, "evaluates": (3, 5), "fields": _SHARED, **sizes}
            how |= {"options": {"experts": experts}, "cpu": (ranks == 1) == (kind == "experts")}
            how["gpu"] = {"options": {"experts": "auto"}, "evaluates": (3, 160)}
            yield _trained(EAGER, f"masks, EP{ranks}, graphs of {kind}", ways, **how)
        gpu = {"ddp": {"use_distributed_optimizer": False}}
        yield _replay(f"masks, EP{ranks}, iteration", "iteration", masked=True, gpu=gpu, **sizes)
        for scopes, masked in itertools.product((("moe",), PARTIAL[1:]), (False, True)):
            name = f"packed sequences, EP{ranks}, {'+'.join(scopes)}{', masks' * masked}"
            small = masked == (ranks == 2) == (scopes != ("moe",))
            how = {"packed": True, "masked": masked, "batch": 1, "cpu": small}
            yield _replay(name, scopes=scopes, **how, **sizes)
    deep: dict[str, Any] = {"pp": 2, "microbatches": 4, "ranks": 2}
    yield _replay("masks, PP2", masked=True, cpu=True, **deep)
    yield _replay("masks, TP2/EP2/ETP1", masked=True, ranks=2, tp=2, ep=2)
    for scopes in (WHOLE, ("moe",), PARTIAL[1:]):
        name = f"masks, CP2/EP2, {'+'.join(scopes)}"
        parts: dict[str, Any] = {"ranks": 2, "cp": 2, "ep": 2, "seq": 8, "masked": True}
        # Up to cuDNN 9.15.0 no attention can be captured whose steps have other than 128 keys.
        parts["gpu"] = {"seq": 512} if "attn" in scopes else {}
        yield _replay(name, scopes=scopes, **parts)


def _hybrid() -> Iterator[Row]:
    """Yield trainings of HybridModels, of attention and MoE layers, beside their GPTModels."""
    two: dict[str, Any] = {"ranks": 2}
    deep: dict[str, Any] = {"ranks": 2, "pp": 2, "microbatches": 4}
    # Megatron logs the losses of routers of a HybridModel's multi-token prediction elsewhere.
    later: dict[str, Any] = {"mtp_num_layers": 1, "moe_router_load_balancing_type": "none"}
    later |= {"moe_z_loss_coeff": None}
    repeats: dict[str, Any] = {"factor": 0.5, "options": {"on_overflow": "retry"}, "counts": False}
    repeats["gpu"] = {"options": {"experts": "packed", "capacity_pool": "expert"}}
    for name, pattern, case in (
        ("EP1", "*E*E", {}),
        ("EP2", "*E*E", {"ep": 2, **two}),
        ("TP2/EP2", "*E*E", {"tp": 2, "ep": 2, **two}),
        ("PP2", "*E|*E", deep),
        ("PP2/VPP2", "*E|*E|*E|*E", {"vpp": 2, "num_layers": 4, **deep}),
        ("multi-token prediction", "*E*E/*E", {"fields": later}),
        ("masks", "*E*E", {"masked": True}),
        ("recompute of moe", "*E*E", {"fields": RECOMPUTE}),
        ("recompute of layers", "*E*E", {"fields": _FULL}),
        ("repeated steps", "*E*E", repeats),
    ):
        ways: dict[str, Any] = {"GPTModel": {}, "HybridModel": {"pattern": pattern}}
        yield _trained(HYBRID, name, ways, **case)
    for name, graph, case in (
        ("attn+moe", "layer", {"cpu": True}),
        ("attn+moe, masks", "layer", {"masked": True}),
        ("attn+moe, EP2", "layer", {"ep": 2, **two}),
        ("attn+moe, PP2", "layer", {**deep, "pattern": "*E|*E"}),
        ("attn+moe, multi-token prediction", "layer", {"pattern": "*E*E/*E"}),
        ("attn+moe, Megatron's helper", "helper", {}),
        ("attn+moe_router+moe_preprocess", "layer", {"scopes": PARTIAL}),
        ("iterations", "iteration", {}),
    ):
        yield _replay(f"HybridModel, graphs of {name}", graph, **{"pattern": "*E*E", **case})
    yield _retry("HybridModel, layer graphs", "layer", cpu=False, pattern="*E*E")


def _retry(name: str, graph: str = "none", **changes: Any) -> Row:
    ways = {
        "never dropping": {"never_drops": True},
        "repeated": {"options": {"on_overflow": "retry"}, "graph": graph},
    }
    wide = torch.bfloat16 if changes.get("dtype") != torch.float16 else torch.float16
    cells = {"experts": "packed", "capacity_pool": "cells"}  # A store drops nothing.
    gpu = {"steps": 6, "dtype": wide, "options": cells, **changes.pop("gpu", {})}
    return _trained(RETRY, name, ways, RETRIED, gpu=gpu, **changes)


def _retried() -> Iterator[Row]:
    """Yield trainings whose steps are repeated, beside ones that never drop."""
    two: dict[str, Any] = {"ranks": 2, "microbatches": 3}
    reduce = {"overlap_grad_reduce": True}
    gather = {**reduce, "overlap_param_gather": True, "use_distributed_optimizer": True}
    half = {"dtype": torch.float16, "gpu": {"options": {"experts": "module"}}}
    yield _retry("one microbatch", microbatches=1)
    yield _retry("three microbatches", microbatches=3)
    yield _retry("EP2, expert bias", ep=2, fields=EXPERT_BIAS, **two)
    yield _retry("PP2", pp=2, **two)
    deep: dict[str, Any] = {"ranks": 2, "pp": 2, "vpp": 2, "num_layers": 4, "microbatches": 4}
    yield _retry("PP2/VPP2", **deep)
    yield _retry("overlapped reduction", ddp=reduce, cpu=False, **two)
    yield _retry("overlapped gathering", ddp=gather, **two)
    yield _retry("recompute", fields=RECOMPUTE, microbatches=1)
    yield _retry("multi-token prediction", fields={"mtp_num_layers": 1}, microbatches=1)
    yield _retry("fp16", microbatches=1, **half)
    yield _retry("TP2/EP2", ranks=2, tp=2, ep=2)
    yield _retry("TP2, fp16", ranks=2, tp=2, cpu=False, **half)
    bf16 = {"dtype": torch.bfloat16, "dropout": 0.0}  # The stand-in for graphs draws nothing.
    module = {"options": {"experts": "module"}}
    yield _retry("EP2, layer graphs", "layer", ranks=2, ep=2, microbatches=1, **bf16, **module)
    yield _retry("PP2/VPP2, layer graphs", "layer", cpu=False, **deep)
    for ranks, graph in itertools.product((1, 2), ("layer", "iteration")):
        sizes = {"ranks": ranks, "ep": ranks, "microbatches": 3, "cpu": False}
        yield _retry(f"EP{ranks}, {graph} graphs, three microbatches", graph, **sizes)
        if ranks == 2:
            overlapped = {"ddp": gather, **sizes}
            yield _retry(f"EP2, {graph} graphs, all overlapped", graph, **overlapped)
            some = {"factor": 1.0, "dropout": 0.0, "gpu": {"steps": 12}, **sizes}
            yield _retry(f"EP2, {graph} graphs, some steps", graph, **some)
    yield _retry("TP2/EP2, layer graphs", "layer", ranks=2, tp=2, ep=2, cpu=False)


_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# The recipes that Hopper has, and the numbers that Megatron's documentation gives for them.
_RECIPES = {"tensorwise": "hybrid", "delayed": "hybrid", "blockwise": "e4m3"}


def _quantized() -> Iterator[Row]:
    """Yield fp8 of Megatron's experts and of ours under graphs of each kind; 100 replays."""
    graphs = ("layer", "helper", "iteration")
    for ranks, recipe, graph, experts in itertools.product(
        (1, 2), _RECIPES, graphs, ("module", "packed")
    ):
        once = recipe == "delayed" and graph == "layer"  # Ours compute it as tensorwise.
        if experts == "packed" and recipe != "tensorwise" and not once:
            continue
        steps = EAGER_STEPS + (100 if graph == "iteration" else 50)
        gpu = {"steps": steps, "num_experts": 4, "top_k": 2}
        gpu["num_layers"] = 2 if graph in ("layer", "helper") else 1
        fields = {"fp8": _RECIPES[recipe], "fp8_recipe": recipe}
        gpu |= {"fields": fields, "options": {"experts": experts}}
        name = f"fp8 {recipe}, {experts}, EP{ranks}, {graph}"
        yield _replay(name, graph, ranks=ranks, ep=ranks, gpu=gpu)
        if (experts, graph) == ("packed", "layer"):
            more = gpu | {"evaluates": (1, 256), "microbatches": 4}
            yield _replay(f"{name}, evaluation", graph, ranks=ranks, ep=ranks, gpu=more)


def _flat() -> Iterator[Row]:
    """Yield trainings over thousands of steps, and steps in which waiting raises."""
    for ranks in (1, 2):
        for name, chosen in _chosen(ranks):
            word_alone = ("EP1, pool store, alltoall", "EP2, pool store, direct")
            steps = 10_000 if name in word_alone else 2_000
            gpu = TRAINING | {"steps": steps}
            case = with_changes(Model(graph="layer"), chosen)
            how: dict[str, Any] = {"case": case, "ranks": ranks, "gpu": gpu, "cpu": False}
            yield Row(check=MEMORY, name=f"{steps:,} steps, {name}", run=memory_is_flat, **how)
            if name.endswith("pool store, alltoall"):
                fitting = with_changes(case, {"evaluates": (3, 160)})
                how |= {"case": fitting, "gpu": TRAINING | {"steps": 500}}
                yield Row(check=MEMORY, name=f"evaluations, {name}", run=memory_is_flat, **how)
    for ranks, scopes in itertools.product((1, 2, 4), (WHOLE, PARTIAL)):
        case = Model(ranks=ranks, ep=ranks, graph="layer", scopes=scopes)
        how = {"case": case, "ranks": ranks, "gpu": TRAINING | {"steps": 52}, "cpu": False}
        name = f"50 replays, EP{ranks}, {'+'.join(scopes)}"
        yield Row(check=WAITS, name=name, run=replays_do_not_wait, **how)


def _in_flight() -> Iterator[Row]:
    """Yield stores that hold all rows: each pass has its own, whatever is in flight."""
    ways = {"own": {"never_drops": True}, "shared": {}}
    stages: dict[str, Any] = {"pp": 2, "vpp": 2, "num_layers": 4, "microbatches": 4}
    again = {"mtp_num_layers": 1, **RECOMPUTE}
    how: dict[str, Any] = {"counts": False, "steps": 2, "factor": 2.0}
    for exchange in ("alltoall", "direct"):
        how["options"] = {"experts": "packed", "exchange": exchange}
        for ranks in (2, 4) if exchange == "alltoall" else (4,):  # One rank has no peers.
            name = f"PP2/VPP2/EP{ranks // 2}, {exchange}"
            given = {"dtype": torch.float32, "gpu": {"dtype": torch.bfloat16}, **stages}
            given |= {"ranks": ranks, "ep": ranks // 2, "cpu": exchange == "alltoall"}
            yield _trained(ROOM, name, ways, **how, **given)
        for name, fields in (("multi-token prediction, recompute", again), ("recompute", _FULL)):
            given = {"ranks": 2, "ep": 2, "fields": fields, "cpu": exchange == "alltoall"}
            yield _trained(ROOM, f"{name}, {exchange}", ways, microbatches=4, **how, **given)
        for ranks, factor in ((2, 1.5), (4, 2.0), (8, 3.0)):
            given = {"ranks": ranks, "ep": ranks, "num_layers": 12, "cpu": False}
            name = f"12 layers, EP{ranks}, factor {factor}, {exchange}"
            yield _trained(ROOM, name, ways, **{**how, "factor": factor}, **given)
    # With K = 1 shared stores of this factor send tokens again, and own ones keep them.
    again = {"ranks": 2, "ep": 2, "num_layers": 4, "top_k": 1, "cpu": False, "factor": 0.6}
    again |= {"gpu": {"top_k": 1}, "fields": {"moe_router_pre_softmax": True}}
    yield _trained(ROOM, "tokens sent again, direct", ways, **{**how, **again})


def _generating() -> Iterator[Row]:
    """Yield Megatron's static engine."""
    for ranks, experts in itertools.product((1, 2), ("module", "packed")):
        case, name = GenerationCase(ep=ranks, experts=experts), f"{experts}, EP{ranks}"
        how: dict[str, Any] = {"run": generates_as_stock, "ranks": ranks, "gpu": _TEXT}
        yield Row(check=TEXT, name=name, case=case, **how)
        if ranks > 1:
            uneven = dataclasses.replace(case, uneven=True)
            yield Row(check=TEXT, name=f"{name}, other T per rank", case=uneven, **how)


def _at_parity() -> Iterator[Row]:
    """Yield layers beside stock's, in each parallel layout, fp8 among them."""
    overlap = (("moe_shared_expert_overlap", True),)
    again = (("recompute_granularity", "selective"), ("recompute_modules", ["moe"]))
    packed = {"options": PaddedOptions(experts="packed")}
    shared = {"shared_ffn": 6, "gpu": {"shared_ffn": 64}}
    layouts: dict[str, tuple[int, dict[str, int]]] = {
        "EP1": (1, {}),
        "EP2": (2, {"ep": 2}),
        "TP2": (2, {"tp": 2}),
        "TP2/ETP2": (2, {"tp": 2, "etp": 2}),
        "DP2/TP2/EP2": (4, {"tp": 2, "ep": 2}),
        "TP2/EP2/ETP2": (4, {"tp": 2, "ep": 2, "etp": 2}),
        "EP4": (4, {"ep": 4}),
        "EP8": (8, {"ep": 8}),
    }
    both: dict[str, dict[str, Any]] = {
        "a rank whose experts get nothing": {"routing": "idle rank"},
        "every token to one expert": {"top_k": 1, "routing": "one expert"},
        "one token": {"seq": 1, "batch": 1, "gpu": {"seq": 1}},
        "bias": {"bias": True},
        "recompute": {"ours": again},
    }
    kinds: dict[str, dict[str, Any]] = {
        "one local expert": {"num_experts": 2, "top_k": 1, "gpu": {"num_experts": 2, "top_k": 1}},
        "GPT-OSS": {"bias": True, "gpt_oss": True, **packed},
        "shared experts": {"tp": 2, **shared},
        "shared experts, overlap": {"tp": 2, "ours": overlap, **shared},
        "shared score": {"shared_score": True, **shared},
        "shared score, overlap": {"shared_score": True, "ours": overlap, **shared},
        "default options": {"options": PaddedOptions()},
        "latent": {"latent": 64, "cpu": False},  # Megatron asks for Transformer Engine.
    }
    for options, name in (({}, ""), (packed, "packed, ")):
        for layout, (ranks, sizes) in layouts.items():
            yield _layer(f"{name}{layout}", ranks, **sizes, **options)
        for kind, changes in both.items():
            yield _layer(f"{name}{kind}", 2, ep=2, **changes, **options)
        yield _layer(f"{name}bf16", 2, ep=2, dtype=torch.bfloat16, **options)
    for kind, changes in kinds.items():
        yield _layer(kind, 2, **{"ep": 2, **changes})
    for ranks, (recipe, number) in itertools.product((1, 2), _RECIPES.items()):
        fields = (("fp8", number), ("fp8_recipe", recipe))
        how: dict[str, Any] = {"ep": ranks, "cpu": False, "gpu": {"both": fields, "ffn": 256}}
        name = f"fp8 {recipe}, EP{ranks}"
        yield _layer(name, ranks, **how)
        if recipe != "blockwise":
            yield _layer(f"packed, {name}", ranks, **packed, **how)
            how |= {"bias": True, "gpt_oss": True, **packed}
            yield _layer(f"packed, {name}, GPT-OSS", ranks, **how)


def _layer(name: str, ranks: int, **changes: Any) -> Row:
    gpu = {"device": "cuda", **_LAYER, "dtype": torch.bfloat16, **changes.pop("gpu", {})}
    gpu |= {"top_k": 1} if changes.get("top_k") == 1 else {}
    cpu = changes.pop("cpu", ranks < 8)
    case = LayerCase(**changes)
    return Row(check=LAYER, name=name, run=layer_agrees, case=case, ranks=ranks, gpu=gpu, cpu=cpu)


def _stored_directly(replays: int) -> Iterator[Row]:
    """Yield direct stores beside an oracle, eager and in replays; kernels need GPUs."""
    small = Layer()
    wide = Layer(tokens=260, width=1032, top_k=4, local_experts=8, level=40)
    layers = {
        "bf16": small,
        "one of everything": Layer(tokens=1, width=8, top_k=1, local_experts=1),
        "rows without room": wide,
        "more slots than tokens": dataclasses.replace(small, slots=600),
        "tokens sent again": dataclasses.replace(wide, sends_again=True),
    }
    for ranks, (name, layer) in itertools.product((2, 4, 8), layers.items()):
        how: dict[str, Any] = {"run": eager_differs, "case": layer, "ranks": ranks, "cpu": False}
        yield Row(check=DIRECT, name=f"eager, R {ranks}: {name}", **how)
    for ranks in (2, 4, 8):
        again = layers["tokens sent again"]
        pair = [dataclasses.replace(one, microbatches_in_flight=3) for one in (small, again)]
        how = {"run": replay_differs, "case": pair[0], "more": (pair[1], replays), "ranks": ranks}
        yield Row(check=REPLAYS, name=f"{replays:,}, R {ranks}", cpu=False, **how)
        how = {"run": passes_differ, "case": AllPasses(), "ranks": ranks}
        yield Row(check=PASSES, name=f"R {ranks}", cpu=False, **how)


# The machine of each rank: two hosts, in turn, of unequal size; with rails, or one rank on each.
_HOSTS = "aabb", "abab", "aabbcc", "aaaabbbb", "aabbccdd"
_WITHOUT_RAILS = "aaab", "abcd"


def _across_hosts(replays: int) -> Iterator[Row]:
    """Yield ranks that pretend to be on several machines: whole models, and rails alone."""
    packed = {"experts": "packed", "capacity_pool": "store"}
    for machines in (*_HOSTS, *_WITHOUT_RAILS):
        ranks = len(machines)
        how: dict[str, Any] = {"machines": machines, "ranks": ranks}
        if ranks == 6:  # The models have 32 experts.
            continue
        for scopes in (WHOLE, PARTIAL):
            name = f"hosts {machines}, a store that overflows, {'+'.join(scopes)}"
            more = {"factor": 0.9, "num_layers": 4, "microbatches": 3, "options": packed}
            yield _replay(name, scopes=scopes, ep=ranks, **more, **how)
        yield _layer(f"packed, hosts {machines}", ep=ranks, **how, options=PaddedOptions(**packed))
    two: dict[str, Any] = {"machines": "aabb", "ranks": 4, "ep": 4}
    again = {"options": packed, "fields": RECOMPUTE, "microbatches": 3}
    yield _replay("hosts aabb, recompute moe", scopes=("moe",), **again, **two)
    biased = {"options": packed, "gpt_oss": True, **two}
    yield _replay("hosts aabb, all rows to one rank", idle="others", **biased)
    yield _replay("hosts aabb, a rank without tokens", idle="rank", **biased)
    yield _retry("hosts aabb", microbatches=3, **two)
    steps = 10 * replays  # Behind rails tokens are sent again.
    given = {"case": with_changes(Model(graph="layer", options=packed), two), "ranks": 4}
    given |= {"gpu": TRAINING | {"steps": steps}, "cpu": False, "run": memory_is_flat}
    yield Row(check=MEMORY, name=f"{steps:,} steps, hosts aabb", **given)
    case = GenerationCase(ep=4, experts="packed", uneven=True, machines="aabb")
    given: dict[str, Any] = {"case": case, "run": generates_as_stock, "gpu": _TEXT}
    yield Row(check=TEXT, name="hosts aabb, other T per rank", ranks=4, cpu=False, **given)
    for machines in _HOSTS:
        small = Layer(machines=machines)
        wide = dataclasses.replace(small, tokens=260, width=1032, top_k=4, local_experts=8)
        again = dataclasses.replace(wide, sends_again=True, microbatches_in_flight=3)
        how = {"ranks": len(machines), "cpu": False}
        for name, layer in {"": small, ", sent again": again}.items():
            yield Row(
                check=DIRECT, name=f"hosts {machines}{name}", run=eager_differs, case=layer, **how
            )
        pair = dataclasses.replace(small, microbatches_in_flight=3), again
        given = {"run": replay_differs, "case": pair[0], "more": (pair[1], replays)}
        yield Row(check=REPLAYS, name=f"{replays:,}, hosts {machines}", **given, **how)
